"""The injection study: native KV moves nothing, noise moves only what lies above it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, tiny_lm

from cag.lm.cache import KV, Context
from cag.lm.loading import LM
from eval import injection
from eval.arms import ARMS, Bench
from eval.data import Question
from eval.injection import plot_injection, relative_shift, run_injection
from eval.measure import answer_nll

LAYERS = 4
PASSAGES = (
    ("The harbour of Lindholm was built in 1874.",),
    ("The tower has nine bells.", "Its lighthouse is painted red and white."),
)
QUESTIONS = [
    Question(f"q{i}", PASSAGES[i // 2], question, (answer,))
    for i, (question, answer) in enumerate(
        [("When was it built?", "1874"), ("Which harbour?", "Lindholm"), ("How many?", "nine")]
    )
]


class Stub:
    """Gives the target's own KV, and noise on top."""

    def __init__(self, noise: float) -> None:
        self.noise, self.calls = noise, 0

    def translate(
        self, sources: Any, alignments: Any, target: LM, passages: Any, preceding: Any
    ) -> KV:
        self.calls += 1
        ids = [token for passage in passages for token in passage]
        context = Context(target)
        with torch.no_grad():
            context.run(torch.tensor([[*preceding, *ids]]), logits=None)
        own = context.canonical(len(preceding), context.length)
        torch.manual_seed(3)
        return KV(
            own.keys + self.noise * torch.randn_like(own.keys),
            own.values + self.noise * torch.randn_like(own.values),
        )


def bench(family: str, noise: float) -> Bench:
    reference, target = tiny_lm("llama", 60), tiny_lm(family, 20, seed=1)
    reference.name, target.name = "ref", "tgt"
    return Bench(reference, target, {"translated": Stub(noise)})  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def noisy() -> dict[str, Any]:
    return run_injection(bench("gemma3_text", 1.0), QUESTIONS)


