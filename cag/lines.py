"""Logs of JSON lines that a crash may cut off anywhere."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def append(log: Path, row: Mapping[str, Any]) -> None:
    """Add a line; one that a crash cut off is ended first."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def read(log: Path) -> Iterator[dict[str, Any]]:
    """All objects in order, none if there is no log; a line that was cut off is passed over."""
    if not log.exists():
        return
    for line in log.read_bytes().decode(errors="replace").split("\n"):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                yield row
