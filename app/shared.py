"""What the views share: the one engine of the process, and safe ways to show text."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from contextlib import contextmanager

import streamlit as st

from cag.engine import CAG
from cag.errors import CagError
from cag.lm.decode import Generation
from cag.settings import Settings
from store import StoreError

_MARKS = re.compile(f"[{re.escape(string.punctuation)}]")


@st.cache_resource(show_spinner=False)
def engine() -> CAG:
    """The engine of all sessions, with one copy of each model. They share nothing else."""
    return CAG(Settings.from_environment())


@st.cache_resource(show_spinner="Opening the index…")
def open_index() -> None:
    """Load embedder and index; here because two sessions must not do it at the same time."""
    cag = engine()
    cag.retriever.search("?", 1)  # the first search imports and sets up


@st.cache_resource(show_spinner="Loading the model…")
def warm_up(target: str) -> None:
    """Load and run what answers with `target` once, so that no timing shows a first time."""
    engine().ask("?", target=target, sources=[], generation=Generation(max_tokens=1))


@contextmanager
def errors() -> Iterator[None]:
    """Show an error that a user can cause as one line."""
    try:
        yield
    except (CagError, StoreError, OSError) as error:
        st.error(literal(str(error)))


def literal(text: str) -> str:
    """Markdown that shows `text` as it is, on one line; only `code` stays code."""
    pieces = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(
        piece if at % 2 else _MARKS.sub(r"\\\g<0>", piece) for at, piece in enumerate(pieces)
    )


def code(text: str) -> str:
    """Markdown that shows `text` as code: for labels, where nothing else is safe."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"
