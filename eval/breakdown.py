"""Which questions are lost: a run's logged scores, sorted by what can be seen of a question."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval import metrics
from eval.data import Question, find_task, label
from eval.identity import OtherRun, describe_task, read_config
from eval.summary import Row, plain, read_log

#: Characters; beyond it a passage is longer than most that are stored.
LONG = 800


def passage_length(question: Question) -> str:
    """Up to `LONG` characters, or longer."""
    short = sum(map(len, question.passages)) <= LONG
    return f"up to {LONG} characters" if short else "longer"


def answer_place(question: Question) -> str | None:
    """The third of the text in which the answer stands first; None where it does not stand."""
    text = "\n".join(question.passages)
    at = text.find(question.answers[0])
    return None if at < 0 else ("first third", "middle", "last third")[3 * at // len(text)]


def answer_kind(question: Question) -> str:
    """A choice itself; else a number, a name (mostly capitals), or another phrase."""
    answer = question.answers[0]
    if question.choices:
        return answer
    if re.search(r"\d", answer):
        return "number"
    words = [word for word in answer.split() if word[0].isalpha()]
    capital = sum(word[0].isupper() for word in words)
    return "name" if words and 2 * capital >= len(words) else "phrase"


#: What questions are sorted by.
TRAITS: Mapping[str, Callable[[Question], str | None]] = {
    "passage": passage_length,
    "place of the answer": answer_place,
    "answer": answer_kind,
}


def break_down(
    folder: Path, data: Path, arm: str = "translated", against: str = "native"
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Scores of two arms by pair and task, for every group of questions.

    Parameters
    ----------
    folder
        What `cag eval` wrote.
    data
        Folder of the data sets: logs hold answers, but no passages.

    Returns
    -------
    dict
        By pair and task, a row per group: ``trait``, ``group``, ``questions``, the mean score
        of either arm by its name, their ``difference`` and its 95% interval.

    Raises
    ------
    OtherRun
        If the folder holds no run, the data are not what was asked, or no question has both
        arms.
    """
    config = read_config(folder / "config.json")
    sources = [source for session in config["sessions"] for source in session["tasks"]]
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for source in dict.fromkeys(sources):
        task, name = find_task(source), label(source)
        asked = task.questions(data, config["n"], config["seed"])
        if describe_task(task, asked)["sha256"] != config["tasks"][name]["sha256"]:
            raise OtherRun(f"'{data}' holds other questions of {name} than the run asked")
        questions = {question.id: question for question in asked}
        for pair in config["pairs"]:
            rows = read_log(folder / pair / f"{name}.jsonl").values()
            both = [
                (questions[row["id"]], row)
                for row in rows
                if row["id"] in questions and {arm, against} <= set(row["arms"])
            ]
            if both:
                found.setdefault(pair, {})[name] = _groups(both, arm, against, config["seed"])
    if not found:
        raise OtherRun(f"no question in '{folder}' was answered both {arm} and {against}")
    return found


def _groups(
    both: Sequence[tuple[Question, Row]], arm: str, against: str, seed: int
) -> list[dict[str, Any]]:
    rows = []
    for trait, of in TRAITS.items():
        groups: dict[str, list[dict[str, Any]]] = {}
        for question, row in both:
            if (group := of(question)) is not None:
                groups.setdefault(group, []).append(row["arms"])
        for group, arms in sorted(groups.items(), key=lambda item: -len(item[1])):
            score = "f1" if "f1" in arms[0][arm] else "right_mean"
            found, other = ([one[name][score] for one in arms] for name in (arm, against))
            rows.append(
                {
                    "trait": trait,
                    "group": group,
                    "questions": len(arms),
                    arm: metrics.mean(found),
                    against: metrics.mean(other),
                    "difference": metrics.mean(found) - metrics.mean(other),
                    "difference_95": plain(metrics.difference_interval(found, other, seed)),
                }
            )
    return rows


def table(found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    """`break_down` as Markdown."""
    blocks = []
    for pair, tasks in found.items():
        for task, rows in tasks.items():
            arm, against = list(rows[0])[3:5]
            lines = [
                f"## {pair}, {task}",
                "",
                f"| | | questions | {against} | {arm} | difference (95%) |",
                "|---|---|---|---|---|---|",
            ]
            for row in rows:
                low, high = row["difference_95"]
                lines.append(
                    f"| {row['trait']} | {row['group']} | {row['questions']} | {row[against]:.3f} "
                    f"| {row[arm]:.3f} | {row['difference']:+.3f} ({low:+.3f} to {high:+.3f}) |"
                )
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
