"""Draw sources: each retrieved passage, marked where it stands in its document."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from app import shared
from cag import documents
from cag.errors import CagError
from cag.library import Passage
from cag.retrieval import Source

AROUND = 300  # characters of context on either side

_STYLE = "white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.55"
_MARK = (  # on light and on dark the text keeps its own colour
    "background: rgba(255, 190, 40, .28); color: inherit; border-radius: .2rem; padding: .1rem 0"
)


def draw_sources(sources: Sequence[Source]) -> None:
    """One expander per source, the best one open."""
    for number, source in enumerate(sources, 1):
        passage = source.passage
        name = passage.title.strip() or Path(passage.document).name
        label = f"{number} · {shared.code(name)} · score {source.score:.2f}"
        with st.expander(label, expanded=number == 1):
            _passage(passage)


def _passage(passage: Passage) -> None:
    place = f"{passage.document}, characters {passage.start:,}–{passage.end:,}"
    st.caption(shared.code(place))
    before, after = "", ""
    text = _text(passage.document)
    if text is not None and text[passage.start : passage.end] == passage.text:
        before, after = surroundings(text, passage.start, passage.end)
    else:
        st.caption(":material/history: The document has changed or is gone; ingest it again.")
    parts = (html.escape(part) for part in (before, passage.text, after))
    marked = '<div style="{0}">{2}<mark style="{1}">{3}</mark>{4}</div>'
    st.html(marked.format(_STYLE, _MARK, *parts))


def surroundings(text: str, start: int, end: int, around: int = AROUND) -> tuple[str, str]:
    """What stands before and after a span, cut between lines or words where it is cut."""
    before, after = text[max(0, start - around) : start], text[end : end + around]
    if start > around:
        before = "… " + before.partition(_border(before[: around // 2]))[2]
    if end + around < len(text):
        after = after.rpartition(_border(after[-around // 2 :]))[0] + " …"
    return before.lstrip("\n"), after.rstrip("\n")


def _border(text: str) -> str:
    """Where to cut: at a line's end if there is one."""
    return "\n" if "\n" in text else " "


def _text(document: str) -> str | None:
    """A document's text as it is now, or None if it cannot be read."""
    try:
        return _load(document, Path(document).stat().st_mtime_ns)
    except (CagError, OSError):
        return None


@st.cache_data(max_entries=32, show_spinner=False)
def _load(document: str, changed: int) -> str:
    """Text of a file; `changed` makes a new version a new entry."""
    return documents.load(Path(document)).text
