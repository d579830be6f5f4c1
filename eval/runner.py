"""Run arms over tasks, an answer a time, so that a stopped run goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cag import lines
from cag.errors import CagError, ContextTooLong
from cag.models import Models
from cag.settings import Settings
from cag.translate.finding import pair_name
from eval import identity, plots, report
from eval.arms import ARMS, NEEDS, TARGET_ALONE
from eval.data import Question, find_task, label
from eval.measure import GENERATION, MeteredBench, native_logits, run_arm
from eval.routing import routing
from eval.summary import Row, read_log, summarise_folder
from eval.translators import describe_translator, find_translators, translator_folder

#: Stands in for other passages where the data hold only one text.
UNRELATED = "The bell tower was repaired twice. Its clock is wound by hand every Sunday morning."

#: How many texts routing statistics are taken over.
ROUTED = 20

#: Called with what is being done, how much of it is done, and how much there is.
OnProgress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class RunConfig:
    """What to run.

    Attributes
    ----------
    pairs
        Names of (reference, target).
    tasks
        Names of tasks, or SQuAD files.
    arms
        Names out of `ARMS`.
    n, seed
        Questions per task, and what draws them.
    data
        Folder of the data sets.
    out
        Folder of everything that is written.
    """

    pairs: tuple[tuple[str, str], ...]
    tasks: tuple[str, ...]
    arms: tuple[str, ...]
    data: Path
    out: Path
    n: int = 300
    seed: int = 0


@dataclass(frozen=True)
class _Part:
    """One task of one pair."""

    pair: str
    task: str
    bench: MeteredBench
    arms: tuple[str, ...]
    questions: Sequence[Question]
    log: Path

    def missing(self, row: Row) -> list[str]:
        """Arms that have not answered yet, native first."""
        return [] if "skipped" in row else [a for a in self.arms if a not in row["arms"]]


def run(
    config: RunConfig,
    models: Models,
    settings: Settings,
    on_progress: OnProgress = lambda stage, done, total: None,
    warn: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Answer every question in every arm; write logs, ``metrics.json`` and the report.

    In `config.out`: ``config.json`` (first), ``<pair>/<task>.jsonl`` with a line per question,
    ``metrics.json``, ``report.md`` and its plots. Questions that are logged there already are
    not asked again; arms, tasks and pairs can be added later.

    Returns
    -------
    dict
        What is in ``metrics.json``.

    Raises
    ------
    CagError
        If an arm, task or model is unknown, a translator does not fit its models, or the
        folder holds a run with other settings (`OtherRun`).
    """
    plots.require_matplotlib()
    if unknown := [name for name in config.arms if name not in ARMS]:
        raise CagError(f"unknown arm '{unknown[0]}'; use some of: {', '.join(ARMS)}")
    on_progress("loading", 0, None)
    described, parts = _prepare(config, models, settings, warn)
    session = {
        "pairs": [":".join(pair) for pair in config.pairs],
        "tasks": list(config.tasks),
        "arms": list(config.arms),
        "data": str(config.data),
        **identity.session(),
    }
    config.out.mkdir(parents=True, exist_ok=True)
    identity.begin(config.out / "config.json", described, session)
    with torch.inference_mode():
        _answer(parts, on_progress, warn)
        for part in parts:
            _note_routing(part)
    metrics = summarise_folder(config.out)
    identity.write_json(config.out / "metrics.json", metrics)
    report.write_report(config.out)
    return metrics


def _prepare(
    config: RunConfig, models: Models, settings: Settings, warn: Callable[[str], None]
) -> tuple[dict[str, Any], list[_Part]]:
    """Everything that must exist before the first answer, and its description."""
    questions, tasks = {}, {}
    for source in config.tasks:
        task, name = find_task(source), label(source)
        if name in tasks:
            raise CagError(f"two tasks would both be logged as '{name}'; use one --out each")
        questions[name] = task.questions(config.data, config.n, config.seed)
        tasks[name] = identity.describe_task(task, questions[name])
    pairs, parts = {}, []
    for reference, target in config.pairs:
        pair = pair_name(reference, target)
        bench, arms, pairs[pair] = _bench(config, models, settings, reference, target, warn)
        for name, asked in questions.items():
            log = config.out / pair / f"{name}.jsonl"
            parts.append(_Part(pair, name, bench, arms, asked, log))
    described = {
        "n": config.n,
        "seed": config.seed,
        "generation": {"max_tokens": GENERATION.max_tokens, "stop": list(GENERATION.stop)},
        "template": MeteredBench.template.fingerprint,
        "versions": identity.versions(),
        "pairs": pairs,
        "tasks": tasks,
    }
    return described, parts


