"""The pinned pool against a dict: slots keep their bytes and the books are the hardware's."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tierstore.errors import CapacityError
from tierstore.spi import AddressableSlot, Slot
from tierstore.units import align_up
from tierstore_backends.pinned import GRANULE_BYTES, PAGED_FROM_BYTES, PinnedPool

_CAPACITY_BYTES = 2 * 1024**2
_BLOCK_BYTES = 256 * 1024


class PoolMachine(RuleBasedStateMachine):
    """Reserve, free, hand out and resize; every slot is filled with its own number."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PinnedPool(_CAPACITY_BYTES, block_bytes=_BLOCK_BYTES)
        self.capacity_bytes = _CAPACITY_BYTES
        self.held: dict[int, Slot] = {}
        self.number = 0

    slots = Bundle("slots")

    @property
    def held_bytes(self) -> int:
        return sum(align_up(slot.nbytes, GRANULE_BYTES) for slot in self.held.values())

    @rule(target=slots, nbytes=st.one_of(st.integers(0, 3_000), st.integers(0, 600_000)))
    def reserve(self, nbytes: int) -> object:
        needed_bytes = align_up(nbytes, GRANULE_BYTES)
        try:
            slot = self.pool.reserve(nbytes)
        except CapacityError:
            # For want of bytes, or because what is free is in pieces: an empty pool has one piece.
            assert needed_bytes > self.capacity_bytes - self.held_bytes or len(self.held) > 0
            return multiple()
        assert isinstance(slot, AddressableSlot)
        if nbytes >= PAGED_FROM_BYTES:
            assert slot.memory.data_ptr() % 4096 == 0
        self.number += 1
        slot.memory.fill_(self.number % 251)
        self.held[self.number] = slot
        return self.number

    @rule(number=consumes(slots))
    def free(self, number: int) -> None:
        assert self.pool.free(self.held.pop(number)).error is None

    @rule(nbytes=st.integers(_BLOCK_BYTES // 8, _BLOCK_BYTES))
    def hand_out(self, nbytes: int) -> None:
        """Let as much as the pool can hold go through one slot: blocks that it does not need give back."""
        for _ in range(_CAPACITY_BYTES // nbytes):
            try:
                slot = self.pool.reserve(nbytes)
            except CapacityError:
                return
            assert isinstance(slot, AddressableSlot)
            slot.memory.fill_(255)
            assert self.pool.free(slot).error is None

    @rule(share=st.floats(0, 1))
    def resize(self, share: float) -> None:
        self.capacity_bytes = max(int(_CAPACITY_BYTES * share), self.held_bytes)
        self.pool.resize(self.capacity_bytes)

    @invariant()
    def every_slot_has_its_own_bytes(self) -> None:
        for number, slot in self.held.items():
            assert isinstance(slot, AddressableSlot)
            assert bool((slot.memory == number % 251).all())

    @invariant()
    def the_pool_counts_what_is_held(self) -> None:
        assert self.pool.used_bytes == self.held_bytes <= self.capacity_bytes

    @invariant()
    def what_is_used_is_reserved_and_what_is_reserved_is_mapped(self) -> None:
        assert self.pool.used_bytes <= self.pool.reserved_bytes <= self.pool.mapped_bytes

    @invariant()
    def the_blocks_fit_in_the_largest_capacity_but_for_what_is_extra(self) -> None:
        extra_bytes = sum(block.nbytes for block in self.pool._extra.values())
        assert self.pool.mapped_bytes - extra_bytes <= _CAPACITY_BYTES
        assert extra_bytes <= align_up(self.capacity_bytes, 4096)

    @invariant()
    def an_empty_pool_fits_its_capacity(self) -> None:
        if not self.held:
            assert self.pool.mapped_bytes <= self.capacity_bytes

    def teardown(self) -> None:
        for slot in self.held.values():
            assert self.pool.free(slot).error is None
        assert self.pool.used_bytes == 0
        assert self.pool.mapped_bytes <= self.capacity_bytes
        # Everything merged again: the whole capacity is one slot.
        self.pool.reserve(self.capacity_bytes // GRANULE_BYTES * GRANULE_BYTES)
        self.pool.close()
        assert self.pool.mapped_bytes == 0


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=40)
