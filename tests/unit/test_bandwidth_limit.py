"""A tier's bandwidth is limited: what waits, in what order, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from tests.virtual_timer import S, VirtualTimer
from tierstore.errors import BackendError, ConfigError, StoreClosed
from tierstore.spi import Buffer, Completion, Slot
from tierstore.testing.batching import Batching
from tierstore.testing.conformance import contents, pattern, stored, succeed
from tierstore.testing.faults import Faulty
from tierstore.wrappers.bandwidth import BandwidthLimited, BandwidthStats
from tierstore_backends.memory import MemoryBackend

RATE = 1_000  # bytes a second, so a burst is 50 bytes


def disk() -> MemoryBackend:
    return MemoryBackend(1_000_000, is_storage=True)


def limited(
    rates: int | tuple[int | None, int | None] = RATE,
) -> tuple[BandwidthLimited, VirtualTimer, Callable[[int], Slot]]:
    """Return a limited backend, its time, and what reserves a slot."""
    timer = VirtualTimer()
    backend = BandwidthLimited(disk(), rates, timer=timer)
    return backend, timer, backend.reserve


def blank(nbytes: int) -> Buffer:
    return torch.zeros(nbytes, dtype=torch.uint8)


def write(backend: BandwidthLimited, nbytes: int) -> Completion:
    return backend.write(backend.reserve(nbytes), blank(nbytes))


def test_a_burst_begins_at_once_and_the_rest_at_the_rate() -> None:
    backend, timer, _ = limited()
    assert write(backend, 50).is_done
    first, second = write(backend, 100), write(backend, 100)
    timer.advance(S // 10 - 1)
    assert not first.is_done
    timer.advance(S // 10)
    assert (first.is_done, second.is_done) == (True, False)
    timer.advance(S // 5)
    assert second.is_done
    assert backend.stats == BandwidthStats(RATE, delayed=2, wait_seconds=0.1 + 0.2)


def test_both_directions_share_one_number_and_reads_go_first() -> None:
    backend, timer, _ = limited()
    slot = backend.reserve(50)
    assert backend.write(slot, blank(50)).is_done
    wrote, read = write(backend, 100), backend.read(slot, blank(50))
    timer.advance(S // 20)
    assert (wrote.is_done, read.is_done) == (False, True)
    timer.advance(S // 20 + S // 10)
    assert wrote.is_done


@pytest.mark.parametrize("rates", [(None, RATE), (RATE, None), (RATE, RATE)])
def test_each_direction_may_have_a_number_of_its_own_or_none(rates: tuple[int | None, int | None]) -> None:
    backend, timer, _ = limited(rates)
    slot = backend.reserve(200)
    wrote = backend.write(slot, blank(200))
    assert wrote.is_done is (rates[1] is None)
    timer.advance(S)
    assert wrote.is_done
    read = backend.read(slot, blank(200))
    assert read.is_done is (rates[0] is None)
    timer.advance(2 * S)
    assert read.is_done


def test_who_goes_before_a_write_that_waits_costs_a_call_of_the_timer_each() -> None:
    backend, timer, _ = limited()
    calls = 0

    def counted(due_ns: int, call: Callable[[], None]) -> None:
        def called() -> None:
            nonlocal calls
            calls += 1
            call()

        at(due_ns, called)

    at, timer.at = timer.at, counted  # type: ignore[method-assign]
    slot = backend.reserve(10)
    backend.write(slot, blank(10))
    write(backend, 1_000)
    wrote, reads = write(backend, 10_000), 400
    for number in range(reads):
        read = backend.read(slot, blank(10))
        timer.advance(number * S // 100)
    timer.advance(100 * S)
    assert (read.is_done, wrote.is_done) == (True, True)
    assert calls < 3 * reads


def test_room_is_given_and_taken_back_without_waiting() -> None:
    backend, _, _ = limited()
    write(backend, 1_000)
    slot = backend.reserve(100)
    assert backend.free(slot).is_done


def test_a_batch_counts_all_its_bytes_and_begins_as_one() -> None:
    timer = VirtualTimer()
    within = Batching(disk())
    backend = BandwidthLimited(within, RATE, timer=timer)
    slots = [backend.reserve(25) for _ in range(4)]
    moved = backend.write_many(slots, [blank(25)] * 4)
    assert within.batches == []
    timer.advance(S // 20 - 1)
    assert within.batches == []
    timer.advance(S // 20)
    assert within.batches == [4]
    assert moved.is_done


@pytest.mark.parametrize("end", [BandwidthLimited.stop_waiting, BandwidthLimited.close])
def test_what_waits_fails_at_once_when_the_store_closes(end: Callable[[BandwidthLimited], None]) -> None:
    backend, timer, _ = limited()
    slot = backend.reserve(50)
    backend.write(slot, blank(50))
    waiting: Sequence[Completion] = [write(backend, 10_000), backend.read(slot, blank(50))]
    end(backend)
    assert all(isinstance(each.error, StoreClosed) for each in waiting)
    timer.run_out()  # whatever it still calls begins nothing


def test_nothing_waits_any_more_after_that() -> None:
    backend, _, _ = limited()
    write(backend, 50)
    backend.stop_waiting()
    assert isinstance(write(backend, 50).error, StoreClosed)
    assert backend.free(backend.reserve(1)).is_done


def test_an_operation_that_fails_when_it_begins_fails_alone() -> None:
    timer = VirtualTimer()
    faulty = Faulty(disk(), on=["write"], fail_at=2)
    backend = BandwidthLimited(faulty, RATE, timer=timer)
    write(backend, 50)
    failing, fine = write(backend, 50), write(backend, 50)
    timer.run_out()
    assert isinstance(failing.error, BackendError)
    assert (fine.is_done, fine.error) == (True, None)


def test_a_device_s_memory_is_not_reached_past_the_caller_s_thread() -> None:
    within = disk()
    within.capabilities = replace(within.capabilities, has_direct_paths=True)
    backend = BandwidthLimited(within, RATE, timer=VirtualTimer())
    assert not backend.capabilities.has_direct_paths
    assert backend.capabilities.has_waits


@pytest.mark.parametrize("backend", [MemoryBackend(10)], ids=["host"])
def test_bytes_that_are_used_where_they_lie_cannot_be_limited(backend: MemoryBackend) -> None:
    with pytest.raises(ConfigError, match="used where they lie"):
        BandwidthLimited(backend, RATE)


def test_real_time_lets_everything_through_and_every_thread_ends() -> None:
    backend = BandwidthLimited(disk(), 50_000_000)
    sources = [pattern(1_000_000, seed) for seed in range(4)]
    assert len(sources) == 4
    slot = stored(backend, sources[0][:500_000])
    for source in sources[1:]:
        succeed(backend.write(slot, source[:500_000]))
    assert torch.equal(contents(backend, slot), sources[-1][:500_000])
    backend.close()
    backend.close()
