"""Which models can answer here, and which of them from translated caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cag.engine import CAG
from cag.errors import CagError
from cag.lm.pull import is_here, pulled_llms
from cag.translate import finding
from cag.translate.finding import describe_translators, pair_name


def offered_targets(cag: CAG) -> list[str]:
    """Names of the models that can answer: the default one first, then others that are here."""
    home, settings = cag.settings.home, cag.settings
    trained = [
        described["target"]
        for described in _described(cag)
        if described["reference"] == settings.reference and is_here(described["target"], home)
    ]
    return list(dict.fromkeys([settings.target, *trained, *pulled_llms(home)]))


def refusals(cag: CAG, targets: Sequence[str]) -> dict[str, str]:
    """Why `ask` would read the text, by target, as one line; empty where it would translate."""
    reference = cag.settings.reference
    found: dict[str, dict[str, Any]] = {}
    for described in _described(cag):
        found.setdefault(described["name"], described)  # the first of a name is the one used
    reasons = {}
    for target in targets:
        described = found.get(pair_name(reference, target), {})
        missing = f"no translator from '{reference}' to '{target}'"
        reasons[target] = refusal(cag, described) if described else missing
    return reasons


def _described(cag: CAG) -> list[dict[str, Any]]:
    """All translators; none if one cannot be read, which the Models view explains."""
    try:
        return describe_translators(cag.settings.home)
    except CagError:
        return []


def refusal(cag: CAG, described: dict[str, Any]) -> str:
    """Why `ask` would not use this translator, as one line; empty if it would."""
    return finding.refusal(described, cag.settings.min_retention)


def misfit(described: dict[str, Any], fingerprints: Mapping[str, str]) -> str:
    """Why a translator does not fit the models in memory, as one line; empty if it does."""
    for role in ("reference", "target"):
        trained, met = described[f"{role}_fingerprint"], fingerprints.get(described[role])
        if met is not None and met != trained:
            return f"it was trained for a {role} {trained[:8]}, the one here is {met[:8]}"
    return ""


def known_pairs(cag: CAG) -> list[tuple[str, str]]:
    """Pairs of models that are here and have a translator, the default pair first."""
    settings = cag.settings
    trained = [
        (described["reference"], described["target"])
        for described in _described(cag)
        if all(is_here(described[role], settings.home) for role in ("reference", "target"))
    ]
    return list(dict.fromkeys([(settings.reference, settings.target), *trained]))
