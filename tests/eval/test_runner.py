"""Arms, measures and the runner on tiny random models of every family."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, TEXT, random_translator, tiny_lm, tiny_models
from typer.testing import CliRunner

from cag import cli
from cag.errors import CagError, TranslatorError
from cag.lm.cache import KV
from cag.lm.decode import Generation
from cag.lm.loading import LM
from cag.lm.prompt import prefix_ids
from cag.models import Models
from cag.settings import Settings
from cag.translate import Translator
from eval import flops, measure, runner
from eval.arms import ARMS, NEEDS, TARGET_ALONE, Bench
from eval.cli import eval_app
from eval.data import TASKS, Question, Task
from eval.identity import OtherRun, differences
from eval.measure import MeteredBench, native_logits, run_arm
from eval.routing import routing
from eval.runner import UNRELATED, RunConfig, other_passages, run
from eval.summary import read_log

PASSAGES = (
    "The harbour of Lindholm was built in 1874.",
    "Boats are blue. They are old.",
    "The tower has nine bells.",
)
FREE = [
    Question(f"q{i}", (PASSAGES[i // 2],), "Which one is it?", (PASSAGES[i // 2].split()[-1],))
    for i in range(5)
]
CLOSED = [
    Question(f"c{i}", PASSAGES[i : i + 2], "Is it old?", (gold,), ("yes", "no", "maybe"))
    for i, gold in enumerate(("no", "yes"))
]
KINDS = {"translated": "mixture", **{n: n for n in NEEDS.values() if n != "translated"}}


def trained(kind: str, target: LM, reference: LM, seed: int = 0) -> Translator:
    translator = random_translator(kind, target, reference=reference, seed=seed)
    translator.report.details = {"passages": 12, "minutes": 3.0}
    return translator


def make_bench(family: str) -> MeteredBench:
    reference, target = tiny_lm("llama", 60), tiny_lm(family, 20, seed=1)
    reference.name, target.name = "ref", "tgt"
    made = {
        name: trained(kind, target, reference, seed)
        for seed, (name, kind) in enumerate(KINDS.items())
    }
    return MeteredBench(reference, target, made, pool=PASSAGES)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of three tokens."""
    monkeypatch.setattr(measure, "GENERATION", Generation(max_tokens=3))


@pytest.fixture(scope="module")
def bench() -> MeteredBench:
    return make_bench("gemma3_text")


# -- arms and measures ---------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_arm_answers(family: str) -> None:
    bench = make_bench(family)
    for question in (FREE[0], CLOSED[0]):
        native = native_logits(bench, question)
        rows = {a: run_arm(bench, a, question, ("Other. Text.",), native)[0] for a in ARMS}
        assert json.loads(json.dumps(rows, allow_nan=False)) == rows
        for row in rows.values():
            assert row["nll"] > 0 < row["macs"]
            assert row["seconds"] > row["ms"] / 1000 >= 0
        plain, own = rows["replay_plain"], rows["native"]
        assert plain["answer"] == own["answer"]
        assert plain["nll"] == pytest.approx(own["nll"], abs=1e-4)
        assert plain["first"] == pytest.approx(0, abs=1e-5)
        assert rows["reference"]["first"] is None
        assert rows["translated"]["first"] > 0


