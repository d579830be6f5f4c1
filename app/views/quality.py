"""Quality: what evaluations have found, and running a small one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import streamlit as st

from app import quality_charts, shared
from app.jobs import Job
from app.reports import Report, Row, find_plots, find_reports, rows
from app.targets import known_pairs
from app.watching import watch
from cag.engine import CAG
from eval.data import TASKS
from eval.runner import RunConfig, run

EVALUATE = "evaluate"
ARMS = ("native", "translated", "no_context", "wrong_passage")
MOST = 50
SHOWN = 3  # warnings of a run
SHOWN_ELSEWHERE = ("retention", "cost", "injection")


def show() -> None:
    """Draw the view."""
    cag = shared.engine()
    st.title("Quality", anchor=False)
    roots = {"own run": cag.settings.home / "eval", "project": shared.ROOT / "eval" / "reports"}
    found = find_reports(roots)
    with st.container():  # always there, so that what is below keeps its place
        running = watch(EVALUATE, _ended)
    with st.expander("Run a small evaluation", icon=":material/science:", expanded=not found):
        _form(cag, running)
    for report in found:
        if report.problem:
            st.warning(shared.literal(report.problem))
    readable = [report for report in found if report.pairs]
    if readable:
        _report(_chosen(readable))
    elif found:
        st.info("No report here holds any figures.")
    else:
        st.info(
            "No evaluation has been run yet. Run a small one above, or a whole one in a "
            "terminal: `cag eval --tasks synthetic`."
        )
    _injection(list(roots.values()))


def _chosen(reports: Sequence[Report]) -> Report:
    if len(reports) == 1:
        return reports[0]
    return st.selectbox("Report", reports, format_func=_label)


def _label(report: Report) -> str:
    return f"{report.name} ({time.strftime('%Y-%m-%d %H:%M', time.localtime(report.changed))})"


# -- a report ------------------------------------------------------------------------------------


def _report(report: Report) -> None:
    pairs = list(report.pairs)
    pair = pairs[0] if len(pairs) == 1 else st.selectbox("Pair", pairs)
    tasks = report.pairs[pair]
    measured = rows(tasks)
    st.subheader(shared.literal(pair.replace("--", " → ")), anchor=False)
    translated = [r for r in measured if r["arm"] == "translated" and r["retention"] is not None]
    if len(translated) > 1:
        st.markdown("**Translated answers, by task**")
        st.altair_chart(quality_charts.retention_chart(translated, "task"), width="stretch")
    for tab, (name, figures) in zip(st.tabs(list(tasks)), tasks.items(), strict=True):
        with tab:
            _task(figures, [row for row in measured if row["task"] == name])
    _plots(report, pair)
    st.caption(f"Read from {shared.code(str(report.folder))}")


def _task(figures: Mapping[str, Any], measured: Sequence[Row]) -> None:
    skipped = f", {figures['skipped']} left out as too long" if figures.get("skipped") else ""
    st.caption(
        f"{figures.get('questions', 0):,} questions{skipped}, scored by "
        f"{measured[0]['scored by']}. {_controls(figures.get('controls') or {})}"
    )
    left, right = st.columns(2)
    with left:
        st.markdown("**How much of native each arm retains**")
        st.altair_chart(quality_charts.retention_chart(measured, "arm"), width="stretch")
    with right:
        st.markdown("**Quality against cost**")
        st.altair_chart(quality_charts.cost_chart(measured), width="stretch")
    columns = {n: c for n, c in _COLUMNS.items() if any(r[n] is not None for r in measured)}
    table = [{name: row[name] for name in columns} for row in measured]
    st.dataframe(table, hide_index=True, column_config=columns)


_COLUMNS: dict[str, Any] = {
    "arm": st.column_config.TextColumn("arm", pinned=True),
    **{
        name: st.column_config.NumberColumn(name, format="%.3f")
        for name in (
            "score", "score low", "score high", "em", "retention", "retention low",
            "retention high", "recovered", "agreement", "kl",
        )
    },
    "tokens": st.column_config.NumberColumn("tokens", format="%.0f"),
    "gmac": st.column_config.NumberColumn("GMAC", format="%.2f"),
    "ms": st.column_config.NumberColumn("ms", format="%.0f"),
}  # fmt: skip


def _controls(controls: Mapping[str, Any]) -> str:
    """What the controls say, in a sentence."""
    said = []
    if "wrong_passage" in controls:
        worse = controls["wrong_passage"].get("holds")
        said.append(
            "A wrong passage helps no more than none, as it should."
            if worse
            else ":orange[A wrong passage helps, which it must not.]"
        )
    if "replay_plain" in controls and not controls["replay_plain"].get("holds"):
        said.append(":orange[A replay without injection differs from native.]")
    return " ".join(said)


def _plots(report: Report, pair: str) -> None:
    """Plots that the charts above do not show."""
    paths = [
        path
        for path in sorted((report.folder / pair).glob("*.png"))
        if not any(word in path.stem for word in SHOWN_ELSEWHERE)
    ]
    for path in paths:
        with st.expander(path.stem.replace("_", " ").capitalize()):
            st.image(str(path))


def _injection(roots: Sequence[Path]) -> None:
    plots = find_plots(roots, "injection")
    if plots:
        st.subheader("Where translated layers hurt", anchor=False)
        st.caption("One window of layers is translated at a time, or all above a boundary.")
        for path in plots:
            st.image(str(path), caption=path.parent.name)


# -- a small evaluation --------------------------------------------------------------------------


@dataclass
class Ended:
    """Where a run's report is, and what it left out."""

    out: Path
    warnings: list[str] = field(default_factory=list)


def _form(cag: CAG, running: bool) -> None:
    st.caption(
        f"Answers questions in the arms {', '.join(ARMS)}. A stopped run goes on where it was; "
        "the same settings measure nothing twice."
    )
    with st.form("evaluate", border=False):
        left, right = st.columns(2)
        pair = left.selectbox(
            "Pair", known_pairs(cag), format_func=lambda pair: f"{pair[0]} → {pair[1]}"
        )
        task = right.selectbox("Task", sorted(TASKS, key=lambda name: TASKS[name].file != ""))
        n = left.slider("Questions", 2, MOST, 20)
        data = right.text_input(
            "Folder of the data sets", "data", help="The task “synthetic” needs none."
        )
        pressed = st.form_submit_button("Run", type="primary", disabled=running)
    if pressed and pair is not None and task is not None:
        name = f"small-{task}-{n}"
        config = RunConfig(
            pairs=(pair,),
            tasks=(task,),
            arms=ARMS,
            data=Path(data).expanduser(),
            out=cag.settings.home / "eval" / name,
            n=n,
        )
        title = f"{task}, {n} questions, {' → '.join(pair)}"
        shared.start(EVALUATE, title, _evaluation(cag, config))


def _evaluation(cag: CAG, config: RunConfig) -> Callable[[Job], Ended]:
    """The work of a run, for a thread."""

    def work(job: Job) -> Ended:
        ended = Ended(config.out)

        def update(stage: str, done: int, total: int | None) -> None:
            counted = f"{stage}: {done} of {total} answers" if total else stage
            job.update(counted, done / total if total else None)

        run(config, cag.models, cag.settings, update, ended.warnings.append)
        return ended

    return work


def _ended(ended: Ended) -> None:
    st.success(f"The report is below: {shared.code(ended.out.name)}")
    for warning in ended.warnings[:SHOWN]:
        st.warning(shared.literal(warning))
    if len(ended.warnings) > SHOWN:
        st.caption(f"… and {len(ended.warnings) - SHOWN:,} more like these")
