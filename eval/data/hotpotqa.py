"""HotpotQA: questions that need two paragraphs, with others that only look useful."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from eval.data.base import Question


def read_hotpotqa(path: Path, distractors: bool = False) -> list[Question]:
    """Questions with their two paragraphs, and with the distractors if wanted.

    The order of a question's passages is random and follows from its id alone, so that neither
    paragraph is always the first and every run has the same order.
    """
    rows = json.loads(Path(path).read_text(encoding="utf-8"))
    return [_question(row, distractors) for row in rows]


def _question(row: dict[str, Any], distractors: bool) -> Question:
    paragraphs = [row["para_a"], row["para_b"]]
    if distractors:
        paragraphs += [sentences for _, sentences, *_ in row["distractors"]]
    passages = ["".join(sentences).strip() for sentences in paragraphs]
    identifier = str(row["_id"])
    random.Random(identifier).shuffle(passages)
    return Question(identifier, tuple(passages), row["question"].strip(), (row["answer"].strip(),))
