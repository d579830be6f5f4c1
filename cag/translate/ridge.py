"""Ridge: the best linear map, in closed form, from streamed second moments.

Keys and values of neighbouring models are close to linear functions of each other once the
rotation is gone (arXiv 2608.03893). Two reductions keep the map small: all reference layers
share one latent, and keys and values each get a reduced-rank regression (Izenman 1975) from
[latent of the token, latent of its predecessor, target embeddings of the token and its
predecessors]. The predecessors matter to layers that look for a token by what came before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cag.translate.base import Batch, Batches, Translator
from cag.translate.config import TranslatorConfig
from cag.translate.moments import Moments, reduce_rank


class Ridge(Translator):
    """Reduced-rank linear translator; also the base that `Mixture` corrects."""

    kind = "ridge"
    closed_form = ("down", "key_up", "value_up")
    frozen = ("project",)
    source_mean: Tensor
    feature_mean: Tensor
    feature_scale: Tensor

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__(config)
        outputs = config.outputs
        features = 2 * config.rank + config.anchor_size
        self.register_buffer("source_mean", torch.zeros(config.source_size))
        self.project = nn.Parameter(torch.zeros(config.source_size, config.rank))
        self.register_buffer("feature_mean", torch.zeros(features))
        self.register_buffer("feature_scale", torch.ones(features))
        self.down = nn.Parameter(torch.zeros(features, config.key_rank + config.value_rank))
        self.key_up = nn.Parameter(torch.zeros(config.key_rank, outputs))
        self.value_up = nn.Parameter(torch.zeros(config.value_rank, outputs))

    def compress(self, source: Tensor) -> Tensor:
        # the mean leaves after the product, where it is small
        return torch.addmm(
            -(self.source_mean @ self.project), self.config.selected(source), self.project
        )

    def features(self, latents: Tensor, anchors: Tensor, starts: Sequence[int] = (0,)) -> Tensor:
        """Standardised inputs of the second map, shape (T, 2 * rank + anchor_size)."""
        previous = F.pad(latents, (0, 0, 1, 0))[:-1]
        if len(starts) > 1:
            inside = torch.ones(len(latents), 1, dtype=latents.dtype, device=latents.device)
            inside[list(starts)] = 0  # what precedes a passage was not read with it
            previous = previous * inside
        return (
            torch.cat([latents, previous, anchors], -1) - self.feature_mean
        ) / self.feature_scale

    def predict(self, latents: Tensor, anchors: Tensor, starts: Sequence[int] = (0,)) -> Tensor:
        return self.map(self.features(latents, anchors, starts))

    def map(self, features: Tensor) -> Tensor:
        """Features (T, F) -> standardised keys and values, shape (T, 2, outputs)."""
        return self._linear(features @ self.down)

    def _linear(self, hidden: Tensor) -> Tensor:
        keys, values = hidden.split([self.config.key_rank, self.config.value_rank], dim=-1)
        return torch.stack([keys @ self.key_up, values @ self.value_up], dim=1)

    def multiplications(self) -> int:
        return sum(p.numel() for p in (self.project, self.down, self.key_up, self.value_up))

    # -- the closed form -------------------------------------------------------------------

    def fit(self, batches: Batches, first: int) -> None:
        self.fit_projection(self.source_moments(batches(first)))
        self.fit_output(self.feature_moments(batches(None)))

    def source_moments(self, batches: Iterable[Batch]) -> Moments:
        """Moments of [source, embedding of the token] -> outputs."""
        embedding = min(self.config.anchor_size, self.config.target_spec["hidden_size"])
        moments = Moments(self.config.source_size + embedding, 2 * self.config.outputs)
        for batch in batches:
            source = self.config.selected(batch.source)
            moments.add(torch.cat([source, batch.anchors[:, :embedding]], -1), batch.outputs)
        return moments

    @torch.no_grad()
    def feature_moments(self, batches: Iterable[Batch]) -> Moments:
        """Moments of raw features -> outputs."""
        moments = Moments(len(self.feature_mean), 2 * self.config.outputs)
        for batch in batches:
            latents = self.compress(batch.source)
            moments.add(self.features(latents, batch.anchors, batch.starts), batch.outputs)
        return moments

    @torch.no_grad()
    def fit_projection(self, moments: Moments, penalty: float = 2e-2) -> None:
        """Set the shared latent from `source_moments`."""
        mean, deviation = moments.input_statistics()
        weights, gram = moments.solve(self.scale_outputs(moments).flatten(), penalty)
        size = self.config.source_size
        down, _ = reduce_rank(weights, gram, self.config.rank)
        self.source_mean.copy_(mean[:size])
        self.project.copy_(down[:size] / deviation[:size, None])

    @torch.no_grad()
    def fit_output(self, moments: Moments, penalty: float = 1e-2) -> None:
        """Set the second map from moments of raw features -> outputs."""
        mean, deviation = moments.input_statistics()
        scale = self.standardise(moments)
        self.feature_mean.copy_(mean)
        self.feature_scale.copy_(deviation)
        weights, gram = moments.solve(scale.flatten(), penalty)
        outputs = weights.shape[1] // 2
        key_down, key_up = reduce_rank(weights[:, :outputs], gram, self.config.key_rank)
        value_down, value_up = reduce_rank(weights[:, outputs:], gram, self.config.value_rank)
        self.down.copy_(torch.cat([key_down, value_down], dim=1))
        self.key_up.copy_(key_up)
        self.value_up.copy_(value_up)
