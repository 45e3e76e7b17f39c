"""The pinned pool: where slots lie, when blocks come and go, what is page-locked."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from pathlib import Path

import pytest
import torch

from tierstore.errors import BackendError, CapacityError, ConfigError
from tierstore.spi import AddressableSlot, Slot
from tierstore.units import GIB, KIB, MIB
from tierstore_backends.pinned import PinnedPool, open_backend, registrars
from tierstore_backends.pinned.blocks import Block
from tierstore_backends.pinned.pages import HUGE_PAGE_BYTES
from tierstore_backends.pinned.registrars import CudaRegistrar


class Ledger:
    """A registrar that writes down what it is asked, and refuses from a given call on."""

    def __init__(self, *, refuses_from: int | None = None) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.refuses_from = refuses_from
        self.is_stuck = False

    def register(self, address: int, nbytes: int) -> None:
        self.calls += 1
        if self.refuses_from is not None and self.calls >= self.refuses_from:
            raise BackendError("no more pinned memory")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        if self.is_stuck:
            raise BackendError("in use")
        assert ctypes.c_char.from_address(address).value is not None  # still mapped, or this crashes
        del self.registered[address]


def _memory(slot: Slot) -> torch.Tensor:
    assert isinstance(slot, AddressableSlot)
    return slot.memory


def _resident_bytes(memory: torch.Tensor) -> int:
    """Ask the kernel how many bytes of a tensor's pages are in memory."""
    first = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(memory.data_ptr() + memory.numel() - first) // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), flags) == 0
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


def test_nothing_is_mapped_before_it_is_needed() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=MIB)
    assert pool.mapped_bytes == 0
    pool.reserve(0)
    assert pool.mapped_bytes == 0


def test_a_block_serves_many_slots() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=MIB)
    for _ in range(16):
        pool.reserve(64 * KIB)
    assert pool.mapped_bytes == MIB
    pool.reserve(1)
    assert pool.mapped_bytes == 2 * MIB


def test_a_slot_larger_than_a_block_gets_a_block_of_its_size() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=MIB)
    pool.reserve(5 * MIB + 512)
    assert pool.mapped_bytes == 5 * MIB + 4 * KIB  # in whole pages


def test_the_last_block_is_what_the_capacity_still_allows() -> None:
    pool = PinnedPool(MIB + 300 * KIB, block_bytes=MIB)
    pool.reserve(MIB)
    pool.reserve(100)
    assert pool.mapped_bytes == MIB + 300 * KIB


def test_slots_take_their_exact_size_and_not_a_power_of_two() -> None:
    pool = PinnedPool(10 * 600 * KIB, block_bytes=GIB)
    for _ in range(10):
        pool.reserve(600 * KIB)
    assert pool.mapped_bytes == pool.used_bytes == 10 * 600 * KIB


def test_large_slots_begin_on_a_page_and_small_ones_on_a_sector() -> None:
    pool = PinnedPool(8 * MIB, block_bytes=8 * MIB)
    for _ in range(20):
        assert _memory(pool.reserve(513)).data_ptr() % 512 == 0
        assert _memory(pool.reserve(64 * KIB + 1)).data_ptr() % 4096 == 0


def test_a_freed_range_is_used_before_a_longer_one() -> None:
    pool = PinnedPool(MIB, block_bytes=MIB)
    slots = [pool.reserve(4 * KIB) for _ in range(4)]
    address = _memory(slots[1]).data_ptr()
    pool.free(slots[1])
    assert _memory(pool.reserve(4 * KIB)).data_ptr() == address


def test_neighbours_merge_when_they_are_freed() -> None:
    pool = PinnedPool(MIB, block_bytes=MIB)
    slots = [pool.reserve(256 * KIB) for _ in range(4)]
    for index in (1, 3, 2, 0):
        pool.free(slots[index])
    assert pool.reserve(MIB).nbytes == MIB


def test_free_bytes_in_pieces_are_refused_with_the_longest_piece() -> None:
    pool = PinnedPool(512 * KIB, block_bytes=512 * KIB, registrar=Ledger())
    slots = [pool.reserve(128 * KIB) for _ in range(4)]
    pool.free(slots[0])
    pool.free(slots[2])
    with pytest.raises(CapacityError, match=r"256\.0 KiB are free in pieces of 128\.0 KiB") as refusal:
        pool.reserve(256 * KIB)
    assert (refusal.value.needed_bytes, refusal.value.free_bytes) == (256 * KIB, 256 * KIB)
    pool.reserve(128 * KIB)


