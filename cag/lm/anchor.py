"""Anchors: what a target can say about a passage token without running its layers.

Two things cost next to nothing. The embedding of a token and of its predecessors is a
table look-up. And the keys and values of the lowest layer are projections of that
embedding alone, so they are exact and need no translation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cag.lm.cache import KV
from cag.lm.counting import decoder_layers
from cag.lm.loading import LM


def embed(lm: LM, ids: Sequence[int]) -> Tensor:
    """Input embeddings of tokens, without positions, with shape (T, hidden_size)."""
    table = lm.model.get_input_embeddings()
    return table(torch.tensor(ids, dtype=torch.long, device=lm.device))


def with_predecessors(lm: LM, ids: Sequence[int], preceding: Sequence[int], count: int) -> Tensor:
    """Embeddings of tokens j, j-1, ... j-count, side by side.

    Parameters
    ----------
    ids
        The T tokens of a passage.
    preceding
        What stands before the passage in the prompt; missing predecessors are zeros.
    count
        How many predecessors each token gets; -1 leaves out the token itself as well.

    Returns
    -------
    Tensor
        Shape (T, (count + 1) * hidden_size).
    """
    if count < 0:
        return torch.empty(len(ids), 0, device=lm.device)
    before = list(preceding)[-count:] if count else []
    states = embed(lm, [*before, *ids]).float()
    missing = count - len(before)
    states = torch.cat([states.new_zeros(missing, states.shape[1]), states])
    windows = [states[count - back : len(states) - back] for back in range(count + 1)]
    return torch.cat(windows, dim=-1)


def lowest_layer(lm: LM, ids: Sequence[int], start: int) -> KV:
    """Exact canonical KV of the lowest layer, from the embeddings alone.

    Parameters
    ----------
    ids
        T passage tokens.
    start
        Position of the first; matters only for models with learned positions.

    Returns
    -------
    KV
        Shape (1, H, T, D).
    """
    layer: Any = decoder_layers(lm)[0]
    states = embed(lm, ids)[None]
    if lm.spec.family == "gpt2":
        states = states + lm.body.wpe(_positions(lm, ids, start))
        _, keys, values = layer.attn.c_attn(layer.ln_1(states)).chunk(3, dim=-1)
    elif lm.spec.family == "opt":
        keys, values = _opt_projections(lm, layer, states, _positions(lm, ids, start))
    else:
        normed = layer.input_layernorm(states)
        keys, values = layer.self_attn.k_proj(normed), layer.self_attn.v_proj(normed)
    keys, values = _heads(lm, keys), _heads(lm, values)
    norm = getattr(getattr(layer, "self_attn", None), "k_norm", None)
    return KV(norm(keys) if norm is not None else keys, values)


def _positions(lm: LM, ids: Sequence[int], start: int) -> Tensor:
    return torch.arange(start, start + len(ids), device=lm.device)[None]


def _opt_projections(
    lm: LM, layer: Any, states: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    decoder = lm.body.decoder
    if decoder.project_in is not None:
        states = decoder.project_in(states)
    table = decoder.embed_positions
    states = states + torch.nn.functional.embedding(positions + table.offset, table.weight)
    if layer.do_layer_norm_before:
        states = layer.self_attn_layer_norm(states)
    return layer.self_attn.k_proj(states), layer.self_attn.v_proj(states)


def _heads(lm: LM, flat: Tensor) -> Tensor:
    split = flat.view(1, flat.shape[1], lm.spec.kv_heads, lm.spec.head_size)
    return split.transpose(1, 2)
