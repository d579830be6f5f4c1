"""Retention compares the answers of both paths to held-out questions, and gates a translator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TEXT, tiny_lm

from cag.lm.cache import KV
from cag.lm.decode import Decoded, Generation, decode
from cag.lm.prompt import Template
from cag.translate.calibration import calibrate
from cag.translate.config import Report
from cag.translate.examples import Example
from cag.translate.pairs import PairCollector

TEMPLATE = Template(prefix="Read this.\nContext:", suffix="\nQ: {question}\nA:")
QUESTIONS = ("Where is it?", "When was it built?")


class Fixed:
    """A translator that gives what it is told to."""

    def __init__(self, collector: PairCollector, *, silent: bool) -> None:
        self.report, self._collector, self._silent = Report(), collector, silent

    def translate(self, sources: Any, alignments: Any, target: Any, passages: Any, _: Any) -> KV:
        assert len(alignments[0]) == len(passages[0])
        context = self._collector.start()
        start = context.length
        context.run(torch.tensor(passages), logits=None)
        kv = context.canonical(start, context.length)
        return KV(kv.keys, torch.zeros_like(kv.values)) if self._silent else kv


def answered(collector: PairCollector, text: str, question: str) -> str:
    context, result = collector.start(), Decoded()
    context.run(torch.tensor([collector.target.encode(f" {text}")]), logits=None)
    suffix = collector.target.encode(TEMPLATE.suffix.format(question=question))
    list(decode(collector.target, context, suffix, Generation(max_tokens=16), result))
    return result.text


@pytest.fixture(scope="module")
def collector() -> PairCollector:
    return PairCollector(tiny_lm("llama"), tiny_lm("gpt2", 20, seed=1), TEMPLATE)


@pytest.fixture(scope="module")
def held_out(collector: PairCollector) -> list[Example]:
    """Passages whose wanted answers are what the target says when it reads them."""
    return [
        Example(text, tuple((q, answered(collector, text, q)) for q in QUESTIONS))
        for text in (TEXT, TEXT.replace("1874", "1902"), TEXT[:120])
    ]


@pytest.mark.parametrize("silent", [False, True])
def test_retention_is_the_share_of_native_answers(
    collector: PairCollector, held_out: list[Example], silent: bool
) -> None:
    translator: Any = Fixed(collector, silent=silent)
    found = calibrate(translator, collector, held_out)
    assert (found.native, found.questions) == (1.0, 6)
    assert translator.report.retention == found.retention == found.translated
    assert found.low <= found.translated <= found.high
    assert (found.translated < 0.9) if silent else (found.translated == found.low == 1.0)
    assert translator.report.details["calibration"]["translated"] == found.translated
    few = calibrate(translator, collector, held_out, questions=1)
    assert few.questions == 3


def test_a_target_that_cannot_answer_by_itself_gives_no_retention(
    collector: PairCollector, held_out: list[Example]
) -> None:
    nonsense = [Example(e.text, (("What?", "quite another thing"),)) for e in held_out]
    translator: Any = Fixed(collector, silent=False)
    assert calibrate(translator, collector, nonsense).retention is None
    assert calibrate(translator, collector, []).questions == 0
    assert translator.report.retention is None


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (Report(), ""),
        (Report(retention=0.8), ""),
        (Report(retention=0.79, recovered=1.0), "its retention on held-out passages is 0.79, 0.80"),
        (Report(retention=0.9, recovered=0.7), "its recovered share on held-out passages is 0.70"),
        (Report(retention=0.8, recovered=0.8), ""),
        (Report(retention=float("nan")), "its retention on held-out passages is nan"),
        (Report(recovered=0.1), "its recovered share on held-out passages is 0.10"),
    ],
    ids=str,
)
def test_a_report_says_what_it_falls_short_of(report: Report, said: str) -> None:
    assert said in report.shortfall(0.8)
    assert bool(said) == bool(report.shortfall(0.8))
