"""Name -> model and tokenizer on a device, in a dtype."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cag.errors import BadSetting, MissingWeights, UnsupportedModel
from cag.lm.counting import watch
from cag.lm.quiet import quiet_transformers
from cag.lm.spec import KVSpec, model_fingerprint, tokenizer_fingerprint


@dataclass
class LM:
    """A loaded language model and everything `cag` asks of one.

    Attributes
    ----------
    name
        How the user called it.
    model, tokenizer
        The transformers objects; the model is frozen and in eval mode.
    spec
        Geometry of its KV cache.
    fingerprint, tokenizer_fingerprint
        Identify the weights and the tokenizer in stored caches and translators.
    """

    name: str
    model: Any
    tokenizer: Any
    spec: KVSpec = field(init=False)
    fingerprint: str = field(init=False)
    tokenizer_fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)
        watch(self.body)
        self.spec = KVSpec.from_config(self.model.config)
        self.fingerprint = model_fingerprint(self.model, self.model.config)
        self.tokenizer_fingerprint = tokenizer_fingerprint(self.tokenizer)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def body(self) -> Any:
        """The model without its LM head."""
        return self.model.base_model

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and the character span each one covers."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded.input_ids), [tuple(span) for span in encoded.offset_mapping]


def load_lm(
    folder: str | Path, *, name: str | None = None, dtype: str = "auto", device: str = "auto"
) -> LM:
    """Load a model from a local folder; never downloads.

    Parameters
    ----------
    folder
        A transformers folder with safetensors weights.
    dtype
        ``"auto"`` (see `fastest_dtype`), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
    device
        ``"auto"`` takes CUDA where there is one.

    Raises
    ------
    UnsupportedModel
        If the architecture cannot work with `cag`.
    MissingWeights
        If the folder holds no readable model.
    BadSetting
        If the dtype is unknown, or the device is not there.
    """
    folder = Path(folder)
    device = device_named(device)
    torch_dtype = dtype_named(dtype, device)
    try:
        with quiet_transformers():
            KVSpec.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch_dtype, local_files_only=True, use_safetensors=True
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise MissingWeights(f"cannot load a model from '{folder}': {reason}") from error
    if not tokenizer.is_fast:
        raise UnsupportedModel(
            f"the tokenizer of '{folder}' reports no character offsets; "
            "a fast tokenizer (tokenizer.json) is needed"
        )
    return LM(name or folder.name, model.to(device), tokenizer)


def device_named(name: str) -> str:
    """The device of that name; ``"auto"`` takes CUDA where there is one.

    Raises
    ------
    BadSetting
        If there is no such device here.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise BadSetting(f"device '{name}' does not work here; use auto, cpu or cuda") from error
    return name


def dtype_named(name: str, device: str) -> torch.dtype:
    """The dtype of that name; ``"auto"`` is `fastest_dtype`.

    Raises
    ------
    BadSetting
        If it is none of those that models run in.
    """
    if name == "auto":
        return fastest_dtype(device)
    if name not in ("float32", "bfloat16", "float16"):
        raise BadSetting(f"unknown dtype '{name}'; use auto, float32, bfloat16 or float16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@functools.cache
def fastest_dtype(device: str) -> torch.dtype:
    """bf16 where the hardware multiplies it clearly faster, else fp32; measured once.

    CPUs differ by a factor of fifteen here: with AMX a bf16 product is several times faster
    than fp32, without it several times slower.
    """
    if not device.startswith("cpu"):
        return torch.bfloat16
    fp32, bf16 = (_matmul_seconds(dtype) for dtype in (torch.float32, torch.bfloat16))
    return torch.bfloat16 if bf16 < fp32 / 1.5 else torch.float32


def _matmul_seconds(dtype: torch.dtype) -> float:
    left, right = (torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    return best
