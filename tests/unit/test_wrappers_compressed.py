"""A codec around a backend: what is packed, what is not, and what becomes of the medium's room."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.codec_bytes import KIB, MIB, Watched, random, repeating
from tierstore.codec import Compressed, OpenedBackend, with_codec
from tierstore.codec.workers import PADS
from tierstore.errors import BackendError, ConfigError, IntegrityError, StoreClosed, UsageError
from tierstore.spi import Buffer, PartialError, held_bytes
from tierstore.testing.batching import Batching
from tierstore.testing.conformance import contents, finish, stored, succeed
from tierstore.testing.faults import Faulty, Gate
from tierstore_backends.memory import MemoryBackend

CHUNK = 64 * KIB


@pytest.fixture
def inner() -> Watched:
    return Watched(64 * MIB)


@pytest.fixture
def packed(inner: Watched) -> Iterator[Compressed]:
    backend = Compressed(inner, "lz4", chunk_bytes=CHUNK)
    yield backend
    backend.close()


# ------------------------------------------------------------------------------ what is packed


def test_bytes_that_repeat_take_less_of_the_medium(inner: Watched, packed: Compressed) -> None:
    slot = stored(packed, repeating(MIB))
    assert inner.held_bytes < MIB // 50
    assert held_bytes(slot, packed.capabilities) == inner.held_bytes


def test_the_slots_within_are_exactly_as_long_as_what_they_hold(inner: Watched, packed: Compressed) -> None:
    stored(packed, repeating(MIB))
    assert len(inner.slots) == MIB // CHUNK
    assert sorted(slot.nbytes for slot in inner.slots) == sorted(map(torch.Tensor.numel, inner.sources))


def test_bytes_that_do_not_repeat_go_to_the_medium_from_where_they_lie(
    inner: Watched, packed: Compressed
) -> None:
    source = random(MIB)
    slot = stored(packed, source)
    (written,) = inner.sources
    assert written is source
    assert held_bytes(slot, packed.capabilities) == inner.held_bytes == MIB


def test_short_tensors_are_not_looked_at(inner: Watched, packed: Compressed) -> None:
    source = repeating(4 * KIB - 1)
    before = threading.active_count()
    stored(packed, source)
    assert inner.sources == [source]
    assert threading.active_count() == before
    assert packed.codec_stats.skipped_tensors == packed.codec_stats.packed_tensors == 0
    stored(packed, repeating(4 * KIB))
    assert packed.codec_stats.packed_tensors == 1


def test_without_a_codec_everything_is_stored_as_it_is(inner: Watched) -> None:
    backend = Compressed(inner, None)
    stored(backend, repeating(MIB))
    assert inner.held_bytes == MIB
    backend.close()


def test_a_slot_is_all_of_its_size_until_it_is_written(inner: Watched, packed: Compressed) -> None:
    slot = packed.reserve(MIB)
    assert held_bytes(slot, packed.capabilities) == inner.held_bytes == MIB


def test_the_medium_never_holds_more_than_was_reserved(inner: Watched, packed: Compressed) -> None:
    for seed in range(5):
        stored(packed, repeating(MIB, seed))
        assert inner.peak_bytes <= MIB + seed * MIB // 50


def test_what_was_done_is_counted(packed: Compressed) -> None:
    slots = [stored(packed, repeating(MIB)), stored(packed, repeating(2 * MIB)), stored(packed, random(MIB))]
    contents(packed, slots[0])
    stats = packed.codec_stats
    assert (stats.packed_tensors, stats.skipped_tensors) == (2, 1)
    assert stats.raw_bytes == 3 * MIB
    assert stats.held_bytes == held_bytes(slots[0], packed.capabilities) + held_bytes(
        slots[1], packed.capabilities
    )
    assert stats.ratio == stats.held_bytes / stats.raw_bytes < 0.02
    assert stats.pack_seconds > 0
    assert stats.unpack_seconds > 0


def test_a_backend_that_says_nothing_of_its_transfers_says_nothing(packed: Compressed) -> None:
    assert not packed.capabilities.has_io_stats


def test_a_codec_that_has_packed_nothing_has_gained_nothing(packed: Compressed) -> None:
    assert packed.codec_stats.ratio == 1.0


def test_a_tensor_that_gains_less_than_its_alignment_is_not_looked_at() -> None:
    inner = MemoryBackend(MIB, is_storage=True)
    inner.capabilities = replace(inner.capabilities, alignment_bytes=64 * KIB)
    backend = Compressed(inner, "lz4")
    slot = stored(backend, repeating(64 * KIB))
    assert held_bytes(slot, backend.capabilities) == 64 * KIB
    assert backend.codec_stats.packed_tensors == 0
    backend.close()


# ------------------------------------------------------------------------------ slots again


@pytest.mark.parametrize(
    ("first", "second"),
    [(repeating, repeating), (repeating, random), (random, repeating), (random, random)],
    ids=lambda make: make.__name__,
)
def test_a_slot_can_be_written_again_with_bytes_of_another_kind(
    inner: Watched, packed: Compressed, first: object, second: object
) -> None:
    before, after = first(MIB, 1), second(MIB, 2)  # type: ignore[operator]
    slot = stored(packed, before)
    succeed(packed.write(slot, after))
    assert torch.equal(contents(packed, slot), after)
    assert held_bytes(slot, packed.capabilities) == inner.held_bytes
    succeed(packed.free(slot))
    assert inner.slots == []


@pytest.mark.parametrize("make", [repeating, random])
def test_freeing_gives_everything_back(inner: Watched, packed: Compressed, make: object) -> None:
    slot = stored(packed, make(MIB))  # type: ignore[operator]
    succeed(packed.free(slot))
    assert inner.slots == []
    with pytest.raises(UsageError, match="freed before"):
        packed.free(slot)


def test_a_slot_that_was_never_written_can_be_freed(inner: Watched, packed: Compressed) -> None:
    succeed(packed.free(packed.reserve(MIB)))
    assert inner.slots == []


def test_a_slot_of_another_backend_is_refused(inner: Watched, packed: Compressed) -> None:
    with pytest.raises(UsageError, match="not a slot of this backend"):
        packed.read(inner.reserve(10), torch.empty(10, dtype=torch.uint8))


# ------------------------------------------------------------------------------ damage and failure


def test_a_flipped_bit_anywhere_is_an_integrity_error(inner: Watched, packed: Compressed) -> None:
    slot = stored(packed, repeating(CHUNK))
    (within,) = inner.slots
    other = stored(packed, repeating(CHUNK, 9))
    for at in range(0, within.nbytes, 7):
        inner.flip(within, at)
        error = finish(packed.read(slot, torch.empty(CHUNK, dtype=torch.uint8)))
        assert isinstance(error, IntegrityError)
        inner.flip(within, at)
    assert torch.equal(contents(packed, slot), repeating(CHUNK))
    assert torch.equal(contents(packed, other), repeating(CHUNK, 9))


def test_a_write_that_fails_anywhere_harms_no_other_slot_and_keeps_no_room() -> None:
    failures = 0
    for number in range(1, 100):
        memory = Watched(64 * MIB)
        inner = Faulty(memory, on=["reserve", "write", "free"])
        backend = Compressed(inner, "lz4", chunk_bytes=CHUNK)
        other = stored(backend, repeating(5 * CHUNK, 1))
        inner.fail_next(number)
        slot = None
        try:
            slot = backend.reserve(5 * CHUNK)
            succeed(backend.write(slot, repeating(5 * CHUNK, 2)))
        except BackendError:
            failures += 1
        assert torch.equal(contents(backend, other), repeating(5 * CHUNK, 1))
        has_failed = inner.failures == 1
        inner.heal()
        if slot is not None:
            succeed(backend.free(slot))
        assert memory.held_bytes == held_bytes(other, backend.capabilities)
        backend.close()
        if not has_failed:
            break
    assert failures == 2 + 2 * 5  # two to reserve and to exchange room, and each of five chunks


def test_after_a_failure_the_rest_of_a_tensor_is_not_packed(inner: Watched) -> None:
    faulty = Faulty(inner, on=["write"], fail_at=1)
    backend = Compressed(faulty, "lz4", chunk_bytes=CHUNK)
    slot = backend.reserve(100 * CHUNK)
    assert isinstance(finish(backend.write(slot, repeating(100 * CHUNK))), BackendError)
    assert faulty.operations < 50
    backend.close()


def test_a_slot_whose_write_failed_says_so_when_it_is_read(inner: Watched) -> None:
    faulty = Faulty(inner, on=["write"], fail_at=1)
    backend = Compressed(faulty, "lz4")
    slot = backend.reserve(CHUNK)
    assert isinstance(finish(backend.write(slot, repeating(CHUNK))), BackendError)
    error = finish(backend.read(slot, torch.empty(CHUNK, dtype=torch.uint8)))
    assert isinstance(error, UsageError)
    backend.close()


def test_a_read_that_fails_anywhere_fails_alone(inner: Watched) -> None:
    for number in range(1, 6):
        faulty = Faulty(inner, on=["read"])
        backend = Compressed(faulty, "lz4", chunk_bytes=CHUNK)
        slot = stored(backend, repeating(5 * CHUNK))
        faulty.fail_next(number)
        error = finish(backend.read(slot, torch.empty(5 * CHUNK, dtype=torch.uint8)))
        assert type(error) is BackendError  # and not that the rubbish it left is not what was written
        assert torch.equal(contents(backend, slot), repeating(5 * CHUNK))


def test_in_a_batch_only_what_fails_fails(inner: Watched) -> None:
    faulty = Faulty(inner, on=["write"])
    batching = Batching(faulty)
    backend = Compressed(batching, "lz4")
    sources = [repeating(8 * KIB, seed) for seed in range(5)] + [random(8 * KIB)]
    slots = [backend.reserve(8 * KIB) for _ in sources]
    faulty.fail_next(3)  # the first is the one that is not packed
    error = finish(backend.write_many(slots, sources))
    assert isinstance(error, PartialError)
    assert list(error.errors) == [1]
    for position in (0, 2, 3, 4, 5):
        assert torch.equal(contents(backend, slots[position]), sources[position])
    backend.close()


def test_in_a_batch_only_damaged_bytes_are_not_read(inner: Watched) -> None:
    backend = Compressed(inner, "lz4")
    sources = [repeating(8 * KIB, seed) for seed in range(3)]
    slots = [backend.reserve(8 * KIB) for _ in sources]
    for slot, source in zip(slots, sources, strict=True):
        succeed(backend.write(slot, source))
    inner.flip(inner.slots[1], 5)
    into = [torch.zeros(8 * KIB, dtype=torch.uint8) for _ in sources]
    error = finish(backend.read_many(slots, into))
    assert isinstance(error, PartialError)
    assert {position: type(each) for position, each in error.errors.items()} == {1: IntegrityError}
    assert torch.equal(into[0], sources[0])
    assert torch.equal(into[2], sources[2])
    backend.close()


def test_small_tensors_travel_together(inner: Watched) -> None:
    batching = Batching(inner)
    backend = Compressed(batching, "lz4")
    sources = [repeating(8 * KIB, seed) for seed in range(20)] + [random(8 * KIB, s) for s in range(5)]
    slots = [backend.reserve(8 * KIB) for _ in sources]
    succeed(backend.write_many(slots, sources))
    assert sorted(batching.batches) == [5, 20]
    into = [torch.zeros(8 * KIB, dtype=torch.uint8) for _ in sources]
    succeed(backend.read_many(slots, into))
    assert sorted(batching.batches) == [5, 5, 20, 20]
    assert all(torch.equal(a, b) for a, b in zip(sources, into, strict=True))
    backend.close()


# ------------------------------------------------------------------------------ threads and memory


def test_reads_do_not_wait_for_writes(inner: Watched) -> None:
    gate = Gate(inner, holds=["write"])
    gate.open()
    backend = Compressed(gate, "lz4", chunk_bytes=CHUNK)
    there = stored(backend, repeating(20 * CHUNK))
    gate.shut()
    slot = backend.reserve(20 * CHUNK)
    write = backend.write(slot, repeating(20 * CHUNK, 3))
    gate.wait_until_held(PADS)
    assert torch.equal(contents(backend, there), repeating(20 * CHUNK))
    gate.open()
    succeed(write)
    backend.close()


def test_only_so_much_is_packed_ahead_of_the_medium(inner: Watched) -> None:
    gate = Gate(inner, holds=["write"])
    backend = Compressed(gate, "lz4", chunk_bytes=CHUNK)
    writes = []
    for seed in range(3):
        slot = backend.reserve(20 * CHUNK)
        writes.append(backend.write(slot, repeating(20 * CHUNK, seed)))
    gate.wait_until_held(PADS)
    gate.step()
    gate.wait_until_held(PADS)
    assert gate.held == PADS
    gate.open()
    for write in writes:
        succeed(write)
    backend.close()


def test_nothing_refers_to_the_callers_bytes_when_a_completion_completes(packed: Compressed) -> None:
    source, into = repeating(5 * CHUNK), torch.zeros(5 * CHUNK, dtype=torch.uint8)
    slot = packed.reserve(source.numel())
    for move, buffer in ((packed.write, source), (packed.read, into)):
        held = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
        counts: list[int] = []

        def count(error: BaseException | None, buffer: Buffer = buffer, counts: list[int] = counts) -> None:
            storage = buffer.untyped_storage()
            counts.append(torch._C._storage_Use_Count(storage._cdata))

        completion = move(slot, buffer[:])  # a tensor of its own over the same memory
        completion.add_done_callback(count)
        succeed(completion)
        assert counts == [held]


def test_closing_waits_for_what_is_under_way(inner: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(inner, holds=["write"])
    backend = Compressed(gate, "lz4", chunk_bytes=CHUNK)
    slot = backend.reserve(10 * CHUNK)
    write = backend.write(slot, repeating(10 * CHUNK))
    gate.wait_until_held()
    waits = threading.Event()
    changed = backend._workers._changed
    wait_for = changed.wait_for

    def noted(predicate: Callable[[], bool]) -> bool:
        waits.set()
        return wait_for(predicate)

    monkeypatch.setattr(changed, "wait_for", noted)
    closing = threading.Thread(target=backend.close)
    closing.start()
    assert waits.wait(30)
    gate.open()
    closing.join(30)
    assert not closing.is_alive()
    assert write.is_done
    assert write.error is None


def test_it_cannot_be_closed_from_a_callback(inner: Watched) -> None:
    gate = Gate(inner, holds=["read"])
    backend = Compressed(gate, "lz4")
    slot = stored(backend, repeating(CHUNK))
    ends: list[BaseException | None] = []

    def close(_: BaseException | None) -> None:
        try:
            backend.close()
        except UsageError as refusal:
            ends.append(refusal)

    read = backend.read(slot, torch.empty(CHUNK, dtype=torch.uint8))
    gate.wait_until_held()
    read.add_done_callback(close)
    gate.open()
    succeed(read)
    backend.close()
    assert len(ends) == 1


def test_a_forgotten_one_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    backend = Compressed(MemoryBackend(MIB, is_storage=True), "lz4")
    stored(backend, repeating(CHUNK))
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    del backend
    gc.collect()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_the_child_of_a_fork_is_refused(packed: Compressed) -> None:
    slot = stored(packed, repeating(CHUNK))
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            packed.read(slot, torch.empty(CHUNK, dtype=torch.uint8))
        except StoreClosed:
            packed.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# ------------------------------------------------------------------------------ what is refused


def test_memory_that_is_used_in_place_has_no_codec() -> None:
    with pytest.raises(ConfigError, match=r"'host'.*read and written, such as a disk; those of HOST memory"):
        with_codec(MemoryBackend(MIB), "lz4", "host")


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match="codec='zip': accepted: 'lz4' or None"):
        with_codec(Watched(MIB), "zip", "disk")


def test_no_codec_is_no_wrapper() -> None:
    inner = Watched(MIB)
    assert with_codec(inner, None, "disk") == OpenedBackend(inner)


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(CHUNK, dtype=torch.int8),
        torch.zeros(CHUNK // 2, 2, dtype=torch.uint8),
        torch.zeros(2 * CHUNK, dtype=torch.uint8)[::2],
        torch.zeros(CHUNK, dtype=torch.uint8, device="meta"),
    ],
    ids=["dtype", "dimensions", "strides", "device"],
)
def test_a_buffer_that_is_none_is_refused(packed: Compressed, buffer: Buffer) -> None:
    slot = stored(packed, repeating(CHUNK))
    for move in (packed.read, packed.write):
        with pytest.raises(UsageError, match=r"contiguous torch\.uint8 in host memory"):
            move(slot, buffer)
    assert torch.equal(contents(packed, slot), repeating(CHUNK))
