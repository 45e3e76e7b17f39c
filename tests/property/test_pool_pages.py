"""The huge pages of a block against a dict that says what became of each, and a pool against the kernel."""

from __future__ import annotations

import ctypes
import itertools
import mmap

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tierstore.errors import CapacityError
from tierstore.spi import AddressableSlot, Slot
from tierstore.units import KIB, MIB
from tierstore_backends.pinned import GRANULE_BYTES, PinnedPool
from tierstore_backends.pinned.pages import HUGE_PAGE_BYTES, HugePages

_STEP_BYTES = HUGE_PAGE_BYTES // 4  # fine enough for every way in which a range can cut a page

_Verbs = st.lists(
    st.tuples(st.sampled_from(("use", "forget", "age")), st.integers(0, 40), st.integers(1, 40)), max_size=30
)


class Page:
    """What the model knows of one page: the bytes that the block has of it, and its life."""

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end = first, end
        self.is_resident = self.is_used = False


class Model:
    """The pages of a block, one object each."""

    def __init__(self, nbytes: int, lead_bytes: int) -> None:
        edges = [0, *range(HUGE_PAGE_BYTES - lead_bytes, nbytes, HUGE_PAGE_BYTES), nbytes]
        self.pages = [Page(first, end) for first, end in itertools.pairwise(edges)]

    def use(self, offset: int, nbytes: int) -> None:
        for page in self.pages:
            if page.first < offset + nbytes and offset < page.end:
                page.is_resident = page.is_used = True

    def forget(self, offset: int, nbytes: int) -> None:
        for page in self._inside(offset, nbytes):
            page.is_resident = page.is_used = False

    def age(self) -> None:
        for page in self.pages:
            page.is_used = False

    def idle(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for page in self._inside(offset, nbytes):
            if not page.is_resident or page.is_used:
                continue
            first = runs.pop()[0] if runs and sum(runs[-1]) == page.first else page.first
            runs.append((first, page.end - first))
        return runs

    def _inside(self, offset: int, nbytes: int) -> list[Page]:
        return [page for page in self.pages if offset <= page.first and page.end <= offset + nbytes]


@given(st.integers(1, 40), st.integers(0, 3), st.integers(0, GRANULE_BYTES - 1), _Verbs)
def test_pages_are_used_or_idle_or_absent(
    steps: int, lead_steps: int, odd_bytes: int, verbs: list[tuple[str, int, int]]
) -> None:
    block_bytes, lead_bytes = steps * _STEP_BYTES - odd_bytes, lead_steps * _STEP_BYTES
    pages, model = HugePages(block_bytes, lead_bytes), Model(block_bytes, lead_bytes)
    for verb, first, length in verbs:
        offset = min(first * _STEP_BYTES, block_bytes - 1)
        nbytes = min(length * _STEP_BYTES, block_bytes - offset)
        for each in (pages, model):
            if verb == "age":
                each.age()
            elif verb == "use":
                each.use(offset, nbytes)
            else:
                each.forget(offset, nbytes)
        assert pages.resident_bytes == sum(page.end - page.first for page in model.pages if page.is_resident)
        assert list(pages.idle(offset, nbytes)) == model.idle(offset, nbytes)


def _kernel_bytes(pool: PinnedPool) -> int:
    """Ask the kernel how much of the pool's blocks is in memory."""
    libc, total = ctypes.CDLL(None, use_errno=True), 0
    for block in pool._blocks.values():
        address = torch.frombuffer(block._map, dtype=torch.uint8).data_ptr()
        flags = (ctypes.c_ubyte * -(-block.nbytes // mmap.PAGESIZE))()
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(block.nbytes), flags) == 0
        total += bytes(flag & 1 for flag in flags).count(1) * mmap.PAGESIZE
    return total


class ResidencyMachine(RuleBasedStateMachine):
    """Reserve, hand out, free and resize slots of many huge pages; the ends of each carry its number."""

    capacity_bytes = 80 * MIB

    def __init__(self) -> None:
        super().__init__()
        self.pool = PinnedPool(self.capacity_bytes, block_bytes=31 * MIB)
        self.held: dict[int, Slot] = {}
        self.number = 0

    slots = Bundle("slots")

    @rule(target=slots, nbytes=st.one_of(st.integers(1, 40 * MIB), st.integers(1, 100 * KIB)))
    def reserve(self, nbytes: int) -> object:
        try:
            slot = self.pool.reserve(nbytes)
        except CapacityError:
            return multiple()
        self.number += 1
        self.held[self.number] = slot
        for end in self._ends(slot):
            end.fill_(self.number % 251)
        return self.number

    @rule(number=consumes(slots))
    def free(self, number: int) -> None:
        assert self.pool.free(self.held.pop(number)).error is None

    @rule(nbytes=st.integers(1, 10 * MIB))
    def hand_out(self, nbytes: int) -> None:
        """Let as many bytes go through one slot as the pool can hold: whatever else is free is idle."""
        for _ in range(self.capacity_bytes // nbytes if nbytes > MIB else 80):
            try:
                slot = self.pool.reserve(nbytes)
            except CapacityError:
                return
            for end in self._ends(slot):
                end.fill_(255)
            self.pool.free(slot)

    @rule(share=st.floats(0, 1))
    def resize(self, share: float) -> None:
        self.pool.resize(max(int(self.capacity_bytes * share), self.pool.used_bytes))

    @staticmethod
    def _ends(slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(slot, AddressableSlot)
        return slot.memory[:1000], slot.memory[-1000:]

    @invariant()
    def the_kernel_has_no_more_in_memory_than_the_pool_says(self) -> None:
        # The last page of a block whose length is no multiple of a page counts as far as the block has it.
        assert _kernel_bytes(self.pool) <= self.pool.reserved_bytes + mmap.PAGESIZE * len(self.pool._blocks)

    @invariant()
    def what_is_used_is_reserved_and_what_is_reserved_is_mapped(self) -> None:
        assert self.pool.used_bytes <= self.pool.reserved_bytes <= self.pool.mapped_bytes

    @invariant()
    def every_slot_keeps_its_bytes(self) -> None:
        for number, slot in self.held.items():
            assert all(bool((end == number % 251).all()) for end in self._ends(slot))

    def teardown(self) -> None:
        self.pool.close()


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(max_examples=40, stateful_step_count=30)
