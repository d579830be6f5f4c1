"""Pairs: what reference and target make of the same passage."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from cag.align import align
from cag.lm.cache import KV, Context
from cag.lm.capture import record_queries
from cag.lm.loading import LM
from cag.lm.prompt import PASSAGE_FORMAT, REFERENCE_PREFIX, Template, prefix_ids
from cag.translate.base import flatten
from cag.translate.examples import Example
from cag.translate.readings import Reading, Source, digest, shelf

#: A text without spaces for so many characters is cut anywhere.
_LONGEST_WORD = 40


@dataclass
class Pair(Reading):
    """A target's reading, and what the reference made of the same passage.

    Attributes
    ----------
    source
        The reference's canonical KV, flat: shape (S, numbers per token).
    alignment
        Reference index of each of the T target tokens.
    """

    source: Tensor
    alignment: Tensor

    @classmethod
    def of(cls, source: Source, reading: Reading) -> Pair:
        """Align both sides by their characters."""
        aligned = align(source.spans.tolist(), reading.spans.tolist())
        alignment = torch.tensor(aligned, device=source.kv.device)
        return cls(**vars(reading), source=source.kv, alignment=alignment)


@dataclass(frozen=True)
class PairFiles:
    """Where the two sides of a pair lie."""

    source: Path
    reading: Path

    def load(self, device: torch.device | str = "cpu") -> Pair:
        """Read both and align them."""
        return Pair.of(Source.load(self.source, device), Reading.load(self.reading, device))


class PairCollector:
    """Runs both models over examples.

    Parameters
    ----------
    reference, target
        The two models.
    template
        Prompt around the passage.
    readings
        Folder where both sides are kept, for this pair and others.
    max_bytes
        Longer passages are cut: every model must read the same text, and none makes more
        tokens than bytes.
    queries
        How many query positions are kept per passage.
    """

    def __init__(
        self,
        reference: LM,
        target: LM,
        template: Template,
        readings: Path | None = None,
        max_bytes: int = 2000,
        queries: int = 36,
    ) -> None:
        self.reference, self.target, self.template = reference, target, template
        self.readings, self.max_bytes, self.queries = readings, max_bytes, queries
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

    def trim(self, text: str) -> str:
        """The passage as it stands in the prompt, cut before a word if it is too long."""
        whole = text.encode()
        if len(whole) > self.max_bytes:
            text = whole[: self.max_bytes].decode(errors="ignore")
            border = text.rfind(" ")
            text = text[:border] if border > max(0, len(text) - _LONGEST_WORD) else text
        return PASSAGE_FORMAT.format(text=text)

    @torch.inference_mode()
    def source(self, text: str) -> tuple[KV, list[tuple[int, int]]]:
        """Canonical reference KV of a trimmed passage, and its tokens' spans."""
        ids, spans = self.reference.encode_with_offsets(text)
        context = self._reference_start.fork()
        start = context.length
        context.run(torch.tensor([ids], device=self.reference.device), logits=None)
        return context.canonical(start, context.length), spans

    @torch.inference_mode()
    def reading(self, example: Example, chooser: random.Random) -> Reading:
        """What the target makes of a passage and of questions about it."""
        ids, spans = self.target.encode_with_offsets(self.trim(example.text))
        suffix_ids, answers = self._suffix(example, chooser)
        context = self.start()
        start, middle = context.length, context.length + len(ids)
        with record_queries(self.target) as recording:
            read = torch.tensor([ids + suffix_ids], device=self.target.device)
            states = context.run(read, logits=None).last_hidden_state[0, len(ids) :]
        positions = self._query_positions(len(ids), answers, chooser)
        queries = torch.stack([q[0, :, positions] for q in recording.queries])
        return Reading(
            ids=torch.tensor(ids),
            spans=torch.tensor(spans),
            native=context.canonical(start, middle).to("cpu", torch.bfloat16),
            suffix=context.canonical(middle, context.length).to("cpu", torch.bfloat16),
            queries=queries.to("cpu", torch.bfloat16),
            query_positions=torch.tensor(positions),
            suffix_ids=torch.tensor(suffix_ids),
            answers=torch.tensor(answers),
            states=states.to("cpu", torch.bfloat16),
        )

    def files(self, example: Example) -> PairFiles:
        """Where both sides of an example lie, or will.

        Their names hold all that shapes them: the models, the text, the questions, the prompt.
        """
        if self.readings is None:
            raise ValueError("this collector keeps no readings; give it a folder")
        text = self.trim(example.text)
        source = digest(text, REFERENCE_PREFIX)
        reading = digest(text, asdict(example), self.template.fingerprint, self.queries)
        return PairFiles(
            shelf(self.readings, self.reference) / "sources" / f"{source}.safetensors",
            shelf(self.readings, self.target) / "readings" / f"{reading}.safetensors",
        )

    def collect(self, example: Example) -> PairFiles:
        """Let each model read an example, unless it did so before."""
        files = self.files(example)
        if not files.source.exists():
            kv, spans = self.source(self.trim(example.text))
            Source(flatten(kv).to("cpu", torch.bfloat16), torch.tensor(spans)).save(files.source)
        if not files.reading.exists():
            self.reading(example, random.Random(files.reading.stem)).save(files.reading)
        return files

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


def shuffled(
    pairs: Sequence[PairFiles], chooser: random.Random, device: torch.device | str = "cpu"
) -> Iterator[Pair]:
    """Pairs without end, every one once per round."""
    while True:
        for files in chooser.sample(pairs, len(pairs)):
            yield files.load(device)
