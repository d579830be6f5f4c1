"""Summaries worked by hand, and reports that leave nothing out."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from cag import lines
from eval import plots
from eval.arms import ARMS
from eval.identity import OtherRun
from eval.plots import NoPlotting, plot_routing
from eval.report import command, remake, write_report
from eval.summary import plain, read_log, summarise, summarise_folder

COSTS = {"tokens": 20, "macs": 3e9, "ms": 12.5, "seconds": 0.5, "first": 0.25}


def free(f1: float, nll: float, answer: str = "tower", **changes: Any) -> dict[str, Any]:
    return {"answer": answer, "f1": f1, "em": float(f1 == 1), "nll": nll, **COSTS, **changes}


def closed(right: float, nll: float, choice: str = "yes") -> dict[str, Any]:
    return {
        "answer": choice, "mean": choice, "sum": choice, "generated": None,
        "right_mean": right, "right_sum": right, "right_generated": 0.0, "nll": nll,
        "logprob": {"yes": -1.0, "no": -2.0}, **COSTS,
    }  # fmt: skip


def row(number: int, choices: tuple[str, ...] = (), **arms: dict[str, Any]) -> dict[str, Any]:
    answers = [choices[0] if choices else "tower"]
    return {"id": f"q{number}", "answers": answers, "choices": list(choices), "arms": arms}


FREE = [
    row(0, native=free(1, 1), no_context=free(0, 5), translated=free(0.5, 2)),
    row(1, native=free(0.5, 2), no_context=free(0.25, 4), translated=free(0.25, 4, "bell")),
]


# -- summaries -----------------------------------------------------------------------------


def test_a_summary_is_of_means() -> None:
    summary = summarise(FREE)
    assert (summary["questions"], summary["skipped"], summary["score"]) == (2, 0, "f1")
    found = summary["arms"]["translated"]
    assert found["f1"] == 0.375
    assert found["nll"] == 3
    assert found["retention"] == 0.5  # 0.375 / 0.75
    assert found["difference"] == -0.375
    assert found["recovered"] == 0.5  # (4.5 - 3) / (4.5 - 1.5)
    assert found["gain"] == 0.25  # 0.375 - 0.125
    assert found["gain_retention"] == pytest.approx(0.25 / 0.625)
    assert found["agreement"] == 0.5
    assert found["first_kl"] == 0.25
    native, none = (summary["arms"][name] for name in ("native", "no_context"))
    assert native["retention"] == native["recovered"] == native["agreement"] == 1
    assert native["retention_95"] == (1, 1)
    assert none["recovered"] == none["gain"] == 0
    for arm in summary["arms"].values():
        for name in ("f1", "nll", "retention", "recovered"):
            low, high = arm[f"{name}_95"]
            assert low <= arm[name] <= high


def test_a_summary_of_choices_is_above_chance() -> None:
    choices = ("yes", "no")
    rows = [
        row(i, choices, native=closed(1, 1), translated=closed(right, 2, choice))
        for i, (right, choice) in enumerate([(1.0, "yes"), (1.0, "yes"), (1.0, "yes"), (0.0, "no")])
    ]
    summary = summarise(rows)
    assert summary["choices"] == [2]
    assert summary["commonest_answer"] == 1
    found = summary["arms"]["translated"]
    assert (found["right_mean"], found["gain"], found["right_generated"]) == (0.75, 0.25, 0)
    assert (found["retention"], found["gain_retention"], found["agreement"]) == (0.75, 0.5, 0.75)
    assert "recovered" not in found  # there is no arm without context


def test_only_questions_that_every_arm_answered_count() -> None:
    more = [*FREE, row(2, native=free(0, 9)), {**row(3, native=free(0, 9)), "skipped": "too long"}]
    summary = summarise(more)
    assert (summary["questions"], summary["skipped"]) == (2, 1)
    assert summary["arms"] == summarise(FREE)["arms"]
    assert summarise(more, ["native"])["questions"] == 3
    assert summarise([])["questions"] == 0


def test_there_is_no_share_of_what_was_not_measured() -> None:
    found = summarise(FREE, ["translated"])["arms"]["translated"]
    assert not {"retention", "recovered", "gain", "agreement"} & set(found)


def test_a_native_score_of_0_is_nothing_to_retain() -> None:
    rows = [row(i, native=free(0, 1), no_context=free(0, 2)) for i in range(3)]
    found = plain(summarise(rows)["arms"]["no_context"])
    assert found["retention"] is found["retention_95"] is None
    assert found["recovered"] == 0


def test_nothing_is_recovered_where_context_does_not_help() -> None:
    rows = [row(i, native=free(1, 3), no_context=free(0, 2)) for i in range(3)]
    found = plain(summarise(rows)["arms"]["native"])
    assert found["recovered"] is found["recovered_95"] is None
    assert found["retention"] == 1


@pytest.mark.parametrize("better", [False, True])
def test_a_wrong_passage_that_helps_is_noticed(better: bool) -> None:
    rows = [
        row(i, no_context=free(i % 2, 5), wrong_passage=free(i % 2 or better, 6 - 2 * better))
        for i in range(40)
    ]
    found = summarise(rows)["controls"]["wrong_passage"]
    assert found["holds"] is not better
    assert found["nll_holds"] is not better
    assert found["nll_gain"] == (1 if better else -1)


@pytest.mark.parametrize(("nll", "holds"), [(1.0, True), (1.0005, True), (1.1, False)])
def test_a_replay_that_differs_is_noticed(nll: float, holds: bool) -> None:
    rows = [row(i, native=free(1, 1.0), replay_plain=free(1, nll)) for i in range(3)]
    found = summarise(rows)["controls"]["replay_plain"]
    assert found["holds"] is holds
    assert found["largest_nll_difference"] == pytest.approx(nll - 1)


def test_translated_is_compared_with_baselines_and_refreshing_with_its_control() -> None:
    arms = ("no_context", "translated", "ridge", "refresh_last_16", "only_last_16")
    scores = (0.0, 0.75, 0.25, 1.0, 0.5)
    rows = [
        row(i, **{a: free(score, 1) for a, score in zip(arms, scores, strict=True)})
        for i in range(4)
    ]
    compared = summarise(rows)["comparisons"]
    assert [(c["arm"], c["against"]) for c in compared] == [
        ("translated", "ridge"),
        ("refresh_last_16", "only_last_16"),
        ("refresh_last_16", "translated"),
    ]
    assert [c["difference"] for c in compared] == [0.5, 0.5, 0.25]
    assert compared[0]["gain_ratio"] == pytest.approx(3)
    assert compared[0]["gain_ratio_95"] == pytest.approx((3, 3))


def test_of_several_rows_the_last_counts_and_half_a_row_none(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    changed = {**FREE[0], "answers": ["bell"]}
    lines = [json.dumps(one) for one in (*FREE, changed)]
    log.write_text("\n".join([*lines, "17", "", lines[1][:-9]]))
    assert list(read_log(log).values()) == [changed, FREE[1]]
    assert read_log(tmp_path / "none.jsonl") == {}


def test_plain_data_holds_no_nan() -> None:
    nan = math.nan
    found = plain({"a": nan, "b": (1.0, 2), "c": (nan, nan), "d": [{"e": math.inf}]})
    assert found == {"a": None, "b": [1.0, 2], "c": None, "d": [{"e": None}]}


# -- reports -------------------------------------------------------------------------------


def described(name: str) -> dict[str, Any]:
    return {
        "name": name, "fingerprint": "f" * 32, "tokenizer": "t" * 32, "parameters": 135e6,
        "dtype": "float32", "device": "cpu",
    }  # fmt: skip


TRANSLATOR = {
    "kind": "mixture", "sha256": "a" * 64, "parameters": 12_300_000, "macs_per_token": 9_900_000,
    "recovered": None, "retention": None,
    "training": {"passages": 1986, "minutes": 68.7, "seed": 0, "data": None},
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "n": 30,
    "seed": 7,
    "versions": {"python": "3.11.1", "cag": "0.1", "torch": "2.6", "transformers": "5.10"},
    "pairs": {
        "ref--tgt": {
            "reference": described("ref"),
            "target": described("tgt"),
            "translators": {"translated": TRANSLATOR, "ridge": {**TRANSLATOR, "kind": "ridge"}},
        }
    },
    "tasks": {
        name: {"role": "report", "file": f"{name}.json", "questions": 30, "sha256": "b" * 64}
        for name in ("free", "closed")
    },
    "sessions": [
        {
            "pairs": ["ref:tgt"], "tasks": ["free", "closed"], "arms": arms, "data": "some data",
            "threads": 2, "commit": "c" * 40, "modified": False,
        }
        for arms in (["translated", "native"], ["no_context"])
    ],
}  # fmt: skip
ROUTING = {
    "passages": 20, "tokens": 4321, "routing": "learned", "tokens_per_expert": [0.9, 0.7, 0.4],
    "weight": [0.5, 0.3, 0.2], "entropy": 0.6, "most_entropy": 0.693, "usage_entropy": 0.9,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Logs of every arm over a task of either kind."""
    chooser = random.Random(0)
    (tmp_path / "ref--tgt").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def answered(is_closed: bool) -> dict[str, Any]:
        right = float(chooser.random() < 0.6)
        return closed(right, 1 + chooser.random()) if is_closed else free(right, chooser.random())

    for task, choices in (("free", ()), ("closed", ("yes", "no"))):
        rows = [row(i, choices, **{a: answered(bool(choices)) for a in ARMS}) for i in range(30)]
        log = tmp_path / "ref--tgt" / f"{task}.jsonl"
        log.write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / "ref--tgt" / "free.routing.json").write_text(json.dumps(ROUTING))
    return tmp_path