def test_free_bytes_in_pieces_serve_a_long_slot_if_their_pages_go_back() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=64 * MIB)
    slots = [pool.reserve(8 * MIB) for _ in range(8)]
    memories = [_memory(slot).fill_(1) for slot in slots]
    for slot in slots[::2]:
        pool.free(slot)
    long = pool.reserve(24 * MIB)
    memories.append(_memory(long).fill_(2))
    assert pool.used_bytes == 56 * MIB
    assert sum(map(_resident_bytes, memories)) <= pool.reserved_bytes <= 64 * MIB
    pool.free(long)
    assert pool.mapped_bytes == 64 * MIB


def test_pieces_of_page_locked_memory_are_refused_to_a_long_slot() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=64 * MIB, registrar=Ledger())
    slots = [pool.reserve(8 * MIB) for _ in range(8)]
    for slot in slots[::2]:
        pool.free(slot)
    with pytest.raises(CapacityError, match=r"in pieces of 8\.0 MiB"):
        pool.reserve(16 * MIB)


def test_memory_that_went_back_and_was_used_again_goes_back_again() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=64 * MIB)
    slots = [pool.reserve(8 * MIB) for _ in range(8)]
    memories = [_memory(slot).fill_(1) for slot in slots]
    for _ in range(2):
        for slot in slots[::2]:
            pool.free(slot)
        long = pool.reserve(24 * MIB)
        assert (
            sum(map(_resident_bytes, [*memories, _memory(long).fill_(2)])) <= pool.reserved_bytes <= 64 * MIB
        )
        pool.free(long)
        slots[::2] = [pool.reserve(8 * MIB) for _ in range(4)]
        for slot in slots[::2]:
            _memory(slot).fill_(1)


def _with_extra_block() -> tuple[PinnedPool, Slot, list[Slot]]:
    """A pool of 64 MiB: four slots of 8 MiB with as long holes between, and one of 24 MiB beyond."""
    pool = PinnedPool(64 * MIB, block_bytes=64 * MIB)
    slots = [pool.reserve(8 * MIB) for _ in range(8)]
    for slot in slots:
        _memory(slot).fill_(1)
    for slot in slots[::2]:
        pool.free(slot)
    long = pool.reserve(24 * MIB)
    _memory(long).fill_(2)
    return pool, long, slots[1::2]


def test_pages_go_back_when_the_capacity_is_lowered_below_what_is_in_use_beside_an_extra_block() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=48 * MIB)
    slots = [pool.reserve(8 * MIB) for _ in range(6)]
    memories = [_memory(slot).fill_(1) for slot in slots]
    for slot in slots[::2]:
        pool.free(slot)
    memories.append(_memory(pool.reserve(20 * MIB)).fill_(2))
    pool.resize(48 * MIB)  # what is no extra block fits, but not all of it
    assert sum(map(_resident_bytes, memories)) <= pool.reserved_bytes <= 48 * MIB


def test_a_block_within_a_larger_capacity_is_not_extra_when_that_is_lowered_again() -> None:
    pool, long, slots = _with_extra_block()
    pool.resize(128 * MIB)
    filled = [pool.reserve(8 * MIB) for _ in range(4)]
    memories = [_memory(slot).fill_(1) for slot in (*slots, *filled, long)]
    for slot in filled:
        pool.free(slot)
    pool.resize(64 * MIB)
    assert sum(map(_resident_bytes, memories)) <= pool.reserved_bytes <= 64 * MIB


def test_what_was_used_between_two_splits_of_a_piece_counts_as_in_use() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=64 * MIB)
    slots = [pool.reserve(n * MIB) for n in (5, 7, 5, 14, 5, 14, 5, 9)]
    memories = [_memory(slot).fill_(1) for slot in slots]
    for slot in slots[1:6:2]:
        pool.free(slot)
    pool.free(pool.reserve(20 * MIB))  # the pages of the 7 MiB and of 14 MiB went back for it
    pool.free(slots[0])
    longer = pool.reserve(6 * MIB)  # a part of the 7 MiB is used ...
    _memory(longer).fill_(1)
    pool.free(longer)
    pool.reserve(5 * MIB)  # ... and what is left is 7 MiB again
    assert sum(map(_resident_bytes, memories)) <= pool.reserved_bytes


def test_pieces_within_a_huge_page_serve_a_long_slot_where_longer_ones_do_not_suffice() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=64 * MIB)
    slots = [pool.reserve(MIB) for _ in range(64)]
    memories = [_memory(slot).fill_(1) for slot in slots]
    for slot in slots[::2]:
        pool.free(slot)
    memories.append(_memory(pool.reserve(30 * MIB)).fill_(2))
    assert sum(map(_resident_bytes, memories)) <= pool.reserved_bytes <= 64 * MIB


