"""Operations are tried again: which, how often, after how long, and how they end."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.virtual_timer import S, VirtualTimer
from tierstore.errors import BackendError, CapacityError, ConfigError, IntegrityError, StoreClosed, UsageError
from tierstore.spi import Backend, Buffer, Completion, PartialError, Record, Slot
from tierstore.testing.batching import Batching
from tierstore.testing.conformance import contents, pattern, stored, succeed
from tierstore.testing.faults import Faulty, Gate, Operation, from_nth_on
from tierstore.wrappers.retrying import LONGEST_WAIT_S, Retrying, RetryStats, is_transient
from tierstore_backends.memory import MemoryBackend

AWAY = BackendError("the server is away", transient=True)
KINDS: tuple[Operation, ...] = ("read", "write", "free", "commit")


def disk() -> MemoryBackend:
    return MemoryBackend(1_000_000, is_storage=True, is_durable=True)


def retrying(backend: Backend, retries: int = 3) -> tuple[Retrying, VirtualTimer]:
    timer = VirtualTimer()
    return Retrying(backend, retries, tier="disk", timer=timer, chance=lambda: 0.0), timer


def operation(backend: Retrying, kind: Operation, slot: Slot) -> Callable[[], Completion]:
    """Return an operation of one kind on a slot of 10 bytes that is written."""
    return {
        "read": lambda: backend.read(slot, torch.zeros(10, dtype=torch.uint8)),
        "write": lambda: backend.write(slot, pattern(10, 1)),
        "free": lambda: backend.free(slot),
        "commit": lambda: backend.commit([Record("k", "", slot)]),
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failures", range(5))
def test_an_operation_works_if_one_of_its_tries_does(kind: Operation, failures: int) -> None:
    faulty = Faulty(disk(), error=AWAY)
    backend, timer = retrying(faulty, retries=3)
    slot = stored(backend, pattern(10, 1))
    faulty._on, faulty._fail_at = (
        frozenset([kind]),
        range(faulty.operations + 1, faulty.operations + 1 + failures),
    )
    ended = operation(backend, kind, slot)()
    timer.run_out()
    assert ended.is_done
    assert (ended.error is None) is (failures <= 3)
    assert faulty.failures == min(failures, 4)
    assert backend.stats == RetryStats(
        retries=min(failures, 3), recovered=0 < failures <= 3, given_up=failures > 3
    )


def test_what_was_read_in_a_later_try_is_what_was_written() -> None:
    faulty = Faulty(disk(), error=AWAY, on=["read"], fail_at=[1, 2])
    backend, timer = retrying(faulty)
    slot, into = stored(backend, pattern(10, 1)), torch.zeros(10, dtype=torch.uint8)
    read = backend.read(slot, into)
    timer.run_out()
    assert (read.error, into.equal(pattern(10, 1))) == (None, True)


def test_tries_are_ever_further_apart_up_to_a_limit() -> None:
    backend, timer = retrying(Faulty(disk(), error=AWAY, on=["write"], fail_at=from_nth_on(1)), retries=10)
    backend.write(backend.reserve(10), pattern(10, 1))
    waits: list[int] = []
    while timer.calls:
        waits.append(timer.calls[0][0] - timer.time_ns)
        timer.advance(timer.calls[0][0])
    assert waits == [int(min(0.1 * 2.0**n, LONGEST_WAIT_S) * S) for n in range(10)]


def test_chance_only_makes_a_wait_shorter_and_by_no_more_than_a_half() -> None:
    timer = VirtualTimer()
    chances = iter([1.0, 0.5])
    faulty = Faulty(disk(), error=AWAY, on=["write"], fail_at=[1, 2])
    backend = Retrying(faulty, 2, first_wait_s=1.0, timer=timer, chance=lambda: next(chances))
    backend.write(backend.reserve(10), pattern(10, 1))
    assert timer.calls[0][0] == S // 2
    timer.advance(S // 2)
    assert timer.calls[0][0] == S // 2 + 2 * S * 3 // 4


PASSING = [
    AWAY,
    *(OSError(code, "") for code in (errno.EAGAIN, errno.ETIMEDOUT)),
    TimeoutError(),
    ConnectionResetError(),
]
STAYING = [
    BackendError("a sector is gone"),
    IntegrityError("other bytes", transient=True),
    CapacityError("full"),
    UsageError("not so"),
    StoreClosed("too late"),
    *(
        OSError(code, "")
        for code in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS, errno.EBADF)
    ),
    ValueError(),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize("error", STAYING, ids=repr)
@pytest.mark.parametrize("raises", [True, False])
def test_what_does_not_pass_is_told_at_once_as_it_is(error: Exception, *, raises: bool) -> None:
    class Failing(MemoryBackend):
        tries = 0

        def write(self, slot: Slot, source: Buffer) -> Completion:
            self.tries += 1
            if raises:
                raise error
            return Completion.done(error)

    within = Failing(100, is_storage=True)
    backend, timer = retrying(within)
    slot = backend.reserve(10)
    if raises:
        with pytest.raises(type(error)):
            backend.write(slot, pattern(10, 1))
    else:
        assert backend.write(slot, pattern(10, 1)).error is error
    assert (within.tries, timer.calls) == (1, [])


def test_a_failure_that_stays_ends_the_tries() -> None:
    class Dying(MemoryBackend):
        errors: ClassVar[list[BackendError]] = [AWAY, AWAY, BackendError("the disk is dead")]

        def write(self, slot: Slot, source: Buffer) -> Completion:
            return Completion.done(self.errors.pop(0))

    backend, timer = retrying(Dying(100, is_storage=True))
    ended = backend.write(backend.reserve(10), pattern(10, 1))
    timer.run_out()
    assert str(ended.error) == "the disk is dead"
    assert backend.stats == RetryStats(retries=2, given_up=1)


def test_giving_up_says_how_often_it_was_tried_and_why() -> None:
    backend, timer = retrying(Faulty(disk(), error=AWAY, on=["write"], fail_at=from_nth_on(1)), retries=2)
    ended = backend.write(backend.reserve(10), pattern(10, 1))
    timer.run_out()
    assert isinstance(ended.error, BackendError)
    assert str(ended.error) == "the server is away (tried 3 times)"
    assert ended.error.__cause__ is AWAY
    assert ended.error.transient


class Planned(MemoryBackend):
    """Slots that fail so often, for a reason that passes or that stays; each by its position."""

    def __init__(self, plan: Sequence[tuple[int, bool]]) -> None:
        super().__init__(1000, is_storage=True)
        self.plan = plan
        self.armed: list[Slot] = []
        self.moves = [0] * len(plan)

    def fault(self, slot: Slot) -> BackendError | None:
        if not self.armed:
            return None
        position = self.armed.index(slot)
        failures, may_pass = self.plan[position]
        self.moves[position] += 1
        return BackendError("planned", transient=may_pass) if self.moves[position] <= failures else None

    def read(self, slot: Slot, into: Buffer) -> Completion:
        error = self.fault(slot)
        return super().read(slot, into) if error is None else Completion.done(error)

    def write(self, slot: Slot, source: Buffer) -> Completion:
        error = self.fault(slot)
        return super().write(slot, source) if error is None else Completion.done(error)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=8),
    st.integers(0, 4),
    st.booleans(),
)
def test_of_a_batch_only_the_slots_that_failed_are_moved_again(
    plan: list[tuple[int, bool]], retries: int, is_read: bool
) -> None:
    """Each slot fails so often, for a reason that passes or that stays."""
    within = Planned(plan)
    backend, timer = retrying(Batching(within), retries)
    slots: list[Slot] = []
    slots += [stored(backend, pattern(10, seed)) for seed in range(len(plan))]
    within.armed = slots
    buffers = [pattern(10, 50 + seed) for seed in range(len(plan))]
    ended = (backend.read_many if is_read else backend.write_many)(slots, buffers)
    timer.run_out()
    tries = [1 + (retries if may_pass else 0) for _, may_pass in plan]
    fails = {i for i, (failures, _) in enumerate(plan) if failures >= tries[i]}
    assert ended.is_done
    assert (set(ended.error.errors) if isinstance(ended.error, PartialError) else set()) == fails
    assert (ended.error is None) is (not fails)
    assert within.moves == [min(failures + 1, most) for (failures, _), most in zip(plan, tries, strict=True)]
    within.armed = []
    whole = [i for i in range(len(plan)) if i not in fails]
    assert all(contents(backend, slots[i]).equal(buffers[i]) for i in whole)


class PlannedParts(MemoryBackend):
    """Parts of ten bytes that fail so often, for a reason that passes or that stays; each by its position."""

    def __init__(self, plan: Sequence[tuple[int, bool]]) -> None:
        super().__init__(1000, is_storage=True)
        self.plan = plan
        self.moves = [0] * len(plan)

    def read_parts(
        self, slots: Sequence[Slot], begins: Sequence[int], nbytes: int, into: Buffer
    ) -> Completion:
        (begin,) = begins
        position = begin // 10
        failures, may_pass = self.plan[position]
        self.moves[position] += 1
        if self.moves[position] <= failures:
            return Completion.done(BackendError("planned", transient=may_pass))
        return super().read_parts(slots, begins, nbytes, into)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=9), st.integers(0, 4))
def test_of_parts_only_those_that_failed_are_read_again(plan: list[tuple[int, bool]], retries: int) -> None:
    """Each comes to its own place, in whatever try."""
    within = PlannedParts(plan)
    backend, timer = retrying(Batching(within), retries)
    count, source = len(plan), pattern(10 * len(plan), 1)
    slot, into = stored(backend, source), torch.zeros(10 * len(plan), dtype=torch.uint8)
    ended = backend.read_parts([slot] * count, range(0, 10 * count, 10), 10, into)
    timer.run_out()
    tries = [1 + (retries if may_pass else 0) for _, may_pass in plan]
    fails = {i for i, (failures, _) in enumerate(plan) if failures >= tries[i]}
    assert ended.is_done
    assert (set(ended.error.errors) if isinstance(ended.error, PartialError) else set()) == fails
    assert (ended.error is None) is (not fails)
    assert within.moves == [min(failures + 1, most) for (failures, _), most in zip(plan, tries, strict=True)]
    expected = source.view(-1, 10).clone()
    expected[sorted(fails)] = 0
    assert into.view(-1, 10).equal(expected)


def test_parts_that_fail_together_are_read_again_together() -> None:
    faulty = Faulty(disk(), error=AWAY, on=["read"], fail_at=[1, 2])
    backend, timer = retrying(faulty)
    slot, into = stored(backend, pattern(40, 1)), torch.zeros(20, dtype=torch.uint8)
    read = backend.read_parts([slot, slot], [30, 5], 10, into)
    timer.run_out()
    assert (read.error, faulty.operations) == (None, 3)
    assert into.equal(torch.cat([pattern(40, 1)[30:], pattern(40, 1)[5:15]]))


def test_a_batch_that_fails_as_a_whole_is_tried_again_as_a_whole() -> None:
    faulty = Faulty(Batching(disk()), error=AWAY, on=["write"], fail_at=1)
    backend, timer = retrying(faulty)
    slots = [backend.reserve(10) for _ in range(3)]
    ended = backend.write_many(slots, [pattern(10, seed) for seed in range(3)])
    assert not ended.is_done
    timer.run_out()
    assert ended.error is None
    assert [contents(backend, slot).equal(pattern(10, seed)) for seed, slot in enumerate(slots)] == [True] * 3


@pytest.mark.parametrize("end", [Retrying.stop_waiting, Retrying.close])
def test_what_waits_for_a_try_ends_at_once_with_its_error(end: Callable[[Retrying], None]) -> None:
    faulty = Faulty(disk(), error=AWAY, on=["write"], fail_at=from_nth_on(1))
    backend, timer = retrying(faulty)
    waiting = [backend.write(backend.reserve(10), pattern(10, 1)) for _ in range(3)]
    assert not any(each.is_done for each in waiting)
    end(backend)
    assert [each.error for each in waiting] == [AWAY] * 3
    timer.run_out()
    assert faulty.operations == 3, "nothing is tried again"


def test_nothing_is_tried_again_after_that() -> None:
    faulty = Faulty(disk(), error=AWAY, on=["write"], fail_at=from_nth_on(1))
    backend, timer = retrying(faulty)
    backend.stop_waiting()
    assert backend.write(backend.reserve(10), pattern(10, 1)).error is AWAY
    assert timer.calls == []


def test_buffers_are_held_until_the_end_and_no_longer() -> None:
    gate = Gate(disk())
    faulty = Faulty(gate, error=AWAY, on=["write"], fail_at=1)
    backend, timer = retrying(faulty)
    source = pattern(10, 1)
    ended = backend.write(backend.reserve(10), source)
    timer.run_out()
    assert (gate.held, ended.is_done) == (1, False)
    gate.open()
    assert ended.error is None


def test_one_line_says_that_there_is_trouble_and_one_that_it_was_too_much(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend, timer = retrying(Faulty(disk(), error=AWAY, on=["write"], fail_at=range(1, 7)), retries=1)
    with caplog.at_level(logging.WARNING, "tierstore"):
        for _ in range(3):
            backend.write(backend.reserve(10), pattern(10, 1))
        assert [record.message for record in caplog.records] == [
            "tier 'disk': a write failed and is tried again in 0.10 s (1 of 1): the server is away"
        ]
        caplog.clear()
        timer.run_out()
    assert [record.message for record in caplog.records] == ["tier 'disk': a write failed in 2 tries"] * 3


def test_an_end_that_comes_while_a_try_is_put_off_ends_it_once() -> None:
    class ClosedMeanwhile(VirtualTimer):
        def at(self, due_ns: int, call: Callable[[], None]) -> None:
            backend.stop_waiting()
            raise StoreClosed("too late")

    faulty = Faulty(disk(), error=AWAY, on=["write"], fail_at=1)
    backend = Retrying(faulty, 3, timer=ClosedMeanwhile())
    assert backend.write(backend.reserve(10), pattern(10, 1)).error is AWAY


def test_a_timer_that_cannot_be_had_ends_the_tries() -> None:
    class Exhausted(VirtualTimer):
        def at(self, due_ns: int, call: Callable[[], None]) -> None:
            raise RuntimeError("can't start new thread")

    backend = Retrying(Faulty(disk(), error=AWAY, on=["write"], fail_at=1), 3, timer=Exhausted())
    assert backend.write(backend.reserve(10), pattern(10, 1)).error is AWAY


def test_room_that_is_not_there_is_not_waited_for() -> None:
    faulty = Faulty(disk(), error=AWAY, on=["reserve"], fail_at=1)
    backend, timer = retrying(faulty)
    with pytest.raises(BackendError, match="away"):
        backend.reserve(10)
    assert timer.calls == []


def test_bytes_that_are_used_where_they_lie_have_no_retries() -> None:
    with pytest.raises(ConfigError, match="used where they lie"):
        Retrying(MemoryBackend(10), 3)


def test_a_callback_of_what_was_tried_again_cannot_close_the_backend() -> None:
    has_callback = threading.Event()

    class Patient(MemoryBackend):
        def write(self, slot: Slot, source: Buffer) -> Completion:
            assert has_callback.wait(30)
            return super().write(slot, source)

    faulty = Faulty(Patient(100, is_storage=True), error=AWAY, on=["write"], fail_at=1)
    backend = Retrying(faulty, 1, first_wait_s=0.001)
    refused: list[BaseException] = []

    def close(error: BaseException | None) -> None:
        try:
            backend.close()
        except UsageError as refusal:
            refused.append(refusal)

    ended = backend.write(backend.reserve(10), pattern(10, 1))
    ended.add_done_callback(close)
    has_callback.set()
    succeed(ended)
    backend.close()
    assert [str(each) for each in refused] == ["a backend cannot be closed from a completion's callback"]


def test_real_time_passes_and_every_thread_ends() -> None:
    faulty = Faulty(disk(), error=AWAY, on=["write"], fail_at=[1, 2])
    backend = Retrying(faulty, 2, first_wait_s=0.001)
    succeed(backend.write(backend.reserve(10), pattern(10, 1)))
    backend.close()
    backend.close()