@pytest.mark.parametrize("family", FAMILIES)
def test_native_kv_moves_nothing_and_recovers_everything(family: str) -> None:
    result = run_injection(bench(family, 0.0), QUESTIONS, width=2)
    assert [row["position"] for row in result["replay"]] == [0, 1, 2]
    assert [row["boundary"] for row in result["boundary"]] == [0, 1, 2, 4]
    for row in result["replay"]:
        assert row["shift"] == pytest.approx([0] * (LAYERS + 1), abs=1e-5)
        assert row["top_passage"] == pytest.approx(0, abs=1e-5)
        assert row["top_suffix"] == pytest.approx(0, abs=1e-5)
    for row in (*result["replay"], *result["boundary"]):
        assert row["recovered"] == pytest.approx(1, abs=1e-3)
        assert row["nll"] == pytest.approx(result["native_nll"], abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_moves_only_what_lies_above_the_window(family: str) -> None:
    result = run_injection(bench(family, 1.0), QUESTIONS[:2], [0, 2], width=2)
    for row in result["replay"]:
        at = row["position"] + 1
        assert not any(row["shift"][:at])
        assert min(row["shift"][at:]) > 1e-3
        assert row["top_passage"] > 1e-3
        assert row["top_suffix"] > 1e-3
        assert row["nll"] != pytest.approx(result["native_nll"], abs=1e-4)
    *below, native = result["boundary"]
    assert native["boundary"] == LAYERS
    assert native["nll"] == pytest.approx(result["native_nll"], abs=1e-4)
    assert all(row["nll"] != pytest.approx(result["native_nll"], abs=1e-4) for row in below)


def test_nll_is_that_of_the_arms(noisy: dict[str, Any]) -> None:
    b = bench("gemma3_text", 1.0)
    for found, arm in (
        (noisy["native_nll"], "native"),
        (noisy["no_context_nll"], "no_context"),
        (noisy["boundary"][0]["nll"], "translated"),  # everything is translated
    ):
        nll = []
        for q in QUESTIONS:
            lm, context = ARMS[arm](b, q, ())
            suffix = lm.encode(b.template.suffix.format(question=q.question))
            nll.append(answer_nll(lm, context, suffix, q.answers[0]))
        assert found == pytest.approx(sum(nll) / 3, rel=1e-5)


def test_the_lowest_of_all_windows_is_all_translated_too(noisy: dict[str, Any]) -> None:
    result = run_injection(bench("gemma3_text", 1.0), QUESTIONS, width=LAYERS)
    (row,) = result["replay"]
    assert row["nll"] == pytest.approx(noisy["boundary"][0]["nll"], rel=1e-5)


def test_the_result_is_plain_data_and_says_what_it_is_of(noisy: dict[str, Any]) -> None:
    assert json.loads(json.dumps(noisy, allow_nan=False)) == noisy
    said = {k: v for k, v in noisy.items() if not isinstance(v, list) and "nll" not in k}
    assert said == {
        "reference": "ref", "target": "tgt", "translator": "translated", "questions": 3,
        "dtype": "torch.float32", "layers": LAYERS, "width": 1, "last_tokens": 16,
    }  # fmt: skip
    for row in (*noisy["replay"], *noisy["boundary"]):
        low, high = row["nll_minus_native_95"]
        assert low <= row["nll_minus_native"] <= high
        worth = noisy["no_context_nll"] - noisy["native_nll"]
        assert row["recovered"] == pytest.approx(1 - row["nll_minus_native"] / worth)


def test_questions_of_one_passage_share_its_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    replay = injection.replay

    def counting(*args: Any, **kwargs: Any) -> Any:
        counted.append(args)
        return replay(*args, **kwargs)

    monkeypatch.setattr(injection, "replay", counting)
    b, told = bench("llama", 1.0), []
    result = run_injection(
        b, QUESTIONS, range(0, LAYERS, 2), on_example=lambda *at: told.append(at)
    )
    assert [row["position"] for row in result["replay"]] == [0, 2]
    assert len(counted) == 2 * (1 + 2)  # two texts: natively, and with either window
    assert b.translators["translated"].calls == 2
    assert told == [(2, 3), (3, 3)]


def test_questions_weigh_the_same_wherever_they_stand(noisy: dict[str, Any]) -> None:
    b = bench("gemma3_text", 1.0)
    mixed = run_injection(b, [QUESTIONS[0], QUESTIONS[2], QUESTIONS[1]], [1])
    row, wanted = mixed["replay"][0], noisy["replay"][1]
    assert row["shift"] == pytest.approx(wanted["shift"], rel=1e-5)
    assert row["nll"] == pytest.approx(wanted["nll"], rel=1e-5)


def test_a_shift_is_relative_to_the_native_norm() -> None:
    native = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    found = torch.tensor([[3.0, 9.0], [0.0, 2.0]])
    assert relative_shift(found, native).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("positions", "width"), [(None, 0), (None, 5), ([4], 1), ([-1], 1), ([3], 2), ([], 1)]
)
def test_windows_outside_the_model_are_refused(positions: list[int] | None, width: int) -> None:
    with pytest.raises(ValueError, match="window"):
        run_injection(bench("llama", 0.0), QUESTIONS, positions, width=width)


def test_nothing_is_asked() -> None:
    with pytest.raises(ValueError, match="no questions"):
        run_injection(bench("llama", 0.0), [])


@pytest.mark.parametrize("pairs", [1, 3])
def test_a_picture_is_drawn(pairs: int, noisy: dict[str, Any], tmp_path: Path) -> None:
    results = {f"pair {i}": noisy for i in range(pairs)}
    if pairs > 1:  # of another depth
        results["pair 1"] = run_injection(
            Bench(
                tiny_lm("llama", 60),
                tiny_lm("llama", 20, seed=1, num_hidden_layers=LAYERS),
                {"translated": Stub(1.0)},  # type: ignore[dict-item]
            ),
            QUESTIONS, [0, 1], width=2,
        ) | {"layers": 8}  # fmt: skip
    plot_injection(results, tmp_path / "injection.png")
    content = (tmp_path / "injection.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 20_000


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_injection({}, tmp_path / "injection.png")
