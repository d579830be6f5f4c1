"""Errors of the store. Each message is one line and says what to do next."""

from __future__ import annotations


class StoreError(Exception):
    """Base of all errors of this package."""


class StoreVersionError(StoreError):
    """The folder was written by another format version."""


class ValueTooLarge(StoreError):
    """One cache is larger than the store may ever become."""


class StoreFull(StoreError):
    """The disk has no room; nothing that was stored is lost."""


class StoreLocked(StoreError):
    """Another process is writing."""


class NotFinite(StoreError):
    """A tensor holds NaN or infinity."""


class EmbedderMismatch(StoreError):
    """An index was built with another embedder."""


class CorruptIndex(StoreError):
    """The vector index cannot be read; the caller rebuilds it."""


class CacheMiss(StoreError):
    """A cache that cannot be used, with the reason.

    Attributes
    ----------
    reason
        What is missing or does not match.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