def test_tokens_are_those_that_pass_the_layers(bench: MeteredBench) -> None:
    question = CLOSED[0]
    rows = {a: run_arm(bench, a, question, PASSAGES[2:])[0] for a in ARMS}
    suffix = len(measure.suffix_ids(bench, bench.target, question))
    own, other = (
        sum(map(len, bench.ids(bench.target, passages)))
        for passages in (question.passages, PASSAGES[2:])
    )
    config, prefix = bench.target.model.config, bench.start(bench.target).length
    translator = {
        n: t.multiplications() + flops.lowest_layer(config) for n, t in bench.translators.items()
    }

    def macs(read: int, behind: int) -> int:
        return flops.reading(config, read, behind) + flops.head(config)

    for arm in ("native", "replay_plain", "text_rag"):
        assert rows[arm]["tokens"] >= suffix + 1
    assert rows["native"]["tokens"] == own + suffix
    assert rows["native"]["macs"] == macs(own + suffix, prefix)
    assert rows["replay_plain"]["tokens"] == 2 * own + suffix  # what it injects was read first
    for arm in ("translated", "ridge", "single_projection", "shared_latent"):
        assert rows[arm]["tokens"] == suffix
        assert rows[arm]["macs"] == own * translator[arm] + macs(suffix, prefix + own)
    assert rows["replay"]["tokens"] == own + suffix
    assert rows["replay"]["macs"] == own * translator["translated"] + macs(own + suffix, prefix)
    assert rows["wrong_passage"]["tokens"] == rows["no_context"]["tokens"] == suffix
    wrong = other * translator["translated"] + macs(suffix, prefix + other)
    assert rows["wrong_passage"]["macs"] == wrong
    assert rows["refresh_last_16"]["tokens"] == rows["only_last_16"]["tokens"] == suffix + 16
    assert rows["refresh_last_16"]["macs"] > rows["only_last_16"]["macs"]
    bench._sources.clear()
    assert run_arm(bench, "translated", question, ())[0]["macs"] == rows["translated"]["macs"]


@pytest.mark.parametrize("family", FAMILIES)
def test_apart_is_native_for_the_first_passage_alone(family: str) -> None:
    bench = make_bench(family)
    lm, (one, two) = bench.target, PASSAGES[:2]
    lengths = [len(ids) for ids in bench.ids(lm, (one, two))]
    start = bench.start(lm).length

    def found(arm: str, *passages: str) -> KV:
        context = ARMS[arm](bench, replace(FREE[0], passages=passages), ())[1]
        assert context.length == start + sum(lengths)
        return context.canonical(start, context.length)

    both = found("apart", one, two)
    native, swapped = found("native", one, two), found("apart", two, one)
    split = lengths[0]
    torch.testing.assert_close(both.keys[:, :, :split], native.keys[:, :, :split])
    assert not torch.allclose(both.values[-1, :, split:], native.values[-1, :, split:], atol=1e-3)
    torch.testing.assert_close(both.values[:, :, split:], swapped.values[:, :, : lengths[1]])


def test_sources_cost_nothing_where_both_models_are_one(bench: MeteredBench) -> None:
    alone = MeteredBench(bench.target, bench.target, {})
    made = trained("ridge", bench.target, bench.target)
    alone.translators["translated"] = made
    row, _ = run_arm(alone, "translated", FREE[0], ())
    assert row["tokens"] == len(measure.suffix_ids(alone, alone.target, FREE[0]))


def logprobs(lm: LM, bench: Bench, question: Question, answer: str) -> torch.Tensor:
    """Of an answer's tokens, by one plain forward pass."""
    prompt = [
        *prefix_ids(lm, bench.template.prefix),
        *(i for ids in bench.ids(lm, question.passages) for i in ids),
        *measure.suffix_ids(bench, lm, question),
    ]
    wanted = lm.encode(f" {answer}\n")
    with torch.no_grad():
        logits = lm.model(torch.tensor([prompt + wanted])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(wanted)), torch.tensor(wanted)]


