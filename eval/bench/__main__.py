"""``python -m eval.bench``: each command prints a table, or JSON with ``--json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from cag.errors import CagError
from cag.models import Models
from cag.settings import Settings
from cag.translate import Translator, load_translator
from cag.translate.finding import ZOO, pair_name
from eval.arms import ARMS, Bench
from eval.bench.docs import run_docs
from eval.bench.exact import run_exact
from eval.bench.ingest import run_ingest
from eval.bench.quality import run_quality, summarise
from eval.bench.speed import run_speed
from eval.data import Question, read_squad, sample
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
    questions = sample(read_squad(data), n, seed)
    if not questions:
        raise CagError(f"'{data}' holds no questions with an answer; give another file")
    return questions


def _translators(models: Models, settings: Settings) -> dict[str, Translator]:
    """The pair's translator, and the ridge that it was trained from."""
    reference, target = models.lm(settings.reference), models.lm(settings.target)
    translators: dict[str, Translator] = {}
    name = pair_name(settings.reference, settings.target)
    found = models.translator(settings.reference, settings.target)
    if found is not None:
        translators["translated"] = found
        for ridge in (settings.home / "runs" / name / "ridge", ZOO / name / "ridge"):
            if (ridge / "translator.json").exists():
                translators["ridge"] = load_translator(ridge, next(found.parameters()).dtype)
                break
    for translator in translators.values():
        translator.check_models(reference.fingerprint, target)
    return translators


@app.command()
def quality(
    data: DataOption,
    n: Annotated[int, typer.Option("--n", min=1, help="Questions.")] = 300,
    seed: int = 0,
    arms: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(ARMS),
    reference: str | None = None,
    target: str | None = None,
    dtype: str | None = None,
    log: Annotated[Path | None, typer.Option(help="JSON lines per example; resumes.")] = None,
    as_json: JsonOption = False,
) -> None:
    """F1, EM and answer NLL of every arm over given passages."""
    settings = _settings(reference, target, dtype)
    models = Models(settings)
    names = arms.split(",")
    if unknown := [name for name in names if name not in ARMS]:
        raise CagError(f"unknown arm '{unknown[0]}'; use some of: {', '.join(ARMS)}")
    questions = _questions(data, n, seed)
    translators = _translators(models, settings)
    needs = {"translated": "translated", "wrong_passage": "translated", "ridge": "ridge"}
    for name in [n for n in names if n in needs and needs[n] not in translators]:
        names.remove(name)
        typer.echo(f"arm '{name}' is left out: it needs `cag train` to have run here", err=True)
    bench = Bench(models.lm(settings.reference), models.lm(settings.target), translators)

    def tell(done: int, total: int) -> None:
        if done % 25 == 0:
            typer.echo(f"{done}/{total}", err=True)

    with torch.inference_mode():
        rows = run_quality(bench, questions, names, log, tell)
    result = summarise(rows, names) | {
        "seed": seed,
        "data": data.name,
        "reference": settings.reference,
        "target": settings.target,
        "dtype": str(bench.target.dtype),
    }
    for name in ("retention", "recovered"):
        if "translated" in result["arms"]:
            result[name] = result["arms"]["translated"].get(name)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    typer.echo(f"{'arm':14} {'F1':>6} {'EM':>6} {'NLL':>6} {'retention (95%)':>22} recovered")
    for name, arm in result["arms"].items():
        low, high = arm.get("retention_95", (float("nan"),) * 2)
        typer.echo(
            f"{name:14} {arm['f1']:6.3f} {arm['em']:6.3f} {arm['nll']:6.3f} "
            f"{arm.get('retention', float('nan')):8.3f} ({low:.3f}-{high:.3f}) "
            f"{arm.get('recovered', float('nan')):9.3f}"
        )


@app.command()
def speed(
    tokens: Annotated[int, typer.Option(min=1, help="Passage tokens.")] = 1000,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    reference: str | None = None,
    target: str | None = None,
    dtype: str | None = None,
    as_json: JsonOption = False,
) -> None:
    """Time to the first token, direct / translated, warm and cold."""
    _print(run_speed(_settings(reference, target, dtype), tokens, repeats), as_json)


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
