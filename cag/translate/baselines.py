"""What others do, built as well as we can build it: to compare with, not to use.

Both start in closed form and descend by the same losses over the same passages as the
mixture does. GELU(x) - GELU(-x) = x, so a two-layer MLP whose hidden units come in pairs of
opposite sign begins as any linear map of half their number, and is free to bend from there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cag.errors import TranslatorError
from cag.translate.base import Batches, Translator
from cag.translate.config import TranslatorConfig
from cag.translate.moments import Moments, reduce_rank


class SharedLatent(Translator):
    """Per-model adapters into one latent space, after LSC in arXiv 2607.28979.

    The reference's adapter is a linear map and a GELU into a latent of ``2 * rank`` numbers
    per token, the target's a linear map out of it (there it ends in a GELU, which cannot say
    anything negative). No anchor, no neighbours, no experts.
    """

    kind = "shared_latent"
    source_mean: Tensor
    source_scale: Tensor

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__(config)
        size, latent = config.source_size, 2 * config.rank
        self.register_buffer("source_mean", torch.zeros(size))
        self.register_buffer("source_scale", torch.ones(size))
        self.adapter_in = nn.Parameter(torch.zeros(size, latent))
        self.bias = nn.Parameter(torch.zeros(latent))
        self.adapter_out = nn.Parameter(torch.zeros(latent, 2 * config.outputs))

    def compress(self, source: Tensor) -> Tensor:
        standardised = (self.config.selected(source) - self.source_mean) / self.source_scale
        return F.gelu(standardised @ self.adapter_in + self.bias)

    def predict(self, latents: Tensor, anchors: Tensor, starts: Sequence[int] = (0,)) -> Tensor:
        return (latents @ self.adapter_out).unflatten(-1, (2, -1))

    def multiplications(self) -> int:
        return self.adapter_in.numel() + self.adapter_out.numel()

    @torch.no_grad()
    def fit(self, batches: Batches, first: int) -> None:
        moments = Moments(self.config.source_size, 2 * self.config.outputs)
        for batch in batches(first):
            moments.add(self.config.selected(batch.source), batch.outputs)
        mean, deviation = moments.input_statistics()
        self.source_mean.copy_(mean)
        self.source_scale.copy_(deviation)
        weights, gram = moments.solve(self.standardise(moments).flatten(), penalty=2e-2)
        down, up = reduce_rank(weights, gram, self.config.rank)
        down, up = balanced(down, up)
        self.adapter_in.copy_(torch.cat([down, -down], dim=1))
        self.adapter_out.copy_(torch.cat([up, -up]))


class SingleProjection(Translator):
    """One MLP for keys and one for values, shared by all layers: C2C-Project in arXiv 2607.28979.

    Each target layer reads the reference layer at the same relative depth. Sources and
    outputs are standardised per layer, and the output is linear. ``hidden`` is the MLPs' width.
    """

    kind = "single_projection"
    source_mean: Tensor
    source_scale: Tensor

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__(config)
        if config.reference_layers is not None:
            raise TranslatorError("single_projection pairs layers by depth and needs all of them")
        reference, (layers, heads, size) = config.reference_spec, config.output_shape
        self._inputs = reference["kv_heads"] * reference["head_size"]
        top = reference["layers"] - 1
        self._paired = [round(layer * top / layers) for layer in range(1, layers + 1)]
        self.register_buffer("source_mean", torch.zeros(2, layers, self._inputs))
        self.register_buffer("source_scale", torch.ones(2, layers, self._inputs))
        self.inner = nn.Parameter(torch.zeros(2, self._inputs, config.hidden))
        self.bias = nn.Parameter(torch.zeros(2, 1, config.hidden))
        self.outer = nn.Parameter(torch.zeros(2, config.hidden, heads * size))

    def compress(self, source: Tensor) -> Tensor:
        """The paired layers' keys and values, standardised: (S, 2, L-1, inputs)."""
        by_layer = source.unflatten(-1, (self.config.reference_spec["layers"], 2, -1))
        paired = by_layer[:, self._paired].transpose(1, 2)
        return (paired - self.source_mean) / self.source_scale

    def predict(self, latents: Tensor, anchors: Tensor, starts: Sequence[int] = (0,)) -> Tensor:
        rows = latents.transpose(0, 1).flatten(1, 2)  # (2, T * (L-1), inputs)
        mapped = F.gelu(rows @ self.inner + self.bias) @ self.outer
        return mapped.unflatten(1, (len(latents), -1)).transpose(0, 1).flatten(2)

    def multiplications(self) -> int:
        return self.config.output_shape[0] * (self.inner.numel() + self.outer.numel())

    @torch.no_grad()
    def fit(self, batches: Batches, first: int) -> None:
        layers, heads, size = self.config.output_shape
        everything = Moments(self.source_mean.numel(), 2 * self.config.outputs)
        for batch in batches(first):
            everything.add(self.compress(batch.source).flatten(1), batch.outputs)
        self.standardise(everything)
        mean, deviation = everything.input_statistics()
        self.source_mean.copy_(mean.view_as(self.source_mean))
        self.source_scale.copy_(deviation.view_as(self.source_scale))
        shared = [Moments(self._inputs, heads * size) for _ in range(2)]
        for batch in batches(first):
            inputs = self.compress(batch.source)
            outputs = (batch.outputs.unflatten(-1, (2, -1)) - self.output_mean) / self.output_scale
            outputs = outputs.unflatten(-1, (layers, heads * size))
            for side, moments in enumerate(shared):
                moments.add(inputs[:, side].flatten(0, 1), outputs[:, side].flatten(0, 1))
        for side, moments in enumerate(shared):
            weights, _ = moments.solve(torch.ones(heads * size), penalty=1e-3)
            paired = min(self.config.hidden // 2, *weights.shape)
            down, up = reduce_rank(weights, moments.gram / moments.rows, paired)
            down, up = balanced(down, up)
            spread = torch.randn(self._inputs, self.config.hidden) / self._inputs**0.5
            self.inner[side].copy_(spread)  # units beyond the pairs start random and unheard
            self.inner[side, :, : 2 * paired] = torch.cat([down, -down], dim=1)
            self.outer[side].zero_()
            self.outer[side, : 2 * paired] = torch.cat([up, -up])


def balanced(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with columns of `down` and rows of `up` equally long."""
    ratio = (up.norm(dim=1) / down.norm(dim=0).clamp_min(1e-9)).sqrt()
    return down * ratio, up / ratio[:, None].clamp_min(1e-9)
