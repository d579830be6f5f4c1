"""Ingest: documents -> passages -> reference prefill -> store.

Caches are written first, then vectors, then the document's row. A run that is killed leaves
at worst caches without a row; the next run finds them and goes on.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cag import documents
from cag.errors import IngestError, NothingToRead, UnreadableDocument
from cag.library import Library, Passage, passage_id
from cag.lm.loading import LM
from cag.lm.prefill import prefill
from cag.lm.prompt import PASSAGE_FORMAT, REFERENCE_PREFIX, prefix_ids
from cag.lm.spec import hash_ids
from cag.retrieval import Retriever
from cag.settings import Settings
from store import CacheStore

_GROUP = 16  # passages that are prefilled, stored and recorded together


@dataclass
class IngestReport:
    """What an ingest did.

    Attributes
    ----------
    added, changed, unchanged, removed
        Paths of documents.
    skipped
        (path, reason) of files that could not be ingested. What was read of them before is kept,
        unless they hold nothing to read any more.
    evicted
        Caches that had to leave the store for new ones, because it is full.
    passages, tokens
        Passages prefilled, and their reference tokens.
    seconds
        Wall clock.
    """

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    evicted: int = 0
    passages: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Progress:
    """Where an ingest is: bytes of files done and in all, tokens read, seconds spent."""

    path: str
    done: int
    total: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def eta(self) -> float | None:
        """Seconds left, or None before anything is done."""
        return self.seconds * (self.total - self.done) / self.done if self.done else None


@dataclass
class _Pending:
    path: str
    row: dict[str, Any]
    passages: list[tuple[Passage, list[int]]]
    size: int
    fresh: bool


class Ingestor:
    """Ingests documents into one store with one reference model.

    Parameters
    ----------
    library, retriever
        Where rows and vectors go.
    reference
        Called once, when the first document needs the model.
    settings
        Passage size and batch.
    on_progress
        Called after every group of passages.
    """

    def __init__(
        self,
        library: Library,
        retriever: Retriever,
        reference: Callable[[], LM],
        settings: Settings,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._library, self._retriever = library, retriever
        self._load_reference, self._settings = reference, settings
        self._on_progress = on_progress
        self.report = IngestReport()
        self._pending: list[_Pending] = []
        self._seen: dict[str, str] = {}
        self._evicted = library.store.evictions
        self._done = self._total = 0
        self._started = time.perf_counter()

    def run(self, paths: Sequence[Path], *, prune: bool = False) -> IngestReport:
        """Ingest files and folders.

        Raises
        ------
        IngestError
            If no file was found at all.
        """
        files = documents.find_files(paths)
        if not files and not prune:
            raise IngestError(
                f"no documents found in {', '.join(map(str, paths))}; "
                "give a folder or file with Markdown, text, HTML, PDF, DOCX or source code"
            )
        self._total = sum(file.stat().st_size for file in files)
        for path, file in {str(file.resolve()): file for file in files}.items():
            self._take(path, file.read_bytes, functools.partial(documents.parse, path))
        self._flush()
        if prune:
            self._prune(paths, {str(file.resolve()) for file in files})
        return self._finished()

    def run_texts(self, texts: Mapping[str, str]) -> IngestReport:
        """Ingest texts by name; a name stands where a file has its path."""
        self._total = sum(len(text.encode(errors="replace")) for text in texts.values())
        for name, text in texts.items():
            read = functools.partial(text.encode, errors="replace")
            self._take(name, read, functools.partial(documents.parse, name, suffix=".md"))
        self._flush()
        return self._finished()

    def _take(
        self,
        path: str,
        read: Callable[[], bytes],
        load: Callable[[bytes], documents.Document],
    ) -> None:
        """One document, if there is anything new in it."""
        known, size = None, 0
        try:
            path.encode()
            known = self._library.document(path)
            data = read()
            size = len(data)
            digest = hashlib.sha256(data).hexdigest()
            if digest in self._seen:
                raise NothingToRead(f"same content as {self._seen[digest]}")
            if known and known["sha256"] == digest and self._intact(known):
                self.report.unchanged.append(path)
                self._advance(path, size)
            else:
                self._pending.append(self._prepare(path, load(data), size, fresh=known is None))
            self._seen[digest] = path
        except UnicodeEncodeError:
            path = path.encode(errors="replace").decode()
            self.report.skipped.append((path, "its name is not UTF-8; rename it"))
            self._advance(path, size)
        except (OSError, UnreadableDocument) as error:
            if known and isinstance(error, NothingToRead):
                self._forget(path)
                self._retriever.save()
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self.report.skipped.append((path, reason or "cannot be read"))
            self._advance(path, size)
        if sum(len(p.passages) for p in self._pending) >= _GROUP:
            self._flush()

    def _forget(self, path: str) -> None:
        self._retriever.remove(self._library.remove(path))
        self.report.removed.append(path)

    def _finished(self) -> IngestReport:
        self.report.evicted = self._library.store.evictions - self._evicted
        self.report.seconds = time.perf_counter() - self._started
        return self.report

    def _intact(self, row: dict[str, Any]) -> bool:
        """Whether every passage has its cache, made with today's settings."""
        if row["settings"] != self._shape():
            return False
        passages = [self._library.passage(identifier) for identifier in row["passages"]]
        return all(p is not None and self._library.store.has(p.identity) for p in passages)

    def _shape(self) -> dict[str, Any]:
        reference = self._load_reference()
        return {
            "reference": reference.name,
            "fingerprint": reference.fingerprint,
            "dtype": str(reference.dtype),
            "passage_tokens": self._settings.passage_tokens,
            "join_tokens": self._settings.join_tokens,
            "codec": self._library.store.codec.name,
        }

    def _prepare(self, path: str, document: documents.Document, size: int, fresh: bool) -> _Pending:
        lm = self._load_reference()
        spans = documents.split(
            document,
            count_tokens=lambda text: len(lm.encode(PASSAGE_FORMAT.format(text=text))),
            max_tokens=self._settings.passage_tokens,
            join_tokens=self._settings.join_tokens,
        )
        passages = []
        for span in spans:
            ids, offsets = lm.encode_with_offsets(PASSAGE_FORMAT.format(text=span.text))
            passage = Passage(
                id=passage_id(path, span.start, span.text),
                document=path,
                title=span.title,
                start=span.start,
                end=span.end,
                text=span.text,
                spans=offsets,
                identity=reference_identity(lm, ids),
            )
            passages.append((passage, ids))
        row = {
            "sha256": document.sha256,
            "title": document.title,
            "kind": document.kind,
            "bytes": size,
            "settings": self._shape(),
        }
        return _Pending(path, row, passages, size, fresh)

    def _flush(self) -> None:
        """Prefill, store and record everything pending."""
        if not self._pending:
            return
        store_passages(
            self._load_reference(),
            self._library.store,
            [item for pending in self._pending for item in pending.passages],
            self._settings.batch,
            self._count,
        )
        documents = [(p.path, p.row, [found for found, _ in p.passages]) for p in self._pending]
        for _, _, passages in documents:
            self._retriever.add(passages)
        self._retriever.remove(self._library.put(documents))
        for pending in self._pending:
            (self.report.added if pending.fresh else self.report.changed).append(pending.path)
        self._retriever.save()
        for pending in self._pending:
            self._advance(pending.path, pending.size)
        self._pending.clear()

    def _count(self, tokens: int) -> None:
        self.report.passages += 1
        self.report.tokens += tokens

    def _advance(self, path: str, size: int) -> None:
        self._done += size
        seconds = time.perf_counter() - self._started
        self._on_progress(Progress(path, self._done, self._total, self.report.tokens, seconds))

    def _prune(self, paths: Sequence[Path], kept: set[str]) -> None:
        roots = [str(path.resolve()) for path in paths]
        for path in self._library.documents():
            under = any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)
            if under and path not in kept and _gone(path):
                self._forget(path)
        self._retriever.save()


