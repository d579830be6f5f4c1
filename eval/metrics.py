"""Metrics: SQuAD F1 and EM, recovered fraction, bootstrap intervals."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from cag.answer import normalise, token_f1


def best_f1(found: str, answers: Sequence[str]) -> float:
    """Highest token F1 against any accepted answer."""
    return max(token_f1(found, answer) for answer in answers)


def exact_match(found: str, answers: Sequence[str]) -> float:
    """1 if the normalised answer equals an accepted one."""
    return float(any(normalise(found) == normalise(answer) for answer in answers))


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    return sum(values) / len(values) if values else float("nan")


def recovered(found: float, native: float, none: float) -> float:
    """Share of the NLL that context is worth: 0 without context, 1 native."""
    return (none - found) / (none - native)


def bootstrap(
    statistic: Callable[[Sequence[int]], float], n: int, *, seed: int = 0, rounds: int = 1000
) -> tuple[float, float]:
    """95% interval of a statistic of example indices, by paired resampling."""
    chooser = random.Random(seed)
    values = sorted(statistic(chooser.choices(range(n), k=n)) for _ in range(rounds))
    return values[int(0.025 * rounds)], values[int(0.975 * rounds)]


def retention_interval(
    found: Sequence[float], native: Sequence[float], seed: int = 0
) -> tuple[float, float]:
    """95% interval of mean(found) / mean(native), resampling questions in pairs."""

    def ratio(rows: Sequence[int]) -> float:
        return sum(found[i] for i in rows) / max(1e-9, sum(native[i] for i in rows))

    return bootstrap(ratio, len(found), seed=seed)
