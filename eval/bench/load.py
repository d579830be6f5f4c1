"""Load bandwidth of the store against a raw mmap read of the same files, in one run."""

from __future__ import annotations

import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cag.engine import CAG
from cag.ingest import store_passages
from cag.settings import Settings
from eval.bench.ingest import synthetic_items
from eval.bench.machine import drop_from_page_cache, in_page_cache
from store import CacheStore
from store.cache_store import Identity


def run_load(settings: Settings, passages: int = 16, rounds: int = 5) -> dict[str, Any]:
    """Bytes per second of ``CacheStore.get`` and of a raw read, cold and warm.

    ``get`` also checks the checksum, decodes and notes the use in the catalog. The raw read
    copies every byte of the mapped files into a buffer that is there already. Both take
    turns; *cold* drops the files from the page cache first. Medians over the rounds; one more
    round before them warms up.

    Returns
    -------
    dict
        ``median_bytes_per_second`` by arm, ``ratio_warm`` and ``ratio_cold`` (``get`` over
        raw), and ``dropped``: the share of files that really left the page cache on request.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine = CAG(settings, store_folder=Path(folder))
        lm = engine.models.lm(settings.reference)
        items = synthetic_items(lm, passages, settings.passage_tokens)
        store_passages(lm, engine.store, items, settings.batch)
        identities = [passage.identity for passage, _ in items]
        files = [engine.store.file(identity) for identity in identities]
        size = sum(file.stat().st_size for file in files)
        seconds = _measure(engine.store, identities, files, rounds)
        drop_from_page_cache(files)
        dropped = sum(not in_page_cache(file) for file in files) / len(files)
        tokens = sum(len(ids) for _, ids in items)
    speed = {arm: statistics.median(size / s for s in taken) for arm, taken in seconds.items()}
    return {
        "median_bytes_per_second": speed,
        "ratio_warm": speed["get_warm"] / speed["raw_warm"],
        "ratio_cold": speed["get_cold"] / speed["raw_cold"],
        "dropped": dropped,
        "files": len(files),
        "bytes": size,
        "bytes_per_token": size / tokens,
        "codec": settings.codec,
        "rounds": rounds,
    }


def _measure(
    store: CacheStore, identities: Sequence[Identity], files: Sequence[Path], rounds: int
) -> dict[str, list[float]]:
    """Seconds per round of every arm."""
    buffer = bytearray(max(file.stat().st_size for file in files))

    def get() -> None:
        for identity in identities:
            store.get(identity)

    def raw() -> None:
        for file in files:
            _copy(file, buffer)

    arms: list[tuple[str, Callable[[], None]]] = [("get", get), ("raw", raw)]
    seconds: dict[str, list[float]] = {f"{n}_{s}": [] for n, _ in arms for s in ("cold", "warm")}
    for turn in range(rounds + 1):
        for name, read in arms if turn % 2 else arms[::-1]:  # neither always follows the other
            drop_from_page_cache(files)
            for state in ("cold", "warm"):
                start = time.perf_counter()
                read()
                taken = time.perf_counter() - start
                if turn:
                    seconds[f"{name}_{state}"].append(taken)
    return seconds


def _copy(file: Path, buffer: bytearray) -> None:
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as source,
        memoryview(buffer) as target,
    ):
        target[: len(source)] = source
