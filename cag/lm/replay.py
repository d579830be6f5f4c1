"""Run a model over a passage while some of its layers attend to KV from elsewhere.

This is the setting of Mixture-of-Translators (arXiv 2607.28979): nothing of the passage's
prefill is saved, but what the injected layers get wrong, the layers above can correct.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cag.lm.cache import KV, Context
from cag.lm.loading import LM


@dataclass
class Replayed:
    """What a replay leaves behind.

    Attributes
    ----------
    context
        Prefix and passage, ready for the suffix.
    states
        Per layer its input with shape (T, hidden_size), and last the top layer's output as
        the LM head reads it, after the final norm. Empty unless asked for.
    """

    context: Context
    states: list[Tensor]


def replay(
    lm: LM,
    start: Context,
    ids: Sequence[int],
    injected: KV | None,
    layers: Iterable[int],
    *,
    states: bool = False,
) -> Replayed:
    """Read tokens natively, but for the keys and values of some layers.

    Differentiable with respect to `injected`.

    Parameters
    ----------
    start
        What stands before the passage. It is extended; fork it to keep it.
    ids
        The T tokens of the passage.
    injected
        Canonical KV with shape (L, H, T, D), of which `layers` are used; None reads plainly.
    layers
        Layers whose attention, and whose place in the resulting context, get `injected`.
    states
        Also return every layer's input states.

    Raises
    ------
    ValueError
        If `injected` does not cover the tokens, or a layer does not exist.
    """
    tokens = torch.tensor([list(ids)], dtype=torch.long, device=lm.device)
    window = sorted(set(layers)) if injected is not None else []
    if injected is None or not window:
        return _replayed(start, start.run(tokens, logits=None, hidden=states))
    if len(injected) != len(ids):
        raise ValueError(f"KV of {len(injected)} tokens cannot stand for {len(ids)} tokens")
    if window[0] < 0 or window[-1] >= lm.spec.layers:
        raise ValueError(f"layers {window} are not all among the {lm.spec.layers} of '{lm.name}'")
    with start.injecting(injected, window):
        return _replayed(start, start.run(tokens, logits=None, hidden=states))


def _replayed(context: Context, output: Any) -> Replayed:
    return Replayed(context, [state[0] for state in output.hidden_states or ()])
