"""What benchmarks ask of the machine: page cache and resident memory (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Callable, Iterable
from pathlib import Path


def drop_from_page_cache(files: Iterable[Path]) -> None:
    """Let the next read of these files come from the disk."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def in_page_cache(file: Path) -> bool:
    """Whether a file's first page is in memory.

    Asking may start to read it, so do not time a cold read right after.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # this file system cannot tell, a RAM disk for one
        return True
    finally:
        os.close(descriptor)
    return True


def peak_growth(work: Callable[[], object]) -> int | None:
    """Bytes by which the process's resident set rose above its start while `work` ran.

    Freed memory is given back to the system first; otherwise `work` could fill it unseen.
    Memory on an accelerator is not counted. None, and nothing is run, where the kernel does not
    tell.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _peak_resident()
    except OSError:
        return None
    work()
    return _peak_resident() - before


def _peak_resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise OSError("no VmHWM in /proc/self/status")
