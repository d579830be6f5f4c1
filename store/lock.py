"""One writer at a time, across processes."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import filelock

from store.errors import StoreLocked
from store.files import private_folder


class WriteLock:
    """Context manager that holds a folder for writing.

    Raises
    ------
    StoreLocked
        On entry, naming the process that holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = private_folder(folder) / "write.lock"
        self._owner = self._path.with_suffix(".pid")
        self._lock = filelock.FileLock(self._path, timeout=0)

    def __enter__(self) -> WriteLock:
        try:
            self._lock.acquire()
        except filelock.Timeout:
            owner = self._owner.read_text() if self._owner.exists() else "unknown"
            raise StoreLocked(
                f"another process (pid {owner}) is writing to '{self._path.parent}'; "
                "wait until it is done and run the command again"
            ) from None
        self._owner.write_text(str(os.getpid()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._owner.unlink(missing_ok=True)
        self._lock.release()
