"""Questions to measure with, read from files; none are copied into the project."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from cag.errors import IngestError


@dataclass(frozen=True)
class Question:
    """A question with its passage and every accepted answer."""

    id: str
    passage: str
    question: str
    answers: tuple[str, ...]


def read_squad(path: Path) -> list[Question]:
    """All questions of a SQuAD 1.1 JSON file that have an answer.

    Raises
    ------
    IngestError
        If the file cannot be read as such.
    """
    try:
        articles = json.loads(Path(path).read_text(encoding="utf-8"))["data"]
        return [
            Question(
                id=str(qa["id"]),
                passage=paragraph["context"].strip(),
                question=qa["question"].strip(),
                answers=tuple(dict.fromkeys(answer["text"] for answer in qa["answers"])),
            )
            for article in articles
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
            if qa["answers"]
        ]
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise IngestError(f"'{path}' is not a SQuAD 1.1 JSON file: {error}") from error


def sample(questions: list[Question], n: int, seed: int) -> list[Question]:
    """`n` questions drawn with a seed, then ordered so that passages stay together."""
    drawn = random.Random(seed).sample(questions, min(n, len(questions)))
    return sorted(drawn, key=lambda question: (question.passage, question.id))
