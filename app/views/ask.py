"""Ask: one question, answered on one path or on two side by side."""

from __future__ import annotations

from dataclasses import dataclass

import streamlit as st

from app import answers, shared
from app.views import documents
from cag.answer import Answer
from cag.engine import CAG
from cag.lm.pull import list_models

MODES = {
    "Compare translated and direct": ("translated", "direct"),
    "Translated caches": ("translated",),
    "Direct: the target reads the text": ("direct",),
    "The target's own stored caches": ("own",),
}


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    question: str
    target: str
    modes: tuple[str, ...]
    k: int


def show() -> None:
    """Draw the view."""
    cag = shared.engine()
    st.header("Ask")
    if not len(cag.library) and not _first_documents(cag):
        return
    request = _form(cag)
    place = st.empty()
    if request is not None:
        st.session_state.pop("answers", None)
        with shared.errors():
            shared.open_index()
            shared.warm_up(request.target)
            with place.container():
                st.session_state["answers"] = _stream(cag, request)
        if "answers" not in st.session_state:
            place.empty()  # half an answer above an error would puzzle
    if "answers" in st.session_state:
        with place.container():
            answers.draw(st.session_state["answers"])


def _first_documents(cag: CAG) -> bool:
    """Say how to fill an empty store; True as soon as it holds something."""
    hint = st.empty()
    hint.info(
        "There is nothing to ask about yet. Upload documents here, or run `cag ingest PATH...` "
        "in a terminal and reload this page."
    )
    documents.upload()
    if not len(cag.library):
        return False
    hint.empty()
    return True


def _form(cag: CAG) -> Request | None:
    """The question and how to answer it; None until Ask is pressed."""
    settings = cag.settings
    pulled = [m.name for m in list_models(settings.home) if m.kind == "llm" and m.pulled]
    asked = st.session_state.get("answers")
    st.session_state.setdefault("question", asked[0].question if asked else "")
    with st.form("ask"):
        question = st.text_input(
            "Question", key="question", placeholder="What do the documents say about …?"
        )
        columns = st.columns([3, 3, 1, 1], vertical_alignment="bottom")
        mode = columns[0].selectbox("Mode", list(MODES))
        target = columns[1].selectbox(
            "Target model", list(dict.fromkeys([settings.target, *pulled]))
        )
        k = columns[2].number_input("Passages", min_value=1, max_value=50, value=settings.k)
        pressed = columns[3].form_submit_button("Ask", type="primary", width="stretch")
    return Request(question, target, MODES[mode], k) if pressed else None


def _stream(cag: CAG, request: Request) -> list[Answer]:
    """Answer mode after mode, each into its own column as it is written."""
    finished = []
    slots = []
    for column, mode in zip(st.columns(len(request.modes)), request.modes, strict=True):
        column.subheader(answers.TITLES[mode], anchor=False)
        slots.append(column.empty())
        slots[-1].caption("…")
    for slot, mode in zip(slots, request.modes, strict=True):
        stream = cag.stream(request.question, target=request.target, mode=mode, k=request.k)
        text = ""
        for piece in stream:
            text += piece
            slot.text(text)
        finished.append(stream.answer)
    return finished
