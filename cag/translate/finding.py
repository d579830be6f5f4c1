"""Find the translator of a pair of models: the user's own first, then those that ship."""

from __future__ import annotations

import shutil
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

#: Folder, and when its description was written.
Version = tuple[Path, int]

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
    folder = _folder(home, reference, target)
    return None if folder is None else load_translator(folder, dtype)


def translator_version(home: Path, reference: str, target: str) -> Version | None:
    """Says which translator `find_translator` gives; another one after it was written anew."""
    folder = _folder(home, reference, target)
    return None if folder is None else (folder, (folder / "translator.json").stat().st_mtime_ns)


def _folder(home: Path, reference: str, target: str) -> Path | None:
    name = pair_name(reference, target)
    return next((folder for folder in translator_folders(home) if folder.name == name), None)


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


def own_copy(folder: Path, home: Path) -> Path:
    """Where the user may change a translator: a shipped one is copied to the user's own."""
    if folder.parent != ZOO:
        return folder
    copy = home / "translators" / folder.name
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    return copy
