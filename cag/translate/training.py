"""Train a translator: closed form first, then attention matching, then end to end.

Every stage leaves a file in the run folder, so a run that is stopped goes on where it was.
What the models read lies apart and serves every pair and every kind of translator.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from cag.errors import ContextTooLong, TranslatorError
from cag.lm.anchor import lowest_layer, with_predecessors
from cag.lm.cache import KV
from cag.lm.loading import LM, fastest_dtype
from cag.lm.prompt import DEFAULT_TEMPLATE, Template
from cag.scoring import recovered_share
from cag.translate.base import (
    TRANSLATORS,
    Batch,
    Translator,
    with_lowest_layer,
)
from cag.translate.calibration import calibrate
from cag.translate.checkpoint import save_tensors
from cag.translate.config import Report, TranslatorConfig
from cag.translate.descent import curve, descend
from cag.translate.examples import Example
from cag.translate.losses import AttentionMatching, answer_loss, kv_error, outputs_of, replay_error
from cag.translate.mixture import Mixture
from cag.translate.pairs import Pair, PairCollector, PairFiles
from cag.translate.readings import digest
from cag.translate.recipe import Recipe

Log = Callable[[dict[str, Any]], None]
Edit = Callable[[KV, KV], KV]


@dataclass
class Trainer:
    """One training run of one ordered pair of models.

    Parameters
    ----------
    reference, target
        The models.
    folder
        Run folder: stages, checkpoints.
    examples, held_out
        Passages to train on, and to choose by; no passage may be in both.
    log
        Called with one plain dict per event.
    work
        Where stages lie, if not in `folder`: several recipes can share a run.
    readings
        Where what the models read is kept, if not in `folder`: several runs can share it.
    begin
        A translator to go on from, instead of the closed form; the recipe describes its parts.
    """

    reference: LM
    target: LM
    folder: Path
    examples: Sequence[Example]
    held_out: Sequence[Example]
    recipe: Recipe = field(default_factory=Recipe)
    template: Template = DEFAULT_TEMPLATE
    log: Log = lambda event: None
    work: Path | None = None
    readings: Path | None = None
    begin: Translator | None = None

    def __post_init__(self) -> None:
        overlap = {e.text for e in self.examples} & {e.text for e in self.held_out}
        if overlap:
            raise TranslatorError(
                f"{len(overlap)} held-out passages are also trained on; separate the data"
            )
        if self.recipe.kind not in TRANSLATORS:
            known = ", ".join(TRANSLATORS)
            raise TranslatorError(f"unknown kind '{self.recipe.kind}'; use one of: {known}")
        self._check_same_run()
        self.collector = PairCollector(
            self.reference, self.target, self.template, self.readings or self.folder / "readings"
        )
        self.pairs = [self.collector.files(example) for example in self.examples]
        self.held_out_pairs = [self.collector.files(example) for example in self.held_out]
        self.prefix = self.collector.prefix_kv
        self.matching = AttentionMatching(self.target, self.prefix)
        self._bounds: dict[PairFiles, tuple[float, float]] = {}
        self.half = fastest_dtype(str(self.target.device)) == torch.bfloat16

    def _check_same_run(self) -> None:
        """A folder resumes only the run it was made by."""
        run = {
            "reference": self.reference.fingerprint,
            "target": self.target.fingerprint,
            "dtypes": [str(self.reference.dtype), str(self.target.dtype)],
            "examples": digest([asdict(example) for example in self.examples]),
            "held_out": digest([asdict(example) for example in self.held_out]),
            "template": self.template.fingerprint,
            "seed": self.recipe.seed,
        }
        if self.begin is not None:
            run["begin"] = self.begin.fingerprint
        recipe = json.loads(json.dumps(asdict(self.recipe)))
        del recipe["at_once"]  # how much fits into memory changes nothing
        for path, described in (
            (self.folder / "run.json", run),
            (self.stages / "recipe.json", recipe),
        ):
            if path.exists() and json.loads(path.read_text()) != described:
                raise TranslatorError(
                    f"'{path.parent}' holds a run with other models, data or settings; move it "
                    "away or delete it to start anew"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(described, indent=1))

    @property
    def stages(self) -> Path:
        """Where the stages of this kind of translator lie."""
        return (self.work or self.folder) / self.recipe.kind

    # -- the stages ------------------------------------------------------------------------

    def run(self) -> Translator:
        """All stages in order; returns the finished translator."""
        torch.manual_seed(self.recipe.seed)
        self.collect()
        translator = self.start()
        recipe, share = self.recipe, self.recipe.matching_share
        descend(self, translator, "matching", recipe.minutes * share, recipe.matching_rate)
        descend(self, translator, "answers", recipe.minutes * (1 - share), recipe.answer_rate)
        measured = self.recovered(translator)
        self.log({"stage": "finished", **measured})
        translator.report.recovered = measured["recovered"]
        calibration = calibrate(translator, self.collector, self.held_out)
        self.log({"stage": "calibration", **asdict(calibration)})
        translator.report.details |= {
            "held_out": measured,
            "curve": curve(self),
            "recipe": json.loads(json.dumps(asdict(recipe))),
            "passages": len(self.examples),
            "held_out_passages": len(self.held_out),
        }
        translator.save(self.stages)
        return translator

    def collect(self) -> None:
        """Run both models over all passages; what is on disk already is kept."""
        total = len(self.pairs) + len(self.held_out_pairs)
        self.pairs = self._collect(self.examples, 0, total)
        self.held_out_pairs = self._collect(self.held_out, len(self.examples), total)

    def _collect(self, examples: Sequence[Example], before: int, total: int) -> list[PairFiles]:
        """Pairs of all examples but those that do not fit a model's window."""
        pairs = []
        for index, example in enumerate(examples, before):
            try:
                pairs.append(self.collector.collect(example))
            except ContextTooLong:
                self.log({"stage": "collect", "left out": example.text[:60], "why": "too long"})
            self.progress("collect", index, total)
        return pairs

    def start(self) -> Translator:
        """The translator that descent starts from: `begin`, or everything in closed form."""
        recipe = self.recipe
        if self.begin is not None:
            begun = copy.deepcopy(self.begin)
            begun.report = Report()
            return begun.to(self.target.device)
        if recipe.kind != "mixture":
            return self.fit(recipe.kind)
        ridge = self.fit("ridge")
        torch.manual_seed(recipe.seed)  # whether the ridge was fitted now or before
        mixture = Mixture.upgrade(
            ridge, recipe.experts, recipe.active, recipe.hidden, recipe.routing
        )
        return mixture.to(self.target.device)

    def fit(self, kind: str) -> Translator:
        """Fit a kind in closed form, or read what an earlier call fitted."""
        translator = self.empty(kind)
        folder = self.stages.parent / kind
        if _read_json(folder / "fitted.json") == self._fitted(translator):
            translator.load_state_dict(load_file(folder / "fitted.safetensors"))
            return translator
        translator.fit(self.batches, self.recipe.projection_passages)
        measured = self.recovered(translator)
        translator.report.recovered = measured["recovered"]
        translator.report.details |= {"passages": len(self.examples)}
        translator.save(folder)
        self.keep_fitted(translator)
        self.log({"stage": kind, **measured})
        return translator

    def keep_fitted(self, translator: Translator) -> None:
        """Save a closed form to where `fit` finds it."""
        folder = self.stages.parent / translator.config.kind
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fitted.json").unlink(missing_ok=True)
        save_tensors(translator.state_dict(), folder / "fitted.safetensors")
        (folder / "fitted.json").write_text(json.dumps(self._fitted(translator), indent=1))

    def _fitted(self, translator: Translator) -> dict[str, Any]:
        """What decides a closed form, besides the pairs."""
        passages = self.recipe.projection_passages
        return {"passages": passages, **json.loads(json.dumps(asdict(translator.config)))}

    def empty(self, kind: str) -> Translator:
        """An unfitted translator of that kind."""
        translator = TRANSLATORS[kind](self.config(kind)).to(self.target.device)
        if translator.config.key_norm:
            translator.norm_weight.copy_(_key_norm_weights(self.target))
        return translator

    def config(self, kind: str) -> TranslatorConfig:
        """The config of a translator of that kind by this recipe."""
        recipe = self.recipe
        layers = recipe.reference_layers
        return TranslatorConfig(
            kind=kind,
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
            hidden=0 if kind == "ridge" else recipe.hidden,
            reference_layers=None if layers is None else list(layers),
            key_norm=self.target.spec.family in ("gemma3_text", "qwen3"),
        )

    def batches(self, limit: int | None = None) -> Iterator[Batch]:
        """The training passages, sixteen at a time: large products are faster."""
        files = self.pairs
        if limit is not None and limit < len(files):
            files = random.Random(self.recipe.seed).sample(files, limit)
        for at in range(0, len(files), 16):
            pairs = [pair.load(self.target.device) for pair in files[at : at + 16]]
            yield Batch(
                source=torch.cat([p.source[p.alignment] for p in pairs]).float(),
                anchors=torch.cat([self._anchors(p) for p in pairs]),
                outputs=torch.cat([outputs_of(p.native) for p in pairs]),
                starts=_starts(pairs),
            )
            self.progress("fit", min(at + 16, len(files)) - 1, len(files), every=80)

    # -- translating stored pairs ----------------------------------------------------------

    def translate(self, translator: Translator, pairs: Sequence[Pair]) -> list[tuple[KV, Tensor]]:
        """Translated KV of stored pairs, each with its standardised form (T, 2, outputs)."""
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.half):
            latents = [translator.compress(p.source.float())[p.alignment] for p in pairs]
            anchors = torch.cat([self._anchors(p) for p in pairs])
            standardised = translator.predict(torch.cat(latents), anchors, _starts(pairs))
        keys, values = translator.finish(standardised.float())
        sizes = [len(pair.ids) for pair in pairs]
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

    def losses(self, translator: Translator, pairs: Sequence[Pair], stage: str) -> Tensor:
        """The terms that `stage` weighs, per pair: shape (B, 3) matching, (B, 7) end to end."""
        translated = self.translate(translator, pairs)
        rows = []
        for pair, (kv, standardised) in zip(pairs, translated, strict=True):
            nothing = kv.keys.new_zeros(())
            weighed = any(self.recipe.matching[:2])
            attention = self.matching(kv, pair) if weighed else (nothing, nothing)
            rows.append(torch.stack([*attention, kv_error(translator, standardised, pair)]))
        terms = torch.stack(rows)
        if stage == "answers":
            answers = answer_loss(self.target, self.prefix, [kv for kv, _ in translated], pairs)
            replayed = torch.stack(
                [self._replay_error(*t) for t in zip(translated, pairs, strict=True)]
            )
            terms = torch.cat([terms, answers, replayed[:, None]], dim=1)
        return terms

    def _replay_error(self, translated: tuple[KV, Tensor], pair: Pair) -> Tensor:
        if not self.recipe.replay:
            return translated[0].keys.new_zeros(())
        return replay_error(self.target, self.collector.start(), translated[0], pair)

    # -- measuring -------------------------------------------------------------------------

    @torch.no_grad()
    def recovered(
        self,
        translator: Translator,
        edit: Edit = lambda translated, native: translated,
    ) -> dict[str, float]:
        """Held-out answer NLL (nats per token): native, translated, without context.

        `edit` may put something of the native KV back before the translated one is read.
        """
        native, found, none = self.answer_nlls(translator, edit).mean(0).tolist()
        share = recovered_share(native, found, none)
        return {"native": native, "translated": found, "none": none, "recovered": share}

    @torch.no_grad()
    def answer_nlls(self, translator: Translator, edit: Edit) -> Tensor:
        """Per held-out passage the answer NLL native, translated, without context: (N, 3)."""
        self.measure_bounds()
        rows = []
        for files in self.held_out_pairs:
            pair = files.load(self.target.device)
            ((translated, _),) = self.translate(translator, [pair])
            best, worst = self._bounds[files]
            found = self._answer_nll(edit(translated, pair.native.to(torch.float32)), pair)
            rows.append([best, found, worst])
        return torch.tensor(rows)

    @torch.no_grad()
    def measure_bounds(self) -> None:
        """What held-out answers cost natively and without context, once for every translator."""
        for files in self.held_out_pairs:
            if files not in self._bounds:
                pair = files.load(self.target.device)
                native = self._answer_nll(pair.native.to(torch.float32), pair)
                self._bounds[files] = native, self._answer_nll(None, pair)

    def _answer_nll(self, kv: KV | None, pair: Pair) -> float:
        context = self.collector.start()
        if kv is not None:
            context.append(kv)
        logits = context.run(pair.suffix_ids[None], logits=0).logits[0]
        at = pair.answers.nonzero()[:, 0]
        found = logits[at].float().log_softmax(-1)
        return float(torch.nn.functional.nll_loss(found, pair.suffix_ids[at + 1]))

    def progress(self, stage: str, index: int, total: int, every: int = 50) -> None:
        """Log how far a stage is, now and then."""
        if (index + 1) % every == 0 or index + 1 == total:
            self.log({"stage": stage, "done": index + 1, "of": total})


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _starts(pairs: Sequence[Pair]) -> list[int]:
    return list(accumulate((len(pair.ids) for pair in pairs[:-1]), initial=0))


def _key_norm_weights(target: LM) -> Tensor:
    """What the target multiplies unit keys with, per layer above the lowest; (L-1, D)."""
    offset = 1.0 if target.spec.family == "gemma3_text" else 0.0
    layers = target.body.layers[1:]
    return torch.stack([layer.self_attn.k_norm.weight.float() + offset for layer in layers])
