"""Where do translated layers hurt? Inject them window by window and watch what follows.

Two settings. *Replay* is that of Mixture-of-Translators (arXiv 2607.28979): the target runs
over the passages, only a window of its layers attends to translated KV. What an early window
gets wrong propagates through the layers above; behind a late one few layers are left to
correct it. *Boundary* is ours, without any replay: layers below a boundary keep native KV,
those at and above it get translated KV, and nothing is recomputed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cag.lm.cache import KV, Context
from cag.lm.loading import LM
from cag.lm.replay import Replayed, replay
from eval.arms import Bench
from eval.data import Question
from eval.measure import answer_nll, suffix_ids
from eval.metrics import bootstrap, mean, recovered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

#: How many of the passages' last tokens the shift at the top is measured over.
LAST_TOKENS = 16

#: ("native", 0), ("no_context", 0), ("replay", first layer) or ("boundary", layer).
Condition = tuple[str, int]


def run_injection(
    bench: Bench,
    questions: Sequence[Question],
    positions: Sequence[int] | None = None,
    *,
    width: int = 1,
    translator: str = "translated",
    on_example: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Measure what translated KV does in every window of layers, and above every boundary.

    Questions of one passage should follow each other: they share its replays.

    Parameters
    ----------
    positions
        First layers of the windows, and the boundaries; all by default. Boundary L, where
        everything is native, is always measured.
    width
        How many layers a window holds.
    translator
        Which of the bench's translators is studied.

    Returns
    -------
    dict
        Plain data. ``native_nll`` and ``no_context_nll`` in nats per answer token. Under
        ``replay`` (by ``position``) and ``boundary`` (by ``boundary``) a list with ``nll``,
        ``recovered``, ``nll_minus_native`` and its 95% interval. A replay also has, each a
        relative L2 distance from the native states: ``shift``, at the input of every layer
        and last at the top (L + 1 numbers), averaged over the passages' tokens;
        ``top_passage``, at the top over the last `LAST_TOKENS` passage tokens; ``top_suffix``,
        at the top over the suffix's tokens.
    """
    if not questions:
        raise ValueError("there are no questions to study")
    layers = bench.target.spec.layers
    windows = _windows(layers, positions, width)
    nll: dict[Condition, list[float]] = defaultdict(list)
    moved: dict[int, list[_Moved]] = defaultdict(list)
    done = 0
    for passages, group in groupby(questions, key=lambda question: question.passages):
        read = _Read.natively(bench, passages, translator)
        asked = [_Inquiry.over(bench, read, question) for question in group]
        for condition, replayed in _conditions(read, windows, width):
            for inquiry in asked:
                nll[condition].append(inquiry.nll(replayed.context))
                if condition[0] == "replay":
                    moved[condition[1]].append(_moved(read, replayed, inquiry))
        done += len(asked)
        on_example(done, len(questions))
    return {
        "reference": bench.reference.name,
        "target": bench.target.name,
        "translator": translator,
        "dtype": str(bench.target.dtype),
        "questions": len(questions),
        "layers": layers,
        "width": width,
        "last_tokens": LAST_TOKENS,
        "native_nll": mean(nll["native", 0]),
        "no_context_nll": mean(nll["no_context", 0]),
        "replay": [
            {"position": first, **_compared(nll, "replay", first), **_mean_move(moved[first])}
            for first in windows
        ],
        "boundary": [
            {"boundary": at, **_compared(nll, "boundary", at)} for at in (*windows, layers)
        ],
    }


def _conditions(
    read: _Read, windows: Sequence[int], width: int
) -> Iterator[tuple[Condition, Replayed]]:
    """Every condition and the context it gives, one at a time."""
    yield ("native", 0), read.native
    yield ("no_context", 0), Replayed(read.start, [])
    for first in windows:
        yield ("replay", first), read.replayed(range(first, first + width))
    for boundary in (*windows, read.lm.spec.layers):
        yield ("boundary", boundary), Replayed(read.spliced(boundary), [])


def _windows(layers: int, positions: Sequence[int] | None, width: int) -> list[int]:
    if not 1 <= width <= layers:
        raise ValueError(f"a window of {width} layers does not fit a model of {layers}")
    last = layers - width
    windows = list(range(last + 1)) if positions is None else sorted(set(positions))
    if not windows or windows[0] < 0 or windows[-1] > last:
        raise ValueError(f"windows must start at layers 0 to {last}, not at {windows}")
    return windows


# -- reading -------------------------------------------------------------------------------