def test_what_is_free_of_pages_in_use_serves_no_long_slot() -> None:
    pool = PinnedPool(3200 * KIB, block_bytes=3200 * KIB)
    first, _, second = [pool.reserve(nbytes * KIB) for nbytes in (512, 128, 512)]
    short = [pool.reserve(2 * KIB) for _ in range(1024)]
    pool.free(first)
    pool.free(second)
    pool.reserve(MIB)  # the pages of both went back for it
    for slot in short[::2]:
        pool.free(slot)  # half a page each
    with pytest.raises(CapacityError, match=r"^512\.0 KiB more, .* above its capacity: 2\.0 MiB are free"):
        pool.reserve(512 * KIB)
    pool.reserve(2 * KIB)


def test_empty_blocks_make_room_for_a_larger_one() -> None:
    pool = PinnedPool(4 * MIB, block_bytes=MIB)
    slots = [pool.reserve(MIB) for _ in range(4)]
    for slot in slots:
        pool.free(slot)
    assert pool.mapped_bytes == 4 * MIB
    pool.reserve(3 * MIB)
    assert pool.mapped_bytes <= 4 * MIB


def test_empty_blocks_are_kept_while_they_are_not_in_the_way() -> None:
    pool = PinnedPool(4 * MIB, block_bytes=MIB)
    slot = pool.reserve(MIB)
    address = _memory(slot).data_ptr()
    pool.free(slot)
    assert pool.mapped_bytes == MIB
    assert _memory(pool.reserve(MIB)).data_ptr() == address


def test_reserved_bytes_do_not_grow_in_a_steady_state() -> None:
    pool = PinnedPool(128 * MIB, block_bytes=128 * MIB)
    sizes = [30 * MIB, 5 * KIB, 70 * MIB, 64 * KIB]
    slots = [pool.reserve(size) for size in sizes]
    before = pool.reserved_bytes
    for turn in range(1000):
        index = turn * 7 % 4
        pool.free(slots[index])
        slots[index] = pool.reserve(sizes[index])
    assert pool.reserved_bytes == before
    assert before <= 1.05 * pool.used_bytes


def test_pageable_memory_is_reserved_in_huge_pages_as_far_as_it_was_touched() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=64 * MIB)
    first, second = pool.reserve(MIB), pool.reserve(6 * MIB)
    touched_bytes = pool.reserved_bytes
    assert pool.mapped_bytes == 64 * MIB
    assert 7 * MIB < touched_bytes < 7 * MIB + 2 * HUGE_PAGE_BYTES
    pool.free(second)
    assert pool.reserved_bytes == touched_bytes
    pool.resize(MIB)
    assert pool.mapped_bytes == 64 * MIB
    assert MIB <= pool.reserved_bytes <= 2 * HUGE_PAGE_BYTES
    pool.free(first)
    assert (pool.mapped_bytes, pool.reserved_bytes) == (0, 0)


def test_page_locked_memory_is_reserved_as_a_whole() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=8 * MIB, registrar=Ledger())
    pool.reserve(1)
    assert pool.reserved_bytes == 8 * MIB


def test_shrinking_gives_back_empty_blocks() -> None:
    pool = PinnedPool(4 * MIB, block_bytes=MIB)
    slots = [pool.reserve(MIB) for _ in range(4)]
    for slot in slots[1:]:
        pool.free(slot)
    pool.resize(2 * MIB)
    assert pool.mapped_bytes == 2 * MIB


def test_shrinking_gives_back_the_free_pages_of_a_block_in_use() -> None:
    pool = PinnedPool(8 * MIB, block_bytes=8 * MIB)
    kept, freed = pool.reserve(MIB), pool.reserve(6 * MIB)
    _memory(kept).fill_(7)
    was = _memory(freed)
    was.fill_(7)
    assert _resident_bytes(was) == 6 * MIB
    pool.free(freed)
    assert _resident_bytes(was) == 6 * MIB
    pool.resize(MIB)
    assert _resident_bytes(was) == 0
    assert bool((_memory(kept) == 7).all())


def test_pages_freed_after_shrinking_are_given_back_at_once() -> None:
    pool = PinnedPool(8 * MIB, block_bytes=8 * MIB)
    first, second = pool.reserve(2 * MIB), pool.reserve(2 * MIB)
    was = _memory(second)
    was.fill_(7)
    pool.resize(4 * MIB)
    pool.free(second)
    assert _resident_bytes(was) == 0
    assert pool.mapped_bytes == 8 * MIB
    pool.free(first)
    assert pool.mapped_bytes == 0


