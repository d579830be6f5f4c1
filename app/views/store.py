"""Store: what it holds, which translators there are, whether every file is sound."""

from __future__ import annotations

from dataclasses import asdict

import streamlit as st

from app import shared
from cag.engine import CAG
from cag.translate.finding import describe_translators, pair_name


def show() -> None:
    """Draw the view."""
    cag = shared.engine()
    st.header("Store")
    _stats(cag)
    if st.button("Verify every file"):
        _verify(cag)
    st.subheader("Translators", anchor=False)
    _translators(cag)


def _stats(cag: CAG) -> None:
    stats = cag.store.stats()
    cap = f"at most {stats.max_bytes / 2**30:,.1f} GiB" if stats.max_bytes else "no cap"
    figures = {
        "Documents": f"{len(cag.library.documents()):,}",
        "Passages": f"{len(cag.library):,}",
        "Caches": f"{stats.caches:,}",
        "Tokens": f"{stats.tokens:,}",
        f"Size ({cap})": f"{stats.bytes / 2**20:,.1f} MiB",
    }
    for column, (name, value) in zip(st.columns(len(figures)), figures.items(), strict=True):
        column.metric(name, value)
    st.caption(
        f"codec {shared.code(stats.codec)} · {stats.quarantined} quarantined · "
        f"{stats.evictions} evicted · {stats.temporary_bytes:,} temporary bytes · "
        f"{shared.code(str(cag.folder))}"
    )


def _verify(cag: CAG) -> None:
    with st.spinner("Reading every cache…"):
        problems = cag.store.verify()
    if problems:
        st.warning(f"{len(problems)} problems; `cag ingest` makes damaged caches again.")
        st.dataframe([asdict(problem) for problem in problems], hide_index=True)
    else:
        st.success("All caches are sound.")


def _translators(cag: CAG) -> None:
    reference, target = cag.settings.reference, cag.settings.target
    found = describe_translators(cag.settings.home)
    pair = [d for d in found if d["name"] == pair_name(reference, target)]
    named = f"{shared.code(reference)} to {shared.code(target)}"
    if not pair:
        train = shared.code(f"cag train {reference} {target} --data FILES")
        st.info(f"No translator from {named}: answers take the direct path. Train one: {train}")
    elif pair[0]["recovered"] is not None:
        required = cag.settings.min_recovered
        st.write(
            f"From {named}: recovered {pair[0]['recovered']:.3f} of the answer NLL on held-out "
            f"passages; {required:.2f} is required."
        )
    if found:
        columns = ("name", "kind", "recovered", "multiplications", "folder")
        st.dataframe(
            [{name: d[name] for name in columns} for d in found],
            hide_index=True,
            column_config={
                "recovered": st.column_config.NumberColumn(format="%.3f"),
                "multiplications": st.column_config.NumberColumn("MAC/token", format="compact"),
            },
        )
