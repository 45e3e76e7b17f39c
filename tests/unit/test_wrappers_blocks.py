"""Blocks: what a shuffle is, what is worth it, and that nothing damaged is taken for bytes."""

from __future__ import annotations

import lz4.block  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.codec_bytes import as_bytes, random, repeating
from tierstore.codec.blocks import (
    BLOCK_BYTES,
    WIDTHS,
    Bytes,
    best_width,
    pack,
    shuffle,
    spans,
    unpack,
    unshuffle,
)
from tierstore.errors import IntegrityError


def array(tensor: torch.Tensor) -> Bytes:
    whole: Bytes = as_bytes(tensor).numpy()
    return whole


def gaussian(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 64, 1003])
def test_a_shuffle_puts_like_bytes_together_and_the_rest_behind(width: int, nbytes: int) -> None:
    raw = array(random(nbytes))
    body = nbytes // width * width
    expected = np.concatenate([raw[:body].reshape(-1, width).T.reshape(-1), raw[body:]])
    assert np.array_equal(shuffle(raw, width), expected)


@given(st.binary(max_size=300), st.sampled_from(WIDTHS), st.integers(0, 7))
def test_unshuffling_undoes_it_wherever_the_bytes_lie(data: bytes, width: int, offset: int) -> None:
    raw = np.frombuffer(data, np.uint8)
    into = np.zeros(len(raw) + offset, np.uint8)[offset:]
    unshuffle(shuffle(raw, width), width, into)
    assert np.array_equal(into, raw)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_packed_block_is_lz4_of_the_shuffled_bytes(width: int) -> None:
    raw = array(random(50).repeat(100))
    room = np.zeros(5000, np.uint8)
    (length,) = pack(raw, width, BLOCK_BYTES, room)
    assert length < 5000
    unpacked = lz4.block.decompress(room[:length].tobytes(), uncompressed_size=5000)
    assert unpacked == shuffle(raw, width).tobytes()


def test_a_block_that_does_not_get_shorter_is_stored_as_it_is() -> None:
    raw = array(torch.cat([repeating(4096), random(4096), repeating(100)]))
    room = np.zeros(len(raw), np.uint8)
    lengths = pack(raw, 4, 4096, room)
    assert lengths[1] == 4096
    assert lengths[0] < 400
    assert np.array_equal(room[lengths[0] : lengths[0] + 4096], raw[4096:8192])


@given(st.data())
def test_what_is_packed_is_unpacked(data: st.DataObject) -> None:
    parts = data.draw(
        st.lists(st.tuples(st.sampled_from([random, repeating]), st.integers(0, 5000)), max_size=4)
    )
    raw = array(torch.cat([torch.zeros(0, dtype=torch.uint8)] + [make(nbytes) for make, nbytes in parts]))
    width, block = data.draw(st.sampled_from(WIDTHS)), data.draw(st.sampled_from([512, 4096, BLOCK_BYTES]))
    room = np.zeros(len(raw), np.uint8)
    lengths = pack(raw, width, block, room)
    assert sum(lengths) <= len(raw)
    into = np.zeros(len(raw), np.uint8)
    at = 0
    for length, (start, stop) in zip(lengths, spans(len(raw), block), strict=True):
        unpack(room[at : at + length], width, into[start:stop])
        at += length
    assert np.array_equal(into, raw)


@given(st.binary(min_size=1, max_size=200))
def test_a_block_that_is_nothing_of_ours_is_an_error_or_of_the_right_length(data: bytes) -> None:
    into = np.zeros(1000, np.uint8)
    try:
        unpack(np.frombuffer(data, np.uint8), 4, into)
    except IntegrityError:
        return
    assert len(lz4.block.decompress(data, uncompressed_size=1000)) == 1000


def test_a_block_that_unpacks_to_fewer_bytes_is_an_error() -> None:
    short = np.frombuffer(lz4.block.compress(bytes(900), store_size=False), np.uint8)
    with pytest.raises(IntegrityError, match="unpacks to 900 B, not to 1000"):
        unpack(short, 1, np.zeros(1000, np.uint8))


@pytest.mark.parametrize(
    ("tensor", "width"),
    [
        (torch.zeros(50_000), 1),
        (torch.arange(50_000, dtype=torch.int32), 4),
        (torch.arange(50_000, dtype=torch.int64) * 77, 8),
        (gaussian(500_000).bfloat16(), 2),
        (gaussian(500_000), None),
        (random(50_000), None),
    ],
    ids=["zeros", "int32", "int64", "bfloat16", "float32", "random"],
)
def test_the_width_is_that_of_the_numbers_and_none_where_nothing_is_gained(
    tensor: torch.Tensor, width: int | None
) -> None:
    assert best_width(array(tensor)) == width


def test_few_bytes_are_judged_like_many() -> None:
    assert best_width(array(torch.arange(1024, dtype=torch.int32))) is not None
    assert best_width(array(random(4096))) is None


def test_bytes_are_judged_by_samples_from_all_over() -> None:
    half = torch.cat([random(500_000), repeating(500_000)])
    assert best_width(array(half)) is not None
    assert best_width(array(half.flip(0))) is not None
