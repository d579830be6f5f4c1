"""The vector index finds what was added, and knows when it cannot be trusted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store import CorruptIndex, EmbedderMismatch, VectorIndex

UNIT = np.eye(4, dtype=np.float32)


def opened(folder: Path, embedder: str = "words", dimension: int = 4) -> VectorIndex:
    return VectorIndex(folder, embedder=embedder, dimension=dimension)


def nearest(index: VectorIndex, row: int) -> str:
    return index.search(UNIT[row], 1)[0][0]


def describe(folder: Path, **changes: Any) -> None:
    """Change the description; None takes an entry away."""
    file = folder / "vectors.json"
    described = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in described.items() if v is not None}))


def truncate(folder: Path) -> None:
    file = folder / "vectors.faiss"
    file.write_bytes(file.read_bytes()[:-8])


def truncate_knowingly(folder: Path) -> None:
    truncate(folder)
    digest = hashlib.sha256((folder / "vectors.faiss").read_bytes()).hexdigest()
    describe(folder, sha256=digest)


@pytest.fixture
def index(tmp_path: Path) -> VectorIndex:
    index = opened(tmp_path)
    index.add(["a", "b", "c"], UNIT[:3])
    return index


def test_best_first(index: VectorIndex) -> None:
    found = index.search(np.array([0.1, 0.9, 0.4, 0], dtype=np.float32), 2)
    assert [name for name, _ in found] == ["b", "c"]
    assert [score for _, score in found] == pytest.approx([0.9, 0.4])


def test_no_more_than_there_are(index: VectorIndex, tmp_path: Path) -> None:
    assert len(index.search(UNIT[0], 10)) == 3
    assert index.search(UNIT[0], 0) == []
    assert opened(tmp_path / "empty").search(UNIT[0], 3) == []


def test_removed_is_not_found(index: VectorIndex) -> None:
    index.remove(["a", "unknown"])
    assert {name for name, _ in index.search(UNIT[0], 3)} == {"b", "c"}
    assert nearest(index, 2) == "c"  # the rows moved up with their ids


def test_added_again_is_replaced(index: VectorIndex) -> None:
    index.add(["a"], UNIT[3:])
    assert len(index) == 3
    assert nearest(index, 3) == "a"
    assert [score for _, score in index.search(UNIT[0], 3)] == [0, 0, 0]


def test_saved_and_loaded(index: VectorIndex, tmp_path: Path) -> None:
    index.remove(["b"])
    index.save()
    index.add(["later"], UNIT[3:])  # is not saved
    again = opened(tmp_path)
    assert again.ids == ["a", "c"]
    assert again.search(UNIT[2], 1) == [("c", 1.0)]
    again.add(["d"], UNIT[3:])
    assert nearest(again, 3) == "d"


@pytest.mark.parametrize(("embedder", "dimension"), [("other", 4), ("words", 5)])
def test_another_embedder_is_refused(
    index: VectorIndex, tmp_path: Path, embedder: str, dimension: int
) -> None:
    index.save()
    with pytest.raises(EmbedderMismatch, match="set CAG_EMBEDDER to 'words'"):
        opened(tmp_path, embedder, dimension)
    assert len(opened(tmp_path)) == 3


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "truncated index": truncate,
    "truncated index, fitting checksum": truncate_knowingly,
    "lost index": lambda folder: (folder / "vectors.faiss").unlink(),
    "truncated description": lambda folder: (folder / "vectors.json").write_text('{"embedder": '),
    "another description": lambda folder: describe(folder, sha256="0" * 64),
    "fewer ids": lambda folder: describe(folder, ids=["a"]),
    "no embedder": lambda folder: describe(folder, embedder=None),
    "no checksum": lambda folder: describe(folder, sha256=None),
    "no ids": lambda folder: describe(folder, ids=None),
}


@pytest.mark.parametrize(
    "damage",
    DAMAGE,
)
def test_a_damaged_index_is_recognised(index: VectorIndex, tmp_path: Path, damage: str) -> None:
    index.save()
    DAMAGE[damage](tmp_path)
    with pytest.raises(CorruptIndex):
        opened(tmp_path)
