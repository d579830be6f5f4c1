"""Pairs: what reference and target make of the same passage, streamed to disk."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cag.lm.cache import KV, Context
from cag.lm.capture import record_queries
from cag.lm.loading import LM
from cag.lm.prompt import PASSAGE_FORMAT, REFERENCE_PREFIX, Template, prefix_ids
from cag.translate.base import align_texts, flatten
from cag.translate.examples import Example


@dataclass
class Pair:
    """One passage as both models see it, and how the target looks at it.

    Attributes
    ----------
    source
        The reference's canonical KV, flat: shape (S, numbers per token).
    alignment, ids
        Reference index and target id of the T target tokens.
    native
        The target's canonical KV of the passage.
    suffix
        The target's canonical KV of the suffix (questions and answers).
    queries
        Native queries with shape (L, query_heads, N, D), rotated and scaled.
    query_positions
        Their positions counted from the passage's first token, with shape (N,).
    suffix_ids, answers
        Suffix tokens, and a mask of positions whose next token belongs to an answer.
    states
        The target's last hidden states over the suffix, with shape (len(suffix), hidden).
    """

    source: Tensor
    alignment: Tensor
    ids: Tensor
    native: KV
    suffix: KV
    queries: Tensor
    query_positions: Tensor
    suffix_ids: Tensor
    answers: Tensor
    states: Tensor

    def save(self, path: Path) -> None:
        """Write as safetensors; appears only when complete."""
        tensors = dict(vars(self))
        for name in ("native", "suffix"):
            kv = tensors.pop(name)
            tensors |= {f"{name}_keys": kv.keys, f"{name}_values": kv.values}
        temporary = path.with_suffix(".tmp")
        save_file({n: t.contiguous() for n, t in tensors.items()}, temporary)
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> Pair:
        """Read a pair onto a device."""
        tensors: dict[str, Any] = dict(load_file(path, device=str(device)))
        for name in ("native", "suffix"):
            tensors[name] = KV(tensors.pop(f"{name}_keys"), tensors.pop(f"{name}_values"))
        return cls(**tensors)


class PairCollector:
    """Runs both models over examples.

    Parameters
    ----------
    reference, target
        The two models.
    template
        Prompt around the passage.
    max_tokens
        Longer passages are cut to this many target tokens.
    queries
        How many query positions are kept per passage.
    """

    def __init__(
        self,
        reference: LM,
        target: LM,
        template: Template,
        max_tokens: int = 448,
        queries: int = 36,
    ) -> None:
        self.reference, self.target, self.template = reference, target, template
        self.max_tokens, self.queries = max_tokens, queries
        self.prefix = prefix_ids(target, template.prefix)
        self._reference_start = self._primed(reference, prefix_ids(reference, REFERENCE_PREFIX))
        self._target_start = self._primed(target, self.prefix)

    @staticmethod
    @torch.inference_mode()
    def _primed(lm: LM, ids: list[int]) -> Context:
        context = Context(lm)
        context.run(torch.tensor([ids], device=lm.device), logits=None)
        return context

    def start(self) -> Context:
        """A context of the target that holds the prefix only."""
        return self._target_start.fork()

    @property
    def prefix_kv(self) -> KV:
        """The target's canonical KV of the prefix."""
        return self._target_start.canonical(0, self._target_start.length)

    @torch.inference_mode()
    def source(self, text: str) -> tuple[KV, list[tuple[int, int]]]:
        """Canonical reference KV of a passage, and its tokens' spans."""
        ids, spans = self.reference.encode_with_offsets(text)
        context = self._reference_start.fork()
        start = context.length
        context.run(torch.tensor([ids], device=self.reference.device), logits=None)
        return context.canonical(start, context.length), spans

    def trim(self, text: str) -> str:
        """The passage as it stands in the prompt, at most `max_tokens` target tokens long."""
        text = PASSAGE_FORMAT.format(text=text)
        _, spans = self.target.encode_with_offsets(text)
        return text if len(spans) <= self.max_tokens else text[: spans[self.max_tokens - 1][1]]

    @torch.inference_mode()
    def collect(self, example: Example, chooser: random.Random) -> Pair:
        """What both models make of one passage."""
        text = self.trim(example.text)
        source, spans = self.source(text)
        ids, alignment = align_texts(spans, self.target, text)
        suffix_ids, answers = self._suffix(example, chooser)
        context = self.start()
        start, middle = context.length, context.length + len(ids)
        with record_queries(self.target) as recording:
            read = torch.tensor([ids + suffix_ids], device=self.target.device)
            states = context.run(read, logits=None).last_hidden_state[0, len(ids) :]
        positions = self._query_positions(len(ids), answers, chooser)
        queries = torch.stack([q[0, :, positions] for q in recording.queries])
        return Pair(
            source=flatten(source).to("cpu", torch.bfloat16),
            alignment=torch.tensor(alignment),
            ids=torch.tensor(ids),
            native=context.canonical(start, middle).to("cpu", torch.bfloat16),
            suffix=context.canonical(middle, context.length).to("cpu", torch.bfloat16),
            queries=queries.to("cpu", torch.bfloat16),
            query_positions=torch.tensor(positions),
            suffix_ids=torch.tensor(suffix_ids),
            answers=torch.tensor(answers),
            states=states.to("cpu", torch.bfloat16),
        )

    def _suffix(self, example: Example, chooser: random.Random) -> tuple[list[int], list[bool]]:
        """Up to four questions with answers, as one suffix, and where answers are predicted."""
        ids: list[int] = []
        answers: list[bool] = []
        chosen = chooser.sample(example.questions, min(4, len(example.questions)))
        for question, answer in chosen or [("What is this about?", "")]:
            asked = self.target.encode(self.template.suffix.format(question=question))
            answered = self.target.encode(f" {answer}")[:16] + self.target.encode("\n")
            ids += asked + answered
            answers += [False] * (len(asked) - 1) + [True] * len(answered) + [False]
        return ids, answers

    def _query_positions(
        self, passage: int, answers: Sequence[bool], chooser: random.Random
    ) -> list[int]:
        """Mostly suffix positions, those that predict answers first, and some of the passage."""
        predicting = [passage + i for i, answer in enumerate(answers) if answer]
        asking = [passage + i for i, answer in enumerate(answers) if not answer]
        later = range(passage // 3, passage)
        inside = chooser.sample(later, min(self.queries // 3, len(later)))
        room = self.queries - len(inside)
        kept = chooser.sample(predicting, min(room // 2, len(predicting)))
        kept += chooser.sample(asking, min(room - len(kept), len(asking)))
        return sorted(inside + kept)


def stored_pairs(folder: Path) -> list[Path]:
    """Files of the pairs in a folder, in order of collection."""
    return sorted(folder.glob("*.safetensors"))


def shuffled(
    paths: Sequence[Path], chooser: random.Random, device: torch.device | str = "cpu"
) -> Iterator[Pair]:
    """Pairs without end, every file once per round."""
    while True:
        for path in chooser.sample(paths, len(paths)):
            yield Pair.load(path, device)
