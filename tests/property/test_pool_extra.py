"""Free bytes in pieces serve a long slot: against the kernel's own count of pages in memory."""

from __future__ import annotations

import ctypes
import mmap
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tierstore.errors import CapacityError
from tierstore.spi import AddressableSlot, Slot
from tierstore.units import KIB, MIB, align_up
from tierstore_backends.pinned import GRANULE_BYTES, PinnedPool

_CAPACITY_BYTES = 24 * MIB


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
        blocks = self.pool._blocks.values()
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


TestExtraMachine = ExtraMachine.TestCase
TestExtraMachine.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
