"""Read what evaluations left behind: reports with figures, and plots of studies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEPTH = 2  # folders between a root and a report at most

#: A row per pair, task and arm, with the names that `rows` gives.
Row = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """The figures of one run.

    Attributes
    ----------
    name
        For people.
    folder
        Where it lies.
    changed
        When, in seconds since 1970.
    pairs
        Pair -> task -> figures, as in ``metrics.json``.
    problem
        Why it cannot be read, as one line; empty if it can.
    """

    name: str
    folder: Path
    changed: float
    pairs: dict[str, dict[str, Any]] = field(default_factory=dict)
    problem: str = ""


def find_reports(roots: Mapping[str, Path]) -> list[Report]:
    """Reports below folders, by what each folder is called; of each the newest first."""
    found = []
    for called, root in roots.items():
        files = [path for path in _below(root, "metrics.json") if path.is_file()]
        reports = [_read(called, root, path) for path in files]
        found += sorted(reports, key=lambda report: -report.changed)
    return found


def find_plots(roots: Sequence[Path], word: str) -> list[Path]:
    """PNG files with a word in their name, the newest first."""
    paths = {path for root in roots for path in _below(root, "*.png") if word in path.stem}
    return sorted(paths, key=lambda path: -path.stat().st_mtime)


def _below(root: Path, pattern: str) -> Iterator[Path]:
    for depth in range(DEPTH + 1):
        yield from root.glob("/".join(["*"] * depth + [pattern]))


def _read(called: str, root: Path, path: Path) -> Report:
    inside = path.parent.relative_to(root).as_posix()
    name = called if inside == "." else f"{called}: {inside}"
    changed = path.stat().st_mtime
    try:
        pairs = _pairs(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        reason = " ".join(str(error).split())
        return Report(name, path.parent, changed, problem=f"'{path}' cannot be read: {reason}")
    return Report(name, path.parent, changed, pairs)


def _pairs(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Pairs with the tasks that hold figures."""
    found = {}
    for pair, content in metrics["pairs"].items():
        tasks = {name: task for name, task in content["tasks"].items() if task.get("arms")}
        if tasks:
            found[pair] = tasks
    return found


def rows(tasks: Mapping[str, Any]) -> list[Row]:
    """A pair's tasks as rows; what was not measured is None."""
    found = []
    for task, figures in tasks.items():
        score = figures.get("score", "f1")
        for arm, measured in figures["arms"].items():
            row: Row = {
                "task": task,
                "arm": arm,
                "questions": figures.get("questions"),
                "scored by": "F1" if score == "f1" else "accuracy",
                **_with_interval(measured, score, "score"),
                **_with_interval(measured, "retention", "retention"),
                **_with_interval(measured, "recovered", "recovered"),
            }
            row |= {name: measured.get(name) for name in ("em", "agreement", "tokens", "ms")}
            row["kl"], macs = measured.get("first_kl"), measured.get("macs")
            row["gmac"] = None if macs is None else macs / 1e9
            found.append(row)
    return found


def _with_interval(measured: Mapping[str, Any], name: str, called: str) -> Row:
    low, high = measured.get(f"{name}_95") or (None, None)
    return {called: measured.get(name), f"{called} low": low, f"{called} high": high}
