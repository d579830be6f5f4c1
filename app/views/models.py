"""Models: what is here, getting more, and which translators there are and whether they serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import streamlit as st

from app import shared
from app.jobs import Job
from app.targets import misfit, refusal
from app.watching import watch
from cag.engine import CAG
from cag.lm.known import KNOWN
from cag.lm.loading import LM
from cag.lm.pull import ModelStatus, list_models, pull
from cag.translate.finding import describe_translators


def show() -> None:
    """Draw the view."""
    cag = shared.engine()
    st.title("Models", anchor=False)
    st.caption(
        f"{shared.code(cag.settings.reference)} reads, {shared.code(cag.settings.target)} answers "
        f"unless told otherwise, {shared.code(cag.settings.embedder)} finds passages."
    )
    for status in list_models(cag.settings.home):
        _model(cag, status)
    lms = {name: cag.models.lm(name) for name in cag.models.loaded}
    _in_memory(lms)
    st.subheader("Translators", anchor=False)
    with shared.errors():
        _translators(cag, {name: lm.fingerprint for name, lm in lms.items()})


# -- models --------------------------------------------------------------------------------------


def _model(cag: CAG, status: ModelStatus) -> None:
    known, job = KNOWN[status.name], f"pull {status.name}"
    with st.container(border=True):
        with st.container(horizontal=True, vertical_alignment="center"):
            badge = ":green-badge[pulled]" if status.pulled else ":gray-badge[not here]"
            kind = ":blue-badge[embedder]" if status.kind == "embedder" else ""
            st.markdown(f"**{shared.literal(status.name)}** {badge} {kind}")
            running = (found := shared.jobs().get(job)) is not None and found.running
            pressed = not status.pulled and st.button(
                "Pull", key=job, icon=":material/download:", disabled=running
            )
        size = shared.size(status.bytes or 1e6 * known.megabytes)
        source = f" · from the {status.source}" if status.source else ""
        st.caption(f"{size}{source} · licence [{status.licence}]({known.licence_url})")
        watch(job, lambda folder: st.success("It is here and ready."))
    if pressed:
        shared.start(job, f"Pulling {status.name}", _pulling(cag, status.name))


def _pulling(cag: CAG, name: str) -> Callable[[Job], Any]:
    """The work of fetching weights, for a thread."""

    def work(job: Job) -> str:
        def update(stage: str, done: int, total: int | None) -> None:
            job.update(stage, done / total if total else None)

        return str(pull(name, cag.settings.home, progress=update))

    return work


def _in_memory(lms: Mapping[str, LM]) -> None:
    if not lms:
        st.caption("No language model is in memory yet; the first question loads what it needs.")
        return
    st.subheader("In memory", anchor=False)
    rows = [
        {
            "model": name,
            "fingerprint": lm.fingerprint,
            "family": lm.spec.family,
            "layers": lm.spec.layers,
            "window": lm.spec.window,
            "dtype": str(lm.dtype).removeprefix("torch."),
            "device": str(lm.device),
        }
        for name, lm in lms.items()
    ]
    st.dataframe(rows, hide_index=True)


# -- translators ---------------------------------------------------------------------------------


def _translators(cag: CAG, fingerprints: Mapping[str, str]) -> None:
    found = describe_translators(cag.settings.home)
    if not found:
        settings = cag.settings
        train = shared.code(f"cag train {settings.reference} {settings.target} --data FILES")
        st.info(f"There are no translators, so every answer reads the text. Train one: {train}")
        return
    st.caption(
        "`ask` uses a translator whose retention and recovered share on held-out passages are at "
        f"least {cag.settings.min_retention:.2f} (`CAG_MIN_RETENTION`)."
    )
    names: set[str] = set()
    for described in found:
        reason = refusal(cag, described) or misfit(described, fingerprints)
        _translator(described, reason, shadowed=described["name"] in names)
        names.add(described["name"])


def _translator(described: dict[str, Any], reason: str, *, shadowed: bool) -> None:
    with st.container(border=True):
        badge = ":orange-badge[not used]" if reason or shadowed else ":green-badge[used by ask]"
        st.markdown(
            f"{shared.code(described['reference'])} → {shared.code(described['target'])} "
            f":gray-badge[{described['kind']}] {badge}"
        )
        if shadowed:
            st.caption("Another one for the same pair comes first.")
        elif reason:
            st.warning(shared.literal(f"`ask` does not use it: {reason}."))
        with st.container(horizontal=True):
            st.metric(
                "Recovered",
                shared.fixed(described["recovered"]),
                help="Share of the answer likelihood that the text is worth, on held-out "
                "passages: 0 is no text, 1 is reading it.",
                width=130,
            )
            st.metric(
                "Retention",
                shared.fixed(described["retention"]),
                help="Answer quality as a share of reading the text, on held-out questions.",
                width=130,
            )
            st.metric(
                "Cost per token",
                f"{described['multiplications'] / 1e6:,.1f} M",
                help="Multiply-accumulates to translate one token of a passage.",
                width=160,
            )
        st.caption(
            f"reference {shared.code(described['reference_fingerprint'][:12])} · target "
            f"{shared.code(described['target_fingerprint'][:12])} · "
            f"{shared.code(described['folder'])}"
        )
