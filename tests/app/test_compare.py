"""The Compare view, driven through Streamlit's AppTest over tiny random models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from driving import (
    HOSTILE,
    QUESTION,
    add_translator,
    asked,
    markup,
    opened,
    plain,
    pressed,
    sound,
    switched,
    using,
)

from app import charts, shared, sources
from app.views import compare
from cag.engine import CAG
from cag.models import Models
from cag.settings import Settings


@pytest.fixture(autouse=True)
def made(engine: CAG, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CAG]]:
    with using(engine, monkeypatch) as made:
        yield made


@pytest.fixture
def filled(engine: CAG, docs: Path) -> CAG:
    """The engine with two documents."""
    engine.ingest([docs])
    return engine


def metrics(app: object) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}  # type: ignore[attr-defined]


def test_an_empty_library_leads_to_the_library_view() -> None:
    app = opened()
    assert sound(app) and "nothing to ask about yet" in markup(app)
    (link,) = app.get("page_link")
    assert link.proto.page == "library" and not app.text_input


def test_translated_and_direct_side_by_side(filled: CAG) -> None:
    add_translator(filled)
    app = asked(opened())
    assert sound(app) and not app.warning
    result = app.session_state["result"]
    translated, direct = result.answers
    assert (translated.path, direct.path) == ("translated", "direct")
    assert {translated.answer or "(no answer)", direct.answer or "(no answer)"} == {
        text.value for text in app.text
    }
    read = (f"{a.tokens.target_forward:g}" for a in (translated, direct))
    assert metrics(app)["Tokens through the layers"] == " of ".join(read)
    saved = direct.tokens.target_forward - translated.tokens.target_forward
    lengths = direct.tokens.generated - translated.tokens.generated
    assert saved - lengths == direct.tokens.passage
    assert [source.passage.id for source in translated.sources] == [
        source.passage.id for source in direct.sources
    ]


def test_a_fallback_says_why_and_is_not_asked_twice(filled: CAG) -> None:
    app = opened()
    assert app.multiselect(key="targets").options == ["tgt (no translator)"]
    asked(app)
    (answer,) = app.session_state["result"].answers
    assert sound(app) and answer.path == "fallback"
    assert "no translator from" in plain(app.warning[0].value)
    assert answer.answer == filled.ask(QUESTION, mode="direct").answer


def test_own_caches_agree_with_reading_the_text(filled: CAG) -> None:
    add_translator(filled)
    app = asked(opened(), paths=["translated", "direct", "own"])
    result = app.session_state["result"]
    assert sound(app) and [a.path for a in result.answers] == ["translated", "direct", "own"]
    row = app.dataframe[0].value.iloc[2]
    assert row["path"] == "own" and row["f1"] == 1 and abs(row["kl"]) < 1e-3
    assert "were read and stored first" in app.info[0].value


def test_several_targets_answer_from_the_same_passages(
    filled: CAG, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_translator(filled)
    monkeypatch.setattr(compare, "offered_targets", lambda cag: ["tgt", "ref"])
    app = opened()
    app.multiselect(key="targets").set_value(["tgt", "ref"])
    asked(app)
    assert sound(app)
    first, second = app.session_state["result"].answered
    assert [a.path for a in first.answers] == ["translated", "direct"]
    assert [a.path for a in second.answers] == ["fallback"]
    assert app.query_params["target"] == ["tgt", "ref"]
    rows = charts.first_token_chart(app.session_state["result"].answers).data
    assert set(rows["answer"]) == {"tgt|translated", "tgt|direct", "ref|fallback"}


def test_what_one_target_cannot_do_leaves_the_others(
    filled: CAG, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "offered_targets", lambda cag: ["gemma-3-270m", "tgt"])
    app = opened()
    app.multiselect(key="targets").set_value(["gemma-3-270m", "tgt"])
    asked(app, paths=["direct"])
    assert not app.exception and len(app.error) == 1
    assert "`cag pull gemma-3-270m`" in plain(app.error[0].value)
    assert [a.target for a in app.session_state["result"].answers] == ["tgt"]


# -- links ---------------------------------------------------------------------------------------


def test_a_link_reproduces_question_settings_and_answers(filled: CAG) -> None:
    add_translator(filled)
    app = opened()
    app.number_input(key="k").set_value(1)
    app.number_input(key="tokens").set_value(3)
    app.slider(key="refresh").set_value(50)
    asked(app, paths=["translated"])
    query = dict(app.query_params)
    assert query == {
        "q": QUESTION, "target": "tgt", "path": "translated", "k": "1", "tokens": "3",
        "refresh": "50",
    }  # fmt: skip
    again = opened(**query)
    assert sound(again)
    assert again.text_input(key="question").value == QUESTION
    assert again.number_input(key="k").value == 1
    one, other = (a.session_state["result"].answers for a in (app, again))
    assert [(a.path, a.answer) for a in one] == [(a.path, a.answer) for a in other]
    assert one[0].tokens.generated <= 3
    assert one[0].tokens.refreshed == round(one[0].tokens.passage / 2)


def test_the_next_question_is_the_one_that_was_typed(
    filled: CAG, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order in which models were chosen, and after none was chosen."""
    monkeypatch.setattr(compare, "offered_targets", lambda cag: ["tgt", "ref"])
    app = opened()
    for targets in (["ref", "tgt"], [], ["tgt"]):
        question = f"Which bells, {targets}?"
        app.multiselect(key="targets").set_value(targets)
        asked(app, question, paths=["direct"])
        assert app.text_input(key="question").value == question
        assert dict(app.query_params)["q"] == question
        assert app.multiselect(key="targets").value == targets
        if targets:
            result = app.session_state["result"]
            assert [a.target for a in result.answers] == targets
            assert {a.question for a in result.answers} == {question}


