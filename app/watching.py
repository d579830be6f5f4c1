"""Show a background job: its progress while it runs, what became of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from app import shared
from app.jobs import Job


def watch(name: str, show_result: Callable[[Any], object]) -> bool:
    """Draw the job of that name, if there is one; True while it runs.

    Parameters
    ----------
    show_result
        Draws what the job returned.
    """
    job = shared.jobs().get(name)
    if job is None:
        return False
    if job.running:
        _follow(name)
        return True
    _ended(name, job, show_result)
    return False


@st.fragment(run_every=0.7)
def _follow(name: str) -> None:
    """Progress that renews itself without the rest of the page."""
    job = shared.jobs().get(name)
    if job is None or not job.running:
        st.rerun()  # the whole page: what the job changed is shown elsewhere
    with st.container(border=True):
        st.markdown(f"**{shared.literal(job.title)}**")
        elapsed = f"{job.seconds:.0f} s"
        said = shared.literal(f"{job.stage or 'starting'} · {elapsed}")
        if job.share is None:
            st.caption(f":material/hourglass_top: {said}")
        else:
            st.progress(job.share, said)
        label = "Stopping…" if job.stopping else "Stop"
        st.button(label, key=f"stop-{name}", on_click=job.stop, disabled=job.stopping)


def _ended(name: str, job: Job, show_result: Callable[[Any], object]) -> None:
    with st.container(border=True):
        st.markdown(f"**{shared.literal(job.title)}** · {job.seconds:.0f} s")
        if job.error:
            st.error(shared.literal(job.error))
        elif job.stopped:
            st.info("Stopped. What was done is kept; start it again to go on.")
        else:
            show_result(job.result)
        st.button("Dismiss", key=f"forget-{name}", on_click=shared.jobs().forget, args=(name,))
