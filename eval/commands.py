"""The rest of ``cag eval``: studies of why, beside the runner's how well; and data from the hub."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cag.settings import Settings
from eval.cli import (
    DataOption,
    JsonOption,
    NumberOption,
    OutOption,
    PairsOption,
    SeedOption,
    eval_app,
    listed,
    named_pair,
    progress,
)


@eval_app.command()
def injection(
    pairs: PairsOption = None,
    task: Annotated[str, typer.Option(help="Where the questions come from.")] = "squadshifts",
    n: NumberOption = 24,
    seed: SeedOption = 0,
    width: Annotated[int, typer.Option(min=1, help="Layers per window.")] = 1,
    stride: Annotated[int, typer.Option(min=1, help="Every how many layers.")] = 1,
    data: DataOption = Path("data"),
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Translate one window of layers at a time, or all above a boundary, and watch the rest."""
    from cag.errors import TranslatorError
    from cag.models import Models
    from eval.arms import Bench
    from eval.data import find_task
    from eval.identity import write_json
    from eval.injection import plot_injection, run_injection
    from eval.plots import require_matplotlib
    from eval.summary import plain
    from eval.translators import find_translators

    require_matplotlib()
    settings = Settings.from_environment()
    models, results = Models(settings), dict[str, Any]()
    folder = (out or settings.home / "eval") / "injection"
    questions = find_task(task).questions(data, n, seed)
    for text in listed(pairs) or [f"{settings.reference}:{settings.target}"]:
        reference, target = named_pair(text)
        translators = find_translators(models, settings, reference, target, ["translated"])
        if not translators:
            raise TranslatorError(f"no translator for {text}; make one with `cag train`")
        bench = Bench(models.lm(reference), models.lm(target), translators)
        positions = range(0, bench.target.spec.layers, stride)
        with progress(quiet=as_json) as update:
            results[text] = run_injection(
                bench,
                questions,
                positions,
                width=width,
                on_example=partial(update, text),
            )
    folder.mkdir(parents=True, exist_ok=True)
    found = {"task": task, "seed": seed, "pairs": results}
    write_json(folder / "injection.json", plain(found))
    plot_injection(results, folder / "injection.png")
    _tell(results, folder, as_json)


@eval_app.command()
def ablations(
    train: Annotated[list[str], typer.Option("--train", help="FILE or FILE[start:stop].")],
    held_out: Annotated[list[str], typer.Option("--held-out", help="Data to compare by.")],
    pairs: PairsOption = None,
    n: Annotated[int, typer.Option("--n", min=20, help="Training passages.")] = 200,
    minutes: Annotated[float, typer.Option(help="Descent of each variant.")] = 1.5,
    group: Annotated[list[str] | None, typer.Option(help="Only these groups.")] = None,
    seed: SeedOption = 0,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change one thing of the recipe at a time."""
    from cag.models import Models
    from cag.translate.command import examples_of
    from cag.translate.recipe import Recipe
    from cag.translate.training import Trainer
    from eval.ablations import run_ablations, table

    settings = Settings.from_environment()
    models = Models(settings)
    reference, target = named_pair(
        (listed(pairs) or [f"{settings.reference}:{settings.target}"])[0]
    )
    folder = (out or settings.home / "eval") / "ablations"
    examples, chosen_by = examples_of(train, held_out, limit=None, seed=seed)
    examples = random.Random(seed).sample(examples, min(n, len(examples)))

    def make(recipe: Recipe, work: Path) -> Trainer:
        return Trainer(
            models.lm(reference), models.lm(target), folder, examples, chosen_by, recipe,
            work=work, readings=settings.home / "readings",
        )  # fmt: skip

    with progress(quiet=as_json) as update:
        results = run_ablations(
            make,
            Recipe(minutes=minutes, seed=seed, projection_passages=n),
            folder,
            only=group or (),
            on_result=lambda result, done, total: update(result["name"], done, total),
        )
    (folder / "ablations.md").write_text(table(results, n, minutes), encoding="utf-8")
    _tell(results, folder, as_json)


@eval_app.command()
def breakdown(
    folder: Annotated[Path, typer.Argument(help="The --out of a run.")],
    arm: Annotated[str, typer.Option(help="The arm to look at.")] = "translated",
    against: Annotated[str, typer.Option(help="The arm to compare it with.")] = "native",
    data: DataOption = Path("data"),
    as_json: JsonOption = False,
) -> None:
    """Sort a run's answers by passage length, place and kind of the answer."""
    from eval.breakdown import break_down, table

    found = break_down(folder, data, arm, against)
    typer.echo(json.dumps(found, indent=2) if as_json else table(found))


def _tell(value: Any, folder: Path, as_json: bool) -> None:
    typer.echo(json.dumps(value, indent=2) if as_json else f"written to {folder}")


@eval_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="xquad, boolq, pubmedqa or hotpotqa.")],
    data: DataOption = Path("data"),
) -> None:
    """Download a data set from the hub to where its task looks for it (needs `datasets`)."""
    from eval.data.hub import export

    typer.echo(f"{name} is in {export(name, data)}")
