"""What an address asks for."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.request import MOST_PASSAGES, MOST_TOKENS, Request
from cag.engine import MODES
from cag.settings import Settings

OFFERED = ["a", "b", "c"]
SETTINGS = Settings(k=2, max_tokens=9, refresh=0.3)


@given(
    question=st.text(string.printable).map(str.strip),
    targets=st.sets(st.sampled_from(OFFERED), min_size=1),
    paths=st.sets(st.sampled_from(MODES), min_size=1),
    k=st.integers(1, MOST_PASSAGES),
    tokens=st.integers(1, MOST_TOKENS),
    refresh=st.integers(0, 100),
)
def test_an_address_says_everything(
    question: str, targets: set[str], paths: set[str], k: int, tokens: int, refresh: int
) -> None:
    request = Request(
        question,
        tuple(name for name in OFFERED if name in targets),
        tuple(mode for mode in MODES if mode in paths),
        k,
        tokens,
        refresh,
    )
    query = {n: v if isinstance(v, list) else [v] for n, v in request.to_query().items()}
    assert Request.from_query(query, SETTINGS, OFFERED) == request


@pytest.mark.parametrize(
    ("number", "k"),
    [
        ("9" * 5000, MOST_PASSAGES),
        ("0", 1),
        ("7", 7),
        ("-3", 2),
        ("9" * 30, MOST_PASSAGES),
        ("٣", 2),
        ("1e3", 2),
        ("", 2),
    ],
)
def test_numbers_are_kept_in_bounds(number: str, k: int) -> None:
    assert Request.from_query({"k": [number]}, SETTINGS, OFFERED).k == k


def test_an_empty_address_gives_the_defaults() -> None:
    expected = Request("", ("a",), ("translated", "direct"), 2, 9, 30)
    assert Request.from_query({}, SETTINGS, OFFERED) == expected
