"""The app: `streamlit run app/main.py`, from any folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import streamlit as st

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:  # the package need not be installed
    sys.path.insert(0, ROOT)


def main() -> None:
    """Set up the page and run the view that was chosen."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # an icon of our own: the browser would fetch a named one from the network
    icon = Path(__file__).with_name("icon.svg")
    st.set_page_config(page_title="cag", page_icon=icon, layout="wide")
    st.html("<style>.stMainBlockContainer {padding-top: 4.5rem}</style>")  # less air at the top
    waiting = st.empty()
    if "app.shared" not in sys.modules:
        waiting.caption("Starting…")  # only the first page of a server waits for the imports
    from app import shared
    from app.pages import pages

    waiting.empty()
    page = st.navigation(list(pages().values()), position="top")
    with shared.errors():
        page.run()


if __name__ == "__main__":
    main()
