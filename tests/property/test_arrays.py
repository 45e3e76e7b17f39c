"""Tensors as arrays and back: every dtype whose bytes can be copied, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.arrays import ATTRIBUTE, to_array, to_tensor
from tierstore.errors import UsageError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def bits(tensor: torch.Tensor) -> list[int]:
    values: list[int] = tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []
    return values


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 4), max_size=3),
    seed=st.integers(0, 1000),
)
def test_a_tensor_comes_back_from_its_array_bit_for_bit(
    dtype: torch.dtype, shape: list[int], seed: int
) -> None:
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))
    if dtype == torch.bool:
        raw &= 1
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    array, attributes = to_array(tensor)
    assert array.shape == tuple(shape)
    assert array.nbytes == count
    back = to_tensor(array.copy(), attributes)
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert bits(back) == bits(tensor)


def test_an_array_shows_the_tensor_s_own_memory() -> None:
    tensor = torch.ones(3, dtype=torch.bfloat16)
    array, attributes = to_array(tensor)
    tensor.zero_()
    assert not array.any()
    assert attributes == {ATTRIBUTE: "bfloat16"}


def test_an_array_without_the_attribute_is_what_it_looks_like() -> None:
    assert to_tensor(np.arange(3, dtype=np.float32), {}).dtype == torch.float32


def test_a_transposed_tensor_keeps_its_elements_in_place() -> None:
    array, _ = to_array(torch.arange(6).reshape(2, 3).t())
    assert array.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("name", ["bfloat16", "no_such_dtype", "nn", 7])
def test_an_attribute_that_does_not_fit_is_refused(name: object) -> None:
    with pytest.raises(UsageError, match="elements of float32 are not torch_dtype="):
        to_tensor(np.zeros(2, dtype=np.float32), {ATTRIBUTE: name})


def test_an_array_that_torch_cannot_hold_is_refused() -> None:
    with pytest.raises(UsageError, match="a tensor cannot hold elements of"):
        to_tensor(np.array(["a", "b"]), {})
