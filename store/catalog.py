"""The catalog: JSON values in diskcache tables, never a pickle.

diskcache pickles what it does not know and unpickles whatever it reads (CVE-2025-69872), and
it evicts silently above a limit that it remembers in the folder. Here keys and values are text,
rows of any other kind count as absent, and nothing is ever evicted behind our back.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import MODE_PICKLE, MODE_RAW, MODE_TEXT

from store.errors import StoreLocked
from store.files import private_folder

_LIMIT = 2**50  # diskcache insists on one; ours are enforced by the cache store
_SEPARATOR = "\x1f"


class _TextDisk(diskcache.Disk):
    """Text in, text out."""

    def put(self, key: str) -> tuple[str, bool]:
        return key, True

    def get(self, key: Any, raw: bool) -> str:
        return key if raw and isinstance(key, str) else ""

    def store(self, value: str, read: bool, key: Any = diskcache.UNKNOWN) -> tuple[Any, ...]:
        return 0, MODE_RAW, None, value

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> Any:
        if mode == MODE_PICKLE or not isinstance(value, str) or filename:
            return None
        return value


class Catalog:
    """Named tables of JSON values.

    Attributes
    ----------
    rebuilt
        True if a damaged catalog was set aside when this one was opened.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = private_folder(folder)
        self.rebuilt = False
        try:
            self._cache = self._open()
        except (sqlite3.OperationalError, diskcache.Timeout) as error:
            raise StoreLocked(
                f"the catalog in '{folder}' cannot be opened ({error or 'busy'}); another "
                "process may be writing for long: try again"
            ) from error
        except sqlite3.DatabaseError:
            self._set_aside()
            self._cache = self._open()

    def _open(self) -> diskcache.Cache:
        cache = diskcache.Cache(
            str(self.folder),
            disk=_TextDisk,
            disk_min_file_size=2**40,  # never a value in a file of its own
            size_limit=_LIMIT,
            cull_limit=0,
            eviction_policy="none",
        )
        for (message,) in cache._sql("PRAGMA quick_check(1)").fetchall():
            if message != "ok":
                cache.close()
                raise sqlite3.DatabaseError(message)
        return cache

    def _set_aside(self) -> None:
        broken = self.folder.with_name(f"{self.folder.name}.broken-{time.time_ns()}")
        shutil.move(self.folder, broken)
        private_folder(self.folder)
        self.rebuilt = True

    def table(self, name: str) -> Table:
        """A table; it exists as soon as something is put in it."""
        return Table(self._cache, name)

    def transaction(self) -> AbstractContextManager[None]:
        """All changes inside happen together or not at all."""
        return self._cache.transact(retry=True)

    def foreign_rows(self) -> int:
        """Rows that are not text, and so not ours: a planted pickle, for instance."""
        query = "SELECT COUNT(*) FROM Cache WHERE mode NOT IN (?, ?) OR typeof(value) != 'text'"
        return int(self._cache._sql(query, (MODE_RAW, MODE_TEXT)).fetchone()[0])

    def close(self) -> None:
        """Close the database."""
        self._cache.close()


class Table:
    """A mapping of text keys to JSON values."""

    def __init__(self, cache: diskcache.Cache, name: str) -> None:
        self._cache, self._prefix = cache, name + _SEPARATOR

    def get(self, key: str) -> Any:
        """The value, or None."""
        return _parsed(self._cache.get(self._prefix + key, retry=True))

    def set(self, key: str, value: Any) -> None:
        """Store a JSON value."""
        self._cache.set(self._prefix + key, json.dumps(value), retry=True)

    def delete(self, key: str) -> bool:
        """Remove; says whether it was there."""
        return bool(self._cache.delete(self._prefix + key, retry=True))

    def keys(self) -> list[str]:
        """All keys, sorted."""
        return [key[len(self._prefix) :] for (key,) in self._rows("key")]

    def _rows(self, columns: str, condition: str = "") -> list[tuple[Any, ...]]:
        low, high = self._prefix, self._prefix[:-1] + chr(ord(_SEPARATOR) + 1)
        query = f"SELECT {columns} FROM Cache WHERE raw = 1 AND key >= ? AND key < ? {condition}"
        return list(self._cache._sql(f"{query} ORDER BY key", (low, high)).fetchall())

    def items(self) -> Iterator[tuple[str, Any]]:
        """All keys with their values, read at once."""
        rows = self._rows("key, value", f"AND mode != {MODE_PICKLE} AND filename IS NULL")
        for key, text in rows:
            value = _parsed(text)
            if value is not None:
                yield key[len(self._prefix) :], value

    def __len__(self) -> int:
        return len(self.keys())

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None


def _parsed(text: Any) -> Any:
    if not isinstance(text, str):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None
