"""Mixture-of-Translators: experts that correct the linear map, routed per token.

After arXiv 2607.28979 (MoT), with two differences: the experts share a closed-form linear
base and start at zero, and only the routed experts run.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cag.errors import TranslatorError
from cag.translate.base import Translator
from cag.translate.config import TranslatorConfig
from cag.translate.ridge import Ridge

ROUTINGS = ("learned", "uniform", "random")


class Mixture(Ridge):
    """`Ridge` plus ``experts`` two-layer MLPs of which each token runs ``active``."""

    kind = "mixture"

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__(config)
        if config.routing not in ROUTINGS:
            raise TranslatorError(
                f"unknown routing '{config.routing}'; use one of: {', '.join(ROUTINGS)}"
            )
        width = config.key_rank + config.value_rank
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, config.experts)
        self.expert_in = nn.Parameter(
            torch.randn(config.experts, width, config.hidden) / width**0.5
        )
        self.expert_bias = nn.Parameter(torch.zeros(config.experts, config.hidden))
        self.expert_out = nn.Parameter(
            torch.zeros(config.experts, config.hidden, 2 * config.outputs)
        )

    def map(self, features: Tensor) -> Tensor:
        hidden = features @ self.down
        base = self._linear(hidden)
        normed = self.norm(hidden)
        return base + self._experts(normed).view_as(base)

    def _experts(self, normed: Tensor) -> Tensor:
        weights, chosen = self.route(normed)
        # tokens that chose the same experts go through them together, in one product
        chosen, within = chosen.sort(dim=-1)
        groups, group = chosen.unique(dim=0, return_inverse=True)
        order = group.argsort()
        sizes = group.bincount().tolist()
        rows = normed[order].split(sizes)
        gates = weights.gather(1, within)[order].split(sizes)
        outputs = [self._together(*each) for each in zip(groups.tolist(), rows, gates, strict=True)]
        return torch.cat(outputs)[order.argsort()]

    def _together(self, experts: list[int], rows: Tensor, gates: Tensor) -> Tensor:
        """Tokens (T, width) through the same experts, weighed with gates (T, len(experts))."""
        into = self.expert_in[experts].transpose(0, 1).flatten(1)
        inner = F.gelu(rows @ into + self.expert_bias[experts].flatten())
        gated = inner.unflatten(-1, (len(experts), -1)) * gates[..., None].to(inner.dtype)
        return gated.flatten(1) @ self.expert_out[experts].flatten(0, 1)

    def route(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Token-level top-k routing: weights and expert indices, both (T, active)."""
        experts, active = self.config.experts, self.config.active
        if self.config.routing == "uniform":
            chosen = torch.arange(experts, device=normed.device).expand(len(normed), -1)
            return torch.full_like(chosen, 1 / experts, dtype=torch.float32), chosen
        if self.config.routing == "random":
            generator = torch.Generator().manual_seed(len(normed))
            scores = torch.rand(len(normed), experts, generator=generator).to(normed.device)
        else:
            scores = self.router(normed).float()
        top = scores.topk(active, dim=-1)
        return top.values.softmax(-1), top.indices

    def multiplications(self) -> int:
        config = self.config
        running = config.experts if config.routing == "uniform" else config.active
        router = self.down.shape[1] * config.experts if config.routing == "learned" else 0
        per_expert = self.expert_in[0].numel() + self.expert_out[0].numel()
        return super().multiplications() + router + running * per_expert

    @classmethod
    def upgrade(
        cls, ridge: Translator, experts: int, active: int, hidden: int, routing: str = "learned"
    ) -> Mixture:
        """A mixture that starts out equal to a fitted ridge."""
        config = replace(
            ridge.config, kind=cls.kind, experts=experts, active=active, hidden=hidden,
            routing=routing,
        )  # fmt: skip
        mixture = cls(config)
        _, unexpected = mixture.load_state_dict(ridge.state_dict(), strict=False)
        if unexpected:
            raise ValueError(f"not a ridge state: {unexpected}")
        return mixture