def _gone(path: str) -> bool:
    """Whether a file is known not to be there; one in a folder that cannot be entered may be."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def reference_identity(lm: LM, ids: Sequence[int]) -> dict[str, Any]:
    """Everything that shapes a passage's reference cache."""
    return {
        "model": lm.fingerprint,
        "tokenizer": lm.tokenizer_fingerprint,
        "dtype": str(lm.dtype),
        "prefix": hash_ids(prefix_ids(lm, REFERENCE_PREFIX)),
        "ids": hash_ids(ids),
        "tokens": len(ids),
    }


def store_passages(
    lm: LM,
    store: CacheStore,
    items: Sequence[tuple[Passage, list[int]]],
    batch: int,
    on_stored: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Prefill passages that have no cache yet and store them.

    Writing goes on in a thread while the next batch is being read.

    Parameters
    ----------
    items
        Passages, each with its reference ids.
    on_stored
        Called with the number of tokens of each passage stored.
    """
    prefix = prefix_ids(lm, REFERENCE_PREFIX)
    missing = {store.key(passage.identity): (passage, ids) for passage, ids in items}
    todo = [item for item in missing.values() if not store.has(item[0].identity)]
    todo.sort(key=lambda item: len(item[1]))
    written: list[Future[str]] = []
    with ThreadPoolExecutor(1) as writer:
        for start in range(0, len(todo), batch):
            group = todo[start : start + batch]
            caches = prefill(lm, prefix, [ids for _, ids in group])
            for future in written:
                future.result()
            written = []
            for (passage, ids), kv in zip(group, caches, strict=True):
                tensors = {"keys": kv.keys, "values": kv.values}
                put = writer.submit(store.put, passage.identity, tensors, tokens=len(ids))
                written.append(put)
                on_stored(len(ids))
        for future in written:
            future.result()
