"""Compare: one question, answered by several targets on several paths."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from app import answers, shared
from app.answers import Answered, Result
from app.jobs import KNOWN_ERRORS, one_line
from app.request import MOST_PASSAGES, MOST_TOKENS, Request
from app.targets import offered_targets, refusals
from cag.answer import Answer
from cag.engine import CAG, MODES, Stream
from cag.errors import CagError
from cag.lm.decode import Generation
from cag.retrieval import Source

PATHS = {"translated": "Translated", "direct": "Direct", "own": "Own caches"}
EXAMPLES = (
    "Where do damaged files go?",
    "Which library keeps the vectors?",
    "How much disk does each token need?",
)
#: Seconds for the browser to draw the places of the answers: on the machine that also answers,
#: drawing would be charged to the first answer.
SETTLE = 0.3
#: Documents by whose names the project's own documentation is known.
DOCUMENTATION = {"idea.md", "limits.md", "store.md"}


def show() -> None:
    """Draw the view."""
    cag = shared.engine()
    st.title("Compare", anchor=False)
    if not len(cag.library):
        _empty()
        return
    st.caption(
        f"{shared.code(cag.settings.reference)} has read the documents once. Models answer from "
        "its translated caches, beside the same models reading the text."
    )
    offered = offered_targets(cag)
    request = _current(cag, offered)
    pressed = _form(cag, offered, request)
    examples, place = st.empty(), st.empty()
    if pressed is not None:
        request = pressed
    if pressed is not None or (request.question and st.session_state.get("answered") != request):
        _answer(cag, request, place)
    elif "result" in st.session_state:
        with place.container():
            answers.draw(st.session_state["result"])
    if "result" not in st.session_state and _documented(cag):
        with examples.container():
            _examples()


def _empty() -> None:
    """Say how to fill an empty library."""
    from app.pages import pages  # the pages know the views

    with st.container(border=True):
        st.markdown("**There is nothing to ask about yet.**")
        st.write(
            "Add documents to the library first: upload files, or name a folder on this machine. "
            "They are read once; then any model can answer from them."
        )
        st.page_link(pages()["Library"], label="Add documents", icon=":material/library_add:")


def _documented(cag: CAG) -> bool:
    return {Path(path).name for path in cag.library.documents()} >= DOCUMENTATION


def _examples() -> None:
    st.caption("Questions that the documents in the library answer:")
    with st.container(horizontal=True):
        for question in EXAMPLES:
            st.button(question, on_click=_take, args=(question,))


def _take(question: str) -> None:
    """Ask an example as if it had been typed."""
    st.session_state["question"], st.session_state["pressed"] = question, True


# -- what is asked -------------------------------------------------------------------------------


def _current(cag: CAG, offered: Sequence[str]) -> Request:
    """What the address asks for; after a visit to another page, what was asked before it."""
    query = {name: st.query_params.get_all(name) for name in st.query_params}
    before: Request | None = st.session_state.get("request")
    if before is None or (query and query != before.as_lists()):
        return Request.from_query(query, cag.settings, offered)
    if not query:
        st.query_params.from_dict(before.to_query())
    return before


def _form(cag: CAG, offered: Sequence[str], request: Request) -> Request | None:
    """The question and how to answer it; a request once Ask or Enter is pressed."""
    _fill(request)
    why_not = refusals(cag, offered)
    with st.form("ask"):
        left, right = st.columns([6, 1], vertical_alignment="bottom")
        question = left.text_input(
            "Question", key="question", placeholder="What do the documents say about …?"
        )
        pressed = right.form_submit_button("Ask", type="primary", width="stretch")
        left, right = st.columns(2)
        targets = left.multiselect(
            "Models that answer",
            offered,
            key="targets",
            format_func=lambda name: f"{name} (no translator)" if why_not[name] else name,
            help=f"They answer from what {shared.code(cag.settings.reference)} has read. Without "
            "a translator that is good enough, a model reads the text itself.",
        )
        paths = right.pills(
            "Paths",
            MODES,
            selection_mode="multi",
            format_func=PATHS.__getitem__,
            key="paths",
            help="*Translated*: from the translated caches of what the reference has read. "
            "*Direct*: the target reads the text. *Own caches*: the target has read it before.",
        )
        k, tokens, refresh = _limits()
    if not pressed and not st.session_state.pop("pressed", False):
        return None
    chosen = Request(
        question.strip(),
        tuple(targets),
        tuple(mode for mode in MODES if mode in paths),
        k,
        tokens,
        refresh,
    )
    st.session_state["filled"] = st.session_state["request"] = chosen
    st.query_params.from_dict(chosen.to_query())
    return chosen


def _limits() -> tuple[int, int, int]:
    with st.expander("Settings"):
        left, middle, right = st.columns(3)
        k = left.number_input(
            "Passages", 1, MOST_PASSAGES, key="k", help="How many are found for the question."
        )
        tokens = middle.number_input(
            "Longest answer", 1, MOST_TOKENS, key="tokens", help="In tokens of the target."
        )
        refresh = right.slider(
            "Refresh", 0, 100, step=5, format="%d %%", key="refresh",
            help="How much of the passages the target reads itself over their translation: the "
            "sentences closest to the question.",
        )  # fmt: skip
    return int(k), int(tokens), int(refresh)


def _fill(request: Request) -> None:
    """Put a request into the form, unless the form is ahead of it."""
    state = st.session_state
    if state.get("filled") == request and "question" in state:
        return
    state["filled"] = request
    state["question"], state["k"], state["tokens"] = request.question, request.k, request.tokens
    state["targets"], state["paths"] = list(request.targets), list(request.paths)
    state["refresh"] = request.refresh


# -- answering -----------------------------------------------------------------------------------


def _answer(cag: CAG, request: Request, place: Any) -> None:
    """Answer and draw; an error takes the place of the answers."""
    st.session_state.pop("result", None)
    with place.container(), shared.errors():
        st.session_state["result"] = _stream(cag, request)
    st.session_state["answered"] = request
    if "result" in st.session_state:
        with place.container():
            answers.draw(st.session_state["result"])


def _stream(cag: CAG, request: Request) -> Result:
    """Answer target by target and path by path, each into its own place as it is written."""
    if not request.targets:
        raise CagError("choose at least one model that answers")
    if not request.paths:
        raise CagError("choose at least one path")
    shared.open_index()
    started = time.perf_counter()
    sources = cag.retrieve(request.question, request.k)
    spent = 1e3 * (time.perf_counter() - started)
    slots = {target: _slots(target, request.paths) for target in request.targets}
    time.sleep(SETTLE)
    answered = [_ask(cag, request, target, sources, slots[target]) for target in request.targets]
    return Result(request, sources, spent, answered)


def _slots(target: str, paths: Sequence[str]) -> dict[str, Any]:
    """A place per path, side by side."""
    answers.heading(target)
    slots = {}
    for column, path in zip(st.columns(len(paths)), paths, strict=True):
        with column.container(border=True, height="stretch"):
            answers.caption(path)
            slots[path] = st.empty()
            slots[path].caption("…")
    return slots


def _ask(
    cag: CAG, request: Request, target: str, sources: Sequence[Source], slots: Mapping[str, Any]
) -> Answered:
    """One target's answers; what goes wrong concerns this target only."""
    answered = Answered(target)
    generation = Generation(max_tokens=request.tokens, stop=cag.template.stop)
    for path, slot in slots.items():
        if path == "direct" and answered.by_path("fallback"):
            slot.caption("The fallback has read the text already.")
            continue
        try:
            slot.caption(":material/hourglass_top: Getting the model ready…")
            shared.warm_up(target, path)
            slot.caption(":material/hourglass_top: Reading…")
            stream = cag.stream(
                request.question,
                target=target,
                mode=path,
                refresh=request.refresh / 100,
                sources=sources,
                generation=generation,
            )
            answered.answers.append(_write(stream, slot))
        except KNOWN_ERRORS as error:
            slot.empty()
            answered.error = one_line(error)
            break
    return answered


def _write(stream: Stream, slot: Any) -> Answer:
    text = ""
    for piece in stream:
        text += piece
        slot.text(text)
    return stream.answer
