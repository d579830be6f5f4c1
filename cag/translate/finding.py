"""Find the translator of a pair of models: the user's own first, then those that ship."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cag.translate.base import (
    TRANSLATORS,
    Translator,
    load_translator,
    parse_description,
    read_description,
)
from cag.translate.config import Report

ZOO = Path(__file__).parent.parent / "zoo"


def pair_name(reference: str, target: str) -> str:
    """Folder name of an ordered pair; model paths and hub ids become plain names."""
    return "--".join(Path(name).name for name in (reference, target))


def translator_folders(home: Path) -> Iterator[Path]:
    """All translators there are, the user's own before the shipped ones."""
    for root in (home / "translators", ZOO):
        for description in sorted(root.glob("*/translator.json")):
            yield description.parent


def find_translator(
    home: Path, reference: str, target: str, dtype: torch.dtype = torch.float32
) -> Translator | None:
    """The translator of a pair, or None if there is none."""
    name = pair_name(reference, target)
    for folder in translator_folders(home):
        if folder.name == name:
            return load_translator(folder, dtype)
    return None


def describe_translators(home: Path) -> list[dict[str, Any]]:
    """Name, kind, models, figures and cost of every translator, without loading weights."""
    return [describe(folder) for folder in translator_folders(home)]


def describe(folder: Path) -> dict[str, Any]:
    """Name, kind, models, figures and cost of one translator."""
    config, report = parse_description(read_description(folder), folder)
    with torch.device("meta"):
        cost = TRANSLATORS[config.kind](config).multiplications()
    return {
        "name": folder.name,
        "kind": config.kind,
        "reference": config.reference,
        "target": config.target,
        "recovered": report.recovered,
        "retention": report.retention,
        "multiplications": cost,
        "reference_fingerprint": config.reference_fingerprint,
        "target_fingerprint": config.target_fingerprint,
        "folder": str(folder),
        "report": asdict(report),
    }


def refusal(described: dict[str, Any], required: float) -> str:
    """Why a described translator is not good enough for `ask`, as one line; empty if it is."""
    return Report(**described["report"]).shortfall(required)
