"""Tensors as arrays and back: every dtype, any shape and strides, through a real zarr array."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.storage import MemoryStore

from tierstore.arrays import ATTRIBUTE, array_dtype, attributes, from_array_view, to_array_view
from tierstore.errors import UsageError
from tierstore.tensors import describe

QUANTISED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)} - QUANTISED, key=str)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous tensor."""
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def bytes_for(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return random bytes for a tensor, an element's in the last dimension: also what no number has."""
    generator = torch.Generator().manual_seed(seed)
    highest = 2 if dtype is torch.bool else 256
    return torch.randint(0, highest, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)


@given(dtype=st.sampled_from(DTYPES), shape=SHAPES, seed=st.integers(0, 99), data=st.data())
def test_any_tensor_comes_back_from_a_zarr_array(
    dtype: torch.dtype, shape: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    raw = bytes_for(dtype, shape, seed)
    tensor = raw.view(dtype).squeeze(-1).permute(order)
    array, attrs = to_array_view(tensor)
    stored = zarr.create_array(MemoryStore(), data=array, attributes=dict(attrs))
    back = from_array_view(np.asarray(stored[...]), stored.attrs)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bits(back) == bits(raw.permute((*order, len(shape))).contiguous())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_that_is_stored_has_an_array_of_equal_width(dtype: torch.dtype) -> None:
    tensor = bytes_for(dtype, (3, 2), seed=1).view(dtype).squeeze(-1)
    assert describe(tensor).dtype is dtype
    assert np.dtype(array_dtype(dtype)).itemsize == dtype.itemsize
    assert attributes(dtype) == {"torch_dtype": str(dtype).removeprefix("torch.")}


def test_what_numpy_knows_is_readable_and_the_rest_is_bits() -> None:
    numbers, _ = to_array_view(torch.tensor([1.5, -2.0], dtype=torch.float16))
    assert numbers.tolist() == [1.5, -2.0]
    array, attrs = to_array_view(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    assert (array.dtype.name, array.tolist(), attrs) == ("uint16", [0x3F80, 0xC000], {ATTRIBUTE: "bfloat16"})
    array, attrs = to_array_view(torch.tensor([1.0], dtype=torch.float8_e4m3fn))
    assert (array.dtype.name, array.tolist(), attrs) == ("uint8", [0x38], {ATTRIBUTE: "float8_e4m3fn"})


def test_memory_is_shared_both_ways() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    array, attrs = to_array_view(tensor)
    from_array_view(array, attrs)[2] = 1.0
    assert tensor.tolist() == [0, 0, 1, 0]


def test_conjugate_and_negative_views_are_what_they_show() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert to_array_view(tensor.conj())[0].tolist() == [1 - 2j, 3 + 4j]
    assert to_array_view(tensor.conj().imag)[0].tolist() == [-2, 4]


def test_a_tensor_with_a_gradient_is_shown_by_value() -> None:
    array, _ = to_array_view(torch.ones(2, requires_grad=True))
    assert array.tolist() == [1, 1]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(4, dtype=">u2"),
        np.arange(4, dtype=np.uint16)[::-1],
        np.frombuffer(bytes(8), dtype=np.uint16),
        [1, 2],
    ],
    ids=["big-endian", "backwards", "read-only", "list"],
)
def test_any_array_becomes_a_tensor(array: np.ndarray[tuple[int], np.dtype[np.uint16]]) -> None:
    assert from_array_view(array, {}).tolist() == list(array)


@pytest.mark.parametrize(
    ("dtype", "name", "said"),
    [
        ("uint8", "bfloat16", "an array of uint8 does not stand for torch.bfloat16: that is kept as uint16"),
        ("uint8", "quint8", "torch_dtype='quint8' is not a dtype whose bytes can be copied"),
        ("uint8", "load", "torch_dtype='load' is not"),
        ("uint8", 7, "torch_dtype=7 is not"),
        ("datetime64[s]", None, "is not a dtype"),
    ],
)
def test_what_an_array_does_not_stand_for_is_refused(dtype: str, name: object, said: str) -> None:
    attrs = {} if name is None else {ATTRIBUTE: name}
    with pytest.raises(UsageError) as caught:
        from_array_view(np.zeros(2, dtype=dtype), attrs)
    assert said in str(caught.value)


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(UsageError, match="meta tensor"):
        to_array_view(torch.empty(2, device="meta"))
    with pytest.raises(UsageError, match="has no array that stands for it"):
        array_dtype(torch.quint8)