@pytest.mark.parametrize("arm", ["native", "reference"])
def test_likelihoods_are_those_of_a_plain_forward_pass(arm: str, bench: MeteredBench) -> None:
    lm = {"native": bench.target, "reference": bench.reference}[arm]
    row, logits = run_arm(bench, arm, FREE[0], ())
    wanted = logprobs(lm, bench, FREE[0], FREE[0].answers[0])
    assert row["nll"] == pytest.approx(-float(wanted.mean()), rel=1e-5)
    if arm == "native":
        assert torch.allclose(native_logits(bench, FREE[0]), logits, atol=1e-5)
    for question in CLOSED:
        row, _ = run_arm(bench, arm, question, ())
        by_choice = {c: logprobs(lm, bench, question, c) for c in question.choices}
        assert row["logprob"] == pytest.approx(
            {c: float(p.sum()) for c, p in by_choice.items()}, abs=1e-3
        )
        assert row["sum"] == max(by_choice, key=lambda c: float(by_choice[c].sum()))
        assert row["mean"] == max(by_choice, key=lambda c: float(by_choice[c].mean()))
        assert row["right_sum"] == float(row["sum"] == question.answers[0])
        assert row["right_mean"] == float(row["mean"] == question.answers[0])
        gold = by_choice[question.answers[0]]
        assert row["nll"] == pytest.approx(-float(gold.mean()), rel=1e-5)


def test_sum_and_mean_can_disagree(bench: MeteredBench) -> None:
    """The longer choice gains by the mean."""
    question = replace(CLOSED[0], choices=("no", "no no no no no no"), answers=("no",))
    row, _ = run_arm(bench, "no_context", question, ())
    assert row["sum"] == "no"
    long = logprobs(bench.target, bench, replace(question, passages=()), question.choices[1])
    assert row["logprob"][question.choices[1]] == pytest.approx(float(long.sum()), abs=1e-3)


def test_routing_counts_every_token(bench: MeteredBench) -> None:
    found = routing(bench, [PASSAGES[:2], PASSAGES[2:]])
    assert found is not None
    tokens = sum(map(len, bench.ids(bench.target, PASSAGES)))
    assert (found["passages"], found["tokens"]) == (3, tokens)
    assert sum(found["tokens_per_expert"]) == pytest.approx(2)
    assert sum(found["weight"]) == pytest.approx(1)
    assert 0 < found["entropy"] <= found["most_entropy"] == math.log(2)
    assert 0 < found["usage_entropy"] <= 1
    assert "route" not in vars(bench.translators["translated"])
    assert routing(bench, [PASSAGES], "ridge") is None


@pytest.mark.parametrize(
    ("texts", "other"),
    [
        ([("a",)], (UNRELATED,)),
        ([("a",), ("b",)], ("b",)),
        ([("a",), ("b",), ("c",), ("d",)], ("c",)),
        ([("a", "x"), ("b",), ("c", "x"), ("d",)], ("d",)),  # the next one shares nothing
        ([("a", "x"), ("x",)], (UNRELATED,)),
    ],
)
def test_wrong_passages_are_none_of_the_own(texts: list[Any], other: tuple[str, ...]) -> None:
    assert other_passages(texts, Question("q", texts[0], "?", ("x",))) == other


# -- the runner ----------------------------------------------------------------------------


