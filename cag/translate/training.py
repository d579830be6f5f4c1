"""Train a translator: closed form first, then attention matching, then end to end.

Every stage leaves a file in the run folder, so a run that is stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from cag.align import align
from cag.errors import TranslatorError
from cag.lm.anchor import lowest_layer, with_predecessors
from cag.lm.cache import KV, Context
from cag.lm.loading import LM, fastest_dtype
from cag.lm.prompt import DEFAULT_TEMPLATE, Template
from cag.translate.base import TranslatorConfig, flatten, with_lowest_layer
from cag.translate.checkpoint import Checkpoint, save_tensors
from cag.translate.examples import Example
from cag.translate.losses import AttentionMatching, answer_loss
from cag.translate.mixture import Mixture
from cag.translate.pairs import Pair, PairCollector, shuffled, stored_pairs
from cag.translate.ridge import Moments, Ridge

Log = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training run does.

    Attributes
    ----------
    minutes
        Wall-clock budget of the gradient stages together.
    projection_passages
        How many passages the shared latent is fitted on.
    matching_share
        Share of `minutes` spent on attention matching; the rest goes end to end.
    batch
        Passages per step.
    matching_rate, answer_rate
        Peak learning rates of the two stages; the closed-form maps get a fifth.
    average
        Decay of the exponential moving average of the weights that is kept.
    """

    rank: int = 512
    key_rank: int = 768
    value_rank: int = 512
    predecessors: int = 3
    experts: int = 4
    active: int = 2
    hidden: int = 96
    projection_passages: int = 400
    minutes: float = 35.0
    matching_share: float = 0.3
    batch: int = 4
    matching_rate: float = 3e-4
    answer_rate: float = 6e-5
    average: float = 0.98
    seed: int = 0


