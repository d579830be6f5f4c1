"""COVID-QA: questions on whole scientific articles, of which a window is given."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from eval.data.base import Question


def read_covidqa(path: Path) -> list[Question]:
    """Questions with a window of the article that holds their answer.

    This is an easier task than COVID-QA itself: the articles are far longer than a small model's
    window, so about 1,500 characters around the answer are given, found with the answer's help.
    The file's offsets are often wrong. They only choose between several places where the answer's
    text stands, so the window may show another place than the annotator read. Where the answer
    stands within the window is drawn by the question's id: the middle would give it away. Questions
    whose answer text does not occur are left out.
    """
    articles = json.loads(Path(path).read_text(encoding="utf-8"))["data"]
    questions = [
        _question(paragraph["context"], qa)
        for article in articles
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
    ]
    return [question for question in questions if question is not None]


def _question(article: str, qa: dict[str, Any]) -> Question | None:
    for answer in qa["answers"]:
        text = answer["text"].strip()
        places = [found.start() for found in re.finditer(re.escape(text), article)]
        if text and places:
            start = min(places, key=lambda place: abs(place - answer["answer_start"]))
            passage = window(article, start, start + len(text), random.Random(str(qa["id"])))
            return Question(str(qa["id"]), (passage,), qa["question"].strip(), (text,))
    return None


def window(text: str, start: int, stop: int, chooser: random.Random, size: int = 1500) -> str:
    """About `size` characters of whole words around ``text[start:stop]``, at a random position."""
    before = chooser.randint(0, max(0, size - (stop - start)))
    first = max(0, min(start - before, len(text) - size))
    last = min(len(text), max(stop, first + size))
    while first > 0 and not text[first - 1].isspace():
        first -= 1
    while last < len(text) and not text[last].isspace():
        last += 1
    return text[first:last].strip()
