"""What a codec gives back is what it was given, as far as its numbers reach."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from store import CODECS, StoreError, get_codec
from store.errors import NotFinite

FLOATS = st.floats(-(2.0**99), 2.0**99, width=32)  # far beyond any cache, and no overflow
ARRAYS = hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 150)), elements=FLOATS)
quick = settings(max_examples=30, deadline=None)


def there_and_back(codec: str, tensor: Tensor) -> Tensor:
    tensors = {"keys": tensor, "values": -tensor}
    decoded = get_codec(codec).decode(get_codec(codec).encode(tensors))
    assert decoded.keys() == tensors.keys()
    assert torch.equal(decoded["values"], -decoded["keys"])
    return decoded["keys"]


@quick
@given(ARRAYS)
def test_fp32_loses_nothing(array: np.ndarray) -> None:
    assert there_and_back("fp32", torch.from_numpy(array)).numpy().tobytes() == array.tobytes()


@quick
@given(ARRAYS)
def test_bf16_is_torchs_bfloat16(array: np.ndarray) -> None:
    tensor = torch.from_numpy(array)
    assert torch.equal(there_and_back("bf16", tensor), tensor.to(torch.bfloat16))


@pytest.mark.parametrize(("codec", "limit", "group"), [("int8", 127, 64), ("int4", 7, 32)])
@quick
@given(array=ARRAYS)
def test_integers_are_off_by_half_a_step_at_most(
    codec: str, limit: int, group: int, array: np.ndarray
) -> None:
    tensor = torch.from_numpy(array)
    decoded = there_and_back(codec, tensor)
    assert decoded.shape == tensor.shape
    for wanted, got in zip(tensor.split(group, -1), decoded.split(group, -1), strict=True):
        step = wanted.abs().amax(-1, keepdim=True).clamp_min(1e-12) / limit
        assert ((wanted - got).abs() <= step / 2 * (1 + 1e-4)).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [1, 2, 31, 33, 64, 65, 127, 129])
def test_every_size_keeps_its_shape(codec: str, size: int) -> None:
    tensor = torch.linspace(-1, 1, 12 * size).view(2, 2, 3, size)
    decoded = there_and_back(codec, tensor)
    torch.testing.assert_close(decoded.float(), tensor, atol=1 / 14 + 1e-4, rtol=0)


@pytest.mark.parametrize(
    ("codec", "part", "size"),
    [
        ("fp32", "keys", 512),
        ("bf16", "keys", 256),
        ("int8", "keys.numbers", 128),
        ("int4", "keys.numbers", 64),
    ],
)
def test_bytes_on_disk(codec: str, part: str, size: int) -> None:
    encoded = get_codec(codec).encode({"keys": torch.ones(2, 64)})
    assert encoded[part].nbytes == size


@pytest.mark.parametrize("codec", CODECS)
def test_decoded_in_the_dtype_that_is_asked_for(codec: str) -> None:
    encoded = get_codec(codec).encode({"keys": torch.ones(2, 5, dtype=torch.float16)})
    decoded = get_codec(codec).decode(encoded, torch.float16)["keys"]
    torch.testing.assert_close(decoded, torch.ones(2, 5, dtype=torch.float16))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused(codec: str, value: float) -> None:
    tensor = torch.zeros(2, 5)
    tensor[1, 3] = value
    with pytest.raises(NotFinite, match="'values'"):
        get_codec(codec).encode({"keys": torch.zeros(2, 5), "values": tensor})


def test_an_unknown_codec_lists_the_known() -> None:
    with pytest.raises(StoreError, match=r"'zip'.*fp32, bf16, int8, int4"):
        get_codec("zip")
