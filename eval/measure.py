"""Measure one question in one arm: answer, likelihoods, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cag.lm.cache import KV, Context
from cag.lm.counting import LayerTokens, count_layer_tokens
from cag.lm.decode import Decoded, Generation, decode
from cag.lm.loading import LM
from cag.scoring import first_token_kl
from eval import flops
from eval.arms import ARMS, Bench, Span
from eval.data import Question
from eval.metrics import best_f1, chosen, exact_match

GENERATION = Generation(max_tokens=16, stop=("\n",))


@dataclass
class MeteredBench(Bench):
    """A bench that notes what its arms spend on translating.

    Sources count as if they lay in a store: reading them with the reference is left out.

    Attributes
    ----------
    translation_macs
        Multiply-accumulates of all translations since `reset`, the lowest layer included.
    source_seconds, source_tokens
        Time, and tokens through the target's layers (if the reference is the same model), that
        went into sources since `reset`.
    """

    translation_macs: int = 0
    source_seconds: float = 0.0
    source_tokens: float = 0.0

    def reset(self) -> None:
        """Count from zero, with both prefixes read."""
        self.start(self.target)
        self.start(self.reference)
        self.translation_macs, self.source_seconds, self.source_tokens = 0, 0.0, 0.0

    def translation(self, name: str, passages: Sequence[str]) -> KV:
        kv = super().translation(name, passages)
        per_token = self.translators[name].multiplications()
        lowest = flops.lowest_layer(self.target.model.config)
        self.translation_macs += len(kv) * (per_token + lowest)
        return kv

    def source(self, passage: str) -> tuple[KV, list[Span]]:
        started = time.perf_counter()
        with count_layer_tokens(self.target) as count:
            found = super().source(passage)
        self.source_tokens += count.tokens
        self.source_seconds += time.perf_counter() - started
        return found


# -- an arm --------------------------------------------------------------------------------


@torch.inference_mode()
def run_arm(
    bench: MeteredBench,
    arm: str,
    question: Question,
    other: Sequence[str],
    native: Tensor | None = None,
) -> tuple[dict[str, Any], Tensor]:
    """Answer a question in an arm and say what it cost.

    Parameters
    ----------
    other
        Passages of another question, for the arm `wrong_passage`.
    native
        Native logits of the first token, where they are known.

    Returns
    -------
    tuple
        What `measure` found, with the costs: ``tokens`` through each of the answering model's
        layers between the passages and the first generated token, ``macs`` (multiply-
        accumulates up to that token, translating included), ``ms`` for the context, and
        ``seconds`` for everything; and the first token's logits.
    """
    bench.reset()
    started = time.perf_counter()
    with count_layer_tokens(bench.target) as target, count_layer_tokens(bench.reference) as own:
        lm, context = ARMS[arm](bench, question, other)
        _wait_for(lm)
        built = time.perf_counter() - started - bench.source_seconds
    through: LayerTokens = target if lm is bench.target else own
    before = context.length
    same = bench.target is bench.reference
    row, logits = measure(bench, lm, context, question, native if lm is bench.target else None)
    tokens = row["tokens"] + through.tokens - (bench.source_tokens if same else 0)
    past = before + row["tokens"] - tokens
    row["tokens"] = tokens
    row["macs"] = bench.translation_macs + reading_macs(lm, tokens, past)
    row["ms"] = 1000 * built
    row["seconds"] = time.perf_counter() - started
    return row, logits


def reading_macs(lm: LM, tokens: float, past: float) -> int:
    """MACs of reading and of one token's logits; the tokens count as standing behind the past."""
    whole = round(tokens)
    return flops.reading(lm.model.config, whole, max(0, round(past))) + flops.head(lm.model.config)


@torch.inference_mode()
def native_logits(bench: Bench, question: Question) -> Tensor:
    """First-token logits of the target that read the passages itself, shape (vocabulary,)."""
    context = bench.native(bench.target, question.passages)
    *first, last = suffix_ids(bench, bench.target, question)
    bench.read(context, bench.target, first)
    ids = torch.tensor([[last]], device=bench.target.device)
    logits: Tensor = context.run(ids).logits[0, -1].float().cpu()
    return logits


