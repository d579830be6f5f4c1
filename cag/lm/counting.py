"""Count what really passes a model's decoder layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from cag.lm.loading import LM


@dataclass
class LayerTokens:
    """Tokens summed over layers, and the number of layers."""

    summed: int = 0
    layers: int = 1

    @property
    def tokens(self) -> float:
        """Tokens per layer; whole numbers come back as int."""
        share = self.summed / self.layers
        return int(share) if share.is_integer() else share


def decoder_layers(lm: LM) -> nn.ModuleList:
    """The model's decoder layers."""
    return next(module for module in lm.body.modules() if isinstance(module, nn.ModuleList))


@contextmanager
def count_layer_tokens(lm: LM) -> Iterator[LayerTokens]:
    """Count tokens through every decoder layer of `lm` inside the ``with`` block."""
    layers = decoder_layers(lm)
    counted = LayerTokens(layers=len(layers))

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        counted.summed += states.shape[0] * states.shape[1]

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield counted
    finally:
        for handle in handles:
            handle.remove()
