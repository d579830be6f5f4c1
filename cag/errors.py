"""Errors a user can cause. Each message is one line and says what to do next."""

from __future__ import annotations


class CagError(Exception):
    """Base of all errors that the CLI prints as one line (exit code 2)."""


class BadSetting(CagError):
    """A setting that cannot be understood."""


class UnknownModel(CagError):
    """A model name that is neither known, nor a folder, nor a hub id."""


class MissingWeights(CagError):
    """A known model whose weights are not on this machine."""


class UnsupportedModel(CagError):
    """An architecture `cag` cannot handle; the message lists those it can."""


class DownloadFailed(CagError):
    """Weights could not be fetched or did not have the pinned checksum."""


class ContextTooLong(CagError):
    """Prompt and passages do not fit the model's window."""


class EmptyQuestion(CagError):
    """A question without any text."""


class EmptyStore(CagError):
    """A question asked before anything was ingested."""


class TranslatorError(CagError):
    """A translator that is missing, malformed, or made for other models."""


class IngestError(CagError):
    """Nothing could be ingested from what was given."""


class UnreadableDocument(CagError):
    """A file that no loader can turn into text."""


class NothingToRead(UnreadableDocument):
    """A file without text, or with the text of another: what was read of it before is outdated."""


class Busy(CagError):
    """Another process holds the store for writing."""


class ReservedPassage(CagError):
    """A passage to train on or to choose by that belongs to a report split."""
