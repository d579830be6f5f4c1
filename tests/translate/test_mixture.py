"""Experts correct the ridge, each token by its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import flops_per_token
from test_ridge import toy_config

from cag.translate.mixture import Mixture
from cag.translate.ridge import Ridge


def toy_ridge() -> Ridge:
    torch.manual_seed(0)
    ridge = Ridge(toy_config())
    for tensor in ridge.state_dict().values():
        tensor.normal_()
    return ridge


@pytest.fixture
def mixture() -> Mixture:
    """Four experts that say something, two active."""
    mixture = Mixture.upgrade(toy_ridge(), experts=4, active=2, hidden=6)
    for name in ("expert_in", "expert_bias", "expert_out"):
        getattr(mixture, name).data.normal_()
    return mixture.requires_grad_(False)


@pytest.fixture
def features() -> torch.Tensor:
    return torch.randn(40, 18, generator=torch.Generator().manual_seed(1))


def chosen_by(mixture: Mixture, features: torch.Tensor) -> torch.Tensor:
    return mixture.route(mixture.norm(features @ mixture.down))[1]


def test_an_upgrade_starts_as_its_ridge() -> None:
    ridge = toy_ridge()
    mixture = Mixture.upgrade(ridge, experts=4, active=2, hidden=6)
    config = mixture.config
    assert (config.kind, config.experts, config.active, config.hidden) == ("mixture", 4, 2, 6)
    source, anchors = torch.randn(9, 24), torch.randn(9, 10)
    assert torch.equal(mixture.compress(source), ridge.compress(source))
    latents = ridge.compress(source)
    for found, wanted in zip(
        mixture.expand(latents, anchors), ridge.expand(latents, anchors), strict=True
    ):
        assert torch.equal(found, wanted)


def test_a_token_is_the_weighted_sum_of_its_experts(
    mixture: Mixture, features: torch.Tensor
) -> None:
    hidden = features @ mixture.down
    normed = mixture.norm(hidden)
    weights, chosen = mixture.route(normed)
    torch.testing.assert_close(weights.sum(-1), torch.ones(40))
    for row in (0, 17):
        wanted = mixture._linear(hidden[row : row + 1])[0].flatten()
        for weight, e in zip(weights[row], chosen[row], strict=True):
            inner = normed[row] @ mixture.expert_in[e] + mixture.expert_bias[e]
            wanted += weight * (torch.nn.functional.gelu(inner) @ mixture.expert_out[e])
        found = mixture.map(features)[row].flatten()
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_only_routed_experts_run(mixture: Mixture, features: torch.Tensor) -> None:
    """An expert full of NaN spoils the tokens that are routed to it, and no others."""
    before, chosen = mixture.map(features), chosen_by(mixture, features)
    for expert in range(4):
        spoiled = Mixture(mixture.config).requires_grad_(False)
        spoiled.load_state_dict(mixture.state_dict())
        for name in ("expert_in", "expert_bias", "expert_out"):
            getattr(spoiled, name)[expert] = torch.nan
        after, hit = spoiled.map(features), (chosen == expert).any(-1)
        assert hit.any() and not hit.all()
        assert after[hit].isnan().all()
        assert torch.equal(after[~hit], before[~hit])


def test_an_expert_no_token_needs_may_be_anything(mixture: Mixture, features: torch.Tensor) -> None:
    mixture.router.bias[2] = -1e9
    before = mixture.map(features)
    mixture.expert_out[2] = torch.nan
    mixture.expert_in[2] = torch.inf
    assert torch.equal(mixture.map(features), before)


def test_a_token_does_not_depend_on_the_others(mixture: Mixture, features: torch.Tensor) -> None:
    whole = mixture.map(features)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(mixture.map(features[order]), whole[order], atol=1e-4, rtol=1e-4)
    for row in (0, 23):
        alone = mixture.map(features[row : row + 1])[0]
        torch.testing.assert_close(alone, whole[row], atol=1e-4, rtol=1e-4)
    assert torch.equal(chosen_by(mixture, features[order]), chosen_by(mixture, features)[order])


@pytest.mark.parametrize("routing", ["learned", "uniform", "random"])
@pytest.mark.parametrize(("experts", "active"), [(2, 1), (4, 2), (8, 2)])
def test_multiplications_are_those_that_run(experts: int, active: int, routing: str) -> None:
    mixture = Mixture.upgrade(toy_ridge(), experts, active, 6, routing)
    assert flops_per_token(mixture) == 2 * mixture.multiplications()


def test_an_idle_expert_costs_its_row_of_the_router() -> None:
    four, five = (Mixture.upgrade(toy_ridge(), n, active=2, hidden=6) for n in (4, 5))
    assert five.multiplications() - four.multiplications() == 5  # the ranks together


def rerouted(mixture: Mixture, routing: str) -> Mixture:
    """The same weights, routed otherwise, and a router that nobody may ask."""
    other = Mixture(replace(mixture.config, routing=routing)).requires_grad_(False)
    other.load_state_dict(mixture.state_dict())
    other.router.weight.fill_(torch.nan)
    return other


def test_uniform_routing_is_the_mean_of_all_experts(
    mixture: Mixture, features: torch.Tensor
) -> None:
    hidden = features @ mixture.down
    normed = mixture.norm(hidden)
    wanted = mixture._linear(hidden).flatten(1)
    for e in range(4):
        inner = normed @ mixture.expert_in[e] + mixture.expert_bias[e]
        wanted += torch.nn.functional.gelu(inner) @ mixture.expert_out[e] / 4
    found = rerouted(mixture, "uniform").map(features).flatten(1)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_random_routing_uses_all_experts_alike_whatever_the_token_says(
    mixture: Mixture, features: torch.Tensor
) -> None:
    other = rerouted(mixture, "random")
    assert not other.map(features).isnan().any()
    many = torch.randn(2000, 5, generator=torch.Generator().manual_seed(3))
    weights, chosen = other.route(many)
    assert torch.equal(other.route(-many)[1], chosen)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2000))
    assert (chosen[:, 0] != chosen[:, 1]).all()
    shares = chosen.flatten().bincount(minlength=4) / 4000
    assert (shares - 0.25).abs().max() < 0.03
    following = (chosen[1:] == chosen[:-1]).all(-1).float().mean()  # of 12 ordered choices
    assert abs(following - 1 / 12) < 0.03


def test_experts_that_are_not_routed_get_no_gradient(features: torch.Tensor) -> None:
    mixture = Mixture.upgrade(toy_ridge(), experts=4, active=2, hidden=6)
    mixture.router.bias.data[1] = -1e9
    mixture.map(features).square().sum().backward()
    moved = mixture.expert_out.grad.flatten(1).any(1)
    assert moved.tolist() == [True, False, True, True]