def test_a_tensor_that_outlives_the_pool_keeps_its_memory() -> None:
    pool = PinnedPool(MIB, block_bytes=MIB)
    memory = _memory(pool.reserve(1000))
    memory.fill_(3)
    pool.close()
    assert pool.mapped_bytes == 0
    assert int(memory.sum()) == 3000


def test_blocks_are_registered_once_and_unregistered_before_they_are_unmapped() -> None:
    ledger = Ledger()
    pool = PinnedPool(4 * MIB, block_bytes=MIB, registrar=ledger)
    slots = [pool.reserve(256 * KIB) for _ in range(8)]
    assert sorted(ledger.registered.values()) == [MIB, MIB]
    assert ledger.calls == 2
    assert pool.pinned_bytes == 2 * MIB
    assert _memory(slots[0]).data_ptr() in ledger.registered
    for slot in slots:
        pool.free(slot)
    pool.close()
    assert ledger.registered == {}


def test_pinned_pages_stay_until_their_block_is_empty() -> None:
    pool = PinnedPool(8 * MIB, block_bytes=8 * MIB, registrar=Ledger())
    kept, freed = pool.reserve(MIB), pool.reserve(6 * MIB)
    was = _memory(freed)
    was.fill_(7)
    pool.free(freed)
    pool.resize(MIB)
    assert _resident_bytes(was) == 6 * MIB
    assert bool((was == 7).all())
    pool.free(kept)
    assert pool.pinned_bytes == 0


def test_refused_registration_falls_back_to_pageable_memory(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(refuses_from=2)
    pool = PinnedPool(4 * MIB, block_bytes=MIB, registrar=ledger)
    with caplog.at_level(logging.WARNING, logger="tierstore"):
        slots = [pool.reserve(MIB) for _ in range(4)]
    assert len(slots) == 4
    assert (pool.pinned_bytes, pool.mapped_bytes) == (MIB, 4 * MIB)
    assert ledger.calls == 2  # the system is not asked again
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        "a host block of 1.0 MiB cannot be pinned (no more pinned memory): it and all later ones are "
        "pageable, and copies to the device slower. Lower the host quota or host_mem_block_size, or set "
        "enable_pinned_mem to False."
    )


def test_a_block_that_cannot_be_unlocked_is_an_error_and_the_books_still_hold() -> None:
    ledger = Ledger()
    pool = PinnedPool(MIB, block_bytes=MIB, registrar=ledger)
    slot = pool.reserve(MIB)
    pool.resize(0)
    ledger.is_stuck = True
    assert isinstance(pool.free(slot).error, BackendError)
    assert pool.used_bytes == 0


def test_a_system_without_memory_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> Block:
        raise OSError(12, "Cannot allocate memory")

    pool = PinnedPool(MIB, block_bytes=MIB)
    with monkeypatch.context() as patch:
        patch.setattr("tierstore_backends.pinned.Block", refuse)
        with pytest.raises(CapacityError, match="no host memory for a block of 1") as refusal:
            pool.reserve(1000)
    assert isinstance(refusal.value.__cause__, OSError)
    assert pool.used_bytes == 0
    assert pool.reserve(1000).nbytes == 1000


def test_threads_that_grow_the_pool_make_no_block_too_many() -> None:
    pool = PinnedPool(64 * MIB, block_bytes=MIB)
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(8):
            pool.reserve(128 * KIB)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.mapped_bytes == pool.used_bytes == 8 * MIB


def test_who_waited_for_a_block_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noting:
        """A lock that says that somebody wants it."""

        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.wanted = [threading.Event(), threading.Event()]

        def __enter__(self) -> None:
            next(event for event in self.wanted if not event.is_set()).set()
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    pool, growing = PinnedPool(4 * MIB, block_bytes=MIB), Noting()
    monkeypatch.setattr(pool, "_growing", growing)
    growing.lock.acquire()
    threads = [threading.Thread(target=pool.reserve, args=(1000,)) for _ in range(2)]
    for thread, wanted in zip(threads, growing.wanted, strict=True):
        thread.start()
        assert wanted.wait(30)
    growing.lock.release()
    for thread in threads:
        thread.join()
    assert pool.mapped_bytes == MIB


