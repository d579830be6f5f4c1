"""Time to the first token and memory, direct against translated, in one run."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cag.answer import Answer
from cag.engine import CAG
from cag.errors import ContextTooLong
from cag.lm.decode import Generation
from cag.retrieval import Source
from cag.settings import Settings
from eval.bench.machine import drop_from_page_cache, peak_growth

LENGTHS = (256, 1000, 4000)

_QUESTION = "When was the harbour built?"
_MEMORY_ROUNDS = 3
_SUBJECTS = ["The harbour", "A small library", "The old railway", "Each laboratory", "This river"]
_VERBS = ["was built", "is described", "was measured", "is visited", "was repaired"]
_PLACES = ["near the northern coast", "by a team of six", "in a long report", "every other spring"]


def synthetic_sentences(seed: int = 0) -> Iterator[str]:
    """Plain English-looking sentences without end, so that benchmarks need no data."""
    chooser = random.Random(seed)
    while True:
        yield (
            f"{chooser.choice(_SUBJECTS)} {chooser.choice(_VERBS)} {chooser.choice(_PLACES)} "
            f"in {chooser.randint(1801, 1999)}."
        )


def synthetic_text(sentences: int, seed: int = 0) -> str:
    """That many sentences."""
    return " ".join(s for s, _ in zip(synthetic_sentences(seed), range(sentences), strict=False))


@dataclass
class _Length:
    """One length: the passages that make it up, and what was measured over them.

    Attributes
    ----------
    tokens
        Passage tokens asked for.
    files
        Cache files of the passages.
    answers, growth
        By arm, one entry per round; growth in bytes.
    """

    tokens: int
    sources: list[Source]
    files: list[Path]
    answers: dict[str, list[Answer]] = field(
        default_factory=lambda: {"direct": [], "cold": [], "warm": [], "kept": []}
    )
    growth: dict[str, list[int | None]] = field(
        default_factory=lambda: {"direct": [], "translated": []}
    )


def run_speed(
    settings: Settings, lengths: Sequence[int] = LENGTHS, repeats: int = 5, seed: int = 0
) -> dict[str, Any]:
    """Median times to the first token over given numbers of passage tokens.

    Both paths start from loaded models and answer the same question over the same passages;
    lengths and arms take turns. *Cold* drops the cache files from the page cache before each
    load, *kept* finds the translation of the question before in memory. Memory is measured in
    rounds of its own.

    Parameters
    ----------
    lengths
        Target tokens of all passages together; texts are whole sentences, so a little more.
        One that does not fit the target's window is skipped, with a note.

    Returns
    -------
    dict
        ``lengths`` (a dict each), ``skipped`` (dicts of ``tokens`` and ``note``), ``repeats``.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine = CAG(settings, store_folder=Path(folder) / "store")
        prepared: list[_Length] = []
        skipped: list[dict[str, Any]] = []
        for tokens in dict.fromkeys(lengths):
            try:
                prepared.append(_prepare(engine, Path(folder), tokens, seed))
            except ContextTooLong as error:
                skipped.append({"tokens": tokens, "note": f"skipped: {error}"})
        for _ in range(repeats):
            for length in prepared:
                _time(engine, length)
        for _ in range(_MEMORY_ROUNDS):
            for length in prepared:
                _weigh(engine, length)
        return {
            "repeats": repeats,
            "lengths": [_summary(engine, length) for length in prepared],
            "skipped": skipped,
        }


def _prepare(engine: CAG, folder: Path, tokens: int, seed: int) -> _Length:
    """Ingest a text of its own for one length, and ask once: first calls set up kernels."""
    lm = engine.models.lm(engine.settings.target)
    if tokens >= lm.spec.window:  # no need to read it to know
        raise ContextTooLong(f"'{lm.name}' reads at most {lm.spec.window} tokens")
    chosen, held = list[str](), 0
    for sentence in synthetic_sentences(seed + tokens):
        if held >= tokens:
            break
        chosen.append(sentence)
        held += len(lm.encode(f" {sentence}"))
    file = (folder / f"{tokens}.md").resolve()
    file.write_text(" ".join(chosen), encoding="utf-8")
    engine.ingest([file])
    passages = [p for p in engine.library.passages() if p.document == str(file)]
    sources = [Source(passage, 1.0) for passage in sorted(passages, key=lambda p: p.start)]
    files = [engine.store.file(passage.identity) for passage in passages]
    length = _Length(tokens, sources, files)
    for mode in ("direct", "translated"):
        _ask(engine, length, mode)
    return length


def _ask(engine: CAG, length: _Length, mode: str, kept: bool = False) -> Answer:
    one = Generation(max_tokens=1)
    if not kept:
        engine.translations.clear()
    return engine.ask(_QUESTION, mode=mode, sources=length.sources, generation=one)


def _time(engine: CAG, length: _Length) -> None:
    length.answers["direct"].append(_ask(engine, length, "direct"))
    drop_from_page_cache(length.files)
    length.answers["cold"].append(_ask(engine, length, "translated"))
    length.answers["warm"].append(_ask(engine, length, "translated"))
    length.answers["kept"].append(_ask(engine, length, "translated", kept=True))


def _weigh(engine: CAG, length: _Length) -> None:
    for mode, growth in length.growth.items():
        engine.translations.clear()  # or the work would begin by freeing them
        growth.append(peak_growth(partial(_ask, engine, length, mode)))


def _summary(engine: CAG, length: _Length) -> dict[str, Any]:
    medians = {
        arm: {
            part: statistics.median(getattr(answer.timings, part) for answer in answers)
            for part in ("load", "align", "translate", "prefill", "first_token")
        }
        for arm, answers in length.answers.items()
    }
    direct = medians["direct"]["first_token"]
    translated = length.answers["warm"][0]
    stored = sum(file.stat().st_size for file in length.files)
    return {
        "tokens": length.tokens,
        "passage_tokens": translated.tokens.passage,
        "repeats": len(length.answers["warm"]),
        "path": translated.path,
        "target_dtype": str(engine.models.lm(engine.settings.target).dtype),
        "ttft_ratio_warm": direct / medians["warm"]["first_token"],
        "ttft_ratio_cold": direct / medians["cold"]["first_token"],
        "ttft_ratio_kept": direct / medians["kept"]["first_token"],
        "median_ms": medians,
        "bytes_per_token": stored / sum(len(s.passage.spans) for s in length.sources),
        "memory_bytes": _memory(engine, length, translated, stored),
        "target_forward": {arm: a[0].tokens.target_forward for arm, a in length.answers.items()},
    }


def _memory(engine: CAG, length: _Length, answer: Answer, stored: int) -> dict[str, Any]:
    """Bytes: the KV of prompt and passages (both paths), the caches that the translated path
    loads, and the median peak growth of the resident set during a question on either path.
    """
    lm = engine.models.lm(engine.settings.target)
    peaks = {
        mode: statistics.median(known) if (known := [b for b in growth if b is not None]) else None
        for mode, growth in length.growth.items()
    }
    return {
        "context": answer.tokens.read * lm.spec.numbers_per_token * lm.dtype.itemsize,
        "loaded": stored if answer.path == "translated" else 0,
        "peak_growth": peaks,
    }
