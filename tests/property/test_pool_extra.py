"""Free bytes in pieces serve a long slot: against the kernel's own count of pages in memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tierstore.errors import CapacityError
from tierstore.spi import AddressableSlot, Slot
from tierstore.units import KIB, MIB, align_up
from tierstore_backends.pinned import GRANULE_BYTES, PinnedPool

_CAPACITY_BYTES = 24 * MIB
_SMALL_BYTES = 256 * KIB


def pages_in_memory(address: int, nbytes: int) -> int:
    """Ask the kernel; an address that is not mapped any more has none."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    flags = ctypes.create_string_buffer(-(-(address + nbytes - first) // mmap.PAGESIZE))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(len(flags) * mmap.PAGESIZE), flags) != 0:
        return 0
    return len(flags) - flags.raw.count(b"\0")


class ExtraMachine(RuleBasedStateMachine):
    """Slots of some MiB; every page of each is written, as a copy would."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PinnedPool(_CAPACITY_BYTES, block_bytes=_CAPACITY_BYTES)
        self.held: dict[int, Slot] = {}
        self.number = 0

    slots = Bundle("slots")

    @property
    def held_bytes(self) -> int:
        return sum(align_up(slot.nbytes, GRANULE_BYTES) for slot in self.held.values())

    @rule(
        target=slots,
        nbytes=st.one_of(st.integers(2 * MIB, 6 * MIB), st.integers(1, 32).map(lambda n: n * 256 * KIB)),
    )
    def reserve(self, nbytes: int) -> object:
        try:
            slot = self.pool.reserve(nbytes)
        except CapacityError:
            return multiple()
        assert isinstance(slot, AddressableSlot)
        self.number += 1
        slot.memory[:: mmap.PAGESIZE] = self.number % 251
        slot.memory[-1] = self.number % 251
        self.held[self.number] = slot
        return self.number

    @rule(number=consumes(slots))
    def free(self, number: int) -> None:
        slot = self.held.pop(number)
        assert isinstance(slot, AddressableSlot)
        assert bool((slot.memory[:: mmap.PAGESIZE] == number % 251).all())
        assert self.pool.free(slot).error is None

    @invariant()
    def the_memory_in_use_is_within_the_capacity(self) -> None:
        blocks = [*self.pool._blocks.values(), *self.pool._extra.values()]
        in_use_bytes = sum(pages_in_memory(block._address, block.nbytes) for block in blocks) * mmap.PAGESIZE
        assert in_use_bytes <= self.pool.reserved_bytes
        assert self.pool.reserved_bytes <= _CAPACITY_BYTES

    @invariant()
    def addresses_are_bounded(self) -> None:
        assert self.pool.mapped_bytes <= 2 * _CAPACITY_BYTES

    def teardown(self) -> None:
        for slot in self.held.values():
            assert self.pool.free(slot).error is None
        assert self.pool.mapped_bytes <= _CAPACITY_BYTES
        self.pool.close()


@pytest.mark.parametrize("seed", range(60))
def test_long_histories_stay_within_the_capacity(seed: int) -> None:
    """What is rare takes longer than what Hypothesis likes to try."""
    chance = random.Random(seed)
    machine = ExtraMachine()
    for _ in range(80):
        if machine.held and chance.random() < 0.45:
            machine.free(chance.choice(list(machine.held)))
        else:
            few, many = chance.randint(2 * MIB, 6 * MIB), chance.randint(1, 32) * 256 * KIB
            machine.reserve(chance.choice((few, many)))
        machine.the_memory_in_use_is_within_the_capacity()
        machine.addresses_are_bounded()
    machine.teardown()


class BoundMachine(RuleBasedStateMachine):
    """Slots from one granule on, none of which may be moved: only whole pages count.

    The bound: a slot is refused only if its pages and those in which slots have a byte exceed the capacity.
    """

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PinnedPool(_SMALL_BYTES)
        self.held: dict[int, tuple[Slot, torch.Tensor, range]] = {}
        self.number = 0

    @initialize(block_bytes=st.sampled_from((mmap.PAGESIZE, 48 * KIB, _SMALL_BYTES)))
    def cut_blocks(self, block_bytes: int) -> None:
        self.pool = PinnedPool(_SMALL_BYTES, block_bytes=block_bytes)

    def _keep(self, slot: Slot) -> int:
        assert isinstance(slot, AddressableSlot)
        self.number += 1
        memory = slot.memory.fill_(self.number % 251)
        first, last = memory.data_ptr(), memory.data_ptr() + slot.nbytes - 1
        self.held[self.number] = slot, memory, range(first // mmap.PAGESIZE, last // mmap.PAGESIZE + 1)
        return self.number

    @rule(
        target=slots,
        nbytes=st.one_of(
            st.integers(1, 8).map(lambda n: n * GRANULE_BYTES),
            st.integers(1, 24 * KIB),
            st.integers(1, 40).map(lambda n: n * mmap.PAGESIZE),
        ),
    )
    def reserve(self, nbytes: int) -> object:
        try:
            slot = self.pool.reserve(nbytes)
        except CapacityError:
            pages = {page for _, _, range_ in self.held.values() for page in range_}
            pages_bytes = len(pages) * mmap.PAGESIZE + align_up(nbytes, mmap.PAGESIZE)
            assert pages_bytes > _SMALL_BYTES
            return multiple()
        return self._keep(slot)

    @rule(number=consumes(slots))
    def free(self, number: int) -> None:
        slot, memory, _ = self.held.pop(number)
        assert bool((memory == number % 251).all())
        assert self.pool.free(slot).error is None

    @rule(target=slots, count=st.integers(1, 200), stride=st.integers(2, 40))
    def scatter(self, count: int, stride: int) -> object:
        """Fill with shortest slots, and keep one of some."""
        short: list[Slot] = []
        with contextlib.suppress(CapacityError):
            for _ in range(count):
                short.append(self.pool.reserve(GRANULE_BYTES))  # noqa: PERF401 - until one is refused
        for index, slot in enumerate(short):
            if index % stride:
                assert self.pool.free(slot).error is None
        return multiple(*(self._keep(slot) for slot in short[::stride]))

    @invariant()
    def the_memory_in_use_is_within_the_capacity(self) -> None:
        blocks = [*self.pool._blocks.values(), *self.pool._extra.values()]
        in_use_bytes = sum(pages_in_memory(block._address, block.nbytes) for block in blocks) * mmap.PAGESIZE
        assert self.pool.used_bytes <= in_use_bytes <= self.pool.reserved_bytes <= _SMALL_BYTES

    @invariant()
    def addresses_are_bounded(self) -> None:
        assert self.pool.mapped_bytes <= 2 * _SMALL_BYTES

    def teardown(self) -> None:
        for number in list(self.held):
            self.free(number)
        assert self.pool.mapped_bytes <= _SMALL_BYTES
        self.pool.reserve(_SMALL_BYTES)
        self.pool.close()


TestBoundMachine = BoundMachine.TestCase
TestBoundMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestExtraMachine = ExtraMachine.TestCase
TestExtraMachine.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
