"""Writing files so that a crash leaves either the old one or the new one."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from pathlib import Path

from store.errors import StoreFull

TEMPORARY = ".tmp-"


def private_folder(path: Path) -> Path:
    """Create a folder only its owner can enter."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file, flush it to disk and put it in place.

    Raises
    ------
    StoreFull
        If the disk is full; the temporary file is removed and nothing else changed.
    """
    private_folder(path.parent)
    handle, name = tempfile.mkstemp(prefix=f"{TEMPORARY}{os.getpid()}-", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                f"no room left on the disk of '{path.parent}'; free some, or run `cag store gc`"
            ) from error
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def abandoned(path: Path) -> bool:
    """Whether a temporary file's writer is gone (or took longer than an hour)."""
    try:
        process = int(path.name.removeprefix(TEMPORARY).split("-")[0])
        os.kill(process, 0)
    except (ValueError, ProcessLookupError):
        return True
    except PermissionError:
        pass
    try:
        return time.time() - path.stat().st_mtime > 3600
    except FileNotFoundError:
        return False
