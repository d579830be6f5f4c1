"""Data sets from the hub, written as the files that the tasks read; needs `datasets`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cag.errors import CagError, DownloadFailed
from cag.translate import reserved
from eval.data import TASKS
from eval.data.pubmedqa import TEST_IDS

Row = dict[str, Any]


@dataclass(frozen=True)
class HubSet:
    """Where a data set lies on the hub, and what writes its rows to a file."""

    id: str
    config: str | None
    split: str
    write: Callable[[Iterable[Row], Path], None]


def export(name: str, out: Path) -> Path:
    """Download a data set and write it below `out`, which then is a data folder for its task.

    Raises
    ------
    DownloadFailed
        If the hub does not give it, or gives other columns than expected.
    CagError
        If the `datasets` library is missing, or the name is not one of `HUB`.
    """
    if name not in HUB:
        raise CagError(f"no data set '{name}' on the hub; use one of: {', '.join(HUB)}")
    try:
        import datasets  # no dependency of ours
    except ImportError as error:
        raise CagError(f"'{name}' from the hub needs: pip install datasets") from error
    found, path = HUB[name], Path(out) / TASKS[name].file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.write(datasets.load_dataset(found.id, found.config, split=found.split), path)
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DownloadFailed(f"cannot get '{found.id}' from the hub: {reason}") from error
    return path


def write_squad(rows: Iterable[Row], path: Path) -> None:
    """SQuAD 1.1 JSON; questions of one context share a paragraph."""
    paragraphs: dict[str, list[Row]] = {}
    for row in rows:
        given = row["answers"]
        pairs = zip(given["text"], given["answer_start"], strict=True)
        answers = [{"text": text, "answer_start": int(start)} for text, start in pairs]
        qa = {"id": row["id"], "question": row["question"], "answers": answers}
        paragraphs.setdefault(row["context"], []).append(qa)
    found = [{"context": context, "qas": qas} for context, qas in paragraphs.items()]
    _write(path, {"data": [{"title": path.stem, "paragraphs": found}]})


def write_boolq(rows: Iterable[Row], path: Path) -> None:
    """JSON lines, in the hub's order: the task counts rows."""
    names = ("question", "answer", "passage")
    lines = [json.dumps({name: row[name] for name in names}) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def write_pubmedqa(rows: Iterable[Row], path: Path) -> None:
    """JSON by id, and beside it the ids of the test split.

    The hub does not say which questions these are, but their abstracts are reserved.
    """
    found = {
        str(row["pubid"]): {
            "QUESTION": row["question"],
            "CONTEXTS": list(row["context"]["contexts"]),
            "final_decision": row["final_decision"],
        }
        for row in rows
    }
    test = {i: r["final_decision"] for i, r in found.items() if reserved.holds(_abstract(r))}
    _write(path, found)
    _write(path.with_name(TEST_IDS), test)


def write_hotpotqa(rows: Iterable[Row], path: Path) -> None:
    """The paragraphs that hold supporting facts, and all others as distractors."""
    _write(path, [_hotpotqa(row) for row in rows])


def _hotpotqa(row: Row) -> Row:
    supporting = set(row["supporting_facts"]["title"])
    paragraphs = list(zip(row["context"]["title"], row["context"]["sentences"], strict=True))
    first, second = (list(text) for title, text in paragraphs if title in supporting)
    return {
        "_id": row["id"],
        "question": row["question"],
        "answer": row["answer"],
        "para_a": first,
        "para_b": second,
        "distractors": [[t, list(text)] for t, text in paragraphs if t not in supporting],
    }


def _abstract(row: Row) -> str:
    return " ".join(row["CONTEXTS"])


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


#: The whole of HotpotQA's validation split, of which the file that it stands for is a sample.
HUB: dict[str, HubSet] = {
    "xquad": HubSet("google/xquad", "xquad.en", "validation", write_squad),
    "boolq": HubSet("google/boolq", None, "validation", write_boolq),
    "pubmedqa": HubSet("qiaojin/PubMedQA", "pqa_labeled", "train", write_pubmedqa),
    "hotpotqa": HubSet("hotpotqa/hotpot_qa", "distractor", "validation", write_hotpotqa),
}
