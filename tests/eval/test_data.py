"""Questions come from files, the same ones for the same seed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from cag.errors import IngestError
from eval.data import Question, read_squad, sample


def qa(identifier: Any, *answers: str) -> dict[str, Any]:
    found = [{"text": text, "answer_start": 0} for text in answers]
    return {"id": identifier, "question": f" Question {identifier}? ", "answers": found}


def squad(*paragraphs: dict[str, Any]) -> str:
    return json.dumps({"version": "1.1", "data": [{"title": "T", "paragraphs": paragraphs}]})


def test_questions_have_passage_and_distinct_answers(tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    path.write_text(
        squad(
            {
                "context": "\nThe café is red. ",
                "qas": [qa("q1", "red", "red", "a red"), qa(2, "é")],
            },
            {"context": "Nothing.", "qas": [qa("unanswerable")]},
        ),
        encoding="utf-8",
    )
    assert read_squad(path) == [
        Question("q1", "The café is red.", "Question q1?", ("red", "a red")),
        Question("2", "The café is red.", "Question 2?", ("é",)),
    ]


NULL_CONTEXT = squad({"context": None, "qas": [qa("q", "a")]})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"\xff\xfe\x00",
        b"[]",
        b"{}",
        b'{"data": 3}',
        b'{"data": ["abc"]}',
        squad({"context": "C", "qas": [{"id": "q", "question": "Q?"}]}).encode(),
        squad({"context": "C", "qas": [{"id": "q", "question": "Q?", "answers": "a"}]}).encode(),
        pytest.param(
            NULL_CONTEXT.encode(),
            id="null context",
        ),
    ],
)
def test_what_is_no_squad_file_is_said_to_be_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    path.write_bytes(content)
    with pytest.raises(IngestError, match=r"dev\.json' is not a SQuAD 1\.1 JSON file"):
        read_squad(path)


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(IngestError, match="missing"):
        read_squad(tmp_path / "missing")


QUESTIONS = [Question(f"q{i}", f"passage {i % 7}", "?", ("a",)) for i in range(50)]


def test_a_seed_fixes_the_sample() -> None:
    assert sample(QUESTIONS, 20, seed=1) == sample(QUESTIONS, 20, seed=1)
    assert sample(QUESTIONS, 20, seed=1) != sample(QUESTIONS, 20, seed=2)


@pytest.mark.parametrize(("n", "size"), [(1, 1), (20, 20), (50, 50), (1000, 50)])
def test_a_sample_has_no_question_twice(n: int, size: int) -> None:
    drawn = sample(QUESTIONS, n, seed=0)
    assert len(drawn) == len(set(drawn)) == size
    assert set(drawn) <= set(QUESTIONS)


@pytest.mark.parametrize("n", [20, 1000])
def test_passages_stay_together(n: int) -> None:
    runs = [passage for passage, _ in itertools.groupby(q.passage for q in sample(QUESTIONS, n, 0))]
    assert len(runs) == len(set(runs))
