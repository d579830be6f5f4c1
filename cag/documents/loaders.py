"""Loaders: one function and one registry line per kind of file."""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cag.errors import IngestError, NothingToRead, UnreadableDocument

_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "venv", "site-packages", "dist", "build"}
_BOMS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


@dataclass(frozen=True)
class Document:
    """A document as text.

    Attributes
    ----------
    path
        Absolute path of the file.
    title
        From the document itself where it has one, else the file's name.
    text
        Its text with ``\\n`` line ends; headings are marked with ``#`` as in Markdown.
    kind
        Name of its loader.
    sha256
        Of the file's bytes.
    """

    path: str
    title: str
    text: str
    kind: str
    sha256: str


#: A loader turns bytes into a title (or "") and text.
Loader = Callable[[bytes], tuple[str, str]]


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Files to ingest: those named, and those of a known kind under the folders named.

    Raises
    ------
    IngestError
        If a path does not exist.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found |= dict.fromkeys(_walk(path))
        elif path.exists():
            found[path] = None
        else:
            raise IngestError(f"'{path}' does not exist; give an existing file or folder")
    return list(found)


def _walk(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):  # does not follow links, so it cannot loop
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in _SKIPPED_FOLDERS)
        for name in sorted(files):
            path = Path(folder) / name
            if not name.startswith(".") and path.suffix.lower() in LOADERS and path.is_file():
                yield path


def load(path: Path) -> Document:
    """Read a file as text.

    Raises
    ------
    UnreadableDocument
        With the reason in one line, whatever the parser raised.
    OSError
        If the file cannot be opened.
    """
    return parse(str(path.absolute()), path.read_bytes())


def parse(path: str, data: bytes, suffix: str | None = None) -> Document:
    """Make a document of a file's bytes.

    Parameters
    ----------
    path
        Names the document.
    data
        Its bytes.
    suffix
        Decides how they are read; default the path's.

    Raises
    ------
    UnreadableDocument
        With the reason in one line, whatever the parser raised.
    """
    suffix = Path(path).suffix if suffix is None else suffix
    kind, loader = LOADERS.get(suffix.lower(), ("text", _text))
    try:
        title, text = loader(data)
    except UnreadableDocument:
        raise
    except Exception as error:  # parser libraries raise anything on a broken file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnreadableDocument(f"broken {kind} file: {reason}") from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise NothingToRead("holds no text")
    return Document(
        path=path,
        title=title.strip() or Path(path).name or path,
        text=text,
        kind=kind,
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _text(data: bytes) -> tuple[str, str]:
    for bom, encoding in _BOMS.items():
        if data.startswith(bom):
            return "", data.decode(encoding)
    if b"\0" in data:
        raise UnreadableDocument("is binary; convert it to text, PDF or DOCX first")
    try:
        return "", data.decode("utf-8")
    except UnicodeDecodeError:
        return "", data.decode("cp1252", errors="replace")


def _markdown(data: bytes) -> tuple[str, str]:
    _, text = _text(data)
    first = next((line for line in text.splitlines() if line.strip()), "")
    return (first.lstrip("#").strip() if first.startswith("#") else ""), text


def _html(data: bytes) -> tuple[str, str]:
    from bs4 import BeautifulSoup

    if b"\0" in data and not data.startswith(tuple(_BOMS)):
        raise UnreadableDocument("is binary; convert it to text, PDF or DOCX first")
    soup = BeautifulSoup(data, "html.parser")
    title = soup.title.get_text(" ", strip=True) if soup.title else ""
    for tag in soup(["script", "style", "nav", "template", "noscript", "head"]):
        tag.decompose()
    return title, "\n\n".join(block for block in _html_blocks(soup) if block)


_INLINE = frozenset(
    """a abbr b bdi bdo br cite code data del dfn em font i img ins kbd label mark q s samp small
    span strong sub sup time tt u var wbr""".split()  # noqa: SIM905
)
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}


def _html_blocks(tag: Any) -> Iterator[str]:
    """Text of a page, block by block; every word comes exactly once."""
    line: list[str] = []
    for child in tag.children:
        name = getattr(child, "name", None)
        if name is None or (name in _INLINE and not child.find(lambda t: t.name not in _INLINE)):
            if name is not None or type(child).__name__ == "NavigableString":
                line.append("\n" if name == "br" else child.get_text())
            continue
        yield _one_line(line)
        line = []
        if name == "pre":
            yield child.get_text().strip("\n")
        elif name == "tr":
            yield " | ".join(
                " ".join(cell.get_text(" ").split()) for cell in child.find_all(["td", "th"])
            )
        else:
            mark = _HEADINGS.get(name, "- " if name == "li" else "")
            for block in _html_blocks(child):
                yield mark + block if block else ""
                mark = mark if not block else ""
    yield _one_line(line)


def _one_line(parts: list[str]) -> str:
    return " ".join("".join(parts).split())


def _pdf(data: bytes) -> tuple[str, str]:
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise UnreadableDocument("is encrypted; save it without a password first")
    text = "\n\n".join(page.extract_text() for page in reader.pages)
    if not text.strip():
        raise UnreadableDocument("holds no text, only images; run OCR on it first")
    return (reader.metadata.title if reader.metadata else "") or "", text


def _docx(data: bytes) -> tuple[str, str]:
    from docx import Document as read_docx
    from docx.table import Table

    document = read_docx(io.BytesIO(data))
    blocks = []
    for block in document.iter_inner_content():
        if isinstance(block, Table):
            rows = (" | ".join(cell.text.strip() for cell in row.cells) for row in block.rows)
            blocks.append("\n".join(rows))
            continue
        style = (block.style.name or "") if block.style is not None else ""
        level = style.removeprefix("Heading ")
        marked = style.startswith("Heading ") and level.isdigit()
        blocks.append(("#" * int(level) + " " if marked else "") + block.text)
    return document.core_properties.title or "", "\n\n".join(b for b in blocks if b.strip())


_CODE = """py js mjs ts tsx jsx java kt scala go rs c h cc cpp hpp cs rb php swift sh bash sql r jl
lua pl css scss proto""".split()  # noqa: SIM905
_PLAIN = "txt text rst log json jsonl yaml yml toml ini cfg csv tsv tex org".split()  # noqa: SIM905

LOADERS: dict[str, tuple[str, Loader]] = {
    ".md": ("markdown", _markdown),
    ".markdown": ("markdown", _markdown),
    ".html": ("html", _html),
    ".htm": ("html", _html),
    ".pdf": ("pdf", _pdf),
    ".docx": ("docx", _docx),
    **{f".{ending}": ("code", _text) for ending in _CODE},
    **{f".{ending}": ("text", _text) for ending in _PLAIN},
}
