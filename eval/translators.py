"""Find the translators that arms need, and say exactly which ones they were."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cag.lm.loading import dtype_named
from cag.models import Models
from cag.settings import Settings
from cag.translate import Translator, load_translator
from cag.translate.finding import ZOO, pair_name, translator_folders
from eval.arms import NEEDS


def find_translators(
    models: Models,
    settings: Settings,
    reference: str,
    target: str,
    names: Sequence[str] = tuple(dict.fromkeys(NEEDS.values())),
) -> dict[str, Translator]:
    """Translators of a pair by the name of the arm that uses them; those missing are left out.

    "translated" is the pair's own translator, as `cag ask` would take it. The others are the
    baselines that `cag train --kind` leaves in ``<home>/runs/<pair>/<name>``, or that ship.

    Raises
    ------
    TranslatorError
        If one is malformed, or was trained for other models.
    """
    lm = models.lm(target)
    dtype = dtype_named(settings.dtype, str(lm.device))
    found: dict[str, Translator] = {}
    for name in names:
        folder = translator_folder(settings.home, reference, target, name)
        if folder is None:
            continue
        if name == "translated":
            own = models.translator(reference, target)
            if own is not None:
                found[name] = own
        else:
            found[name] = load_translator(folder, dtype).to(lm.device)
    for translator in found.values():
        translator.check_models(models.lm(reference).fingerprint, lm)
    return found


def translator_folder(home: Path, reference: str, target: str, name: str) -> Path | None:
    """Where the translator of that name lies, or None."""
    pair = pair_name(reference, target)
    if name == "translated":
        return next((f for f in translator_folders(home) if f.name == pair), None)
    places = (home / "runs" / pair / name, ZOO / pair / name)
    return next((f for f in places if (f / "translator.json").exists()), None)


def describe_translator(translator: Translator, folder: Path) -> dict[str, Any]:
    """Identity, size, cost and training of a translator, as plain data."""
    weights = (folder / "translator.safetensors").read_bytes()
    details = translator.report.details
    return {
        "kind": translator.kind,
        "sha256": hashlib.sha256(weights).hexdigest(),
        "parameters": sum(parameter.numel() for parameter in translator.parameters()),
        "macs_per_token": translator.multiplications(),
        "recovered": translator.report.recovered,
        "retention": translator.report.retention,
        "training": {name: details.get(name) for name in ("passages", "minutes", "seed", "data")}
        | {name: details[name] for name in ("adapted_from",) if name in details},
    }
