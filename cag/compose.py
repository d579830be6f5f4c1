"""Compose the target's context for a prompt: read, place or reuse each passage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cag.answer import Timings, timed
from cag.lm.cache import KV, Context
from cag.lm.loading import LM
from cag.lm.prompt import PASSAGE_FORMAT, Prompt, Template, prefix_ids
from cag.lm.spec import hash_ids
from cag.refresh import choose_tokens, extend
from store import CacheMiss, CacheStore, StoreError


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
def place_translated(
    target: LM,
    context: Context,
    prompt: Prompt,
    texts: Sequence[str],
    kv: KV,
    timings: Timings,
    refresh: float = 0.0,
) -> None:
    """The translated path: of the passages only a share, `refresh`, passes the target's layers.

    Parameters
    ----------
    texts
        Of the passages, in order.
    kv
        Their translation, canonical.
    """
    if not refresh:
        with timed(timings, "translate"):
            context.append(kv)
        return
    with timed(timings, "prefill"):
        framed = [PASSAGE_FORMAT.format(text=text) for text in texts]
        mask = choose_tokens(prompt.question, framed, prompt.spans, refresh)
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
