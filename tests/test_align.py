"""Alignment of two tokenisations of the same text."""

from __future__ import annotations

import pytest
from conftest import tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st

from cag.align import align

A, B = tiny_lm("llama", 60), tiny_lm("llama", 5)


@settings(max_examples=150, deadline=None)
@given(st.text(min_size=1, max_size=60))
def test_a_reference_token_has_seen_its_target_token(text: str) -> None:
    _, reference = A.encode_with_offsets(text)
    _, target = B.encode_with_offsets(text)
    indices = align(reference, target)
    assert len(indices) == len(target)
    assert indices == sorted(indices)
    for (_, end), index in zip(target, indices, strict=True):
        assert reference[index][0] < end or index == 0
        later = reference[index + 1 :]
        assert not later or later[0][0] >= end


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="héllo 日本🙂\u0301\t\ndef(x):", min_size=1, max_size=80))
def test_the_same_tokenizer_aligns_to_itself(text: str) -> None:
    _, spans = A.encode_with_offsets(text)
    ends = [spans[i] for i in align(spans, spans)]
    # several tokens of one character share its span; the last of them has seen it whole
    assert all(
        found[0] <= span[1] and found[1] >= span[1] for found, span in zip(ends, spans, strict=True)
    )


def test_known_case() -> None:
    reference = [(0, 3), (3, 7), (7, 9)]
    target = [(0, 1), (1, 3), (3, 9)]
    assert align(reference, target) == [0, 0, 2]


def test_nothing_to_align_to_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        align([], [(0, 1)])
    assert align([], []) == []
