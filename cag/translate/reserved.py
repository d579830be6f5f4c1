"""Passages that no translator may be trained on or chosen by, because figures are reported on them.

`reserved.bin` holds their hashes, not their texts: eight bytes each, sorted.
``python -m eval.data.reserve`` writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from cag.errors import ReservedPassage

FILE = Path(__file__).with_name("reserved.bin")
_SIZE = 8


def packed(texts: Iterable[str]) -> bytes:
    """What `reserved.bin` holds for these passages."""
    return b"".join(sorted({_hash(text) for text in texts}))


def holds(text: str) -> bool:
    """Whether a passage belongs to a report split; white space makes no difference."""
    return _hash(text) in _reserved()


def check(texts: Iterable[str], where: str) -> None:
    """Refuse texts to train on or to choose by if report splits hold any of them.

    Parameters
    ----------
    texts
        Whole passages; a part of a reserved passage is not found.
    where
        The file they come from, for the message.

    Raises
    ------
    ReservedPassage
        If there is any.
    """
    found = [holds(text) for text in texts]
    if any(found):
        raise ReservedPassage(
            f"{sum(found)} of the {len(found)} passages of '{where}' belong to a report split; a "
            "translator trained on them or chosen by them could not be measured honestly: give "
            "another slice, such as FILE[0:1000], or leave them out with --drop-reserved"
        )


def _hash(text: str) -> bytes:
    return hashlib.sha256(" ".join(text.split()).encode("utf-8", "replace")).digest()[:_SIZE]


@cache
def _reserved() -> frozenset[bytes]:
    data = FILE.read_bytes()
    return frozenset(data[at : at + _SIZE] for at in range(0, len(data), _SIZE))
