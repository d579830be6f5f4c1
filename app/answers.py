"""Draw finished answers: text, path, figures, timings, sources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd  # here, because altair finds it half imported when two sessions draw at once
import streamlit as st

from app import shared
from cag.answer import Answer, Comparison
from cag.retrieval import Source

TITLES = {
    "translated": "From translated caches",
    "direct": "Reading the text",
    "own": "From the target's own caches",
    "fallback": "Reading the text, as a fallback",
}
COLOURS: dict[str, Any] = {
    "translated": "green",
    "direct": "blue",
    "own": "violet",
    "fallback": "orange",
}
PARTS = {  # with colours that the colour-blind can tell apart (Okabe and Ito)
    "retrieve": "#999999",
    "load": "#56b4e9",
    "align": "#e69f00",
    "translate": "#009e73",
    "prefill": "#0072b2",
}


def draw(answers: Sequence[Answer]) -> None:
    """Answers side by side, and below what they have in common."""
    for column, answer in zip(st.columns(len(answers)), answers, strict=True):
        with column:
            _card(answer)
    if len(answers) == 2:
        _comparison(Comparison(*answers))
    st.subheader("Time to the first token", anchor=False)
    st.altair_chart(timing_chart(answers), width="stretch")
    st.subheader("Sources", anchor=False)
    for number, source in enumerate(answers[0].sources, 1):
        _source(number, source)


def _card(answer: Answer) -> None:
    st.subheader(TITLES[answer.path], anchor=False)
    by = answer.translator or answer.target
    st.markdown(f":{COLOURS[answer.path]}-badge[{answer.path}] {shared.code(by)}")
    st.text(answer.answer or "(no answer)")
    times, tokens = answer.timings, answer.tokens
    columns = st.columns(3)
    columns[0].metric("First token", _ms(times.first_token), help="From question to first token.")
    columns[1].metric(
        "Total", _ms(times.total), help=f"{times.tokens_per_second:.1f} tokens/s after the first."
    )
    columns[2].metric(
        "Tokens read",
        f"{tokens.target_forward:,g}",
        help="Tokens that passed the target's layers, generated ones included. The prompt has "
        f"{tokens.prefix:,} before, {tokens.passage:,} in and {tokens.suffix:,} after the "
        f"passages; {tokens.generated:,} were generated.",
    )
    if answer.reason:
        (st.warning if answer.path == "fallback" else st.info)(shared.literal(answer.reason))


def _comparison(compared: Comparison) -> None:
    one, other = compared.translated, compared.direct
    if [s.passage.id for s in one.sources] != [s.passage.id for s in other.sources]:
        st.warning("The store changed between the two answers; ask again to compare them.")
        return
    kl = compared.first_token_kl
    columns = st.columns(3)
    columns[0].metric(
        f"First token, direct / {one.path}",
        f"{other.timings.first_token / max(one.timings.first_token, 1e-9):.2f}×",
        help="Above 1: the direct path takes longer.",
    )
    columns[1].metric(
        "Token F1", f"{compared.token_f1:.2f}", help="Words shared by the two answers."
    )
    columns[2].metric(
        "First-token KL",
        "–" if math.isnan(kl) else f"{kl:.3f} nats",
        help="How far the first token's distribution is from the direct path's; 0 is equal.",
    )


def timing_chart(answers: Sequence[Answer]) -> alt.Chart:
    """One stacked bar per path: milliseconds by part."""
    rows = [
        {"path": answer.path, "part": part, "order": order, "ms": getattr(answer.timings, part)}
        for answer in answers
        for order, part in enumerate(PARTS)
    ]
    return (
        alt.Chart(pd.DataFrame(rows), height=alt.Step(38))
        .mark_bar()
        .encode(
            x=alt.X("ms:Q", title="milliseconds", axis=alt.Axis(tickCount=6)),
            y=alt.Y("path:N", title=None, sort=None),
            color=alt.Color(
                "part:N",
                title=None,
                scale=alt.Scale(domain=list(PARTS), range=list(PARTS.values())),
                legend=alt.Legend(orient="top"),
            ),
            order="order:O",
            tooltip=["path:N", "part:N", alt.Tooltip("ms:Q", format=",.1f")],
        )
    )


def _source(number: int, source: Source) -> None:
    passage = source.passage
    title = shared.code(passage.title) if passage.title.strip() else ""
    with st.expander(f"{number} · {title} · score {source.score:.2f}"):
        place = f"{passage.document}, characters {passage.start:,}–{passage.end:,}"
        st.caption(shared.code(place))
        st.code(passage.text, language=None, wrap_lines=True)


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.3g} s"
