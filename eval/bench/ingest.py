"""Ingest throughput against a bare prefill loop of the same model, batch and dtype."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from cag.engine import CAG
from cag.ingest import reference_identity, store_passages
from cag.library import Passage
from cag.lm.prompt import PASSAGE_FORMAT, REFERENCE_PREFIX, prefix_ids
from cag.settings import Settings
from eval.bench.speed import synthetic_text
from eval.metrics import mean


def run_ingest(settings: Settings, passages: int = 16, rounds: int = 3) -> dict[str, Any]:
    """Tokens per second of ``store_passages`` and of bare forward passes, taking turns."""
    with tempfile.TemporaryDirectory() as folder:
        engine = CAG(settings, store_folder=Path(folder))
        lm = engine.models.lm(settings.reference)
        prefix = prefix_ids(lm, REFERENCE_PREFIX)
        bare, ingest = [], []
        for turn in range(rounds + 1):
            items: list[tuple[Passage, list[int]]] = []
            for index in range(passages):
                text = synthetic_text(60, seed=turn * 1000 + index)
                ids, spans = lm.encode_with_offsets(PASSAGE_FORMAT.format(text=text))
                ids, spans = ids[: settings.passage_tokens], spans[: settings.passage_tokens]
                passage = Passage(
                    f"{turn}-{index}", "bench", "", 0, len(text), text, spans,
                    reference_identity(lm, ids),
                )  # fmt: skip
                items.append((passage, ids))
            tokens = sum(len(ids) for _, ids in items)
            start = time.perf_counter()
            with torch.inference_mode():
                for at in range(0, passages, settings.batch):
                    group = items[at : at + settings.batch]
                    rows = [[*prefix, *ids] for _, ids in group]
                    longest = max(map(len, rows))
                    rows = [row + [0] * (longest - len(row)) for row in rows]
                    lm.body(input_ids=torch.tensor(rows, device=lm.device), use_cache=True)
            middle = time.perf_counter()
            store_passages(lm, engine.store, items, settings.batch)
            end = time.perf_counter()
            if turn:  # the first turn warms up
                bare.append(tokens / (middle - start))
                ingest.append(tokens / (end - middle))
        return {
            "bare_tokens_per_second": mean(bare),
            "ingest_tokens_per_second": mean(ingest),
            "share": mean(ingest) / mean(bare),
            "dtype": str(lm.dtype),
            "batch": settings.batch,
            "rounds": rounds,
        }