def test_slots_are_freed_while_a_block_is_being_locked() -> None:
    """Page-locking takes long: nobody but those who need the new block waits for it."""
    is_locking, may_go_on = threading.Event(), threading.Event()

    class SlowRegistrar(Ledger):
        def register(self, address: int, nbytes: int) -> None:
            super().register(address, nbytes)
            if self.calls == 2:
                is_locking.set()
                may_go_on.wait(30)

    pool = PinnedPool(4 * MIB, block_bytes=MIB, registrar=SlowRegistrar())
    slot = pool.reserve(MIB)
    thread = threading.Thread(target=pool.reserve, args=(MIB,))
    thread.start()
    assert is_locking.wait(30)
    assert pool.free(slot).is_done
    pool.reserve(MIB)
    may_go_on.set()
    thread.join()


def test_a_slot_costs_microseconds_with_thousands_held() -> None:
    pool = PinnedPool(GIB, block_bytes=64 * MIB)
    slots = [pool.reserve(1 + index * 37 % 60_000) for index in range(4000)]
    for slot in slots[::3]:
        pool.free(slot)
    began_s = time.thread_time()
    for slot in [pool.reserve(1 + index * 41 % 60_000) for index in range(1000)]:
        pool.free(slot)
    assert (time.thread_time() - began_s) / 2000 < 200e-6  # some 10 us; the bound is for a busy machine


def test_a_freed_slot_cannot_be_used() -> None:
    pool = PinnedPool(MIB, block_bytes=MIB)
    slot = pool.reserve(1000)
    pool.free(slot)
    assert isinstance(pool.free(slot).error, BackendError)
    assert isinstance(pool.write(slot, torch.zeros(1000, dtype=torch.uint8)).error, BackendError)
    with pytest.raises(BackendError, match="after it was freed"):
        _memory(slot)
    assert pool.used_bytes == 0


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="Accepted: enable_pinned_mem, host_mem_block_size"):
        open_backend(capacity_bytes=1, options={"block": 1})
    for bad in ({"host_mem_block_size": 0}, {"host_mem_block_size": "big"}, {"enable_pinned_mem": "yes"}):
        with pytest.raises(ConfigError, match="Accepted: "):
            open_backend(capacity_bytes=1, options=bad)


def test_the_block_size_may_be_text() -> None:
    pool = open_backend(capacity_bytes=8 * MIB, options={"host_mem_block_size": "2MB"})
    pool.reserve(1)
    assert pool.mapped_bytes == 2 * MIB
    pool.close()


def test_nothing_is_locked_where_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    pool = open_backend(capacity_bytes=MIB, options={})
    pool.reserve(1)
    assert pool.pinned_bytes == 0


def _pretend_accelerator(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(device_type))


def test_the_registrar_is_the_current_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrars, "_makers", dict(registrars._makers))
    registrars.add_registrar("xpu", Ledger)
    _pretend_accelerator(monkeypatch, "xpu")
    pool = open_backend(capacity_bytes=MIB, options={})
    pool.reserve(1)
    assert pool.pinned_bytes == MIB
    pool.close()
    _pretend_accelerator(monkeypatch, "cuda")
    assert isinstance(registrars.find_registrar(), CudaRegistrar)


def test_an_accelerator_without_a_registrar_has_pageable_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_accelerator(monkeypatch, "mtia")
    pool = open_backend(capacity_bytes=MIB, options={})
    pool.reserve(1)
    assert pool.pinned_bytes == 0


class _Runtime:
    """What torch's binding of the CUDA runtime looks like from here."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def cudaHostRegister(self, *arguments: int) -> int:  # noqa: N802 - CUDA's name
        self.asked.append(("register", arguments))
        return self.code

    def cudaHostUnregister(self, *arguments: int) -> int:  # noqa: N802 - CUDA's name
        self.asked.append(("unregister", arguments))
        return self.code


def test_cuda_is_asked_for_memory_that_every_device_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = _Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    registrar = CudaRegistrar()
    registrar.register(4096, 8192)
    registrar.unregister(4096)
    assert runtime.asked == [("register", (4096, 8192, 1)), ("unregister", (4096,))]


def test_a_cuda_error_is_raised_and_not_left_for_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def launch(_count: int, *, device: str) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: _Runtime(2))
    monkeypatch.setattr(torch, "zeros", launch)
    with pytest.raises(BackendError, match="CUDA error 2"):
        CudaRegistrar().register(4096, 8192)
    with pytest.raises(BackendError, match="CUDA error 2"):
        CudaRegistrar().unregister(4096)
    assert launched == ["cuda", "cuda"]


def test_the_pool_names_no_file() -> None:
    """Anonymous memory: nothing is left on a disk after a crash."""
    pool = PinnedPool(MIB, block_bytes=MIB)
    address = _memory(pool.reserve(1000)).data_ptr()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            assert len(line.split()) == 5  # no path
