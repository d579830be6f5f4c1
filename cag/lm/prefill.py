"""Read passages with a model, in batches, and give back their canonical KV."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cag.lm.cache import KV, Context
from cag.lm.loading import LM


@torch.inference_mode()
def prefill(lm: LM, prefix: Sequence[int], passages: Sequence[Sequence[int]]) -> list[KV]:
    """Canonical KV of each passage, read directly after `prefix`.

    Rows are padded on the right: with causal attention nothing a real token sees changes.

    Parameters
    ----------
    prefix
        Ids read first, shared by all rows; may be empty.
    passages
        Ids of each passage.

    Returns
    -------
    list of KV
        Per passage shape (L, H, T, D), in the model's dtype.
    """
    start = len(prefix)
    longest = max(len(ids) for ids in passages)
    rows = [[*prefix, *ids, *[0] * (longest - len(ids))] for ids in passages]
    context = Context(lm, batch=len(rows))
    context.run(torch.tensor(rows, device=lm.device), logits=None)
    return [context.canonical(start, start + len(ids), row) for row, ids in enumerate(passages)]
