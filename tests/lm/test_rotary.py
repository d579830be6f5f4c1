"""Unrotating undoes what the model does, for every kind of scaling."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st

from cag.lm.cache import Context
from cag.lm.rotary import Rotary

SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(start=st.integers(0, 400), length=st.integers(1, 20), layer=st.integers(0, 3))
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_unrotate_undoes_rotate(family: str, start: int, length: int, layer: int) -> None:
    lm = tiny_lm(family)
    rotary = Rotary(lm, torch.arange(start, start + length))
    keys = torch.randn(2, length, lm.spec.head_size)
    back = rotary.unrotate(rotary.rotate(keys, layer), layer)
    torch.testing.assert_close(back, keys, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SCALINGS)
def test_every_scaling_moves_a_passage_exactly(name: str) -> None:
    """The first layer's canonical keys are the same wherever the text stands."""
    lm = tiny_lm("llama", rope_parameters=SCALINGS[name])
    ids = [5, 9, 12, 40]
    found = []
    for lead in (0, 60):
        context = Context(lm)
        with torch.no_grad():
            context.run(torch.tensor([[7] * lead + ids]), logits=None)
        found.append(context.canonical(lead, lead + 4))
    torch.testing.assert_close(found[0].keys[0], found[1].keys[0], atol=1e-4, rtol=1e-4)
    again = Context(lm)
    with torch.no_grad():
        again.run(torch.tensor([[7] * 60]), logits=None)
        again.append(found[1])
        behind = again.run(torch.tensor([[8]])).logits[0, -1]
        native = lm.model(torch.tensor([[7] * 60 + ids + [8]])).logits[0, -1]
    torch.testing.assert_close(behind, native, atol=1e-4, rtol=1e-4)
