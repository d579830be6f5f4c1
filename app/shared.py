"""What the views share: the one engine of the process, and safe ways to show text."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import streamlit as st

from app.jobs import KNOWN_ERRORS, Job, Jobs, one_line
from cag.engine import CAG
from cag.lm.decode import Generation
from cag.settings import Settings

#: The project's folder, for its documentation and the report that comes with it.
ROOT = Path(__file__).resolve().parent.parent

_MARKS = re.compile(f"[{re.escape(string.punctuation)}]")


# -- one of each in the process ----------------------------------------------------------------


@st.cache_resource(show_spinner=False)
def engine() -> CAG:
    """The engine of all sessions, with one copy of each model. They share nothing else."""
    return CAG(Settings.from_environment())


@st.cache_resource(show_spinner=False)
def jobs() -> Jobs:
    """What runs in the background, for all sessions: a page that is reloaded finds it again."""
    return Jobs()


def start(name: str, title: str, work: Callable[[Job], Any]) -> None:
    """Start a job and draw the page anew, with its progress; or say why not, as one line."""
    try:
        jobs().start(name, title, work)
    except KNOWN_ERRORS as error:
        st.error(literal(one_line(error)))
        return
    st.rerun()


@st.cache_resource(show_spinner=False)
def open_index() -> None:
    """Load embedder and index; here because two sessions must not do it at the same time."""
    cag = engine()
    cag.retriever.search("?", 1)  # the first search imports and sets up


@st.cache_resource(show_spinner=False)
def warm_up(target: str, mode: str) -> None:
    """Load and run what answers on a path once, so that no timing shows a first time."""
    cag = engine()
    sources = cag.retriever.search("?", 1)
    if mode == "own":  # which would store what nobody asked about
        mode = "direct"
    cag.ask("?", target=target, mode=mode, sources=sources, generation=Generation(max_tokens=1))
    cag.translations.clear()  # nobody asked about this passage


# -- text ----------------------------------------------------------------------------------------


@contextmanager
def errors() -> Iterator[None]:
    """Show an error that a user can cause as one line."""
    try:
        yield
    except KNOWN_ERRORS as error:
        st.error(literal(one_line(error)))


def literal(text: str) -> str:
    """Markdown that shows `text` as it is, on one line; only `code` stays code."""
    pieces = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(
        piece if at % 2 else _MARKS.sub(r"\\\g<0>", piece) for at, piece in enumerate(pieces)
    )


def code(text: str) -> str:
    """Markdown that shows `text` as code: for labels, where nothing else is safe."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"


def milliseconds(value: float) -> str:
    """A duration for people."""
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.3g} s"


def size(number: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def fixed(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where there is none."""
    return "–" if value is None or math.isnan(value) else f"{value:,.{digits}f}"
