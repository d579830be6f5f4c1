"""Metrics against examples worked by hand."""

from __future__ import annotations

import math
import random
import time

import pytest
import torch

from cag.scoring import first_token_kl, normalise, recovered_share, token_f1
from eval.metrics import (
    above_chance,
    accuracy,
    agrees,
    best_f1,
    bootstrap,
    chosen,
    difference_interval,
    exact_match,
    mean,
    mean_interval,
    ratio,
    recovered,
    recovered_interval,
    retention_interval,
)

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


# -- closed sets, agreement, divergence ----------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "choice"),
    [
        ("Yes", "yes"),
        ("no, it is not", "no"),
        ("The yes", "yes"),  # articles do not count
        ("Not sure: yes", None),
        ("nothing", None),  # whole words only
        ("", None),
        ("yes and no", "yes and no"),  # the longest that fits
    ],
)
def test_a_choice_stands_at_the_start_of_an_answer(answer: str, choice: str | None) -> None:
    assert chosen(answer, ("yes", "no", "yes and no")) == choice


def test_accuracy_above_chance() -> None:
    assert accuracy(["yes", None, "no", "no"], ["yes", "yes", "no", "yes"]) == 0.5
    assert above_chance(1.0, ("yes", "no", "maybe")) == pytest.approx(2 / 3)
    guessed = [above_chance(float(i % 2 == 0), ("yes", "no")) for i in range(10)]
    assert mean(guessed) == 0


@pytest.mark.parametrize(
    ("found", "same"), [("The  tower.", 1.0), ("tower", 1.0), ("towers", 0.0), ("", 0.0)]
)
def test_agreement_is_between_normalised_answers(found: str, same: float) -> None:
    assert agrees(found, "the tower") == same


def test_first_token_kl() -> None:
    native, found = torch.tensor([0.0, math.log(3)]), torch.tensor([0.0, 0.0])
    by_hand = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert first_token_kl(native, found) == pytest.approx(by_hand)
    assert first_token_kl(native, native + 5) == pytest.approx(0, abs=1e-6)  # logits may be shifted
    assert first_token_kl(found, native) != pytest.approx(by_hand)


# -- fast intervals ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_intervals_of_means_are_those_of_the_slow_bootstrap(seed: int) -> None:
    assert mean_interval(FOUND, seed) == pytest.approx(interval(seed), abs=0.02)
    low, high = difference_interval(FOUND, NATIVE, seed)
    both = [found - native for found, native in zip(FOUND, NATIVE, strict=True)]
    assert (low, high) == pytest.approx(mean_interval(both, seed), abs=1e-9)
    assert low < mean(FOUND) - mean(NATIVE) < high


def test_an_interval_covers_the_truth_95_times_in_a_hundred() -> None:
    chooser, covered = random.Random(3), 0
    for _ in range(200):
        low, high = mean_interval([float(chooser.random() < 0.4) for _ in range(100)])
        covered += low <= 0.4 <= high
    assert 180 <= covered <= 199


def test_what_never_varies_has_no_width() -> None:
    assert mean_interval([0.25] * 9) == pytest.approx((0.25, 0.25))
    assert difference_interval(FOUND, FOUND) == (0, 0)
    assert retention_interval(FOUND, FOUND) == (1, 1)
    assert mean_interval([1.0]) == (1, 1)


def test_recovered_interval() -> None:
    none = [2.0 + x for x in NATIVE]
    halfway = [1.0 + x for x in NATIVE]
    assert recovered_interval(halfway, NATIVE, none) == pytest.approx((0.5, 0.5))
    assert recovered_interval(none, NATIVE, none) == pytest.approx((0, 0))
    low, high = recovered_interval(FOUND, NATIVE, none)
    assert low < recovered(mean(FOUND), mean(NATIVE), mean(none)) < high


def test_a_share_of_nothing_is_not_a_number() -> None:
    assert math.isnan(ratio(0.5, 0.0))
    assert math.isnan(recovered(1.0, 2.0, 2.0))
    for low, high in (
        retention_interval([1.0, 0.0], [0.0, 0.0]),
        retention_interval([1.0] * 9, [1.0, *[0.0] * 8]),  # no share in many resamples
        recovered_interval(FOUND, NATIVE, NATIVE),
    ):
        assert math.isnan(low) and math.isnan(high)


def test_intervals_of_many_questions_take_no_time() -> None:
    values = [random.random() for _ in range(1000)]
    mean_interval(values)
    started = time.process_time()
    for _ in range(20):
        retention_interval(values, values)
    assert time.process_time() - started < 5  # a loop would take minutes


@pytest.mark.parametrize(
    ("native", "found", "none", "share"),
    [(1.0, 1.5, 2.0, 0.5), (1.0, 0.5, 2.0, 1.5), (1.0, 3.0, 2.0, -1.0), (3.0, 5.0, 2.5, 0.0)],
)
def test_what_a_context_recovers(native: float, found: float, none: float, share: float) -> None:
    """A text that wins nothing itself has nothing to recover, however bad the translation."""
    assert recovered_share(native, found, none) == share
