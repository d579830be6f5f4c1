"""Exactness of the own path: does a stored and reloaded cache give the direct answer?"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cag.engine import CAG
from cag.library import Passage
from cag.models import Models
from cag.retrieval import Source
from cag.settings import Settings
from eval.data import Question


def run_exact(settings: Settings, questions: Sequence[Question]) -> dict[str, Any]:
    """Share of prompts with the same greedy text, for fp32 and bf16 on disk; model in fp32.

    Each prompt holds its question's first passage.
    """
    settings = replace(settings, dtype="float32", max_tokens=16)
    models = Models(settings)
    result: dict[str, Any] = {"prompts": len(questions)}
    for codec in ("fp32", "bf16"):
        with tempfile.TemporaryDirectory() as folder:
            chosen = replace(settings, codec=codec)
            engine = CAG(chosen, models=models, store_folder=Path(folder))
            agreed = [_agrees(engine, question) for question in questions]
        result[f"agreement_{codec}"] = sum(agreed) / len(agreed)
    return result


def _agrees(engine: CAG, question: Question) -> bool:
    text = question.passages[0]
    passage = Passage(
        id=question.id,
        document="bench",
        title="",
        start=0,
        end=len(text),
        text=text,
        spans=[],
        identity={},
    )
    sources = [Source(passage, 1.0)]
    direct = engine.ask(question.question, mode="direct", sources=sources)
    engine.ask(question.question, mode="own", sources=sources)  # reads and stores
    own = engine.ask(question.question, mode="own", sources=sources)
    return own.answer == direct.answer and not own.reason