@dataclass
class Trainer:
    """One training run of one ordered pair of models.

    Parameters
    ----------
    reference, target
        The models.
    folder
        Run folder: pairs, stages, checkpoints and the log.
    examples, held_out
        Passages to train on, and to choose by; no passage may be in both.
    log
        Called with one plain dict per event.
    """

    reference: LM
    target: LM
    folder: Path
    examples: Sequence[Example]
    held_out: Sequence[Example]
    recipe: Recipe = field(default_factory=Recipe)
    template: Template = DEFAULT_TEMPLATE
    log: Log = lambda event: None

    def __post_init__(self) -> None:
        overlap = {e.text for e in self.examples} & {e.text for e in self.held_out}
        if overlap:
            raise TranslatorError(
                f"{len(overlap)} held-out passages are also trained on; separate the data"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_same_run()
        self.collector = PairCollector(self.reference, self.target, self.template)
        self._prefix = self.collector.prefix_kv
        self.matching = AttentionMatching(self.target, self._prefix)
        self._start = self.collector._target_start
        self._half = fastest_dtype(str(self.target.device)) == torch.bfloat16

    def _check_same_run(self) -> None:
        """A folder resumes only the run it was made by."""
        described = {
            "reference": self.reference.fingerprint,
            "target": self.target.fingerprint,
            "examples": _digest(self.examples),
            "held_out": _digest(self.held_out),
            "template": self.template.fingerprint,
            "recipe": asdict(self.recipe),
        }
        path = self.folder / "run.json"
        if path.exists() and json.loads(path.read_text()) != described:
            raise TranslatorError(
                f"'{self.folder}' holds a run with other models, data or settings; move it away or "
                "delete it to start anew"
            )
        path.write_text(json.dumps(described, indent=1))

    # -- the stages ------------------------------------------------------------------------

    def run(self) -> Mixture:
        """All stages in order; returns the finished translator."""
        torch.manual_seed(self.recipe.seed)
        ridge = self.fit()
        mixture = Mixture.upgrade(
            ridge, self.recipe.experts, self.recipe.active, self.recipe.hidden
        ).to(self.target.device)
        minutes = self.recipe.minutes
        share = self.recipe.matching_share
        self._descend(mixture, "matching", minutes * share, self.recipe.matching_rate)
        before = self.recovered(mixture)
        kept = {name: tensor.clone() for name, tensor in mixture.state_dict().items()}
        self._descend(mixture, "answers", minutes * (1 - share), self.recipe.answer_rate)
        after = self.recovered(mixture)
        self.log({"stage": "answers", "recovered_before": before, "recovered_after": after})
        if after["translated"] > before["translated"]:  # end to end must earn its place
            mixture.load_state_dict(kept)
            after = before
        mixture.report.recovered = after["recovered"]
        mixture.report.details |= {"held_out": after, "recipe": asdict(self.recipe)}
        return mixture

    def fit(self) -> Ridge:
        """Collect pairs and fit the ridge in closed form."""
        path = self.folder / "ridge.safetensors"
        ridge = Ridge(self._config()).to(self.target.device)
        if path.exists():
            ridge.load_state_dict(load_file(path))
            return ridge
        if self.target.spec.family in ("gemma3_text", "qwen3"):
            ridge.norm_weight.copy_(_key_norm_weights(self.target))
        projection = self.folder / "projection.safetensors"
        if projection.exists():
            ridge.load_state_dict(load_file(projection))
        else:
            self._fit_projection(ridge)
            save_tensors(ridge.state_dict(), projection)
        self._collect(ridge, self.examples, self.folder / "pairs", self.recipe.seed)
        self._collect(ridge, self.held_out, self.folder / "held_out", self.recipe.seed + 1)
        self._fit_output(ridge)
        measured = self.recovered(ridge)
        ridge.report.recovered = measured["recovered"]
        ridge.save(self.folder / "ridge")
        save_tensors(ridge.state_dict(), path)
        self.log({"stage": "ridge", **measured})
        return ridge

    def _config(self) -> TranslatorConfig:
        recipe = self.recipe
        return TranslatorConfig(
            kind="ridge",
            reference=self.reference.name,
            target=self.target.name,
            reference_fingerprint=self.reference.fingerprint,
            target_fingerprint=self.target.fingerprint,
            reference_spec=self.reference.spec.to_json(),
            target_spec=self.target.spec.to_json(),
            rank=recipe.rank,
            key_rank=recipe.key_rank,
            value_rank=recipe.value_rank,
            predecessors=recipe.predecessors,
            key_norm=self.target.spec.family in ("gemma3_text", "qwen3"),
        )

    def _fit_projection(self, ridge: Ridge) -> None:
        config = ridge.config
        outputs = 2 * math.prod(config.output_shape)
        moments = Moments(config.source_size + config.target_spec["hidden_size"], outputs)
        chosen = random.Random(self.recipe.seed).sample(
            self.examples, min(self.recipe.projection_passages, len(self.examples))
        )
        for index, example in enumerate(chosen):
            text = self.collector.trim(example.text)
            source, spans = self.collector.source(text)
            ids, native = self.collector.native(text)
            alignment = align(spans, self.target.encode_with_offsets(text)[1])
            anchors = with_predecessors(self.target, ids, [], 0)
            inputs = torch.cat([flatten(source).float()[alignment], anchors.float()], -1)
            moments.add(inputs, _outputs(native))
            self._progress("projection", index, len(chosen))
        ridge.fit_projection(moments)

    def _collect(self, ridge: Ridge, examples: Sequence[Example], folder: Path, seed: int) -> None:
        folder.mkdir(exist_ok=True)
        for index, example in enumerate(examples):
            path = folder / f"{index:06d}.safetensors"
            if path.exists():
                continue
            pair, source = self.collector.collect(example, random.Random(f"{seed}/{index}"))
            pair.latents = ridge.compress(flatten(source).float()).detach().bfloat16().cpu()
            pair.save(path)
            self._progress("collect", index, len(examples))

    def _fit_output(self, ridge: Ridge) -> None:
        config = ridge.config
        outputs = 2 * math.prod(config.output_shape)
        moments = Moments(2 * config.rank + config.anchor_size, outputs)
        paths = stored_pairs(self.folder / "pairs")
        held: list[tuple[Tensor, Tensor]] = []
        for index, path in enumerate(paths):
            pair = Pair.load(path, self.target.device)
            features = ridge.features(pair.latents.float()[pair.alignment], self._anchors(pair))
            held.append((features.detach(), _outputs(pair.native)))
            if len(held) == 16 or index + 1 == len(paths):  # large products are faster
                moments.add(*(torch.cat(side) for side in zip(*held, strict=True)))
                held.clear()
            self._progress("ridge", index, len(paths))
        ridge.fit_output(moments)

    # -- gradient descent ------------------------------------------------------------------

    def _descend(self, mixture: Mixture, stage: str, minutes: float, rate: float) -> None:
        done = self.folder / f"{stage}.safetensors"
        if done.exists():
            mixture.load_state_dict(load_file(done))
            return
        if minutes <= 0:
            return
        optimizer = _optimizer(mixture, rate)
        averaged = {n: t.detach().clone() for n, t in mixture.state_dict().items()}
        state = Checkpoint(self.folder / f"{stage}.checkpoint.safetensors")
        state.restore(mixture, optimizer, averaged)
        chooser = random.Random(f"{self.recipe.seed}/{stage}/{state.step}")
        pairs = shuffled(stored_pairs(self.folder / "pairs"), chooser, self.target.device)
        started, last = time.monotonic() - state.seconds, time.monotonic()
        sums: list[list[float]] = []
        while (share := (time.monotonic() - started) / (60 * minutes)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * _schedule(share, state.step)
            sums += self._step(mixture, optimizer, pairs, stage)
            state.step += 1
            decay = min(self.recipe.average, state.step / (state.step + 10))
            for name, tensor in mixture.state_dict().items():
                averaged[name].lerp_(tensor, 1 - decay)
            if time.monotonic() - last > 120:
                state.seconds = time.monotonic() - started
                state.save(mixture, optimizer, averaged)
                self._log_curve(mixture, averaged, stage, state, sums)
                sums, last = [], time.monotonic()
        mixture.load_state_dict(averaged)
        save_tensors(mixture.state_dict(), done)
        state.path.unlink(missing_ok=True)

    def _step(
        self, mixture: Mixture, optimizer: torch.optim.Optimizer, pairs: Iterator[Pair], stage: str
    ) -> list[list[float]]:
        optimizer.zero_grad(set_to_none=True)
        batch = [next(pairs) for _ in range(self.recipe.batch)]
        translated = self.translate(mixture, batch)
        terms = torch.stack(
            [
                torch.stack([*self.matching(kv, pair), _kv_error(mixture, standardised, pair)])
                for pair, (kv, standardised) in zip(batch, translated, strict=True)
            ]
        )
        weights = [1.0, 1.0, 0.2]
        if stage == "answers":
            answers = answer_loss(self.target, self._prefix, [kv for kv, _ in translated], batch)
            terms = torch.cat([terms, answers], dim=1)
            weights += [1.0, 0.3, 0.5]
        (terms.mean(0) @ torch.tensor(weights, device=terms.device)).backward()
        torch.nn.utils.clip_grad_norm_(mixture.parameters(), 1.0)
        optimizer.step()
        return terms.detach().tolist()

    def translate(self, translator: Ridge, pairs: Sequence[Pair]) -> list[tuple[KV, Tensor]]:
        """Translated KV of stored pairs, each with its standardised form (T, 2, outputs)."""
        sizes = [len(pair.ids) for pair in pairs]
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self._half):
            features = torch.cat(
                [
                    translator.features(p.latents.float()[p.alignment], self._anchors(p))
                    for p in pairs
                ]
            )
            standardised = translator.predict(features)
        keys, values = translator.finish(standardised.float())
        start = len(self.collector.prefix)
        result = []
        for pair, k, v, s in zip(
            pairs, keys.split(sizes), values.split(sizes), standardised.split(sizes), strict=True
        ):
            lowest = lowest_layer(self.target, pair.ids.tolist(), start).to(torch.float32)
            result.append((with_lowest_layer(k, v, lowest), s))
        return result

    def _anchors(self, pair: Pair) -> Tensor:
        ids, count = pair.ids.tolist(), self.recipe.predecessors
        return with_predecessors(self.target, ids, self.collector.prefix, count)

    # -- measuring -------------------------------------------------------------------------

    @torch.no_grad()
    def recovered(self, translator: Ridge, limit: int = 48) -> dict[str, float]:
        """Held-out answer NLL (nats per token): native, translated, without context."""
        totals = torch.zeros(3)
        paths = stored_pairs(self.folder / "held_out")[:limit]
        for path in paths:
            pair = Pair.load(path, self.target.device)
            ((translated, _),) = self.translate(translator, [pair])
            totals += torch.tensor(
                [
                    self._answer_nll(pair.native.to(torch.float32), pair),
                    self._answer_nll(translated, pair),
                    self._answer_nll(None, pair),
                ]
            )
        native, found, none = (totals / len(paths)).tolist()
        return {
            "native": native,
            "translated": found,
            "none": none,
            "recovered": (none - found) / ((none - native) or 1e-6),
        }

    def _answer_nll(self, kv: KV | None, pair: Pair) -> float:
        context: Context = self._start.fork()
        if kv is not None:
            context.append(kv)
        logits = context.run(pair.suffix_ids[None], logits=0).logits[0]
        at = pair.answers.nonzero()[:, 0]
        found = logits[at].float().log_softmax(-1)
        return float(torch.nn.functional.nll_loss(found, pair.suffix_ids[at + 1]))

    def _log_curve(
        self,
        mixture: Mixture,
        averaged: dict[str, Tensor],
        stage: str,
        state: Checkpoint,
        sums: list[list[float]],
    ) -> None:
        current = {n: t.detach().clone() for n, t in mixture.state_dict().items()}
        mixture.load_state_dict(averaged)
        measured = self.recovered(mixture)
        mixture.load_state_dict(current)
        names = ("attention_kl", "output_error", "kv_error", "answer_kl", "answer_nll", "shift")
        columns = [sum(column) / len(column) for column in zip(*sums, strict=True)]
        self.log(
            {
                "stage": stage,
                "step": state.step,
                "minutes": round(state.seconds / 60, 1),
                **{n: round(c, 4) for n, c in zip(names, columns, strict=False)},
                **{n: round(v, 4) for n, v in measured.items()},
            }
        )

    def _progress(self, stage: str, index: int, total: int) -> None:
        if (index + 1) % 50 == 0 or index + 1 == total:
            self.log({"stage": stage, "done": index + 1, "of": total})


def _digest(examples: Sequence[Example]) -> str:
    text = json.dumps([asdict(example) for example in examples], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _optimizer(mixture: Mixture, rate: float) -> torch.optim.Optimizer:
    mixture.project.requires_grad_(False)  # the pairs on disk are its outputs
    gentle: list[Tensor] = []
    free: list[Tensor] = []
    for name, parameter in mixture.named_parameters():
        if parameter.requires_grad:
            (gentle if name in ("down", "key_up", "value_up") else free).append(parameter)
    groups = [{"params": gentle, "peak": rate / 5}, {"params": free, "peak": rate}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)


def _schedule(share: float, step: int) -> float:
    """Warm-up over 30 steps, then a cosine down to a twentieth."""
    return min(1.0, (step + 1) / 30) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))


def _outputs(native: KV) -> Tensor:
    """All keys, then all values of layers above the lowest: (T, 2 * (L-1) * H * D)."""
    both = torch.stack([native.keys[1:], native.values[1:]]).float()  # (2, L-1, H, T, D)
    return both.permute(3, 0, 1, 2, 4).flatten(1)


def _kv_error(translator: Ridge, standardised: Tensor, pair: Pair) -> Tensor:
    wanted = _outputs(pair.native).unflatten(-1, (2, -1))
    wanted = (wanted - translator.output_mean) / translator.output_scale
    return torch.nn.functional.smooth_l1_loss(standardised.float(), wanted)


def _key_norm_weights(target: LM) -> Tensor:
    """What the target multiplies unit keys with, per layer above the lowest; (L-1, D)."""
    offset = 1.0 if target.spec.family == "gemma3_text" else 0.0
    layers = target.body.layers[1:]
    return torch.stack([layer.self_attn.k_norm.weight.float() + offset for layer in layers])
