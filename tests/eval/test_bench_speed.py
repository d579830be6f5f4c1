"""Speed, load, flops, ingest and exact on tiny models: figures mean what they say."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_config, tiny_lm, tiny_models
from typer.testing import CliRunner

from cag.lm.cache import KV, Context
from cag.lm.prompt import DEFAULT_TEMPLATE, prefix_ids
from cag.lm.pull import resolve
from cag.settings import Settings
from cag.translate import TRANSLATORS, TranslatorConfig
from eval.bench.__main__ import app, main
from eval.bench.exact import run_exact
from eval.bench.flops import flops_table, run_flops
from eval.bench.ingest import run_ingest, synthetic_items
from eval.bench.load import run_load
from eval.bench.machine import drop_from_page_cache, in_page_cache, peak_growth
from eval.bench.speed import run_speed, synthetic_sentences, synthetic_text
from eval.data import Question
from eval.flops import lowest_layer, per_token, translation

QUESTIONS = [
    Question(f"q{i}", (passage,), "Which one is it?", (passage.split()[-1],))
    for i, passage in enumerate(
        ("The harbour of Lindholm was built in 1874.", "Boats are blue.", "Nine bells ring.")
    )
]


@pytest.fixture
def settings(home: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Tiny models wherever a benchmark loads some, with a random translator at home."""
    for place in ("cag.engine.Models", "eval.bench.exact.Models"):
        monkeypatch.setattr(place, tiny_models)
    reference, target = tiny_lm("llama", 60), tiny_lm("gemma3_text", 20, seed=1)
    config = TranslatorConfig(
        "ridge", "ref", "tgt", reference.fingerprint, target.fingerprint,
        reference.spec.to_json(), target.spec.to_json(),
        rank=8, key_rank=10, value_rank=6, key_norm=True,
    )  # fmt: skip
    torch.manual_seed(0)
    translator = TRANSLATORS["ridge"](config)
    for tensor in translator.state_dict().values():
        tensor.normal_(0.0, 0.2)
    translator.save(home / "translators" / "ref--tgt")
    chosen: dict[str, Any] = {
        "home": home, "reference": "ref", "target": "tgt", "dtype": "float32",
        "passage_tokens": 32, "max_tokens": 3,
    }  # fmt: skip
    for name, value in chosen.items():
        monkeypatch.setenv(f"CAG_{name.upper()}", str(value))
    return Settings(**chosen)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The questions as a SQuAD file."""
    paragraphs = []
    for q in QUESTIONS:
        qas = [{"id": q.id, "question": q.question, "answers": [{"text": q.answers[0]}]}]
        paragraphs.append({"context": q.passages[0], "qas": qas})
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


# -- speed ---------------------------------------------------------------------------------


def test_synthetic_text_is_the_same_for_a_seed() -> None:
    assert synthetic_text(9, seed=1) == synthetic_text(9, seed=1) != synthetic_text(9, seed=2)
    assert synthetic_text(9).count(".") == 9
    assert synthetic_text(3, seed=4) == " ".join(islice(synthetic_sentences(4), 3))


def test_speed(settings: Settings) -> None:
    result = run_speed(settings, [20, 90], repeats=2)
    assert set(result) == {"repeats", "lengths", "skipped"}
    assert result["repeats"] == 2 and not result["skipped"]
    assert all(math.isfinite(number) and number >= 0 for number in numbers(result))
    assert [length["tokens"] for length in result["lengths"]] == [20, 90]
    for length in result["lengths"]:
        assert set(length) == {
            "tokens", "passage_tokens", "repeats", "path", "target_dtype", "ttft_ratio_warm",
            "ttft_ratio_cold", "ttft_ratio_kept", "median_ms", "bytes_per_token", "memory_bytes",
            "target_forward",
        }  # fmt: skip
        assert length["path"] == "translated" and length["repeats"] == 2
        assert length["target_dtype"] == "torch.float32"
        longest = max(len(s) for s in islice(synthetic_sentences(), 100)) + 2
        assert length["tokens"] <= length["passage_tokens"] < length["tokens"] + longest
        ms, forward = length["median_ms"], length["target_forward"]
        for arm in ("warm", "cold"):
            ratio = ms["direct"]["first_token"] / ms[arm]["first_token"]
            assert length[f"ttft_ratio_{arm}"] == pytest.approx(ratio)
            assert ms[arm]["load"] > 0 < ms[arm]["translate"]
            assert forward["direct"] - forward[arm] == length["passage_tokens"]
        assert ms["kept"]["load"] == ms["kept"]["align"] == 0
        assert forward["kept"] == forward["warm"]
        assert ms["direct"]["load"] == ms["direct"]["translate"] == 0
        stored = 2 * tiny_lm("llama").spec.numbers_per_token  # bf16
        assert length["bytes_per_token"] > stored
        memory = length["memory_bytes"]
        in_target = 4 * tiny_lm("gemma3_text", 20).spec.numbers_per_token  # fp32
        prefix = len(prefix_ids(tiny_lm("gemma3_text", 20, seed=1), DEFAULT_TEMPLATE.prefix))
        # the prefix was read before, the answer's token is not in the context
        assert memory["context"] == in_target * (prefix + forward["direct"] - 1)
        assert memory["loaded"] > 0
        assert set(memory["peak_growth"]) == {"direct", "translated"}


def test_speed_says_when_nothing_was_translated(settings: Settings, home: Path) -> None:
    (home / "translators" / "ref--tgt" / "translator.json").unlink()
    (length,) = run_speed(settings, [5], repeats=1)["lengths"]
    assert length["path"] == "fallback"
    assert length["memory_bytes"]["loaded"] == 0


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(5000, id="more than the window"),
        pytest.param(505, id="too much with the prompt around it"),
    ],
)
def test_a_length_that_does_not_fit_is_skipped_with_a_note(settings: Settings, tokens: int) -> None:
    result = run_speed(settings, [5, tokens, 5], repeats=1)
    assert [length["tokens"] for length in result["lengths"]] == [5]
    (skipped,) = result["skipped"]
    assert skipped["tokens"] == tokens
    assert "at most 512" in skipped["note"]


# -- load ----------------------------------------------------------------------------------


def test_load(settings: Settings) -> None:
    result = run_load(settings, passages=3, rounds=2)
    speed = result["median_bytes_per_second"]
    assert set(speed) == {"get_cold", "get_warm", "raw_cold", "raw_warm"}
    assert all(math.isfinite(value) and value > 0 for value in speed.values())
    for state in ("warm", "cold"):
        ratio = speed[f"get_{state}"] / speed[f"raw_{state}"]
        assert result[f"ratio_{state}"] == pytest.approx(ratio)
    assert 0 <= result["dropped"] <= 1
    assert result["files"] == 3 and result["rounds"] == 2 and result["codec"] == "bf16"
    assert result["bytes"] == pytest.approx(result["bytes_per_token"] * 3 * 32)
    assert result["bytes_per_token"] > 2 * tiny_lm("llama").spec.numbers_per_token


def test_what_was_dropped_is_not_in_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 2**20)
    assert in_page_cache(file)
    drop_from_page_cache([file])
    in_page_cache(file)  # a RAM disk keeps it, so the answer is not known here
    assert file.read_bytes() == b"x" * 2**20


def test_peak_growth_sees_what_was_freed_again() -> None:
    size = 64 * 2**20
    found = peak_growth(lambda: torch.ones(size, dtype=torch.uint8))
    if found is None:
        pytest.skip("this kernel does not tell")
    assert 0.9 * size < found < 2 * size
    nothing = peak_growth(lambda: None)
    assert nothing is not None and nothing < size / 8


# -- flops ---------------------------------------------------------------------------------


def pull(home: Path, name: str, family: str) -> Any:
    """A config where a pulled model would be, and no weights."""
    folder = home / "models" / name
    config = tiny_config(family, 100)
    config.save_pretrained(folder)
    (folder / "cag.json").write_text("{}")
    assert resolve(name, home) == folder
    return config


def test_flops_of_pulled_pairs_and_of_a_large_one(settings: Settings, home: Path) -> None:
    small = pull(home, "smollm2-135m-instruct", "llama"), pull(home, "gemma-3-270m", "gemma3_text")
    result = run_flops(settings)
    assert "qwen2.5-coder-0.5b-instruct" in result["skipped"]
    pairs = result["pairs"]
    assert [(p["reference"], p["target"], p["recipe"]) for p in pairs] == [
        ("smollm2-135m-instruct", "gemma-3-270m", "default"),
        ("gemma-3-270m", "smollm2-135m-instruct", "default"),
        ("llama-3.1-8b", "qwen2.5-7b", "default"),
        ("llama-3.1-8b", "qwen2.5-7b", "wide"),
    ]
    for pair, (source, sink) in zip(pairs, [small, small[::-1]], strict=False):
        assert pair["target_macs_per_token"] == per_token(sink)
        assert pair["translator_macs_per_token"] == translation(source, sink)
        assert pair["lowest_layer_macs_per_token"] == lowest_layer(sink)
    for pair in pairs:
        own, translated = pair["target_macs_per_token"], pair["translator_macs_per_token"]
        assert pair["share"] == translated / own < pair["share_with_lowest_layer"]
        flops = pair["query_flops"]
        assert pair["query_ratio"] == flops["direct"] / flops["translated"]
    default, wide = (pair["share"] for pair in pairs[-2:])
    assert 0.01 < default < 0.02 < wide < 0.1


def test_flops_without_any_model(settings: Settings) -> None:
    result = run_flops(settings)
    assert len(result["pairs"]) == 2 and len(result["skipped"]) >= 3
    lines = list(flops_table(result))
    assert len({len(line) for line in lines[:3]}) == 1
    assert "llama-3.1-8b -> qwen2.5-7b" in lines[1]
    assert sum("skipped" in line for line in lines) == len(result["skipped"])


# -- ingest, exact -------------------------------------------------------------------------


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


def test_synthetic_items_differ_by_seed() -> None:
    lm = tiny_lm("llama")
    first, same, other = (synthetic_items(lm, 2, 200, seed) for seed in (1, 1, 2))
    assert first == same
    ids = [tuple(ids) for items in (first, other) for _, ids in items]
    assert len(set(ids)) == 4 and {len(row) for row in ids} == {200}
    assert all(len(passage.spans) == 200 for passage, _ in first)


@pytest.fixture
def sensitive(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The tiny Gemma writes much the same whatever it read; the tiny Llama does not."""
    models = functools.partial(tiny_models, target="llama")
    monkeypatch.setattr("eval.bench.exact.Models", models)
    return settings


