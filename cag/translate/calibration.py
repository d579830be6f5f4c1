"""Retention: the share of the target's own answer quality that survives translation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from cag.lm.cache import Context
from cag.lm.decode import Decoded, Generation, decode
from cag.scoring import token_f1
from cag.translate.base import Translator, align_texts
from cag.translate.examples import Example
from cag.translate.pairs import PairCollector

#: Where the text itself wins less F1 than this, answers say nothing about translation.
LEAST_GAIN = 0.05


@dataclass(frozen=True)
class Calibration:
    """Answers to held-out questions, from translated caches and from the text.

    Attributes
    ----------
    native, translated, without
        Mean token F1 against the wanted answers: from the text, from the translated cache, and
        without any passage.
    low, high
        95% interval of translated / native, by paired resampling of the questions.
    questions
        How many were asked.
    """

    native: float
    translated: float
    without: float
    low: float
    high: float
    questions: int

    @property
    def retention(self) -> float | None:
        """Translated / native, or None if the text does not help the target to answer."""
        helps = self.native - self.without >= LEAST_GAIN
        return self.translated / self.native if helps else None


@torch.no_grad()
def calibrate(
    translator: Translator,
    collector: PairCollector,
    held_out: Sequence[Example],
    *,
    questions: int = 2,
    max_tokens: int = 16,
) -> Calibration:
    """Ask the target about held-out passages, on both paths, and keep the result in the report.

    Parameters
    ----------
    translator
        Its report gets ``retention``, and ``details["calibration"]``.
    collector
        Runs its two models.
    held_out
        Passages that it was neither trained on nor will be reported on.
    questions
        At most so many of each passage, the first ones.
    max_tokens
        Longest answer; decoding is greedy.
    """
    target, template = collector.target, collector.template
    generation = Generation(max_tokens=max_tokens, stop=template.stop)
    nothing = collector.start()
    scores = []
    for example in held_out:
        text = collector.trim(example.text)
        source, spans = collector.source(text)
        ids, alignment = align_texts(spans, target, text)
        native, translated = collector.start(), collector.start()
        native.run(torch.tensor([ids], device=target.device), logits=None)
        translated.append(
            translator.translate([source], [alignment], target, [ids], collector.prefix)
        )
        for question, wanted in example.questions[:questions]:
            suffix = target.encode(template.suffix.format(question=question))
            scores.append(
                [
                    token_f1(_answered(collector, context, suffix, generation), wanted)
                    for context in (native, translated, nothing)
                ]
            )
    calibration = _calibration(torch.tensor(scores, dtype=torch.float64).view(-1, 3))
    translator.report.retention = calibration.retention
    translator.report.details["calibration"] = asdict(calibration)
    return calibration


def _answered(
    collector: PairCollector, context: Context, suffix: list[int], generation: Generation
) -> str:
    result = Decoded()
    for _ in decode(collector.target, context.fork(), suffix, generation, result):
        pass
    return result.text


def _calibration(scores: torch.Tensor) -> Calibration:
    """From the F1 of native, translated and unaided answers, with shape (N, 3)."""
    if not len(scores):
        return Calibration(0.0, 0.0, 0.0, 0.0, 0.0, 0)
    native, translated, without = scores.mean(0).tolist()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(scores), (1000, len(scores)), generator=generator)
    means = scores[drawn].mean(1)
    means = means[means[:, 0] > 0]
    ratios = means[:, 1] / means[:, 0] if len(means) else torch.zeros(1, dtype=scores.dtype)
    low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=ratios.dtype)).tolist()
    return Calibration(native, translated, without, low, high, len(scores))
