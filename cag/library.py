"""The library: which documents were ingested, and into which passages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cag.align import Span as TokenSpan
from store import CacheStore
from store.files import private_folder, write_atomically


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
        """The passage of a row; what else the row holds is ignored."""
        known = {name: row[name] for name in cls.__dataclass_fields__}
        return cls(**{**known, "spans": [(a, b) for a, b in row["spans"]]})


def passage_id(document: str, start: int, text: str) -> str:
    """Identifier of a passage, the same in every run."""
    return hashlib.sha256(f"{document}\0{start}\0{text}".encode()).hexdigest()[:16]


class Library:
    """Documents and passages, in the store's catalog.

    Every document also has a JSON file of its own, from which a lost catalog is rebuilt.
    """

    def __init__(self, store: CacheStore) -> None:
        self.store = store
        self._documents = store.catalog.table("documents")
        self._passages = store.catalog.table("passages")
        self._own = store.catalog.table("own")
        self._files = private_folder(store.folder / "documents")
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

    def put(self, documents: Sequence[tuple[str, dict[str, Any], list[Passage]]]) -> list[str]:
        """Record documents: path, row, passages. Returns ids of passages they no longer have."""
        before: dict[str, dict[str, Any]] = {}
        gone: list[str] = []
        for path, row, passages in documents:
            rows = {p.id: {**p.row(), "key": self.store.key(p.identity)} for p in passages}
            content = {"path": path, "row": row, "passages": list(rows.values())}
            write_atomically(self._file(path), json.dumps(content).encode())
            had = self._passage_rows(path)
            lost = [identifier for identifier in had if identifier not in rows]
            with self.store.catalog.transaction():
                for identifier in lost:
                    self._passages.delete(identifier)
                self._enter(path, row, rows)
            before |= had
            gone += lost
        self._drop_caches(before)  # last: a paragraph may have moved to another document
        return gone

    def remove(self, path: str) -> list[str]:
        """Forget a document; returns the ids of its passages."""
        before = self._passage_rows(path)
        self._file(path).unlink(missing_ok=True)
        with self.store.catalog.transaction():
            for identifier in before:
                self._passages.delete(identifier)
            self._documents.delete(path)
        self._drop_caches(before)
        return list(before)

    def note_own(self, passages: Sequence[str], key: str) -> None:
        """A cache is there, besides the reference's, that has seen these passages.

        It goes when one of them goes.
        """
        if all(key in (self._own.get(identifier) or ()) for identifier in passages):
            return  # as on every later use: no need to lock the catalog
        with self.store.catalog.transaction():
            for identifier in passages:
                if identifier not in self._passages:
                    continue  # of another store, or forgotten meanwhile: gc takes it
                keys = self._own.get(identifier) or []
                if key not in keys:
                    self._own.set(identifier, [*keys, key])

    def live_keys(self) -> set[str]:
        """Keys of all caches that some passage refers to."""
        rows = dict(self._passages.items())
        own = {key for identifier, keys in self._own.items() if identifier in rows for key in keys}
        return {row["key"] for row in rows.values()} | own

    def _file(self, path: str) -> Path:
        return self._files / f"{hashlib.sha256(path.encode()).hexdigest()[:32]}.json"

    def _passage_rows(self, path: str) -> dict[str, dict[str, Any]]:
        ids = (self.document(path) or {}).get("passages", [])
        return {i: row for i in ids if (row := self._passages.get(i)) is not None}

    def _enter(self, path: str, row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
        for identifier, passage in rows.items():
            self._passages.set(identifier, passage)
        self._documents.set(path, {**row, "passages": list(rows)})

    def _drop_caches(self, rows: dict[str, dict[str, Any]]) -> None:
        """Delete the caches of these passages that no passage refers to any more."""
        gone = {i: row for i, row in rows.items() if i not in self._passages}
        for identifier in gone:
            for key in self._own.get(identifier) or []:
                self.store.delete(key)
            self._own.delete(identifier)
        keys = {row["key"] for row in rows.values()}
        for key in keys - self.live_keys() if keys else keys:
            self.store.delete(key)

    def _rebuild(self) -> None:
        for file in sorted(self._files.glob("*.json")):
            try:
                content = json.loads(file.read_bytes())
                rows = {row["id"]: row for row in content["passages"]}
                self._enter(content["path"], content["row"], rows)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # the next ingest reads that document again
