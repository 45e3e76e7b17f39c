"""Scratch arrays against a dict: any sizes, codecs and cuts, any order, many at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from zarr.storage import MemoryStore

from tests.zarr_stores import (
    MeteredStore,
    chunk_bytes,
    contents,
    objects,
    open_zarr,
    pattern,
    stored,
    succeed,
    zeros,
)
from tierstore.errors import CapacityError
from tierstore.spi import held_bytes
from tierstore.units import KIB
from tierstore_backends.zarr.slots import ZarrSlot

CAPACITY = 96 * KIB
SIZES = st.one_of(st.sampled_from([0, 1, 1023, 1024, 1025, 16 * KIB]), st.integers(0, 40 * KIB))
CODECS = st.sampled_from(["none", "zstd", "lz4", "gzip", ["zstd", "crc32c"]])
KINDS = st.sampled_from(["noise", "zeros", "numbers", "half"])
NUMBERS = st.integers(0, 63)


def bytes_of(kind: str, nbytes: int, seed: int) -> torch.Tensor:
    """Return bytes that codecs make nothing, everything or something of."""
    noise = pattern(nbytes, seed)
    if kind == "zeros":
        return zeros(nbytes)
    if kind == "numbers":
        return noise // 64
    if kind == "half":
        noise[: nbytes // 2] = 0
    return noise


def chosen(slots: Iterable[ZarrSlot], numbers: Sequence[int]) -> list[ZarrSlot]:
    """Return slots by numbers, each at most once."""
    left = list(slots)
    return [left.pop(number % len(left)) for number in numbers[: len(left)]]


class ZarrMachine(RuleBasedStateMachine):
    """Batches of operations under way together; the bytes of each slot are remembered.

    What is drawn does not depend on what has happened: which of several operations that are under way
    together gets the last room is a matter of time, and Hypothesis draws the same again to replay.
    """

    @initialize(
        codec=CODECS,
        checksum=st.booleans(),
        concurrency=st.sampled_from([1, 2, 16]),
        chunk=st.sampled_from([64, 1000, 4 * KIB, 64 * KIB]),
    )
    def open(self, codec: object, checksum: bool, concurrency: int, chunk: int) -> None:
        self.store = MeteredStore()
        self.capacity = CAPACITY
        self.arrays = open_zarr(
            self.store, CAPACITY, codec=codec, checksum=checksum, concurrency=concurrency, chunk_bytes=chunk
        )
        self.slots: dict[ZarrSlot, torch.Tensor | None] = {}
        self.seed = 0

    def teardown(self) -> None:
        if hasattr(self, "arrays"):
            self.everything_is_there()
            self.arrays.close()
            assert objects(self.store) == {}

    @rule(sizes=st.lists(SIZES, min_size=1, max_size=6))
    def reserve(self, sizes: list[int]) -> None:
        for nbytes in sizes:
            held = self.arrays.held_bytes
            try:
                self.slots[self.arrays.reserve(nbytes)] = None
            except CapacityError:
                chunks = nbytes  # padding is less than a byte a chunk, of which there are no more than bytes
                assert held + nbytes + chunks > self.capacity
            else:
                assert held + nbytes <= self.capacity

    @rule(acts=st.lists(st.tuples(NUMBERS, st.booleans(), KINDS), min_size=1, max_size=16))
    def write_and_read(self, acts: list[tuple[int, bool, str]]) -> None:
        """Write some slots and read others at the same time."""
        under_way = []
        expected = []
        slots = chosen(self.slots, [number for number, _, _ in acts])
        for slot, (_, is_read, kind) in zip(slots, acts, strict=False):  # there may be fewer slots
            old = self.slots[slot]
            if old is not None and is_read:
                into = torch.full((slot.nbytes,), 0x5A, dtype=torch.uint8)
                under_way.append((slot, old, self.arrays.read(slot, into)))
                expected.append((old, into))
            else:
                self.seed += 1
                source = bytes_of(kind, slot.nbytes, self.seed)
                under_way.append((slot, source, self.arrays.write(slot, source)))
        for slot, source, completion in under_way:
            try:
                succeed(completion)
            except CapacityError:
                assert slot.nbytes > held_bytes(slot, self.arrays.capabilities), (
                    "only what a codec had gained may be missing"
                )
            else:
                self.slots[slot] = source
        assert all(old.equal(into) for old, into in expected)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=16))
    def free(self, numbers: list[int]) -> None:
        for slot in chosen(self.slots, numbers):
            del self.slots[slot]
            succeed(self.arrays.free(slot))

    @rule(capacity=st.integers(0, 2 * CAPACITY))
    def resize(self, capacity: int) -> None:
        if self.arrays.held_bytes <= capacity:
            self.arrays.resize(capacity)
            self.capacity = capacity
            self.store.peak_bytes = 0

    @rule()
    def everything_is_there(self) -> None:
        for slot, old in self.slots.items():
            if old is not None:
                assert contents(self.arrays, slot).equal(old)

    @invariant()
    def the_store_holds_no_more_than_is_counted_and_never_held_more_than_the_capacity(self) -> None:
        if hasattr(self, "arrays"):
            written = [slot for slot, old in self.slots.items() if old is not None]
            chunks = chunk_bytes(self.store)
            assert chunks <= self.arrays.held_bytes <= self.capacity
            assert self.store.peak_bytes <= self.capacity
            assert all(held_bytes(slot, self.arrays.capabilities) <= slot.nbytes for slot in self.slots)
            assert sum(held_bytes(slot, self.arrays.capabilities) for slot in written) <= chunks


TestZarr = ZarrMachine.TestCase


@given(
    nbytes=st.integers(0, 100 * KIB),
    chunk=st.integers(1, 16 * KIB).filter(lambda size: size > 40),
    codec=CODECS,
    kind=KINDS,
)
def test_any_bytes_come_back_from_any_cut(nbytes: int, chunk: int, codec: object, kind: str) -> None:
    arrays = open_zarr(MemoryStore(), 256 * KIB, chunk_bytes=chunk, codec=codec)
    source = bytes_of(kind, nbytes, seed=1)
    assert contents(arrays, stored(arrays, source)).equal(source)
    arrays.close()
