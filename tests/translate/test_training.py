"""Training lowers its losses, leaves files, and goes on where it was."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, pairwise, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import FAMILIES, TEXT, tiny_lm, tiny_models
from torch import Tensor

from cag.errors import IngestError, TranslatorError
from cag.lm.cache import KV, Context
from cag.lm.loading import LM
from cag.lm.prompt import Template
from cag.scoring import recovered_share
from cag.settings import Settings
from cag.translate import calibration, command, descent
from cag.translate.base import Translator, align_texts, flatten, load_translator
from cag.translate.checkpoint import Checkpoint
from cag.translate.descent import descend, make_optimizer
from cag.translate.examples import Example
from cag.translate.losses import AttentionMatching, answer_loss, replay_error
from cag.translate.mixture import Mixture
from cag.translate.pairs import Pair, PairCollector, PairFiles
from cag.translate.readings import Source
from cag.translate.recipe import Recipe
from cag.translate.ridge import Ridge
from cag.translate.training import Log, Trainer

SHORT = Template(prefix="Read this.\nContext:", suffix="\nQ: {question}\nA:")
#: Minutes of a clock that jumps by a second whenever it is read: about 60 steps of descent.
RECIPE = Recipe(
    rank=16, key_rank=24, value_rank=24, experts=3, active=2, hidden=8, projection_passages=12,
    minutes=2.5, matching_share=0.8, batch=2, matching_rate=3e-3, answer_rate=1e-4, average=0.9,
)  # fmt: skip


def made_up(count: int, seed: int = 0) -> list[Example]:
    """Passages of about 40 tokens with two questions each."""
    chooser = random.Random(seed)
    words = [word.strip(".,") for word in TEXT.split()]
    examples = []
    for _ in range(count):
        said = chooser.choices(words, k=14)
        questions = ((f"Where is {said[0]}?", said[3]), (f"And {said[1]}?", said[-1]))
        examples.append(Example(f"{' '.join(said)}.", questions))
    return examples


EXAMPLES, HELD_OUT = made_up(24), made_up(5, seed=1)


@dataclass
class Run:
    """How to make the trainer of one folder, again and again."""

    folder: Path
    reference: LM
    target: LM
    events: list[dict[str, Any]] = field(default_factory=list)

    def trainer(self, **changes: Any) -> Trainer:
        settings = {
            "examples": EXAMPLES, "held_out": HELD_OUT, "recipe": RECIPE, "template": SHORT,
            "log": self.events.append,
        }  # fmt: skip
        trainer = Trainer(self.reference, self.target, self.folder, **{**settings, **changes})
        trainer.half = False  # whether bf16 is faster differs between machines
        return trainer

    def times(self) -> dict[str, int]:
        """Modification times of all that was read."""
        found = (self.folder / "readings").rglob("*.safetensors")
        return {str(path): path.stat().st_mtime_ns for path in found}


@pytest.fixture(scope="module", autouse=True)
def ticking_clock() -> Iterator[None]:
    """Time passes by a second per look at the clock, however busy the machine is."""

    def monotonic() -> float:
        clock.now += 1.0
        return clock.now

    clock = SimpleNamespace(now=0.0, monotonic=monotonic)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descent, "time", clock)
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Mixture]:
    """A finished run; tests only read it."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    run = Run(folder, tiny_lm("llama", 60), tiny_lm("gemma3_text", 20, seed=1))
    return run, run.trainer().run()


def loss(trainer: Trainer, translator: Translator, *, trained: bool = False) -> float:
    """What the matching stage descends, averaged over held-out or training pairs."""
    files = trainer.pairs if trained else trainer.held_out_pairs
    pairs = [pair.load() for pair in files]
    with torch.no_grad():
        found = trainer.translate(translator, pairs)
        terms = [trainer.matching(kv, pair) for pair, (kv, _) in zip(pairs, found, strict=True)]
    return float(sum(kl + error for kl, error in terms)) / len(pairs)


