"""StrategyQA: yes/no questions that several facts answer together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.data.base import Question, folded, yes_no

#: Lies beside the questions to report on; its facts may be trained on.
TRAIN = "train.json"


def read_strategyqa(path: Path) -> list[Question]:
    """Questions, their facts joined into one passage, that share no fact with the train split."""
    trained = {folded(fact) for row in _rows(Path(path).with_name(TRAIN)) for fact in row["facts"]}
    return [
        Question(
            id=row["qid"],
            passages=(" ".join(fact.strip() for fact in row["facts"]),),
            question=row["question"].strip(),
            answers=(yes_no(row["answer"]),),
            choices=("yes", "no"),
        )
        for row in _rows(Path(path))
        if row["facts"] and not any(folded(fact) in trained for fact in row["facts"])
    ]


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows
