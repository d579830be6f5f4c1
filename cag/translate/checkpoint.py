"""Where a gradient descent stands, on disk, so that a stopped run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cag.translate.base import Translator


@dataclass
class Checkpoint:
    """A checkpoint of one descent: weights, averages, optimiser moments, step, seconds."""

    path: Path
    step: int = 0
    seconds: float = 0.0

    def save(
        self, translator: Translator, optimizer: torch.optim.Optimizer, averaged: dict[str, Tensor]
    ) -> None:
        tensors = {f"weights/{n}": t for n, t in translator.state_dict().items()}
        tensors |= {f"averaged/{n}": t for n, t in averaged.items()}
        for index, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{index}/{n}": t for n, t in moments.items()}
        tensors["position"] = torch.tensor([self.step, self.seconds], dtype=torch.float64)
        save_tensors(tensors, self.path)

    def restore(
        self, translator: Translator, optimizer: torch.optim.Optimizer, averaged: dict[str, Tensor]
    ) -> None:
        if not self.path.exists():
            return
        tensors = load_file(self.path)
        self.step, self.seconds = int(tensors["position"][0]), float(tensors["position"][1])
        parts: dict[str, dict[str, Tensor]] = {"weights": {}, "averaged": {}, "optimizer": {}}
        for name, tensor in tensors.items():
            head, _, rest = name.partition("/")
            if rest:
                parts[head][rest] = tensor
        translator.load_state_dict(parts["weights"])
        for name, tensor in parts["averaged"].items():
            averaged[name].copy_(tensor)
        state = optimizer.state_dict()
        for name, tensor in parts["optimizer"].items():
            index, _, moment = name.partition("/")
            state["state"].setdefault(int(index), {})[moment] = tensor
        optimizer.load_state_dict(state)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors; the file appears only when it is complete."""
    temporary = path.with_suffix(".tmp")
    save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, temporary)
    temporary.replace(path)
