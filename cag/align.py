"""Alignment: which reference token feeds which target token."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]


def align(reference: Sequence[Span], target: Sequence[Span]) -> list[int]:
    """For each target token, the last reference token that starts before it ends.

    Both models are causal, so that is the reference token whose state has seen all the text
    of the target token and as little beyond it as possible. Runs in linear time.

    Parameters
    ----------
    reference, target
        Character spans ``(start, end)`` of the tokens of the same text, in reading order.

    Returns
    -------
    list of int
        One reference index per target token, never decreasing.

    Raises
    ------
    ValueError
        If there are target tokens but no reference tokens.
    """
    if target and not reference:
        raise ValueError("cannot align to an empty tokenisation")
    indices: list[int] = []
    current = 0
    for _, end in target:
        while current + 1 < len(reference) and reference[current + 1][0] < end:
            current += 1
        indices.append(current)
    return indices
