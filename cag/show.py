"""How the command line draws things for people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from cag.answer import Answer, Comparison
    from cag.ingest import IngestReport
    from cag.ingest import Progress as IngestProgress
    from cag.lm.pull import ModelStatus

# documents and answers may hold anything, so nothing in them is taken as markup
_width = None if sys.stdout.isatty() else 4096  # tables are not cut where nobody looks
_out = Console(highlight=False, soft_wrap=True, markup=False, width=_width)
_err = Console(stderr=True, highlight=False, markup=False)


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for stages of known or unknown length."""
    if quiet or not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_err, transient=True) as bars:
        task = bars.add_task("")

        def update(stage: str, done: int, total: int | None) -> None:
            bars.update(task, description=stage, completed=done, total=total)

        yield update


@contextmanager
def ingest_progress(*, quiet: bool) -> Iterator[Callable[[IngestProgress], None]]:
    """A line per step: share done, rate, time left."""
    if quiet:
        yield lambda step: None
        return
    last = 0.0

    def plain(step: IngestProgress) -> None:
        nonlocal last
        if step.seconds - last > 5:  # a log should not fill with progress
            last = step.seconds
            _err.print(_describe(step))

    if not sys.stderr.isatty():
        yield plain
        return
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=_err, transient=True) as bars:
        task = bars.add_task("loading the reference model", total=None)

        def update(step: IngestProgress) -> None:
            bars.update(task, completed=step.done, total=step.total, description=_describe(step))

        yield update


def _describe(step: IngestProgress) -> str:
    eta = "" if step.eta is None else f", {step.eta:.0f} s left"
    share = 100 * step.done // max(1, step.total)
    return f"{share}% {step.tokens:,} tokens, {step.tokens_per_second:.0f} tokens/s{eta}"


def ingest_report(report: IngestReport) -> None:
    """What an ingest did, in a few lines."""
    for path, reason in report.skipped:
        _err.print(f"skipped {path}: {reason}", style="yellow")
    if report.evicted:
        _err.print(
            f"the store is full: {report.evicted} caches had to leave for new ones and will be "
            "read again when they are asked for; raise CAG_MAX_STORE_GB, or set CAG_CODEC=int8",
            style="yellow",
        )
    counts = ", ".join(
        f"{len(getattr(report, name))} {name}"
        for name in ("added", "changed", "unchanged", "removed", "skipped")
        if getattr(report, name)
    )
    _out.print(
        f"{counts or 'nothing to do'}; {report.passages} passages, {report.tokens:,} tokens read "
        f"in {report.seconds:.1f} s"
    )


def models(found: Sequence[ModelStatus]) -> None:
    """Known models as a table."""
    table = Table("model", "kind", "pulled", "MB", "licence", box=None)
    for status in found:
        size = f"{status.bytes / 1e6:.0f}" if status.pulled else ""
        table.add_row(
            status.name, status.kind, "yes" if status.pulled else "no", size, status.licence
        )
    _out.print(table)


def answer_details(answer: Answer) -> None:
    """Path, timings and sources of an answer."""
    times, tokens = answer.timings, answer.tokens
    _out.print(f"\npath: {answer.path}   target: {answer.target}   reference: {answer.reference}")
    if answer.reason:
        _out.print(f"note: {answer.reason}")
    _out.print(
        f"ms: retrieve {times.retrieve:.0f}, load {times.load:.0f}, align {times.align:.0f}, "
        f"translate {times.translate:.0f}, prefill {times.prefill:.0f}, "
        f"first token {times.first_token:.0f}, total {times.total:.0f} "
        f"({times.tokens_per_second:.1f} tokens/s)"
    )
    counts = {"refreshed": tokens.refreshed, "kept in memory": tokens.kept}
    notes = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    _out.print(
        f"tokens: prefix {tokens.prefix}, passages {tokens.passage}{notes and f' ({notes})'}, "
        f"suffix {tokens.suffix}, generated {tokens.generated}; "
        f"through the target's layers {tokens.target_forward:g}"
    )
    for source in answer.sources:
        passage = source.passage
        place = f"{passage.document}:{passage.start}-{passage.end}"
        _out.print(f"source: {passage.title} ({place}, score {source.score:.2f})")


