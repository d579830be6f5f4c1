"""Compose the target's context for a prompt: read, translate or reuse each passage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from cag.align import align
from cag.answer import Timings
from cag.library import Passage
from cag.lm.cache import KV, Context
from cag.lm.loading import LM
from cag.lm.prompt import PASSAGE_FORMAT, Prompt, Template, prefix_ids
from cag.lm.spec import hash_ids
from cag.refresh import choose_tokens, extend
from cag.translate.base import Translator
from store import CacheMiss, CacheStore, StoreError


@contextmanager
def timed(timings: Timings, name: str) -> Iterator[None]:
    """Add the milliseconds spent inside to one of the timings."""
    start = time.perf_counter()
    try:
        yield
    finally:
        setattr(timings, name, getattr(timings, name) + 1e3 * (time.perf_counter() - start))


@torch.inference_mode()
def read_prefix(target: LM, template: Template) -> Context:
    """What every path starts from: the target has read the prefix."""
    context = Context(target)
    ids = prefix_ids(target, template.prefix)
    context.run(torch.tensor([ids], device=target.device), logits=None)
    return context


@torch.inference_mode()
def read_natively(target: LM, context: Context, prompt: Prompt, timings: Timings) -> None:
    """The direct path: the target reads the passages itself."""
    if prompt.passages:
        with timed(timings, "prefill"):
            ids = torch.tensor([prompt.passage_ids], device=target.device)
            context.run(ids, logits=None)


@torch.inference_mode()
def translate_passages(
    target: LM,
    context: Context,
    translator: Translator,
    prompt: Prompt,
    passages: Sequence[Passage],
    caches: Sequence[KV],
    timings: Timings,
    refresh: float = 0.0,
) -> None:
    """The translated path: of the passages only a share, `refresh`, passes the target's layers."""
    if not passages:
        return
    with timed(timings, "align"):
        alignments = [
            align(passage.spans, spans)
            for passage, spans in zip(passages, prompt.spans, strict=True)
        ]
    with timed(timings, "translate"):
        kv = translator.translate(caches, alignments, target, prompt.passages, prompt.prefix)
        if not refresh:
            context.append(kv)
    if refresh:
        with timed(timings, "prefill"):
            texts = [PASSAGE_FORMAT.format(text=passage.text) for passage in passages]
            mask = choose_tokens(prompt.question, texts, prompt.spans, refresh)
            extend(target, context, kv, prompt.passage_ids, mask)


@torch.inference_mode()
def reuse_own(
    target: LM,
    context: Context,
    prompt: Prompt,
    store: CacheStore,
    timings: Timings,
    on_used: Callable[[int, str], None] = lambda count, key: None,
) -> list[str]:
    """The own path: the target's stored caches, each made behind exactly what precedes it.

    A passage that is not stored yet is read natively and stored.

    Parameters
    ----------
    on_used
        Called for each cache with how many passages it has seen, and with its key.

    Returns
    -------
    list of str
        Why passages had to be read, one reason each.
    """
    before, missed = list(prompt.prefix), []
    for count, ids in enumerate(prompt.passages, start=1):
        identity = own_identity(target, before, ids)
        try:
            with timed(timings, "load"):
                hit = store.get(identity, dtype=target.dtype)
            context.append(KV(hit.tensors["keys"], hit.tensors["values"]))
            on_used(count, hit.key)
        except CacheMiss as miss:
            missed.append(miss.reason)
            start = context.length
            with timed(timings, "prefill"):
                context.run(torch.tensor([ids], device=target.device), logits=None)
            kv = context.canonical(start, context.length)
            try:
                tensors = {"keys": kv.keys, "values": kv.values}
                on_used(count, store.put(identity, tensors, tokens=len(ids)))
            except StoreError as error:  # it was read, so the answer does not need the store
                missed[-1] = f"not stored: {error}"
        before += ids
    return missed


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
