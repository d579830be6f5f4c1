"""Tiny random models of every family, and an engine over them. Nothing here needs a network."""

from __future__ import annotations

import functools
import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from cag.engine import CAG
from cag.lm.loading import LM
from cag.models import Models
from cag.settings import Settings
from cag.translate.base import TRANSLATORS, Translator, TranslatorConfig

torch.set_num_threads(1)

FAMILIES = ("llama", "gemma3_text", "qwen2", "gpt2", "opt")
TEXT = (
    "The harbour of Lindholm was built in 1874. Its lighthouse is painted red and white. "
    "Every spring the old railway carries visitors from the city to the northern coast. "
    "A small library keeps 3,200 books about ships, weather and the history of the islands. "
)


@functools.cache
def tiny_tokenizer(merges: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; another number of merges cuts text differently."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258 + merges,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def tiny_config(family: str, vocabulary: int) -> Any:
    """A config of about 50,000 parameters."""
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    grouped = {**shape, "intermediate_size": 48, "num_key_value_heads": 2}
    if family == "gpt2":
        return GPT2Config(
            vocab_size=vocabulary, n_embd=32, n_layer=4, n_head=4, n_positions=512,
            bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
    if family == "opt":
        return OPTConfig(**shape, ffn_dim=48, word_embed_proj_dim=32)
    if family == "gemma3_text":
        return Gemma3TextConfig(
            **grouped, head_dim=16, sliding_window=24, query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention",
                         "sliding_attention"],
        )  # fmt: skip
    kinds = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    extra = {"head_dim": 8} if family == "qwen3" else {}
    return kinds[family](**grouped, **extra)


def tiny_lm(family: str, merges: int = 60, seed: int = 0, **changes: Any) -> LM:
    """A tiny random model with a tokenizer."""
    tokenizer = tiny_tokenizer(merges)
    config = tiny_config(family, len(tokenizer))
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # the usual initialisation is too flat to notice a wrong position
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.25)
            elif "bias" in name:
                parameter.normal_(0.0, 0.1)
    return LM(f"tiny-{family}-{merges}", model, tokenizer)


@pytest.fixture(params=FAMILIES)
def lm(request: pytest.FixtureRequest) -> LM:
    return tiny_lm(request.param)


class WordEmbedder:
    """Embeds a text by its words; good enough to find a passage by its own words."""

    name, dimension = "words", 64

    def __call__(self, texts: Any) -> np.ndarray:
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().split():
                digest = hashlib.sha256(word.strip(".,?!").encode()).digest()
                vectors[row, digest[0] % self.dimension] += 1
        return vectors / np.maximum(1e-6, np.linalg.norm(vectors, axis=1, keepdims=True))


def tiny_models(
    settings: Settings, reference: str = "llama", target: str = "gemma3_text"
) -> Models:
    """Loaded tiny models under the names that the settings give."""
    loaded = Models(settings)
    for name, lm in (
        (settings.reference, tiny_lm(reference, 60)),
        (settings.target, tiny_lm(target, 20, seed=1)),
    ):
        lm.name = name
        loaded.add(lm)
    loaded._embedder = WordEmbedder()  # type: ignore[assignment]
    return loaded


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def engine(home: Path) -> Iterator[CAG]:
    settings = Settings(
        home=home, reference="ref", target="tgt", passage_tokens=48, max_tokens=6, k=2,
        dtype="float32", codec="fp32",
    )  # fmt: skip
    engine = CAG(settings, models=tiny_models(settings))
    yield engine
    engine.store.close()


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A folder with two small documents."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "harbour.md").write_text(f"# Harbour\n\n{TEXT}\n\n# Boats\n\nBoats are blue.\n")
    (folder / "tower.txt").write_text("The tower has nine bells. They ring at noon. " * 4)
    return folder


@pytest.fixture(autouse=True)
def no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests reach for no network; loopback is fine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> Any:
        host = address[0] if isinstance(address, tuple) else "localhost"
        if host not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test tried to reach {host}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


def flops_per_token(translator: Translator) -> float:
    """What one more token costs a translator of all reference layers, counted while it runs."""

    def flops(tokens: int) -> int:
        source = torch.randn(tokens, translator.config.source_size)
        anchors = torch.randn(tokens, translator.config.anchor_size)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            translator.expand(translator.compress(source), anchors)
        return int(counter.get_total_flops())

    return (flops(60) - flops(20)) / 40


@functools.cache
def random_pair() -> tuple[LM, LM]:
    """A tiny reference and a target with another tokenizer."""
    return tiny_lm("llama", 60), tiny_lm("gemma3_text", 20, seed=1)


def random_translator(
    kind: str = "ridge",
    target: LM | None = None,
    *,
    reference: LM | None = None,
    seed: int = 0,
    **changes: Any,
) -> Translator:
    """A small translator of random weights, between the models of `random_pair` or others."""
    usual = random_pair()
    reference, target = reference or usual[0], target or usual[1]
    config = TranslatorConfig(
        kind=kind,
        reference=reference.name,
        target=target.name,
        reference_fingerprint=reference.fingerprint,
        target_fingerprint=target.fingerprint,
        reference_spec=reference.spec.to_json(),
        target_spec=target.spec.to_json(),
        rank=8,
        key_rank=10,
        value_rank=6,
        experts=4 if kind == "mixture" else 0,
        hidden=5,
        key_norm=target.spec.family == "gemma3_text",
        **changes,
    )
    torch.manual_seed(seed)
    translator = TRANSLATORS[kind](config)
    for name, tensor in translator.state_dict().items():
        tensor.normal_(1.0 if name.endswith("_scale") else 0.0, 0.2)
    return translator.eval().requires_grad_(False)
