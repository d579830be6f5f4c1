"""Draw finished answers: text, path, figures, how far they agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import streamlit as st

from app import charts, shared, sources
from app.request import Request
from cag.answer import Answer, Comparison
from cag.retrieval import Source
from cag.scoring import normalise

TITLES = {
    "translated": "From translated caches",
    "direct": "Reading the text",
    "own": "From the target's own caches",
    "fallback": "Reading the text instead",
}
COLOURS = {"translated": "green", "direct": "blue", "own": "violet", "fallback": "orange"}


@dataclass
class Answered:
    """What one target answered, on each path; or why it could not."""

    target: str
    answers: list[Answer] = field(default_factory=list)
    error: str = ""

    def by_path(self, path: str) -> Answer | None:
        """The answer that came about in that way."""
        return next((answer for answer in self.answers if answer.path == path), None)


@dataclass
class Result:
    """Everything a comparison found, and how long finding the passages took."""

    request: Request
    sources: list[Source]
    retrieve_ms: float
    answered: list[Answered]

    @property
    def answers(self) -> list[Answer]:
        """Of all targets."""
        return [answer for answered in self.answered for answer in answered.answers]


def draw(result: Result) -> None:
    """Answers by target, what they cost, and where they come from."""
    for answered in result.answered:
        _target(answered)
    if result.answers:
        _costs(result)
    if result.sources:
        st.subheader("Sources", anchor=False)
        sources.draw_sources(result.sources)


def heading(target: str) -> None:
    """A target's name above its answers."""
    st.subheader(shared.literal(target), anchor=False)


def caption(path: str) -> None:
    """How an answer comes about, above it."""
    st.markdown(f":{COLOURS[path]}-badge[{path}] :small[{TITLES[path]}]")


def _target(answered: Answered) -> None:
    heading(answered.target)
    if answered.error:
        st.error(shared.literal(answered.error))
    if answered.answers:
        for column, answer in zip(st.columns(len(answered.answers)), answered.answers, strict=True):
            with column.container(border=True, height="stretch"):
                _card(answer)
    one, direct = answered.by_path("translated"), answered.by_path("direct")
    if one is not None and direct is not None:
        _comparison(Comparison(one, direct))


def _card(answer: Answer) -> None:
    caption(answer.path)
    st.text(answer.answer or "(no answer)")
    times, tokens = answer.timings, answer.tokens
    read = f" ({tokens.refreshed:,} of them read over their translation)" * bool(tokens.refreshed)
    kept = f" · {tokens.kept:,} translated before" * bool(tokens.kept)
    st.caption(
        f"first token {shared.milliseconds(times.first_token)} · "
        f"total {shared.milliseconds(times.total)} · {times.tokens_per_second:.0f} tokens/s · "
        f"{tokens.target_forward:,g} tokens through the layers" + kept,
        help=f"The prompt has {tokens.prefix:,} tokens before, {tokens.passage:,} in{read} and "
        f"{tokens.suffix:,} after the passages; {tokens.generated:,} were generated.",
    )
    if answer.reason:
        (st.warning if answer.path == "fallback" else st.info)(shared.literal(answer.reason))


def _comparison(compared: Comparison) -> None:
    """The translated answer against the direct one, in four figures."""
    one, direct = compared.translated, compared.direct
    sooner = direct.timings.first_token / max(one.timings.first_token, 1e-9)
    same = normalise(one.answer) == normalise(direct.answer)
    kl = compared.first_token_kl
    with st.container(horizontal=True):
        st.metric(
            "First token",
            f"{sooner:.1f}× sooner" if sooner >= 1 else f"{1 / sooner:.1f}× later",
            help="Translated against direct, without finding the passages.",
        )
        st.metric(
            "Tokens through the layers",
            f"{one.tokens.target_forward:,g} of {direct.tokens.target_forward:,g}",
            help="What the target reads and writes on the translated path, of what it does on "
            "the direct path.",
        )
        st.metric(
            "Token F1",
            f"{compared.token_f1:.2f}",
            help="Words that the two answers share. "
            + ("Both give the same answer." if same else "They do not give the same answer."),
        )
        st.metric(
            "First-token KL",
            "–" if math.isnan(kl) else f"{kl:.3f} nats",
            help="How far the first token's distribution is from the direct path's; 0 is equal.",
        )


def _costs(result: Result) -> None:
    st.subheader("What the answers cost", anchor=False)
    left, right = st.columns(2)
    left.altair_chart(charts.first_token_chart(result.answers), width="stretch")
    right.altair_chart(charts.tokens_chart(result.answers), width="stretch")
    found = len(result.sources)
    st.caption(
        f"Finding {found} passage{'s' * (found != 1)} took "
        f"{shared.milliseconds(result.retrieve_ms)}, the same for every answer and in none of "
        "the bars."
    )
    with st.expander("All figures"):
        st.dataframe(table(result.answered), hide_index=True, column_config=_COLUMNS)


def table(answered: Sequence[Answered]) -> list[dict[str, object]]:
    """A row per answer; agreement is with the direct answer of the same target."""
    rows = []
    for one in answered:
        direct = one.by_path("direct")
        for answer in one.answers:
            times = answer.timings
            row: dict[str, object] = {"target": answer.target, "path": answer.path}
            for part in (*charts.PARTS, "first_token", "total", "tokens_per_second"):
                row[part] = getattr(times, part)
            row["tokens"] = answer.tokens.target_forward
            compared = None if direct is None else Comparison(answer, direct)
            row["f1"] = compared and compared.token_f1
            row["kl"] = compared and compared.first_token_kl
            rows.append(row)
    return rows


_COLUMNS = {
    **{
        part: st.column_config.NumberColumn(f"{part.replace('_', ' ')} [ms]", format="%.1f")
        for part in (*charts.PARTS, "first_token", "total")
    },
    "tokens_per_second": st.column_config.NumberColumn("tokens/s", format="%.1f"),
    "tokens": st.column_config.NumberColumn("tokens through the layers", format="%.0f"),
    "f1": st.column_config.NumberColumn("F1 with direct", format="%.2f"),
    "kl": st.column_config.NumberColumn("first-token KL [nats]", format="%.3f"),
}
