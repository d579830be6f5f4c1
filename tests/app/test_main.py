"""The app, driven through Streamlit's AppTest over tiny random models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from app import answers, shared
from app.views import documents
from cag.engine import CAG
from cag.models import Models
from cag.settings import Settings
from cag.translate import TRANSLATORS, TranslatorConfig

MAIN = Path(__file__).parents[2] / "app" / "main.py"
QUESTION = "When was the harbour of Lindholm built?"
HOSTILE = "<script>alert(1)</script> ![x](http://evil/x.png) **bold** [go](http://evil) `code`"


@pytest.fixture(autouse=True)
def shared_engine(engine: CAG, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The app finds the tiny engine where it would make its own."""
    st.cache_resource.clear()
    monkeypatch.setattr(shared, "CAG", lambda settings: engine)
    yield
    st.cache_resource.clear()


def opened(page: str = "") -> AppTest:
    """A fresh session, on one of the pages."""
    app = AppTest.from_file(str(MAIN), default_timeout=15).run()
    return switched(app, page) if page else app


def switched(app: AppTest, page: str) -> AppTest:
    """The session on another page; `AppTest.switch_page` knows only pages that are files."""
    app._page_hash = calc_hash(page)
    return app.run()


def asked(app: AppTest, question: str = QUESTION, mode: int = 0) -> AppTest:
    """Ask in a session that shows the Ask view."""
    app.text_input[0].set_value(question)
    app.selectbox[0].select_index(mode)
    next(b for b in app.button if b.label == "Ask").click()
    return app.run()


def texts(app: AppTest) -> list[str]:
    """Everything shown without markup."""
    return [element.value for element in app.text]


def markup(app: AppTest) -> str:
    """Everything shown through Markdown."""
    shown = (app.markdown, app.caption, app.info, app.warning, app.error, app.success)
    labels = [expander.label for expander in app.expander]
    return "\n".join([*labels, *(element.value for kind in shown for element in kind)])


def add_translator(engine: CAG, recovered: float = 0.9) -> None:
    """Give the engine a translator with random weights."""
    settings = engine.settings
    reference, target = (engine.models.lm(n) for n in (settings.reference, settings.target))
    translator = TRANSLATORS["ridge"](
        TranslatorConfig(
            kind="ridge",
            reference=reference.name,
            target=target.name,
            reference_fingerprint=reference.fingerprint,
            target_fingerprint=target.fingerprint,
            reference_spec=asdict(reference.spec),
            target_spec=asdict(target.spec),
            rank=16,
            key_rank=8,
            value_rank=8,
        )
    )
    translator.report.recovered = recovered
    translator.save(settings.home / "translators" / "ref--tgt")


# -- ask ---------------------------------------------------------------------------------------


def test_an_empty_store_says_what_to_do() -> None:
    app = opened()
    assert "`cag ingest PATH...`" in app.info[0].value
    assert app.file_uploader and not app.error and not app.exception


