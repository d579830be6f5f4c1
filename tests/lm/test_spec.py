"""Geometry, refusals and fingerprints."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, tiny_config, tiny_lm
from transformers import Gemma3Config, LlamaConfig, MambaConfig, T5Config

from cag.errors import UnsupportedModel
from cag.lm.spec import KVSpec, hash_ids, model_fingerprint


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3"])
def test_geometry_is_that_of_a_real_cache(family: str) -> None:
    lm = tiny_lm(family)
    with torch.no_grad():
        cache = lm.model(torch.tensor([[3, 4, 5]]), use_cache=True).past_key_values
    shapes = {tuple(layer.keys.shape) for layer in cache.layers}
    assert shapes == {(1, lm.spec.kv_heads, 3, lm.spec.head_size)}
    assert len(cache.layers) == lm.spec.layers == len(lm.spec.rope) == len(lm.spec.sliding)


def test_gemma_alternates_windows_and_bases() -> None:
    spec = KVSpec.from_config(tiny_config("gemma3_text", 300))
    assert spec.sliding == (24, 24, None, 24)
    assert spec.rope[2] == "full_attention" and spec.rope[0] == "sliding_attention"


@pytest.mark.parametrize("config", [MambaConfig(), T5Config()])
def test_other_architectures_are_refused_by_name(config: object) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{config.model_type}.*use one of: llama"):  # type: ignore[attr-defined]
        KVSpec.from_config(config)


def test_a_model_that_also_sees_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="'gemma3' reads more than text"):
        KVSpec.from_config(Gemma3Config())


def test_length_dependent_rotation_is_refused() -> None:
    config = LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(UnsupportedModel, match="dynamic"):
        KVSpec.from_config(config)


def test_fingerprint_ignores_dtype_and_sees_a_finetune() -> None:
    lm = tiny_lm("llama")
    lm.model.bfloat16()
    as_bf16 = model_fingerprint(lm.model, lm.model.config)
    lm.model.float()
    assert model_fingerprint(lm.model, lm.model.config) == as_bf16
    with torch.no_grad():
        lm.model.model.layers[1].mlp.up_proj.weight.mul_(1.02)
    assert model_fingerprint(lm.model, lm.model.config) != as_bf16


def test_hash_of_ids_is_not_fooled_by_digits() -> None:
    assert hash_ids([1, 23]) != hash_ids([12, 3])