@pytest.fixture
def settings(home: Path, bench: MeteredBench, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Tiny models with translators at home, and a task of either kind."""
    monkeypatch.setattr("cag.models.Models", tiny_models)
    for name, translator in bench.translators.items():
        own = name == "translated"
        place = home / "translators" / "ref--tgt" if own else home / "runs" / "ref--tgt" / name
        translator.save(place)
    for name, questions in (("free", FREE), ("closed", CLOSED)):
        task = Task(name, "report", "", lambda path, found=questions: found)  # type: ignore[misc]
        monkeypatch.setitem(TASKS, name, task)
    chosen: dict[str, Any] = {"home": home, "reference": "ref", "target": "tgt", "dtype": "float32"}
    for name, value in chosen.items():
        monkeypatch.setenv(f"CAG_{name.upper()}", str(value))
    return Settings(**chosen)


@pytest.fixture
def loaded(settings: Settings) -> Models:
    return tiny_models(settings)


def config(out: Path, arms: str = "native,no_context", **changes: Any) -> RunConfig:
    made = RunConfig((("ref", "tgt"),), ("free",), tuple(arms.split(",")), out, out / "run", 5)
    return replace(made, **changes)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Which arm was asked which question."""
    pytest.importorskip("matplotlib")
    calls: list[tuple[str, str]] = []

    def counting(bench: Any, arm: str, question: Question, *rest: Any) -> Any:
        calls.append((arm, question.id))
        return run_arm(bench, arm, question, *rest)

    monkeypatch.setattr(runner, "run_arm", counting)
    return calls


Asked = list[tuple[str, str]]


def test_a_run_continues(tmp_path: Path, settings: Settings, loaded: Models, asked: Asked) -> None:
    told: list[tuple[int, int | None]] = []
    fresh = run(config(tmp_path), loaded, settings, lambda s, *at: told.append(at))
    assert len(asked) == 10
    assert told == [(0, None), *((done, 10) for done in range(2, 11, 2))]
    log = tmp_path / "run/ref--tgt/free.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    drawn = TASKS["free"].questions(tmp_path)
    assert [json.loads(line)["id"] for line in lines] == [question.id for question in drawn]

    log.write_text("".join(lines[:2]) + lines[2][:-30])  # a crash in the middle of a line
    asked.clear()
    again = run(config(tmp_path), loaded, settings)
    assert {question for _, question in asked} == {json.loads(x)["id"] for x in lines[2:]}
    assert list(read_log(log)) == [json.loads(line)["id"] for line in lines]
    assert figures(again) == figures(fresh)

    asked.clear()
    assert figures(run(config(tmp_path), loaded, settings)) == figures(fresh)
    assert not asked


def figures(metrics: dict[str, Any], task: str = "free") -> dict[str, Any]:
    """All figures but those of a clock."""
    arms = metrics["pairs"]["ref--tgt"]["tasks"][task]["arms"]
    return {arm: {n: v for n, v in found.items() if n != "ms"} for arm, found in arms.items()}


def test_arms_tasks_and_translators_can_be_added(
    tmp_path: Path, settings: Settings, loaded: Models, asked: Asked
) -> None:
    run(config(tmp_path), loaded, settings)
    asked.clear()
    metrics = run(config(tmp_path, "ridge,native,replay_plain"), loaded, settings)
    assert {arm for arm, _ in asked} == {"ridge", "replay_plain"}
    found = figures(metrics)
    assert list(found) == ["native", "no_context", "ridge", "replay_plain"]
    assert found["ridge"]["first_kl"] > 0 == found["native"]["first_kl"]  # native is heard again
    control = metrics["pairs"]["ref--tgt"]["tasks"]["free"]["controls"]["replay_plain"]
    assert control["holds"] and control["agreement"] == 1
    asked.clear()
    both = config(tmp_path, "native,translated", tasks=("closed", "free"))
    metrics = run(both, loaded, settings)
    assert set(metrics["pairs"]["ref--tgt"]["tasks"]) == {"free", "closed"}
    assert len(asked) == 2 * 2 + 5
    written = json.loads((tmp_path / "run/config.json").read_text())
    assert set(written["pairs"]["ref--tgt"]["translators"]) == {"ridge", "translated"}
    assert len(written["sessions"]) == 3


def test_a_target_answers_once_for_all_its_pairs(
    tmp_path: Path, settings: Settings, loaded: Models, bench: MeteredBench, asked: Asked
) -> None:
    other = replace(loaded.lm("ref"), name="other")
    loaded.add(other)
    bench.translators["translated"].save(settings.home / "translators" / "other--tgt")
    pairs = (("ref", "tgt"), ("other", "tgt"))
    run(config(tmp_path, "native,no_context"), loaded, settings)
    asked.clear()
    metrics = run(
        config(tmp_path, "native,translated,no_context,only_50", pairs=pairs), loaded, settings
    )
    assert Counter(arm for arm, _ in asked) == {"translated": 10, "only_50": 5}
    rows = [read_log(tmp_path / f"run/{name}/free.jsonl") for name in ("ref--tgt", "other--tgt")]
    for question, first in rows[0].items():
        for arm, found in rows[1][question]["arms"].items():
            same = {**first["arms"][arm], "seconds": found["seconds"], "ms": found["ms"]}
            assert same == found
    assert set(metrics["pairs"]) == {"ref--tgt", "other--tgt"}


def test_arms_of_the_target_alone_do_not_ask_the_reference(bench: MeteredBench) -> None:
    nobody = MeteredBench(None, bench.target, {}, pool=[TEXT])  # type: ignore[arg-type]
    for arm in TARGET_ALONE:
        lm, context = ARMS[arm](nobody, FREE[0], ())
        assert lm is bench.target and len(context.canonical(0, context.length)) == context.length


def test_the_config_says_what_was_run(
    tmp_path: Path, settings: Settings, loaded: Models, bench: MeteredBench, asked: Asked
) -> None:
    run(config(tmp_path, "native,translated"), loaded, settings)
    written = json.loads((tmp_path / "run/config.json").read_text())
    pair = written["pairs"]["ref--tgt"]
    assert pair["target"]["fingerprint"] == bench.target.fingerprint
    assert pair["target"]["dtype"] == "float32"
    translator = pair["translators"]["translated"]
    assert len(translator["sha256"]) == 64
    assert translator["training"]["passages"] == 12
    assert translator["macs_per_token"] == bench.translators["translated"].multiplications()
    assert set(written["versions"]) == {"python", "cag", "torch", "transformers"}
    assert written["tasks"]["free"]["questions"] == 5
    (session,) = written["sessions"]
    assert session["threads"] == torch.get_num_threads()
    assert "commit" in session
    routed = json.loads((tmp_path / "run/ref--tgt/free.routing.json").read_text())
    assert routed["passages"] == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"n": 4}, "n is 5, not 4"), ({"seed": 1}, "seed is 0, not 1")],
    ids=["n", "seed"],
)
def test_a_folder_of_another_run_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path, settings: Settings, loaded: Models,
    asked: Asked,
) -> None:  # fmt: skip
    run(config(tmp_path), loaded, settings)
    before = (tmp_path / "run/config.json").read_text()
    asked.clear()
    with pytest.raises(OtherRun, match=said):
        run(config(tmp_path, **changes), loaded, settings)
    assert not asked
    assert (tmp_path / "run/config.json").read_text() == before


