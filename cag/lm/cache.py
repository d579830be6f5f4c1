"""The one place that touches transformers' cache classes.

Everything else in `cag` handles plain tensors: a `KV` for a passage, and `run` for a piece
of text that is read natively after some KV. Positions and cache lengths are checked here
before every call, because transformers answers a wrong length with plausible text.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from cag.errors import ContextTooLong
from cag.lm.loading import LM
from cag.lm.rotary import Rotary


@dataclass(frozen=True)
class KV:
    """Keys and values of a run of tokens, canonical unless said otherwise.

    Attributes
    ----------
    keys, values
        Tensors with shape (L, H, T, D).
    """

    keys: Tensor
    values: Tensor

    def __len__(self) -> int:
        return self.keys.shape[2]

    @property
    def bytes(self) -> int:
        """Size in memory, in bytes."""
        return self.keys.nbytes + self.values.nbytes

    def __getitem__(self, span: slice) -> KV:
        return KV(self.keys[:, :, span], self.values[:, :, span])

    def to(self, *args: Any) -> KV:
        """Like `torch.Tensor.to`, for both tensors."""
        return KV(self.keys.to(*args), self.values.to(*args))

    def above(self, boundary: int, below: KV) -> KV:
        """The layers of `below` under a boundary, and this one's layers at and above it."""
        return KV(
            torch.cat([below.keys[:boundary], self.keys[boundary:]]),
            torch.cat([below.values[:boundary], self.values[boundary:]]),
        )

    @staticmethod
    def join(parts: Sequence[KV]) -> KV:
        """Concatenate along the tokens."""
        return KV(
            torch.cat([part.keys for part in parts], dim=2),
            torch.cat([part.values for part in parts], dim=2),
        )


class _Cache(DynamicCache):
    """Takes what it is told to in place of what a layer computed; see `Context.injecting`."""

    def __init__(self) -> None:
        super().__init__()
        self.injected: dict[int, tuple[Tensor, Tensor]] = {}
        self.replaced: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx in self.injected:
            self.replaced[layer_idx] = (key_states, value_states)
        keys, values = self.injected.get(layer_idx, (key_states, value_states))
        return super().update(keys, values, layer_idx, *args, **kwargs)


