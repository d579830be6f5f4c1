"""Mixture-of-Translators: experts that correct the linear map, routed per token.

After arXiv 2607.28979 (MoT), with two differences: the experts share a closed-form linear
base and start at zero, and only the routed experts run.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cag.translate.base import TranslatorConfig
from cag.translate.ridge import Ridge


class Mixture(Ridge):
    """`Ridge` plus ``experts`` two-layer MLPs of which each token runs ``active``."""

    kind = "mixture"

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__(config)
        layers, heads, size = config.output_shape
        width = config.key_rank + config.value_rank
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, config.experts)
        self.expert_in = nn.Parameter(
            torch.randn(config.experts, width, config.hidden) / width**0.5
        )
        self.expert_bias = nn.Parameter(torch.zeros(config.experts, config.hidden))
        self.expert_out = nn.Parameter(
            torch.zeros(config.experts, config.hidden, 2 * layers * heads * size)
        )

    def predict(self, features: Tensor) -> Tensor:
        hidden = features @ self.down
        base = self._linear(hidden)
        normed = self.norm(hidden)
        return base + self._experts(normed).view_as(base)

    def _experts(self, normed: Tensor) -> Tensor:
        weights, chosen = self.route(normed)
        outputs = normed.new_zeros(len(normed), self.expert_out.shape[-1])
        for expert in range(self.config.experts):
            rows, slot = (chosen == expert).nonzero(as_tuple=True)
            if not len(rows):
                continue
            inner = F.gelu(normed[rows] @ self.expert_in[expert] + self.expert_bias[expert])
            weighted = inner * weights[rows, slot, None].to(inner.dtype)
            outputs = outputs.index_add(
                0, rows, (weighted @ self.expert_out[expert]).to(outputs.dtype)
            )
        return outputs

    def route(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Token-level top-k routing: weights and expert indices, both (T, active)."""
        top = self.router(normed).float().topk(self.config.active, dim=-1)
        return top.values.softmax(-1), top.indices

    def multiplications(self) -> int:
        width = self.down.shape[1]
        per_expert = self.expert_in[0].numel() + self.expert_out[0].numel()
        return (
            super().multiplications()
            + width * self.config.experts
            + self.config.active * per_expert
        )

    @classmethod
    def upgrade(cls, ridge: Ridge, experts: int, active: int, hidden: int) -> Mixture:
        """A mixture that starts out equal to a fitted ridge."""
        config = replace(ridge.config, kind=cls.kind, experts=experts, active=active, hidden=hidden)
        mixture = cls(config)
        _, unexpected = mixture.load_state_dict(ridge.state_dict(), strict=False)
        if unexpected:
            raise ValueError(f"not a ridge state: {unexpected}")
        return mixture
