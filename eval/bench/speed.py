"""Time to the first token, direct against translated, in one run."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from cag.answer import Answer
from cag.engine import CAG
from cag.lm.decode import Generation
from cag.retrieval import Source
from cag.settings import Settings

_SUBJECTS = ["The harbour", "A small library", "The old railway", "Each laboratory", "This river"]
_VERBS = ["was built", "is described", "was measured", "is visited", "was repaired"]
_PLACES = ["near the northern coast", "by a team of six", "in a long report", "every other spring"]


def synthetic_text(sentences: int, seed: int = 0) -> str:
    """Plain English-looking sentences, so that the benchmark needs no data."""
    chooser = random.Random(seed)
    return " ".join(
        f"{chooser.choice(_SUBJECTS)} {chooser.choice(_VERBS)} {chooser.choice(_PLACES)} "
        f"in {chooser.randint(1801, 1999)}."
        for _ in range(sentences)
    )


def run_speed(settings: Settings, tokens: int, repeats: int, seed: int = 0) -> dict[str, Any]:
    """Median times to the first token over about `tokens` passage tokens.

    Both paths start from loaded models and answer the same question over the same passages;
    arms take turns. *Cold* drops the cache files from the page cache before each load.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        text = store / "text.md"
        text.write_text(synthetic_text(tokens // 8 + 40, seed), encoding="utf-8")
        engine = CAG(settings, store_folder=store / "store")
        engine.ingest([text])
        lm = engine.models.lm(settings.target)
        sources: list[Source] = []
        held = 0
        for passage in sorted(engine.library.passages(), key=lambda p: p.start):
            if held >= tokens:
                break
            sources.append(Source(passage, 1.0))
            held += len(lm.encode(" " + passage.text))
        files = [
            store / "store/kv" / key[:2] / f"{key}.safetensors"
            for source in sources
            for key in [engine.store.key(source.passage.identity)]
        ]
        return _measure(engine, sources, files, held, repeats)


def _measure(
    engine: CAG, sources: list[Source], files: list[Path], tokens: int, repeats: int
) -> dict[str, Any]:
    one = Generation(max_tokens=1)

    def ask(mode: str) -> Answer:
        return engine.ask("When was the harbour built?", mode=mode, sources=sources, generation=one)

    times: dict[str, list[Answer]] = {"direct": [], "warm": [], "cold": []}
    for mode in ("direct", "translated"):
        ask(mode)  # the first call of a process sets up kernels
    for _ in range(repeats):
        times["direct"].append(ask("direct"))
        _drop_from_page_cache(files)
        times["cold"].append(ask("translated"))
        times["warm"].append(ask("translated"))
    medians = {
        arm: {
            part: statistics.median(getattr(a.timings, part) for a in answers)
            for part in ("load", "align", "translate", "prefill", "first_token")
        }
        for arm, answers in times.items()
    }
    translated = times["warm"][0]
    bytes_stored = sum(file.stat().st_size for file in files)
    direct = medians["direct"]["first_token"]
    return {
        "passage_tokens": tokens,
        "repeats": repeats,
        "path": translated.path,
        "target_dtype": str(engine.models.lm(engine.settings.target).dtype),
        "ttft_ratio_warm": direct / medians["warm"]["first_token"],
        "ttft_ratio_cold": direct / medians["cold"]["first_token"],
        "median_ms": medians,
        "bytes_per_token": bytes_stored / sum(len(s.passage.spans) for s in sources),
        "target_forward": {arm: a[0].tokens.target_forward for arm, a in times.items()},
    }


def _drop_from_page_cache(files: list[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
