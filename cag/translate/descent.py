"""Gradient descent of a translator within a budget of minutes, resumable."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from cag import lines
from cag.translate.base import Translator
from cag.translate.checkpoint import Checkpoint, save_tensors
from cag.translate.pairs import shuffled

if TYPE_CHECKING:
    from cag.translate.training import Trainer

TERMS = ("attention_kl", "output_error", "kv_error", "answer_kl", "answer_nll", "shift", "replay")
_PERIOD = 120.0  # seconds between two measurements, or more where they take long


def descend(
    trainer: Trainer, translator: Translator, stage: str, minutes: float, rate: float
) -> None:
    """Descend the losses of ``matching`` or ``answers``.

    `translator` ends as the average of its weights that did best on held-out passages, which
    may be what it began as. The descent ends early when it did no better for `Recipe.patience`
    measurements. A file of the stage says that it is done; a checkpoint, written at every
    measurement, how far it is.
    """
    done = trainer.stages / f"{stage}.safetensors"
    if done.exists():
        translator.load_state_dict(load_file(done))
        return
    if minutes <= 0:
        return
    recipe = trainer.recipe
    optimizer = make_optimizer(translator, rate)
    averaged = {n: t.detach().clone() for n, t in translator.state_dict().items()}
    state = Checkpoint(trainer.stages / f"{stage}.checkpoint.safetensors")
    state.restore(translator, optimizer, averaged)
    trainer.measure_bounds()  # or the first measurement would seem to be a slow one
    best = _Best(trainer, stage)
    if best.stale is None:
        best.measure(translator, averaged, state, [])
    chooser = random.Random(f"{recipe.seed}/{stage}/{state.step}")
    pairs = shuffled(trainer.pairs, chooser, trainer.target.device)
    started, last = time.monotonic() - state.seconds, time.monotonic()
    sums: list[list[float]] = []
    while (share := (time.monotonic() - started) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * schedule(share, state.step)
        batch = [next(pairs) for _ in range(recipe.batch)]
        sums += _step(trainer, translator, optimizer, batch, stage)
        state.step += 1
        decay = min(recipe.average, state.step / (state.step + 10))
        for name, tensor in translator.state_dict().items():
            averaged[name].lerp_(tensor, 1 - decay)
        if time.monotonic() - last > max(_PERIOD, 8 * best.seconds):
            state.seconds = time.monotonic() - started
            state.save(translator, optimizer, averaged)
            best.measure(translator, averaged, state, sums)
            sums, last = [], time.monotonic()
            if best.stale is not None and best.stale >= recipe.patience:
                break
    state.seconds = time.monotonic() - started
    if sums:
        best.measure(translator, averaged, state, sums)
    translator.load_state_dict(best.weights(averaged))
    save_tensors(translator.state_dict(), done)
    state.path.unlink(missing_ok=True)
    best.path.unlink(missing_ok=True)


def _step(
    trainer: Trainer,
    translator: Translator,
    optimizer: torch.optim.Optimizer,
    batch: list[Any],
    stage: str,
) -> list[list[float]]:
    """One step; passages go through the target `Recipe.at_once` at a time, to save memory."""
    recipe = trainer.recipe
    weights = [*recipe.matching]
    if stage == "answers":
        weights += [*recipe.answers, recipe.replay]
    optimizer.zero_grad(set_to_none=True)
    rows: list[list[float]] = []
    for at in range(0, len(batch), recipe.at_once):
        terms = trainer.losses(translator, batch[at : at + recipe.at_once], stage)
        loss = terms.sum(0) @ torch.tensor(weights, device=terms.device)
        (loss / len(batch)).backward()
        rows += terms.detach().tolist()
    torch.nn.utils.clip_grad_norm_(translator.parameters(), 1.0)
    optimizer.step()
    return rows


def make_optimizer(translator: Translator, rate: float) -> torch.optim.Optimizer:
    """AdamW; what the closed form found moves at a fifth of the rate."""
    gentle: list[Tensor] = []
    free: list[Tensor] = []
    for name, parameter in translator.named_parameters():
        parameter.requires_grad_(name not in translator.frozen)
        if parameter.requires_grad:
            (gentle if name in translator.closed_form else free).append(parameter)
    groups = [{"params": gentle, "peak": rate / 5}, {"params": free, "peak": rate}]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)


def schedule(share: float, step: int) -> float:
    """Warm-up over 30 steps, then a cosine down to a twentieth."""
    return min(1.0, (step + 1) / 30) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))


def curve(trainer: Trainer) -> list[dict[str, Any]]:
    """Every measurement of both descents, in order."""
    return list(lines.read(_curve(trainer)))


def _curve(trainer: Trainer) -> Path:
    return trainer.stages / "curve.jsonl"


class _Best:
    """Measures averaged weights on held-out passages and keeps the best of a stage on disk."""

    def __init__(self, trainer: Trainer, stage: str) -> None:
        self._trainer, self._stage = trainer, stage
        self.path = trainer.stages / f"{stage}.best.safetensors"
        found = [row["translated"] for row in curve(trainer) if row["stage"] == stage]
        self._nll = min(found, default=math.inf)
        #: Measurements since the best one; None before the first.
        self.stale = len(found) - 1 - found.index(self._nll) if found else None
        self.seconds = 0.0  # what a measurement takes

    def measure(
        self,
        translator: Translator,
        averaged: dict[str, Tensor],
        state: Checkpoint,
        sums: list[list[float]],
    ) -> None:
        """Measure, log, and keep the weights if they are the best so far."""
        started = time.monotonic()
        current = {n: t.detach().clone() for n, t in translator.state_dict().items()}
        translator.load_state_dict(averaged)
        measured = self._trainer.recovered(translator)
        translator.load_state_dict(current)
        self.stale = 0 if self.stale is None else self.stale + 1
        if measured["translated"] < self._nll:
            self._nll, self.stale = measured["translated"], 0
            save_tensors(averaged, self.path)
        columns = [sum(column) / len(column) for column in zip(*sums, strict=True)]
        row = {
            "stage": self._stage,
            "step": state.step,
            "minutes": round(state.seconds / 60, 1),
            **{n: round(c, 4) for n, c in zip(TERMS, columns, strict=False)},
            **{n: round(v, 4) for n, v in measured.items()},
        }
        lines.append(_curve(self._trainer), row)
        self._trainer.log(row)
        self.seconds = time.monotonic() - started

    def weights(self, averaged: dict[str, Tensor]) -> dict[str, Tensor]:
        """The best weights measured."""
        return load_file(self.path) if self.path.exists() else averaged
