"""Gradient descent of a translator within a budget of minutes, resumable."""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor

from cag.translate.base import Translator
from cag.translate.checkpoint import Checkpoint, save_tensors
from cag.translate.pairs import shuffled, stored_pairs

if TYPE_CHECKING:
    from cag.translate.training import Trainer

TERMS = ("attention_kl", "output_error", "kv_error", "answer_kl", "answer_nll", "shift", "replay")


def descend(
    trainer: Trainer, translator: Translator, stage: str, minutes: float, rate: float
) -> None:
    """Descend the losses of ``matching`` or ``answers``; `translator` ends as their average.

    A file of the stage says that it is done; a checkpoint, written every two minutes, how far
    it is.
    """
    done = trainer.stages / f"{stage}.safetensors"
    if done.exists():
        translator.load_state_dict(load_file(done))
        return
    if minutes <= 0:
        return
    recipe, weights = trainer.recipe, list(trainer.recipe.matching)
    if stage == "answers":
        weights += [*recipe.answers, recipe.replay]
    optimizer = make_optimizer(translator, rate)
    averaged = {n: t.detach().clone() for n, t in translator.state_dict().items()}
    state = Checkpoint(trainer.stages / f"{stage}.checkpoint.safetensors")
    state.restore(translator, optimizer, averaged)
    chooser = random.Random(f"{recipe.seed}/{stage}/{state.step}")
    pairs = shuffled(stored_pairs(trainer.folder / "pairs"), chooser, trainer.target.device)
    started, last = time.monotonic() - state.seconds, time.monotonic()
    sums: list[list[float]] = []
    while (share := (time.monotonic() - started) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * schedule(share, state.step)
        optimizer.zero_grad(set_to_none=True)
        terms = trainer.losses(translator, [next(pairs) for _ in range(recipe.batch)], stage)
        (terms.mean(0) @ torch.tensor(weights, device=terms.device)).backward()
        torch.nn.utils.clip_grad_norm_(translator.parameters(), 1.0)
        optimizer.step()
        sums += terms.detach().tolist()
        state.step += 1
        decay = min(recipe.average, state.step / (state.step + 10))
        for name, tensor in translator.state_dict().items():
            averaged[name].lerp_(tensor, 1 - decay)
        if time.monotonic() - last > 120:
            state.seconds = time.monotonic() - started
            state.save(translator, optimizer, averaged)
            _log_curve(trainer, translator, averaged, stage, state, sums)
            sums, last = [], time.monotonic()
    translator.load_state_dict(averaged)
    save_tensors(translator.state_dict(), done)
    state.path.unlink(missing_ok=True)


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


def _log_curve(
    trainer: Trainer,
    translator: Translator,
    averaged: dict[str, Tensor],
    stage: str,
    state: Checkpoint,
    sums: list[list[float]],
) -> None:
    current = {n: t.detach().clone() for n, t in translator.state_dict().items()}
    translator.load_state_dict(averaged)
    measured = trainer.recovered(translator)
    translator.load_state_dict(current)
    columns = [sum(column) / len(column) for column in zip(*sums, strict=True)]
    trainer.log(
        {
            "stage": stage,
            "step": state.step,
            "minutes": round(state.seconds / 60, 1),
            **{n: round(c, 4) for n, c in zip(TERMS, columns, strict=False)},
            **{n: round(v, 4) for n, v in measured.items()},
        }
    )
