"""The library: which documents were ingested, and into which passages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cag.align import Span as TokenSpan
from store import CacheStore


@dataclass(frozen=True)
class Passage:
    """A passage as it was ingested.

    Attributes
    ----------
    id
        Names it; depends on document, place and text.
    document, title, start, end, text
        Where it comes from; `start` and `end` count characters of the document's text.
    spans
        Character spans of the reference tokens in the passage as it was read.
    identity
        Of its stored reference cache.
    """

    id: str
    document: str
    title: str
    start: int
    end: int
    text: str
    spans: list[TokenSpan]
    identity: dict[str, Any]

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Passage:
        return cls(**{**row, "spans": [(a, b) for a, b in row["spans"]]})


def passage_id(document: str, start: int, text: str) -> str:
    """Identifier of a passage, the same in every run."""
    return hashlib.sha256(f"{document}\0{start}\0{text}".encode()).hexdigest()[:16]


class Library:
    """Documents and passages, in the store's catalog.

    If the catalog was lost, everything is rebuilt from the notes that lie beside the caches.
    """

    def __init__(self, store: CacheStore) -> None:
        self.store = store
        self._documents = store.catalog.table("documents")
        self._passages = store.catalog.table("passages")
        if not len(self._documents):
            self._rebuild()

    def documents(self) -> dict[str, dict[str, Any]]:
        """Rows by path: ``sha256``, ``title``, ``kind``, ``settings``, ``passages`` (ids)..."""
        return dict(self._documents.items())

    def document(self, path: str) -> dict[str, Any] | None:
        """One document's row."""
        return self._documents.get(path)

    def passage(self, identifier: str) -> Passage | None:
        """One passage."""
        row = self._passages.get(identifier)
        return None if row is None else Passage.from_row(row)

    def passages(self) -> Iterator[Passage]:
        """All passages."""
        for _, row in self._passages.items():
            yield Passage.from_row(row)

    def __len__(self) -> int:
        return len(self._passages)

    def put(self, path: str, row: dict[str, Any], passages: list[Passage]) -> list[str]:
        """Record a document with its passages; returns ids of passages it no longer has."""
        ids = [passage.id for passage in passages]
        before = (self.document(path) or {}).get("passages", [])
        with self.store.catalog.transaction():
            for passage in passages:
                self._passages.set(passage.id, passage.row())
            self._documents.set(path, {**row, "passages": ids})
        gone = [identifier for identifier in before if identifier not in set(ids)]
        self._forget(gone)
        return gone

    def remove(self, path: str) -> list[str]:
        """Forget a document; returns the ids of its passages."""
        ids = (self.document(path) or {}).get("passages", [])
        self._documents.delete(path)
        self._forget(ids)
        return ids

    def live_keys(self) -> set[str]:
        """Keys of all caches that some passage refers to."""
        return {self.store.key(passage.identity) for passage in self.passages()}

    def _forget(self, ids: list[str]) -> None:
        """Drop passages, and caches that no other passage shares."""
        rows = [row for i in ids if (row := self._passages.get(i)) is not None]
        for identifier in ids:
            self._passages.delete(identifier)
        if rows:
            live = self.live_keys()
            for row in rows:
                if (key := self.store.key(row["identity"])) not in live:
                    self.store.delete(key)

    def _rebuild(self) -> None:
        documents: dict[str, dict[str, Any]] = {}
        for _, _, note in self.store.iter_notes():
            if "passage" not in note:
                continue
            passage = Passage.from_row(note["passage"])
            row = documents.setdefault(passage.document, {**note["document"], "passages": []})
            row["passages"].append((passage.start, passage.id))
            self._passages.set(passage.id, passage.row())
        for path, row in documents.items():
            row["passages"] = [identifier for _, identifier in sorted(row["passages"])]
            if len(row["passages"]) != row["count"]:  # a passage shared its cache with another
                row["sha256"] = ""  # so the next ingest reads the document again
            self._documents.set(path, row)
