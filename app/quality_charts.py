"""Charts of evaluation reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd  # here, because altair finds it half imported when two sessions draw at once

from app.reports import Row

Layers = alt.LayerChart | alt.FacetChart

#: Colours that show on light and on dark; what is not named here shares the last ones.
COLOURS = {
    "native": "#8c8c8c",
    "translated": "#009e73",
    "ridge": "#e69f00",
    "single_projection": "#d55e00",
    "shared_latent": "#cc79a7",
    "reference": "#56b4e9",
    "no_context": "#b8a800",
    "wrong_passage": "#3d7ebf",
}
_OTHERS = ("#a6761d", "#7570b3", "#66a61e", "#e7298a")


def retention_chart(rows: Sequence[Row], by: str) -> Layers:
    """Bars of the score as a share of native, with 95% intervals and a line where they are equal.

    Parameters
    ----------
    by
        What the bars are: ``arm`` or ``task``.
    """
    known = [row for row in rows if row["retention"] is not None and row["arm"] != "native"]
    base = alt.Chart(pd.DataFrame(known, columns=_columns(rows)), height=alt.Step(26))
    y = alt.Y(f"{by}:N", title=None, sort=None, axis=alt.Axis(labelLimit=120))
    tooltip: list[Any] = [
        "task:N",
        "arm:N",
        *(alt.Tooltip(f"{n}:Q", format=".3f") for n in _RETENTION),
    ]
    bars = base.mark_bar().encode(
        x=alt.X(
            "retention:Q",
            title="score as a share of native, 95% interval",
            axis=alt.Axis(tickCount=6),
        ),
        y=y,
        color=_colour(rows, legend=None),
        tooltip=tooltip,
    )
    ends = base.encode(x="retention low:Q", x2="retention high:Q", y=y, tooltip=tooltip)
    # dark within light, so that it shows on any bar and on any background
    intervals = ends.mark_rule(strokeWidth=4, color="#ddd"), ends.mark_rule(color="#222")
    native = alt.Chart(pd.DataFrame({"x": [1.0]})).mark_rule(strokeDash=[5, 4], color="#888")
    return alt.layer(bars, *intervals, native.encode(x="x:Q"))


_RETENTION = ("retention", "retention low", "retention high")


def cost_chart(rows: Sequence[Row]) -> Layers:
    """Score of every arm against multiply-accumulates per question."""
    known = [row for row in rows if row["score"] is not None and row["gmac"]]
    base = alt.Chart(pd.DataFrame(known, columns=_columns(rows)), height=360)
    x = alt.X("gmac:Q", title="10⁹ multiply-accumulates per question", scale=_log(known))
    tooltip = [
        "arm:N",
        *(alt.Tooltip(f"{name}:Q", format=".3f") for name in ("score", "score low", "score high")),
        alt.Tooltip("gmac:Q", format=",.2f"),
    ]
    colour = _colour(rows, alt.Legend(orient="bottom", columns=2, symbolLimit=20))
    intervals = base.mark_rule().encode(
        x=x, y="score low:Q", y2="score high:Q", color=colour, tooltip=tooltip
    )
    points = base.mark_point(filled=True, size=110, opacity=1).encode(
        x=x,
        y=alt.Y("score:Q", title=known[0]["scored by"] if known else "score"),
        color=colour,
        tooltip=tooltip,
    )
    return alt.layer(intervals, points)


def _log(rows: Sequence[Row]) -> alt.Scale:
    values = [row["gmac"] for row in rows] or [1.0]
    return alt.Scale(type="log", domain=[0.7 * min(values), 1.4 * max(values)])


def _colour(rows: Sequence[Row], legend: alt.Legend | None = None) -> alt.Color:
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    others = [arm for arm in arms if arm not in COLOURS]
    colours = COLOURS | {arm: _OTHERS[at % len(_OTHERS)] for at, arm in enumerate(others)}
    scale = alt.Scale(domain=arms, range=[colours[arm] for arm in arms])
    return alt.Color("arm:N", title=None, scale=scale, legend=legend)


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(rows[0]) if rows else []
