"""Vectors of passages, in a FAISS index with the passages' ids beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from store.errors import CorruptIndex, EmbedderMismatch
from store.files import private_folder, write_atomically


class VectorIndex:
    """Exact inner-product search over unit vectors.

    Parameters
    ----------
    folder
        Holds ``vectors.faiss`` and ``vectors.json``.
    embedder, dimension
        What the vectors come from; kept with the index and checked.

    Raises
    ------
    EmbedderMismatch
        If the index on disk was built with another embedder.
    CorruptIndex
        If it cannot be read, or its two files do not belong together.
    """

    def __init__(self, folder: Path, *, embedder: str, dimension: int) -> None:
        self._folder = private_folder(Path(folder))
        self._embedder, self._dimension = embedder, dimension
        self.ids: list[str] = []
        self._index: Any = faiss.IndexFlatIP(dimension)
        self._seen = self._stamp()
        if self._seen is not None:
            self._load()

    @property
    def _description(self) -> Path:
        return self._folder / "vectors.json"

    @property
    def _file(self) -> Path:
        return self._folder / "vectors.faiss"

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def outdated(self) -> bool:
        """Whether the files are others than those that were read or written here."""
        return self._stamp() != self._seen

    def _stamp(self) -> tuple[int, int] | None:
        try:
            stat = self._description.stat()
        except FileNotFoundError:
            return None
        return stat.st_mtime_ns, stat.st_ino

    def _load(self) -> None:
        try:
            described = json.loads(self._description.read_text())
            found = (described["embedder"], described["dimension"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptIndex(f"'{self._description}' is unreadable: {error}") from error
        if found != (self._embedder, self._dimension):
            raise EmbedderMismatch(
                f"the index holds vectors of '{found[0]}' ({found[1]} numbers), not of "
                f"'{self._embedder}' ({self._dimension}); set CAG_EMBEDDER to "
                f"'{found[0]}', or delete '{self._folder}': the next command builds it anew"
            )
        try:
            self.ids = list(described["ids"])
            if described["sha256"] != _sha256(self._file):
                raise CorruptIndex(f"'{self._file}' does not match its description")
            self._index = faiss.read_index(str(self._file))
        except (OSError, RuntimeError, KeyError, TypeError) as error:
            raise CorruptIndex(f"'{self._file}' is unreadable: {error}") from error
        if self._index.ntotal != len(self.ids):
            raise CorruptIndex(f"'{self._file}' holds another number of vectors than ids")

    def add(self, ids: Sequence[str], vectors: np.ndarray) -> None:
        """Add vectors with shape (N, dimension); an id that is there already is replaced.

        Raises
        ------
        ValueError
            If ids and vectors do not match each other or the index.
        """
        if vectors.shape != (len(set(ids)), self._dimension):
            raise ValueError(
                f"{len(set(ids))} distinct ids need vectors with shape "
                f"({len(set(ids))}, {self._dimension}), not {vectors.shape}"
            )
        self.remove(ids)
        self._index.add(np.ascontiguousarray(vectors, dtype=np.float32))
        self.ids += ids

    def remove(self, ids: Sequence[str]) -> None:
        """Remove vectors; unknown ids are ignored."""
        gone = set(ids)
        rows = [row for row, held in enumerate(self.ids) if held in gone]
        if rows:
            self._index.remove_ids(np.array(rows, dtype=np.int64))
            self.ids = [held for held in self.ids if held not in gone]

    def search(self, vector: np.ndarray, k: int) -> list[tuple[str, float]]:
        """The `k` nearest passages as (id, score), best first; fewer if there are fewer."""
        k = min(k, len(self.ids))
        if k < 1:
            return []
        scores, rows = self._index.search(np.asarray(vector, dtype=np.float32)[None], k)
        return [(self.ids[r], float(s)) for r, s in zip(rows[0], scores[0], strict=True) if r >= 0]

    def save(self) -> None:
        """Write both files atomically, the description last."""
        # serialised first: faiss itself does not notice every failed write
        content = faiss.serialize_index(self._index).tobytes()
        write_atomically(self._file, content)
        described = {
            "embedder": self._embedder,
            "dimension": self._dimension,
            "sha256": hashlib.sha256(content).hexdigest(),
            "ids": self.ids,
        }
        write_atomically(self._description, json.dumps(described).encode())
        self._seen = self._stamp()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
