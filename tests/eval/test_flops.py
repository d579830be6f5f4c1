"""Counts from configs equal counts from weights and from attention itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import FAMILIES, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, MistralConfig
from transformers.pytorch_utils import Conv1D

from cag.errors import UnsupportedModel
from eval.flops import (
    RECIPE,
    attention,
    head,
    llama_3_1_8b,
    lowest_layer,
    per_token,
    query,
    qwen2_5_7b,
    reading,
    translation,
)

GROUPED: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 512,
    "pad_token_id": 1,
}  # fmt: skip

CONFIGS: dict[str, Any] = {
    **{family: tiny_config(family, 100) for family in (*FAMILIES, "qwen3")},
    "mistral": MistralConfig(**GROUPED, head_dim=16, sliding_window=7),
    "gemma2": Gemma2Config(**GROUPED, head_dim=24, sliding_window=9),
    "gpt2 with another MLP": GPT2Config(
        vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_inner=56, n_positions=64
    ),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> Any:
    return CONFIGS[request.param]


@pytest.fixture
def model(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def layers(model: Any) -> nn.ModuleList:
    return next(m for m in model.base_model.modules() if isinstance(m, nn.ModuleList))


def weights(module: nn.Module, ending: str = "") -> int:
    """Numbers in the matrices of linear maps inside a module."""
    return sum(
        part.weight.numel()
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear | Conv1D) and name.endswith(ending)
    )


def test_per_token_is_what_the_weights_hold(config: Any, model: Any) -> None:
    assert per_token(config) == weights(layers(model)) > 0


def test_head_is_what_the_weights_hold(config: Any, model: Any) -> None:
    assert head(config) == model.get_output_embeddings().weight.numel()


def test_the_lowest_layer_is_what_the_weights_hold(config: Any, model: Any) -> None:
    lowest = layers(model)[0]
    wanted = weights(lowest, "c_attn") or weights(lowest, "k_proj") + weights(lowest, "v_proj")
    assert lowest_layer(config) == wanted


@pytest.mark.parametrize(("tokens", "past"), [(1, 0), (30, 0), (5, 25), (1, 29), (0, 12)])
def test_attention_is_what_the_model_attends_to(
    config: Any, model: Any, tokens: int, past: int
) -> None:
    ids = torch.arange(past + tokens)[None]
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    assert len(attentions) == len(layers(model))
    seen = sum(int((weights[0, :, past:] > 0).sum()) for weights in attentions)
    size = getattr(config, "head_dim", None) or 8
    assert attention(config, tokens, past) == 2 * size * seen


def test_attention_respects_each_layers_window() -> None:
    """Brute force: three layers of four see 24 tokens back."""
    seen = sum(
        1
        for window in (24, 24, None, 24)
        for at in range(20, 50)
        for other in range(at + 1)
        if window is None or at - other < window
    )
    assert attention(CONFIGS["gemma3_text"], 30, 20) == 2 * 4 * 16 * seen


def test_reading_in_parts_costs_the_same(config: Any) -> None:
    whole = reading(config, 40)
    assert whole == reading(config, 25) + reading(config, 15, 25)
    assert whole == 40 * per_token(config) + attention(config, 40)


def test_other_families_are_refused() -> None:
    config = tiny_config("llama", 100)
    config.model_type = "mamba"
    with pytest.raises(UnsupportedModel):
        per_token(config)


# The published counts: 8,030,261,248 and 7,615,616,512 parameters.
def test_known_configs_have_the_published_size() -> None:
    llama, qwen = llama_3_1_8b(), qwen2_5_7b()
    norms = (2 * 32 + 1) * 4096
    assert per_token(llama) + 2 * head(llama) + norms == 8_030_261_248
    norms, biases = (2 * 28 + 1) * 3584, 28 * (3584 + 2 * 512)
    assert per_token(qwen) + 2 * head(qwen) + norms + biases == 7_615_616_512


def test_translation_by_hand() -> None:
    source, outputs, width = 2 * 32 * 8 * 128, 27 * 4 * 128, 768 + 512
    ridge = source * 512 + (2 * 512 + 4 * 3584) * width + outputs * width
    assert translation(llama_3_1_8b(), qwen2_5_7b(), "ridge") == ridge
    mixture = ridge + 4 * width + 2 * 96 * (width + 2 * outputs)
    assert translation(llama_3_1_8b(), qwen2_5_7b()) == mixture
    assert translation(llama_3_1_8b(), qwen2_5_7b(), **RECIPE) == mixture
    more = translation(llama_3_1_8b(), qwen2_5_7b(), active=3)
    assert more == mixture + 96 * (width + 2 * outputs)


def test_query_counts_both_paths() -> None:
    llama, qwen = llama_3_1_8b(), qwen2_5_7b()
    flops = query(llama, qwen, 1000, 100)
    shared = reading(qwen, 100, 1000) + head(qwen)
    assert flops["direct"] == 2 * (reading(qwen, 1000) + shared)
    per_passage_token = translation(llama, qwen) + lowest_layer(qwen)
    assert flops["translated"] == 2 * (1000 * per_passage_token + shared)
    assert query(llama, qwen, 0, 100)["direct"] == query(llama, qwen, 0, 100)["translated"]
