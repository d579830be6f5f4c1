"""From logged answers to figures: means, paired intervals, controls and comparisons."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cag import lines
from eval import metrics
from eval.identity import read_config

Row = dict[str, Any]

#: Baselines that `translated` is compared with, and the control of every refreshing arm.
BASELINES = ("ridge", "single_projection", "shared_latent")
#: The largest NLL difference, in nats, that two ways of computing the same thing may show.
SAME = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}


def read_log(path: Path) -> dict[str, Row]:
    """Logged rows by question; of several the last, with the arms of those before."""
    rows: dict[str, Row] = {}
    for row in lines.read(path):
        if "id" in row and "arms" in row:
            before = rows.get(row["id"], {"arms": {}})
            rows[row["id"]] = {**row, "arms": {**before["arms"], **row["arms"]}}
    return rows


def summarise_folder(folder: Path) -> dict[str, Any]:
    """Everything that a run's logs say, for `metrics.json`.

    Raises
    ------
    OtherRun
        If the folder holds no run.
    """
    config = read_config(folder / "config.json")
    pairs: dict[str, Any] = {}
    seconds = 0.0
    for pair, described in config["pairs"].items():
        tasks = {}
        for task in config["tasks"]:
            rows = list(read_log(folder / pair / f"{task}.jsonl").values())
            if not rows:
                continue
            seconds += sum(arm["seconds"] for row in rows for arm in row["arms"].values())
            dtype = described["target"]["dtype"]
            tasks[task] = summarise(rows, seed=config["seed"], same=SAME.get(dtype, 0.1))
            noted = folder / pair / f"{task}.routing.json"
            if noted.exists():
                tasks[task]["routing"] = json.loads(noted.read_text(encoding="utf-8"))
        pairs[pair] = {"tasks": tasks}
    return plain({"hours": seconds / 3600, "pairs": pairs})


def summarise(
    rows: Sequence[Row], arms: Sequence[str] | None = None, *, seed: int = 0, same: float = 1e-3
) -> dict[str, Any]:
    """Figures of one task.

    Only questions that every arm answered count, so that everything is paired.

    Parameters
    ----------
    arms
        By default all that any row holds.
    same
        See `SAME`.
    """
    names = list(arms or dict.fromkeys(name for row in rows for name in row["arms"]))
    skipped = sum("skipped" in row for row in rows)
    kept = [r for r in rows if "skipped" not in r and all(name in r["arms"] for name in names)]
    summary: dict[str, Any] = {"questions": len(kept), "skipped": skipped}
    if not kept:
        return {**summary, "arms": {}}
    table = _Table(kept, names, seed)
    summary |= {"score": table.score, "choices": table.choices}
    if table.closed:
        gold = Counter(row["answers"][0] for row in kept)
        summary["commonest_answer"] = gold.most_common(1)[0][1] / len(kept)
    summary["arms"] = {name: table.arm(name) for name in names}
    summary["controls"] = table.controls(same)
    summary["comparisons"] = table.comparisons()
    return summary


class _Table:
    """Paired columns of one task: a value per question and arm."""

    def __init__(self, rows: Sequence[Row], names: Sequence[str], seed: int) -> None:
        self._rows, self._names, self._seed = rows, names, seed
        self.closed = all(row["choices"] for row in rows)
        self.score = "right_mean" if self.closed else "f1"
        self.choices = sorted({len(row["choices"]) for row in rows})

    def column(self, name: str, value: str) -> list[float]:
        return [row["arms"][name][value] for row in self._rows]

    def known(self, name: str, value: str) -> list[float] | None:
        """The column, or None where a question lacks it."""
        values = self.column(name, value)
        return None if None in values else values

    def gain(self, name: str) -> list[float]:
        """What an arm's score is worth: above chance, or above no context."""
        score = self.column(name, self.score)
        if self.closed:
            rows = zip(score, self._rows, strict=True)
            return [metrics.above_chance(right, row["choices"]) for right, row in rows]
        none = self.column("no_context", self.score)
        return [found - without for found, without in zip(score, none, strict=True)]

    def arm(self, name: str) -> dict[str, Any]:
        """One line of the table."""
        seed = self._seed
        values = ["right_sum", "right_mean", "right_generated"] if self.closed else ["f1", "em"]
        values += ["nll", "tokens", "macs", "ms"]
        figures: dict[str, Any] = {v: metrics.mean(self.column(name, v)) for v in values}
        for value in (self.score, "nll"):
            figures[f"{value}_95"] = metrics.mean_interval(self.column(name, value), seed)
        kl = self.known(name, "first")
        figures["first_kl"] = None if kl is None else metrics.mean(kl)
        if self.closed or "no_context" in self._names:
            gain = self.gain(name)
            figures["gain"] = metrics.mean(gain)
            figures["gain_95"] = metrics.mean_interval(gain, seed)
        if "native" in self._names:
            figures |= self._against_native(name)
        return figures

    def _against_native(self, name: str) -> dict[str, Any]:
        score, native = (self.column(n, self.score) for n in (name, "native"))
        figures: dict[str, Any] = {
            "agreement": metrics.mean(self._agreement(name)),
            "difference": metrics.mean(score) - metrics.mean(native),
            "difference_95": metrics.difference_interval(score, native, self._seed),
            "retention": metrics.ratio(metrics.mean(score), metrics.mean(native)),
            "retention_95": metrics.retention_interval(score, native, self._seed),
        }
        if self.closed or "no_context" in self._names:
            gain, whole = self.gain(name), self.gain("native")
            figures["gain_retention"] = metrics.ratio(metrics.mean(gain), metrics.mean(whole))
            figures["gain_retention_95"] = metrics.retention_interval(gain, whole, self._seed)
        if "no_context" in self._names:
            figures |= self._recovered(name)
        return figures

    def _recovered(self, name: str) -> dict[str, Any]:
        """The share of what context is worth; None where it is worth nothing to native itself."""
        found, native, none = (self.column(n, "nll") for n in (name, "native", "no_context"))
        share = metrics.ratio(
            metrics.mean(none) - metrics.mean(found), metrics.mean(none) - metrics.mean(native)
        )
        interval = metrics.recovered_interval(found, native, none, self._seed)
        return {"recovered": share, "recovered_95": interval}

    def _agreement(self, name: str) -> list[float]:
        arms = [(row["arms"][name], row["arms"]["native"]) for row in self._rows]
        if self.closed:
            return [float(found["mean"] == native["mean"]) for found, native in arms]
        return [metrics.agrees(found["answer"], native["answer"]) for found, native in arms]

    # -- does it stand? --------------------------------------------------------------------

    def controls(self, same: float) -> dict[str, Any]:
        """Whether the controls behave as they must."""
        found: dict[str, Any] = {}
        if {"wrong_passage", "no_context"} <= set(self._names):
            compared = self._compared("wrong_passage", "no_context")
            nll = self.column("no_context", "nll"), self.column("wrong_passage", "nll")
            compared["nll_gain"] = metrics.mean(nll[0]) - metrics.mean(nll[1])
            compared["nll_gain_95"] = metrics.difference_interval(*nll, self._seed)
            compared["holds"] = compared["difference_95"][0] <= 0
            compared["nll_holds"] = compared["nll_gain_95"][0] <= 0
            found["wrong_passage"] = compared
        if {"replay_plain", "native"} <= set(self._names):
            pairs = zip(*(self.column(n, "nll") for n in ("replay_plain", "native")), strict=True)
            largest = max(abs(one - other) for one, other in pairs)
            agreement = metrics.mean(self._agreement("replay_plain"))
            found["replay_plain"] = {
                "agreement": agreement,
                "largest_nll_difference": largest,
                "holds": largest <= same and agreement == 1,
            }
        return found

    def comparisons(self) -> list[dict[str, Any]]:
        """Arms against those they have to beat, question by question."""
        wanted = [("translated", baseline) for baseline in BASELINES]
        refreshed = [n for n in self._names if n.startswith("refresh_")]
        wanted += [(name, name.replace("refresh_", "only_", 1)) for name in refreshed]
        wanted += [(name, "translated") for name in refreshed]
        return [
            {"arm": arm, "against": other, **self._compared(arm, other)}
            for arm, other in wanted
            if arm in self._names and other in self._names
        ]

    def _compared(self, arm: str, other: str) -> dict[str, Any]:
        score, against = (self.column(n, self.score) for n in (arm, other))
        compared: dict[str, Any] = {
            "difference": metrics.mean(score) - metrics.mean(against),
            "difference_95": metrics.difference_interval(score, against, self._seed),
        }
        if self.closed or "no_context" in self._names:
            gain, less = self.gain(arm), self.gain(other)
            compared["gain_ratio"] = metrics.ratio(metrics.mean(gain), metrics.mean(less))
            compared["gain_ratio_95"] = metrics.retention_interval(gain, less, self._seed)
        return compared


def plain(value: Any) -> Any:
    """The same without tuples, and with None for what is not a number."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        inner = [plain(one) for one in value]
        return None if inner == [None, None] else inner
    return None if isinstance(value, float) and not math.isfinite(value) else value
