"""How a slot is cut: equal chunks, everything in one of them, and next to no padding."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from tierstore.units import MIB
from tierstore_backends.zarr.layout import array_document, chunk_key, cut


@given(nbytes=st.integers(0, 2**45), most_bytes=st.integers(1, 2**30))
@example(nbytes=1_000_003, most_bytes=1000)
@example(nbytes=7, most_bytes=1)
def test_chunks_are_equal_and_hold_everything_and_hardly_more(nbytes: int, most_bytes: int) -> None:
    shape = cut(nbytes, most_bytes)
    assert shape.nbytes == nbytes
    assert 1 <= shape.chunk_bytes <= most_bytes
    assert 0 <= shape.padded_bytes - nbytes < max(shape.chunks, 1), "less than a byte of padding a chunk"
    if nbytes:
        assert shape.span(0).start == 0
        assert shape.span(shape.chunks - 1).stop == nbytes
        assert shape.span(shape.chunks - 1).start < nbytes, "no chunk is only padding"
    if shape.chunks > 1:
        assert shape.span(0).stop == shape.span(1).start == shape.chunk_bytes


@given(count=st.integers(1, 200), most_bytes=st.integers(1, 2**20))
def test_what_can_be_divided_is_not_padded(count: int, most_bytes: int) -> None:
    assert cut(count * most_bytes, most_bytes).padded_bytes == count * most_bytes


def test_tensors_of_usual_shapes_are_not_padded() -> None:
    shapes = [(4096, 11008), (50257, 768), (32000, 4096), (1024, 1024), (12, 64, 257), (128256, 4096)]
    for elements in shapes:
        nbytes = 2
        for length in elements:
            nbytes *= length
        shape = cut(nbytes, 4 * MIB)
        assert shape.padded_bytes == nbytes
        assert shape.chunk_bytes > MIB or shape.chunks == 1


def test_a_document_says_how_the_slot_is_cut() -> None:
    document = json.loads(json.dumps(array_document(cut(4000, 1000), [{"name": "zstd"}])))
    assert document["shape"] == [4000]
    assert document["chunk_grid"]["configuration"]["chunk_shape"] == [1000]
    assert document["codecs"] == [{"name": "bytes"}, {"name": "zstd"}]
    assert chunk_key("group/7", 3) == "group/7/c/3"
