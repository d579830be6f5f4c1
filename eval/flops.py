"""Multiply-accumulates (MACs) of reading and of translating, from configs alone: no weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from transformers import LlamaConfig, Qwen2Config

from cag.lm.spec import KVSpec
from cag.translate import TRANSLATORS, TranslatorConfig
from cag.translate.recipe import SIZES, Recipe

#: What `cag train` builds.
RECIPE: dict[str, Any] = {name: getattr(Recipe(), name) for name in SIZES}


def llama_3_1_8b() -> LlamaConfig:
    """What the cost of Llama-3.1-8B depends on; its rotary scaling costs nothing."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    )


def qwen2_5_7b() -> Qwen2Config:
    """What the cost of Qwen2.5-7B depends on."""
    return Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131072,
    )


def per_token(config: Any) -> int:
    """MACs per token in the linear maps of all decoder layers.

    Embeddings, LM head, attention scores, norms and activations are not in it.

    Parameters
    ----------
    config
        A transformers config of a family that `KVSpec` supports.

    Raises
    ------
    UnsupportedModel
        If the family is another one.
    """
    spec = KVSpec.from_config(config)
    queries = spec.hidden_size * spec.query_heads * spec.head_size
    keys_and_values = 2 * spec.hidden_size * spec.kv_heads * spec.head_size
    return spec.layers * (2 * queries + keys_and_values + _mlp(config, spec))  # output = queries


def _mlp(config: Any, spec: KVSpec) -> int:
    """MACs per token of one layer's MLP: two maps, or three where it is gated."""
    config = config.get_text_config(decoder=True)
    if spec.family == "gpt2":
        return 2 * spec.hidden_size * (config.n_inner or 4 * spec.hidden_size)
    if spec.family == "opt":
        return 2 * spec.hidden_size * config.ffn_dim
    return 3 * spec.hidden_size * config.intermediate_size


def head(config: Any) -> int:
    """MACs of the LM head for one token."""
    config = config.get_text_config(decoder=True)
    return getattr(config, "word_embed_proj_dim", config.hidden_size) * config.vocab_size


def attention(config: Any, tokens: int, past: int = 0) -> int:
    """MACs of attention scores and weighted sums in all layers.

    Parameters
    ----------
    tokens
        New tokens; each sees itself and what precedes it, in its layer's sliding window.
    past
        Tokens that are in the cache already.
    """
    spec = KVSpec.from_config(config)
    seen = sum(
        layers * sum(min(at, window or at) for at in range(past + 1, past + tokens + 1))
        for window, layers in Counter(spec.sliding).items()
    )
    return 2 * spec.query_heads * spec.head_size * seen


def reading(config: Any, tokens: int, past: int = 0) -> int:
    """MACs of reading `tokens` behind `past` cached ones, without the LM head."""
    return tokens * per_token(config) + attention(config, tokens, past)


def lowest_layer(config: Any) -> int:
    """MACs per passage token of the exact lowest layer that a translation is put on top of.

    GPT-2 computes its queries as well: they come from the same matrix.
    """
    spec = KVSpec.from_config(config)
    maps = 3 if spec.family == "gpt2" else 2
    return maps * spec.hidden_size * spec.kv_heads * spec.head_size


def translation(
    reference_config: Any, target_config: Any, kind: str = "mixture", **recipe: Any
) -> int:
    """MACs per passage token of a translator, which is built on the meta device.

    The target's `lowest_layer` is not in it.

    Parameters
    ----------
    kind
        Name in the registry of translators.
    recipe
        Fields of `TranslatorConfig`; what is left out is as in `RECIPE`.
    """
    reference, target = map(KVSpec.from_config, (reference_config, target_config))
    config = TranslatorConfig(
        kind=kind,
        reference=reference.family,
        target=target.family,
        reference_fingerprint="",
        target_fingerprint="",
        reference_spec=reference.to_json(),
        target_spec=target.to_json(),
        **{**RECIPE, **recipe},
    )
    with torch.device("meta"):
        return TRANSLATORS[kind](config).multiplications()


def query(
    reference_config: Any, target_config: Any, passage: int, prompt: int, **recipe: Any
) -> dict[str, int]:
    """FLOPs (two per MAC) up to the first token, on both paths.

    The reference's own reading is not in it: it happens once, at ingest.

    Parameters
    ----------
    passage
        Passage tokens.
    prompt
        Tokens of prefix and suffix together. They are counted as if all came behind the
        passages, which is the dearest place.
    """
    translated = translation(reference_config, target_config, **recipe)
    per_passage_token = translated + lowest_layer(target_config)
    last = head(target_config)
    return {
        "direct": 2 * (reading(target_config, passage + prompt) + last),
        "translated": 2
        * (passage * per_passage_token + reading(target_config, prompt, passage) + last),
    }
