"""Drive the app through Streamlit's AppTest; shared by the tests of all views."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from app import shared
from cag.engine import CAG
from cag.translate import TRANSLATORS, TranslatorConfig

MAIN = Path(__file__).parents[2] / "app" / "main.py"
QUESTION = "When was the harbour of Lindholm built?"
HOSTILE = "<script>alert(1)</script> ![x](http://evil/x.png) **bold** [go](http://evil) `code`"


@contextmanager
def using(engine: CAG, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CAG]]:
    """The app finds this engine where it would make its own; gives those it asked for."""
    made: list[CAG] = []
    st.cache_resource.clear()
    monkeypatch.setattr(shared, "CAG", lambda settings: made.append(engine) or engine)
    yield made
    st.cache_resource.clear()


def opened(page: str = "", **query: str | list[str]) -> AppTest:
    """A fresh session, on one of the pages."""
    app = AppTest.from_file(str(MAIN), default_timeout=60)
    for name, value in query.items():
        app.query_params[name] = value
    app.run()
    return switched(app, page) if page else app


def switched(app: AppTest, page: str) -> AppTest:
    """The session on another page; `AppTest.switch_page` knows only pages that are files."""
    app._page_hash = calc_hash(page)
    app.query_params.clear()
    return app.run()


def pressed(app: AppTest, label: str) -> AppTest:
    """The session after a button."""
    next(button for button in app.button if button.label == label).click()
    return app.run()


def asked(app: AppTest, question: str = QUESTION, paths: list[str] | None = None) -> AppTest:
    """Ask in a session that shows Compare."""
    app.text_input(key="question").set_value(question)
    if paths is not None:
        app.button_group(key="paths").set_value(paths)
    return pressed(app, "Ask")


def settled(app: AppTest, job: str) -> AppTest:
    """The session after a job in the background has ended."""
    found = shared.jobs().get(job)
    assert found is not None and found.wait(60)
    return app.run()


def markup(app: AppTest) -> str:
    """Everything shown through Markdown."""
    kinds = (app.markdown, app.caption, app.info, app.warning, app.error, app.success)
    labels = [expander.label for expander in app.expander]
    return "\n".join([*labels, *(element.value for kind in kinds for element in kind)])


def plain(text: str) -> str:
    """Markdown without its backslashes."""
    return text.replace("\\", "")


def sound(app: AppTest) -> bool:
    """Whether a page shows no error."""
    return not app.exception and not app.error


def add_translator(
    engine: CAG, recovered: float | None = 0.9, reference: str = "", target: str = ""
) -> Path:
    """Give the engine a translator with random weights."""
    settings = engine.settings
    names = (reference or settings.reference, target or settings.target)
    lms = [engine.models.lm(name) for name in names]
    translator = TRANSLATORS["ridge"](
        TranslatorConfig(
            kind="ridge",
            reference=lms[0].name,
            target=lms[1].name,
            reference_fingerprint=lms[0].fingerprint,
            target_fingerprint=lms[1].fingerprint,
            reference_spec=asdict(lms[0].spec),
            target_spec=asdict(lms[1].spec),
            rank=16,
            key_rank=8,
            value_rank=8,
        )
    )
    translator.report.recovered = recovered
    folder = settings.home / "translators" / "--".join(names)
    translator.save(folder)
    return folder