def test_compare_shows_both_answers_and_the_reason_of_a_fallback(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    app = asked(opened())
    assert not app.exception and not app.error
    fallback, direct = app.session_state["answers"]
    assert (fallback.path, direct.path) == ("fallback", "direct")
    assert {fallback.answer, direct.answer} <= {*texts(app), ""}
    assert "no translator from" in app.warning[0].value
    shown = {metric.label: metric.value for metric in app.metric}
    assert shown["Token F1"] == "1.00"
    assert shown["First-token KL"] == "0.000 nats"
    assert shown["Tokens read"] == f"{direct.tokens.target_forward:g}"
    assert shown["First token, direct / fallback"].endswith("×")
    assert len(app.expander) == 2
    assert {code.value for code in app.code} == {s.passage.text for s in direct.sources}


def test_the_translated_path_reads_fewer_tokens(engine: CAG, docs: Path) -> None:
    add_translator(engine)
    engine.ingest([docs])
    app = asked(opened())
    assert not app.exception and not app.error and not app.warning
    translated, direct = app.session_state["answers"]
    assert translated.path == "translated"
    assert ":green-badge[translated] `ref--tgt (ridge)`" in markup(app)
    saved = direct.tokens.target_forward - translated.tokens.target_forward
    lengths = direct.tokens.generated - translated.tokens.generated
    assert saved - lengths == direct.tokens.passage


@pytest.mark.parametrize(("mode", "path"), [(1, "fallback"), (2, "direct"), (3, "own")])
def test_one_mode_gives_one_answer(engine: CAG, docs: Path, mode: int, path: str) -> None:
    engine.ingest([docs])
    app = asked(opened(), mode=mode)
    assert [answer.path for answer in app.session_state["answers"]] == [path]
    if path == "own":
        assert "were read and stored first" in app.info[0].value


def test_answers_stay_when_the_view_changes(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    app = asked(opened())
    switched(app, "store")
    switched(app, "ask")
    assert app.text_input[0].value == QUESTION
    assert len(app.expander) == 2


def test_an_empty_question_is_one_line(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    app = asked(opened(), question="   ")
    assert "the question is empty" in app.error[0].value.replace("\\", "")
    assert not app.exception


def test_missing_weights_name_the_command(engine: CAG, docs: Path, home: Path) -> None:
    engine.ingest([docs])
    engine.models = Models(Settings(home=home))
    object.__setattr__(engine.settings, "target", "gemma-3-270m")
    app = asked(opened())
    assert "`cag pull gemma-3-270m`" in app.error[0].value
    assert len(app.error) == 1 and not app.exception


def test_a_broken_setting_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "CAG", CAG)
    monkeypatch.setenv("CAG_K", "many")
    app = opened()
    assert "CAG_K" in app.error[0].value.replace("\\", "")
    assert not app.exception


def test_hostile_text_is_never_markup(engine: CAG, tmp_path: Path) -> None:
    (tmp_path / "bad.md").write_text(f"# {HOSTILE}\n\n{HOSTILE} is written in the harbour.\n")
    engine.ingest([tmp_path / "bad.md"])
    app = opened()
    app.number_input[0].set_value(1)
    asked(app, question="Where is bold written?")
    assert not app.exception
    outside_code = "".join(markup(app).split("`")[::2])
    assert "<script>" not in outside_code and "http://evil" not in outside_code
    assert "`<script>alert(1)</script>" in app.expander[0].label
    assert {c.value for c in app.code} <= {p.text for p in engine.library.passages()}


def test_the_chart_has_a_part_per_row(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    answer = engine.ask(QUESTION, mode="direct")
    rows = answers.timing_chart([answer]).data
    assert rows["part"].tolist() == list(answers.PARTS)
    assert rows["ms"].sum() <= answer.timings.first_token


def test_two_sessions_share_one_engine(
    engine: CAG, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(shared, "CAG", lambda settings: made.append(1) or engine)
    engine.ingest([docs])
    alone = [engine.ask(QUESTION, mode=mode).answer for mode in ("translated", "direct")]
    loads = engine.models.loads
    # in turn: AppTest keeps its mock runtime in a global; threads are tested on the engine
    for _ in range(2):
        app = asked(opened())
        assert not app.exception and not app.error
        assert [answer.answer for answer in app.session_state["answers"]] == alone
    assert len(made) == 1 and engine.models.loads == loads


# -- documents and store -----------------------------------------------------------------------


def test_uploads_are_kept_ingested_and_removed(engine: CAG, home: Path) -> None:
    app = opened("docs")
    files = [
        ("../../boats.md", b"# Boats\n\nBoats are blue.", "text/markdown"),
        ("broken.bin", b"\0\1", "application/octet-stream"),
    ]
    app.file_uploader[0].set_value(files)
    next(b for b in app.button if b.label == "Ingest").click()
    app.run()
    assert not app.exception and not app.error
    path = home / "uploads" / "boats.md"
    assert list(engine.library.documents()) == [str(path)] and path.exists()
    assert "1 added" in app.success[0].value
    assert "broken.bin" in app.warning[0].value and "binary" in app.warning[0].value
    assert app.dataframe[0].value["document"].tolist() == [str(path)]
    assert "Documents: 1" in markup(app)

    app.selectbox[0].select(str(path)).run()
    next(b for b in app.button if b.label == "Remove").click()
    app.run()
    assert not app.exception and not app.error
    assert not engine.library.documents() and not path.exists()


def test_the_first_upload_can_be_asked_about_at_once(engine: CAG) -> None:
    app = opened()
    app.file_uploader[0].set_value([("boats.md", b"# Boats\n\nBoats are blue.", "text/markdown")])
    next(b for b in app.button if b.label == "Ingest").click()
    app.run()
    app = asked(app)
    assert not app.exception and len(app.session_state["answers"]) == 2


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("a.md", "a.md"),
        ("../../etc/passwd", "passwd"),
        ("C:\\docs\\b.txt", "b.txt"),
        ("..", "document"),
        ("", "document"),
        (".hidden.md", "hidden.md"),
        ("a\0b\n.md", "ab.md"),
        ("é" * 300 + ".md", "é" * 100 + ".md"),
    ],
)
def test_names_of_uploads_are_safe(name: str, kept: str) -> None:
    assert documents.safe_name(name) == kept


def test_the_store_view_shows_figures_translators_and_damage(engine: CAG, docs: Path) -> None:
    engine.ingest([docs])
    app = opened("store")
    assert "cag train ref tgt" in app.info[0].value
    add_translator(engine, recovered=0.75)
    next(b for b in app.button if b.label == "Verify every file").click()
    app.run()
    assert "sound" in app.success[0].value
    assert any("recovered 0.750" in element.value for element in app.markdown)
    assert app.dataframe[0].value["recovered"].tolist()[0] == 0.75
    next((engine.folder / "kv").rglob("*.safetensors")).write_bytes(b"damaged")
    next(b for b in app.button if b.label == "Verify every file").click()
    app.run()
    assert "1 problems" in app.warning[0].value and not app.exception
