"""The closed form finds the map that is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cag.translate.base import Batch
from cag.translate.config import TranslatorConfig
from cag.translate.ridge import Ridge


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

    def passages(self, count: int, tokens: int = 10) -> Batch:
        """Correlated sources, anchors and outputs; nothing precedes a passage's first token."""
        source = self.normal(count * tokens, 24) @ self.mix + 3.0
        embeddings = self.normal(count * tokens, 5)
        starts = range(0, count * tokens, tokens)
        latent = (source - 3.0) @ self.latent / 5
        seen = [latent, before(latent, starts), embeddings, before(embeddings, starts)]
        features = torch.cat(seen, -1)
        outputs = torch.cat([features @ self.keys, features @ self.values], -1) - 2.0
        return Batch(source, torch.cat(seen[2:], -1), outputs, list(starts))


def before(rows: Tensor, starts: range) -> Tensor:
    """Every row's predecessor in its passage, or zeros."""
    shifted = rows.roll(1, 0)
    shifted[list(starts)] = 0.0
    return shifted


def fitted(world: World, passages: int) -> Ridge:
    ridge = Ridge(toy_config()).requires_grad_(False)
    data = [world.passages(50) for _ in range(passages // 50)]

    def batches(limit: int | None) -> Iterator[Batch]:
        yield from data if limit is None else data[: limit // 50]

    ridge.fit(batches, passages // 2)
    return ridge


def test_a_low_rank_linear_map_is_recovered() -> None:
    world = World()
    ridge = fitted(world, 5000)
    batch = world.passages(30)
    keys, values = ridge.expand(ridge.compress(batch.source), batch.anchors, batch.starts)
    assert keys.shape == values.shape == (300, 2, 2, 4)
    wanted = batch.outputs.view(300, 2, 2, 2, 4)
    for found, right in ((keys, wanted[:, 0]), (values, wanted[:, 1])):
        error = (found - right).square().sum() / (right - right.mean(0)).square().sum()
        assert error < 0.005


def test_fitting_twice_gives_the_same_outputs() -> None:
    batch = World().passages(5)
    first, second = (fitted(World(), 100) for _ in range(2))
    torch.testing.assert_close(
        first.expand(first.compress(batch.source), batch.anchors)[0],
        second.expand(second.compress(batch.source), batch.anchors)[0],
        atol=1e-2,
        rtol=1e-2,
    )