class Context:
    """A private, growing cache: what the model has read or been given so far.

    Cheap to fork: `fork` shares the tensors, and growing never changes a tensor in place.
    """

    def __init__(self, lm: LM, batch: int = 1) -> None:
        self._lm = lm
        self._cache = _Cache()
        self.batch = batch
        self.length = 0

    def fork(self) -> Context:
        """An independent context with the same past."""
        copy = Context(self._lm, self.batch)
        copy.length = self.length
        for layer, (keys, values) in enumerate(self._layers()):
            copy._cache.update(keys, values, layer)
        return copy

    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        if not self.length:
            return []
        layers: list[Any] = self._cache.layers
        return [(layer.keys, layer.values) for layer in layers]

    def append(self, kv: KV) -> None:
        """Place canonical KV behind what is there; the keys are rotated to where they land."""
        self._check_room(len(kv))
        for layer, (keys, values) in self._landing(kv, range(self._lm.spec.layers)).items():
            self._cache.update(keys, values, layer)
        self.length += len(kv)
        self._check_length()

    def _landing(self, kv: KV, layers: Iterable[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Rotated keys and values, each with shape (1, H, T, D), if put behind what is there."""
        rotary = Rotary(self._lm, torch.arange(self.length, self.length + len(kv)))
        kv = kv.to(self._lm.device, self._lm.dtype)
        return {
            layer: (rotary.rotate(kv.keys[layer], layer)[None], kv.values[layer][None])
            for layer in layers
        }

    @contextmanager
    def injecting(
        self, kv: KV, layers: Iterable[int]
    ) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
        """Within the block, `run` gives these layers canonical KV in place of their own.

        Every model attends to what its cache returns, so the attention sees it too. `kv`
        covers all layers and exactly the tokens that are read in the block, by one `run`.
        Yields what the layers themselves computed, filled by that `run`: per layer rotated
        keys and values with shape (1, H, T, D).
        """
        self._cache.injected, self._cache.replaced = self._landing(kv, layers), {}
        try:
            yield self._cache.replaced
        finally:
            self._cache.injected = {}

    @classmethod
    def stacked(cls, lm: LM, rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Context, Tensor]:
        """A batch of pasts of different lengths, padded on the left; differentiable.

        Padding goes in front so that distances within a row, which sliding windows are
        measured by, stay true.

        Parameters
        ----------
        rows
            Per row its rotated keys and its values, each with shape (L, H, T, D).

        Returns
        -------
        tuple
            The context, and the mask (B, longest T) for `run` to be extended by.
        """
        longest = max(keys.shape[2] for keys, _ in rows)
        padded = [
            [torch.nn.functional.pad(x, (0, 0, longest - x.shape[2], 0)) for x in row]
            for row in rows
        ]
        context = cls(lm, len(rows))
        for layer in range(lm.spec.layers):
            keys, values = (torch.stack([row[side][layer] for row in padded]) for side in (0, 1))
            context._cache.update(keys, values, layer)
        context.length = longest
        lengths = torch.tensor([keys.shape[2] for keys, _ in rows], device=lm.device)
        index = torch.arange(longest, device=lm.device)
        return context, (index >= longest - lengths[:, None]).long()

    def run(
        self,
        ids: Tensor,
        *,
        logits: int | None = 1,
        hidden: bool = False,
        mask: Tensor | None = None,
    ) -> Any:
        """Read tokens natively and extend this context by them.

        Parameters
        ----------
        ids
            Token ids with shape (B, T), T >= 1.
        logits
            How many of the last positions get logits (B, n, vocabulary), 0 for all of them;
            None runs the body only.
        hidden
            Also return every layer's input states.
        mask
            For padded batches: 1 for real tokens, shape (B, past + T).
        """
        self._check_room(ids.shape[1])
        positions = torch.arange(self.length, self.length + ids.shape[1], device=ids.device)
        positions = positions.expand(ids.shape[0], -1)
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        module: Any = self._lm.model if logits is not None else self._lm.body
        arguments: dict[str, Any] = {
            _cache_argument(module.__class__): self._cache,
            "position_ids": positions,
            "use_cache": True,
            "output_hidden_states": hidden,
        }
        if logits is not None:
            # as an index, which copies: a slice's strides make torch's bf16 product 30 times slower
            first = ids.shape[1] - logits if logits else 0
            arguments["logits_to_keep"] = torch.arange(first, ids.shape[1], device=ids.device)
        if mask is None:
            mask = torch.ones(
                ids.shape[0], self.length + ids.shape[1], dtype=torch.long, device=ids.device
            )
        output = module(input_ids=ids, attention_mask=mask, **arguments)
        self.length += ids.shape[1]
        self._check_length()
        return output

    def canonical(self, start: int, stop: int, row: int = 0, shift: int = 0) -> KV:
        """Canonical KV of tokens ``start:stop`` of one batch row.

        ``shift`` is how many positions of padding lie before the row's first real token.
        """
        layers = self._layers()
        rotary = Rotary(self._lm, torch.arange(start - shift, stop - shift))
        keys = [rotary.unrotate(k[row, :, start:stop], i) for i, (k, _) in enumerate(layers)]
        values = [v[row, :, start:stop] for _, v in layers]
        return KV(torch.stack(keys), torch.stack(values))

    def _check_room(self, tokens: int) -> None:
        if tokens < 1:
            raise ValueError("a model cannot read zero tokens")
        window = self._lm.spec.window
        if self.length + tokens > window:
            raise ContextTooLong(
                f"{self.length + tokens} tokens do not fit the {window}-token window of "
                f"'{self._lm.name}'; retrieve fewer passages (--k) or ask a shorter question"
            )

    def _check_length(self) -> None:
        held = {keys.shape[2] for keys, _ in self._layers()}
        if held != {self.length}:
            raise RuntimeError(f"cache holds {held} tokens where {self.length} were expected")


@functools.cache
def _cache_argument(model_class: Any) -> str:
    """`past_key_values` became `cache` in transformers 5.24."""
    names = inspect.signature(inspect.unwrap(model_class.forward)).parameters
    return "cache" if "cache" in names else "past_key_values"
