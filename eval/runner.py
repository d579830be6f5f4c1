"""Run arms over tasks, an answer a time, so that a stopped run goes on where it was."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cag.errors import CagError, ContextTooLong
from cag.models import Models
from cag.settings import Settings
from cag.translate.finding import pair_name
from eval import identity, lines, plots, report
from eval.arms import ARMS, NEEDS
from eval.data import Question, find_task
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
    for name in config.tasks:
        task = find_task(name)
        label = re.sub(r"[^\w.-]+", "-", Path(name).name).strip("-")
        if label in tasks:
            raise CagError(f"two tasks would both be logged as '{label}'; use one --out each")
        questions[label] = task.questions(config.data, config.n, config.seed)
        tasks[label] = identity.describe_task(task, questions[label])
    pairs, parts = {}, []
    for reference, target in config.pairs:
        pair = pair_name(reference, target)
        bench, arms, pairs[pair] = _bench(config, models, settings, reference, target, warn)
        for label, asked in questions.items():
            log = config.out / pair / f"{label}.jsonl"
            parts.append(_Part(pair, label, bench, arms, asked, log))
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
    """Ask what is missing in the logs."""
    logs = [read_log(part.log) for part in parts]
    total = sum(
        len(part.missing(log.get(question.id, _fresh(question))))
        for part, log in zip(parts, logs, strict=True)
        for question in part.questions
    )
    done = 0
    for part, log in zip(parts, logs, strict=True):
        texts = list(dict.fromkeys(question.passages for question in part.questions))
        part.bench.pool = [passage for passages in texts for passage in passages]
        stage = f"{part.pair} {part.task}"
        for question in part.questions:
            row = log.get(question.id, _fresh(question))
            missing = part.missing(row)
            if not missing:
                continue
            try:
                _extend(row, part.bench, question, other_passages(texts, question), missing)
            except ContextTooLong as error:
                row["skipped"] = str(error)
                warn(f"{stage}: question '{question.id}' is left out: {error}")
            lines.append(part.log, row)
            done += len(missing)
            on_progress(stage, done, total)


def _fresh(question: Question) -> Row:
    return {
        "id": question.id,
        "answers": list(question.answers),
        "choices": list(question.choices),
        "arms": {},
    }


def _extend(
    row: Row, bench: MeteredBench, question: Question, other: Sequence[str], arms: Sequence[str]
) -> None:
    """Let arms answer; native's first logits are computed anew if only its row is there."""
    heard: dict[str, Tensor] = {}

    @functools.cache
    def native() -> Tensor | None:
        if "native" in heard:
            return heard["native"]
        return native_logits(bench, question) if "native" in row["arms"] else None

    for arm in arms:
        wanted = None if arm in ("native", "reference") else native()
        found, logits = run_arm(bench, arm, question, other, wanted)
        if arm == "native":
            heard["native"], found["first"] = logits, 0.0
        row["arms"][arm] = found


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
