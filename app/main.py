"""The app: `streamlit run app/main.py`, from any folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import streamlit as st

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:  # the package need not be installed
    sys.path.insert(0, ROOT)

from app import shared  # noqa: E402
from app.views import ask, documents, store  # noqa: E402


def main() -> None:
    """Set up the page and run the view that was chosen."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    st.set_page_config(page_title="cag", layout="wide")
    pages = [  # without icons: the browser would fetch them from Google as favicons
        st.Page(ask.show, title="Ask", url_path="ask", default=True),
        st.Page(documents.show, title="Documents", url_path="docs"),
        st.Page(store.show, title="Store", url_path="store"),
    ]
    page = st.navigation(pages)
    with shared.errors():
        page.run()
    with shared.errors(), st.sidebar:  # afterwards, so that it counts what was just ingested
        _summary()


def _summary() -> None:
    """What is asked here, and which model read it."""
    cag = shared.engine()
    documents, passages = len(cag.library.documents()), len(cag.library)
    st.caption("Documents are read once; any model answers from their translated KV caches.")
    st.caption(f"Documents: {documents:,} · passages: {passages:,}")
    st.caption(f"Reference model  \n{shared.code(cag.settings.reference)}")
    st.caption(f"Home  \n{shared.code(str(cag.settings.home))}")


if __name__ == "__main__":
    main()
