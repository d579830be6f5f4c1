"""Cut a document into passages along its structure.

Written here because exact character offsets are the point: library splitters search each
chunk's text in the document afterwards, which finds the wrong place when text repeats.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cag.documents.loaders import Document

_HEADING = re.compile(r"^(#{1,6})[ \t]+(\S[^\n]*)$", re.MULTILINE)
_CLOSING = re.compile(r"(?:[ \t]+#+)?[ \t]*$")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,}).*?(?:^ {0,3}\1[^\n]*$|\Z)", re.MULTILINE | re.DOTALL)

# From the coarsest border to the finest; each matches the end of a piece.
_BORDERS = tuple(
    re.compile(pattern)
    for pattern in (r"\n[ \t]*\n\s*", r"\n", r"(?<=[.!?。！？])[\"'”’)\]]*\s+", r"\s+")
)
_CHARACTERS_PER_TOKEN = 8  # a stretch shorter than this per token is worth counting whole


@dataclass(frozen=True)
class Span:
    """A passage to be: ``document.text[start:end] == text``."""

    start: int
    end: int
    text: str
    title: str


@dataclass(frozen=True)
class _Section:
    start: int
    end: int
    level: int
    title: str


def split(
    document: Document,
    *,
    count_tokens: Callable[[str], int],
    max_tokens: int = 384,
    join_tokens: int | None = None,
) -> list[Span]:
    """Cut a document into passages.

    Passages are in order, disjoint, and cover all text that is not white space. None has more
    than `max_tokens` tokens. Sections of the two highest heading levels are kept apart unless
    they are tiny.

    Parameters
    ----------
    count_tokens
        Tokens of a text, as the reference model reads it.
    max_tokens
        Upper bound per passage.
    join_tokens
        Paragraphs are joined up to this size only; a longer paragraph stays whole. A passage
        about one thing is found more surely, and read better by a small model, than a long one.
    """
    text = document.text
    joined = min(join_tokens or max_tokens, max_tokens)

    def count(start: int, end: int) -> int:
        start, end = _trimmed(text, start, end)
        return count_tokens(text[start:end]) if end > start else 0

    pieces: list[tuple[int, int, _Section]] = []
    for section in _sections(document):
        for start, end in _cut(text, section.start, section.end, 0, (joined, max_tokens), count):
            pieces.append((start, end, section))
    spans = []
    for start, end, section in _packed(text, pieces, (joined, max_tokens), count):
        start, end = _trimmed(text, start, end)
        if end > start:
            spans.append(Span(start, end, text[start:end], section.title))
    return spans


def _sections(document: Document) -> Iterator[_Section]:
    """Stretches of text between headings, each with the path of headings above it."""
    text = document.text
    if document.kind in ("code", "text"):
        yield _Section(0, len(text), 1, document.title)
        return
    fences = [match.span() for match in _FENCE.finditer(text)]
    headings = [
        match
        for match in _HEADING.finditer(text)
        if not any(start <= match.start() < end for start, end in fences)
    ]
    starts = [match.start() for match in headings]
    if not starts or text[: starts[0]].strip():
        yield _Section(0, starts[0] if starts else len(text), 1, document.title)
    path: list[tuple[int, str]] = []
    for match, end in zip(headings, [*starts[1:], len(text)], strict=False):
        level, heading = len(match[1]), _CLOSING.sub("", match[2], count=1)
        path = [(above, name) for above, name in path if above < level] + [(level, heading)]
        names = [name for _, name in path]
        if names[0] != document.title:
            names.insert(0, document.title)
        yield _Section(match.start(), end, level, " > ".join(names))


def _cut(
    text: str,
    start: int,
    end: int,
    border: int,
    limits: tuple[int, int],
    count: Callable[[int, int], int],
) -> Iterator[tuple[int, int]]:
    """Pieces within `limits` (of a section, of its parts), cut at the coarsest border."""
    limit = limits[min(border, 1)]
    short = end - start <= limit * _CHARACTERS_PER_TOKEN
    if short and count(start, end) <= limit:
        yield start, end
        return
    if border == len(_BORDERS):
        middle = _between_characters(text, start, end)
        if middle is None:  # one character of many tokens: nothing smaller exists
            yield start, end
            return
        yield from _cut(text, start, middle, border, limits, count)
        yield from _cut(text, middle, end, border, limits, count)
        return
    cuts = [m.end() for m in _BORDERS[border].finditer(text, start, end) if start < m.end() < end]
    edges = [start, *cuts, end]
    if len(edges) > 64:  # halve long lists first, so that few pieces are counted
        middle = edges[len(edges) // 2]
        yield from _cut(text, start, middle, border, limits, count)
        yield from _cut(text, middle, end, border, limits, count)
        return
    for left, right in itertools.pairwise(edges):
        yield from _cut(text, left, right, border + 1 if len(edges) == 2 else border, limits, count)


def _between_characters(text: str, start: int, end: int) -> int | None:
    """A place near the middle that separates no combining mark or joined emoji."""
    middle = (start + end) // 2
    for distance in range((end - start) // 2 + 1):
        for at in (middle - distance, middle + distance):
            if start < at < end and not _joined(text, at):
                return at
    return middle if start < middle < end else None


def _joined(text: str, at: int) -> bool:
    before, after = text[at - 1], text[at]
    return (
        unicodedata.combining(after) > 0
        or after in "\u200d\ufe0f"
        or before == "\u200d"
        or "\U0001f3fb" <= after <= "\U0001f3ff"
    )


def _packed(
    text: str,
    pieces: list[tuple[int, int, _Section]],
    limits: tuple[int, int],
    count: Callable[[int, int], int],
) -> Iterator[tuple[int, int, _Section]]:
    """Join neighbours while they fit; a high heading starts anew unless what it ends is tiny.

    A heading alone is joined to what follows up to the second, wider limit.
    """
    held: tuple[int, int, _Section] | None = None
    for start, end, section in pieces:
        if held is not None:
            bare = _HEADING.fullmatch(text[held[0] : held[1]].strip()) is not None
            limit = limits[1] if bare else limits[0]
            opens = section.level <= 2 and start == section.start
            tiny = count(held[0], held[1]) < limit // 4 if opens else True
            near = end - held[0] <= limit * _CHARACTERS_PER_TOKEN
            if tiny and near and count(held[0], end) <= limit:
                held = (held[0], end, held[2])
                continue
            yield held
        held = (start, end, section)
    if held is not None:
        yield held


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    piece = text[start:end]
    start += len(piece) - len(piece.lstrip())
    return start, max(start, start + len(piece.strip()))
