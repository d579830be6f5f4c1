"""The decode loop: greedy, sampled, stop strings, streaming."""

from __future__ import annotations

import pytest
import torch
from conftest import TEXT, tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st

from cag.lm.cache import Context
from cag.lm.decode import Decoded, Generation, _Text, decode
from cag.lm.loading import LM


def run(lm: LM, generation: Generation) -> tuple[Decoded, list[str], Context]:
    context, result = Context(lm), Decoded()
    pieces = list(decode(lm, context, lm.encode(TEXT)[:20], generation, result))
    return result, pieces, context


def test_greedy_equals_repeated_full_passes(lm: LM) -> None:
    result, pieces, context = run(lm, Generation(max_tokens=8, stop=()))
    ids = lm.encode(TEXT)[:20]
    with torch.no_grad():
        for token in result.ids:
            assert int(lm.model(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)
    assert "".join(pieces) == result.text
    assert context.length == 20 + len(result.ids)


def test_sampling_repeats_with_its_seed_and_differs_without() -> None:
    lm = tiny_lm("llama")
    hot = Generation(max_tokens=12, temperature=3.0, stop=(), seed=1)
    assert run(lm, hot)[0].ids == run(lm, hot)[0].ids
    other = Generation(max_tokens=12, temperature=3.0, stop=(), seed=2)
    assert run(lm, hot)[0].ids != run(lm, other)[0].ids
    unseeded = Generation(max_tokens=12, temperature=3.0, stop=())
    assert len({tuple(run(lm, unseeded)[0].ids) for _ in range(4)}) > 1


def test_a_tiny_nucleus_is_greedy() -> None:
    lm = tiny_lm("llama")
    sampled = Generation(max_tokens=6, temperature=1.0, top_p=1e-6, stop=(), seed=0)
    assert run(lm, sampled)[0].ids == run(lm, Generation(max_tokens=6, stop=()))[0].ids


@settings(max_examples=80, deadline=None)
@given(
    text=st.text(alphabet="abc.\né日🙂 ", max_size=30),
    stop=st.text(alphabet="abc.\né日", min_size=1, max_size=4),
)
def test_stop_strings_end_the_text_wherever_tokens_end(text: str, stop: str) -> None:
    lm = tiny_lm("llama")
    held, shown = _Text(lm, [stop]), ""
    for token in lm.encode(text):
        stopped = held.push(token)
        shown += held.take(final=stopped)
        assert stop not in shown
        if stopped:
            break
    else:
        shown += held.take(final=True)
    assert shown == text.split(stop)[0]


@pytest.mark.parametrize("stop", [("zzzz",), ()])
def test_streaming_never_shows_half_a_character(stop: tuple[str, ...]) -> None:
    lm = tiny_lm("llama")
    held = _Text(lm, stop)
    pieces = []
    for token in lm.encode("a🙂b日c"):
        held.push(token)
        pieces.append(held.take(final=False))
    pieces.append(held.take(final=True))
    assert "\ufffd" not in "".join(pieces) and "".join(pieces) == "a🙂b日c"
