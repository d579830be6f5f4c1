"""Reading behind a cache must be reading the whole text."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, TEXT, tiny_lm

from cag.errors import ContextTooLong
from cag.lm.anchor import embed, lowest_layer, with_predecessors
from cag.lm.cache import KV, Context
from cag.lm.counting import count_layer_tokens
from cag.lm.loading import LM
from cag.lm.prefill import prefill


def whole(lm: LM, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return lm.model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("suffix", [1, 9, 40, 70])
def test_logits_behind_a_cache_equal_those_without(lm: LM, suffix: int) -> None:
    ids = lm.encode(TEXT)[: 40 + suffix]
    context = Context(lm)
    with torch.no_grad():
        context.run(torch.tensor([ids[:40]]))
        behind = context.run(torch.tensor([ids[40:]]), logits=0).logits[0]
    torch.testing.assert_close(behind, whole(lm, ids)[40:], atol=1e-5, rtol=1e-5)


def test_canonical_passage_restored_gives_native_logits(lm: LM) -> None:
    """Also longer than Gemma's sliding window of 24."""
    ids = lm.encode(TEXT)[:90]
    with torch.no_grad():
        first = Context(lm)
        first.run(torch.tensor([ids[:80]]), logits=None)
        restored = Context(lm)
        restored.run(torch.tensor([ids[:10]]), logits=None)
        restored.append(first.canonical(10, 80))
        behind = restored.run(torch.tensor([ids[80:]]), logits=0).logits[0]
    torch.testing.assert_close(behind, whole(lm, ids)[80:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen2"])
def test_canonical_keys_do_not_depend_on_position(family: str) -> None:
    lm = tiny_lm(family)
    ids = lm.encode("a small library")
    states = []
    for start in (0, 37):
        context = Context(lm)
        if start:
            zeros = torch.zeros(lm.spec.layers, lm.spec.kv_heads, start, lm.spec.head_size)
            context.append(KV(zeros, zeros))
        with torch.no_grad():
            context.run(torch.tensor([ids]), logits=None)
        states.append(context.canonical(start, start + len(ids)).keys[0])
    torch.testing.assert_close(*states, atol=1e-5, rtol=1e-5)


def test_a_fork_is_private(lm: LM) -> None:
    context = Context(lm)
    with torch.no_grad():
        context.run(torch.tensor([lm.encode("The harbour")]), logits=None)
        before = context.canonical(0, context.length).keys.clone()
        fork = context.fork()
        fork.run(torch.tensor([lm.encode(" of Lindholm was built")]), logits=None)
    assert context.length < fork.length
    assert torch.equal(context.canonical(0, context.length).keys, before)


def test_batched_prefill_equals_one_by_one(lm: LM) -> None:
    prefix = lm.encode("Context:")
    passages = [lm.encode(TEXT)[:n] for n in (7, 31, 60)]
    for ids, batched in zip(passages, prefill(lm, prefix, passages), strict=True):
        (alone,) = prefill(lm, prefix, [ids])
        torch.testing.assert_close(batched.keys, alone.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(batched.values, alone.values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_of_pasts_equals_one_by_one(family: str) -> None:
    from cag.translate.losses import rotated

    lm = tiny_lm(family)
    ids = lm.encode(TEXT)
    suffix = ids[70:80]
    pasts = []
    for length in (20, 50):
        context = Context(lm)
        with torch.no_grad():
            context.run(torch.tensor([ids[:length]]), logits=None)
        pasts.append(context)
    rows = []
    for context in pasts:
        kv = context.canonical(0, context.length)
        rows.append((rotated(lm, kv, 0), kv.values))
    stacked, mask = Context.stacked(lm, rows)
    mask = torch.cat([mask, torch.ones(2, len(suffix), dtype=torch.long)], dim=1)
    with torch.no_grad():
        together = stacked.run(torch.tensor([suffix, suffix]), logits=0, mask=mask).logits
        for row, context in enumerate(pasts):
            alone = context.run(torch.tensor([suffix]), logits=0).logits[0]
            torch.testing.assert_close(together[row], alone, atol=1e-4, rtol=1e-4)


def test_the_lowest_layer_needs_no_layers(lm: LM) -> None:
    ids = lm.encode(TEXT)[:30]
    context = Context(lm)
    with torch.no_grad():
        context.run(torch.tensor([ids]), logits=None)
    native = context.canonical(5, 30)
    with torch.no_grad(), count_layer_tokens(lm) as counted:
        exact = lowest_layer(lm, ids[5:], start=5)
    assert counted.tokens == 0
    torch.testing.assert_close(exact.keys[0], native.keys[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(exact.values[0], native.values[0], atol=1e-5, rtol=1e-5)


def test_predecessors_reach_into_what_stands_before() -> None:
    lm = tiny_lm("llama")
    anchors = with_predecessors(lm, [5, 6], preceding=[3, 4], count=3)
    blocks = anchors.view(2, 4, -1)
    table = embed(lm, [3, 4, 5, 6])
    assert torch.equal(blocks[0, :3], table[[2, 1, 0]])
    assert torch.equal(blocks[1], table[[3, 2, 1, 0]])
    assert not blocks[0, 3].any()  # nothing stood there


def test_more_than_the_window_is_refused_before_anything_runs() -> None:
    lm = tiny_lm("llama")
    context = Context(lm)
    with pytest.raises(ContextTooLong, match="512-token window"):
        context.run(torch.zeros(1, 513, dtype=torch.long))
    assert context.length == 0
