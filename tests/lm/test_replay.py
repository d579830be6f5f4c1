"""A replay is the native reading, but for what is injected and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from conftest import TEXT, tiny_lm

from cag.errors import ContextTooLong
from cag.lm.cache import KV, Context
from cag.lm.loading import LM
from cag.lm.replay import Replayed, replay

PREFIX, PASSAGE, SUFFIX = slice(0, 12), slice(12, 70), slice(70, 80)  # beyond Gemma's window of 24
PLAIN: tuple[int, ...] = ()


def start(lm: LM) -> Context:
    context = Context(lm)
    context.run(torch.tensor([lm.encode(TEXT)[PREFIX]]), logits=None)
    return context


def read(lm: LM, injected: KV | None = None, layers: Iterable[int] = PLAIN) -> Replayed:
    ids = lm.encode(TEXT)[PASSAGE]
    return replay(lm, start(lm), ids, injected, layers, states=True)


def passage(context: Context) -> KV:
    return context.canonical(PASSAGE.start, PASSAGE.stop)


def suffix_logits(lm: LM, context: Context) -> torch.Tensor:
    ids = torch.tensor([lm.encode(TEXT)[SUFFIX]])
    logits: torch.Tensor = context.fork().run(ids, logits=0).logits[0]
    return logits


def noise(like: KV) -> KV:
    torch.manual_seed(7)
    return KV(torch.randn_like(like.keys), torch.randn_like(like.values))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("layers", [(), (1, 2)])
def test_without_injection_it_is_the_native_reading(lm: LM, layers: tuple[int, ...]) -> None:
    ids = torch.tensor([lm.encode(TEXT)[: SUFFIX.stop]])
    with torch.no_grad():
        logits = suffix_logits(lm, read(lm, None, layers).context)
        whole = lm.model(ids).logits[0, SUFFIX]
    torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-5)


def test_states_are_those_of_the_model(lm: LM) -> None:
    ids = torch.tensor([lm.encode(TEXT)[: PASSAGE.stop]])
    states = read(lm).states
    whole = lm.body(ids, output_hidden_states=True)
    assert len(states) == lm.spec.layers + 1
    for found, wanted in zip(states, whole.hidden_states, strict=True):
        close(found, wanted[0, PASSAGE])
    close(states[-1], whole.last_hidden_state[0, PASSAGE])


def test_states_are_only_kept_when_asked_for(lm: LM) -> None:
    assert replay(lm, start(lm), [3, 4], None, ()).states == []


@pytest.mark.parametrize("layers", [(0,), (2,), (3,), (1, 2), (0, 3), (0, 1, 2, 3)])
def test_its_own_kv_injected_changes_nothing(lm: LM, layers: tuple[int, ...]) -> None:
    native = read(lm)
    again = read(lm, passage(native.context), layers)
    for found, wanted in zip(again.states, native.states, strict=True):
        close(found, wanted)
    close(suffix_logits(lm, again.context), suffix_logits(lm, native.context))


@pytest.mark.parametrize("layers", [(0,), (1,), (3,), (1, 2)])
@pytest.mark.parametrize("zeros", [True, False])
def test_what_is_injected_moves_only_what_lies_above(
    lm: LM, layers: tuple[int, ...], zeros: bool
) -> None:
    native = read(lm)
    own = passage(native.context)
    foreign = KV(own.keys * 0, own.values * 0) if zeros else noise(own)
    moved = read(lm, foreign, layers)
    for layer in range(lm.spec.layers + 1):
        same = torch.equal(moved.states[layer], native.states[layer])
        assert same == (layer <= layers[0]), layer
    assert not torch.allclose(
        suffix_logits(lm, moved.context), suffix_logits(lm, native.context), atol=1e-3
    )


def test_the_context_holds_what_was_injected_and_else_what_was_computed(lm: LM) -> None:
    native = read(lm)
    own = passage(native.context)
    foreign = noise(own)
    held = passage(read(lm, foreign, (1, 2)).context)
    for found, given, read_natively in (
        (held.keys, foreign.keys, own.keys),
        (held.values, foreign.values, own.values),
    ):
        close(found[1:3], given[1:3])
        close(found[0], read_natively[0])  # below: as before
        assert not torch.allclose(found[3], read_natively[3], atol=1e-3)  # above: from moved states
        assert not torch.allclose(found[3], given[3], atol=1e-3)


def test_all_layers_injected_is_the_same_as_appending(lm: LM) -> None:
    foreign = noise(passage(read(lm).context))
    appended = start(lm)
    appended.append(foreign)
    replayed = read(lm, foreign, range(lm.spec.layers)).context
    close(suffix_logits(lm, replayed), suffix_logits(lm, appended))


def test_it_ends_with_the_block(lm: LM) -> None:
    implementation = lm.model.config._attn_implementation
    native = suffix_logits(lm, read(lm).context)
    context = read(lm, noise(passage(read(lm).context)), (1,)).context
    assert lm.model.config._attn_implementation == implementation
    assert torch.equal(suffix_logits(lm, read(lm).context), native)
    fork = context.fork()
    for grown in (context, fork):  # what is read afterwards is the model's own
        grown.run(torch.tensor([lm.encode(TEXT)[SUFFIX]]), logits=None)
        assert grown.length == SUFFIX.stop


def test_it_ends_with_an_exception() -> None:
    lm = tiny_lm("llama", max_position_embeddings=80)
    before = start(lm)
    fork = before.fork()
    zeros = torch.zeros(lm.spec.layers, lm.spec.kv_heads, 100, lm.spec.head_size)
    with pytest.raises(ContextTooLong):
        replay(lm, before, [5] * 100, KV(zeros, zeros), (1,))
    ids = lm.encode(TEXT)[PASSAGE]
    found, wanted = (replay(lm, context, ids, None, ()).context for context in (before, fork))
    assert torch.equal(suffix_logits(lm, found), suffix_logits(lm, wanted))


def test_gradients_reach_what_was_injected() -> None:
    lm = tiny_lm("gemma3_text")
    kv = noise(passage(read(lm).context))
    kv.keys.requires_grad_()
    read(lm, kv, (1,)).states[-1].sum().backward()
    assert kv.keys.grad is not None
    moved = [layer for layer in range(lm.spec.layers) if kv.keys.grad[layer].any()]
    assert moved == [1]


@pytest.mark.parametrize(
    ("tokens", "layers", "message"),
    [(3, (1,), "KV of 3 tokens"), (5, (4,), "not all among"), (5, (-1,), "not all among")],
)
def test_what_does_not_fit_is_refused(tokens: int, layers: tuple[int], message: str) -> None:
    lm = tiny_lm("llama")
    zeros = torch.zeros(lm.spec.layers, lm.spec.kv_heads, tokens, lm.spec.head_size)
    with pytest.raises(ValueError, match=message):
        replay(lm, start(lm), [5] * 5, KV(zeros, zeros), layers)
