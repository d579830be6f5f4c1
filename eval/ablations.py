"""Ablations: one change to the recipe at a time, measured on held-out passages.

All variants read the same collected pairs, and start from closed forms that are solved from
the same moments wherever the change allows it. What is measured is the answer NLL on the
held-out passages of the *choose* split; report splits play no part.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cag import lines
from cag.lm.cache import KV
from cag.scoring import recovered_share
from cag.translate.base import Translator
from cag.translate.config import spread
from cag.translate.moments import Moments
from cag.translate.recipe import Recipe
from cag.translate.ridge import Ridge
from cag.translate.training import Edit, Trainer
from eval.metrics import bootstrap


def unchanged(translated: KV, native: KV) -> KV:
    """Read the translated KV as it is."""
    return translated


def native_keys(translated: KV, native: KV) -> KV:
    """Native keys, translated values."""
    return KV(native.keys, translated.values)


def native_values(translated: KV, native: KV) -> KV:
    """Translated keys, native values."""
    return KV(translated.keys, native.values)


def native_below(boundary: int) -> Edit:
    """The lowest layers run natively over the passage."""
    return lambda translated, native: translated.above(boundary, native)


@dataclass(frozen=True)
class Variant:
    """One row of the table.

    Attributes
    ----------
    group, name
        What is varied, and to what.
    changes
        Fields of the recipe.
    descends
        Runs the gradient stages too; the others are closed form only.
    edit
        What is put back natively before the result is read.
    """

    group: str
    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    descends: bool = False
    edit: Edit = unchanged


def variants(layers: int, recipe: Recipe) -> list[Variant]:
    """All variants of a recipe, for a reference of so many layers."""
    closed = [
        Variant("closed form", "default"),
        *(
            Variant("anchor", name, {"predecessors": count})
            for name, count in {
                "none": -1, "embedding": 0, "and 1 before": 1, "and 3 before": 3,
                "and 7 before": 7,
            }.items()
        ),
        *(Variant("anchor", f"lowest {n} layers native", {}, edit=native_below(n)) for n in (3, 6)),
        *(
            Variant("reference layers", str(count), {"reference_layers": spread(layers, count)})
            for count in (1, 3, 7)
        ),
        Variant("reference layers", "all"),
        *(Variant("rank", name, scaled(recipe, factor)) for name, factor in RANKS.items()),
        Variant("keys and values", "both translated"),
        Variant("keys and values", "keys only, values native", edit=native_values),
        Variant("keys and values", "values only, keys native", edit=native_keys),
    ]  # fmt: skip
    sizes = {
        n: {"experts": n, "active": min(2, n), "hidden": 192 // min(2, n)} for n in (1, 2, 4, 8)
    }
    descending = [
        *(Variant("experts", str(n), sizes[n], True) for n in sizes),
        *(Variant("routing", name, {"routing": name}, True) for name in ("learned", "random")),
        Variant("routing", "uniform", {"routing": "uniform", "hidden": 48}, True),
        *(Variant("correction", name, changes, True) for name, changes in CORRECTIONS.items()),
    ]
    return closed + descending


#: How the ranks of latent, key map and value map are multiplied.
RANKS = {"a quarter": 0.25, "half": 0.5, "default": 1.0, "double": 2.0}


def scaled(recipe: Recipe, factor: float) -> dict[str, Any]:
    """All three ranks times `factor`."""
    names = ("rank", "key_rank", "value_rank")
    return {name: int(getattr(recipe, name) * factor) for name in names}


#: Forms of the Context Correction Loss, from nothing but the suffix's cross-entropy upwards.
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none: suffix NLL only": {
        "matching_share": 0.0, "matching": (0.0, 0.0, 0.0), "answers": (0.0, 1.0, 0.0),
    },
    "KV error only": {"matching_share": 1.0, "matching": (0.0, 0.0, 1.0)},
    "attention matching only": {"matching_share": 1.0},
    "replayed trajectory (paper)": {
        "matching_share": 0.0, "matching": (0.0, 0.0, 0.0), "answers": (0.0, 1.0, 0.0),
        "replay": 1.0,
    },
    "matching, then end to end": {},
}  # fmt: skip


def run_ablations(
    make: Callable[[Recipe, Path], Trainer],
    recipe: Recipe,
    folder: Path,
    only: Sequence[str] = (),
    on_result: Callable[[dict[str, Any], int, int], None] = lambda result, done, total: None,
) -> list[dict[str, Any]]:
    """Measure every variant; results are JSON lines in `folder`, and a second run continues.

    Parameters
    ----------
    make
        A trainer by recipe and folder for its stages; all share the pairs of one run.
    recipe
        What the variants change.
    only
        Groups to run; all if empty.
    on_result
        Called with each result, its number and how many there are.
    """
    log = folder / "ablations.jsonl"
    logged = {(row["group"], row["name"]): row for row in lines.read(log)}
    pool = _Pool(make, recipe, folder)
    results = []
    wanted = [v for v in variants(pool.layers, recipe) if not only or v.group in only]
    for done, variant in enumerate(wanted, 1):
        key = (variant.group, variant.name)
        if key not in logged:
            logged[key] = pool.measure(variant)
            lines.append(log, logged[key])
        results.append(logged[key])
        on_result(logged[key], done, len(wanted))
    return results


class _Pool:
    """The trainer whose pairs, moments and closed form the variants share."""

    def __init__(self, make: Callable[[Recipe, Path], Trainer], recipe: Recipe, folder: Path):
        self._make, self._recipe, self._folder = make, recipe, folder
        self._trainer = make(replace(recipe, kind="ridge"), folder / "default")
        self._trainer.collect()
        self._moments: Moments | None = None
        self._ridges: dict[str, Ridge] = {}
        self._descended: dict[Recipe, Translator] = {}
        self.layers = self._trainer.reference.spec.layers

    def measure(self, variant: Variant) -> dict[str, Any]:
        kind = "mixture" if variant.descends else "ridge"
        recipe = replace(self._recipe, **variant.changes, kind=kind)
        work = self._folder / f"{variant.group} {variant.name}".replace(" ", "-").replace(":", "")
        trainer = self._make(recipe, work)
        self._fit(trainer)
        translator = self._descend(trainer) if variant.descends else trainer.fit("ridge")
        nlls = trainer.answer_nlls(translator, variant.edit)
        shutil.rmtree(work)  # what matters is the figure
        return {
            "group": variant.group,
            "name": variant.name,
            **_recovered(nlls),
            "parameters": sum(p.numel() for p in translator.parameters()),
            "multiplications": translator.multiplications(),
            "minutes": recipe.minutes if variant.descends else 0.0,
        }

    def _descend(self, trainer: Trainer) -> Translator:
        """Some rows of the table are one and the same recipe."""
        if trainer.recipe not in self._descended:
            self._descended[trainer.recipe] = trainer.run()
        return self._descended[trainer.recipe]

    def _fit(self, trainer: Trainer) -> None:
        """The closed form from shared moments, put where the trainer looks for it."""
        key = str(trainer.config("ridge"))
        if key not in self._ridges:
            self._ridges[key] = self._solve(trainer)
        trainer.keep_fitted(self._ridges[key])

    def _solve(self, trainer: Trainer) -> Ridge:
        if self._moments is None:
            every = Ridge(replace(trainer.config("ridge"), reference_layers=None, predecessors=0))
            batches = self._trainer.batches(self._recipe.projection_passages)
            self._moments = every.source_moments(batches)
        ridge = trainer.empty("ridge")
        if not isinstance(ridge, Ridge):
            raise TypeError("the closed form is a ridge")
        ridge.fit_projection(self._moments.select(self._inputs(ridge)))
        ridge.fit_output(ridge.feature_moments(trainer.batches(None)))
        return ridge

    def _inputs(self, ridge: Ridge) -> Tensor:
        """Indices of what a ridge sees among [source, embedding]."""
        config = replace(ridge.config, reference_layers=None)
        source = ridge.config.selected(torch.arange(config.source_size)[None])[0]
        if ridge.config.predecessors < 0:
            return source
        hidden = config.target_spec["hidden_size"]
        return torch.cat([source, config.source_size + torch.arange(hidden)])


def _recovered(nlls: Tensor) -> dict[str, Any]:
    """Recovered fraction of (N, 3) NLLs native, translated, none, with its interval."""

    def share(rows: Sequence[int]) -> float:
        native, found, none = nlls[list(rows)].mean(0).tolist()
        return recovered_share(native, found, none)

    everything = range(len(nlls))
    return {
        "passages": len(nlls),
        "nll": float(nlls[:, 1].mean()),
        "recovered": share(everything),
        "recovered_95": list(bootstrap(share, len(nlls))),
    }


def table(results: Sequence[dict[str, Any]], passages: int, minutes: float) -> str:
    """All results as Markdown."""
    found = [
        f"{passages} training passages; rows with minutes descended for {minutes:g} of them. "
        f"Recovered answer NLL on {results[0]['passages']} held-out passages, 95% interval from "
        "1,000 resamplings of the passages.",
        "",
        "| varied | to | recovered | 95% | parameters | multiplications per token | minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results:
        low, high = row["recovered_95"]
        found.append(
            f"| {row['group']} | {row['name']} | {row['recovered']:.3f} | {low:.3f} to {high:.3f} "
            f"| {row['parameters'] / 1e6:.1f} M | {row['multiplications'] / 1e6:.1f} M "
            f"| {row['minutes']:g} |"
        )
    return "\n".join(found) + "\n"
