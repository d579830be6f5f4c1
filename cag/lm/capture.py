"""Record a model's attention queries while it reads, for training translators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from cag.lm.loading import LM

_NAME = "cag_recorded_sdpa"
_recordings: list[Recording] = []


@dataclass
class Recording:
    """Queries of every layer, rotated as the model used them.

    Attributes
    ----------
    queries
        Per layer a tensor with shape (B, query_heads, T, D), scaled by the model's
        attention scale, so that ``query @ key`` is the logit.
    softcap
        Cap of the attention logits, or None.
    """

    queries: list[Tensor] = field(default_factory=list)
    softcap: float | None = None


def _recorded(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    for recording in _recordings:
        recording.queries.append((query * scale).detach())
        recording.softcap = kwargs.get("softcap")
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


AttentionInterface.register(_NAME, _recorded)
AttentionMaskInterface.register(_NAME, sdpa_mask)


@contextmanager
def record_queries(lm: LM) -> Iterator[Recording]:
    """Record the queries of everything `lm` reads inside the ``with`` block."""
    before = lm.model.config._attn_implementation
    lm.model.set_attn_implementation(_NAME)
    recording = Recording()
    _recordings.append(recording)
    try:
        yield recording
    finally:
        _recordings.remove(recording)
        lm.model.set_attn_implementation(before)
