"""The user's own translator comes before those that ship."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_translator, tiny_models
from test_base import edit_description

from cag.errors import TranslatorError
from cag.settings import Settings
from cag.translate import finding
from cag.translate.finding import describe_translators, find_translator, pair_name


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(finding, "ZOO", tmp_path / "zoo")
    return tmp_path / "zoo"


def put(root: Path, name: str, recovered: float, kind: str = "ridge") -> Path:
    translator = random_translator(kind)
    translator.report.recovered = recovered
    translator.save(root / name)
    return root / name


@pytest.mark.parametrize(
    ("reference", "target"),
    [
        ("smol", "gemma"),
        ("HuggingFaceTB/smol", "google/gemma"),
        ("/models/smol", "./here/gemma/"),
        ("~/models/smol/", "gemma"),
    ],
)
def test_ids_and_paths_give_plain_names(reference: str, target: str) -> None:
    assert pair_name(reference, target) == "smol--gemma"


def test_the_users_own_comes_first(home: Path, zoo: Path) -> None:
    put(zoo, "a--b", 0.1)
    assert find_translator(home, "a", "b").report.recovered == 0.1
    put(home / "translators", "a--b", 0.2)
    assert find_translator(home, "hub/a", "/path/b").report.recovered == 0.2


def test_a_pair_is_ordered(home: Path, zoo: Path) -> None:
    put(zoo, "a--b", 0.1)
    assert find_translator(home, "b", "a") is None
    assert find_translator(home, "a", "c") is None


def test_nothing_anywhere_is_no_translator(home: Path, zoo: Path) -> None:
    assert find_translator(home, "a", "b") is None
    assert describe_translators(home) == []


def test_it_comes_in_the_dtype_asked_for(home: Path, zoo: Path) -> None:
    put(zoo, "a--b", 0.1)
    found = find_translator(home, "a", "b", torch.bfloat16)
    assert {t.dtype for t in found.state_dict().values()} == {torch.bfloat16}


def test_a_broken_own_translator_is_not_passed_over(home: Path, zoo: Path) -> None:
    put(zoo, "a--b", 0.1)
    (put(home / "translators", "a--b", 0.2) / "translator.safetensors").unlink()
    with pytest.raises(TranslatorError, match="home"):
        find_translator(home, "a", "b")


def test_translators_are_listed_without_their_weights(home: Path, zoo: Path) -> None:
    own = put(home / "translators", "z--b", 0.3, "mixture")
    shipped = put(zoo, "a--b", 0.1)
    for folder in (own, shipped):
        (folder / "translator.safetensors").unlink()
    first, second = describe_translators(home)
    assert (first["name"], first["kind"], first["recovered"]) == ("z--b", "mixture", 0.3)
    assert (second["name"], second["kind"], second["folder"]) == ("a--b", "ridge", str(shipped))
    translator = random_translator("mixture")
    assert first["multiplications"] == translator.multiplications()
    assert first["target"] == translator.config.target
    assert first["target_fingerprint"] == translator.config.target_fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["config"].update(kind="oracle"),
        lambda d: d["config"].update(colour="red"),
        lambda d: d.pop("report"),
    ],
    ids=["unknown kind", "unknown setting", "no report"],
)
def test_a_description_that_cannot_be_read_is_one_line(change: Any, home: Path, zoo: Path) -> None:
    edit_description(change)(put(home / "translators", "a--b", 0.1))
    with pytest.raises(TranslatorError):
        describe_translators(home)


def test_a_loaded_translator_is_replaced_when_its_file_is(home: Path, zoo: Path) -> None:
    models = tiny_models(Settings(home=home, reference="ref", target="tgt", dtype="float32"))
    assert models.translator("ref", "tgt") is None
    put(zoo, "ref--tgt", 0.1)
    first = models.translator("ref", "tgt")
    assert first.report.recovered == 0.1 and models.translator("ref", "tgt") is first
    folder = put(home / "translators", "ref--tgt", 0.2)
    second = models.translator("ref", "tgt")
    assert second.report.recovered == 0.2 and models.translator("ref", "tgt") is second
    put(home / "translators", "ref--tgt", 0.3)
    os.utime(folder / "translator.json", ns=(1, 1))
    assert models.translator("ref", "tgt").report.recovered == 0.3


def test_a_shipped_translator_is_copied_before_it_is_changed(home: Path, zoo: Path) -> None:
    own = put(home / "translators", "a--b", 0.1)
    assert finding.own_copy(own, home) == own
    copy = finding.own_copy(put(zoo, "c--d", 0.2), home)
    assert copy == home / "translators" / "c--d"
    assert find_translator(home, "c", "d").report.recovered == 0.2
