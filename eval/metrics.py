"""Metrics of answers, and paired bootstrap intervals of everything that is claimed of them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import numpy as np

from cag.scoring import normalise, token_f1

Interval = tuple[float, float]

# -- one answer ----------------------------------------------------------------------------


def best_f1(found: str, answers: Sequence[str]) -> float:
    """Highest token F1 against any accepted answer."""
    return max(token_f1(found, answer) for answer in answers)


def exact_match(found: str, answers: Sequence[str]) -> float:
    """1 if the normalised answer equals an accepted one."""
    return float(any(normalise(found) == normalise(answer) for answer in answers))


def chosen(found: str, choices: Sequence[str]) -> str | None:
    """The choice that a generated answer begins with, or None."""
    words = normalise(found)
    matching = [c for c in choices if words[: len(normalise(c))] == normalise(c)]
    return max(matching, key=len, default=None)


def above_chance(right: float, choices: Sequence[str]) -> float:
    """Right (1) or wrong (0), less what guessing would be worth; its mean is accuracy - 1/k."""
    return right - 1 / len(choices)


def agrees(found: str, native: str) -> float:
    """1 if two answers are the same once normalised."""
    return float(normalise(found) == normalise(native))


# -- many answers --------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    return sum(values) / len(values) if values else float("nan")


def accuracy(found: Sequence[str | None], wanted: Sequence[str]) -> float:
    """Share of predictions that are right; None is wrong."""
    return mean([float(f == w) for f, w in zip(found, wanted, strict=True)])


def ratio(found: float, native: float) -> float:
    """Their quotient; NaN where there is nothing to retain."""
    return found / native if native > 0 else float("nan")


def recovered(found: float, native: float, none: float) -> float:
    """Share of the NLL that context is worth: 0 without context, 1 native."""
    return (none - found) / (none - native) if none != native else float("nan")


# -- intervals -----------------------------------------------------------------------------


def bootstrap(
    statistic: Callable[[Sequence[int]], float], n: int, *, seed: int = 0, rounds: int = 1000
) -> Interval:
    """95% interval of any statistic of example indices, by paired resampling; slow."""
    chooser = random.Random(seed)
    values = sorted(statistic(chooser.choices(range(n), k=n)) for _ in range(rounds))
    return values[int(0.025 * rounds)], values[int(0.975 * rounds)]


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """95% interval of a mean."""
    return _interval(_means(values, seed))


def difference_interval(found: Sequence[float], other: Sequence[float], seed: int = 0) -> Interval:
    """95% interval of mean(found) - mean(other), resampling questions in pairs."""
    return _interval(_means(found, seed) - _means(other, seed))


def retention_interval(found: Sequence[float], native: Sequence[float], seed: int = 0) -> Interval:
    """95% interval of mean(found) / mean(native), resampling questions in pairs."""
    return _interval(_quotients(_means(found, seed), _means(native, seed)))


def recovered_interval(
    found: Sequence[float], native: Sequence[float], none: Sequence[float], seed: int = 0
) -> Interval:
    """95% interval of the recovered fraction of mean NLLs, resampling questions in pairs."""
    means = [_means(values, seed) for values in (found, native, none)]
    return _interval(_quotients(means[2] - means[0], means[2] - means[1]))


@functools.lru_cache(maxsize=2)
def _shares(n: int, seed: int, rounds: int = 4000) -> np.ndarray:
    """Share of each of n questions in each resample, with shape (rounds, n)."""
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=rounds)
    return drawn / n


def _means(values: Sequence[float], seed: int) -> np.ndarray:
    """Mean of each resample; the same seed and length draw the same questions."""
    return _shares(len(values), seed) @ np.asarray(values, dtype=np.float64)


def _quotients(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Their quotient, and NaN where the denominator is not positive."""
    positive = below > 1e-12
    return np.where(positive, above / np.where(positive, below, 1.0), np.nan)


def _interval(values: np.ndarray) -> Interval:
    """The middle 95%; NaN where a quotient has no meaning in more than 1% of the resamples."""
    known = values[~np.isnan(values)]
    if len(known) < 0.99 * len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(known, (0.025, 0.975))
    return float(low), float(high)
