"""The life of frames: every step that there is, and who goes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import InvariantError
from tierstore.tables.frames import FORESIGHT, STEPS, FrameEvent, FrameState, FrameTable

_E, _S = FrameEvent, FrameState

_WAYS = {  # to a state, from FREE
    _S.FREE: [],
    _S.FILLING: [_E.TAKEN],
    _S.CLEAN: [_E.TAKEN, _E.FILLED],
    _S.DIRTY: [_E.TAKEN, _E.FILLED, _E.CHANGED],
    _S.WRITING: [_E.TAKEN, _E.FILLED, _E.CHANGED, _E.WRITE_BEGUN],
    _S.OVERTAKEN: [_E.TAKEN, _E.FILLED, _E.CHANGED, _E.WRITE_BEGUN, _E.CHANGED],
}


def _in(state: FrameState) -> FrameTable:
    """Return a table whose frame 0, of page 7, is in a state."""
    table = FrameTable(2)
    for event in _WAYS[state]:
        if event is _E.TAKEN:
            assert table.take(np.array([7])).tolist() == [0]
        else:
            table.step(event, np.array([0]))
    return table


def _filled(frames: int, policy: str = "lru") -> FrameTable:
    table = FrameTable(frames, "lru" if policy == "lru" else "lfu")
    table.step(_E.FILLED, table.take(np.arange(frames)))
    return table


def _frames(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


@pytest.mark.parametrize(("event", "state"), list(itertools.product(_E, _S)))
def test_what_happens_to_a_frame_is_what_the_table_says(event: FrameEvent, state: FrameState) -> None:
    table, free = _in(state), 2 - bool(_WAYS[state])
    after = STEPS[event].get(state)
    if event is _E.TAKEN:
        return  # by `take` alone
    if after is None:
        with pytest.raises(
            InvariantError, match=f"frame 0 of page .* is {state.name} and cannot be {event.name}"
        ):
            table.step(event, _frames(0))
        assert (table.states[0], table.free) == (state, free)
    else:
        table.step(event, _frames(0))
        assert table.states[0] == after
        assert table.free == (2 if after is _S.FREE else 1)


def test_bytes_that_are_nowhere_else_are_never_forgotten() -> None:
    assert set(STEPS[_E.FORGOTTEN]) == {_S.CLEAN}
    assert {after for steps in STEPS.values() for after in steps.values()} == set(_S)


def test_one_wrong_step_among_many_changes_nothing() -> None:
    table = _filled(4)
    table.step(_E.CHANGED, _frames(2))
    with pytest.raises(InvariantError, match="likewise 1 of 4 frames"):
        table.step(_E.FORGOTTEN, _frames(0, 1, 2, 3))
    assert table.free == 0


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(1, 9))
def test_frames_are_given_once_each(sizes: list[int], more: int) -> None:
    table, given_frames = FrameTable(3), list[int]()
    for size in sizes:
        if size > table.free:
            table.enlarge(len(table) + more)
        if size <= table.free:
            given_frames += table.take(np.arange(size)).tolist()
    assert len(set(given_frames)) == len(given_frames)
    assert table.free == len(table) - len(given_frames)
    rest = table.take(np.arange(table.free)).tolist()
    assert sorted(given_frames + rest) == list(range(len(table)))


def test_what_was_used_least_recently_goes_first() -> None:
    table = _filled(8)
    for frame in (3, 1, 0, 2, 7, 6, 5, 4, 3):
        table.use(_frames(frame))
    gone = []
    for _ in range(8):
        (victim,) = table.victims(1).tolist()
        table.step(_E.FORGOTTEN, _frames(victim))
        gone.append(victim)
    assert gone == [1, 0, 2, 7, 6, 5, 4, 3]


def test_what_was_used_least_often_of_late_goes_first() -> None:
    table = _filled(3, "lfu")
    for _ in range(10):
        table.use(_frames(0))
    for _ in range(3):
        table.use(_frames(1))
    table.use(_frames(2))
    assert table.victims(1).tolist() == [2]
    table.step(_E.FORGOTTEN, _frames(2))
    for _ in range(900):  # half-lives enough for ten uses to be less than three
        table.use(_frames())
    for _ in range(3):
        table.use(_frames(1))
    assert table.victims(1).tolist() == [0]


def test_a_victim_that_is_used_meanwhile_stays() -> None:
    table = _filled(64)
    table.use(_frames(*range(64)))
    first = table.victims(1)  # four are chosen at once
    table.step(_E.FORGOTTEN, first)
    table.use(_frames(*range(32)))
    table.hold(_frames(40))
    table.keep(_frames(41))
    while len(victims := table.victims(1)):
        assert table.states[victims[0]] == _S.CLEAN
        table.step(_E.FORGOTTEN, victims)
        if table.free == 30:
            assert (table.states[[40, 41]] == _S.CLEAN).all()
            assert (table.states[:32] == _S.CLEAN).sum() >= 31
    assert table.are_in(_S.CLEAN).tolist() == [40, 41]
    assert table.victims(9, kept_too=True).tolist() == [41]


def test_what_is_on_its_way_is_no_victim() -> None:
    table = _filled(4)
    table.step(_E.CHANGED, _frames(0, 1, 2))
    table.step(_E.WRITE_BEGUN, _frames(1, 2))
    table.step(_E.CHANGED, _frames(2))
    assert sorted(table.victims(4).tolist()) == [0, 3]


def test_without_a_log_only_clean_frames_go() -> None:
    table = FrameTable(4, can_write=False)
    table.step(_E.FILLED, table.take(np.arange(4)))
    table.step(_E.CHANGED, _frames(0, 1))
    assert sorted(table.victims(4).tolist()) == [2, 3]


def test_what_was_prefetched_and_then_used_goes_like_others() -> None:
    table = _filled(2)
    table.keep(_frames(0))
    table.use(_frames(0))
    table.use(_frames(1))
    assert table.victims(1).tolist() == [0]


def test_a_prefetch_that_nobody_came_for_is_forgotten() -> None:
    table = _filled(2)
    table.begin_prefetch()
    table.keep(_frames(0))
    for _ in range(FORESIGHT - 1):
        table.begin_prefetch()
    assert table.victims(2).tolist() == [1]
    table.begin_prefetch()
    assert sorted(table.victims(2).tolist()) == [0, 1]


def test_a_prefetch_was_for_nothing_once_a_much_later_one_is_used() -> None:
    table = _filled(6)
    for frame in range(5):
        table.begin_prefetch()
        table.keep(_frames(frame))
    table.keep(_frames(3))  # the last one names it, too
    table.use(_frames(2, 3))
    assert sorted(table.victims(6).tolist()) == [2, 5], "the first two may still be used, 3 once more"
    table.use(_frames(3, 4))
    assert sorted(table.victims(6).tolist()) == [0, 2, 3, 4, 5]
