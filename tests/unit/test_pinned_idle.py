"""What the pinned pool keeps in memory: counted in huge pages, and given back once it is idle."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from tierstore.errors import CapacityError
from tierstore.spi import AddressableSlot, Slot
from tierstore.units import KIB, MIB
from tierstore_backends.pinned import PinnedPool
from tierstore_backends.pinned.pages import HUGE_PAGE_BYTES


class Anything:
    """A registrar that locks whatever it is given."""

    def register(self, address: int, nbytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass


def _memory(slot: Slot) -> torch.Tensor:
    assert isinstance(slot, AddressableSlot)
    return slot.memory


def _resident_bytes(memory: torch.Tensor) -> int:
    """Ask the kernel how many bytes of a tensor that begins on a page are in memory."""
    flags = (ctypes.c_ubyte * -(-memory.numel() // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), flags) == 0
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


def _kernel_bytes(pool: PinnedPool) -> int:
    """Ask the kernel how many bytes of all blocks are in memory."""
    blocks = pool._blocks.values()
    return sum(_resident_bytes(torch.frombuffer(block._map, dtype=torch.uint8)) for block in blocks)


def _hand_out(pool: PinnedPool, nbytes: int, times: int) -> None:
    """Reserve and free one slot after the other: the best fit is always the same range."""
    for _ in range(times):
        assert pool.free(pool.reserve(nbytes)).error is None


def test_the_first_byte_reserves_all_that_the_kernel_brings_for_it() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=64 * MIB)
    _memory(pool.reserve(1)).fill_(1)
    assert _kernel_bytes(pool) <= pool.reserved_bytes


def test_memory_that_slots_can_do_without_goes_back() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=64 * MIB)
    kept, burst = pool.reserve(16 * MIB), pool.reserve(40 * MIB)
    _memory(kept).fill_(7)
    was = _memory(burst)
    was.fill_(7)
    pool.free(burst)
    assert pool.reserved_bytes >= 56 * MIB
    _hand_out(pool, 8 * MIB, 2 * 56 // 8)
    assert pool.reserved_bytes <= 24 * MIB + 2 * HUGE_PAGE_BYTES
    assert _resident_bytes(was) <= 8 * MIB + 2 * HUGE_PAGE_BYTES
    assert bool((_memory(kept) == 7).all())


def test_memory_that_went_back_is_used_again() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=64 * MIB)
    pool.free(pool.reserve(64 * MIB))
    _hand_out(pool, 8 * MIB, 2 * 64 // 8)
    before = pool.reserved_bytes
    slot = pool.reserve(60 * MIB)
    _memory(slot).fill_(7)
    assert pool.reserved_bytes >= before + 40 * MIB
    _hand_out(pool, MIB, 200)
    assert _resident_bytes(_memory(slot)) == 60 * MIB
    assert bool((_memory(slot) == 7).all())


@pytest.mark.parametrize("times", range(7))
def test_what_was_in_use_until_now_is_not_idle(times: int) -> None:
    """Wherever in a turn it is freed: at least as much as the pool keeps is handed out before it goes."""
    pool = PinnedPool(64 * MIB, block_bytes=64 * MIB)
    held, _ = pool.reserve(40 * MIB), pool.reserve(8 * MIB)
    was = _memory(held)
    was.fill_(7)
    _hand_out(pool, 8 * MIB, 7 + times)  # 56 MiB are in memory: a turn is seven times
    pool.free(held)
    _hand_out(pool, 8 * MIB, 7)
    assert _resident_bytes(was) == 40 * MIB
    _hand_out(pool, 8 * MIB, 9)
    assert _resident_bytes(was) <= HUGE_PAGE_BYTES  # where a page reaches into the slot behind it


def test_slots_that_use_all_memory_in_turn_give_nothing_back() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=64 * MIB)
    pool.free(pool.reserve(64 * MIB))
    for _ in range(20):
        slots: list[Slot] = []
        for _ in range(4):
            slots.append(pool.reserve(16 * MIB))
            assert pool.reserved_bytes == 64 * MIB
        for slot in slots:
            pool.free(slot)


def test_what_is_idle_in_one_block_may_be_in_use_in_another() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=32 * MIB)
    kept, burst = pool.reserve(32 * MIB), pool.reserve(32 * MIB)
    _memory(kept).fill_(7)
    pool.free(burst)
    _hand_out(pool, 8 * MIB, 40)
    assert pool.reserved_bytes < 64 * MIB
    assert bool((_memory(kept) == 7).all())


def test_a_short_idle_stretch_of_a_long_free_range_is_kept() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=64 * MIB)
    pool.reserve(48 * MIB)
    pool.free(pool.reserve(14 * MIB))
    before = pool.reserved_bytes
    _hand_out(pool, 8 * MIB, 40)
    assert pool.reserved_bytes == before


def test_a_block_that_ends_inside_a_page_gives_that_page_back_too() -> None:
    pool = PinnedPool(16 * MIB + 512)
    kept, rest = pool.reserve(4096), pool.reserve(16 * MIB + 512 - 4096)
    for slot in (kept, rest):
        _memory(slot).fill_(7)
    pool.free(rest)
    pool.resize(4096)
    assert _kernel_bytes(pool) == 4096
    assert bool((_memory(kept) == 7).all())


def test_small_neighbours_freed_after_shrinking_give_back_the_pages_between_them() -> None:
    pool = PinnedPool(4 * MIB, block_bytes=4 * MIB)
    kept, *small = [pool.reserve(1024) for _ in range(4096)]
    for slot in (kept, *small):
        _memory(slot).fill_(7)
    pool.resize(4 * MIB - 1024)
    for slot in small:
        pool.free(slot)
    assert _kernel_bytes(pool) == 4096
    assert bool((_memory(kept) == 7).all())


def test_holes_between_slots_are_kept() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=64 * MIB)
    slots = [pool.reserve(7 * MIB) for _ in range(9)]
    for slot in slots[1::2]:
        pool.free(slot)
    before = pool.reserved_bytes
    _hand_out(pool, MIB, 300)
    assert pool.reserved_bytes == before


@pytest.mark.parametrize("block_bytes", [MIB, 16 * MIB])
def test_every_block_gives_back_what_is_idle(block_bytes: int) -> None:
    pool = PinnedPool(8 * block_bytes, block_bytes=block_bytes)
    for slot in [pool.reserve(block_bytes) for _ in range(8)]:
        _memory(slot).fill_(7)
        pool.free(slot)
    assert pool.reserved_bytes == 8 * block_bytes
    _hand_out(pool, block_bytes, 40)
    assert (pool.reserved_bytes, pool.mapped_bytes) == (block_bytes, 8 * block_bytes)
    assert _kernel_bytes(pool) == block_bytes


def test_page_locked_memory_does_not_go_back_however_idle() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=64 * MIB, registrar=Anything())
    burst = pool.reserve(64 * MIB)
    was = _memory(burst)
    was.fill_(7)
    pool.free(burst)
    _hand_out(pool, 8 * MIB, 40)
    assert _kernel_bytes(pool) == pool.reserved_bytes == 64 * MIB
    assert bool((was == 7).all())


def test_memory_that_the_system_does_not_take_back_stays_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    class Locked(mmap.mmap):
        """What mlockall makes of a mapping."""

        def madvise(self, option: int, *_: int) -> None:
            if option == mmap.MADV_DONTNEED:
                raise OSError(22, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", Locked)
        pool = PinnedPool(64 * MIB, block_bytes=64 * MIB)
        pool.free(pool.reserve(64 * MIB))
    _hand_out(pool, 8 * MIB, 40)
    assert pool.reserved_bytes == 64 * MIB
    assert pool.used_bytes == 0


def test_thirteen_short_slots_all_over_the_pool_leave_room_for_a_long_one() -> None:
    pool = PinnedPool(112 * KIB)
    slots = [pool.reserve(512) for _ in range(224)]
    held = slots[::17][:13]
    for slot in slots:
        _memory(slot).fill_(1)
    for slot in slots:
        if slot not in held:
            pool.free(slot)
    long = pool.reserve(37 * 512)
    memories = [*map(_memory, held), _memory(long).fill_(2)]
    assert pool.used_bytes == 25 * KIB
    assert pool.reserved_bytes <= 112 * KIB
    assert all(bool((memory == 1).all()) for memory in memories[:-1])
    pool.reserve(512)
    pool.free(long)
    assert pool.mapped_bytes == 112 * KIB


def test_a_slot_that_there_is_no_memory_for_adds_no_block() -> None:
    pool = PinnedPool(64 * KIB, block_bytes=16 * KIB)
    slots = [pool.reserve(512) for _ in range(96)]  # three blocks
    for index, slot in enumerate(slots):
        _memory(slot).fill_(1)
        if index % 8 or index == 88:
            pool.free(slot)  # all but the first of each page, and the last page of all
    pool.reserve(33 * 512)  # beyond what is not in blocks: all pages are in use now
    assert pool.reserved_bytes == 64 * KIB
    with pytest.raises(CapacityError, match="above its capacity"):
        pool.reserve(8 * KIB)
    assert pool.mapped_bytes == (48 + 20) * KIB
