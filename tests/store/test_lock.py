"""One writer at a time; a dead one is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from store import StoreLocked, WriteLock

HOLD = """
import sys
from pathlib import Path
from store import WriteLock
with WriteLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds the lock of `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_refused_while_held_and_free_after_a_kill(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    with pytest.raises(StoreLocked, match=rf"\(pid {holder.pid}\)"), WriteLock(tmp_path):
        pass
    holder.kill()
    holder.wait()
    with WriteLock(tmp_path):
        pass


def test_taken_again_after_release(tmp_path: Path) -> None:
    for _ in range(2):
        with WriteLock(tmp_path):
            pass
    with pytest.raises(ZeroDivisionError), WriteLock(tmp_path):
        _ = 1 / 0
    with WriteLock(tmp_path):
        pass


def test_the_lock_of_another_folder_is_another(tmp_path: Path) -> None:
    with WriteLock(tmp_path / "a"), WriteLock(tmp_path / "b"):
        pass
