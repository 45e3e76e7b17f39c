"""Any tensor comes back through a codec as it went, whole and in parts, and is charged what it takes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.codec_bytes import KIB, MIB, Watched, as_bytes, random
from tierstore.codec import Compressed
from tierstore.spi import Buffer, held_bytes
from tierstore.testing.conformance import contents, stored, succeed

DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> Buffer:
    """Draw bytes of tensors as they occur: of any dtype and size, alike, unlike, and partly both."""
    dtype = draw(st.sampled_from(DTYPES))
    count = draw(st.integers(0, 30_000))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["zeros", "gaussian", "tokens", "sparse", "random", "half"]))
    numbers = torch.randn(count, generator=generator)
    match kind:
        case "zeros":
            numbers = torch.zeros(count)
        case "tokens":
            numbers = torch.randint(0, 100, (count,), generator=generator).float()
        case "sparse":
            numbers = numbers * (torch.rand(count, generator=generator) < 0.1)
    whole = as_bytes(numbers.to(dtype)) if count else torch.zeros(0, dtype=torch.uint8)
    if kind == "random":
        whole = random(whole.numel(), draw(st.integers(0, 99)))
    if kind == "half":
        whole[: whole.numel() // 2] = 0
    return whole[draw(st.integers(0, min(7, whole.numel()))) :].clone()


@given(
    sources=st.lists(tensors(), min_size=1, max_size=3),
    chunk_bytes=st.sampled_from([4 * KIB, 20 * KIB, 4 * MIB]),
)
def test_what_goes_in_comes_out(sources: list[Buffer], chunk_bytes: int) -> None:
    inner = Watched(64 * MIB)
    backend = Compressed(inner, "lz4", chunk_bytes=chunk_bytes)
    try:
        slots = [stored(backend, source) for source in sources]
        assert sum(held_bytes(slot, backend.capabilities) for slot in slots) == inner.held_bytes
        assert all(held_bytes(slot, backend.capabilities) <= slot.nbytes for slot in slots)
        for slot, source in zip(slots, sources, strict=True):
            assert torch.equal(contents(backend, slot), source)
        for slot in slots:
            succeed(backend.free(slot))
        assert inner.slots == []
    finally:
        backend.close()
