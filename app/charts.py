"""Charts of answers. Colours are those of Okabe and Ito that show on light and on dark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd  # here, because altair finds it half imported when two sessions draw at once

from cag.answer import Answer

PARTS = {
    "load": "#56b4e9",
    "align": "#e69f00",
    "translate": "#009e73",
    "prefill": "#3d7ebf",
}
KINDS = {"prompt": "#3d7ebf", "generated": "#cc79a7"}
_STEP = 34  # pixels per bar


def first_token_chart(answers: Sequence[Answer]) -> alt.Chart:
    """One stacked bar per answer: milliseconds to the first token by part."""
    rows = [
        {"answer": label, "part": part, "order": order, "value": getattr(answer.timings, part)}
        for label, answer in _labelled(answers)
        for order, part in enumerate(PARTS)
    ]
    return _bars(rows, PARTS, "milliseconds to the first token", ",.1f")


def tokens_chart(answers: Sequence[Answer]) -> alt.Chart:
    """One stacked bar per answer: tokens that passed the target's layers."""
    rows = []
    for label, answer in _labelled(answers):
        generated = min(answer.tokens.generated, answer.tokens.target_forward)
        values = {"prompt": answer.tokens.target_forward - generated, "generated": generated}
        rows += [
            {"answer": label, "part": part, "order": order, "value": values[part]}
            for order, part in enumerate(KINDS)
        ]
    return _bars(rows, KINDS, "tokens through the target's layers", ",.0f")


def _labelled(answers: Sequence[Answer]) -> list[tuple[str, Answer]]:
    """Answers with labels; the target is named only where there are several."""
    several = len({answer.target for answer in answers}) > 1
    return [(f"{a.target}|{a.path}" if several else a.path, a) for a in answers]


def _bars(
    rows: list[dict[str, Any]], colours: dict[str, str], title: str, figure: str
) -> alt.Chart:
    return (
        alt.Chart(pd.DataFrame(rows), height=alt.Step(_STEP))
        .mark_bar()
        .encode(
            x=alt.X("value:Q", title=title, axis=alt.Axis(tickCount=5)),
            y=alt.Y(
                "answer:N",
                title=None,
                sort=None,
                axis=alt.Axis(labelExpr="split(datum.label, '|')", labelLimit=150),
            ),
            color=alt.Color(
                "part:N",
                title=None,
                scale=alt.Scale(domain=list(colours), range=list(colours.values())),
                legend=alt.Legend(orient="top", columns=2, symbolType="square"),
            ),
            order="order:O",
            tooltip=["answer:N", "part:N", alt.Tooltip("value:Q", format=figure)],
        )
    )
