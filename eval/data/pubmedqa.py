"""PubMedQA: yes/no/maybe questions with an abstract that leaves out its conclusion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.data.base import Question

#: Lies beside the questions; its keys are the ids of the test split.
TEST_IDS = "test_ground_truth.json"
_CHOICES = ("yes", "no", "maybe")


def read_pubmedqa(path: Path) -> list[Question]:
    """Questions of the test split; all others may be trained on."""
    rows = json.loads(Path(path).read_text(encoding="utf-8"))
    test = json.loads(Path(path).with_name(TEST_IDS).read_text(encoding="utf-8"))
    return [_question(identifier, rows[identifier]) for identifier in test]


def _question(identifier: str, row: dict[str, Any]) -> Question:
    answer, contexts = row["final_decision"], row["CONTEXTS"]
    if answer not in _CHOICES:
        raise ValueError(f"the answer to {identifier} is {answer!r}, not yes, no or maybe")
    if not isinstance(contexts, list):
        raise ValueError(f"CONTEXTS of {identifier} is no list")
    return Question(identifier, (" ".join(contexts),), row["QUESTION"].strip(), (answer,), _CHOICES)
