"""``python -m eval.bench``: each command prints a table, or JSON with ``--json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cag.errors import CagError
from cag.settings import Settings
from eval.bench.docs import run_docs
from eval.bench.exact import run_exact
from eval.bench.flops import flops_table, run_flops
from eval.bench.ingest import run_ingest
from eval.bench.load import run_load
from eval.bench.speed import LENGTHS, run_speed
from eval.data import Question, Task, read_squad
from store import StoreError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
DataOption = Annotated[Path, typer.Option(help="SQuAD 1.1 JSON file.")]


def _settings(reference: str | None, target: str | None, dtype: str | None) -> Settings:
    settings = Settings.from_environment()
    changes: dict[str, Any] = {"reference": reference, "target": target, "dtype": dtype}
    return replace(settings, **{n: v for n, v in changes.items() if v is not None})


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    for line in _lines(result, ""):
        typer.echo(line)


def _lines(value: Any, name: str) -> Iterator[str]:
    """Nested results, a line each; numbers to four digits."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _lines(inner, f"{name} {key}".strip().replace("_", " "))
    elif isinstance(value, list):
        for at, inner in enumerate(value, 1):
            yield from _lines(inner, f"{name} {at}")
    else:
        yield f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}"


def _questions(data: Path, n: int, seed: int) -> list[Question]:
    return Task("file", "report", str(data), read_squad).questions(Path(), n, seed)


@app.command()
def speed(
    tokens: Annotated[
        list[int], typer.Option(min=1, help="Passage tokens; may be given several times.")
    ] = list(LENGTHS),  # noqa: B006
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    reference: str | None = None,
    target: str | None = None,
    dtype: str | None = None,
    as_json: JsonOption = False,
) -> None:
    """Time to the first token and memory, direct / translated: warm, cold and kept."""
    _print(run_speed(_settings(reference, target, dtype), tokens, repeats), as_json)


@app.command()
def load(
    passages: Annotated[int, typer.Option(min=1, help="Stored passages.")] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    reference: str | None = None,
    as_json: JsonOption = False,
) -> None:
    """Bytes per second out of the store against a raw read of its files, warm and cold."""
    _print(run_load(_settings(reference, None, None), passages, rounds), as_json)


@app.command()
def flops(as_json: JsonOption = False) -> None:
    """Cost of translating against reading, from the configs of known pairs alone."""
    result = run_flops(Settings.from_environment())
    if as_json:
        _print(result, as_json)
        return
    for line in flops_table(result):
        typer.echo(line)


@app.command()
def ingest(reference: str | None = None, as_json: JsonOption = False) -> None:
    """Ingest throughput against a bare prefill loop."""
    _print(run_ingest(_settings(reference, None, None)), as_json)


@app.command()
def exact(
    data: DataOption,
    n: Annotated[int, typer.Option("--n", min=1)] = 50,
    seed: int = 0,
    target: str | None = None,
    as_json: JsonOption = False,
) -> None:
    """Own path against direct path, same greedy text."""
    questions = _questions(data, n, seed)
    _print(run_exact(_settings(None, target, None), questions), as_json)


@app.command()
def server(
    clients: Annotated[int, typer.Option(min=1, help="Concurrent clients.")] = 8,
    requests: Annotated[int, typer.Option(min=1)] = 200,
    mode: Annotated[str, typer.Option(help="translated, direct or own.")] = "translated",
    reference: str | None = None,
    target: str | None = None,
    dtype: str = "float32",
    as_json: JsonOption = False,
) -> None:
    """`cag serve` under concurrent clients: failures, equal answers, throughput, TTFT."""
    from eval.bench.server import run_server  # needs the extra `server`

    _print(run_server(_settings(reference, target, dtype), clients, requests, mode), as_json)


@app.command()
def docs(
    folder: Annotated[Path, typer.Argument(help="The project's docs/.")],
    as_json: JsonOption = False,
) -> None:
    """Ten questions about docs/, answered on both paths."""
    _print(run_docs(Settings.from_environment(), folder), as_json)


def main() -> None:
    """Errors a user can cause are one line and exit code 2."""
    try:
        app()
    except (CagError, StoreError) as error:
        typer.echo(f"eval.bench: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
