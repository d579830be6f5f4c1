"""The Quality view and what it reads, over reports as the runner writes them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_lm
from driving import add_translator, markup, opened, plain, pressed, settled, sound, using

from app import quality_charts, reports, shared
from app.views import quality
from cag.engine import CAG

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)


def arm(score: float, name: str = "f1", **more: Any) -> dict[str, Any]:
    return {
        name: score, f"{name}_95": [score - 0.1, score + 0.1], "retention": score / 0.5,
        "retention_95": [score / 0.5 - 0.2, score / 0.5 + 0.2], "macs": 2.5e9 * (1 + score),
        "first_kl": None, "tokens": 40.0, "ms": 12.0, **more,
    }  # fmt: skip


METRICS = {
    "hours": 0.1,
    "pairs": {
        "ref--tgt": {
            "tasks": {
                "xquad": {
                    "questions": 20, "skipped": 1, "score": "f1",
                    "arms": {
                        "native": arm(0.5), "translated": arm(0.45, em=0.3),
                        "no_context": arm(0.1), "new_arm": arm(0.2, retention_95=None),
                    },
                    "controls": {"wrong_passage": {"holds": True}},
                },
                "boolq": {
                    "questions": 20, "skipped": 0, "score": "right_mean",
                    "arms": {n: arm(0.6, "right_mean") for n in ("native", "translated")},
                    "controls": {"wrong_passage": {"holds": False}},
                },
                "unfinished": {"questions": 0, "skipped": 0, "arms": {}},
            }
        }
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def made(engine: CAG, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CAG]]:
    with using(engine, monkeypatch) as made:
        monkeypatch.setattr(shared, "ROOT", tmp_path / "project")
        yield made


def write(folder: Path, content: Any = METRICS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_without_reports_the_view_says_how_to_get_one() -> None:
    app = opened("quality")
    assert sound(app) and "No evaluation has been run yet" in app.info[0].value
    assert app.selectbox[0].options == ["ref → tgt"]


def test_a_report_becomes_tables_and_charts(home: Path) -> None:
    write(home / "eval" / "first")
    for name in ("routing", "retention"):
        plot = home / "eval" / "first" / "ref--tgt" / f"{name}.png"
        plot.parent.mkdir(exist_ok=True)
        plot.write_bytes(PNG)
    app = opened("quality")
    assert sound(app) and not app.warning
    assert [tab.label for tab in app.tabs] == ["xquad", "boolq"]
    first, second = (frame.value for frame in app.dataframe)
    assert first["arm"].tolist() == ["native", "translated", "no_context", "new_arm"]
    assert first["score"].tolist() == [0.5, 0.45, 0.1, 0.2]
    assert "em" in first and "kl" not in first, "columns that hold nothing are left out"
    assert second["retention"].tolist() == [1.2, 1.2]
    shown = markup(app)
    assert "20 questions, 1 left out as too long, scored by F1" in shown
    assert ":orange[A wrong passage helps" in shown
    assert [e.label for e in app.expander if e.label in ("Routing", "Retention")] == ["Routing"]
    assert len(app.get("vega_lite_chart") or app.get("arrow_vega_lite_chart")) == 5


def test_the_newest_report_comes_first_and_others_can_be_chosen(home: Path, tmp_path: Path) -> None:
    for age, folder in enumerate(("newer", "older")):
        os.utime(write(home / "eval" / folder), (1e9 - age, 1e9 - age))
    write(tmp_path / "project" / "eval" / "reports")
    app = opened("quality")
    (choice,) = (box for box in app.selectbox if box.label == "Report")
    options = [label.partition(" (")[0] for label in choice.options]
    assert options == ["own run: newer", "own run: older", "project"]
    choice.select_index(2).run()
    assert sound(app) and "eval/reports" in markup(app)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"pairs": 3}', '{"pairs": {"a": {"tasks": null}}}', "{}"]
)
def test_a_malformed_report_is_one_line_and_the_others_stay(home: Path, content: str) -> None:
    write(home / "eval" / "good")
    write(home / "eval" / "bad", content)
    app = opened("quality")
    assert sound(app) and len(app.warning) == 1
    assert "cannot be read" in plain(app.warning[0].value) and len(app.dataframe) == 2


def test_injection_plots_are_shown(home: Path) -> None:
    (home / "eval" / "injection").mkdir(parents=True)
    (home / "eval" / "injection" / "injection.png").write_bytes(PNG)
    app = opened("quality")
    assert sound(app) and "Where translated layers hurt" in [s.value for s in app.subheader]
    assert len(app.image) == 1


def test_a_small_evaluation_runs_in_the_background(engine: CAG, home: Path) -> None:
    for name, family, merges in (("ref", "llama", 60), ("tgt", "gemma3_text", 20)):
        lm = tiny_lm(family, merges, max_position_embeddings=4096)  # the questions are long
        lm.name = name
        engine.models.add(lm)
    add_translator(engine)
    app = opened("quality")
    loads = engine.models.loads
    app.slider[0].set_value(2)
    settled(pressed(app, "Run"), quality.EVALUATE)
    assert sound(app), app.error
    assert "small-synthetic-2" in app.success[0].value
    assert app.dataframe[0].value["arm"].tolist() == list(quality.ARMS)
    assert (home / "eval" / "small-synthetic-2" / "report.md").exists()
    assert engine.models.loads == loads, "it runs on the models of the page"


def test_questions_that_do_not_fit_are_told_of(engine: CAG) -> None:
    add_translator(engine)
    app = opened("quality")
    app.slider[0].set_value(5)
    settled(pressed(app, "Run"), quality.EVALUATE)
    assert sound(app) and "is left out" in plain(app.warning[0].value)
    assert "and 2 more" in markup(app) and "holds any figures" in app.info[0].value


def test_a_data_set_that_is_missing_is_one_line(engine: CAG, tmp_path: Path) -> None:
    app = opened("quality")
    app.selectbox[1].select("xquad")
    app.text_input[0].set_value(str(tmp_path / "nothing"))
    settled(pressed(app, "Run"), quality.EVALUATE)
    assert "cannot read task 'xquad'" in plain(app.error[0].value) and not app.exception


def test_charts_leave_out_what_was_not_measured() -> None:
    measured = reports.rows({"t": {"score": "f1", "arms": {"native": {}, "odd": arm(0.3)}}})
    assert measured[0]["retention"] is None
    retention = quality_charts.retention_chart(measured, "arm").to_dict()
    cost = quality_charts.cost_chart(measured).to_dict()
    for chart in (retention, cost):
        data = max(chart["datasets"].values(), key=lambda rows: len(rows[0]))
        assert [row["arm"] for row in data] == ["odd"]


def test_charts_of_nothing_can_be_drawn() -> None:
    measured = reports.rows({"t": {"arms": {"native": {}}}})
    assert quality_charts.retention_chart(measured, "arm").to_dict()
    assert quality_charts.cost_chart(measured).to_dict()
