"""The refresh dial: passage tokens that the target reads itself, over a translated cache.

A refreshed token is read at its own place, behind the translated cache of what precedes it. It
costs what reading costs, so the dial runs from 0 (all translated) to 1 (all read).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

import torch

from cag.lm.cache import KV, Context
from cag.lm.loading import LM

_SENTENCE = re.compile(r"[^.!?]+[.!?]*")
_WORD = re.compile(r"\w+")


def choose_tokens(
    question: str,
    texts: Sequence[str],
    spans: Sequence[Sequence[tuple[int, int]]],
    share: float,
) -> list[bool]:
    """The tokens of those sentences that have the rarest words in common with the question.

    Parameters
    ----------
    texts
        The passages as they stand in the prompt.
    spans
        Per passage the characters that each of its tokens covers.
    share
        How much of all tokens is wanted; the last sentence taken is cut to that.

    Returns
    -------
    list of bool
        One for each token of all passages in a row; ``round(share * tokens)`` are true.
    """
    mask = [False] * sum(map(len, spans))
    sentences = _sentences(texts, spans)
    asked = set(_WORD.findall(question.lower()))
    holding = {word: sum(word in words for *_, words in sentences) for word in asked}
    weights = [sum(1 / holding[w] for w in asked & words) for *_, words in sentences]
    left = round(share * len(mask))
    for index in sorted(range(len(sentences)), key=lambda i: -weights[i]):
        start, stop, _ = sentences[index]
        stop = min(stop, start + left)
        mask[start:stop] = [True] * (stop - start)
        left -= stop - start
    return mask


def _sentences(
    texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
) -> list[tuple[int, int, set[str]]]:
    """First token, end and words of each sentence; every token belongs to exactly one."""
    found, before = [], 0
    for text, tokens in zip(texts, spans, strict=True):
        at = 0
        for sentence in _SENTENCE.finditer(text):
            stop = at
            while stop < len(tokens) and tokens[stop][1] <= sentence.end():
                stop += 1
            if stop > at:
                words = set(_WORD.findall(sentence.group().lower()))
                found.append((before + at, before + stop, words))
            at = stop
        if at < len(tokens):
            found.append((before + at, before + len(tokens), set()))
        before += len(tokens)
    return found


@torch.inference_mode()
def extend(lm: LM, context: Context, translated: KV, ids: Sequence[int], mask: list[bool]) -> None:
    """Append passages to a context: translated KV, or read where the mask says so."""
    at = 0
    for refreshed, group in groupby(mask):
        stop = at + len(list(group))
        if refreshed:
            context.run(torch.tensor([list(ids[at:stop])], device=lm.device), logits=None)
        else:
            context.append(translated[at:stop])
        at = stop
