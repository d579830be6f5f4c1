"""Plots of a run: PNG files that can be read in black and white and by any eye."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cag.errors import CagError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, which people with any colour vision can tell apart; grey for yellow.
COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C8C8C")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "///", "...", "xxx")
#: So many bars stand side by side.
BARS = 32

#: Task -> its figures, as in ``metrics.json``.
Tasks = Mapping[str, Mapping[str, Any]]


class NoPlotting(CagError):
    """Plots were asked for where there is no matplotlib."""


def require_matplotlib() -> None:
    """Refuse before anything is measured rather than after.

    Raises
    ------
    NoPlotting
        If matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise NoPlotting("plots need matplotlib; run `pip install 'cag[eval]'`")


def plot_retention(tasks: Tasks, arms: Sequence[str], path: Path) -> None:
    """Bars of every arm's score as a share of native, per task, with 95% intervals."""
    shown = [arm for arm in arms if arm != "native"]
    per_row = min(len(tasks), max(1, BARS // max(1, len(shown))))
    names = list(tasks)
    rows = [names[at : at + per_row] for at in range(0, len(names), per_row)]
    width = max(5.0, 1.2 + per_row * (0.26 * len(shown) + 0.5))
    figure = _figure(width + 2.2, 3.8 * len(rows) + 0.4)
    panels = figure.subplots(len(rows), 1, squeeze=False, sharey=True).flatten()
    for axes, row in zip(panels, rows, strict=True):
        _draw_retention(axes, {name: tasks[name] for name in row}, arms, shown)
        axes.set_xlim(-0.6, per_row - 0.4)
    tops = [_with_interval(f["arms"].get(a, {}), "retention")[1] for f in tasks.values()
            for a in shown]  # fmt: skip
    panels[0].set_ylim(0, 1.05 * min(2.5, max([1.0, *(top for _, top in tops)])))
    _save(figure, path)


def _draw_retention(axes: Axes, tasks: Tasks, arms: Sequence[str], shown: Sequence[str]) -> None:
    width = 0.85 / max(1, len(shown))
    for index, arm in enumerate(shown):
        places, heights, below, above = [], [], [], []
        for at, figures in enumerate(tasks.values()):
            value, (low, high) = _with_interval(figures["arms"].get(arm, {}), "retention")
            if value is None:
                continue
            places.append(at + (index - (len(shown) - 1) / 2) * width)
            heights.append(value)
            below.append(max(0.0, value - low))
            above.append(max(0.0, high - value))
        axes.bar(places, heights, width, label=arm, **_bar_style(list(arms).index(arm)))
        axes.errorbar(
            places, heights, [below, above], fmt="none", ecolor="0.25", elinewidth=1, capsize=2
        )
    axes.axhline(1.0, color="0.3", linewidth=0.9, linestyle="--", label="native")
    axes.set_xticks(range(len(tasks)), [_headline(t, f) for t, f in tasks.items()])
    axes.set_ylabel("score as a share of native\n(95% interval)")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def plot_cost(tasks: Tasks, arms: Sequence[str], path: Path) -> None:
    """Score of every arm against what a query costs, a panel per task."""
    columns = min(2, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = _figure(4.4 * columns + 2.2, 3.6 * rows + 0.4)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (task, figures) in zip(panels, tasks.items(), strict=False):
        _draw_cost(axes, figures, arms)
        axes.set_title(_headline(task, figures).replace("\n", ", "), fontsize=10)
    for axes in panels[len(tasks) :]:
        axes.set_axis_off()
    _save(figure, path)


def _draw_cost(axes: Axes, figures: Mapping[str, Any], arms: Sequence[str]) -> None:
    score = figures["score"]
    for index, arm in enumerate(arms):
        found = figures["arms"].get(arm)
        if found is None:
            continue
        value, span = _with_interval(found, score)
        if value is None:
            continue
        axes.errorbar(
            found["macs"] / 1e9, value, [[value - span[0]], [span[1] - value]],
            label=arm, markersize=6, capsize=2, elinewidth=1, linestyle="none",
            **_marker_style(index),
        )  # fmt: skip
    if "commonest_answer" in figures:
        axes.axhline(
            figures["commonest_answer"], color="0.4", linewidth=0.9, linestyle=":",
            label="always the commonest answer",
        )  # fmt: skip
    axes.set_xscale("log")
    _label_decades(axes)
    axes.set_xlabel("10⁹ multiply-accumulates per query")
    axes.set_ylabel("F1" if score == "f1" else "accuracy")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _label_decades(axes: Axes) -> None:
    """Plain numbers, also where the axis spans less than a power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_xlim()
    few = math.log10(high / low) > 1.5
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if few else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def plot_routing(tasks: Tasks, path: Path) -> None:
    """Share of the mixing weights that each expert gets, per task."""
    routed = {task: f["routing"] for task, f in tasks.items() if f.get("routing")}
    experts = max(len(statistics["weight"]) for statistics in routed.values())
    width = 0.8 / experts
    figure = _figure(max(5.0, 1.4 + 1.2 * len(routed)) + 1.6, 3.4)
    axes = figure.subplots()
    for expert in range(experts):
        places = [at + (expert - (experts - 1) / 2) * width for at in range(len(routed))]
        shares = [statistics["weight"][expert] for statistics in routed.values()]
        axes.bar(places, shares, width, label=f"expert {expert + 1}", **_bar_style(expert + 1))
    axes.axhline(1 / experts, color="0.3", linewidth=0.9, linestyle="--", label="even use")
    axes.set_xticks(range(len(routed)), list(routed))
    axes.set_ylabel("share of the mixing weights")
    axes.set_ylim(bottom=0)
    _save(figure, path)


# -- style ---------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Figure:
    require_matplotlib()
    from matplotlib.figure import Figure  # slow to import; needs no display

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    """One legend for all panels, outside of them."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()), list(handles), loc="outside right upper", fontsize=9, frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format="png")


def _bar_style(index: int) -> dict[str, Any]:
    hatch = HATCHES[index // len(COLOURS) % len(HATCHES)]
    return {"color": COLOURS[index % len(COLOURS)], "hatch": hatch, "edgecolor": "white"}


def _marker_style(index: int) -> dict[str, Any]:
    marker = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
    return {"color": COLOURS[index % len(COLOURS)], "marker": marker}


def _headline(task: str, figures: Mapping[str, Any]) -> str:
    score = "F1" if figures["score"] == "f1" else "accuracy"
    return f"{task}\n{score}, n = {figures['questions']}"


def _with_interval(
    figures: Mapping[str, Any], name: str
) -> tuple[float | None, tuple[float, float]]:
    """A figure and its interval, which is the figure itself where there is none."""
    value = figures.get(name)
    if value is None:
        return None, (0.0, 0.0)
    low, high = figures.get(f"{name}_95") or (value, value)
    return value, (low, high)