def test_a_cache_in_fp32_is_exact(sensitive: Settings) -> None:
    result = run_exact(replace(sensitive, dtype="bfloat16"), QUESTIONS)
    assert result["prompts"] == 3
    assert result["agreement_fp32"] == 1
    assert 0 <= result["agreement_bf16"] <= 1


def test_exact_notices_a_wrong_cache(sensitive: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    canonical = Context.canonical

    def wrong(self: Context, start: int, stop: int) -> KV:
        kv = canonical(self, start, stop)
        return replace(kv, values=-kv.values)

    monkeypatch.setattr(Context, "canonical", wrong)
    result = run_exact(sensitive, QUESTIONS)
    assert result["agreement_fp32"] == result["agreement_bf16"] == 0


# -- command line --------------------------------------------------------------------------


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    ("command", "key"),
    [
        (["speed", "--tokens", "5", "--tokens", "9", "--repeats", "1"], "lengths"),
        (["load", "--passages", "2", "--rounds", "1"], "ratio_cold"),
        (["flops"], "pairs"),
        (["ingest"], "share"),
        (["exact", "--data", "DATA", "--n", "1"], "agreement_bf16"),
        (["docs", "DOCS"], "earlier"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_json_is_all_that_is_printed(command: list[str], key: str, data: Path, docs: Path) -> None:
    places = {"DATA": str(data), "DOCS": str(docs)}
    result = CliRunner().invoke(app, [*(places.get(a, a) for a in command), "--json"])
    assert result.exit_code == 0, result.exception
    assert key in json.loads(result.stdout)


@pytest.mark.usefixtures("settings")
def test_without_json_there_is_a_line_per_figure_or_pair() -> None:
    said = CliRunner().invoke(app, ["speed", "--tokens", "5", "--repeats", "1"]).stdout
    assert "lengths 1 ttft ratio warm: " in said
    assert "llama-3.1-8b -> qwen2.5-7b" in CliRunner().invoke(app, ["flops"]).stdout


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("content", ["broken", '{"data": []}', None])
def test_user_errors_of_exact_are_one_line_and_code_2(
    content: str | None,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data.unlink() if content is None else data.write_text(content)
    monkeypatch.setattr(sys, "argv", ["eval.bench", "exact", "--data", str(data)])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert end.value.code == 2
    assert said.err.startswith("eval.bench: ") and said.err.count("\n") == 1
    assert not said.out
