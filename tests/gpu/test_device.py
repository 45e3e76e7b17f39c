"""The device tier and the pinned pool on a real accelerator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.accelerators import NAME, event, keep_busy, stream
from tierstore.errors import BackendError, CapacityError
from tierstore.spi import AddressableSlot, Backend
from tierstore.testing.conformance import BackendConformance, finish, pattern, succeed
from tierstore.units import GIB, MIB
from tierstore_backends.device import StreamDevice, open_backend
from tierstore_backends.pinned import PinnedPool
from tierstore_backends.pinned import open_backend as open_pinned
from tierstore_backends.pinned.registrars import find_registrar

pytestmark = pytest.mark.gpu

_N = 4 * MIB


class TestDeviceMemory(BackendConformance):
    """Device memory."""

    def make(self, capacity_bytes: int) -> Backend:
        return open_backend(capacity_bytes=capacity_bytes, options={"device": NAME})


class TestPinnedMemory(BackendConformance):
    """Page-locked host memory."""

    def make(self, capacity_bytes: int) -> Backend:
        return open_pinned(capacity_bytes=capacity_bytes, options={"host_mem_block_size": "2MB"})


@pytest.fixture
def device() -> Iterator[StreamDevice]:
    backend = open_backend(capacity_bytes=64 * MIB, options={"device": NAME})
    assert isinstance(backend, StreamDevice)
    yield backend
    backend.close()


@pytest.fixture
def pool() -> Iterator[PinnedPool]:
    backend = open_pinned(capacity_bytes=64 * MIB, options={"host_mem_block_size": "64MB"})
    yield backend
    backend.close()


def _slot(backend: Backend, nbytes: int = _N) -> AddressableSlot:
    slot = backend.reserve(nbytes)
    assert isinstance(slot, AddressableSlot)
    return slot


def test_the_pool_is_page_locked(pool: PinnedPool) -> None:
    memory = _slot(pool).memory
    assert pool.pinned_bytes == pool.mapped_bytes == 64 * MIB
    assert memory.is_pinned()


def test_the_pool_is_pageable_when_told_to() -> None:
    pool = open_pinned(capacity_bytes=MIB, options={"enable_pinned_mem": False})
    assert not _slot(pool, 1000).memory.is_pinned()
    assert pool.pinned_bytes == 0
    pool.close()


def test_a_slot_is_usable_on_the_stream_before_the_write_completes(
    device: StreamDevice, pool: PinnedPool
) -> None:
    source = _slot(pool)
    source.memory.copy_(pattern(_N, seed=1))
    slot = _slot(device)
    write = device.write(slot, source.memory)
    assert write.is_stream_ordered
    slot.acquire()
    total = slot.memory.sum(dtype=torch.int64)
    slot.release()
    assert int(total) == int(source.memory.sum(dtype=torch.int64))
    succeed(write)


def test_a_write_runs_beside_the_computing(device: StreamDevice, pool: PinnedPool) -> None:
    source, slot = _slot(pool), _slot(device)
    torch.accelerator.synchronize()
    keep_busy()
    busy = event()
    busy.record()
    write = device.write(slot, source.memory)
    assert finish(write) is None
    assert not busy.query()  # the kernel still runs: the copy did not wait for it


def test_a_write_into_new_memory_runs_beside_what_was_queued_before(
    device: StreamDevice, pool: PinnedPool
) -> None:
    source = _slot(pool)
    source.memory.copy_(pattern(_N, seed=1))
    succeed(device.free(_slot(device)))  # the driver has given the memory already: that may wait for kernels
    torch.accelerator.synchronize()
    keep_busy()
    busy = event()
    busy.record()
    slot = _slot(device)
    assert finish(device.write(slot, source.memory)) is None
    assert not busy.query()  # the kernel still runs: neither waited for it
    slot.acquire()
    assert torch.equal(slot.memory.cpu(), source.memory)


def test_a_read_sees_what_a_long_kernel_writes_at_its_end(device: StreamDevice, pool: PinnedPool) -> None:
    slot, into = _slot(device), _slot(pool)
    slot.acquire()
    slot.memory.zero_()
    keep_busy()
    slot.memory.fill_(7)
    slot.release()
    succeed(device.read(slot, into.memory))
    assert bool((into.memory == 7).all())


def test_a_write_waits_for_a_long_kernel_that_reads_the_old_bytes(
    device: StreamDevice, pool: PinnedPool
) -> None:
    slot, source = _slot(device), _slot(pool)
    source.memory.fill_(1)
    slot.acquire()
    slot.memory.zero_()
    keep_busy()
    total = slot.memory.sum(dtype=torch.int64)
    slot.release()
    write = device.write(slot, source.memory)
    assert int(total) == 0
    succeed(write)
    slot.acquire()
    assert int(slot.memory.sum(dtype=torch.int64)) == _N


def test_another_stream_waits_for_the_last_holder(device: StreamDevice) -> None:
    slot, other = _slot(device), stream()
    slot.acquire()
    slot.memory.zero_()
    keep_busy()
    slot.memory.fill_(7)
    slot.release()
    with other:
        slot.acquire()
        seen = slot.memory.clone()
        slot.release()
    other.synchronize()
    assert bool((seen == 7).all())


def test_memory_is_free_only_after_its_events(device: StreamDevice) -> None:
    slot = _slot(device)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    slot.acquire()
    keep_busy()
    slot.release()
    free = device.free(slot)
    assert not free.is_done
    assert device.used_bytes == _N
    assert torch.accelerator.memory_allocated() == before
    succeed(free)
    assert device.used_bytes == 0
    assert torch.accelerator.memory_allocated() == before - _N


def test_idle_memory_is_free_at_once(device: StreamDevice) -> None:
    slot = _slot(device)
    torch.accelerator.synchronize()
    assert device.free(slot).is_done


def test_pageable_memory_is_copied_rightly(device: StreamDevice) -> None:
    source, into, slot = pattern(_N, seed=1), torch.zeros(_N, dtype=torch.uint8), _slot(device)
    succeed(device.write(slot, source))
    succeed(device.read(slot, into))
    assert torch.equal(into, source)


def test_a_full_card_is_a_capacity_error_with_its_cause() -> None:
    total = torch.accelerator.get_memory_info()[1]
    device = open_backend(capacity_bytes=2 * total, options={"device": NAME})
    with pytest.raises(CapacityError, match="device budget") as refusal:
        device.reserve(total + GIB)
    assert isinstance(refusal.value.__cause__, torch.OutOfMemoryError)
    device.close()


def test_a_refused_registration_leaves_no_error_for_the_next_kernel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registrar = find_registrar()
    assert registrar is not None
    with pytest.raises(BackendError):
        registrar.register(4096, 4096)  # nothing is mapped there
    assert int(torch.ones(10, device=NAME).sum()) == 10
    assert caplog.records == []