def test_another_translator_is_another_run(
    tmp_path: Path, settings: Settings, bench: MeteredBench, asked: Asked
) -> None:
    arms = "native,ridge"
    run(config(tmp_path, arms), tiny_models(settings), settings)
    trained("ridge", bench.target, bench.reference, seed=9).save(
        settings.home / "runs/ref--tgt/ridge"
    )
    with pytest.raises(OtherRun, match="pairs/ref--tgt/translators/ridge/sha256"):
        run(config(tmp_path, arms), tiny_models(settings), settings)


def test_what_may_grow_and_what_may_not() -> None:
    old = {"n": 1, "pairs": {"a": {"x": 1, "translators": {"t": {"sha": 1}}}}, "tasks": {"q": 1}}
    new = {"n": 1, "pairs": {"a": {"x": 1, "translators": {"u": {"sha": 2}}}, "b": {}}, "tasks": {}}
    assert differences(old, new) == []
    new["pairs"]["a"]["x"] = None  # type: ignore[index]
    assert differences(old, new) == ["pairs/a/x is 1, not null"]
    told = ({"retention": value, "recovered": value, "sha256": 1} for value in (None, 0.9))
    assert differences(*told) == []  # a calibration changes no answer
    assert differences({"n": 1}, {"m": 1}) == ["n is 1, not null", "m is null, not 1"]


