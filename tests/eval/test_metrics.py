"""Metrics against examples worked by hand."""

from __future__ import annotations

import random

import pytest

from cag.answer import normalise, token_f1
from eval.metrics import best_f1, bootstrap, exact_match, mean, recovered, retention_interval

RANDOM = random.Random(7)
NATIVE = [RANDOM.random() for _ in range(60)]
FOUND = [RANDOM.random() for _ in range(60)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Harbour, in 1874!", ["harbour", "in", "1874"]),
        ("a theatre an anthem", ["theatre", "anthem"]),  # articles only as whole words
        ("U.S. state-owned", ["us", "stateowned"]),
        ("  \t\n", []),
        ("The a -- an.", []),
    ],
)
def test_words_are_compared_as_squad_does(text: str, words: list[str]) -> None:
    assert normalise(text) == words


@pytest.mark.parametrize(
    ("found", "wanted", "f1"),
    [
        ("the red tower", "Red tower.", 1.0),
        ("red tower", "tower red", 1.0),  # a bag of words
        ("red tower", "tower", 2 / 3),  # precision 1/2, recall 1
        ("red old tower", "old tower of London", 4 / 7),  # 2/3 and 2/4
        ("red", "blue", 0.0),
        ("red red red", "red", 1 / 2),  # a word counts as often as both have it
        ("red red", "red red blue", 4 / 5),
        ("", "red", 0.0),
        ("red", "", 0.0),
        ("", "", 1.0),
        ("the", "...", 1.0),  # nothing is left of either
    ],
)
def test_token_f1(found: str, wanted: str, f1: float) -> None:
    assert token_f1(found, wanted) == pytest.approx(f1)
    assert token_f1(wanted, found) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("found", "answers", "f1", "em"),
    [
        ("the Atlantic", ["Pacific", "Atlantic Ocean"], 2 / 3, 0.0),
        ("An Atlantic ocean!", ["Pacific", "Atlantic Ocean"], 1.0, 1.0),
        ("ocean Atlantic", ["Atlantic Ocean"], 1.0, 0.0),  # order matters to EM alone
        ("", ["Pacific"], 0.0, 0.0),
        ("", ["Pacific", "the"], 1.0, 1.0),
    ],
)
def test_the_best_of_several_answers_counts(
    found: str, answers: list[str], f1: float, em: float
) -> None:
    assert best_f1(found, answers) == pytest.approx(f1)
    assert exact_match(found, answers) == em


@pytest.mark.parametrize(
    ("found", "share"), [(4.0, 0.0), (1.0, 1.0), (2.5, 0.5), (5.5, -0.5), (0.25, 1.25)]
)
def test_recovered_is_0_without_context_and_1_natively(found: float, share: float) -> None:
    assert recovered(found, native=1.0, none=4.0) == pytest.approx(share)


def test_mean_of_nothing_is_nan() -> None:
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert mean([]) != mean([])


def interval(seed: int) -> tuple[float, float]:
    return bootstrap(lambda rows: mean([FOUND[i] for i in rows]), len(FOUND), seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_is_around_the_estimate(seed: int) -> None:
    low, high = interval(seed)
    assert min(FOUND) < low < mean(FOUND) < high < max(FOUND)


def test_the_interval_is_as_wide_as_the_standard_error_says() -> None:
    low, high = interval(0)
    deviation = mean([(x - mean(FOUND)) ** 2 for x in FOUND]) ** 0.5
    assert (high - low) / 2 == pytest.approx(1.96 * deviation / len(FOUND) ** 0.5, rel=0.1)


def test_a_seed_fixes_the_interval() -> None:
    assert interval(3) == interval(3) != interval(4)
    assert retention_interval(FOUND, NATIVE, 3) == retention_interval(FOUND, NATIVE, 3)


def test_retention_interval_is_around_the_ratio_of_means() -> None:
    low, high = retention_interval(FOUND, NATIVE)
    assert low < mean(FOUND) / mean(NATIVE) < high


def test_retention_is_resampled_in_pairs() -> None:
    """Half of native in every question is half of native in every resample."""
    halves = [0.5 * x for x in NATIVE]
    assert retention_interval(halves, NATIVE) == pytest.approx((0.5, 0.5))
    low, high = retention_interval(halves[::-1], NATIVE)
    assert high - low > 0.05
