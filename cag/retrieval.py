"""Retrieval: what a question means and the words it uses -> passages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cag.library import Library, Passage
from store import CorruptIndex, StoreLocked, VectorIndex, WriteLock


class Embedder:
    """A sentence embedder from a local folder; never reaches for the network."""

    def __init__(self, name: str, folder: Path, device: str = "cpu") -> None:
        from sentence_transformers import SentenceTransformer  # slow to import

        from cag.lm.quiet import quiet_transformers

        self.name = name
        with quiet_transformers():
            self._model: Any = SentenceTransformer(
                str(folder), device="cpu" if device == "auto" else device, local_files_only=True
            )
        self.dimension = int(self._model.get_embedding_dimension() or 0)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors with shape (N, dimension)."""
        vectors = self._model.encode(
            list(texts), normalize_embeddings=True, show_progress_bar=False, batch_size=16
        )
        return np.asarray(vectors, dtype=np.float32)


class Words:
    """TF-IDF over the words of passages: finds names and terms that embeddings blur.

    Parameters
    ----------
    texts
        What to search, by id.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer  # slow to import

        self._ids = list(texts)
        self._vectorizer = TfidfVectorizer(sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
        self._matrix = self._vectorizer.fit_transform(texts.values())

    def scores(self, question: str) -> dict[str, float]:
        """Cosine similarity of the question to every text, by id."""
        found = self._matrix @ self._vectorizer.transform([question]).T
        return dict(zip(self._ids, found.toarray()[:, 0].tolist(), strict=True))


def _indexed(passage: Passage) -> str:
    return f"{passage.title}\n{passage.text}"


@dataclass(frozen=True)
class Source:
    """A retrieved passage with its similarity to the question."""

    passage: Passage
    score: float

    def to_json(self) -> dict[str, Any]:
        """As the machine-readable contract has it."""
        passage = self.passage
        return {
            "document": passage.document,
            "title": passage.title,
            "start": passage.start,
            "end": passage.end,
            "score": round(self.score, 4),
            "passage_id": passage.id,
        }


class Retriever:
    """Finds passages for a question, by the mean of two cosine similarities.

    One compares embeddings, the other TF-IDF vectors of the words.

    Parameters
    ----------
    folder
        Where the vectors lie.
    library
        Gives the passages; also what a damaged index is rebuilt from.
    embedder
        Makes the vectors.
    """

    def __init__(self, folder: Path, library: Library, embedder: Embedder) -> None:
        self._library, self._embedder = library, embedder
        self._lock = threading.Lock()
        self._folder = folder
        self._words: Words | None = None
        self._index = self._open()
        self._repair()

    def _open(self) -> VectorIndex:
        made_by: dict[str, Any] = {
            "embedder": self._embedder.name,
            "dimension": self._embedder.dimension,
        }
        try:
            return VectorIndex(self._folder, **made_by)
        except CorruptIndex:
            (self._folder / "vectors.json").unlink(missing_ok=True)
            return VectorIndex(self._folder, **made_by)

    def refresh(self) -> None:
        """Take in what another process has written meanwhile."""
        with self._lock:
            if not self._index.outdated:
                return
            self._index, self._words = self._open(), None
        self._repair()

    def _repair(self) -> None:
        """Make the index agree with the library, whatever a crash left behind."""
        held = set(self._index.ids)
        known = {passage.id: passage for passage in self._library.passages()}
        self.remove([identifier for identifier in held if identifier not in known])
        missing = [passage for identifier, passage in known.items() if identifier not in held]
        self.add(missing)
        if missing or held - set(known):
            # whoever writes to the store saves its own index
            with contextlib.suppress(StoreLocked), WriteLock(self._library.store.folder):
                if not self._index.outdated:
                    self.save()

    def add(self, passages: Sequence[Passage]) -> None:
        """Index passages; `save` makes it last."""
        if passages:
            vectors = self._embedder([_indexed(passage) for passage in passages])
            with self._lock:
                self._words = None
                self._index.add([passage.id for passage in passages], vectors)

    def remove(self, ids: Sequence[str]) -> None:
        """Take passages out of the index."""
        with self._lock:
            self._words = None
            self._index.remove(ids)

    def save(self) -> None:
        """Write the index to disk."""
        with self._lock:
            self._index.save()

    def search(self, question: str, k: int) -> list[Source]:
        """The `k` best passages, best first."""
        self.refresh()
        vector = self._embedder([question])[0]
        with self._lock:
            by_meaning = dict(self._index.search(vector, len(self._index)))
            if self._words is None and by_meaning:
                self._words = Words({p.id: _indexed(p) for p in self._library.passages()})
            by_words = self._words.scores(question) if self._words else {}
        scores = {i: (score + by_words.get(i, 0.0)) / 2 for i, score in by_meaning.items()}
        sources: list[Source] = []
        for identifier in sorted(scores, key=lambda i: -scores[i]):
            if len(sources) == k:
                break
            passage = self._library.passage(identifier)
            if passage is not None:  # else another process has just forgotten it
                sources.append(Source(passage, scores[identifier]))
        return sources