def same_weights(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def fitted_ridge(trainer: Trainer) -> Ridge:
    ridge = trainer.fit("ridge")
    assert isinstance(ridge, Ridge)
    return ridge


def upgraded(ridge: Ridge) -> Mixture:
    return Mixture.upgrade(ridge, RECIPE.experts, RECIPE.active, RECIPE.hidden)


# -- a whole run -----------------------------------------------------------------------------


@pytest.fixture
def last_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descents keep what they end with: NLLs of random models say nothing about progress."""
    monkeypatch.setattr(descent._Best, "measure", lambda self, *args: None)


@pytest.mark.usefixtures("last_weights")
def test_the_matching_stage_lowers_the_attention_loss(
    done: tuple[Run, Mixture], tmp_path: Path
) -> None:
    run, _ = done
    trainer = run.trainer(work=tmp_path, log=lambda event: None)
    start, matched = trainer.start(), trainer.start()
    descend(trainer, matched, "matching", 2.0, RECIPE.matching_rate)
    assert loss(trainer, matched, trained=True) < 0.95 * loss(trainer, start, trained=True)
    assert loss(trainer, matched) < loss(trainer, start)


def test_the_ridge_beats_saying_the_mean(done: tuple[Run, Mixture]) -> None:
    trainer = done[0].trainer()
    ridge = fitted_ridge(trainer)
    fitted = loss(trainer, ridge)
    with torch.no_grad():
        ridge.down.zero_()
    assert fitted < 0.9 * loss(trainer, ridge)


def test_descent_leaves_the_projection_and_the_key_norm_alone(done: tuple[Run, Mixture]) -> None:
    run, mixture = done
    ridge = fitted_ridge(run.trainer())
    assert torch.equal(mixture.project, ridge.project)
    assert torch.equal(mixture.norm_weight, ridge.norm_weight)
    assert not torch.equal(mixture.down, ridge.down)


@pytest.mark.usefixtures("last_weights")
def test_the_average_is_kept_and_fitted_maps_move_gently(
    done: tuple[Run, Mixture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = done[0].trainer()
    start = fitted_ridge(trainer)
    mixture = upgraded(start)
    trainer.folder = tmp_path
    trainer.stages.mkdir()
    monkeypatch.setattr(descent, "schedule", lambda share, step: 1.0)
    descend(trainer, mixture, "matching", 0.05, 1e-2)  # one step, which Adam makes 1e-2 long
    kept = 10 / 11  # an average forgets its start within the first steps
    assert float(mixture.expert_out.detach().abs().max()) == pytest.approx(kept * 1e-2, rel=1e-2)
    moved = float((mixture.key_up - start.key_up).detach().abs().max())
    assert moved == pytest.approx(kept * 1e-2 / 5, rel=1e-2)


def test_a_run_leaves_a_ridge_a_report_and_events(done: tuple[Run, Mixture]) -> None:
    run, mixture = done
    ridge = load_translator(run.folder / "ridge")
    assert (ridge.kind, mixture.kind) == ("ridge", "mixture")
    ridge.check_models(run.reference.fingerprint, run.target)
    mixture.check_models(run.reference.fingerprint, run.target)
    assert ridge.report.recovered is not None
    held = mixture.report.details["held_out"]
    assert mixture.report.recovered == held["recovered"]
    nlls = held["native"], held["translated"], held["none"]
    assert held["recovered"] == pytest.approx(recovered_share(*nlls))
    json.dumps([mixture.report.details, *run.events])  # plain data
    stages = [event["stage"] for event in run.events]
    order = ["collect", "fit", "fit", "ridge", "answers"]
    assert [stage for stage in stages if stage != "matching"][: len(order)] == order
    (collected, *_) = (e for e in run.events if e["stage"] == "collect")
    assert collected == {"stage": "collect", "done": 29, "of": 29}
    fits = [(event["done"], event["of"]) for event in run.events if event["stage"] == "fit"]
    assert fits == [(12, 12), (24, 24)]  # the widest regression needs only some passages


def test_a_finished_run_lies_in_a_folder_of_its_kind(done: tuple[Run, Mixture]) -> None:
    run, mixture = done
    saved = load_translator(run.folder / "mixture")
    assert saved.report == mixture.report
    wanted = {name: tensor.bfloat16().float() for name, tensor in mixture.state_dict().items()}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in saved.state_dict().items())
    assert {p.name for p in run.folder.iterdir()} == {"run.json", "readings", "ridge", "mixture"}


def test_descents_keep_what_did_best_on_held_out_passages(done: tuple[Run, Mixture]) -> None:
    run, mixture = done
    curve = mixture.report.details["curve"]
    assert [row for row in curve if row["step"] == 0] == [curve[0], curve[len(curve) // 2]]
    assert {row["stage"] for row in curve} == {"matching", "answers"}
    held = mixture.report.details["held_out"]["translated"]
    assert held == pytest.approx(min(row["translated"] for row in curve), abs=1e-4)
    assert not list(run.folder.glob("mixture/*.best.*"))


def test_a_descent_that_only_harms_changes_nothing_and_ends_early(
    done: tuple[Run, Mixture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPE, patience=2)
    trainer = done[0].trainer(work=tmp_path, recipe=recipe, log=lambda event: None)
    translator, start = trainer.start(), trainer.start()
    start.load_state_dict(translator.state_dict())
    nlls = iter(range(100))
    monkeypatch.setattr(trainer, "recovered", lambda translator: {"translated": next(nlls)})
    descend(trainer, translator, "matching", 60.0, 1e-2)
    assert same_weights(translator, start)
    assert [row["translated"] for row in descent.curve(trainer)] == [0, 1, 2]


def test_retention_is_calibrated_on_held_out_questions(done: tuple[Run, Mixture]) -> None:
    _, mixture = done
    calibration = mixture.report.details["calibration"]
    assert calibration["questions"] == 2 * len(HELD_OUT)


def test_a_second_trainer_reads_what_the_first_left(
    done: tuple[Run, Mixture], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mixture = done
    before = run.times()
    assert len(before) == 2 * (len(EXAMPLES) + len(HELD_OUT))
    monkeypatch.setattr(PairCollector, "reading", None)  # calling it would fail
    monkeypatch.setattr(Ridge, "fit", None)  # so would fitting
    monkeypatch.setattr(descent, "make_optimizer", None)  # and descending
    again = run.trainer(log=lambda event: None).run()
    assert run.times() == before
    assert same_weights(again, mixture)
    assert again.report.recovered == pytest.approx(mixture.report.recovered)


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": replace(RECIPE, rank=8)},
        {"recipe": replace(RECIPE, seed=1)},
        {"examples": EXAMPLES[1:]},
        {"reference": tiny_lm("llama", 60, seed=7)},
        {"target": tiny_lm("gemma3_text", 20, seed=7)},
    ],
    ids=["rank", "seed", "fewer passages", "reference", "target"],
)
def test_another_run_in_the_same_folder_is_refused(
    change: dict[str, Any], done: tuple[Run, Mixture]
) -> None:
    run = done[0]
    models = {name: change.get(name, getattr(run, name)) for name in ("reference", "target")}
    with pytest.raises(TranslatorError, match="holds a run with other"):
        Run(run.folder, **models).trainer(**{n: v for n, v in change.items() if n not in models})
    run.trainer()  # and the folder still fits its own run


@pytest.mark.parametrize(
    "change",
    [
        {"examples": made_up(24, seed=2)},
        {"held_out": made_up(5, seed=2)},
        {"template": replace(SHORT, prefix="Context:")},
    ],
    ids=["passages", "held out", "template"],
)
def test_other_data_in_the_same_folder_is_refused(
    change: dict[str, Any], done: tuple[Run, Mixture]
) -> None:
    with pytest.raises(TranslatorError):
        done[0].trainer(**change)


def test_passages_to_choose_by_may_not_be_trained_on(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", tiny_lm("llama"), tiny_lm("gpt2"))
    with pytest.raises(TranslatorError, match="2 held-out passages are also trained on"):
        run.trainer(held_out=[*HELD_OUT, *EXAMPLES[:2]])
    assert not run.folder.exists()


def test_an_unknown_kind_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", tiny_lm("llama"), tiny_lm("gpt2"))
    with pytest.raises(TranslatorError, match=r"unknown kind 'oracle'; .*ridge, mixture"):
        run.trainer(recipe=replace(RECIPE, kind="oracle"))
    assert not run.folder.exists()


VARIANTS: list[dict[str, Any]] = [
    {"predecessors": -1},
    {"reference_layers": [1, 3]},
    {"routing": "uniform"},
    {"routing": "random"},
    {"replay": 1.0, "matching_share": 0.0},
    {"kind": "ridge"},
    {"kind": "shared_latent"},
    {"kind": "single_projection"},
]


@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_what_is_saved_translates_as_what_was_trained(
    change: dict[str, Any], done: tuple[Run, Mixture], tmp_path: Path
) -> None:
    """From the reference KV of one passage, with pairs of another run."""
    run = done[0]
    recipe = replace(RECIPE, minutes=0.1, **change)
    trainer = run.trainer(recipe=recipe, work=tmp_path)
    trained = trainer.run()
    saved = load_translator(tmp_path / recipe.kind)
    config = vars(saved.config)
    assert all(config.get(name, value) == value for name, value in change.items())
    assert saved.report.details["recipe"].items() >= change.items()
    trained.load_state_dict(saved.state_dict())  # rounded to bf16
    pair = trainer.held_out_pairs[0].load()
    spec = run.reference.spec
    source = pair.source.float().view(-1, spec.layers, 2, spec.kv_heads, spec.head_size)
    keys, values = source.permute(2, 1, 3, 0, 4)
    with torch.no_grad():
        ((wanted, _),) = trainer.translate(trained, [pair])
        found = saved.translate(
            [KV(keys, values)], [pair.alignment.tolist()], run.target, [pair.ids.tolist()],
            trainer.collector.prefix,
        )  # fmt: skip
    torch.testing.assert_close(found.keys, wanted.keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.values, wanted.values, atol=1e-4, rtol=1e-4)


def test_stored_pairs_together_are_what_they_are_one_by_one(done: tuple[Run, Mixture]) -> None:
    run, mixture = done
    trainer = run.trainer()
    pairs = [files.load() for files in trainer.held_out_pairs]
    with torch.no_grad():
        together = trainer.translate(mixture, pairs)
        alone = [trainer.translate(mixture, [pair])[0] for pair in pairs]
    for (kv, standardised), (wanted, wanted_standardised) in zip(together, alone, strict=True):
        torch.testing.assert_close(kv.keys, wanted.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(kv.values, wanted.values, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(standardised, wanted_standardised, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("limit", [None, 20])
def test_batches_hold_every_drawn_passage_once(
    limit: int | None, done: tuple[Run, Mixture]
) -> None:
    run = done[0]
    passages = {}
    for files in run.trainer().pairs:
        pair = files.load()
        passages[pair.source[pair.alignment].float().numpy().tobytes()] = pair
    seen = []
    for batch in run.trainer().batches(limit):
        bounds = [*batch.starts, len(batch.source)]
        for start, stop in pairwise(bounds):
            source = batch.source[start:stop].numpy().tobytes()
            keys, values = batch.outputs[start:stop].unflatten(-1, (2, 3, 2, 16)).unbind(1)
            native = passages[source].native
            assert torch.equal(keys.permute(1, 2, 0, 3), native.keys[1:].float())
            assert torch.equal(values.permute(1, 2, 0, 3), native.values[1:].float())
            seen.append(source)
        assert len(batch.anchors) == len(batch.source)
    assert len(seen) == len(set(seen)) == (limit or len(EXAMPLES))


def test_stages_in_another_folder_use_the_pairs_of_the_run(
    done: tuple[Run, Mixture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, before = done[0], done[0].times()
    monkeypatch.setattr(PairCollector, "reading", None)  # calling it would fail
    recipe = replace(RECIPE, kind="ridge", minutes=0.0)
    ridge = run.trainer(recipe=recipe, work=tmp_path / "work").run()
    fitted = load_translator(run.folder / "ridge")
    assert ridge.report.recovered == pytest.approx(fitted.report.recovered, abs=1e-3)
    assert run.times() == before
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"ridge"}


@pytest.mark.usefixtures("last_weights")
def test_a_weight_moves_its_own_loss_most(done: tuple[Run, Mixture], tmp_path: Path) -> None:
    run = done[0]
    pairs = [files.load() for files in run.trainer().pairs[:8]]

    def descended(matching: Sequence[float], answers: Sequence[float]) -> Translator:
        """What 15 steps make of the same mixture."""
        work = tmp_path / f"{matching} {answers}"
        shutil.copytree(run.folder / "ridge", work / "ridge")
        recipe = replace(RECIPE, matching=tuple(matching), answers=tuple(answers))
        trainer = run.trainer(recipe=recipe, work=work)
        torch.manual_seed(0)
        translator = trainer.start()
        descend(trainer, translator, "answers", 0.5, 2e-2)
        return translator

    torch.manual_seed(0)
    start = run.trainer().start()
    assert same_weights(descended([0.0] * 3, [0.0] * 3), start)
    choices = torch.eye(6)[2:].tolist()  # KV error, answer KL, answer NLL, shift of the states
    found = [descended(weights[:3], weights[3:]) for weights in choices]
    with torch.no_grad():
        terms = [run.trainer().losses(t, pairs, "answers").mean(0)[2:6] for t in [start, *found]]
    assert torch.stack(terms).argmin(0).tolist() == [1, 2, 3, 4]


def test_an_edit_can_put_the_native_kv_back(done: tuple[Run, Mixture]) -> None:
    run, mixture = done
    trainer = run.trainer()
    plain = trainer.recovered(mixture)
    assert plain == pytest.approx(mixture.report.details["held_out"])
    edited = trainer.recovered(mixture, edit=lambda translated, native: native)
    share = recovered_share(plain["native"], plain["native"], plain["none"])
    wanted = {**plain, "translated": plain["native"], "recovered": share}
    assert edited == pytest.approx(wanted)


class Stopped(Exception):
    """Somebody pressed Ctrl-C."""


def test_a_run_stopped_anywhere_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With learned positions in the target: while collecting, then in both descents."""
    run = Run(tmp_path / "run", tiny_lm("qwen2", 60), tiny_lm("gpt2", 20, seed=1))
    recipe = replace(RECIPE, minutes=8.0, matching_share=0.5, batch=1)
    read, calls = PairCollector.reading, []

    def failing(self: PairCollector, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 9:
            raise Stopped
        return read(self, *args)

    monkeypatch.setattr(PairCollector, "reading", failing)
    with pytest.raises(Stopped):
        run.trainer(recipe=recipe).run()
    early = run.times()
    assert len(early) == 8 + 9  # the reference had read the ninth

    curve: list[dict[str, Any]] = []

    def stop_at(stage: str) -> Log:
        def log(event: dict[str, Any]) -> None:
            if "step" in event:
                curve.append(event)
                if event["stage"] == stage and event["step"]:
                    raise Stopped

        return log

    with pytest.raises(Stopped):
        run.trainer(recipe=recipe, log=stop_at("matching")).run()
    assert len(calls) == 9 + 16 + len(HELD_OUT)
    assert run.times().items() >= early.items()
    assert (run.folder / "mixture" / "matching.checkpoint.safetensors").exists()
    with (run.folder / "mixture" / "curve.jsonl").open("a") as lines:
        lines.write('{"stage": "matching", "st')  # it was being written
    with pytest.raises(Stopped):
        run.trainer(recipe=recipe, log=stop_at("answers")).run()
    assert not (run.folder / "mixture" / "matching.checkpoint.safetensors").exists()
    run.trainer(recipe=recipe, log=stop_at("")).run()
    assert not list(run.folder.glob("**/*.checkpoint.*")) + list(run.folder.glob("**/*.tmp"))
    assert len(calls) == 9 + 16 + len(HELD_OUT)  # nothing twice

    for stage in ("matching", "answers"):
        first, *points, _last = (event for event in curve if event["stage"] == stage)
        assert first["step"] == 0
        steps, minutes = ([p[name] for p in points] for name in ("step", "minutes"))
        assert len(points) == 1  # of 4 minutes; starting afresh there would be another
        assert 40 < steps[0] < 80 and 2.0 <= minutes[0] < 3.0
    assert set(curve[-1]) >= {"attention_kl", "kv_error", "answer_kl", "shift", "recovered"}


def test_a_checkpoint_restores_weights_averages_and_optimiser(
    done: tuple[Run, Mixture], tmp_path: Path
) -> None:
    ridge = fitted_ridge(done[0].trainer())

    def fresh() -> tuple[Mixture, torch.optim.Optimizer, dict[str, Tensor]]:
        torch.manual_seed(3)
        mixture = upgraded(ridge)
        averaged = {n: t.detach().clone() for n, t in mixture.state_dict().items()}
        return mixture, make_optimizer(mixture, 1e-2), averaged

    def go_on(
        mixture: Mixture, optimizer: torch.optim.Optimizer, averaged: dict[str, Tensor]
    ) -> None:
        features = torch.randn(20, len(mixture.down), generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            optimizer.zero_grad()
            mixture.map(features).square().mean().backward()
            optimizer.step()
            for name, tensor in mixture.state_dict().items():
                averaged[name].lerp_(tensor, 0.5)

    first, second = fresh(), fresh()
    go_on(*first)
    Checkpoint(tmp_path / "x.safetensors", step=7, seconds=12.5).save(*first)
    state = Checkpoint(tmp_path / "x.safetensors")
    state.restore(*second)
    assert (state.step, state.seconds) == (7, 12.5)
    for _ in range(2):  # equal at once, and still so after going on
        assert same_weights(first[0], second[0])
        assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])
        left, right = (each[1].state_dict() for each in (first, second))
        assert left["param_groups"] == right["param_groups"]
        assert left["state"].keys() == right["state"].keys() != set()
        for index, moments in left["state"].items():
            assert all(torch.equal(moments[n], right["state"][index][n]) for n in moments)
        go_on(*first)
        go_on(*second)


def test_no_checkpoint_means_the_beginning(done: tuple[Run, Mixture], tmp_path: Path) -> None:
    mixture = upgraded(fitted_ridge(done[0].trainer()))
    before = {name: tensor.clone() for name, tensor in mixture.state_dict().items()}
    state = Checkpoint(tmp_path / "none.safetensors")
    state.restore(mixture, make_optimizer(mixture, 1e-3), {})
    assert (state.step, state.seconds) == (0, 0.0)
    assert all(torch.equal(before[n], t) for n, t in mixture.state_dict().items())


@pytest.mark.parametrize(
    "change", [{"minutes": 0.0}, {"matching_share": 0.0}, {"matching_share": 1.0}], ids=str
)
def test_a_stage_without_minutes_is_left_out(change: dict[str, float], tmp_path: Path) -> None:
    run = Run(tmp_path / "run", tiny_lm("llama", 60), tiny_lm("qwen2", 20, seed=1))
    recipe = replace(RECIPE, **{"minutes": 0.1, **change})
    run.trainer(examples=EXAMPLES[:8], recipe=recipe).run()


# -- the command -----------------------------------------------------------------------------


def write_rows(path: Path, examples: Sequence[Example]) -> Path:
    """A file of questions, the first one of each passage."""
    rows = [
        {"passage": example.text, "question": question, "answer": answer}
        for example in examples
        for question, answer in example.questions[:1]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["mixture", "shared_latent"])
def test_only_the_mixture_goes_where_questions_find_it(
    kind: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "data.jsonl", EXAMPLES)
    small = replace(RECIPE, kind=kind, minutes=0.0)
    monkeypatch.setattr(command, "recipe_of", lambda *asked: replace(small, kind=asked[0]))
    monkeypatch.setattr(command, "Models", tiny_models)
    settings = Settings(home=home, reference="ref", target="tgt", dtype="float32")
    folder, report = command.train_translator(
        settings, "ref", "tgt", data=[str(data)], kind=kind, layers=2
    )
    saved = load_translator(folder)
    assert saved.config.reference_layers == [2, 3]
    assert (saved.kind, saved.report.recovered) == (kind, report["recovered"])
    assert (report["passages"], report["held_out_passages"], report["data"]) == (23, 1, [data.name])
    found = home / "translators" / "ref--tgt"
    assert folder == (found if kind == "mixture" else home / "runs" / "ref--tgt" / kind)
    assert found.exists() is (kind == "mixture")

    weights = (folder / "translator.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        f1 = cycle([0.5, 0.5, 0.0])  # native, translated, without; random models are never right
        patch.setattr(calibration, "token_f1", lambda *_: next(f1))
        for save in (False, True):
            measured = command.calibrate_on(settings, folder, [str(data)], 4, 0, save=save)
            assert measured["questions"] == 4
            kept = load_translator(folder).report
            assert (kept.details.get("calibrated_on") == [data.name]) is save
    assert kept.retention == measured["retention"] == 1.0
    with pytest.raises(TranslatorError, match="nothing was saved"):
        command.calibrate_on(settings, folder, [str(data)], 4, 0, save=True)
    assert load_translator(folder).report == kept
    assert kept.recovered == saved.report.recovered
    assert (folder / "translator.safetensors").read_bytes() == weights


@pytest.fixture
def adapt(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Translator]:
    """Trains, or adapts, in one home; gives what then lies where questions find it."""
    monkeypatch.setattr(command, "recipe_of", lambda kind, *_: replace(RECIPE, kind=kind))
    monkeypatch.setattr(command, "Models", tiny_models)
    held_out = write_rows(tmp_path / "held_out.jsonl", made_up(8, seed=9))

    def train(seed: int, adapt: bool = True, gate: float = -9e9, **options: Any) -> Translator:
        data = write_rows(tmp_path / f"{seed}.jsonl", made_up(24, seed))
        settings = Settings(
            home=home, reference="ref", target="tgt", dtype="float32", min_retention=gate
        )
        chosen = {"held_out": [str(held_out)], "adapt": adapt, **options}
        folder, _ = command.train_translator(settings, "ref", "tgt", data=[str(data)], **chosen)
        assert folder == home / "translators" / "ref--tgt"
        return load_translator(folder)

    return train


@pytest.mark.usefixtures("last_weights")
def test_a_translator_is_adapted_to_other_passages(
    adapt: Callable[..., Translator], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TranslatorError, match="no translator from 'ref' to 'tgt' to adapt"):
        adapt(5)
    first = adapt(0, adapt=False, layers=2)
    monkeypatch.setattr(Ridge, "fit", None)  # calling it would fail
    second = adapt(5)
    assert second.config == first.config and not same_weights(second, first)
    details = second.report.details
    assert details["data"] == ["5.jsonl"] and details["passages"] == 24
    assert details["adapted_from"]["fingerprint"] == first.fingerprint
    assert details["adapted_from"]["data"] == ["0.jsonl"]
    third = adapt(5)  # from the second, not the first again
    assert third.report.details["adapted_from"]["fingerprint"] == second.fingerprint
    copies = [load_translator(folder) for folder in (home / "runs").glob("*.adapt-*/begin")]
    assert {copy.fingerprint for copy in copies} == {first.fingerprint, second.fingerprint}
    assert all(copy.report.details["data"] for copy in copies)

    reached = third.report.recovered or 0.0
    worse = {"native": 1.0, "translated": 2.0, "none": 3.0, "recovered": reached - 1}
    monkeypatch.setattr(Trainer, "recovered", lambda *_: worse)
    with pytest.raises(TranslatorError, match=r"recovered share .* stays in use"):
        adapt(6, gate=reached - 0.5)
    assert load_translator(home / "translators" / "ref--tgt").fingerprint == third.fingerprint
    for options in ({"layers": 2}, {"kind": "ridge"}):
        with pytest.raises(TranslatorError, match="are those of the translator"):
            adapt(5, **options)
    with pytest.raises(IngestError, match="held-out passages do not tell"):
        adapt(5, held_out=[])


def test_what_is_set_aside_by_its_text_stays_aside(tmp_path: Path) -> None:
    parts = [made_up(60, seed) for seed in (1, 2, 3)]
    seen: tuple[set[str], set[str]] = set(), set()
    for count in (1, 2, 3):
        rows = [example for part in parts[:count] for example in part]
        data = str(write_rows(tmp_path / "data.jsonl", rows))
        found = command.examples_of([data], [], limit=None, seed=count, by_text=True)
        for texts, examples in zip(seen, found, strict=True):
            texts |= {example.text for example in examples}
        assert 0 < len(found[1]) <= 48 < len(found[0])
    assert not seen[0] & seen[1]


def test_every_held_out_file_has_its_share(tmp_path: Path) -> None:
    parts = [made_up(60, seed) for seed in range(4)]
    data, *files = [str(write_rows(tmp_path / f"{n}.jsonl", p)) for n, p in enumerate(parts)]
    for count in (1, 2, 3):
        _, chosen_by = command.examples_of([data], files[:count], limit=None, seed=0)
        texts = {example.text for example in chosen_by}
        shares = [len(texts & {e.text for e in part}) for part in parts[1:]]
        assert shares == [48 // count] * count + [0] * (3 - count)
    _, chosen_by = command.examples_of([data], files * 20, limit=None, seed=0)
    assert len(chosen_by) == 48


def test_adapting_never_makes_it_worse_on_what_it_is_chosen_by(
    done: tuple[Run, Mixture], tmp_path: Path
) -> None:
    run, mixture = done
    found = Run(tmp_path / "run", run.reference, run.target)
    recipe = replace(RECIPE.adapting(mixture.config), answer_rate=1.0)
    trainer = found.trainer(recipe=recipe, begin=mixture)
    trainer.collect()
    before = trainer.recovered(mixture)
    adapted = trainer.run()
    assert trainer.recovered(adapted)["translated"] <= before["translated"] + 1e-6
    with pytest.raises(TranslatorError, match="holds a run with other"):
        found.trainer(recipe=recipe, begin=Mixture(mixture.config))


@pytest.mark.parametrize("kind", ["shared_latent", "single_projection"])
def test_baselines_get_the_budget_and_the_losses_of_the_mixture(kind: str) -> None:
    baseline, mixture = (command.recipe_of(k, 7.0, seed=3) for k in (kind, "mixture"))
    assert (baseline.kind, baseline.minutes, baseline.seed) == (kind, 7.0, 3)
    assert replace(baseline, kind="mixture", hidden=mixture.hidden) == mixture
    assert command.recipe_of("ridge", 7.0, seed=3).minutes == 0.0


# -- losses ----------------------------------------------------------------------------------


def in_memory(collector: PairCollector, example: Example) -> Pair:
    kv, spans = collector.source(collector.trim(example.text))
    source = Source(flatten(kv).bfloat16(), torch.tensor(spans))
    return Pair.of(source, collector.reading(example, random.Random(0)))


def exact_pairs(target: LM, examples: Sequence[Example]) -> tuple[PairCollector, list[Pair]]:
    """Pairs whose native KV and states are kept in fp32."""
    collector = PairCollector(tiny_lm("llama", 60), target, SHORT)
    pairs = []
    for example in examples:
        pair = in_memory(collector, example)
        with torch.no_grad():
            context = Context(target)
            context.run(torch.tensor([collector.prefix]), logits=None)
            start, middle = context.length, context.length + len(pair.ids)
            read = torch.cat([pair.ids, pair.suffix_ids])[None]
            pair.states = context.run(read, logits=None).last_hidden_state[0, len(pair.ids) :]
        pair.native = context.canonical(start, middle)
        pair.suffix = context.canonical(middle, context.length)
        pairs.append(pair)
    return collector, pairs


def noisy(kv: KV) -> KV:
    random_numbers = torch.Generator().manual_seed(5)
    keys = kv.keys + 0.3 * torch.randn(kv.keys.shape, generator=random_numbers)
    return KV(keys, kv.values + 0.3 * torch.randn(kv.keys.shape, generator=random_numbers))


#: Longer and shorter than each other, with one, two and no questions.
MIXED = [EXAMPLES[0], Example(TEXT[:130], (("Who?", "ships"),)), Example("Boats are blue.", ())]


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3"])
def test_native_kv_costs_nothing_and_noise_does(family: str) -> None:
    target = tiny_lm(family, 20, seed=1)
    collector, pairs = exact_pairs(target, MIXED)
    matching = AttentionMatching(target, collector.prefix_kv)
    with torch.no_grad():
        for pair in pairs:
            kl, error = matching(pair.native, pair)
            assert abs(kl) < 1e-6 and error < 1e-6
            kl, error = matching(noisy(pair.native), pair)
            assert kl > 1e-4 and error > 1e-3
            assert replay_error(target, collector.start(), pair.native, pair) < 1e-6
            assert replay_error(target, collector.start(), noisy(pair.native), pair) > 1e-3
        native = answer_loss(target, collector.prefix_kv, [p.native for p in pairs], pairs)
        spoiled = answer_loss(target, collector.prefix_kv, [noisy(p.native) for p in pairs], pairs)
    kl, entropy, shift = native.T
    assert kl.abs().max() < 1e-4 and shift.max() < 1e-6 and (entropy > 0).all()
    assert (spoiled[:, 0] > 1e-4).all() and (spoiled[:, 2] > 1e-4).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_loss_of_a_batch_equals_that_of_each(family: str) -> None:
    target = tiny_lm(family, 20, seed=1)
    collector, pairs = exact_pairs(target, MIXED)
    given = [noisy(pair.native) for pair in pairs]
    with torch.no_grad():
        together = answer_loss(target, collector.prefix_kv, given, pairs)
        alone = [
            answer_loss(target, collector.prefix_kv, [kv], [pair])[0]
            for kv, pair in zip(given, pairs, strict=True)
        ]
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_entropy_is_that_of_reading_the_whole_prompt(family: str) -> None:
    target = tiny_lm(family, 20, seed=1)
    collector, pairs = exact_pairs(target, MIXED)
    with torch.no_grad():
        found = answer_loss(target, collector.prefix_kv, [p.native for p in pairs], pairs)[:, 1]
        for entropy, pair in zip(found, pairs, strict=True):
            ids = torch.cat([torch.tensor(collector.prefix), pair.ids, pair.suffix_ids])
            logits = target.model(ids[None]).logits[0, -len(pair.suffix_ids) :]
            at = pair.answers.nonzero()[:, 0]
            wanted = torch.nn.functional.cross_entropy(logits[at], pair.suffix_ids[at + 1])
            torch.testing.assert_close(entropy, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3"])
def test_matching_sees_the_attention_that_the_target_pays(family: str) -> None:
    """Also beyond Gemma's sliding window of 24."""
    target = tiny_lm(family, 20, seed=1)
    collector, (pair, *_) = exact_pairs(target, MIXED[:1])
    matching = AttentionMatching(target, collector.prefix_kv)
    found = matching._attend(pair.native, pair)[0].exp()
    ids = torch.cat([torch.tensor(collector.prefix), pair.ids, pair.suffix_ids])
    target.model.set_attn_implementation("eager")
    with torch.no_grad():
        paid = torch.cat(target.model(ids[None], output_attentions=True).attentions)
    rows = pair.query_positions + len(collector.prefix)
    torch.testing.assert_close(found, paid[:, :, rows], atol=3e-2, rtol=0)  # queries are bf16


def test_gradients_of_all_losses_reach_the_translated_kv() -> None:
    target = tiny_lm("gemma3_text", 20, seed=1)
    collector, pairs = exact_pairs(target, MIXED[:1])
    kv = noisy(pairs[0].native)
    kv.keys.requires_grad_()
    kv.values.requires_grad_()
    matching = AttentionMatching(target, collector.prefix_kv)
    for value in (
        sum(matching(kv, pairs[0])),
        answer_loss(target, collector.prefix_kv, [kv], pairs).sum(),
    ):
        keys, values = torch.autograd.grad(value, [kv.keys, kv.values])
        assert keys[1:].flatten(1).any(1).all() and values[1:].flatten(1).any(1).all()
    replayed = replay_error(target, collector.start(), kv, pairs[0])
    for gradient in torch.autograd.grad(replayed, [kv.keys, kv.values]):
        # what the lowest layer computes is kept, and nothing reads what the top layer is given
        assert gradient.flatten(1).any(1).tolist() == [False, True, True, False]


# -- pairs -----------------------------------------------------------------------------------


def test_a_pair_comes_back_as_it_was(tmp_path: Path) -> None:
    reference, target = tiny_lm("llama", 60), tiny_lm("gpt2", 20)
    collector = PairCollector(reference, target, SHORT, readings=tmp_path)
    loaded = collector.collect(EXAMPLES[0]).load()
    kv, spans = collector.source(collector.trim(EXAMPLES[0].text))
    assert torch.equal(loaded.source, flatten(kv).bfloat16())
    ids, alignment = align_texts(spans, target, collector.trim(EXAMPLES[0].text))
    assert (loaded.ids.tolist(), loaded.alignment.tolist()) == (ids, alignment)
    again = collector.collect(EXAMPLES[0]).load()
    for name, value in vars(loaded).items():
        other = getattr(again, name)
        parts = [(value, other)]
        if isinstance(value, KV):
            parts = [(value.keys, other.keys), (value.values, other.values)]
        assert all(torch.equal(a, b) for a, b in parts)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in found} == {".safetensors"}


def test_three_models_read_a_passage_twice_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once as reference and once as target, for all six directions."""
    lms = [tiny_lm("llama", 60), tiny_lm("gemma3_text", 20), tiny_lm("qwen2", 40)]
    text, calls = EXAMPLES[0], list[str]()
    for name in ("source", "reading"):
        method = getattr(PairCollector, name)

        def noting(self: PairCollector, *given: Any, _name: str = name, _call: Any = method) -> Any:
            lm = self.reference if _name == "source" else self.target
            calls.append(f"{lm.name} {_name}")
            return _call(self, *given)

        monkeypatch.setattr(PairCollector, name, noting)
    for reference, target in permutations(lms, 2):
        PairCollector(reference, target, SHORT, readings=tmp_path).collect(text)
    assert len(calls) == len(set(calls)) == 6


def test_what_shapes_a_reading_is_in_its_name(tmp_path: Path) -> None:
    reference, target = tiny_lm("llama", 60), tiny_lm("gpt2", 20)
    first, text = EXAMPLES[0], EXAMPLES[0].text
    template = replace(SHORT, suffix=f"{SHORT.suffix} ")

    def files(
        example: Example = first, template: Template = SHORT, target: LM = target, **more: Any
    ) -> PairFiles:
        return PairCollector(reference, target, template, tmp_path, **more).files(example)

    plain = files()
    others = {
        "asked": files(Example(text, first.questions[:1])),
        "template": files(template=template),
        "queries": files(queries=5),
        "target": files(target=tiny_lm("gpt2", 20, seed=7)),
    }
    assert {other.source for other in others.values()} == {plain.source}
    assert len({plain.reading, *(other.reading for other in others.values())}) == 5
    for shorter in (files(max_bytes=20), files(Example(text[:20], first.questions))):
        assert shorter.source != plain.source and shorter.reading != plain.reading


def test_answers_are_where_the_next_token_belongs_to_one() -> None:
    target = tiny_lm("gemma3_text", 20)
    collector = PairCollector(tiny_lm("llama", 60), target, SHORT)
    pair = in_memory(collector, EXAMPLES[0])
    answered = target.tokenizer.decode(pair.suffix_ids[1:][pair.answers[:-1]])
    wanted = {f" {answer}\n" for _, answer in EXAMPLES[0].questions}
    assert set(answered.splitlines(keepends=True)) == wanted
    assert not pair.answers[-1]


@pytest.mark.parametrize(("text", "kept"), [
    ("one two three", " one two three"), ("one two three four", " one two three"),
    ("één twéé drie vier", " één twéé"), ("a" * 60, f" {'a' * 15}"), ("日本語" * 9, " 日本語日本"),
])  # fmt: skip
def test_a_long_passage_is_cut_before_a_word(text: str, kept: str) -> None:
    target = tiny_lm("gemma3_text", 20)
    collector = PairCollector(tiny_lm("llama", 60), target, SHORT, max_bytes=15)
    assert collector.trim(text) == kept
    pair = in_memory(collector, Example(text, ()))
    assert len(pair.ids) == len(pair.native)
    assert int(pair.alignment[-1]) == len(pair.source) - 1


def test_a_passage_that_fits_no_window_is_left_out(tmp_path: Path) -> None:
    long, other = (Example(text * 200, ()) for text in ("日本語", "語本日"))  # 1,800 tokens
    run = Run(tmp_path / "run", tiny_lm("llama", 60), tiny_lm("gpt2", 20, seed=1))
    trainer = run.trainer(examples=[*EXAMPLES[:3], long], held_out=[other, *HELD_OUT[:1]])
    trainer.collect()
    assert (len(trainer.pairs), len(trainer.held_out_pairs)) == (3, 1)
    assert [e["why"] for e in run.events if "why" in e] == ["too long"] * 2


def test_a_passage_keeps_the_questions_of_all_its_rows(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [
        {"passage": f"Passage {n}.", "question": f"What is {word}?", "answer": word}
        for n in range(20)
        for word in ("one", "two")
    ]
    data.write_text("\n".join(json.dumps(row) for row in [*rows, rows[0]]))
    examples, chosen_by = command.examples_of([str(data)], [], limit=None, seed=0)
    assert len(examples) + len(chosen_by) == 20
    assert all([a for _, a in e.questions] == ["one", "two"] for e in examples)


def test_a_stopped_run_goes_on_with_fewer_passages_at_once(done: tuple[Run, Mixture]) -> None:
    done[0].trainer(recipe=replace(RECIPE, at_once=1))


def test_a_closed_form_of_another_recipe_is_fitted_anew(
    done: tuple[Run, Mixture], tmp_path: Path
) -> None:
    run = done[0]

    def fitted(**changes: Any) -> Ridge:
        recipe = replace(RECIPE, kind="ridge", **changes)
        trainer = run.trainer(recipe=recipe, work=tmp_path / f"{len(list(tmp_path.iterdir()))}")
        trainer.work = tmp_path
        return trainer.fit("ridge")

    first = fitted(reference_layers=(0, 1))
    again = fitted(reference_layers=(0, 1))
    other = fitted(reference_layers=(1, 2))
    assert torch.equal(first.project, again.project)
    assert not torch.equal(first.project, other.project)


def test_a_long_text_without_spaces_keeps_most_of_what_fits() -> None:
    collector = PairCollector(tiny_lm("llama", 60), tiny_lm("gpt2", 20), SHORT, max_bytes=150)
    assert len(collector.trim("title " + "b" * 400)) == 151
    assert collector.trim("title " + "b" * 139 + " cut off").endswith("b cut")
    assert collector.trim(" " * 400)