# -- an answer -----------------------------------------------------------------------------


@torch.inference_mode()
def measure(
    bench: Bench, lm: LM, context: Context, question: Question, native: Tensor | None = None
) -> tuple[dict[str, Any], Tensor]:
    """Ask a model that holds a context; the context is extended.

    Parameters
    ----------
    native
        Native logits of the first token, to compare with.

    Returns
    -------
    tuple
        Plain data, and the first token's logits with shape (vocabulary,). ``answer`` (greedy),
        ``nll`` of the first accepted answer in nats per token, ``tokens`` of the suffix, and
        ``first``, the KL divergence from native in nats. Of free answers ``f1`` and ``em``. Of
        choices: ``sum``, ``mean`` and ``generated``, the choice taken by the summed and by the
        mean log-probability and by generation, ``right_`` of each, and ``logprob`` per choice.
    """
    *first, last = suffix_ids(bench, lm, question)
    with count_layer_tokens(lm) as count:
        bench.read(context, lm, first)
    if question.choices:
        scores = _score_choices(lm, context, [last], question)
    else:
        scores = {"nll": answer_nll(lm, context.fork(), [last], question.answers[0])}
    result = Decoded()
    for _ in decode(lm, context, [last], GENERATION, result):
        pass
    answer = result.text.strip()
    if question.choices:
        found = scores["generated"] = chosen(answer, question.choices)
        scores["right_generated"] = float(found in question.answers)
    else:
        scores |= {
            "f1": best_f1(answer, question.answers),
            "em": exact_match(answer, question.answers),
        }
    logits = result.first_logits
    if logits is None:
        raise RuntimeError("nothing was decoded")
    kl = None if native is None else first_token_kl(native, logits)
    tokens = count.tokens + 1  # the last one is read together with whatever follows it
    return {"answer": answer, **scores, "first": kl, "tokens": tokens}, logits


def suffix_ids(bench: Bench, lm: LM, question: Question) -> list[int]:
    """What a model reads behind the passages."""
    return lm.encode(bench.template.suffix.format(question=question.question))


@torch.inference_mode()
def answer_nll(lm: LM, context: Context, suffix: Sequence[int], answer: str) -> float:
    """Mean negative log-likelihood of the answer and its line end, in nats per token."""
    return -float(answer_logprobs(lm, context, suffix, answer).mean())


@torch.inference_mode()
def answer_logprobs(lm: LM, context: Context, suffix: Sequence[int], answer: str) -> Tensor:
    """Log-probability of each token of the answer and its line end; the context is extended."""
    wanted = lm.encode(f" {answer}\n")
    ids = torch.tensor([[*suffix, *wanted]], device=lm.device)
    logits = context.run(ids, logits=len(wanted) + 1).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, -len(wanted) :, None])[:, 0]


def _score_choices(
    lm: LM, context: Context, suffix: Sequence[int], question: Question
) -> dict[str, Any]:
    """Choose by log-probability, summed and per token."""
    logprobs = {c: answer_logprobs(lm, context.fork(), suffix, c) for c in question.choices}
    gold = question.answers[0]
    if gold not in logprobs:
        logprobs[gold] = answer_logprobs(lm, context.fork(), suffix, gold)
    by_sum = max(question.choices, key=lambda c: float(logprobs[c].sum()))
    by_mean = max(question.choices, key=lambda c: float(logprobs[c].mean()))
    return {
        "nll": -float(logprobs[gold].mean()),
        "sum": by_sum,
        "right_sum": float(by_sum in question.answers),
        "mean": by_mean,
        "right_mean": float(by_mean in question.answers),
        "logprob": {c: round(float(logprobs[c].sum()), 4) for c in question.choices},
    }


def _wait_for(lm: LM) -> None:
    """Let a clock see the work that an accelerator still has to do."""
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)
