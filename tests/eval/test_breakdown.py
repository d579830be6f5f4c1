"""Scores sorted by traits of the questions, from logs and data alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cag import lines
from eval.breakdown import LONG, answer_kind, answer_place, break_down, passage_length
from eval.commands import eval_app
from eval.data import TASKS, Question, Task
from eval.identity import OtherRun, describe_task

TEXT = "Nine bells hang in the tower. Anna Lind cast them in 1874, of bronze."
ASKED = [
    Question("q0", (TEXT,), "How many?", ("Nine",)),
    Question("q1", (TEXT,), "Who?", ("Anna Lind",)),
    Question("q2", (TEXT + " " * LONG,), "When?", ("1874",)),
    Question("q3", (TEXT + " " * LONG,), "Of what?", ("bronze",)),
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run over ASKED: native is always right, translated in short passages only."""
    task = Task("bells", "report", "", lambda path: list(ASKED))
    monkeypatch.setitem(TASKS, "bells", task)
    asked = task.questions(tmp_path, 4, 3)
    config = {
        "n": 4, "seed": 3, "pairs": {"ref--tgt": {}},
        "sessions": [{"tasks": ["bells"]}, {"tasks": ["bells"]}],
        "tasks": {"bells": describe_task(task, asked)},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for question in asked:
        kept = float(passage_length(question) != "longer")
        arms = {"native": {"f1": 1.0}, "translated": {"f1": kept}}
        lines.append(tmp_path / "ref--tgt" / "bells.jsonl", {"id": question.id, "arms": arms})
    return tmp_path


def test_groups_tell_where_answers_are_lost(run: Path) -> None:
    rows = break_down(run, run)["ref--tgt"]["bells"]
    found = {(row["trait"], row["group"]): row for row in rows}
    short, long = found["passage", f"up to {LONG} characters"], found["passage", "longer"]
    assert (short["questions"], short["difference"], short["difference_95"]) == (2, 0, [0, 0])
    assert (long["questions"], long["translated"], long["native"]) == (2, 0, 1)
    assert long["difference_95"] == [-1, -1]
    assert {g for trait, g in found if trait == "answer"} == {"name", "number", "phrase"}
    swapped = break_down(run, run, "native", "translated")["ref--tgt"]["bells"]
    assert [row["difference"] for row in swapped] == [-row["difference"] for row in rows]


def test_traits_of_a_question() -> None:
    assert [answer_place(question) for question in ASKED] == [
        "first third", "middle", "first third", "first third",
    ]  # fmt: skip
    closed = replace(ASKED[0], answers=("yes",), choices=("yes", "no"))
    assert (answer_place(closed), answer_kind(closed)) == (None, "yes")
    assert answer_place(replace(ASKED[0], answers=("bronze.",))) == "last third"
    kinds = {answer: answer_kind(replace(ASKED[0], answers=(answer,))) for answer in
             ("the Bank of England", "a bell", "in May 1874", "(see below)")}  # fmt: skip
    assert list(kinds.values()) == ["name", "phrase", "number", "phrase"]


def test_other_data_or_arms_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OtherRun, match="both ridge and native"):
        break_down(run, run, "ridge")
    other = [replace(question, answers=("no",)) for question in ASKED]
    monkeypatch.setitem(TASKS, "bells", Task("bells", "report", "", lambda path: other))
    with pytest.raises(OtherRun, match="other questions"):
        break_down(run, run)


def test_the_command_prints_a_table(run: Path) -> None:
    arguments = ["breakdown", str(run), "--data", str(run)]
    result = CliRunner().invoke(eval_app, arguments)
    assert result.exit_code == 0, result.exception
    assert "| passage | longer | 2 | 1.000 | 0.000 | -1.000 (-1.000 to -1.000) |" in result.stdout
    result = CliRunner().invoke(eval_app, [*arguments, "--json"])
    assert json.loads(result.stdout) == break_down(run, run)
