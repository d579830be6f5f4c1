"""Remove and apply the position rotation of keys, with the model's own rotary module.

Keys are stored unrotated, so that a passage can land anywhere in a prompt (RoFormer,
arXiv 2104.09864, section 3.2: the rotation is a function of position alone). Using the
model's own module gives every scaling (linear, llama3, yarn) and per-layer bases for free.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cag.lm.loading import LM


class Rotary:
    """Cosines and sines of one model for one set of positions.

    Parameters
    ----------
    lm
        The model whose rotary module is used.
    positions
        Absolute positions with shape (T,).
    """

    def __init__(self, lm: LM, positions: Tensor) -> None:
        self._names = lm.spec.rope
        self._module: Any = getattr(lm.body, "rotary_emb", None)
        self._positions = positions.to(lm.device)

    @cached_property
    def _tables(self) -> dict[str | None, tuple[Tensor, Tensor]]:
        return {name: self._table(name) for name in set(self._names) if name is not None}

    def _table(self, name: str) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, device=self._positions.device)  # asks for fp32
        arguments = () if name == "default" else (name,)
        cos, sin = self._module(like, self._positions[None], *arguments)
        return cos[0].float(), sin[0].float()

    def rotate(self, keys: Tensor, layer: int) -> Tensor:
        """Canonical keys (..., T, D) of one layer -> keys at these positions."""
        name = self._names[layer]
        if name is None:
            return keys
        cos, sin = self._tables[name]
        return _turn(keys, cos, sin)

    def unrotate(self, keys: Tensor, layer: int) -> Tensor:
        """Keys (..., T, D) of one layer at these positions -> canonical keys."""
        name = self._names[layer]
        if name is None:
            return keys
        cos, sin = self._tables[name]
        # yarn scales cosine and sine; dividing by their squared length undoes that as well
        length = cos.square() + sin.square()
        return _turn(keys, cos / length, -sin / length)


def _turn(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    turning, rest = keys[..., :size].float(), keys[..., size:]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(keys.dtype), rest), dim=-1)