def test_a_report_says_everything(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    metrics = remake(folder)
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    assert metrics["hours"] == pytest.approx(2 * 30 * len(ARMS) * 0.5 / 3600)
    text = (folder / "report.md").read_text()
    for arm in ARMS:
        assert text.count(f"\n| {arm} |") >= 2  # in either task's table
    for said in (
        command(CONFIG), "drawn with seed 7", "torch 2.6", "commit cccccccccccc", "2 threads",
        "30 questions of the *report* split", "always the commonest answer would score 1.000",
        "| above chance | kept |", "The wrong passage is ", "A replay without injection ",
        "| translated | single_projection |",
        "| translated | mixture | 12.3 | 9.9 | 1,986 | 68.7 | - | aaaaaaaaaaaa |",
        "0.90 / 0.70 / 0.40", "20 (4,321)",
    ):  # fmt: skip
        assert said in text, said
    for line in text.splitlines():
        if line.startswith("!["):
            content = (folder / line.partition("(")[2].rstrip(")")).read_bytes()
            assert content.startswith(b"\x89PNG") and len(content) > 10_000
    assert text.count("![") == 3
    for block in text.split("\n\n"):  # tables are whole
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_the_command_holds_all_sessions() -> None:
    assert command(CONFIG) == (
        "cag eval --pairs ref:tgt --tasks free,closed --arms native,translated,no_context "
        "--n 30 --seed 7 --data 'some data' --out FOLDER"
    )


def test_a_report_of_an_unfinished_run_says_so(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    (folder / "ref--tgt" / "closed.jsonl").unlink()
    log = folder / "ref--tgt" / "free.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:4]))
    remake(folder)
    text = (folder / "report.md").read_text()
    assert "4 questions of 30: the run is not finished" in text
    assert "### closed" not in text


def test_a_report_before_the_first_answer(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    for log in folder.glob("*/*.jsonl"):
        log.unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(OtherRun, match="no logs"):  # as of a report whose logs were not kept
        remake(folder)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "metrics.json").write_text(json.dumps(summarise_folder(folder)))
    assert "Nothing is measured yet." in write_report(folder).read_text()


def test_without_matplotlib_the_way_out_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NoPlotting, match=r"pip install 'cag\[eval\]'"):
        plot_routing({"free": {"routing": ROUTING}}, folder / "x.png")


def test_rows_of_two_processes_are_one(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for arms in ({"native": free(0, 1)}, {"translated": free(0, 2)}):
        lines.append(log, row(0, **arms))
    assert set(read_log(log)["q0"]["arms"]) == {"native", "translated"}
