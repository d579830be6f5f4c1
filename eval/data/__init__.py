"""Data sets to measure with, read from files; none are copied into the project."""

import re
from functools import partial
from pathlib import Path

from cag.errors import IngestError
from cag.translate.examples import split_slice
from eval.data.among import read_among
from eval.data.base import Question, Role, Task, sample
from eval.data.boolq import read_boolq
from eval.data.covidqa import read_covidqa
from eval.data.hotpotqa import read_hotpotqa
from eval.data.pubmedqa import read_pubmedqa
from eval.data.squad import read_squad
from eval.data.strategyqa import read_strategyqa
from eval.data.synthetic import read_synthetic

_HOTPOTQA = "hotpotqa/dev_sample100.json"
_XQUAD = Task("xquad", "report", "xquad/xquad.en.json", read_squad)
_SQUADSHIFTS = Task(
    "squadshifts",
    "choose",
    "squadshifts/new_wiki_v1.0.json",
    partial(read_squad, first=1000, last=1300),
)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _XQUAD,
        _SQUADSHIFTS,
        Task("covidqa", "report", "covidqa/200423_covidQA.json", read_covidqa),
        Task("boolq", "report", "boolq/dev.jsonl", partial(read_boolq, first=2000)),
        Task("pubmedqa", "report", "pubmedqa/ori_pqal.json", read_pubmedqa),
        Task("hotpotqa", "report", _HOTPOTQA, read_hotpotqa),
        Task("hotpotqa_distractors", "report", _HOTPOTQA, partial(read_hotpotqa, distractors=True)),
        Task("strategyqa", "report", "strategyqa/dev.json", read_strategyqa),
        Task("synthetic", "report", "", read_synthetic),
        *(
            Task(
                f"{single.name}_{count}_{'last' if last else 'first'}",
                single.role,
                single.file,
                partial(read_among, read=single.read, count=count, last=last),
            )
            for single in (_XQUAD, _SQUADSHIFTS)
            for count in (2, 4, 8)
            for last in (False, True)
        ),
    )
}


def find_task(source: str) -> Task:
    """A task by its name, or any SQuAD 1.1 file, ``FILE.json`` or ``FILE.json[start:stop]``.

    A slice counts paragraphs. The passages of a file of your own are not reserved: keep what you
    train on apart yourself.

    Raises
    ------
    IngestError
        If it is neither.
    """
    if source in TASKS:
        return TASKS[source]
    path, part = split_slice(source)
    if path.suffix != ".json":
        raise IngestError(
            f"no task '{source}'; give a SQuAD file that ends in .json or one of: "
            f"{', '.join(TASKS)}"
        )
    read = partial(read_squad, first=part.start or 0, last=part.stop)
    return Task(source, "report", str(path.absolute()), read)


def label(source: str) -> str:
    """What the log of a task, or of a file asked as one, is called."""
    return re.sub(r"[^\w.-]+", "-", Path(source).name).strip("-")


__all__ = ["TASKS", "Question", "Role", "Task", "find_task", "label", "read_squad", "sample"]
