"""Benchmarks on tiny random models: figures are finite and mean what they say."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_lm, tiny_models
from typer.testing import CliRunner

from cag.errors import TranslatorError
from cag.lm.cache import KV, Context
from cag.lm.decode import Generation
from cag.lm.loading import LM
from cag.lm.prompt import prefix_ids
from cag.settings import Settings
from cag.translate import Ridge, TranslatorConfig
from eval.arms import ARMS, Bench
from eval.bench import quality
from eval.bench.__main__ import app, main
from eval.bench.exact import run_exact
from eval.bench.ingest import run_ingest
from eval.bench.quality import UNRELATED, run_quality, summarise
from eval.bench.speed import run_speed, synthetic_text
from eval.data import Question

PASSAGES = (
    "The harbour of Lindholm was built in 1874.",
    "Boats are blue.",
    "The tower has nine bells.",
    "Its lighthouse is painted red and white.",
)


def question(number: int, passage: str, *answers: str) -> Question:
    return Question(f"q{number}", passage, "Which one is it?", answers or (passage.split()[-1],))


QUESTIONS = [question(i, PASSAGES[i // 2]) for i in range(5)]


def random_ridge(reference: LM, target: LM, seed: int) -> Ridge:
    config = TranslatorConfig(
        "ridge", reference.name, target.name, reference.fingerprint, target.fingerprint,
        reference.spec.to_json(), target.spec.to_json(),
        rank=8, key_rank=10, value_rank=6, key_norm=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    ridge = Ridge(config)
    for tensor in ridge.state_dict().values():
        tensor.normal_(0.0, 0.2)
    return ridge.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def bench() -> Bench:
    reference, target = tiny_lm("llama", 60), tiny_lm("gemma3_text", 20, seed=1)
    reference.name, target.name = "ref", "tgt"
    kinds = {k: random_ridge(reference, target, i) for i, k in enumerate(("translated", "ridge"))}
    return Bench(reference, target, kinds)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def questions(bench: Bench) -> list[Question]:
    """What the target says natively is accepted too, so that there is something to retain."""
    rows = run_quality(bench, QUESTIONS, ["native"])
    return [
        replace(q, answers=(*q.answers, row["native"]["answer"]))
        for q, row in zip(QUESTIONS, rows, strict=True)
    ]


@pytest.fixture(scope="module")
def rows(bench: Bench, questions: list[Question]) -> list[dict[str, Any]]:
    return run_quality(bench, questions, list(ARMS))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of two tokens."""
    monkeypatch.setattr(quality, "GENERATION", Generation(max_tokens=2))


