"""The emulated device: its memory, its quota, its stream order, its options."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import BackendError, CapacityError, ConfigError
from tierstore.spi import AddressableSlot, Medium, Slot, device_storage_listeners
from tierstore.testing.conformance import contents, pattern, stored, succeed
from tierstore.units import KIB, MIB
from tierstore_backends.device import EmulatedDevice, open_backend
from tierstore_backends.device.arena import RECYCLED_FROM_BYTES, Arena, ArenaBlock


def _memory(slot: Slot) -> torch.Tensor:
    assert isinstance(slot, AddressableSlot)
    return slot.memory


def _buffer(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_the_device_is_a_device() -> None:
    capabilities = EmulatedDevice(MIB).capabilities
    assert (capabilities.medium, capabilities.alignment_bytes) == (Medium.DEVICE, 512)


def test_large_memory_is_recycled_with_a_new_storage() -> None:
    arena = Arena()
    memory, piece = arena.take(RECYCLED_FROM_BYTES)
    assert piece is not None
    address, storage = memory.data_ptr(), memory.untyped_storage()
    del memory
    arena.give(piece)
    assert arena.kept_bytes == 0  # the storage is still referred to
    del storage
    assert arena.kept_bytes == RECYCLED_FROM_BYTES
    again, _ = arena.take(RECYCLED_FROM_BYTES)
    assert again.data_ptr() == address
    assert arena.kept_bytes == 0


def test_memory_is_recycled_for_another_size() -> None:
    arena = Arena()
    pieces = [arena.take(nbytes) for nbytes in (MIB, 2 * MIB, 3 * MIB)]
    for memory, piece in pieces[:2]:
        assert piece is not None
        memory.fill_(1)
        arena.give(piece)
    del memory, pieces[:2]
    assert arena.kept_bytes == 3 * MIB
    whole, _ = arena.take(3 * MIB)  # of both
    assert bool((whole == 1).all())
    assert arena.kept_bytes == 0


@given(st.data())
def test_pieces_never_overlap_and_pages_above_what_may_be_kept_are_given_back(data: st.DataObject) -> None:
    arena = Arena()
    held: list[tuple[torch.Tensor, ArenaBlock | None, int]] = []
    given_away: list[tuple[torch.Tensor, int]] = []  # their tensors are still referred to
    sizes = st.sampled_from([RECYCLED_FROM_BYTES, 100_000, 128 * KIB, 132 * KIB, 193 * KIB])
    for value in range(1, data.draw(st.integers(1, 40), "steps") + 1):
        action = data.draw(st.sampled_from(["take", "take", "give", "give and use on", "stop using", "trim"]))
        if action == "take":
            fresh, piece = arena.take(data.draw(sizes))
            held.append((fresh.fill_(value), piece, value))
            del fresh
        elif action == "trim":
            most = data.draw(st.integers(-1, MIB))
            arena.trim(most)
            assert arena.kept_bytes <= max(most, 0)
        elif action == "stop using":
            given_away.clear()
        elif held:
            memory, piece, number = held.pop(data.draw(st.integers(0, len(held) - 1)))
            assert piece is not None
            arena.give(piece)
            if action == "give and use on":
                given_away.append((memory, number))
            del memory, piece
        everything = [*((each, number) for each, _, number in held), *given_away]
        assert all(bool((each == number).all()) for each, number in everything)
        del everything
    arena.trim(0)
    last, _ = arena.take(3 * MIB)
    assert not last.any()  # no page of before


def test_memory_that_a_view_still_uses_is_not_given_out_again() -> None:
    device = EmulatedDevice(MIB)
    slot = device.reserve(100_000)
    view = _memory(slot)[10:]
    view.fill_(3)
    succeed(device.free(slot))
    _memory(device.reserve(100_000)).fill_(4)
    assert bool((view == 3).all())


def test_what_is_kept_and_what_is_held_fit_in_the_capacity() -> None:
    device = EmulatedDevice(MIB)
    slots = [device.reserve(256 * KIB) for _ in range(4)]
    for slot in slots:
        succeed(device.free(slot))
    assert device._arena.kept_bytes == MIB
    held = device.reserve(600 * KIB)
    assert device._arena.kept_bytes <= 424 * KIB
    device.resize(700 * KIB)
    assert device._arena.kept_bytes <= 100 * KIB
    succeed(device.free(held))
    device.close()
    assert device._arena.kept_bytes == 0


def test_freed_memory_is_overwritten_on_demand() -> None:
    device = EmulatedDevice(MIB, is_overwriting=True)
    for nbytes in (100, 100_000):
        slot = device.reserve(nbytes)
        view = _memory(slot)[1:]
        view.zero_()
        succeed(device.free(slot))
        assert bool((view == 0xFF).all())


def test_a_slot_counts_a_multiple_of_the_alignment() -> None:
    device = EmulatedDevice(1024)
    device.reserve(1)
    device.reserve(512)
    assert device.used_bytes == 1024
    with pytest.raises(CapacityError, match=r"512 B do not fit in the 'device' backend: 0 B free of 1.0 KiB"):
        device.reserve(1)


@pytest.fixture
def announced() -> Iterator[list[torch.UntypedStorage]]:
    """Listen to every device for the time of a test."""
    storages: list[torch.UntypedStorage] = []
    device_storage_listeners.append(storages.append)
    yield storages
    device_storage_listeners.remove(storages.append)


@pytest.mark.parametrize("nbytes", [0, 10, 100_000])
def test_every_allocation_is_announced(nbytes: int, announced: list[torch.UntypedStorage]) -> None:
    slot = EmulatedDevice(MIB).reserve(nbytes)
    assert [storage is _memory(slot).untyped_storage() for storage in announced] == [True]


def test_an_allocation_that_a_listener_refuses_is_not_held() -> None:
    def refuse(_storage: torch.UntypedStorage) -> None:
        raise ValueError("no")

    device = EmulatedDevice(MIB)
    device_storage_listeners.append(refuse)
    try:
        with pytest.raises(ValueError, match="no"):
            device.reserve(MIB)
    finally:
        device_storage_listeners.remove(refuse)
    assert device.used_bytes == 0
    device.reserve(MIB)


# ---------------------------------------------------------------------------------------- stream order


def test_acquire_waits_for_the_bytes_and_not_for_the_completion() -> None:
    device = EmulatedDevice(4 * MIB, late_seed=1, is_stream_ordered=True)
    slot = device.reserve(MIB)
    assert isinstance(slot, AddressableSlot)
    source = pattern(MIB, seed=1)
    write = device.write(slot, source)
    assert write.is_stream_ordered
    slot.acquire()
    assert torch.equal(slot.memory, source)
    succeed(write)
    device.close()


def test_a_read_follows_the_write_that_is_still_under_way() -> None:
    device = EmulatedDevice(64 * MIB, is_stream_ordered=True)
    for seed in range(10):
        slot = device.reserve(2 * MIB)
        source, into = pattern(2 * MIB, seed), _buffer(2 * MIB)
        write = device.write(slot, source)
        succeed(device.read(slot, into))
        assert torch.equal(into, source)
        succeed(write)
    device.close()


# ---------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speed": 1}, "no option 'speed'. Accepted: device, late_events, link_bandwidth, link_latency_s"),
        ({"link_bandwidth": 0}, "'link_bandwidth' of the 'device' backend is 0"),
        ({"link_bandwidth": 1.5}, "is 1.5. Accepted: a size such as '1.5GiB', or None"),
        ({"link_bandwidth": "fast"}, "is 'fast'. Accepted: a size such as '1.5GiB', or None"),
        ({"link_latency_s": -1.0}, "Accepted: seconds, 0 or more"),
        ({"late_events": True}, "Accepted: an int or None"),
        ({"overwrite_freed": 1}, "Accepted: True or False"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_backend(capacity_bytes=1, options={"device": "emulated", **options})


def test_options_of_the_emulation_are_for_the_emulation() -> None:
    with pytest.raises(ConfigError, match=r"no option 'link_bandwidth'. Accepted: device"):
        open_backend(capacity_bytes=1, options={"device": "cuda", "link_bandwidth": "1GB"})


@pytest.mark.parametrize("device", ["nowhere", 7, "cuda:x"])
def test_what_is_no_device_is_refused(device: object) -> None:
    with pytest.raises(ConfigError):
        open_backend(capacity_bytes=1, options={"device": device})


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(BackendError):
        open_backend(capacity_bytes=1, options={"device": device})


@pytest.mark.skipif(torch.accelerator.is_available(), reason="here is an accelerator")
def test_without_an_accelerator_the_device_is_emulated() -> None:
    backend = open_backend(capacity_bytes=MIB, options={})
    assert isinstance(backend, EmulatedDevice)
    source = pattern(1000, seed=1)
    assert torch.equal(contents(backend, stored(backend, source)), source)


def test_a_slot_is_given_back_once() -> None:
    backend = EmulatedDevice(MIB)
    slot = backend.reserve(1000)
    succeed(backend.free(slot))
    assert isinstance(backend.free(slot).error, BackendError)
    backend.close()
