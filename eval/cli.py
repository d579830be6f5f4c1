"""``cag eval``: measure arms over tasks. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from cag import show
from cag.settings import Settings

DEFAULT_ARMS = (
    "native,translated,ridge,single_projection,shared_latent,no_context,wrong_passage,reference"
)

eval_app = typer.Typer(
    invoke_without_command=True, help="Measure translated answers against native ones."
)

PairsOption = Annotated[
    list[str] | None,
    typer.Option("--pairs", "--pair", help="REFERENCE:TARGET; repeatable or comma-separated."),
]
TasksOption = Annotated[
    list[str] | None,
    typer.Option("--tasks", "--task", help="Tasks or SQuAD files; repeatable or comma-separated."),
]
ArmsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--arms", "--arm", help=f"'all', or some; repeatable or comma-separated; {DEFAULT_ARMS}."
    ),
]
NumberOption = Annotated[int, typer.Option("--n", min=1, help="Questions per task.")]
SeedOption = Annotated[int, typer.Option(help="Draws the questions.")]
DataOption = Annotated[Path, typer.Option(help="Folder of the data sets.")]
OutOption = Annotated[Path | None, typer.Option(help="Folder to write; default <home>/eval.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")]


@eval_app.callback()
@eval_app.command("run")
def evaluate(
    context: typer.Context,
    pairs: PairsOption = None,
    tasks: TasksOption = None,
    arms: ArmsOption = None,
    n: NumberOption = 300,
    seed: SeedOption = 0,
    data: DataOption = Path("data"),
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer questions in several arms; the same as `cag eval` without a command."""
    if context.invoked_subcommand is not None:
        return
    from cag.errors import BadSetting
    from cag.models import Models
    from eval.arms import ARMS
    from eval.data import TASKS
    from eval.runner import RunConfig, run

    settings = Settings.from_environment()
    if not (wanted := listed(tasks)):
        raise BadSetting(f"nothing to ask: give --tasks, some of {', '.join(TASKS)}")
    named = listed(arms) or DEFAULT_ARMS.split(",")
    config = RunConfig(
        pairs=tuple(named_pair(text) for text in listed(pairs))
        or ((settings.reference, settings.target),),
        tasks=tuple(wanted),
        arms=tuple(ARMS) if named == ["all"] else tuple(named),
        n=n,
        seed=seed,
        data=data,
        out=out or settings.home / "eval",
    )
    with progress(quiet=as_json) as update:
        metrics = run(config, Models(settings), settings, update, _warn)
    _finish(metrics, config.out, as_json)


@eval_app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The --out of a run.")],
    as_json: JsonOption = False,
) -> None:
    """Make metrics, report and plots anew from a run's logs."""
    from eval.report import remake

    _finish(remake(folder), folder, as_json)


def listed(values: Sequence[str] | None) -> list[str]:
    """Values of a repeatable option, each of which may hold several with commas between."""
    parts = (part.strip() for value in values or () for part in value.split(","))
    return list(dict.fromkeys(part for part in parts if part))


def named_pair(text: str) -> tuple[str, str]:
    """Reference and target of ``REFERENCE:TARGET``."""
    from cag.errors import BadSetting

    reference, _, target = text.partition(":")
    if not reference or not target:
        raise BadSetting(f"'{text}' is no pair; write REFERENCE:TARGET")
    return reference, target


def _warn(text: str) -> None:
    typer.echo(text, err=True)


def _finish(metrics: dict[str, Any], folder: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(metrics, ensure_ascii=False, indent=2))
    else:
        typer.echo(f"report: {folder / 'report.md'}")


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar with the time left; in a log a line every half a minute."""
    if quiet or sys.stderr.isatty():
        with show.progress(quiet=quiet) as update:
            yield update
        return
    started = last = time.monotonic()

    def plain(stage: str, done: int, total: int | None) -> None:
        nonlocal last
        now = time.monotonic()
        if not done or not total or (now - last < 30 and done < total):
            return
        last = now
        left = (now - started) / done * (total - done)
        typer.echo(f"{stage}: {done}/{total} answers, {_duration(left)} left", err=True)

    yield plain


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
