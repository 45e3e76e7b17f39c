"""What engines share: depth, order, quiet and end, against any sequence of what may happen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierstore.errors import BackendError, StoreClosed
from tierstore_backends.files.engines.base import Pace
from tierstore_backends.files.engines.fragment_queue import FragmentQueues
from tierstore_backends.files.engines.schedule import EngineOrder, MayBegin, Schedule
from tierstore_backends.files.io.io_request import Direction, FileSlot, Fragment, IoRequest, cut

PAGE = 4096
QUIET_S = 30


class ScheduleMachine(RuleBasedStateMachine):
    """The schedule against lists of what waits and what is in flight."""

    @initialize(depth=st.integers(1, 6))
    def open(self, depth: int) -> None:
        self.depth = depth
        self.time_s = 0.0
        self.moved_s = 0.0
        self.wakes = 0
        self.is_due = False
        self.is_closed = False
        self.next_page = 0
        self.requests: list[IoRequest] = []
        self.waiting: list[Fragment] = []
        self.flying: list[list[Fragment]] = []
        pace = Pace(depth=depth, tidy=self._tidy, quiet_s=QUIET_S)
        self.schedule = Schedule(FragmentQueues(4 * PAGE, 1 << 40), pace, self._wake, lambda: self.time_s)

    def _tidy(self) -> None:
        self.put(1, Direction.WRITE, is_near=False)
        with self.schedule.lock:
            assert self.schedule.next() is EngineOrder.WAIT, "nothing begins while it tidies"
            assert self.schedule.timeout_s is None

    def _wake(self) -> None:
        self.wakes += 1

    @rule(pages=st.integers(1, 5), direction=st.sampled_from(Direction), is_near=st.booleans())
    def put(self, pages: int, direction: Direction, *, is_near: bool) -> None:
        start = self.next_page + (not is_near)
        self.next_page = start + pages
        slot = FileSlot(pages * PAGE, ((start * PAGE, (start + pages) * PAGE),), None, PAGE)
        request = IoRequest(direction, [slot], [torch.zeros(pages * PAGE, dtype=torch.uint8)])
        fragments = cut(request, segment_bytes=1 << 40)
        before = self.wakes
        if self.is_closed:
            with pytest.raises(StoreClosed):
                self.schedule.put(fragments)
            return
        self.schedule.put(fragments)
        assert self.wakes == before + 1
        self.requests.append(request)
        self.waiting += fragments

    @rule()
    def take_what_there_is(self) -> None:
        flying = -1
        while flying < len(self.flying):
            flying = len(self.flying)
            self.ask(MayBegin.ANYTHING)

    @rule(may_begin=st.sampled_from(MayBegin))
    def ask(self, may_begin: MayBegin) -> None:
        before = self.wakes
        with self.schedule.lock:
            order = self.schedule.next(may_begin)
        reads = [each for each in self.waiting if each.transfer.direction is Direction.READ]
        allowed = {MayBegin.ANYTHING: self.waiting, MayBegin.READS: reads, MayBegin.NOTHING: []}[may_begin]
        room = self.depth - sum(map(len, self.flying))
        if isinstance(order, list):
            assert 0 < len(order) <= room
            assert all(each in allowed for each in order)
            assert (reads or self.waiting)[0] in order, "reads first, and the oldest first"
            self.waiting = [each for each in self.waiting if each not in order]
            self.flying.append(order)
            has_more = bool(self.waiting) and self.depth > sum(map(len, self.flying))
            assert (self.wakes > before) is has_more, "who takes wakes another one if something is left"
            return
        assert not (allowed and room > 0), "what may begin begins"
        is_idle = not self.waiting and not self.flying
        assert (order is EngineOrder.STOP) is (is_idle and self.is_closed)
        is_quiet = self.time_s - self.moved_s >= QUIET_S
        assert (order is EngineOrder.TIDY) is (is_idle and not self.is_closed and self.is_due and is_quiet)
        if order is EngineOrder.TIDY:
            self.is_due = False
            self.schedule.tidy_now()

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        batch = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        self.moved_s = self.time_s
        self.schedule.end(batch)

    @rule()
    def be_untidy(self) -> None:
        self.schedule.tidy_when_quiet()
        self.is_due = self.is_due or not self.is_closed

    @rule(seconds=st.sampled_from([1, QUIET_S - 1, QUIET_S]))
    def pass_time(self, seconds: int) -> None:
        self.time_s += seconds

    @rule(chance=st.integers(0, 9))
    def close(self, chance: int) -> None:
        if chance:  # what is closed is soon at its end
            return
        self.schedule.close()
        self.is_closed = True

    @invariant()
    def transfers_end_with_their_last_fragment(self) -> None:
        left = {
            id(each.transfer) for each in [*self.waiting, *(each for batch in self.flying for each in batch)]
        }
        for request in self.requests:
            assert request.completion.is_done is (id(request) not in left)

    @invariant()
    def whoever_waits_looks_again_in_time(self) -> None:
        with self.schedule.lock:
            timeout_s = self.schedule.timeout_s
        assert timeout_s == (QUIET_S if self.is_due and not self.flying else None)

    def teardown(self) -> None:
        """Move what is left: nothing is forgotten."""
        if not hasattr(self, "schedule"):
            return
        self.close(0)
        while self.waiting or self.flying:
            while self.flying:
                self.schedule.end(self.flying.pop())
            self.ask(MayBegin.ANYTHING)
        self.ask(MayBegin.ANYTHING)
        self.transfers_end_with_their_last_fragment()


TestSchedule = ScheduleMachine.TestCase


def write(start: int) -> list[Fragment]:
    """Return the fragment of a write of one page."""
    slot = FileSlot(PAGE, ((start * PAGE, (start + 1) * PAGE),), None, PAGE)
    request = IoRequest(Direction.WRITE, [slot], [torch.zeros(PAGE, dtype=torch.uint8)])
    return cut(request, segment_bytes=1 << 40)


def test_what_breaks_off_gives_back_all_that_waits_once() -> None:
    schedule = Schedule(
        FragmentQueues(4 * PAGE, 1 << 40), Pace(depth=1, tidy=lambda: None, quiet_s=0), lambda: None
    )
    writes = [write(start) for start in (0, 10, 11)]
    for fragments in writes:
        schedule.put(fragments)
    requests = [each.transfer for fragments in writes for each in fragments]
    for batch in schedule.break_off(lambda: BackendError("it broke")):
        schedule.end(batch)
    assert [request.remaining for request in requests] == [0, 0, 0]
    with pytest.raises(BackendError, match="it broke"):
        schedule.put(write(20))
    with schedule.lock:
        assert schedule.next() is EngineOrder.STOP


def test_nothing_begins_while_it_tidies_and_what_came_meanwhile_moves_then() -> None:
    orders: list[object] = []

    def tidy() -> None:
        schedule.put(write(0))
        with schedule.lock:
            orders.append(schedule.next())

    schedule = Schedule(FragmentQueues(PAGE, 1 << 40), Pace(depth=1, tidy=tidy, quiet_s=0), lambda: None)
    schedule.tidy_when_quiet()
    with schedule.lock:
        assert schedule.next() is EngineOrder.TIDY
    schedule.tidy_now()
    with schedule.lock:
        assert isinstance(schedule.next(), list)
    assert orders == [EngineOrder.WAIT]


def test_what_fails_while_it_tidies_lets_the_next_batch_begin() -> None:
    def tidy() -> None:
        raise MemoryError

    schedule = Schedule(FragmentQueues(PAGE, 1 << 40), Pace(depth=1, tidy=tidy, quiet_s=0), lambda: None)
    schedule.tidy_when_quiet()
    with schedule.lock:
        assert schedule.next() is EngineOrder.TIDY
    schedule.tidy_now()
    schedule.put(write(0))
    with schedule.lock:
        assert isinstance(schedule.next(), list)
