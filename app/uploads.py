"""Keep uploaded files below the home folder, so that they can be read again."""

from __future__ import annotations

import tempfile
from pathlib import Path


def keep(folder: Path, name: str, content: bytes) -> Path:
    """Write an upload into `folder`, always at the same path for the same file name."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / safe_name(name)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
        file.write(content)
    return Path(file.name).replace(path)


def safe_name(name: str) -> str:
    """A file name without folders, control characters or leading dots, of moderate length."""
    last = "".join(c for c in name.replace("\\", "/").split("/")[-1] if c.isprintable())
    path = Path(last.strip().lstrip(".") or "document")
    stem, suffix = (part.encode() for part in (path.stem, path.suffix))
    return (stem[:200] + suffix[:40]).decode(errors="ignore")


def forget(folder: Path, document: str) -> None:
    """Delete a document's file if it is one that was uploaded."""
    if Path(document).parent == folder.resolve():
        Path(document).unlink(missing_ok=True)