def _bench(
    config: RunConfig,
    models: Models,
    settings: Settings,
    reference: str,
    target: str,
    warn: Callable[[str], None],
) -> tuple[MeteredBench, tuple[str, ...], dict[str, Any]]:
    """A pair's bench, the arms that can run on it, and its description."""
    needed = list(dict.fromkeys(NEEDS[arm] for arm in config.arms if arm in NEEDS))
    found = find_translators(models, settings, reference, target, needed)
    arms = [arm for arm in config.arms if arm not in NEEDS or NEEDS[arm] in found]
    for arm in [arm for arm in config.arms if arm not in arms]:
        warn(
            f"arm '{arm}' of {reference}:{target} is left out: it needs the translator "
            f"'{NEEDS[arm]}', see `cag train`"
        )
    described = {
        "reference": identity.describe_lm(models.lm(reference)),
        "target": identity.describe_lm(models.lm(target)),
        "translators": {},
    }
    for name, translator in found.items():
        folder = translator_folder(settings.home, reference, target, name)
        if folder is not None:
            described["translators"][name] = describe_translator(translator, folder)
    arms.sort(key=list(ARMS).index)  # native first: others are compared with it
    bench = MeteredBench(models.lm(reference), models.lm(target), found)
    return bench, tuple(arms), described


# -- answering -----------------------------------------------------------------------------


def _answer(parts: Sequence[_Part], on_progress: OnProgress, warn: Callable[[str], None]) -> None:
    """Ask what is missing in the logs, every question in all pairs of a target together."""
    logs = {part.log: read_log(part.log) for part in parts}
    rows = {
        (part.log, question.id): logs[part.log].get(question.id, _fresh(question))
        for part in parts
        for question in part.questions
    }
    total = sum(len(p.missing(rows[p.log, q.id])) for p in parts for q in p.questions)
    done = 0
    for group in _groups(parts):
        questions = group[0].questions
        texts = list(dict.fromkeys(question.passages for question in questions))
        for part in group:
            part.bench.pool = [passage for passages in texts for passage in passages]
        for question in questions:
            target = _Target([rows[part.log, question.id] for part in group])
            for part in group:
                row = rows[part.log, question.id]
                missing = part.missing(row)
                if not missing:
                    continue
                stage = f"{part.pair} {part.task}"
                try:
                    target.extend(
                        row, part.bench, question, other_passages(texts, question), missing
                    )
                except ContextTooLong as error:
                    row["skipped"] = str(error)
                    warn(f"{stage}: question '{question.id}' is left out: {error}")
                lines.append(part.log, row)
                done += len(missing)
                on_progress(stage, done, total)


def _groups(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Parts that ask one target the same questions."""
    groups: dict[tuple[str, str], list[_Part]] = {}
    for part in parts:
        groups.setdefault((part.bench.target.name, part.task), []).append(part)
    return list(groups.values())


def _fresh(question: Question) -> Row:
    return {
        "id": question.id,
        "answers": list(question.answers),
        "choices": list(question.choices),
        "arms": {},
    }


class _Target:
    """What one target answers to one question, whichever reference it is paired with.

    Parameters
    ----------
    rows
        What the logs of its pairs hold already.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._known = {
            arm: found for row in rows for arm, found in row["arms"].items() if arm in TARGET_ALONE
        }
        self._native: Tensor | None = None

    def extend(
        self,
        row: Row,
        bench: MeteredBench,
        question: Question,
        other: Sequence[str],
        arms: Sequence[str],
    ) -> None:
        """Let arms answer; those of the target alone answer once."""
        for arm in arms:
            if arm in self._known:
                row["arms"][arm] = {**self._known[arm], "seconds": 0.0}
                continue
            wanted = None if arm in ("native", "reference") else self._logits(row, bench, question)
            found, logits = run_arm(bench, arm, question, other, wanted)
            if arm == "native":
                self._native, found["first"] = logits, 0.0
            if arm in TARGET_ALONE:
                self._known[arm] = found
            row["arms"][arm] = found

    def _logits(self, row: Row, bench: MeteredBench, question: Question) -> Tensor | None:
        """Native logits of the first token, computed anew if only native's row is there."""
        if self._native is None and "native" in row["arms"]:
            self._native = native_logits(bench, question)
        return self._native


def other_passages(texts: Sequence[tuple[str, ...]], question: Question) -> tuple[str, ...]:
    """The passages half the list away that share none with the question's own."""
    place, count = texts.index(question.passages), len(texts)
    for step in range(count):
        other = texts[(place + max(1, count // 2) + step) % count]
        if not set(other) & set(question.passages):
            return other
    return (UNRELATED,)


def _note_routing(part: _Part) -> None:
    """Write routing statistics of a mixture over an even sample of a task's texts."""
    path = part.log.with_name(f"{part.task}.routing.json")
    if path.exists() or "translated" not in part.arms:
        return
    texts = list(dict.fromkeys(question.passages for question in part.questions))
    statistics = routing(part.bench, texts[:: -(-len(texts) // ROUTED)])
    if statistics is not None:
        identity.write_json(path, statistics)
