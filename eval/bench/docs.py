"""Questions about the project's own docs, written before their answers were seen."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cag.engine import CAG
from cag.scoring import normalise
from cag.settings import Settings

#: (question, what a right answer holds; alternatives are separated by a bar)
QUESTIONS = (
    ("How often are checkpoints written?", "two minutes|2 minutes"),
    ("How many experts does the mixture translator add to the ridge?", "four|4"),
    ("How many bytes does bf16 use for each number?", "two|2"),
    ("Who can read the store?", "owner"),
    ("How many parts does a prompt have?", "three|3"),
    ("How much disk does each token need?", "23 kB"),
    ("What is a translator?", "network"),
    ("Which command shows both answers side by side?", "compare"),
    ("What does the suffix hold?", "question"),
    ("What does the option --debug show?", "traceback"),
)

#: An earlier ten, written before any answer was seen as well. They ask for more reading between the
#: lines; kept because leaving out what went badly would be a choice of results.
EARLIER = (
    ("Which model reads the documents?", "reference model"),
    ("In which format are the caches stored?", "safetensors"),
    ("What is the unit that is stored and retrieved?", "passage"),
    ("Which loss trains the mixture first?", "attention matching"),
    ("How many experts run for each token?", "two|2"),
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
        # results.md lists these very questions with their answers
        files = [file for file in sorted(folder.iterdir()) if file.name != "results.md"]
        engine.ingest(files)
        return {
            "questions": _asked(engine, QUESTIONS),
            "earlier": _asked(engine, EARLIER),
        }


def _asked(engine: CAG, questions: Sequence[tuple[str, str]]) -> dict[str, Any]:
    rows = []
    for question, wanted in questions:
        compared = engine.compare(question)
        row: dict[str, Any] = {"question": question, "wanted": wanted}
        for name, answer in (("translated", compared.translated), ("direct", compared.direct)):
            row[name] = answer.answer
            row[f"{name}_right"] = is_right(answer.answer, wanted)
        rows.append(row)
    count = {n: sum(row[f"{n}_right"] for row in rows) for n in ("translated", "direct")}
    return {"right": count, "of": len(rows), "rows": rows}


def is_right(answer: str, wanted: str) -> bool:
    """Whether an answer holds one of the wanted phrases, word by word."""
    found = f" {' '.join(normalise(answer))} "
    return any(f" {' '.join(normalise(phrase))} " in found for phrase in wanted.split("|"))
