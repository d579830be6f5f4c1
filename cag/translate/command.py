"""What `cag train` does: read data, train, write the translator where `ask` finds it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cag.errors import IngestError, TranslatorError
from cag.lm.loading import dtype_named
from cag.lm.prompt import DEFAULT_TEMPLATE
from cag.models import Models
from cag.settings import Settings
from cag.translate.base import (
    Translator,
    load_translator,
    parse_description,
    read_description,
    save_description,
)
from cag.translate.calibration import calibrate
from cag.translate.config import spread
from cag.translate.examples import Example, read_examples
from cag.translate.finding import find_translator, own_copy, pair_name
from cag.translate.pairs import PairCollector
from cag.translate.readings import digest
from cag.translate.recipe import Recipe, recipe_of
from cag.translate.training import Trainer

#: Fewer held-out passages do not tell an adapted translator from the one before.
_LEAST_HELD_OUT = 8
#: What one measurement reads; more would take longer than they tell.
_MOST_HELD_OUT = 48


def train_translator(
    settings: Settings,
    reference: str,
    target: str,
    *,
    data: Sequence[str],
    held_out: Sequence[str] = (),
    out: Path | None = None,
    minutes: float = 30.0,
    limit: int | None = None,
    seed: int = 0,
    layers: int | None = None,
    at_once: int = 4,
    kind: str = "mixture",
    drop_reserved: bool = False,
    adapt: bool = False,
    log: Callable[[dict[str, Any]], None] = lambda event: None,
) -> tuple[Path, dict[str, Any]]:
    """Train a translator and save it.

    Parameters
    ----------
    data, held_out
        Files, each ``PATH`` or ``PATH[start:stop]``. Without `held_out`, one passage in
        twenty (at most 48) is set aside.
    out
        Folder of the translator; default ``<home>/translators/<pair>``.
    minutes
        Budget of gradient descent.
    limit
        At most this many passages of each data file, drawn with `seed`.
    layers
        How many reference layers are used, evenly spread; default all. Fewer make training
        faster and translation cheaper.
    at_once
        Passages per backward pass.
    kind
        Other kinds than the mixture stay in the run folder, where `cag eval` finds them to
        compare with.
    drop_reserved
        Leave out passages that figures are reported on, instead of refusing their file.
    adapt
        Go on from the translator of this pair that is there, end to end, instead of starting
        anew; it keeps its layers.

    Returns
    -------
    tuple
        The folder and the report as JSON.

    Raises
    ------
    TranslatorError
        If there is no translator to adapt, it is of other weights, or it would be too bad to
        be used afterwards, though it was good enough before; then it is not replaced.
    """
    started = time.monotonic()
    examples, chosen_by = examples_of(
        data, held_out, limit=limit, seed=seed, drop_reserved=drop_reserved, by_text=adapt
    )
    name = pair_name(reference, target)
    models = Models(settings)
    lm = models.lm(reference)
    used = None if layers is None else spread(lm.spec.layers, min(layers, lm.spec.layers))
    recipe = replace(recipe_of(kind, minutes, seed), at_once=at_once, reference_layers=used)
    folder, begin = settings.home / "runs" / name, None
    if adapt:
        if len(chosen_by) < _LEAST_HELD_OUT:
            raise IngestError(
                f"{len(chosen_by)} held-out passages do not tell whether it gets better, "
                f"{_LEAST_HELD_OUT} do; give more data (one passage in eight is set aside) or "
                "--held-out"
            )
        begin, recipe = _to_adapt(settings, models, reference, target, recipe)
        read = [asdict(example) for example in [*examples, *chosen_by]]
        folder = folder.with_name(f"{name}.adapt-{digest(begin.fingerprint, read, seed)[:8]}")
    trainer = Trainer(
        lm,
        models.lm(target),
        folder=folder,
        readings=settings.home / "readings",
        examples=examples,
        held_out=chosen_by,
        recipe=recipe,
        begin=begin,
        log=log,
    )
    translator = trainer.run()
    translator.report.details |= {
        "data": [Path(source).name for source in data],
        "seed": seed,
        "minutes": round((time.monotonic() - started) / 60, 1),
    }
    if begin is not None:
        translator.report.details["adapted_from"] = _summary(begin)
        begin.save(folder / "begin")  # what is replaced may be the only copy
        shortfall = translator.report.shortfall(settings.min_retention)
        if shortfall and not begin.report.shortfall(settings.min_retention):
            raise TranslatorError(
                f"the adapted translator is not good enough: {shortfall}; the one before stays "
                f"in use, the adapted one lies in '{trainer.stages}'"
            )
    default = settings.home / "translators" / name if kind == "mixture" else trainer.stages
    written = out or default
    translator.save(written)
    return written, {"recovered": translator.report.recovered, **translator.report.details}


def _to_adapt(
    settings: Settings, models: Models, reference: str, target: str, recipe: Recipe
) -> tuple[Translator, Recipe]:
    """The translator to go on from, and the recipe with its parts and without its first stages."""
    begin = find_translator(settings.home, reference, target)
    if begin is None:
        raise TranslatorError(
            f"there is no translator from '{reference}' to '{target}' to adapt; train one "
            "without --adapt"
        )
    if recipe.kind != "mixture" or recipe.reference_layers is not None:
        raise TranslatorError("with --adapt kind and layers are those of the translator")
    begin.check_models(models.lm(reference).fingerprint, models.lm(target))
    return begin, recipe.adapting(begin.config)


def _summary(translator: Translator) -> dict[str, Any]:
    """What is worth knowing of a translator that another one was made from."""
    report, wanted = translator.report, ("passages", "data", "minutes", "adapted_from")
    kept = {name: report.details[name] for name in wanted if name in report.details}
    measured = {"recovered": report.recovered, "retention": report.retention}
    return {"fingerprint": translator.fingerprint, **measured, **kept}


def calibrate_on(
    settings: Settings,
    folder: Path,
    data: Sequence[str],
    limit: int,
    seed: int,
    *,
    save: bool,
) -> dict[str, Any]:
    """Retention of a translator on questions of one's own; see `calibrate`.

    Raises
    ------
    ReservedPassage
        If figures are reported on any of the passages: calibration decides whether a translator
        is used, so it chooses.
    TranslatorError
        If it was trained for other weights than those here, or the questions tell nothing that
        could be saved.
    """
    chooser = random.Random(seed)
    held_out = [e for source in data for e in _drawn(source, limit, chooser, seed)]
    config, _ = parse_description(read_description(folder), folder)
    models = Models(settings)
    reference, target = models.lm(config.reference), models.lm(config.target)
    dtype = dtype_named(settings.dtype, str(target.device))  # what `ask` would use
    translator = load_translator(folder, dtype).to(target.device)
    translator.check_models(reference.fingerprint, target)
    found_on = calibrate(translator, PairCollector(reference, target, DEFAULT_TEMPLATE), held_out)
    if save and found_on.retention is None:
        raise TranslatorError(
            "the target cannot answer these questions itself, so they say nothing about "
            "translation; nothing was saved"
        )
    if save:
        translator.report.details["calibrated_on"] = [Path(source).name for source in data]
        save_description(translator, own_copy(folder, settings.home))
    return {"retention": found_on.retention, **asdict(found_on)}


def examples_of(
    data: Sequence[str],
    held_out: Sequence[str],
    *,
    limit: int | None,
    seed: int,
    drop_reserved: bool = False,
    by_text: bool = False,
) -> tuple[list[Example], list[Example]]:
    """Passages to train on, without duplicates, and to choose by.

    With `by_text` it follows from a passage's text alone whether it is set aside: what one run
    was trained on, none that goes on from it is chosen by.
    """
    chooser, drop = random.Random(seed), drop_reserved
    examples = [e for source in data for e in _drawn(source, limit, chooser, seed, drop)]
    examples = _merged(examples)
    share = max(1, _MOST_HELD_OUT // max(1, len(held_out)))  # every file has its say
    chosen_by = [e for source in held_out for e in _drawn(source, share, chooser, seed, drop)]
    if len(chosen_by) > _MOST_HELD_OUT:  # of very many files not every one
        chosen_by = chooser.sample(chosen_by, _MOST_HELD_OUT)
    if not chosen_by and by_text:
        aside = {e.text for e in examples if int(digest(e.text), 16) % 8 == 0}
        chosen_by = [e for e in examples if e.text in aside][:_MOST_HELD_OUT]
        examples = [e for e in examples if e.text not in aside]
    elif not chosen_by:
        chooser.shuffle(examples)
        count = min(_MOST_HELD_OUT, len(examples) // 20)
        chosen_by, examples = examples[:count], examples[count:]
    if not examples or not chosen_by:
        raise IngestError("too little training data: at least 20 passages are needed")
    return examples, chosen_by


def _merged(examples: Sequence[Example]) -> list[Example]:
    """Every passage once, with all its questions."""
    questions: dict[str, dict[tuple[str, str], None]] = {}
    for example in examples:
        questions.setdefault(example.text, {}).update(dict.fromkeys(example.questions))
    return [Example(text, tuple(asked)) for text, asked in questions.items()]


def _drawn(
    source: str, limit: int | None, chooser: random.Random, seed: int, drop_reserved: bool = False
) -> list[Example]:
    examples = read_examples(source, seed=seed, drop_reserved=drop_reserved)
    if limit is not None and len(examples) > limit:
        examples = chooser.sample(examples, limit)
    return examples