@dataclass
class _Read:
    """Passages as the target reads them, and as the translator gives them."""

    lm: LM
    start: Context
    ids: list[int]
    native: Replayed
    own: KV
    translated: KV

    @classmethod
    @torch.no_grad()
    def natively(cls, bench: Bench, passages: Sequence[str], translator: str) -> _Read:
        lm, start = bench.target, bench.start(bench.target)
        ids = bench.tokens(lm, passages)
        native = replay(lm, start.fork(), ids, None, (), states=True)
        own = native.context.canonical(start.length, native.context.length)
        translated = bench.translation(translator, passages).to(own.keys.device, own.keys.dtype)
        return cls(lm, start, ids, native, own, translated)

    @torch.no_grad()
    def replayed(self, window: Sequence[int]) -> Replayed:
        """The target reads again, with translated KV in these layers."""
        return replay(self.lm, self.start.fork(), self.ids, self.translated, window, states=True)

    @torch.no_grad()
    def spliced(self, boundary: int) -> Context:
        """Native KV below the boundary, translated KV at and above it."""
        context = self.start.fork()
        context.append(self.translated.above(boundary, self.own))
        return context


@dataclass
class _Inquiry:
    """A question behind some context; `native` is the top state over its suffix (T, hidden)."""

    lm: LM
    suffix: list[int]
    answer: str
    native: Tensor

    @classmethod
    def over(cls, bench: Bench, read: _Read, question: Question) -> _Inquiry:
        inquiry = cls(
            read.lm, suffix_ids(bench, read.lm, question), question.answers[0], torch.empty(0)
        )
        inquiry.native = inquiry.top(read.native.context)
        return inquiry

    def nll(self, context: Context) -> float:
        """NLL of the answer, in nats per token."""
        return answer_nll(self.lm, context.fork(), self.suffix, self.answer)

    @torch.no_grad()
    def top(self, context: Context) -> Tensor:
        """What the LM head reads at the suffix's tokens, with shape (T, hidden_size)."""
        ids = torch.tensor([self.suffix], device=self.lm.device)
        states: Tensor = context.fork().run(ids, logits=None).last_hidden_state[0]
        return states


# -- measuring -----------------------------------------------------------------------------


@dataclass
class _Moved:
    """Relative distances from the native states; see `run_injection`."""

    shift: list[float]
    top_passage: float
    top_suffix: float


def relative_shift(found: Tensor, native: Tensor) -> Tensor:
    """L2 distance of states (T, hidden_size) as a share of the native norm, per token (T,)."""
    native = native.float()
    return (found.float() - native).norm(dim=-1) / native.norm(dim=-1).clamp_min(1e-9)


def _moved(read: _Read, replayed: Replayed, inquiry: _Inquiry) -> _Moved:
    pairs = zip(replayed.states, read.native.states, strict=True)
    shifts = [relative_shift(found, native) for found, native in pairs]
    suffix = relative_shift(inquiry.top(replayed.context), inquiry.native)
    return _Moved(
        [float(shift.mean()) for shift in shifts],
        float(shifts[-1][-LAST_TOKENS:].mean()),
        float(suffix.mean()),
    )


def _mean_move(moved: Sequence[_Moved]) -> dict[str, Any]:
    return {
        "shift": [mean(layer) for layer in zip(*(one.shift for one in moved), strict=True)],
        "top_passage": mean([one.top_passage for one in moved]),
        "top_suffix": mean([one.top_suffix for one in moved]),
    }


def _compared(nll: Mapping[Condition, list[float]], setting: str, at: int) -> dict[str, Any]:
    found, native, none = (nll[c] for c in ((setting, at), ("native", 0), ("no_context", 0)))
    differences = [a - b for a, b in zip(found, native, strict=True)]
    interval = bootstrap(lambda rows: mean([differences[i] for i in rows]), len(differences))
    return {
        "nll": mean(found),
        "recovered": recovered(mean(found), mean(native), mean(none)),
        "nll_minus_native": mean(differences),
        "nll_minus_native_95": list(interval),
    }


# -- drawing -------------------------------------------------------------------------------

