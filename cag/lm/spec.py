"""The geometry of a model's KV cache, and fingerprints of what produced one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from cag.errors import UnsupportedModel

ROTARY_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
LEARNED_POSITION_FAMILIES = ("gpt2", "opt")
FAMILIES = ROTARY_FAMILIES + LEARNED_POSITION_FAMILIES

# Frequencies of these depend on the length of the sequence being read, so a key could not
# be unrotated without knowing how long the document was.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

_PROBE = "Zoë's naïve café: 3.14 – “x” 日本語 🙂‍↕️\n\tdef f(x):  return x**2  # e\u0301"


@dataclass(frozen=True)
class KVSpec:
    """Cache geometry of one model.

    Attributes
    ----------
    family
        ``model_type`` of the (text) config.
    layers, kv_heads, query_heads, head_size, hidden_size
        Sizes; a cache holds ``2 * layers * kv_heads * head_size`` numbers per token.
    window
        Longest sequence the model can read, in tokens.
    sliding
        Per layer the size of its sliding attention window in tokens, or None.
    rope
        Per layer the name of its rotary set-up, or None where positions are learned and a
        key therefore has no rotation to remove.
    """

    family: str
    layers: int
    kv_heads: int
    query_heads: int
    head_size: int
    hidden_size: int
    window: int
    sliding: tuple[int | None, ...]
    rope: tuple[str | None, ...]

    @property
    def numbers_per_token(self) -> int:
        """How many numbers one token occupies in the cache."""
        return 2 * self.layers * self.kv_heads * self.head_size

    def to_json(self) -> dict[str, Any]:
        """Plain data, for metadata files."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_config(cls, config: Any) -> KVSpec:
        """Read the geometry from a transformers config.

        Raises
        ------
        UnsupportedModel
            If the architecture is not one of `FAMILIES`, is multimodal, or its rotary scaling
            depends on the sequence length.
        """
        whole, config = config, config.get_text_config(decoder=True)
        family = config.model_type
        if family not in FAMILIES:
            raise UnsupportedModel(
                f"'{family}' models are not supported; use one of: {', '.join(FAMILIES)}"
            )
        if whole is not config:
            raise UnsupportedModel(
                f"'{whole.model_type}' reads more than text; use a text-only checkpoint of "
                f"the family '{family}'"
            )
        layers = config.num_hidden_layers
        heads = config.num_attention_heads
        return cls(
            family=family,
            layers=layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            query_heads=heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            hidden_size=config.hidden_size,
            window=config.max_position_embeddings,
            sliding=_sliding_windows(config, layers),
            rope=_rope_names(config, family, layers),
        )


def _sliding_windows(config: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope_names(config: Any, family: str, layers: int) -> tuple[str | None, ...]:
    if family in LEARNED_POSITION_FAMILIES:
        return (None,) * layers
    parameters = config.rope_parameters
    per_layer_type = "rope_theta" not in parameters
    for entry in parameters.values() if per_layer_type else (parameters,):
        if entry and entry.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            raise UnsupportedModel(
                f"rotary scaling '{entry['rope_type']}' changes with the document's length, so its "
                "keys cannot be stored position-free; use default, linear, llama3 or yarn scaling"
            )
    return tuple(config.layer_types) if per_layer_type else ("default",) * layers


def model_fingerprint(model: nn.Module, config: Any) -> str:
    """Fingerprint of weights and architecture, the same for every dtype and device."""
    spec = json.dumps(KVSpec.from_config(config).to_json(), sort_keys=True)
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None)
    rope = json.dumps(rope, sort_keys=True, default=str)
    return hash_weights(dict(model.named_parameters()), spec + rope)


def hash_weights(weights: Mapping[str, torch.Tensor], before: str = "") -> str:
    """SHA-256 (first 32 hex digits) of a text and of named weights.

    Samples up to 1,024 evenly spaced values of every tensor, rounded to bf16, so that it takes
    milliseconds and any fine-tune, merge or re-quantisation changes it.
    """
    digest = hashlib.sha256(before.encode())
    for name, tensor in sorted(weights.items()):
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 1024)][:1024].to("cpu", torch.bfloat16)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Fingerprint of how a tokenizer behaves: its size and what it makes of a probe text.

    A cache's identity also holds the hash of its own token ids; this one only keeps apart
    tokenizers whose ids happen to agree on one passage.
    """
    ids = tokenizer(_PROBE, add_special_tokens=False).input_ids
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return hash_ids([len(tokenizer), *(-1 if s is None else s for s in special), *ids])


def hash_ids(ids: Sequence[int]) -> str:
    """SHA-256 (first 32 hex digits) of a token id sequence."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:32]
