"""The pages of the app."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app.views import compare, library, models, quality


def pages() -> dict[str, Any]:
    """The pages by name, the first one being where people land."""
    found = [
        st.Page(
            compare.show,
            title="Compare",
            url_path="compare",
            icon=":material/compare_arrows:",
            default=True,
        ),
        st.Page(library.show, title="Library", url_path="library", icon=":material/library_books:"),
        st.Page(quality.show, title="Quality", url_path="quality", icon=":material/monitoring:"),
        st.Page(models.show, title="Models", url_path="models", icon=":material/memory:"),
    ]
    return {page.title: page for page in found}