#: Okabe and Ito's colours, which people with any colour vision can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot_injection(results: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Draw propagation, what is left at the top, and boundaries, into a PNG.

    Parameters
    ----------
    results
        What `run_injection` returned, by the name of the pair.
    """
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.ticker import MaxNLocator

    if not results:
        raise ValueError("there is nothing to draw")
    figure = Figure(figsize=(15, max(5.2, 2.4 * len(results))), layout="constrained")
    panels: Any = figure.subfigures(1, 3, width_ratios=(1.15, 1, 1))
    left, middle, right = panels
    _draw_propagation(left, results)
    deficit, window = middle.subplots(2, 1, sharex=True)
    boundary = right.subplots()
    same = len({result["layers"] for result in results.values()}) == 1
    for index, (name, result) in enumerate(results.items()):
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        _draw_deficit(deficit, result, same, style)
        _draw_recovered(window, name, result, "replay", same, style)
        _draw_recovered(boundary, name, result, "boundary", same, style)
    depth = "" if same else " [% of the depth]"
    deficit.set_title("Correction deficit and answer, by injected window")
    deficit.set_ylabel("relative shift at the top")
    window.set_xlabel(f"first injected layer{depth}")
    boundary.set_title("Native below the boundary, translated above")
    boundary.set_xlabel(f"boundary: lowest translated layer{depth}")
    for axes in (window, boundary):
        axes.set_ylabel("recovered answer NLL")
        axes.axhline(1, color="0.4", linewidth=0.8, linestyle=":")
    deficit.set_ylim(bottom=0)
    for axes in (deficit, window, boundary):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
    boundary.legend(fontsize="small", title_fontsize="small", title="reference → target")
    figure.savefig(out, dpi=150, format="png")


def _draw_propagation(panel: SubFigure, results: Mapping[str, Mapping[str, Any]]) -> None:
    """A heat map per pair: injected window x layer; grey where nothing can move."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    grids = {}
    for name, result in results.items():
        grid = np.array([row["shift"] for row in result["replay"]])
        first = np.array([row["position"] for row in result["replay"]])
        grids[name] = np.ma.masked_where(np.arange(grid.shape[1]) <= first[:, None], grid)
    top = max(1e-6, *(float(grid.max()) for grid in grids.values()))
    colours = colormaps["cividis"].with_extremes(bad="0.88")
    rows = panel.subplots(len(grids), 1, squeeze=False)[:, 0]
    for axes, (name, grid) in zip(rows, grids.items(), strict=True):
        image = axes.imshow(
            grid, aspect="auto", origin="lower", vmin=0, vmax=top, cmap=colours,
            interpolation="nearest",
        )  # fmt: skip
        positions = [row["position"] for row in results[name]["replay"]]
        ticks = range(0, len(positions), max(1, len(positions) // 6))
        axes.set_yticks(list(ticks), [str(positions[i]) for i in ticks])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("first injected layer")
        axes.set_title(name, fontsize=9)
    rows[-1].set_xlabel("input of layer (last: output of the top); grey cannot move")
    panel.colorbar(image, ax=list(rows), label="relative shift of the passage's hidden states")


#: What is drawn of the deficit, how, and what it is called.
DEFICITS = (("top_suffix", "-", "suffix tokens"), ("top_passage", "--", "last passage tokens"))


def _draw_deficit(axes: Axes, result: Mapping[str, Any], same: bool, style: dict[str, Any]) -> None:
    """Both deficits; the legend explains the lines once, the colours are explained elsewhere."""
    at = _along(result, "replay", same)
    for key, line, _ in DEFICITS:
        axes.plot(at, [row[key] for row in result["replay"]], line, markersize=4, **style)
    if axes.get_legend() is None:
        handles = [axes.plot([], [], line, color="0.3")[0] for _, line, _ in DEFICITS]
        axes.legend(
            handles,
            [what for *_, what in DEFICITS],
            fontsize="small",
            title_fontsize="small",
            title="over the",
        )


def _draw_recovered(
    axes: Axes,
    name: str,
    result: Mapping[str, Any],
    setting: str,
    same: bool,
    style: dict[str, Any],
) -> None:
    """Recovered shares, with the 95% interval of the NLL's distance from native as a band."""
    at = _along(result, setting, same)
    worth = result["no_context_nll"] - result["native_nll"]
    low, high = (
        [1 - row["nll_minus_native_95"][side] / worth for row in result[setting]]
        for side in (1, 0)
    )  # fmt: skip
    axes.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)
    values = [row["recovered"] for row in result[setting]]
    axes.plot(at, values, "-", markersize=4, label=name, **style)


def _along(result: Mapping[str, Any], setting: str, same: bool) -> list[float]:
    """Layers, or their relative depth in percent where models differ in how many they have."""
    key = {"replay": "position", "boundary": "boundary"}[setting]
    scale = 1.0 if same else 100 / result["layers"]
    return [row[key] * scale for row in result[setting]]