def test_a_link_that_makes_no_sense_gives_the_defaults(filled: CAG) -> None:
    app = opened(target="nobody", path="sideways", k="-1", tokens="many", refresh="all")
    assert sound(app)
    assert app.multiselect(key="targets").value == ["tgt"]
    assert app.button_group(key="paths").value == ["translated", "direct"]
    assert app.number_input(key="k").value == filled.settings.k
    assert app.number_input(key="tokens").value == filled.settings.max_tokens
    assert app.slider(key="refresh").value == 0


def test_going_back_asks_what_the_address_says(filled: CAG) -> None:
    app = asked(opened(), "What colour are boats?")
    asked(app)
    app.query_params["q"] = "What colour are boats?"
    app.run()
    assert app.text_input(key="question").value == "What colour are boats?"
    assert app.session_state["result"].request.question == "What colour are boats?"


def test_answers_and_address_stay_when_the_view_changes(filled: CAG) -> None:
    app = asked(opened())
    before = app.session_state["result"]
    switched(app, "library")
    switched(app, "compare")
    assert sound(app) and app.session_state["result"] is before
    assert app.text_input(key="question").value == QUESTION
    assert app.query_params["q"] == QUESTION


# -- once per process ----------------------------------------------------------------------------


def test_reruns_and_sessions_load_nothing_and_ask_nothing_again(
    filled: CAG, made: list[CAG], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_translator(filled)
    app = asked(opened())
    loads, loaded = filled.models.loads, [filled.models.lm(n).model for n in filled.models.loaded]
    asks: list[str] = []
    stream = filled.stream
    monkeypatch.setattr(filled, "stream", lambda q, **kw: asks.append(q) or stream(q, **kw))
    for _ in range(3):
        app.run()
    assert not asks
    # in turn: AppTest keeps its mock runtime in a global; threads are tested on the engine
    other = asked(opened())
    assert sound(other) and asks == [QUESTION] * 2
    first, second = (a.session_state["result"].answers for a in (app, other))
    assert [a.answer for a in first] == [a.answer for a in second]
    assert len(made) == 1 and filled.models.loads == loads
    assert all(
        filled.models.lm(name).model is model
        for name, model in zip(filled.models.loaded, loaded, strict=True)
    )


# -- errors and hostile text ---------------------------------------------------------------------


def test_an_empty_question_is_one_line(filled: CAG) -> None:
    app = asked(opened(), question="   ")
    assert "the question is empty" in plain(app.error[0].value)
    assert len(app.error) == 1 and not app.exception


@pytest.mark.parametrize(("key", "said"), [("targets", "one model"), ("paths", "one path")])
def test_nothing_chosen_is_one_line(filled: CAG, key: str, said: str) -> None:
    app = opened()
    widget = app.multiselect(key=key) if key == "targets" else app.button_group(key=key)
    widget.set_value([])
    asked(app)
    assert said in plain(app.error[0].value) and not app.exception


def test_missing_weights_name_the_command(filled: CAG, home: Path) -> None:
    filled.models = Models(Settings(home=home))
    object.__setattr__(filled.settings, "target", "gemma-3-270m")
    app = asked(opened())
    assert "`cag pull gemma-3-270m`" in app.error[0].value
    assert len(app.error) == 1 and not app.exception


def test_a_broken_setting_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "CAG", CAG)
    monkeypatch.setenv("CAG_K", "many")
    app = opened()
    assert "CAG_K" in plain(app.error[0].value) and not app.exception


