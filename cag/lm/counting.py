"""Count what really passes a model's decoder layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
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


class _Open(threading.local):
    """Counts that are open in this thread, each with the layers it is about."""

    def __init__(self) -> None:
        self.counts: list[tuple[nn.ModuleList, LayerTokens]] = []


_open = _Open()


def decoder_layers(lm: LM) -> nn.ModuleList:
    """The model's decoder layers."""
    return _layers(lm.body)


def _layers(body: nn.Module) -> nn.ModuleList:
    return next(module for module in body.modules() if isinstance(module, nn.ModuleList))


def watch(body: nn.Module) -> None:
    """Put the hooks in place, once and for all: adding them while another thread runs is unsafe."""
    layers = _layers(body)

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        for about, count in _open.counts:
            if about is layers:
                count.summed += states.shape[0] * states.shape[1]

    for layer in layers:
        layer.register_forward_pre_hook(note, with_kwargs=True)


@contextmanager
def count_layer_tokens(lm: LM, count: LayerTokens | None = None) -> Iterator[LayerTokens]:
    """Count tokens that this thread sends through every decoder layer of `lm`.

    Parameters
    ----------
    count
        Go on with this count instead of a new one.
    """
    layers = decoder_layers(lm)
    count = count or LayerTokens(layers=len(layers))
    _open.counts.append((layers, count))
    try:
        yield count
    finally:
        _open.counts.pop()
