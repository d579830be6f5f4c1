"""One decode loop for every path: greedy or sampled, streaming, with stop strings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cag.lm.cache import Context
from cag.lm.loading import LM


@dataclass(frozen=True)
class Generation:
    """How to decode.

    Attributes
    ----------
    max_tokens
        At most this many tokens are generated.
    temperature
        0 is greedy.
    top_p
        Nucleus sampling (arXiv 1904.09751): the smallest set of tokens with this mass.
    stop
        The answer ends before the first of these strings, wherever token borders fall.
    seed
        Makes sampling repeatable.
    """

    max_tokens: int = 48
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ("\n",)
    seed: int | None = None


@dataclass
class Decoded:
    """What a decode produced; filled while it runs.

    Attributes
    ----------
    text
        The answer, without the stop string.
    ids
        Generated tokens, without the one that ended the answer.
    finish
        ``"stop"`` or ``"length"``.
    first_logits
        Logits of the first token, with shape (vocabulary,).
    first_token_seconds, seconds
        From the start of the decode to the first token, and to the end.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str = "length"
    first_logits: Tensor | None = None
    first_token_seconds: float = 0.0
    seconds: float = 0.0


@torch.inference_mode()
def decode(
    lm: LM, context: Context, suffix: Sequence[int], generation: Generation, result: Decoded
) -> Iterator[str]:
    """Read the suffix behind a context and generate; yields pieces of text.

    The context is extended. Every generated token but the terminator is read by the model,
    so that the context afterwards holds exactly prompt and answer.

    Parameters
    ----------
    suffix
        Ids of the suffix, at least one.
    result
        Filled with everything there is to know, complete when the iterator ends.
    """
    started = time.perf_counter()
    generator = torch.Generator()
    if generation.seed is None:
        generator.seed()  # a fresh generator is always the same one
    else:
        generator.manual_seed(generation.seed)
    text = _Text(lm, generation.stop)
    enders = _end_ids(lm)
    ids = torch.tensor([list(suffix)], device=lm.device)
    for _ in range(generation.max_tokens):
        logits = context.run(ids).logits[0, -1].float()
        token = choose(logits, generation, generator)
        if result.first_logits is None:
            result.first_logits = logits.cpu()
            result.first_token_seconds = time.perf_counter() - started
        stopped = token in enders or text.push(token)
        piece = text.take(final=stopped)
        if piece:
            result.text += piece
            yield piece
        if stopped:
            result.finish = "stop"
            break
        result.ids.append(token)
        ids = torch.tensor([[token]], device=lm.device)
    else:
        if result.ids:
            context.run(ids, logits=None)
        if piece := text.take(final=True):
            result.text += piece
            yield piece
    result.seconds = time.perf_counter() - started


def choose(logits: Tensor, generation: Generation, generator: torch.Generator) -> int:
    """Pick a token from logits with shape (vocabulary,)."""
    if generation.temperature <= 0:
        return int(logits.argmax())
    weights = (logits.cpu() / generation.temperature).softmax(-1)
    ordered, index = weights.sort(descending=True)
    beyond = ordered.cumsum(-1) - ordered >= generation.top_p
    ordered[beyond] = 0.0
    return int(index[torch.multinomial(ordered, 1, generator=generator)])


def _end_ids(lm: LM) -> set[int]:
    configured = getattr(lm.model.generation_config, "eos_token_id", None)
    ends = configured if isinstance(configured, list) else [configured]
    return {token for token in [*ends, lm.tokenizer.eos_token_id] if token is not None}


class _Text:
    """Turns tokens into text that can be shown: whole characters, never part of a stop string."""

    def __init__(self, lm: LM, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = lm.tokenizer, [s for s in stop if s]
        self._ids: list[int] = []
        self._text = ""
        self._shown = 0
        self._ended = False

    def push(self, token: int) -> bool:
        """Add a token; says whether a stop string is now complete."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        found = [at for s in self._stop if (at := text.find(s)) >= 0]
        self._ended = bool(found)
        self._text = text[: min(found)] if found else text
        return self._ended

    def take(self, *, final: bool) -> str:
        """Text that is certain by now and was not taken yet."""
        end = len(self._text)
        if not (final or self._ended):
            while end > self._shown and self._text[end - 1] == "\ufffd":
                end -= 1  # a character whose bytes are not all there
            end -= max(self._overhang(self._text[:end], s) for s in self._stop or [""])
        piece = self._text[self._shown : max(end, self._shown)]
        self._shown += len(piece)
        return piece

    @staticmethod
    def _overhang(text: str, stop: str) -> int:
        """Length of the longest end of `text` that could be the start of `stop`."""
        for size in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:size]):
                return size
        return 0
