"""SQuAD 1.1 JSON: paragraphs with questions whose answers stand in them."""

from __future__ import annotations

import json
from pathlib import Path

from eval.data.base import Question


def read_squad(path: Path, first: int = 0, last: int | None = None) -> list[Question]:
    """Questions that have an answer, of paragraphs ``first:last`` in file order."""
    articles = json.loads(Path(path).read_text(encoding="utf-8"))["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    return [
        Question(
            id=str(qa["id"]),
            passages=(paragraph["context"].strip(),),
            question=qa["question"].strip(),
            answers=tuple(dict.fromkeys(answer["text"] for answer in qa["answers"])),
        )
        for paragraph in paragraphs[first:last]
        for qa in paragraph["qas"]
        if qa["answers"]
    ]
