"""Answer quality over given passages, arm by arm."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cag.lm.cache import Context
from cag.lm.decode import Decoded, Generation, decode
from cag.lm.loading import LM
from eval.arms import ARMS, Bench
from eval.data import Question
from eval.metrics import best_f1, exact_match, mean, recovered, retention_interval

#: Stands in for another passage where the data hold only one.
UNRELATED = "The bell tower was repaired twice. Its clock is wound by hand every Sunday morning."

GENERATION = Generation(max_tokens=16, stop=("\n",))


def run_quality(
    bench: Bench,
    questions: Sequence[Question],
    arms: Sequence[str],
    log: Path | None = None,
    on_example: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Answer every question in every arm.

    With `log`, every example is a JSON line there, and a second run continues.

    Returns
    -------
    list of dict
        Per question: ``id``, and per arm ``answer``, ``f1``, ``em``, ``nll`` (nats per token).
    """
    logged = _read_log(log)
    passages = list(dict.fromkeys(question.passage for question in questions))
    rows = []
    for index, question in enumerate(questions):
        row: dict[str, Any] = logged.get(question.id, {"id": question.id})
        rows.append(row)
        missing = [arm for arm in arms if arm not in row]
        if not missing:
            continue
        place = passages.index(question.passage)
        other = passages[(place + max(1, len(passages) // 2)) % len(passages)]
        if other == question.passage:  # it is the only one
            other = UNRELATED
        for arm in missing:
            lm, context = ARMS[arm](bench, question, other)
            row[arm] = _measure(bench, lm, context, question)
        if log is not None:
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        on_example(index + 1, len(questions))
    return rows


def summarise(rows: Sequence[dict[str, Any]], arms: Sequence[str]) -> dict[str, Any]:
    """Means per arm, with retention and recovered fraction against native."""
    column = {a: {m: [r[a][m] for r in rows] for m in ("f1", "em", "nll")} for a in arms}
    summary: dict[str, Any] = {"questions": len(rows), "arms": {}}
    for arm in arms:
        result: dict[str, Any] = {metric: mean(column[arm][metric]) for metric in column[arm]}
        if "native" in column and "no_context" in column:
            native, none = (mean(column[a]["nll"]) for a in ("native", "no_context"))
            result["retention"] = result["f1"] / max(1e-9, mean(column["native"]["f1"]))
            interval = retention_interval(column[arm]["f1"], column["native"]["f1"])
            result["retention_95"] = list(interval)
            result["recovered"] = recovered(result["nll"], native, none)
        summary["arms"][arm] = result
    return summary


@torch.inference_mode()
def _measure(bench: Bench, lm: LM, context: Context, question: Question) -> dict[str, Any]:
    suffix = lm.encode(bench.template.suffix.format(question=question.question))
    nll = answer_nll(lm, context.fork(), suffix, question.answers[0])
    result = Decoded()
    for _ in decode(lm, context, suffix, GENERATION, result):
        pass
    answer = result.text.strip()
    return {
        "answer": answer,
        "f1": best_f1(answer, question.answers),
        "em": exact_match(answer, question.answers),
        "nll": nll,
    }


@torch.inference_mode()
def answer_nll(lm: LM, context: Context, suffix: Sequence[int], answer: str) -> float:
    """Mean negative log-likelihood of the answer and its line end, in nats per token."""
    wanted = lm.encode(f" {answer}\n")
    ids = torch.tensor([[*suffix, *wanted]], device=lm.device)
    logits = context.run(ids, logits=len(wanted) + 1).logits[0, :-1].float()
    target = torch.tensor(wanted, device=lm.device)
    return float(torch.nn.functional.cross_entropy(logits, target))


def _read_log(log: Path | None) -> dict[str, dict[str, Any]]:
    """Rows by question; of several the last, and a line cut off by a crash is passed over."""
    rows = {}
    if log is not None and log.exists():
        for line in log.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                rows[row["id"]] = row
    return rows