@pytest.fixture
def settings(home: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Tiny models wherever a benchmark loads some, with translators at home."""
    for place in ("cag.engine.Models", "eval.bench.__main__.Models", "eval.bench.exact.Models"):
        monkeypatch.setattr(place, tiny_models)
    bench.translators["translated"].save(home / "translators" / "ref--tgt")
    bench.translators["ridge"].save(home / "runs" / "ref--tgt" / "ridge")
    chosen: dict[str, Any] = {
        "home": home, "reference": "ref", "target": "tgt", "dtype": "float32",
        "passage_tokens": 32, "max_tokens": 3,
    }  # fmt: skip
    for name, value in chosen.items():
        monkeypatch.setenv(f"CAG_{name.upper()}", str(value))
    return Settings(**chosen)


@pytest.fixture
def data(tmp_path: Path, questions: list[Question]) -> Path:
    """The questions as a SQuAD file."""
    paragraphs = []
    for q in questions:
        answers = [{"text": text} for text in q.answers]
        qas = [{"id": q.id, "question": q.question, "answers": answers}]
        paragraphs.append({"context": q.passage, "qas": qas})
    path = tmp_path / "dev.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return path


def numbers(value: Any) -> Iterator[float]:
    """All numbers in plain data."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


# -- quality -------------------------------------------------------------------------------


def test_every_arm_is_measured(rows: list[dict[str, Any]]) -> None:
    summary = summarise(rows, list(ARMS))
    assert summary["questions"] == len(QUESTIONS)
    assert list(summary["arms"]) == list(ARMS)
    for arm in summary["arms"].values():
        assert set(arm) == {"f1", "em", "nll", "retention", "retention_95", "recovered"}
        assert 0 <= arm["em"] <= arm["f1"] <= 1
        low, high = arm["retention_95"]
        assert low <= arm["retention"] <= high
    assert all(map(math.isfinite, numbers(summary)))


def test_native_retains_everything_and_no_context_recovers_nothing(
    rows: list[dict[str, Any]],
) -> None:
    arms = summarise(rows, list(ARMS))["arms"]
    assert arms["native"]["f1"] == arms["native"]["em"] == arms["native"]["retention"] == 1
    assert arms["native"]["retention_95"] == [1, 1]
    assert arms["native"]["recovered"] == 1
    assert arms["no_context"]["recovered"] == 0


def test_a_summary_is_the_mean_over_questions() -> None:
    def row(native: float, none: float, found: float) -> dict[str, Any]:
        nll = {"native": native, "no_context": none, "translated": found}
        return {arm: {"f1": 1 / value, "em": 0.0, "nll": value} for arm, value in nll.items()}

    arms = ["native", "no_context", "translated"]
    found = summarise([row(1, 5, 2), row(2, 4, 4)], arms)["arms"]["translated"]
    assert found["nll"] == 3
    assert found["f1"] == 0.375
    assert found["retention"] == 0.5  # 0.375 / 0.75
    assert found["recovered"] == 0.5  # (4.5 - 3) / (4.5 - 1.5)


def test_there_is_no_share_of_what_was_not_measured(rows: list[dict[str, Any]]) -> None:
    assert set(summarise(rows, ["translated"])["arms"]["translated"]) == {"f1", "em", "nll"}


def test_a_native_f1_of_0_still_gives_a_summary() -> None:
    measured = {"f1": 0.0, "em": 0.0}
    rows = [{"native": {**measured, "nll": 1.0}, "no_context": {**measured, "nll": 2.0}}]
    assert summarise(rows, ["native", "no_context"])["arms"]["native"]["recovered"] == 1


@pytest.mark.parametrize("arm", ["native", "reference"])
def test_nll_is_that_of_a_plain_forward_pass(
    arm: str, bench: Bench, rows: list[dict[str, Any]]
) -> None:
    lm = {"native": bench.target, "reference": bench.reference}[arm]
    for q, row in zip(QUESTIONS, rows, strict=True):
        prompt = [
            *prefix_ids(lm, bench.template.prefix),
            *lm.encode(f" {q.passage}"),
            *lm.encode(bench.template.suffix.format(question=q.question)),
        ]
        answer = lm.encode(f" {q.answers[0]}\n")
        with torch.no_grad():
            logits = lm.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        nll = torch.nn.functional.cross_entropy(logits, torch.tensor(answer))
        assert row[arm]["nll"] == pytest.approx(float(nll), rel=1e-5)


def test_arms_give_different_contexts(rows: list[dict[str, Any]]) -> None:
    nll = [[row[arm]["nll"] for row in rows] for arm in ARMS]
    assert all(a != b for i, a in enumerate(nll) for b in nll[:i])


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "count",
    [
        1,
        2,
        3,
        4,
    ],
)
def test_a_wrong_passage_is_never_the_own(
    count: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def translated(self: Bench, kind: str, passage: str) -> Context:
        given.append(passage)
        return self.start(self.target)

    monkeypatch.setattr(Bench, "translated", translated)
    asked = [question(i, PASSAGES[i // 2]) for i in range(2 * count)]
    run_quality(bench, asked, ["wrong_passage"])
    assert set(given) <= {*PASSAGES[:count], UNRELATED}
    assert all(other != q.passage for other, q in zip(given, asked, strict=True))


def test_a_log_resumes(
    tmp_path: Path,
    bench: Bench,
    questions: list[Question],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, log, asked = ["native", "no_context"], tmp_path / "log.jsonl", []

    def native(b: Bench, q: Question, other: str) -> tuple[LM, Context]:
        asked.append(q.id)
        return b.target, b.native(b.target, q.passage)

    monkeypatch.setitem(ARMS, "native", native)
    fresh = run_quality(bench, questions, names, log)
    lines = log.read_text().splitlines(keepends=True)
    assert [json.loads(line) for line in lines] == fresh

    log.write_text("".join(lines[:2]))
    asked.clear()
    told: list[tuple[int, int]] = []
    resumed = run_quality(bench, questions, names, log, lambda *at: told.append(at))
    assert asked == [q.id for q in questions[2:]]
    assert told == [(3, 5), (4, 5), (5, 5)]
    assert log.read_text().splitlines(keepends=True) == lines
    assert summarise(resumed, names) == summarise(fresh, names)

    asked.clear()
    assert run_quality(bench, questions, names, log) == fresh
    assert not asked


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("first", "arms"),
    [
        pytest.param(
            slice(0, 1), ["native"],
            id="other arms",
        ),
        pytest.param(
            slice(3, 5), ["no_context"],
            id="other questions",
        ),
    ],
)  # fmt: skip
def test_a_log_of_another_run_does_no_harm(
    first: slice, arms: list[str], tmp_path: Path, bench: Bench
) -> None:
    log = tmp_path / "log.jsonl"
    run_quality(bench, QUESTIONS[first], ["no_context"], log)
    rows = run_quality(bench, QUESTIONS[:2], arms, log)
    assert summarise(rows, arms)["questions"] == 2


# -- speed, ingest, exact ------------------------------------------------------------------


def test_synthetic_text_is_the_same_for_a_seed() -> None:
    assert synthetic_text(9, seed=1) == synthetic_text(9, seed=1) != synthetic_text(9, seed=2)
    assert synthetic_text(9).count(".") == 9


def test_speed(settings: Settings) -> None:
    result = run_speed(settings, tokens=20, repeats=2)
    assert set(result) == {
        "passage_tokens", "repeats", "path", "target_dtype", "ttft_ratio_warm", "ttft_ratio_cold",
        "median_ms", "bytes_per_token", "target_forward",
    }  # fmt: skip
    assert all(math.isfinite(number) and number >= 0 for number in numbers(result))
    assert result["path"] == "translated"
    assert result["target_dtype"] == "torch.float32"
    assert result["passage_tokens"] >= 20
    ms, forward = result["median_ms"], result["target_forward"]
    for arm in ("warm", "cold"):
        ratio = ms["direct"]["first_token"] / ms[arm]["first_token"]
        assert result[f"ttft_ratio_{arm}"] == pytest.approx(ratio)
        assert ms[arm]["load"] > 0 < ms[arm]["translate"]
        assert forward["direct"] - forward[arm] == result["passage_tokens"]
    assert ms["direct"]["load"] == ms["direct"]["translate"] == 0
    stored = 2 * tiny_lm("llama").spec.numbers_per_token  # bf16
    assert result["bytes_per_token"] > stored


def test_speed_says_when_nothing_was_translated(settings: Settings, home: Path) -> None:
    (home / "translators" / "ref--tgt" / "translator.json").unlink()
    assert run_speed(settings, tokens=5, repeats=1)["path"] == "fallback"


def test_ingest(settings: Settings) -> None:
    result = run_ingest(settings, passages=3, rounds=1)
    bare, ingest = (result[f"{name}_tokens_per_second"] for name in ("bare", "ingest"))
    assert bare > 0 < ingest
    assert result == {
        "bare_tokens_per_second": bare,
        "ingest_tokens_per_second": ingest,
        "share": pytest.approx(ingest / bare),
        "dtype": "torch.float32",
        "batch": settings.batch,
        "rounds": 1,
    }


@pytest.fixture
def sensitive(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The tiny Gemma writes much the same whatever it read; the tiny Llama does not."""
    models = functools.partial(tiny_models, target="llama")
    monkeypatch.setattr("eval.bench.exact.Models", models)
    return settings


def test_a_cache_in_fp32_is_exact(sensitive: Settings) -> None:
    result = run_exact(replace(sensitive, dtype="bfloat16"), QUESTIONS[::2])
    assert result["prompts"] == 3
    assert result["agreement_fp32"] == 1
    assert 0 <= result["agreement_bf16"] <= 1


def test_exact_notices_a_wrong_cache(sensitive: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    canonical = Context.canonical

    def wrong(self: Context, start: int, stop: int) -> KV:
        kv = canonical(self, start, stop)
        return replace(kv, values=-kv.values)

    monkeypatch.setattr(Context, "canonical", wrong)
    result = run_exact(sensitive, QUESTIONS[::2])
    assert result["agreement_fp32"] == result["agreement_bf16"] == 0


# -- command line --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (["quality", "--data", "DATA", "--n", "2"], "recovered"),
        (["speed", "--tokens", "5", "--repeats", "1"], "ttft_ratio_cold"),
        (["ingest"], "share"),
        (["exact", "--data", "DATA", "--n", "1"], "agreement_bf16"),
        (["docs", "DOCS"], "earlier"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_json_is_all_that_is_printed(
    command: list[str], key: str, settings: Settings, data: Path, docs: Path
) -> None:
    places = {"DATA": str(data), "DOCS": str(docs)}
    result = CliRunner().invoke(app, [*(places.get(a, a) for a in command), "--json"])
    assert result.exit_code == 0, result.exception
    assert key in json.loads(result.stdout)


@pytest.mark.usefixtures("settings")
def test_quality_reports_what_it_measured(data: Path, rows: list[dict[str, Any]]) -> None:
    arguments = ["quality", "--data", str(data), "--arms", "native,no_context,translated", "--json"]
    result = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert set(result["arms"]) == {"native", "no_context", "translated"}
    for name in ("retention", "recovered"):
        assert result[name] == result["arms"]["translated"][name]
    said = {k: result[k] for k in ("questions", "seed", "data", "reference", "target", "dtype")}
    assert said == {
        "questions": 5, "seed": 0, "data": "dev.json", "reference": "ref", "target": "tgt",
        "dtype": "torch.float32",
    }  # fmt: skip
    expected = summarise(rows, list(ARMS))["arms"]
    assert result["arms"]["native"]["nll"] == pytest.approx(expected["native"]["nll"], rel=1e-5)


@pytest.mark.usefixtures("settings")
def test_quality_prints_a_table(data: Path) -> None:
    result = CliRunner().invoke(app, ["quality", "--data", str(data), "--n", "2"])
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["arm", *ARMS]


@pytest.mark.usefixtures("settings")
def test_arms_without_a_translator_are_left_out(data: Path, home: Path) -> None:
    (home / "translators" / "ref--tgt" / "translator.json").unlink()
    result = CliRunner().invoke(app, ["quality", "--data", str(data), "--n", "1", "--json"])
    assert list(json.loads(result.stdout)["arms"]) == ["native", "no_context", "reference"]
    for arm in ("translated", "ridge", "wrong_passage"):
        assert f"arm '{arm}' is left out" in result.stderr


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    "place",
    [
        "translators/ref--tgt",
        pytest.param(
            "runs/ref--tgt/ridge",
        ),
    ],
)
def test_translators_of_other_models_are_refused(place: str, data: Path, home: Path) -> None:
    foreign = tiny_lm("gemma3_text", 20, seed=5)
    random_ridge(tiny_lm("llama", 60), foreign, 0).save(home / place)
    result = CliRunner().invoke(app, ["quality", "--data", str(data), "--n", "1"])
    assert isinstance(result.exception, TranslatorError)


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    ("content", "arguments"),
    [
        ("broken", ["quality"]),
        ("broken", ["exact"]),
        pytest.param(
            None, ["quality", "--arms", "native,nativ"],
        ),
        pytest.param(
            '{"data": []}', ["quality"],
        ),
        pytest.param(
            '{"data": []}', ["exact"],
        ),
    ],
)  # fmt: skip
def test_user_errors_are_one_line_and_code_2(
    content: str | None,
    arguments: list[str],
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        data.write_text(content)
    monkeypatch.setattr(sys, "argv", ["eval.bench", *arguments, "--data", str(data)])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert end.value.code == 2
    assert said.err.startswith("eval.bench: ") and said.err.count("\n") == 1
    assert not said.out
