"""Ingest throughput against a bare prefill loop of the same model, batch and dtype."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cag.engine import CAG
from cag.ingest import reference_identity, store_passages
from cag.library import Passage
from cag.lm.loading import LM
from cag.lm.prompt import PASSAGE_FORMAT, REFERENCE_PREFIX, prefix_ids
from cag.settings import Settings
from eval.bench.speed import synthetic_text

#: A passage with its reference token ids.
Item = tuple[Passage, list[int]]


def run_ingest(settings: Settings, passages: int = 16, rounds: int = 5) -> dict[str, Any]:
    """Tokens per second of ``store_passages`` and of bare forward passes, taking turns.

    Medians over the rounds; one more round before them warms up.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine = CAG(settings, store_folder=Path(folder))
        lm = engine.models.lm(settings.reference)
        bare, ingest = list[float](), list[float]()
        for turn in range(rounds + 1):
            items = synthetic_items(lm, passages, settings.passage_tokens, seed=turn)
            tokens = sum(len(ids) for _, ids in items)
            start = time.perf_counter()
            _prefill(lm, items, settings.batch)
            middle = time.perf_counter()
            store_passages(lm, engine.store, items, settings.batch)
            end = time.perf_counter()
            if turn:
                bare.append(tokens / (middle - start))
                ingest.append(tokens / (end - middle))
        return {
            "bare_tokens_per_second": statistics.median(bare),
            "ingest_tokens_per_second": statistics.median(ingest),
            "share": statistics.median(ingest) / statistics.median(bare),
            "dtype": str(lm.dtype),
            "batch": settings.batch,
            "rounds": rounds,
        }


def synthetic_items(lm: LM, count: int, longest: int, seed: int = 0) -> list[Item]:
    """Passages of at most `longest` reference tokens, other ones for every seed."""
    items = []
    for index in range(count):
        text = synthetic_text(60, seed=seed * 1000 + index)
        ids, spans = lm.encode_with_offsets(PASSAGE_FORMAT.format(text=text))
        ids, spans = ids[:longest], spans[:longest]
        passage = Passage(
            f"{seed}-{index}", "bench", "", 0, len(text), text, spans, reference_identity(lm, ids)
        )
        items.append((passage, ids))
    return items


@torch.inference_mode()
def _prefill(lm: LM, items: Sequence[Item], batch: int) -> None:
    """Bare forward passes over padded batches, and nothing else."""
    prefix = prefix_ids(lm, REFERENCE_PREFIX)
    for at in range(0, len(items), batch):
        rows = [[*prefix, *ids] for _, ids in items[at : at + batch]]
        longest = max(map(len, rows))
        rows = [row + [0] * (longest - len(row)) for row in rows]
        lm.body(input_ids=torch.tensor(rows, device=lm.device), use_cache=True)