def comparison(compared: Comparison) -> None:
    """Two answers side by side."""
    one, other = compared.translated, compared.direct
    _out.print(f"\n{one.question}", style="bold")
    table = Table("", "translated", "direct", box=None)
    table.add_row("answer", one.answer, other.answer)
    table.add_row("path", one.path, other.path)
    for name in ("retrieve", "load", "align", "translate", "prefill", "first_token", "total"):
        values = (getattr(answer.timings, name) for answer in (one, other))
        table.add_row(f"{name} ms", *(f"{value:.0f}" for value in values))
    forward = (f"{answer.tokens.target_forward:g}" for answer in (one, other))
    table.add_row("target tokens", *forward)
    if one.tokens.kept:
        table.add_row("kept tokens", str(one.tokens.kept), "")
    _out.print(table)
    ratio = other.timings.first_token / max(1e-3, one.timings.first_token)
    _out.print(
        f"first token: direct takes {ratio:.1f} times as long; token F1 {compared.token_f1:.2f}, "
        f"first-token KL {compared.first_token_kl:.3f} nats"
    )
    if one.reason:
        _out.print(f"note: {one.reason}")
    for source in one.sources:
        _out.print(f"source: {source.passage.title} (score {source.score:.2f})")


def translators(found: Sequence[dict[str, Any]]) -> None:
    """Translators as a table."""
    columns = ("translator", "kind", "retention", "recovered", "M MAC/token", "folder")
    table = Table(*columns, box=None)
    for described in found:
        figures = (described["retention"], described["recovered"])
        table.add_row(
            described["name"],
            described["kind"],
            *("-" if figure is None else f"{figure:.3f}" for figure in figures),
            f"{described['multiplications'] / 1e6:.1f}",
            described["folder"],
        )
    _out.print(table)


def translator(described: dict[str, Any], refusal: str) -> None:
    """One translator's description; `refusal` says why `ask` does not use it, if so."""
    pairs({n: v for n, v in described.items() if not isinstance(v, dict)})
    details = dict(described["report"].get("details", {}))
    calibration, curve = details.pop("calibration", None), details.pop("curve", [])
    pairs(details)
    if calibration:
        _out.print(
            f"calibration: F1 {calibration['translated']:.3f} translated, "
            f"{calibration['native']:.3f} native, on {calibration['questions']} questions about "
            f"held-out passages; retention {calibration['low']:.2f} to {calibration['high']:.2f} "
            "(95%)"
        )
    if curve:
        table = Table("stage", "step", "minutes", "NLL", "recovered", box=None)
        for row in curve:
            table.add_row(
                row["stage"], str(row["step"]), f"{row['minutes']:.1f}",
                f"{row['translated']:.3f}", f"{row['recovered']:.3f}",
            )  # fmt: skip
        _out.print(table)
    _out.print(f"`cag ask` does not use it: {refusal}" if refusal else "`cag ask` uses it")


def documents(found: Sequence[dict[str, Any]]) -> None:
    """Ingested documents as a table."""
    table = Table("document", "title", "passages", "bytes", box=None)
    for row in found:
        table.add_row(row["document"], row["title"], str(row["passages"]), f"{row['bytes']:,}")
    _out.print(table)


def pairs(values: dict[str, Any]) -> None:
    """Names and values, a line each."""
    for name, value in values.items():
        _out.print(f"{name.replace('_', ' ')}: {_plain(value)}")


def _plain(value: Any) -> str:
    """A value of plain data as people write it."""
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_plain(v)}" for name, v in value.items())
    if isinstance(value, list):
        return " ".join(map(_plain, value)) or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def event(values: dict[str, Any]) -> None:
    """One line of a training log."""
    _err.print(
        "  ".join(f"{n}={v:.4g}" if isinstance(v, float) else f"{n}={v}" for n, v in values.items())
    )
