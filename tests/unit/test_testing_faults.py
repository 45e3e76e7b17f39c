"""The wrappers that make failures, delays and standstills do what they say."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from tierstore.errors import BackendError, CapacityError
from tierstore.spi import Backend, Completion, Slot
from tierstore.testing.batching import Batching
from tierstore.testing.conformance import BackendConformance, contents, pattern, stored, succeed
from tierstore.testing.faults import Faulty, Gate, Slow, from_nth_on
from tierstore_backends.device import EmulatedDevice
from tierstore_backends.memory import MemoryBackend

_N = 1000


def _scenario(backend: Backend) -> Slot:
    """Do five operations that count: two reserves, two writes, one read."""
    first, second = stored(backend, pattern(_N, 1)), stored(backend, pattern(_N, 2))
    contents(backend, first)
    succeed(backend.free(second))
    return first


class TestFaultyThatNeverFails(BackendConformance):
    """Wrapped, a backend is still a backend."""

    def make(self, capacity_bytes: int) -> Backend:
        return Faulty(MemoryBackend(capacity_bytes))


class TestOpenGate(BackendConformance):
    """Open, a gate is not there."""

    def make(self, capacity_bytes: int) -> Backend:
        gate = Gate(MemoryBackend(capacity_bytes))
        gate.open()
        return gate


class TestBatching(BackendConformance):
    """Around any backend there is one that takes batches."""

    def make(self, capacity_bytes: int) -> Backend:
        return Batching(MemoryBackend(capacity_bytes))


class TestSlowThatIsPrompt(BackendConformance):
    """Without a delay, nothing is late."""

    def make(self, capacity_bytes: int) -> Backend:
        return Slow(MemoryBackend(capacity_bytes), delays=[0])


def test_every_operation_can_be_made_to_fail_in_turn() -> None:
    for number in itertools.count(1):
        backend = Faulty(MemoryBackend(10 * _N), fail_at=number)
        try:
            _scenario(backend)
        except BackendError:
            assert backend.failures == 1
            assert backend.operations == number
        else:
            assert (backend.operations, backend.failures) == (5, 0)
            break
    assert number == 6


def test_a_failed_read_leaves_rubbish_and_the_slot_as_it_was() -> None:
    backend = Faulty(MemoryBackend(_N), fail_at=3)
    slot, into = stored(backend, pattern(_N, 1)), torch.zeros(_N, dtype=torch.uint8)
    assert isinstance(backend.read(slot, into).error, BackendError)
    assert bool(into.all())
    assert torch.equal(contents(backend, slot), pattern(_N, 1))


def test_a_failed_write_has_done_nothing() -> None:
    backend = Faulty(MemoryBackend(_N), fail_at=2, on={"write"})
    slot = stored(backend, pattern(_N, 1))
    assert isinstance(backend.write(slot, pattern(_N, 2)).error, BackendError)
    assert torch.equal(contents(backend, slot), pattern(_N, 1))


def test_frees_fail_only_when_they_are_named() -> None:
    assert Faulty(MemoryBackend(_N), fail_at=1).free(MemoryBackend(_N).reserve(1)).error is None
    backend = Faulty(MemoryBackend(_N), fail_at=1, on={"free"})
    slot = backend.reserve(_N)
    assert isinstance(backend.free(slot).error, BackendError)
    with pytest.raises(CapacityError):
        backend.reserve(1)
    assert backend.free(slot).error is None
    backend.reserve(_N)


def test_the_error_can_be_chosen() -> None:
    full = CapacityError("full")
    backend = Faulty(MemoryBackend(_N), fail_at=1, error=full)
    with pytest.raises(CapacityError) as raised:
        backend.reserve(1)
    assert raised.value is full


def test_a_medium_can_die_and_stay_dead() -> None:
    backend = Faulty(MemoryBackend(_N), fail_at=from_nth_on(2))
    slot = backend.reserve(_N)
    for _ in range(3):
        assert backend.write(slot, pattern(_N, 1)).error is not None
    assert (backend.operations, backend.failures) == (4, 3)


def test_several_operations_can_fail() -> None:
    backend = Faulty(MemoryBackend(_N), fail_at=(1, 3), on={"write"})
    slot = backend.reserve(_N)
    errors = [backend.write(slot, pattern(_N, 1)).error for _ in range(4)]
    assert [error is not None for error in errors] == [True, False, True, False]


def test_the_next_failure_can_be_ordered_and_called_off() -> None:
    backend = Faulty(MemoryBackend(_N))
    slot = backend.reserve(_N)
    backend.fail_next()
    assert backend.write(slot, pattern(_N, 1)).error is not None
    backend.fail_next(after=2)
    errors = [backend.write(slot, pattern(_N, 1)).error for _ in range(3)]
    assert [error is not None for error in errors] == [False, True, False]
    backend.fail_next()
    backend.heal()
    assert backend.write(slot, pattern(_N, 1)).error is None


def test_a_gate_holds_copies_before_they_begin() -> None:
    inner = MemoryBackend(_N)
    gate = Gate(inner)
    slot = gate.reserve(_N)
    succeed(inner.write(slot, pattern(_N, 1)))
    write = gate.write(slot, pattern(_N, 2))
    assert [write.is_done] == [False]
    assert torch.equal(contents(inner, slot), pattern(_N, 1))
    assert (gate.writes, gate.reads, gate.held) == (1, 0, 1)
    gate.open()
    assert write.is_done
    assert torch.equal(contents(gate, slot), pattern(_N, 2))
    assert (gate.writes, gate.reads, gate.held) == (1, 1, 0)


def test_a_gate_lets_one_through_at_a_time_in_any_order() -> None:
    gate = Gate(MemoryBackend(3 * _N))
    writes = [gate.write(gate.reserve(_N), pattern(_N, seed)) for seed in range(3)]
    gate.step()
    assert [write.is_done for write in writes] == [True, False, False]
    gate.step(1)
    assert [write.is_done for write in writes] == [True, False, True]
    gate.step()
    with pytest.raises(IndexError):
        gate.step()


def test_a_gate_that_is_shut_again_holds_again() -> None:
    gate = Gate(MemoryBackend(_N))
    slot = gate.reserve(_N)
    gate.open()
    assert gate.write(slot, pattern(_N, 1)).is_done
    gate.shut()
    assert not gate.write(slot, pattern(_N, 1)).is_done
    gate.close()


def test_a_gate_holds_frees_when_told_to() -> None:
    gate = Gate(MemoryBackend(_N), holds={"free"})
    free = gate.free(stored(gate, pattern(_N, 1)))
    assert (free.is_done, gate.frees) == (False, 1)
    with pytest.raises(CapacityError):
        gate.reserve(1)
    gate.step()
    assert free.is_done
    gate.reserve(_N)


def test_a_held_copy_is_not_stream_ordered_because_it_is_not_queued() -> None:
    device = EmulatedDevice(10 * _N, is_stream_ordered=True)
    gate = Gate(device)
    slot = gate.reserve(_N)
    assert not gate.write(slot, pattern(_N, 1)).is_stream_ordered
    gate.open()
    assert gate.write(slot, pattern(_N, 1)).is_stream_ordered
    gate.close()


def test_a_test_can_wait_until_something_stands_at_the_gate() -> None:
    gate = Gate(MemoryBackend(_N))
    slot = gate.reserve(_N)
    thread = threading.Thread(target=gate.write, args=(slot, pattern(_N, 1)))
    thread.start()
    gate.wait_until_held(1)
    thread.join()
    with pytest.raises(TimeoutError, match="1 operations are held after 0 s, not 2"):
        gate.wait_until_held(2, timeout_s=0)
    gate.close()


def test_slow_does_everything_at_once_and_says_so_late() -> None:
    slow = Slow(MemoryBackend(_N), delays=[3])
    slot = slow.reserve(_N)
    write = slow.write(slot, pattern(_N, 1))
    into = torch.zeros(_N, dtype=torch.uint8)
    read = slow.read(slot, into)
    assert torch.equal(into, pattern(_N, 1))
    assert (write.is_done, read.is_done, slow.pending) == (False, False, 2)
    slow.advance(2)
    assert (write.is_done, read.is_done) == (True, False)
    slow.advance()
    assert read.is_done


def test_slow_completions_overtake_each_other() -> None:
    slow = Slow(MemoryBackend(2 * _N), delays=[5, 1])
    order: list[str] = []

    def note(name: str, completion: Completion) -> None:
        completion.add_done_callback(lambda _error: order.append(name))

    first, second = slow.reserve(_N), slow.reserve(_N)
    note("first", slow.write(first, pattern(_N, 1)))
    note("second", slow.write(second, pattern(_N, 2)))
    slow.drain()
    assert order == ["second", "first"]
    assert slow.pending == 0


def test_slow_makes_only_the_named_kinds_late() -> None:
    slow = Slow(MemoryBackend(_N), delays=[9], on={"free"})
    slot = slow.reserve(_N)
    assert slow.write(slot, pattern(_N, 1)).is_done
    free = slow.free(slot)
    assert not free.is_done
    slow.close()
    assert free.is_done


def test_slow_keeps_the_stream_order_of_what_it_wraps() -> None:
    slow = Slow(EmulatedDevice(10 * _N, is_stream_ordered=True), delays=[1])
    assert slow.write(slow.reserve(_N), pattern(_N, 1)).is_stream_ordered
    slow.close()


def test_wrappers_may_be_nested() -> None:
    gate = Gate(Slow(Faulty(MemoryBackend(_N), fail_at=2), delays=[1]))
    write = gate.write(gate.reserve(_N), pattern(_N, 1))
    gate.close()
    assert isinstance(write.error, BackendError)


def test_wrappers_resize_and_describe_what_they_wrap() -> None:
    for wrap in (Faulty, Gate, Slow):
        backend = wrap(MemoryBackend(0, is_durable=True))
        assert backend.capabilities.is_durable
        backend.resize(_N)
        backend.reserve(_N)
