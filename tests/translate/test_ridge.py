"""The closed form finds the map that is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import TEXT, tiny_lm
from torch import Tensor

from cag.errors import TranslatorError
from cag.lm.prefill import prefill
from cag.translate.base import TranslatorConfig
from cag.translate.ridge import Moments, Ridge, reduce_rank
from cag.translate.training import _key_norm_weights


def toy_config(kind: str = "ridge", **changes: Any) -> TranslatorConfig:
    """24 numbers per reference token, 2 * 16 outputs, embeddings of 5, one predecessor."""
    spec = {"family": "gpt2", "query_heads": 2, "window": 64, "sliding": [], "rope": []}
    return TranslatorConfig(
        kind, "ref", "tgt", "0" * 32, "1" * 32,
        reference_spec={**spec, "layers": 2, "kv_heads": 1, "head_size": 6, "hidden_size": 7},
        target_spec={**spec, "layers": 3, "kv_heads": 2, "head_size": 4, "hidden_size": 5},
        **{"rank": 4, "key_rank": 3, "value_rank": 2, "predecessors": 1, **changes},
    )  # fmt: skip


class World:
    """Passages whose target KV is a low-rank linear map of what a ridge sees."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.mix = self.normal(24, 24)
        self.latent = self.normal(24, 4)
        self.keys = self.normal(18, 3) @ self.normal(3, 16)
        self.values = self.normal(18, 2) @ self.normal(2, 16)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def passage(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Correlated sources (T, 24), anchors (T, 10), outputs (T, 32)."""
        source = self.normal(tokens, 24) @ self.mix + 3.0
        embeddings = self.normal(tokens, 5)
        shifted = torch.nn.functional.pad(embeddings, (0, 0, 1, 0))[:-1]
        anchors = torch.cat([embeddings, shifted], -1)
        latent = (source - 3.0) @ self.latent / 5
        previous = torch.nn.functional.pad(latent, (0, 0, 1, 0))[:-1]
        seen = torch.cat([latent, previous, anchors], -1)
        return source, anchors, torch.cat([seen @ self.keys, seen @ self.values], -1) - 2.0


def fitted(world: World, passages: int) -> Ridge:
    ridge = Ridge(toy_config()).requires_grad_(False)
    data = [world.passage(100) for _ in range(passages)]
    first = Moments(29, 32)
    for source, anchors, outputs in data:
        first.add(torch.cat([source, anchors[:, :5]], -1), outputs)
    ridge.fit_projection(first)
    second = Moments(18, 32)
    for source, anchors, outputs in data:
        second.add(ridge.features(ridge.compress(source), anchors), outputs)
    ridge.fit_output(second)
    return ridge


def test_a_low_rank_linear_map_is_recovered() -> None:
    world = World()
    ridge = fitted(world, 500)
    source, anchors, outputs = world.passage(300)
    keys, values = ridge.expand(ridge.compress(source), anchors)
    assert keys.shape == values.shape == (300, 2, 2, 4)
    wanted = outputs.view(300, 2, 2, 2, 4)
    for found, right in ((keys, wanted[:, 0]), (values, wanted[:, 1])):
        error = (found - right).square().sum() / (right - right.mean(0)).square().sum()
        assert error < 0.005


def test_fitting_twice_gives_the_same_outputs() -> None:
    source, anchors, _ = World().passage(50)
    first, second = (fitted(World(), 10) for _ in range(2))
    torch.testing.assert_close(
        first.expand(first.compress(source), anchors)[0],
        second.expand(second.compress(source), anchors)[0],
        atol=1e-2,
        rtol=1e-2,
    )


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
    weights, _ = moments.solve(scale, 0.0)
    mean, deviation = moments.input_statistics()
    expected = torch.linalg.lstsq(
        (inputs - mean) / deviation, (outputs - outputs.mean(0)) / scale
    ).solution
    torch.testing.assert_close(weights, expected, atol=1e-3, rtol=1e-3)


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


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_keys_get_the_scale_of_the_norm_weight(size: float) -> None:
    torch.manual_seed(0)
    ridge = Ridge(toy_config(key_norm=True))
    weight = torch.tensor([[0.5, -2.0, 0.0, 30.0], [1.0, 1.0, 1.0, 1.0]])
    ridge.norm_weight.copy_(weight)
    raw = size * torch.randn(9, 2, 2, 4)
    keys = ridge._renormalise(raw)
    live = weight != 0
    assert not keys[:, 0, :, 2].any()  # a zero weight makes a zero
    assert torch.equal(keys.sign(), raw.sign() * live[:, None])
    for layer in range(2):
        unit = keys[:, layer, :, live[layer]] / weight[layer, live[layer]]
        rms = unit.square().mean(-1).sqrt()
        torch.testing.assert_close(rms, torch.ones_like(rms), atol=1e-4, rtol=0)
    torch.testing.assert_close(ridge._renormalise(keys), keys, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_native_keys_already_have_their_norm(family: str) -> None:
    lm = tiny_lm(family)
    for layer in lm.body.layers:
        layer.self_attn.k_norm.weight.normal_(1.0, 0.3)
    config = replace(toy_config(key_norm=True), target_spec=lm.spec.to_json())
    ridge = Ridge(config)
    ridge.norm_weight.copy_(_key_norm_weights(lm))
    (native,) = prefill(lm, [], [lm.encode(TEXT)[:40]])
    keys = native.keys[1:].permute(2, 0, 1, 3)
    torch.testing.assert_close(ridge._renormalise(keys), keys, atol=1e-3, rtol=1e-3)


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