def test_questions_that_do_not_fit_are_left_out_of_all_arms(
    tmp_path: Path, settings: Settings, loaded: Models, asked: Asked,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    long = replace(FREE[0], id="long", passages=("word " * 600,))
    task = Task("free", "report", "", lambda path: [*FREE, long])
    monkeypatch.setitem(TASKS, "free", task)
    warned: list[str] = []
    changed = config(tmp_path, "no_context,native", n=6)
    metrics = run(changed, loaded, settings, warn=warned.append)
    found = metrics["pairs"]["ref--tgt"]["tasks"]["free"]
    assert (found["questions"], found["skipped"]) == (5, 1)
    assert len(warned) == 1 and "'long' is left out" in warned[0]
    asked.clear()
    run(changed, loaded, settings)
    assert not asked


def test_arms_without_a_translator_are_left_out(
    tmp_path: Path, settings: Settings, loaded: Models, asked: Asked
) -> None:
    (settings.home / "translators/ref--tgt/translator.json").unlink()
    warned: list[str] = []
    wanted = "native,translated,wrong_passage,ridge"
    found = figures(run(config(tmp_path, wanted), loaded, settings, warn=warned.append))
    assert list(found) == ["native", "ridge"]
    assert [text.split("'")[1] for text in warned] == ["translated", "wrong_passage"]


@pytest.mark.parametrize("place", ["translators/ref--tgt", "runs/ref--tgt/ridge"])
def test_translators_of_other_models_are_refused(
    place: str, tmp_path: Path, settings: Settings, loaded: Models, bench: MeteredBench,
    asked: Asked,
) -> None:  # fmt: skip
    foreign = tiny_lm("gemma3_text", 20, seed=5)
    trained("ridge", foreign, bench.reference).save(settings.home / place)
    with pytest.raises(TranslatorError, match="fingerprint"):
        run(config(tmp_path, "translated,ridge"), loaded, settings)


def test_unknown_arms_are_refused_before_anything_is_written(
    tmp_path: Path, settings: Settings, loaded: Models, asked: Asked
) -> None:
    with pytest.raises(CagError, match="unknown arm 'nativ'; use some of: native"):
        run(config(tmp_path, "native,nativ"), loaded, settings)
    assert not (tmp_path / "run").exists()


# -- command line --------------------------------------------------------------------------


@pytest.mark.usefixtures("settings", "asked")
@pytest.mark.parametrize("verb", [[], ["run"]], ids=["eval", "eval run"])
def test_the_command_measures_and_reports(verb: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--pairs", "ref:tgt", "--tasks", "free,closed", "--arm", "native"]
    arguments += ["--arms", "no_context,wrong_passage", "--n", "2", "--out", str(out)]
    result = CliRunner().invoke(eval_app, [*verb, *arguments])
    assert result.exit_code == 0, result.exception
    assert result.stdout == f"report: {out / 'report.md'}\n"
    assert "12/12 answers, 0 min left" in result.stderr
    text = (out / "report.md").read_text()
    assert "cag eval --pairs ref:tgt --tasks free,closed" in text
    (out / "report.md").unlink()
    result = CliRunner().invoke(eval_app, ["report", str(out), "--json"])
    assert result.exit_code == 0, result.exception
    metrics = json.loads(result.stdout)
    assert set(metrics["pairs"]["ref--tgt"]["tasks"]) == {"free", "closed"}
    assert (out / "report.md").read_text() == text


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--tasks", "free", "--pairs", "ref"],
        ["--tasks", "nothing"],
        ["--tasks", "broken.json"],
        ["--tasks", "free", "--arms", "nativ"],
        ["report", "nowhere"],
    ],
    ids=" ".join,
)
def test_user_errors_are_one_line_and_code_2(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    monkeypatch.setattr(sys, "argv", ["cag", "eval", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    assert end.value.code == 2
    assert said.err.startswith("cag: ") and said.err.count("\n") == 1
    assert not said.out
