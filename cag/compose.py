"""Compose the target's context for a prompt: read, translate or reuse each passage."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from cag.align import align
from cag.answer import Timings
from cag.library import Passage
from cag.lm.cache import KV, Context
from cag.lm.loading import LM
from cag.lm.prompt import Prompt
from cag.lm.spec import hash_ids
from cag.translate.base import Translator
from store import CacheMiss, CacheStore


@contextmanager
def timed(timings: Timings, name: str) -> Iterator[None]:
    """Add the milliseconds spent inside to one of the timings."""
    start = time.perf_counter()
    try:
        yield
    finally:
        setattr(timings, name, getattr(timings, name) + 1e3 * (time.perf_counter() - start))


@torch.inference_mode()
def read_natively(target: LM, prompt: Prompt, timings: Timings) -> Context:
    """The direct path: the target reads prefix and passages itself."""
    context = Context(target)
    with timed(timings, "prefill"):
        ids = [*prompt.prefix, *prompt.passage_ids]
        context.run(torch.tensor([ids], device=target.device), logits=None)
    return context


@torch.inference_mode()
def translate_passages(
    target: LM,
    translator: Translator,
    prompt: Prompt,
    passages: Sequence[Passage],
    caches: Sequence[KV],
    timings: Timings,
) -> Context:
    """The translated path: only the prefix passes the target's layers."""
    context = Context(target)
    with timed(timings, "prefill"):
        context.run(torch.tensor([prompt.prefix], device=target.device), logits=None)
    with timed(timings, "align"):
        alignments = [
            align(passage.spans, spans)
            for passage, spans in zip(passages, prompt.spans, strict=True)
        ]
    if passages:
        with timed(timings, "translate"):
            context.append(
                translator.translate(caches, alignments, target, prompt.passages, prompt.prefix)
            )
    return context


@torch.inference_mode()
def reuse_own(
    target: LM, prompt: Prompt, store: CacheStore, timings: Timings
) -> tuple[Context, list[str]]:
    """The own path: the target's stored caches, each made behind exactly what precedes it.

    A passage that is not stored yet is read natively and stored.

    Returns
    -------
    tuple
        The context, and what had to be read, with the reason.
    """
    context = Context(target)
    with timed(timings, "prefill"):
        context.run(torch.tensor([prompt.prefix], device=target.device), logits=None)
    before, missed = list(prompt.prefix), []
    for ids in prompt.passages:
        identity = own_identity(target, before, ids)
        try:
            with timed(timings, "load"):
                hit = store.get(identity, dtype=target.dtype)
            context.append(KV(hit.tensors["keys"], hit.tensors["values"]))
        except CacheMiss as miss:
            missed.append(miss.reason)
            start = context.length
            with timed(timings, "prefill"):
                context.run(torch.tensor([ids], device=target.device), logits=None)
            kv = context.canonical(start, context.length)
            store.put(identity, {"keys": kv.keys, "values": kv.values}, tokens=len(ids))
        before += ids
    return context, missed


def own_identity(target: LM, before: Sequence[int], ids: Sequence[int]) -> dict[str, object]:
    """Everything that shapes a target's own cache of a passage."""
    return {
        "model": target.fingerprint,
        "tokenizer": target.tokenizer_fingerprint,
        "dtype": str(target.dtype),
        "prefix": hash_ids(before),
        "ids": hash_ids(ids),
        "tokens": len(ids),
    }
