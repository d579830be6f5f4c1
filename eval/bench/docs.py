"""Ten questions about the project's own docs, written before their answers were seen."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from cag.answer import normalise
from cag.engine import CAG
from cag.settings import Settings

#: (question, words that a right answer holds)
QUESTIONS = (
    ("Which model reads the documents?", "reference model"),
    ("In which format are the caches stored?", "safetensors"),
    ("What is the unit that is stored and retrieved?", "passage"),
    ("Which loss trains the mixture first?", "attention matching"),
    ("How many experts run for each token?", "two"),
    ("What happens to a cache that is damaged?", "quarantine"),
    ("Which environment variable moves everything that cag writes?", "CAG_HOME"),
    ("What is the exit code of a user error?", "2"),
    ("Which library keeps the vectors?", "FAISS"),
    ("What does the target model compute for the prefix?", "natively"),
)


def run_docs(settings: Settings, folder: Path) -> dict[str, Any]:
    """Ask every question on both paths over `folder`, in a store of its own."""
    with tempfile.TemporaryDirectory() as store:
        engine = CAG(settings, store_folder=Path(store))
        engine.ingest([folder])
        rows = []
        for question, wanted in QUESTIONS:
            compared = engine.compare(question)
            row: dict[str, Any] = {"question": question, "wanted": wanted}
            for name, answer in (("translated", compared.translated), ("direct", compared.direct)):
                found = " ".join(normalise(answer.answer))
                row[name] = answer.answer
                row[f"{name}_right"] = " ".join(normalise(wanted)) in found
            rows.append(row)
    count = {n: sum(row[f"{n}_right"] for row in rows) for n in ("translated", "direct")}
    return {"right": count, "of": len(rows), "questions": rows}
