"""BoolQ: yes/no questions that people asked, each with a passage; JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

from cag.translate.examples import as_question
from eval.data.base import Question, folded, yes_no


def read_boolq(path: Path, first: int = 0, last: int | None = None) -> list[Question]:
    """Questions of rows ``first:last`` whose passage stands in none of the rows before `first`.

    Many passages come with several questions. One that training may see, since an earlier row has
    it too, cannot be reported on.
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line.strip()]
    before = {folded(row["passage"]) for row in rows[:first]}
    return [
        Question(
            id=f"row-{number}",
            passages=(row["passage"].strip(),),
            question=as_question(row["question"]),
            answers=(yes_no(row["answer"]),),
            choices=("yes", "no"),
        )
        for number, row in list(enumerate(rows))[first:last]
        if folded(row["passage"]) not in before
    ]
