"""Streamed second moments, and the regressions that are solved from them."""

from __future__ import annotations

import torch
from torch import Tensor

from cag.errors import TranslatorError


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

    def select(self, inputs: Tensor) -> Moments:
        """The moments of a part of the inputs, given by their indices."""
        part = Moments(len(inputs), self.cross.shape[1])
        part.rows, part.sum_in = self.rows, self.sum_in[inputs]
        part.gram, part.cross = self.gram[inputs][:, inputs], self.cross[inputs]
        part.sum_out, part.square_out = self.sum_out, self.square_out
        return part

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

    Raises
    ------
    TranslatorError
        If the weights cannot have such a rank.
    """
    if rank > min(weights.shape):
        raise TranslatorError(
            f"a map of {weights.shape[0]} inputs to {weights.shape[1]} outputs has no rank {rank}; "
            "choose a smaller one"
        )
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
