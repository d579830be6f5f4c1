"""Which tokens a refresh reads, and what the context holds afterwards."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from conftest import TEXT, tiny_lm
from hypothesis import given
from hypothesis import strategies as st

from cag.lm.cache import KV, Context
from cag.lm.loading import LM
from cag.refresh import choose_tokens, extend

LM_ = tiny_lm("llama")
PASSAGES = (
    " " + TEXT,
    " The mill has two wheels! Its miller is called Ada. Nobody else lives there",
)


def chosen(question: str, share: float, passages: tuple[str, ...] = PASSAGES) -> str:
    """The text of the tokens that are read."""
    encoded = [LM_.encode_with_offsets(text) for text in passages]
    mask = choose_tokens(question, passages, [spans for _, spans in encoded], share)
    ids = [token for tokens, _ in encoded for token in tokens]
    kept = [token for token, wanted in zip(ids, mask, strict=True) if wanted]
    return str(LM_.tokenizer.decode(kept))


@given(st.floats(0, 1), st.text(max_size=60), st.lists(st.text(max_size=80), max_size=3))
def test_exactly_the_wanted_share_is_read(share: float, question: str, passages: list[str]) -> None:
    spans = [LM_.encode_with_offsets(text)[1] for text in passages]
    mask = choose_tokens(question, passages, spans, share)
    assert len(mask) == sum(map(len, spans))
    assert sum(mask) == round(share * len(mask))


def test_the_sentence_that_the_question_is_about_comes_first() -> None:
    assert "Its miller is called Ada." in chosen("Who is the miller?", 0.15)
    assert "Its lighthouse is painted" in chosen("What colour is the lighthouse?", 0.15)
    assert chosen("Who is the miller?", 0.0) == ""
    assert chosen("Who is the miller?", 1.0) == "".join(PASSAGES)


def test_more_share_keeps_what_less_had() -> None:
    encoded = [LM_.encode_with_offsets(text)[1] for text in PASSAGES]
    masks = [choose_tokens("Who is the miller?", PASSAGES, encoded, s / 10) for s in range(11)]
    for less, more in pairwise(masks):
        assert all(also for kept, also in zip(less, more, strict=True) if kept)


def other_kv(lm: LM, ids: list[int], start: int) -> KV:
    """A cache that stands for a translated one: another text of the same length."""
    context = Context(lm)
    context.run(torch.tensor([[5] * start + ids[::-1]]), logits=None)
    return context.canonical(start, start + len(ids))


def test_a_refreshed_token_is_read_behind_what_stands_before_it(lm: LM) -> None:
    ids, prefix = lm.encode(TEXT)[:24], [3, 4, 5]
    kv = other_kv(lm, ids, len(prefix))

    def built(mask: list[bool]) -> KV:
        context = Context(lm)
        context.run(torch.tensor([prefix]), logits=None)
        extend(lm, context, kv, ids, mask)
        assert context.length == len(prefix) + len(ids)
        return context.canonical(len(prefix), context.length)

    none = built([False] * 24)
    torch.testing.assert_close(none.keys, kv.keys, atol=1e-5, rtol=1e-4)
    whole = Context(lm)
    whole.run(torch.tensor([prefix + ids]), logits=None)
    wanted = whole.canonical(len(prefix), whole.length)
    torch.testing.assert_close(built([True] * 24).values, wanted.values, atol=1e-5, rtol=1e-4)
    first = built([True] * 9 + [False] * 15)
    torch.testing.assert_close(first[:9].values, wanted[:9].values, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(first[9:].values, kv[9:].values, atol=1e-5, rtol=1e-4)
    last = built([False] * 15 + [True] * 9)
    torch.testing.assert_close(last[:15].values, kv[:15].values, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(last[15:].values[1:], wanted[15:].values[1:], atol=1e-3), (
        "what is read sees the translated cache before it"
    )
    assert last.keys.shape == wanted.keys.shape


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_no_passages_are_nothing(share: float) -> None:
    assert choose_tokens("What?", [], [], share) == []
