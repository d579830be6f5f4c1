"""Turn a GGUF file into an ordinary transformers folder, once.

A GGUF is convenient to ship and awkward to use: loading one takes transformers
about twenty seconds, and for Gemma 3 it rebuilds a wrong tokenizer. So the file is
converted a single time into ``model.safetensors`` + ``tokenizer.json``; afterwards
nothing in `cag` knows that a GGUF was ever involved.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cag.lm.quiet import quiet_transformers

_CONTROL = 3  # token types as llama.cpp numbers them
_NORMAL = 1


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Write ``folder`` with the model (bf16 safetensors) and tokenizer of a GGUF file.

    Parameters
    ----------
    gguf_path
        The GGUF file; Llama, Qwen2 and Gemma 3 architectures are known to work.
    folder
        Destination; appears only when it is complete.
    """
    staging = folder.with_name(folder.name + ".converting")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    # transformers draws a bar of its own here that no setting turns off
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        _convert_tokenizer(gguf_path).save_pretrained(staging)
        _convert_weights(gguf_path, staging)
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)


def _convert_weights(gguf_path: Path, folder: Path) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32
    )
    # A GGUF-loaded model refuses save_pretrained; a fresh one with the same state does not.
    with torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.bfloat16)
    fresh.load_state_dict(loaded.to(torch.bfloat16).state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = loaded.generation_config
    fresh.save_pretrained(folder)


def _convert_tokenizer(gguf_path: Path) -> Any:
    fields = _tokenizer_fields(gguf_path)
    if fields["model"] == "llama":
        return _sentencepiece_bpe(fields)
    return AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)


def _tokenizer_fields(gguf_path: Path) -> dict[str, Any]:
    from gguf import GGUFReader  # imported here: only a conversion needs it

    reader = GGUFReader(gguf_path)
    prefix = "tokenizer.ggml."
    wanted = (
        "model",
        "tokens",
        "scores",
        "token_type",
        "bos_token_id",
        "eos_token_id",
        "unknown_token_id",
        "padding_token_id",
        "add_bos_token",
    )
    return {
        name: reader.fields[prefix + name].contents()
        for name in wanted
        if prefix + name in reader.fields
    }


def _sentencepiece_bpe(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Rebuild a SentencePiece-BPE tokenizer (Gemma) from a GGUF's tokens and scores.

    The file holds no merge list. SentencePiece merges the pair whose result has the best
    score, so every split of every token into two known tokens is a merge, ranked by the
    score of the whole.
    """
    tokens, scores, types = fields["tokens"], fields["scores"], fields["token_type"]
    vocab = {token: index for index, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for index, token in enumerate(tokens):
        if types[index] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], index, vocab[left], vocab[right], left, right))
    ranked.sort()
    unk, bos, eos, pad = (
        tokens[fields[name]]
        for name in ("unknown_token_id", "bos_token_id", "eos_token_id", "padding_token_id")
    )
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for *_, left, right in ranked],
            unk_token=unk,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for index, token in enumerate(tokens)
            if types[index] == _CONTROL
        ]
    )
    if fields.get("add_bos_token", False):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocab[bos])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        unk_token=unk,
        clean_up_tokenization_spaces=False,
    )
