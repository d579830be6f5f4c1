"""The right passage among others: what reading several passages in a row costs in quality."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from eval.data.base import Question


def read_among(
    path: Path, read: Callable[[Path], list[Question]], count: int, last: bool
) -> list[Question]:
    """Questions of another reader, each with `count` passages in a row.

    Parameters
    ----------
    read
        Reads questions with one passage each.
    count
        Passages per question; those besides its own belong to other questions, and follow from
        its id alone.
    last
        Whether its own passage stands last, nearest to the question, or first.
    """
    questions = read(path)
    pool = sorted({question.passages[0] for question in questions})
    return [_among(question, pool, count, last) for question in questions]


def _among(question: Question, pool: list[str], count: int, last: bool) -> Question:
    (own,) = question.passages
    others = random.Random(question.id).sample(pool, min(count, len(pool)))
    others = [passage for passage in others if passage != own][: count - 1]
    passages = (*others, own) if last else (own, *others)
    return replace(question, passages=passages)
