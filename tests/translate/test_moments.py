"""Regressions solved from streamed sums are those solved from the data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cag.errors import TranslatorError
from cag.translate.moments import Moments, reduce_rank


def test_moments_in_pieces_equal_moments_at_once() -> None:
    torch.manual_seed(0)
    inputs, outputs = torch.randn(500, 6) + 2, torch.randn(500, 4) - 5
    whole, pieces = Moments(6, 4), Moments(6, 4)
    whole.add(inputs, outputs)
    for x, y in zip(inputs.split(77), outputs.split(77), strict=True):
        pieces.add(x, y)
    assert whole.rows == pieces.rows == 500
    scale = torch.ones(4)
    for left, right in zip(
        (*whole.input_statistics(), *whole.output_statistics(), *whole.solve(scale, 0.01)),
        (*pieces.input_statistics(), *pieces.output_statistics(), *pieces.solve(scale, 0.01)),
        strict=True,
    ):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(whole.input_statistics()[0], inputs.mean(0))
    torch.testing.assert_close(
        whole.output_statistics()[1], outputs.std(0, correction=0), atol=1e-4, rtol=1e-4
    )


def test_solving_without_penalty_is_least_squares() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(400, 6) @ torch.randn(6, 6) + 1
    outputs = inputs @ torch.randn(6, 4) + 0.1 * torch.randn(400, 4)
    moments, scale = Moments(6, 4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    moments.add(inputs, outputs)
    weights, gram = moments.solve(scale, 0.0)
    mean, deviation = moments.input_statistics()
    standardised = (inputs - mean) / deviation
    expected = torch.linalg.lstsq(standardised, (outputs - outputs.mean(0)) / scale).solution
    torch.testing.assert_close(weights, expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(gram, standardised.T @ standardised / 400, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", [1, 4, 12])
def test_reduced_rank_beats_truncating_the_weights(rank: int) -> None:
    torch.manual_seed(rank)
    weights = torch.randn(30, 20)
    inputs = torch.randn(2000, 30) * torch.logspace(-1.5, 1, 30)  # far from isotropic
    gram = inputs.T @ inputs / len(inputs)

    def loss(candidate: Tensor) -> float:
        return float((inputs @ (weights - candidate)).square().sum())

    down, up = reduce_rank(weights, gram, rank)
    assert (down.shape, up.shape) == ((30, rank), (rank, 20))
    u, s, v = torch.linalg.svd(weights, full_matrices=False)
    truncated = u[:, :rank] * s[:rank] @ v[:rank]
    spectrum = torch.linalg.svdvals(inputs @ weights)
    assert loss(down @ up) < loss(truncated)
    assert loss(down @ up) < 1.01 * float(spectrum[rank:].square().sum()) + 1e-3  # the optimum


def test_full_rank_changes_nothing() -> None:
    torch.manual_seed(0)
    weights, inputs = torch.randn(10, 6), torch.randn(100, 10)
    down, up = reduce_rank(weights, inputs.T @ inputs / 100, 6)
    torch.testing.assert_close(down @ up, weights, atol=1e-4, rtol=1e-4)


def test_fewer_rows_than_columns_still_have_a_root() -> None:
    torch.manual_seed(0)
    rows = torch.randn(20, 600) * 1e3  # rounding makes this Gram matrix indefinite
    gram = rows.T @ rows / 20
    assert torch.linalg.cholesky_ex(gram + 1e-5 * torch.eye(600))[1]
    weights = torch.randn(600, 30)
    down, up = reduce_rank(weights, gram / gram.diagonal().mean(), 30)
    torch.testing.assert_close(down @ up, weights, atol=1e-3, rtol=1e-3)


def test_moments_that_are_not_finite_are_refused() -> None:
    with pytest.raises(TranslatorError, match="NaN"):
        reduce_rank(torch.ones(4, 4), torch.full((4, 4), float("nan")), 2)


def test_a_rank_that_cannot_be_is_refused() -> None:
    with pytest.raises(TranslatorError, match="no rank 7"):
        reduce_rank(torch.randn(10, 6), torch.eye(10), 7)
