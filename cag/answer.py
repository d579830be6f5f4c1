"""What asking gives back: an answer with its path, sources, timings and token counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from cag.retrieval import Source
from cag.scoring import first_token_kl, token_f1


@dataclass
class Timings:
    """Milliseconds spent in each part.

    Attributes
    ----------
    retrieve, load, align, translate
        Finding passages; reading their caches; aligning tokens; translating and rotating.
    prefill
        The target reading the suffix, and on the direct path the passages.
    first_token
        From the question to the first token; without `retrieve` where the passages were given,
        or found once for both paths (`CAG.compare`).
    total
        To the end of the answer.
    tokens_per_second
        Decoding speed after the first token.
    """

    retrieve: float = 0.0
    load: float = 0.0
    align: float = 0.0
    translate: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    total: float = 0.0
    tokens_per_second: float = 0.0


@contextmanager
def timed(timings: Timings, name: str) -> Iterator[None]:
    """Add the milliseconds spent inside to one of the timings."""
    start = time.perf_counter()
    try:
        yield
    finally:
        setattr(timings, name, getattr(timings, name) + 1e3 * (time.perf_counter() - start))


@dataclass
class Tokens:
    """Token counts of one answer.

    ``refreshed`` are passage tokens that the target read over their translation, ``kept`` those
    whose translation was still in memory.
    ``target_forward`` is counted by hooks on the target's decoder layers: tokens summed over the
    layers, divided by their number. The prefix is read once per model, so it is not among them.
    """

    prefix: int = 0
    passage: int = 0
    suffix: int = 0
    generated: int = 0
    refreshed: int = 0
    kept: int = 0
    target_forward: float = 0

    @property
    def read(self) -> int:
        """Tokens of the prompt."""
        return self.prefix + self.passage + self.suffix

    @property
    def unread(self) -> int:
        """Tokens of the prompt that the target's layers did not read."""
        return max(0, int(self.read + self.generated - self.target_forward))


@dataclass
class Answer:
    """An answer and how it came about.

    Attributes
    ----------
    path
        ``translated``, ``direct``, ``own`` or ``fallback``.
    reason
        Why a `fallback` was taken, or what had to be recomputed; empty otherwise.
    translator
        Name of the translator used, or None.
    sources
        The passages, best first; in the prompt they stand the other way round.
    first_logits
        Logits of the first token, for comparing paths.
    """

    question: str
    answer: str
    path: str
    reference: str | None
    target: str
    translator: str | None
    sources: list[Source]
    reason: str = ""
    finish: str = "length"
    timings: Timings = field(default_factory=Timings)
    tokens: Tokens = field(default_factory=Tokens)
    first_logits: Tensor | None = None

    def to_json(self) -> dict[str, Any]:
        """The machine-readable contract of ``cag ask --json``."""
        return {
            "question": self.question,
            "answer": self.answer,
            "path": self.path,
            "reason": self.reason,
            "finish": self.finish,
            "reference": self.reference,
            "target": self.target,
            "translator": self.translator,
            "sources": [source.to_json() for source in self.sources],
            "timings_ms": {
                name: round(ms, 2)
                for name, ms in asdict(self.timings).items()
                if name != "tokens_per_second"
            },
            "tokens_per_second": round(self.timings.tokens_per_second, 2),
            "tokens": asdict(self.tokens),
        }


@dataclass(frozen=True)
class Comparison:
    """Two answers to one question over the same passages."""

    translated: Answer
    direct: Answer

    @property
    def token_f1(self) -> float:
        """SQuAD token F1 between the two answers."""
        return token_f1(self.translated.answer, self.direct.answer)

    @property
    def first_token_kl(self) -> float:
        """KL(direct || translated) of the first token's distribution, in nats."""
        first, other = self.direct.first_logits, self.translated.first_logits
        if first is None or other is None:
            return float("nan")
        return first_token_kl(first, other)

    def to_json(self) -> dict[str, Any]:
        """Both answers and how far apart they are."""
        return {
            "translated": self.translated.to_json(),
            "direct": self.direct.to_json(),
            "token_f1": round(self.token_f1, 4),
            "first_token_kl": round(self.first_token_kl, 4),
        }
