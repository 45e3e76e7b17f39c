"""The suite that every backend passes: the rules of `tierstore.spi`, one test each.

To run it against a backend of yours, say how to open one::

    class TestMyBackend(BackendConformance):
        def make(self, capacity_bytes: int) -> Backend:
            return open_backend(capacity_bytes=capacity_bytes, options={})

The suite opens backends of `CAPACITY_BYTES` and less, closes them, and relies on no clock: a
completion that does not come within `TIMEOUT_S` is a failure.  Needs pytest.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import cast

import pytest
import torch

from tierstore.errors import BackendError, CapacityError, StoreClosed
from tierstore.spi import (
    AddressableSlot,
    AdoptingBackend,
    Backend,
    BatchBackend,
    Completion,
    CountingBackend,
    DirectBackend,
    Medium,
    PartialError,
    Slot,
    WaitingBackend,
    broken_promise,
    held_bytes,
)
from tierstore.testing.backend_operations import (
    CAPACITY_BYTES,
    SIZES,
    TIMEOUT_S,
    charge,
    contents,
    finish,
    pattern,
    refusal,
    stored,
    succeed,
)
from tierstore.testing.part_conformance import PartConformance
from tierstore.units import MIB

__all__ = [
    "CAPACITY_BYTES",
    "SIZES",
    "TIMEOUT_S",
    "BackendConformance",
    "charge",
    "contents",
    "finish",
    "pattern",
    "refusal",
    "stored",
    "succeed",
]


def is_data(stats: object) -> bool:
    """Whether ``stats`` is what `tierstore.spi.CountingBackend` may show."""
    if not is_dataclass(stats) or isinstance(stats, type):
        return False
    values = [getattr(stats, field.name) for field in fields(stats)]
    return all(
        all(map(is_data, value)) if isinstance(value, tuple) else isinstance(value, int | float | str)
        for value in values
    )


class BackendConformance(PartConformance):
    """Subclass it, name the subclass ``Test...``, and define `make`."""

    def make(self, capacity_bytes: int) -> Backend:
        """Open the backend under test.  Called once or more in each test."""
        raise NotImplementedError

    @pytest.fixture
    def opened(self) -> Iterator[Callable[[int], Backend]]:
        """Open backends, and close them after the test."""
        backends: list[Backend] = []

        def open_one(capacity_bytes: int) -> Backend:
            backends.append(self.make(capacity_bytes))
            return backends[-1]

        yield open_one
        for backend in backends:
            backend.close()

    @pytest.fixture
    def backend(self, opened: Callable[[int], Backend]) -> Backend:
        """Open a backend of the usual capacity."""
        return opened(CAPACITY_BYTES)

    # ------------------------------------------------------------------------------------ bytes

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_what_was_written_is_read(self, backend: Backend, nbytes: int) -> None:
        """Rule 8."""
        source = pattern(nbytes, seed=1)
        assert torch.equal(contents(backend, stored(backend, source)), source)

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_a_slot_has_the_bytes_that_were_asked_for(self, backend: Backend, nbytes: int) -> None:
        """Not those of the medium's alignment."""
        assert backend.reserve(nbytes).nbytes == nbytes

    def test_a_slot_can_be_written_again(self, backend: Backend) -> None:
        """The later bytes count."""
        slot = stored(backend, pattern(10_000, seed=1))
        later = pattern(10_000, seed=2)
        succeed(backend.write(slot, later))
        assert torch.equal(contents(backend, slot), later)

    def test_a_slot_can_be_read_again(self, backend: Backend) -> None:
        """Reading does not consume."""
        source = pattern(10_000, seed=1)
        slot = stored(backend, source)
        contents(backend, slot)
        assert torch.equal(contents(backend, slot), source)

    def test_the_source_may_change_after_its_write(self, backend: Backend) -> None:
        """Rule 5 ends with the completion."""
        source = pattern(100_000, seed=1)
        expected = source.clone()
        slot = stored(backend, source)
        source.zero_()
        assert torch.equal(contents(backend, slot), expected)

    def test_slots_do_not_touch_each_other(self, backend: Backend) -> None:
        """Rule 9, and the least that a backend can do."""
        sources = [pattern(nbytes, seed) for seed, nbytes in enumerate(SIZES)]
        slots = [stored(backend, source) for source in sources]
        sources[3] = pattern(SIZES[3], seed=99)
        succeed(backend.write(slots[3], sources[3]))
        succeed(backend.free(slots.pop(5)))
        del sources[5]
        for slot, source in zip(slots, sources, strict=True):
            assert torch.equal(contents(backend, slot), source)

    def test_a_buffer_inside_a_larger_one_is_moved_alone(self, backend: Backend) -> None:
        """A buffer is a view as often as not."""
        around = torch.zeros(3 * 5_000, dtype=torch.uint8)
        source = pattern(3 * 5_000, seed=1)
        slot = stored(backend, source[5_000:10_000])
        succeed(backend.read(slot, around[5_000:10_000]))
        assert torch.equal(around[5_000:10_000], source[5_000:10_000])
        assert not around[:5_000].any()
        assert not around[10_000:].any()

    # ------------------------------------------------------------------------------------ what it says

    def test_it_has_what_it_says(self, backend: Backend) -> None:
        """Each capability takes members."""
        assert broken_promise(backend) is None

    def test_what_it_says_stays(self, backend: Backend) -> None:
        """Capabilities are constant: the engine asks once."""
        before = backend.capabilities
        contents(backend, stored(backend, pattern(10_000, seed=1)))
        assert backend.capabilities == before

    def test_slots_shrink_where_it_says_so(self, backend: Backend) -> None:
        """An attribute that nobody knows of would not be charged."""
        assert hasattr(backend.reserve(1_000), "held_bytes") is backend.capabilities.has_shrinking_slots

    def test_what_it_keeps_is_at_least_what_slots_were_written(self, backend: Backend) -> None:
        """While they are there."""
        if not backend.capabilities.has_reserved_bytes:
            pytest.skip("this backend keeps what is charged")
        stored(backend, pattern(MIB, seed=1))
        assert cast("CountingBackend", backend).reserved_bytes >= MIB

    def test_what_it_counts_is_data_and_grows(self, backend: Backend) -> None:
        """A frozen dataclass of numbers, texts and tuples of such."""
        if not backend.capabilities.has_io_stats:
            pytest.skip("this backend counts nothing")
        before = cast("CountingBackend", backend).io_stats
        contents(backend, stored(backend, pattern(MIB, seed=1)))
        after = cast("CountingBackend", backend).io_stats
        assert is_data(before)
        assert is_data(after)
        assert after != before

    def test_memory_that_cannot_be_reached_is_not_accepted(self, backend: Backend) -> None:
        """Nor is asking a second time different."""
        if not backend.capabilities.has_direct_paths:
            pytest.skip("this backend is given buffers in host memory")
        nowhere = torch.empty(4096, dtype=torch.uint8, device="meta")
        direct = cast("DirectBackend", backend)
        assert [direct.accepts(nowhere) for _ in range(2)] == [False, False]

    def test_nothing_waits_when_it_was_told_to_stop(self, backend: Backend) -> None:
        """An operation ends, with an error or without, however often it was told."""
        if not backend.capabilities.has_waits:
            pytest.skip("nothing waits in this backend but for the medium")
        slots = [stored(backend, pattern(MIB, seed)) for seed in range(4)]
        reads = [backend.read(slot, torch.empty(MIB, dtype=torch.uint8)) for slot in slots]
        for _ in range(2):
            cast("WaitingBackend", backend).stop_waiting()
        for read in reads:
            finish(read)
        for slot in slots:
            finish(backend.free(slot))

    def test_adopted_memory_is_a_slot_like_others(self, backend: Backend) -> None:
        """It is the slot's memory itself; it is charged, and freeing it only lets go of it."""
        if not backend.capabilities.adopts:
            pytest.skip("this backend takes no memory that is not its own")
        adopting, source = cast("AdoptingBackend", backend), pattern(4096, seed=1)
        memory = source.clone().to(backend.capabilities.device)
        slot = adopting.adopt(memory)
        assert slot.nbytes == 4096
        assert cast("AddressableSlot", slot).memory.data_ptr() == memory.data_ptr()
        with pytest.raises(CapacityError):
            backend.reserve(CAPACITY_BYTES)
        assert torch.equal(contents(backend, slot), source)
        succeed(backend.free(slot))
        backend.reserve(CAPACITY_BYTES)
        assert torch.equal(memory.cpu(), source)

    # ------------------------------------------------------------------------------------ batches

    @pytest.fixture
    def batching(self, backend: Backend) -> BatchBackend:
        """Open a backend that takes many slots at a time, where this one does."""
        if not backend.capabilities.has_batches:
            pytest.skip("this backend takes one slot at a time")
        return cast("BatchBackend", backend)

    def test_a_batch_moves_what_single_operations_move(self, batching: BatchBackend) -> None:
        """In any order, of any size, written one way and read the other."""
        sources = [pattern(nbytes, seed) for seed, nbytes in enumerate(SIZES)]
        slots = [batching.reserve(nbytes) for nbytes in SIZES]
        succeed(batching.write_many(slots[::-1], sources[::-1]))
        assert all(
            torch.equal(contents(batching, slot), source) for slot, source in zip(slots, sources, strict=True)
        )
        buffers = [torch.full((nbytes,), 0x5A, dtype=torch.uint8) for nbytes in SIZES]
        order = random.Random(1).sample(range(len(SIZES)), len(SIZES))
        succeed(batching.read_many([slots[n] for n in order], [buffers[n] for n in order]))
        assert all(torch.equal(into, source) for into, source in zip(buffers, sources, strict=True))

    @pytest.mark.parametrize("nbytes", [0, 1, 5_000])
    def test_a_batch_of_one_is_a_batch(self, batching: BatchBackend, nbytes: int) -> None:
        """Nobody need know how many there are."""
        slot, source = batching.reserve(nbytes), pattern(nbytes, seed=1)
        succeed(batching.write_many([slot], [source]))
        into = torch.zeros(nbytes, dtype=torch.uint8)
        succeed(batching.read_many([slot], [into]))
        assert torch.equal(into, source)

    def test_many_batches_may_be_under_way(self, batching: BatchBackend) -> None:
        """As many operations may be."""
        sources = [[pattern(20_000, 10 * turn + seed) for seed in range(8)] for turn in range(8)]
        slots = [[batching.reserve(20_000) for _ in batch] for batch in sources]
        writes = [batching.write_many(own, batch) for own, batch in zip(slots, sources, strict=True)]
        for write in reversed(writes):
            succeed(write)
        for own, batch in zip(slots, sources, strict=True):
            assert all(
                torch.equal(contents(batching, slot), source) for slot, source in zip(own, batch, strict=True)
            )

    def test_a_wrong_buffer_in_a_batch_harms_no_other_slot(self, batching: BatchBackend) -> None:
        """Rule 9, within a batch."""
        sources = [pattern(5_000, seed) for seed in range(3)]
        slots = [stored(batching, source) for source in sources]
        wrong = [pattern(5_000, 7), torch.zeros(4_999, dtype=torch.uint8), pattern(5_000, 8)]
        error = refusal(lambda: batching.write_many(slots, wrong))
        assert error is not None
        is_partial = isinstance(error, PartialError)
        assert torch.equal(contents(batching, slots[0]), wrong[0] if is_partial else sources[0])
        assert torch.equal(contents(batching, slots[1]), sources[1])
        assert torch.equal(contents(batching, slots[2]), wrong[2] if is_partial else sources[2])

    # ------------------------------------------------------------------------------------ room

    def test_freed_bytes_can_be_used_again(self, backend: Backend) -> None:
        """Rule 10: over and over, many times the capacity."""
        for round_ in range(24):
            source = pattern(MIB + 3, seed=round_)
            slot = stored(backend, source)
            assert torch.equal(contents(backend, slot), source)
            succeed(backend.free(slot))

    def test_the_whole_capacity_can_be_held(self, backend: Backend) -> None:
        """In slots of a few sizes that fit together."""
        slots = [backend.reserve(CAPACITY_BYTES // 8) for _ in range(8)]
        assert len(slots) == 8

    def test_more_than_the_capacity_is_refused(self, backend: Backend) -> None:
        """With an error that leaves the backend as it was."""
        source = pattern(CAPACITY_BYTES // 2, seed=1)
        slot = stored(backend, source)
        free_bytes = CAPACITY_BYTES - held_bytes(slot, backend.capabilities)
        with pytest.raises(CapacityError):
            backend.reserve(free_bytes + 1)
        assert torch.equal(contents(backend, slot), source)
        backend.reserve(free_bytes)

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_a_slot_takes_what_was_charged_or_less(self, backend: Backend, nbytes: int) -> None:
        """See `tierstore.spi.held_bytes`: all of it until it is written."""
        slot = backend.reserve(nbytes)
        assert held_bytes(slot, backend.capabilities) == charge(backend.capabilities, nbytes)
        succeed(backend.write(slot, pattern(nbytes, seed=1)))
        held = held_bytes(slot, backend.capabilities)
        assert 0 <= held <= charge(backend.capabilities, nbytes)
        assert held % backend.capabilities.alignment_bytes == 0

    def test_a_refusal_holds_nothing(self, backend: Backend) -> None:
        """However often it is tried."""
        for _ in range(10):
            with pytest.raises(CapacityError):
                backend.reserve(CAPACITY_BYTES + 1)
        backend.reserve(CAPACITY_BYTES)

    def test_the_capacity_can_grow(self, opened: Callable[[int], Backend]) -> None:
        """At once, and with what is there in place."""
        backend = opened(MIB)
        source = pattern(MIB, seed=1)
        slot = stored(backend, source)
        backend.resize(3 * MIB)
        others = [stored(backend, pattern(MIB, seed)) for seed in (2, 3)]
        assert torch.equal(contents(backend, slot), source)
        assert torch.equal(contents(backend, others[1]), pattern(MIB, seed=3))

    def test_the_capacity_can_shrink_and_grow_again(self, opened: Callable[[int], Backend]) -> None:
        """Down to what is held."""
        backend = opened(4 * MIB)
        slots = [stored(backend, pattern(MIB, seed)) for seed in range(4)]
        for slot in slots[1:]:
            succeed(backend.free(slot))
        backend.resize(MIB)
        with pytest.raises(CapacityError):
            backend.reserve(MIB)
        assert torch.equal(contents(backend, slots[0]), pattern(MIB, seed=0))
        backend.resize(4 * MIB)
        again = [stored(backend, pattern(MIB, seed)) for seed in range(1, 4)]
        assert torch.equal(contents(backend, again[2]), pattern(MIB, seed=3))
        assert torch.equal(contents(backend, slots[0]), pattern(MIB, seed=0))

    # ------------------------------------------------------------------------------------ completions

    def test_every_operation_completes_once(self, backend: Backend) -> None:
        """Rule 7."""
        slot = backend.reserve(100_000)
        told: list[str] = []

        def operate(name: str, completion: Completion) -> None:
            completion.add_done_callback(lambda _error: told.append(name))
            succeed(completion)
            with pytest.raises(RuntimeError):
                completion.complete()

        operate("write", backend.write(slot, pattern(100_000, seed=1)))
        operate("read", backend.read(slot, torch.empty(100_000, dtype=torch.uint8)))
        operate("free", backend.free(slot))
        assert told == ["write", "read", "free"]

    def test_many_operations_may_be_under_way(self, backend: Backend) -> None:
        """None waits for another's completion to be looked at."""
        sources = [pattern(200_000, seed) for seed in range(16)]
        slots = [backend.reserve(200_000) for _ in sources]
        writes = [backend.write(slot, source) for slot, source in zip(slots, sources, strict=True)]
        for write in reversed(writes):
            succeed(write)
        buffers = [torch.empty(200_000, dtype=torch.uint8) for _ in sources]
        reads = [backend.read(slot, into) for slot, into in zip(slots, buffers, strict=True)]
        for read in reversed(reads):
            succeed(read)
        assert all(torch.equal(into, source) for into, source in zip(buffers, sources, strict=True))

    def test_a_callback_may_call_the_backend(self, backend: Backend) -> None:
        """The engine issues what follows from inside a completion."""
        source = pattern(100_000, seed=1)
        slot = backend.reserve(100_000)
        into = torch.zeros(100_000, dtype=torch.uint8)
        reads: list[Completion] = []
        has_begun = threading.Event()

        def read_on(_error: BaseException | None) -> None:
            reads.append(backend.read(slot, into))
            has_begun.set()

        backend.write(slot, source).add_done_callback(read_on)
        assert has_begun.wait(TIMEOUT_S)
        succeed(reads[0])
        assert torch.equal(into, source)

    def test_a_buffer_of_another_size_is_refused(self, backend: Backend) -> None:
        """Rule 5 broken by the engine must not become lost bytes."""
        source = pattern(5_000, seed=1)
        slot = stored(backend, source)
        assert refusal(lambda: backend.write(slot, torch.zeros(4_999, dtype=torch.uint8))) is not None
        assert refusal(lambda: backend.read(slot, torch.zeros(1, dtype=torch.uint8))) is not None
        assert torch.equal(contents(backend, slot), source)

    # ------------------------------------------------------------------------------------ threads

    def test_threads_do_not_disturb_each_other(self, backend: Backend) -> None:
        """Rule 6: each thread finds its own bytes, whatever the others do."""
        failures: list[BaseException] = []
        start = threading.Barrier(4)

        def work(seed: int) -> None:
            chance = random.Random(seed)
            start.wait(TIMEOUT_S)
            try:
                for turn in range(20):
                    source = pattern(chance.choice((1, 700, 5_000, 70_000, 300_000)), seed * 100 + turn)
                    slot = stored(backend, source)
                    assert torch.equal(contents(backend, slot), source)
                    succeed(backend.free(slot))
            except BaseException as error:  # noqa: BLE001 - carried to the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert failures == []

    # ------------------------------------------------------------------------------------ memory in place

    def test_addressable_slots_say_so(self, backend: Backend) -> None:
        """The medium decides whether bytes can be used in place."""
        is_addressable = isinstance(backend.reserve(10), AddressableSlot)
        assert is_addressable is (backend.capabilities.medium is not Medium.STORAGE)

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_memory_is_a_storage_of_its_own(self, backend: Backend, nbytes: int) -> None:
        """It begins at the slot's first byte and ends with its last, at every call the same."""
        neighbour, slot = backend.reserve(nbytes), backend.reserve(nbytes)
        if not isinstance(slot, AddressableSlot) or not isinstance(neighbour, AddressableSlot):
            pytest.skip("bytes behind I/O have no address")
        memory = slot.memory
        assert memory is slot.memory
        assert (memory.dtype, memory.dim(), memory.numel()) == (torch.uint8, 1, nbytes)
        assert memory.is_contiguous()
        assert memory.storage_offset() == 0
        assert memory.untyped_storage().nbytes() == nbytes
        if nbytes > 0:
            assert memory.data_ptr() != neighbour.memory.data_ptr()

    def test_memory_shows_what_was_written(self, backend: Backend) -> None:
        """To whoever acquired the slot."""
        source = pattern(100_000, seed=1)
        slot = stored(backend, source)
        if not isinstance(slot, AddressableSlot):
            pytest.skip("bytes behind I/O have no address")
        slot.acquire()
        assert torch.equal(slot.memory.cpu(), source)
        slot.release()

    def test_what_memory_was_given_is_read(self, backend: Backend) -> None:
        """After the writer released the slot."""
        slot = backend.reserve(100_000)
        if not isinstance(slot, AddressableSlot):
            pytest.skip("bytes behind I/O have no address")
        source = pattern(100_000, seed=1)
        slot.acquire()
        slot.memory.copy_(source)
        slot.release()
        assert torch.equal(contents(backend, slot), source)

    def test_memory_suits_every_dtype(self, backend: Backend) -> None:
        """It begins where the widest number may begin, and bytes can be seen as numbers."""
        slot = backend.reserve(1_600)
        if not isinstance(slot, AddressableSlot):
            pytest.skip("bytes behind I/O have no address")
        assert slot.memory.data_ptr() % 64 == 0
        assert slot.memory.view(torch.complex128).numel() == 100

    def test_memory_does_not_depend_on_where_it_was_reserved(self, backend: Backend) -> None:
        """Inside inference mode, and where tensors are made on another device by default."""
        with torch.inference_mode(), torch.device("meta"):
            slot = backend.reserve(1_000)
        source = pattern(1_000, seed=1)
        succeed(backend.write(slot, source))
        if isinstance(slot, AddressableSlot):
            slot.acquire()
            slot.memory.add_(1)
            slot.release()
            source.add_(1)
        assert torch.equal(contents(backend, slot), source)

    def test_a_buffer_of_inference_mode_can_be_filled(self, backend: Backend) -> None:
        """Whoever fills it may be a thread outside that mode."""
        source = pattern(1_000, seed=1)
        with torch.inference_mode():
            into = torch.zeros(1_000, dtype=torch.uint8)
        succeed(backend.read(stored(backend, source), into))
        assert torch.equal(into, source)

    # ------------------------------------------------------------------------------------ the end

    def test_closing_twice_is_closing_once(self, opened: Callable[[int], Backend]) -> None:
        """`close` is idempotent."""
        backend = opened(MIB)
        stored(backend, pattern(1_000, seed=1))
        backend.close()
        backend.close()

    def test_a_closed_backend_refuses(self, opened: Callable[[int], Backend]) -> None:
        """With an error, not with a hang and not with a crash."""
        backend = opened(MIB)
        slot = stored(backend, pattern(1_000, seed=1))
        backend.close()
        with pytest.raises((BackendError, StoreClosed)):
            backend.reserve(1)
        assert refusal(lambda: backend.write(slot, pattern(1_000, seed=2))) is not None
        assert refusal(lambda: backend.read(slot, torch.empty(1_000, dtype=torch.uint8))) is not None

    def test_closing_ends_every_thread(self, opened: Callable[[int], Backend]) -> None:
        """Nothing that the backend started outlives it."""
        before = set(threading.enumerate())
        backend = opened(MIB)
        contents(backend, stored(backend, pattern(MIB // 2, seed=1)))
        backend.close()
        assert set(threading.enumerate()) - before == set()

    # ------------------------------------------------------------------------------------ in all

    def test_a_long_random_life_loses_no_byte(self, backend: Backend) -> None:
        """Reserve, write, read and free by chance, always nearly full; a dict knows what must be there."""
        chance = random.Random(7)
        held: list[tuple[Slot, int]] = []
        charged_bytes = 0
        for seed in range(300):
            nbytes = chance.choice((0, 1, 100, 512, 5_000, 65_536, 100_001, 400_000))
            while charged_bytes + charge(backend.capabilities, nbytes) > CAPACITY_BYTES // 2:
                slot, owner = held.pop(chance.randrange(len(held)))
                assert torch.equal(contents(backend, slot), pattern(slot.nbytes, owner))
                succeed(backend.free(slot))
                charged_bytes -= charge(backend.capabilities, slot.nbytes)
            held.append((stored(backend, pattern(nbytes, seed)), seed))
            charged_bytes += charge(backend.capabilities, nbytes)
        for slot, owner in held:
            assert torch.equal(contents(backend, slot), pattern(slot.nbytes, owner))
