"""The baselines start as the best linear map of their form, and learn as the mixture does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_lm
from test_ridge import toy_config
from test_training import EXAMPLES, HELD_OUT, RECIPE, Run, loss
from test_training import ticking_clock as ticking_clock  # the fixture serves here, too
from torch import Tensor

from cag.errors import TranslatorError
from cag.translate import descent
from cag.translate.base import TRANSLATORS, Batch, Translator, load_translator
from cag.translate.baselines import SharedLatent, SingleProjection, balanced
from cag.translate.descent import descend
from cag.translate.pairs import PairCollector

KINDS = ("shared_latent", "single_projection")


def mapped(translator: Translator, source: Tensor) -> Tensor:
    """Standardised keys and values of as many tokens: (T, 2, outputs)."""
    return translator.predict(translator.compress(source), torch.empty(len(source), 0))


# -- the closed form -------------------------------------------------------------------------


def toy_data(inputs: int, outputs: int) -> Batch:
    """Outputs, of very different sizes per layer and kind, that are linear in part."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    source = normal(3000, inputs) @ (torch.eye(inputs) + 0.1 * normal(inputs, inputs))
    linear = source @ normal(inputs, outputs) / inputs**0.5
    sizes = torch.tensor([0.1, 1.0, 10.0, 3.0]).repeat_interleave(outputs // 4)
    noisy = sizes * (linear + 0.3 * normal(3000, outputs)) + 4 * normal(outputs)
    return Batch(source * (1 + torch.arange(inputs)) - 5.0, torch.empty(3000, 0), noisy, [0])


def fitted(translator: Translator, data: Batch) -> Translator:
    def batches(limit: int | None) -> Iterator[Batch]:
        for rows in torch.arange(3000).split(700):
            yield Batch(data.source[rows], data.anchors[rows], data.outputs[rows], [0])

    translator.fit(batches, 3000)
    return translator.requires_grad_(False)


def standardised(outputs: Tensor) -> Tensor:
    """Centred, and in units of the mean deviation of a layer's keys or values: (T, 2, 2, 8)."""
    by_layer = (outputs - outputs.mean(0)).unflatten(-1, (2, 2, 8))
    return by_layer / by_layer.std(0, correction=0).mean(-1, keepdim=True)


def found_by(translator: Translator, data: Batch) -> Tensor:
    """What the translator makes of the data, standardised as the data is: (T, 2, 2, 8)."""
    sides = translator.expand(translator.compress(data.source), data.anchors)
    both = torch.stack(sides, dim=1).flatten(3)
    wanted = data.outputs.unflatten(-1, (2, 2, 8))
    deviation = wanted.std(0, correction=0).mean(-1, keepdim=True)
    return (both - wanted.mean(0)) / deviation


def least_error(inputs: Tensor, outputs: Tensor, rank: int) -> float:
    """Squared error of the best linear map of a rank (Izenman 1975)."""
    explained = inputs @ torch.linalg.lstsq(inputs, outputs).solution
    lost = torch.linalg.svdvals(explained)[rank:].square().sum()
    return float((outputs - explained).square().sum() + lost)


@pytest.mark.parametrize("rank", [1, 4, 12])
def test_a_shared_latent_starts_as_the_best_map_of_its_rank(rank: int) -> None:
    data = toy_data(24, 32)
    translator = fitted(SharedLatent(toy_config("shared_latent", rank=rank)), data)
    wanted = standardised(data.outputs)
    centred = data.source - data.source.mean(0)
    least = least_error(centred, wanted.flatten(1), rank)
    error = float((found_by(translator, data) - wanted).square().sum())
    assert 0.999 * least < error < 1.01 * least


@pytest.mark.parametrize(("inputs", "hidden"), [(6, 2), (6, 7), (6, 40), (12, 40)])
def test_a_single_projection_starts_as_the_best_map_that_layers_can_share(
    inputs: int, hidden: int
) -> None:
    """With as many hidden units as are needed or fewer, more inputs than outputs or fewer."""
    config = toy_config("single_projection", hidden=hidden)
    config.reference_spec["head_size"] = inputs
    data = toy_data(4 * inputs, 32)
    translator = fitted(SingleProjection(config), data)
    sources = (data.source - data.source.mean(0)) / data.source.std(0, correction=0)
    by_layer = sources.unflatten(-1, (2, 2, inputs))  # of both layers keys, then values
    wanted, found = standardised(data.outputs), found_by(translator, data)
    for side in range(2):
        rows, targets = by_layer[:, :, side].flatten(0, 1), wanted[:, side].flatten(0, 1)
        least = least_error(rows, targets, hidden // 2)
        error = float((found[:, side].flatten(0, 1) - targets).square().sum())
        assert 0.999 * least < error < 1.01 * least


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_of_gelus_start_as_a_linear_map_and_may_bend(kind: str) -> None:
    data = toy_data(24, 32)
    translator = fitted(TRANSLATORS[kind](toy_config(kind, hidden=8)), data)
    assert isinstance(translator, SharedLatent | SingleProjection)
    left, right = data.source[:50], 10 * data.source[50:100]

    def bend() -> float:
        sums = mapped(translator, left) + mapped(translator, right)
        whole = mapped(translator, left + right) + mapped(translator, torch.zeros(50, 24))
        return float((sums - whole).abs().max() / whole.abs().max())

    assert bend() < 1e-5
    translator.bias += 1.0
    assert bend() > 1e-2


def test_hidden_units_that_are_left_over_change_nothing_and_can_learn() -> None:
    data = toy_data(24, 32)
    few, many = (
        fitted(SingleProjection(toy_config("single_projection", hidden=hidden)), data)
        for hidden in (12, 20)
    )
    torch.testing.assert_close(found_by(many, data), found_by(few, data), atol=1e-4, rtol=1e-4)
    assert isinstance(many, SingleProjection)
    many.outer.requires_grad_()
    mapped(many, data.source).square().sum().backward()
    assert many.outer.grad is not None and many.outer.grad.any(-1).all()


def test_balancing_keeps_the_product() -> None:
    torch.manual_seed(0)
    down, up = torch.randn(9, 4) * torch.tensor([1e3, 1.0, 1e-3, 0.0]), torch.randn(4, 7)
    left, right = balanced(down, up)
    torch.testing.assert_close(left @ right, down @ up)
    torch.testing.assert_close(left.norm(dim=0)[:3], right.norm(dim=1)[:3])


# -- what they read --------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "paired"), [(2, [0, 1, 1]), (4, [1, 2, 3]), (7, [2, 4, 6])])
def test_a_target_layer_reads_the_reference_layer_of_its_depth(
    layers: int, paired: list[int]
) -> None:
    """Keys from its keys, values from its values."""
    config = toy_config("single_projection", hidden=8)
    config.reference_spec["layers"], config.target_spec["layers"] = layers, 4
    torch.manual_seed(0)
    translator = SingleProjection(config).requires_grad_(False)
    for weights in (translator.inner, translator.outer):
        weights.normal_()
    source = torch.randn(5, layers, 2, 6)
    before = mapped(translator, source.flatten(1)).unflatten(-1, (3, 8))
    for layer in range(layers):
        for side in range(2):
            other = source.clone()
            other[:, layer, side] += 1.0
            after = mapped(translator, other.flatten(1)).unflatten(-1, (3, 8))
            wanted = torch.zeros(2, 3, dtype=torch.bool)
            wanted[side] = torch.tensor(paired) == layer
            assert torch.equal((after != before).any(-1).any(0), wanted)


# -- whole runs ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gemma3_text", "gpt2"])
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, dict[str, Translator], list[str]]:
    """Both kinds trained in one folder, one after the other, and what was collected for it."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    run = Run(folder, tiny_lm("llama", 60), tiny_lm(request.param, 20, seed=1))
    read, collected = PairCollector.reading, []

    def noting(self: PairCollector, example: Any, chooser: Any) -> Any:
        collected.append(example.text)
        return read(self, example, chooser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PairCollector, "reading", noting)
        translators = {kind: run.trainer(recipe=recipe(kind)).run() for kind in KINDS}
    return run, translators, collected


def recipe(kind: str) -> Any:
    return replace(RECIPE, kind=kind, hidden=24, matching_rate=1e-2)


Runs = tuple[Run, dict[str, Translator], list[str]]


def test_kinds_share_the_pairs_of_a_run(runs: Runs) -> None:
    run, _, collected = runs
    assert collected == [example.text for example in [*EXAMPLES, *HELD_OUT]]
    assert {path.name for path in run.folder.iterdir()} == {"run.json", "readings", *KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_leaves_its_translator_in_a_folder_of_its_kind(runs: Runs, kind: str) -> None:
    run, translators, _ = runs
    saved = load_translator(run.folder / kind)
    assert (saved.kind, saved.report) == (kind, translators[kind].report)
    wanted = {n: t.bfloat16().float() for n, t in translators[kind].state_dict().items()}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in saved.state_dict().items())
    assert saved.report.details["passages"] == len(EXAMPLES)
    assert saved.config.key_norm is (run.target.spec.family == "gemma3_text")


@pytest.mark.parametrize("kind", KINDS)
def test_descent_lowers_what_it_descends(
    runs: Runs, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # keep the last weights: NLLs of random models say nothing about progress
    monkeypatch.setattr(descent._Best, "measure", lambda self, *args: None)
    trainer = runs[0].trainer(recipe=recipe(kind), work=tmp_path, log=lambda event: None)
    start, matched = trainer.start(), trainer.start()
    descend(trainer, matched, "matching", 2.0, trainer.recipe.matching_rate)
    assert loss(trainer, matched, trained=True) < 0.95 * loss(trainer, start, trained=True)


@pytest.mark.parametrize("kind", KINDS)
def test_another_recipe_of_the_same_kind_is_refused(runs: Runs, kind: str) -> None:
    run = runs[0]
    with pytest.raises(TranslatorError, match=f"{kind}' holds a run with other"):
        run.trainer(recipe=replace(recipe(kind), batch=3))
