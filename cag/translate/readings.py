"""Readings: what one model makes of a training passage, on disk for every pair it is part of.

With N models there are N(N-1) translators to train; each model reads a passage once as a
reference and once as a target.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from cag.lm.cache import KV
from cag.lm.loading import LM
from store.files import write_atomically


class _Stored:
    """A dataclass of tensors and KV that can be written and read."""

    def save(self, path: Path) -> None:
        """Write as safetensors; appears only when complete."""
        tensors: dict[str, Tensor] = {}
        for name, value in vars(self).items():
            if isinstance(value, KV):
                tensors |= {f"{name}.keys": value.keys, f"{name}.values": value.values}
            else:
                tensors[name] = value
        write_atomically(path, save({n: t.contiguous() for n, t in tensors.items()}))

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> Self:
        """Read onto a device."""
        fields: dict[str, Any] = {}
        tensors = load_file(path, device=str(device))
        for name, tensor in tensors.items():
            if name.endswith(".keys"):
                name = name.removesuffix(".keys")
                fields[name] = KV(tensor, tensors[f"{name}.values"])
            elif not name.endswith(".values"):
                fields[name] = tensor
        return cls(**fields)


@dataclass
class Source(_Stored):
    """A passage as the reference reads it.

    Attributes
    ----------
    kv
        Canonical KV, flat: shape (S, numbers per token).
    spans
        Characters of each token, with shape (S, 2).
    """

    kv: Tensor
    spans: Tensor


@dataclass
class Reading(_Stored):
    """A passage as the target reads it, and how it looks at it.

    Attributes
    ----------
    ids, spans
        The T tokens and their characters, with shape (T, 2).
    native
        The target's canonical KV of the passage.
    suffix
        Its canonical KV of the suffix (questions and answers).
    queries
        Native queries with shape (L, query_heads, N, D), rotated and scaled.
    query_positions
        Their positions counted from the passage's first token, with shape (N,).
    suffix_ids, answers
        Suffix tokens, and a mask of positions whose next token belongs to an answer.
    states
        The target's last hidden states over the suffix, with shape (len(suffix), hidden).
    """

    ids: Tensor
    spans: Tensor
    native: KV
    suffix: KV
    queries: Tensor
    query_positions: Tensor
    suffix_ids: Tensor
    answers: Tensor
    states: Tensor


def shelf(root: Path, lm: LM) -> Path:
    """Where everything lies that a model has read in its dtype."""
    shaped = digest(lm.fingerprint, lm.tokenizer_fingerprint, str(lm.dtype))
    return root / f"{Path(lm.name).name}-{shaped[:12]}"


def digest(*parts: Any) -> str:
    """A name for what is made from `parts`, which must be JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
