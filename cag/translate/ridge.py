"""Ridge: the best linear map, in closed form, from streamed second moments.

Keys and values of neighbouring models are close to linear functions of each other once the
rotation is gone (arXiv 2608.03893). Two reductions keep the map small: all reference layers
share one latent, and keys and values each get a reduced-rank regression (Izenman 1975) from
[latent of the token, latent of its predecessor, target embeddings of the token and its
predecessors]. The predecessors matter to layers that look for a token by what came before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cag.errors import TranslatorError
from cag.translate.base import Translator, TranslatorConfig


class Moments:
    """Streaming sums that a ridge regression needs; fp64 where precision is lost, fp32 else.

    Parameters
    ----------
    inputs, outputs
        Sizes of one row of either side.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        self.rows = 0
        self.gram = torch.zeros(inputs, inputs)
        self.cross = torch.zeros(inputs, outputs)
        self.sum_in = torch.zeros(inputs, dtype=torch.float64)
        self.sum_out = torch.zeros(outputs, dtype=torch.float64)
        self.square_out = torch.zeros(outputs, dtype=torch.float64)

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Add rows: inputs (N, I), outputs (N, O)."""
        inputs, outputs = (x.to(self.gram.device, torch.float32) for x in (inputs, outputs))
        self.rows += len(inputs)
        self.gram.addmm_(inputs.T, inputs)
        self.cross.addmm_(inputs.T, outputs)
        self.sum_in += inputs.sum(0).double()
        self.sum_out += outputs.sum(0).double()
        self.square_out += outputs.square().sum(0).double()

    def input_statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of every input."""
        mean = self.sum_in / self.rows
        variance = self.gram.diagonal().double() / self.rows - mean.square()
        return mean.float(), variance.clamp_min(1e-8).sqrt().float()

    def output_statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of every output."""
        mean = self.sum_out / self.rows
        variance = self.square_out / self.rows - mean.square()
        return mean.float(), variance.clamp_min(1e-8).sqrt().float()

    def solve(self, scale: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
        """Weights on standardised inputs, for outputs centred and divided by `scale`.

        Returns
        -------
        tuple
            Weights (I, O) and the Gram matrix of the standardised inputs divided by rows.
        """
        mean, deviation = self.input_statistics()
        mean_out = (self.sum_out / self.rows).float()
        gram = self.gram / self.rows - mean[:, None] * mean
        gram /= deviation[:, None] * deviation
        cross = self.cross / self.rows - mean[:, None] * mean_out
        cross /= deviation[:, None] * scale
        weights = torch.cholesky_solve(cross, _root(gram, penalty))
        return weights, gram


def reduce_rank(weights: Tensor, gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Best rank-`rank` factors (down, up) of a regression under its input distribution.

    The directions are the leading right singular vectors of ``gram^(1/2) @ weights``, found
    by a randomised SVD (Halko et al. 2011): exact enough, and seconds where an
    eigendecomposition of all outputs takes minutes.
    """
    root = _root(gram, 1e-5)
    size = min(rank + 32, *weights.shape)
    directions = torch.svd_lowrank(root.T @ weights, q=size, niter=3)[2][:, :rank]
    return weights @ directions, directions.T.contiguous()


def _root(gram: Tensor, penalty: float) -> Tensor:
    """Cholesky factor of a Gram matrix with a penalty, which grows if rounding asks for it.

    Raises
    ------
    TranslatorError
        If the matrix holds NaN or infinity.
    """
    while penalty < 1:
        root, failed = torch.linalg.cholesky_ex(gram + penalty * torch.eye(len(gram)))
        if not failed:
            return root
        penalty *= 10  # fewer rows than columns, say
    raise TranslatorError(
        "the training pairs hold NaN or infinity; try CAG_DTYPE=float32 in a new run"
    )


