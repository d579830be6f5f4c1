"""Library: the documents that were read, adding to them, removing, checking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import streamlit as st

from app import shared, uploads
from app.jobs import KNOWN_ERRORS, Job, one_line
from app.watching import watch
from cag.engine import CAG
from cag.errors import CagError
from cag.ingest import IngestReport, Progress
from store import Problem

INGEST, VERIFY = "ingest", "verify"
SHOWN = 5  # skipped files that are named at once


def show() -> None:
    """Draw the view."""
    cag = shared.engine()
    st.title("Library", anchor=False)
    _figures(cag)
    with st.container():  # always there, so that what is below keeps its place
        reading = watch(INGEST, _report)
    _add(cag, reading)
    rows = cag.library.documents()
    st.subheader("Documents", anchor=False)
    if not rows:
        st.info("No documents yet. Upload some or name a folder above.")
        return
    _table(rows)
    with st.container():
        checking = watch(VERIFY, _problems)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        _remove(rows, reading)
        if st.button("Verify every file", icon=":material/verified:", disabled=checking):
            shared.start(VERIFY, "Verifying the store", _verification(cag))


def _figures(cag: CAG) -> None:
    stats = cag.store.stats()
    room = f"at most {shared.size(stats.max_bytes)}" if stats.max_bytes else "no cap"
    figures = {
        "Documents": f"{len(cag.library.documents()):,}",
        "Passages": f"{len(cag.library):,}",
        "Tokens": f"{stats.tokens:,}",
        "On disk": shared.size(stats.bytes),
    }
    with st.container(horizontal=True):
        for name, value in figures.items():
            st.metric(name, value, width=130)
    st.caption(
        f"Read by {shared.code(cag.settings.reference)} · {stats.caches:,} caches with codec "
        f"{shared.code(stats.codec)}, {room} · {stats.evictions:,} evicted · "
        f"{stats.quarantined:,} quarantined · {shared.code(str(cag.folder))}"
    )


# -- adding --------------------------------------------------------------------------------------


def _add(cag: CAG, reading: bool) -> None:
    st.subheader("Add documents", anchor=False)
    upload, folder = st.tabs(["Upload files", "Folder on this machine"])
    with upload, st.form("upload", clear_on_submit=True, border=False):
        files = st.file_uploader(
            "Markdown, text, HTML, PDF, DOCX or source code", accept_multiple_files=True
        )
        pressed = st.form_submit_button("Read them", type="primary", disabled=reading)
    if pressed and not files:
        st.warning("Choose files first.")
    elif pressed:
        with shared.errors():
            paths = [uploads.keep(_uploads(cag), file.name, file.getvalue()) for file in files]
            shared.start(INGEST, f"Reading {_count(len(set(paths)), 'file')}", _reading(cag, paths))
    with folder, st.form("folder", border=False):
        path = st.text_input("Folder or file", placeholder="~/documents")
        prune = st.checkbox("Also forget documents whose files are gone from there")
        pressed = st.form_submit_button("Read it", type="primary", disabled=reading)
    if pressed and not path.strip():
        st.warning("Name a folder or a file first.")
    elif pressed:
        with shared.errors():
            where = Path(path.strip()).expanduser()
            if not where.exists():
                raise CagError(f"'{where}' does not exist on the machine that runs this page")
            shared.start(INGEST, f"Reading {where}", _reading(cag, [where], prune=prune))


def _uploads(cag: CAG) -> Path:
    return cag.settings.home / "uploads"


def _reading(cag: CAG, paths: Sequence[Path], *, prune: bool = False) -> Callable[[Job], Any]:
    """The work of ingesting, for a thread."""

    def work(job: Job) -> IngestReport:
        job.update("loading the models")
        cag.models.lm(cag.settings.reference)
        job.update("reading", 0.0)

        def update(step: Progress) -> None:
            job.update(_progress(step), step.done / max(1, step.total))

        report = cag.ingest(paths, prune=prune, on_progress=update)
        for path, _ in report.skipped:  # an upload of which nothing was read
            if cag.library.document(path) is None:
                uploads.forget(_uploads(cag), path)
        return report

    return work


def _progress(step: Progress) -> str:
    left = "" if step.eta is None else f" · {step.eta:.0f} s left"
    return (
        f"{shared.size(step.done)} of {shared.size(step.total)} · {step.tokens:,} tokens read, "
        f"{step.tokens_per_second:,.0f} per second{left}"
    )


def _report(report: IngestReport) -> None:
    """What an ingest did."""
    counts = ", ".join(
        f"{len(found):,} {name}"
        for name in ("added", "changed", "unchanged", "removed")
        if (found := getattr(report, name))
    )
    if counts:
        st.success(
            f"{counts} · {_count(report.passages, 'passage')} and "
            f"{_count(report.tokens, 'token')} read in {report.seconds:.1f} s"
        )
    if report.evicted:
        st.warning(
            f"The store is full: {_count(report.evicted, 'cache')} had to leave for new ones, and "
            "will be read again when asked for. Raise `CAG_MAX_STORE_GB`, or set `CAG_CODEC=int8`."
        )
    for path, reason in report.skipped[:SHOWN]:
        st.warning(f"Skipped {shared.code(Path(path).name)}: {shared.literal(reason)}")
    if len(report.skipped) > SHOWN:
        with st.expander(f"All {len(report.skipped):,} skipped files"):
            rows = [{"file": path, "reason": reason} for path, reason in report.skipped]
            st.dataframe(rows, hide_index=True)


# -- what is there -------------------------------------------------------------------------------


def _table(rows: dict[str, dict[str, Any]]) -> None:
    table = [
        {
            "title": row["title"],
            "kind": row["kind"],
            "passages": len(row["passages"]),
            "size": row["bytes"],
            "read by": row["settings"]["reference"],
            "document": path,
        }
        for path, row in rows.items()
    ]
    st.dataframe(
        table,
        hide_index=True,
        column_config={"size": st.column_config.NumberColumn("size", format="bytes")},
    )


def _remove(rows: dict[str, dict[str, Any]], reading: bool) -> None:
    chosen = st.multiselect(
        "Remove documents",
        sorted(rows),
        key="removing",
        placeholder="Choose some",
        format_func=lambda path: Path(path).name,
    )
    pressed = st.button(
        "Remove…", icon=":material/delete:", disabled=not chosen or reading, key="remove"
    )
    if pressed:
        _confirm(chosen)


@st.dialog("Remove documents")
def _confirm(chosen: Sequence[str]) -> None:
    """Ask before anything is forgotten."""
    st.write(
        f"Forget {_count(len(chosen), 'document')} with passages and caches? Uploaded copies are "
        "deleted, too; other files stay where they are."
    )
    for path in chosen[:SHOWN]:
        st.caption(shared.code(path))
    if len(chosen) > SHOWN:
        st.caption(f"… and {len(chosen) - SHOWN:,} more")
    with st.container(horizontal=True):
        remove = st.button(
            "Remove", type="primary", key="confirmed", on_click=_forget, args=(chosen,)
        )
        cancel = st.button("Keep them")
    if remove or cancel:
        st.rerun()


def _forget(chosen: Sequence[str]) -> None:
    """Remove documents; says how many, or what was in the way."""
    cag, removed = shared.engine(), 0
    try:
        shared.open_index()
        for path in chosen:
            cag.remove(path)
            uploads.forget(_uploads(cag), path)
            removed += 1
    except KNOWN_ERRORS as error:
        st.toast(shared.literal(one_line(error)), icon=":material/error:", duration="long")
    if removed:
        st.toast(f"Removed {_count(removed, 'document')}.", icon=":material/delete:")
    st.session_state["removing"] = []


def _verification(cag: CAG) -> Callable[[Job], list[Problem]]:
    def work(job: Job) -> list[Problem]:
        job.update("reading every cache")
        return cag.store.verify()

    return work


def _problems(problems: Sequence[Problem]) -> None:
    if not problems:
        st.success("All caches are sound.")
        return
    st.warning(f"{_count(len(problems), 'problem')}; reading the documents again mends caches.")
    st.dataframe([asdict(problem) for problem in problems], hide_index=True)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