def test_hostile_text_is_never_markup(engine: CAG, tmp_path: Path) -> None:
    (tmp_path / "bad.md").write_text(f"# {HOSTILE}\n\n{HOSTILE} is written in the harbour.\n")
    engine.ingest([tmp_path / "bad.md"])
    app = asked(opened(), question="Where is bold written?")
    assert not app.exception
    outside_code = "".join(markup(app).split("`")[::2])
    assert "<script>" not in outside_code and "http://evil" not in outside_code
    shown = "".join(element.value for element in app.get("html"))
    assert "<script" not in shown and "<img" not in shown and "&lt;script&gt;" in shown


# -- sources and examples ------------------------------------------------------------------------


def test_a_source_is_marked_where_it_stands(filled: CAG) -> None:
    app = asked(opened())
    passages = [s.passage for s in app.session_state["result"].sources]
    shown = [e.value for e in app.get("html") if "<mark" in e.value]
    assert len(shown) == len(passages) == 2
    for body, passage in zip(shown, passages, strict=True):
        assert passage.text.split("\n")[0] in body.partition("<mark")[2]
    before, after = (shown[0].partition("<mark")[0], shown[0].partition("</mark>")[2])
    assert len(before) + len(after) > 300, "the passages around it are shown, too"


def test_a_document_that_is_gone_still_shows_its_passage(filled: CAG, docs: Path) -> None:
    for path in docs.iterdir():
        path.unlink()
    app = asked(opened())
    assert sound(app) and "has changed or is gone" in markup(app)
    assert sum("<mark" in element.value for element in app.get("html")) == 2


def test_surroundings_are_cut_between_words() -> None:
    text = "one two three four five six seven"
    start = text.index("four")
    before, after = sources.surroundings(text, start, start + 4, around=9)
    assert (before, after) == ("… three ", " five …")
    assert sources.surroundings(text, start, start + 4, around=99)[0] == "one two three "
    lines = text.replace("two ", "two\n")
    assert sources.surroundings(lines, start, start + 4, around=12)[0] == "… three "


def test_examples_are_offered_for_the_documentation(engine: CAG, tmp_path: Path) -> None:
    for name in compare.DOCUMENTATION:
        (tmp_path / name).write_text(f"# {name}\n\nDamaged files of {name} go to the quarantine.\n")
    engine.ingest([tmp_path / name for name in compare.DOCUMENTATION])
    app = pressed(opened(), compare.EXAMPLES[0])
    assert sound(app) and app.session_state["result"].request.question == compare.EXAMPLES[0]
    assert app.query_params["q"] == compare.EXAMPLES[0]
    assert compare.EXAMPLES[1] not in [button.label for button in app.button]


def test_no_examples_for_other_documents(filled: CAG) -> None:
    assert [button.label for button in opened().button] == ["Ask"]


def test_the_charts_hold_every_part(filled: CAG) -> None:
    answer = filled.ask(QUESTION, mode="direct")
    times = charts.first_token_chart([answer]).data
    assert times["part"].tolist() == list(charts.PARTS)
    assert times["value"].sum() <= answer.timings.first_token
    tokens = charts.tokens_chart([answer]).data
    assert tokens["value"].sum() == answer.tokens.target_forward
