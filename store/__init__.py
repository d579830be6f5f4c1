"""Stored KV caches: tensors, bytes and metadata. Knows no language model."""

from store.cache_store import CacheHit, CacheStore, GcReport, Problem, StoreStats, cache_key
from store.catalog import Catalog, Table
from store.codec import CODECS, Codec, get_codec
from store.errors import (
    CacheMiss,
    CorruptIndex,
    EmbedderMismatch,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreVersionError,
    ValueTooLarge,
)
from store.lock import WriteLock
from store.vectors import VectorIndex

__all__ = [
    "CODECS",
    "CacheHit",
    "CacheMiss",
    "CacheStore",
    "Catalog",
    "Codec",
    "CorruptIndex",
    "EmbedderMismatch",
    "GcReport",
    "Problem",
    "StoreError",
    "StoreFull",
    "StoreLocked",
    "StoreStats",
    "StoreVersionError",
    "Table",
    "ValueTooLarge",
    "VectorIndex",
    "WriteLock",
    "cache_key",
    "get_codec",
]