class Ridge(Translator):
    """Reduced-rank linear translator; also the base that `Mixture` corrects."""

    kind = "ridge"
    source_mean: Tensor
    feature_mean: Tensor
    feature_scale: Tensor
    output_mean: Tensor
    output_scale: Tensor
    norm_weight: Tensor

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__(config)
        layers, heads, size = config.output_shape
        outputs = layers * heads * size
        features = 2 * config.rank + config.anchor_size
        self.register_buffer("source_mean", torch.zeros(config.source_size))
        self.project = nn.Parameter(torch.zeros(config.source_size, config.rank))
        self.register_buffer("feature_mean", torch.zeros(features))
        self.register_buffer("feature_scale", torch.ones(features))
        self.down = nn.Parameter(torch.zeros(features, config.key_rank + config.value_rank))
        self.key_up = nn.Parameter(torch.zeros(config.key_rank, outputs))
        self.value_up = nn.Parameter(torch.zeros(config.value_rank, outputs))
        self.register_buffer("output_mean", torch.zeros(2, outputs))
        self.register_buffer("output_scale", torch.ones(2, outputs))
        if config.key_norm:
            self.register_buffer("norm_weight", torch.ones(layers, size))

    def compress(self, source: Tensor) -> Tensor:
        return (source - self.source_mean) @ self.project

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

    def expand(
        self, latents: Tensor, anchors: Tensor, starts: Sequence[int] = (0,)
    ) -> tuple[Tensor, Tensor]:
        return self.finish(self.predict(self.features(latents, anchors, starts)))

    def predict(self, features: Tensor) -> Tensor:
        """Features (T, F) -> standardised keys and values, shape (T, 2, outputs)."""
        return self._linear(features @ self.down)

    def _linear(self, hidden: Tensor) -> Tensor:
        keys, values = hidden.split([self.config.key_rank, self.config.value_rank], dim=-1)
        return torch.stack([keys @ self.key_up, values @ self.value_up], dim=1)

    def finish(self, standardised: Tensor) -> tuple[Tensor, Tensor]:
        """Undo the standardisation and restore the key norm: (T, L-1, H, D) each."""
        both = standardised * self.output_scale + self.output_mean
        both = both.unflatten(-1, self.config.output_shape)
        keys, values = both.unbind(1)
        return (self._renormalise(keys) if self.config.key_norm else keys), values

    def _renormalise(self, keys: Tensor) -> Tensor:
        """Give keys the scale that the target's QK-norm would: its weight times unit RMS."""
        weight = self.norm_weight[:, None]  # (L-1, 1, D)
        live = weight.abs() > 1e-2  # some of Gemma's norm weights are exactly zero
        unit = torch.where(live, keys.float() / torch.where(live, weight, 1.0), 0.0)
        mean_square = unit.square().sum(-1, keepdim=True) / live.sum(-1, keepdim=True).clamp_min(1)
        return (weight * unit * torch.rsqrt(mean_square + 1e-6)).to(keys.dtype)

    def multiplications(self) -> int:
        return sum(p.numel() for p in (self.project, self.down, self.key_up, self.value_up))

    @torch.no_grad()
    def fit_projection(self, moments: Moments, penalty: float = 2e-2) -> None:
        """Set the shared latent from moments of [source, embedding] -> standardised outputs."""
        mean, deviation = moments.input_statistics()
        weights, gram = moments.solve(self._scale_outputs(moments).flatten(), penalty)
        size = self.config.source_size
        down, _ = reduce_rank(weights, gram, self.config.rank)
        self.source_mean.copy_(mean[:size])
        self.project.copy_(down[:size] / deviation[:size, None])

    @torch.no_grad()
    def fit_output(self, moments: Moments, penalty: float = 1e-2) -> None:
        """Set the second map from moments of [latents, anchors] -> outputs."""
        mean, deviation = moments.input_statistics()
        scale = self._scale_outputs(moments)
        self.output_mean.copy_(moments.output_statistics()[0].view(2, -1))
        self.output_scale.copy_(scale)
        self.feature_mean.copy_(mean)
        self.feature_scale.copy_(deviation)
        weights, gram = moments.solve(scale.flatten(), penalty)
        outputs = weights.shape[1] // 2
        key_down, key_up = reduce_rank(weights[:, :outputs], gram, self.config.key_rank)
        value_down, value_up = reduce_rank(weights[:, outputs:], gram, self.config.value_rank)
        self.down.copy_(torch.cat([key_down, value_down], dim=1))
        self.key_up.copy_(key_up)
        self.value_up.copy_(value_up)

    def _scale_outputs(self, moments: Moments) -> Tensor:
        """One scale per layer and kind, so that large channels keep their weight; (2, outputs)."""
        deviation = moments.output_statistics()[1].view(2, self.config.output_shape[0], -1)
        return deviation.mean(-1, keepdim=True).expand_as(deviation).reshape(2, -1)
