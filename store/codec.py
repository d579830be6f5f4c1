"""How tensors lie on disk. A new codec is one class and one line in `CODECS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from store.errors import NotFinite, StoreError

Tensors = dict[str, Tensor]


class Codec(ABC):
    """Turns named float tensors into named tensors to store, and back."""

    name: str

    def encode(self, tensors: Tensors) -> Tensors:
        """Tensors to write.

        Raises
        ------
        NotFinite
            If a value is NaN or infinite: storing it would only hide where it came from.
        """
        encoded: Tensors = {}
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise NotFinite(f"'{name}' holds NaN or infinity; check the model's dtype")
            encoded |= {f"{name}{end}": t.contiguous() for end, t in self._encode(tensor).items()}
        return encoded

    def decode(self, encoded: Tensors, dtype: torch.dtype | None = None) -> Tensors:
        """The tensors that were encoded, in `dtype` (None: as the codec gives them)."""
        names = sorted({name.partition(".")[0] for name in encoded})
        tensors = {}
        for name in names:
            parts = {
                "." + key.partition(".")[2] if "." in key else "": tensor
                for key, tensor in encoded.items()
                if key.partition(".")[0] == name
            }
            decoded = self._decode(parts)
            tensors[name] = decoded if dtype is None else decoded.to(dtype)
        return tensors

    @abstractmethod
    def _encode(self, tensor: Tensor) -> Tensors:
        """Parts of one tensor by name ending: "" or ".something"."""

    @abstractmethod
    def _decode(self, parts: Tensors) -> Tensor:
        """The tensor from its parts."""


@dataclass(frozen=True)
class Raw(Codec):
    """Plain numbers of one dtype."""

    name: str
    dtype: torch.dtype

    def _encode(self, tensor: Tensor) -> Tensors:
        return {"": tensor.to(self.dtype)}

    def _decode(self, parts: Tensors) -> Tensor:
        return parts[""]


@dataclass(frozen=True)
class Integer(Codec):
    """Symmetric integers with one scale per run of `group` numbers of the last dimension.

    Parameters
    ----------
    bits
        8, or 4 with two numbers in a byte.
    group
        Numbers per scale; a shorter last dimension is one group.
    """

    name: str
    bits: int
    group: int

    def _encode(self, tensor: Tensor) -> Tensors:
        limit = 2 ** (self.bits - 1) - 1
        groups = _grouped(tensor.float(), self.group)
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / limit
        scale = scale.to(torch.float32)
        numbers = (groups / scale).round().clamp(-limit, limit).to(torch.int8).flatten(-2)
        if self.bits == 4:
            low, high = numbers[..., 0::2] & 15, numbers[..., 1::2] & 15
            numbers = low | (high << 4)
        size = torch.tensor(tensor.shape[-1])
        return {".numbers": numbers, ".scale": scale.squeeze(-1), ".size": size}

    def _decode(self, parts: Tensors) -> Tensor:
        numbers, scale = parts[".numbers"], parts[".scale"]
        if self.bits == 4:
            low, high = (numbers << 4) >> 4, numbers >> 4  # arithmetic shifts keep the sign
            numbers = torch.stack([low, high], dim=-1).flatten(-2)
        groups = numbers.unflatten(-1, (scale.shape[-1], -1)).float() * scale[..., None]
        return groups.flatten(-2)[..., : int(parts[".size"])]


def _grouped(tensor: Tensor, group: int) -> Tensor:
    size = tensor.shape[-1]
    group = min(group, size + size % 2)
    padded = torch.nn.functional.pad(tensor, (0, -size % group))
    return padded.unflatten(-1, (-1, group))


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Raw("fp32", torch.float32),
        Raw("bf16", torch.bfloat16),
        Integer("int8", bits=8, group=64),
        Integer("int4", bits=4, group=32),
    )
}


def get_codec(name: str) -> Codec:
    """The codec of that name.

    Raises
    ------
    StoreError
        Listing the known ones.
    """
    if name not in CODECS:
        raise StoreError(f"unknown codec '{name}'; use one of: {', '.join(CODECS)}")
    return CODECS[name]
