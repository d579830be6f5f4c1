"""Documents: what was ingested, and uploading more."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from app import shared
from cag.engine import CAG
from cag.ingest import IngestReport, Progress


def show() -> None:
    """Draw the view."""
    st.header("Documents")
    upload()
    cag = shared.engine()
    rows = cag.library.documents()
    if not rows:
        st.info("No documents yet. Upload some, or run `cag ingest PATH...` in a terminal.")
        return
    _table(rows)
    chosen = st.selectbox("Remove a document", sorted(rows), index=None, placeholder="Choose one")
    st.button("Remove", on_click=_remove, args=(chosen,), disabled=chosen is None)


def upload() -> None:
    """A form that ingests files; shows what became of each."""
    with st.form("upload", clear_on_submit=True):
        files = st.file_uploader(
            "Upload documents",
            accept_multiple_files=True,
            help="Markdown, text, HTML, PDF, DOCX or source code.",
        )
        pressed = st.form_submit_button("Ingest", type="primary")
    if pressed and not files:
        st.warning("Choose files first.")
    elif pressed:
        with shared.errors():
            cag = shared.engine()
            folder = cag.settings.home / "uploads"
            paths = [keep(folder, file.name, file.getvalue()) for file in files]
            if len(set(paths)) < len(paths):
                st.warning("Some files have the same name; only the last of them was kept.")
            _report(_ingest(cag, paths))


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


def _ingest(cag: CAG, paths: Sequence[Path]) -> IngestReport:
    shared.open_index()
    with st.spinner("Loading the reference model…"):
        cag.models.lm(cag.settings.reference)
    bar = st.progress(0.0, "Reading…")

    def update(step: Progress) -> None:
        rate = f"{step.tokens:,} tokens read, {step.tokens_per_second:,.0f} tokens/s"
        bar.progress(min(1.0, step.done / max(1, step.total)), rate)

    return cag.ingest(paths, on_progress=update)


def _report(report: IngestReport) -> None:
    counts = ", ".join(
        f"{len(getattr(report, name))} {name}"
        for name in ("added", "changed", "unchanged")
        if getattr(report, name)
    )
    if counts:
        st.success(
            f"{counts} · passages read: {report.passages:,} · tokens read: {report.tokens:,} "
            f"in {report.seconds:.1f} s"
        )
    for path, reason in report.skipped:
        st.warning(f"Skipped {shared.code(Path(path).name)}: {shared.literal(reason)}")


def _table(rows: dict[str, dict[str, Any]]) -> None:
    table = [
        {
            "title": row["title"],
            "document": path,
            "passages": len(row["passages"]),
            "bytes": row["bytes"],
        }
        for path, row in rows.items()
    ]
    st.dataframe(
        table,
        hide_index=True,
        column_config={"bytes": st.column_config.NumberColumn("size", format="bytes")},
    )


def _remove(document: str) -> None:
    """Forget a document; an uploaded copy goes with it."""
    with shared.errors():
        cag = shared.engine()
        shared.open_index()
        passages = cag.remove(document)
        if Path(document).parent == (cag.settings.home / "uploads").resolve():
            Path(document).unlink(missing_ok=True)
        st.toast(f"Removed {shared.code(Path(document).name)}: {passages} passages")
