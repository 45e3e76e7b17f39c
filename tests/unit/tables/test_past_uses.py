"""What left memory counts again when it comes back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierstore.tables.frames import FrameEvent, FrameTable
from tierstore.tables.past_uses import PastUses

_uses = st.dictionaries(
    st.integers(0, 2**50), st.tuples(st.integers(1, 9).map(float), st.integers(1, 99)), max_size=8
)


@given(st.lists(_uses, max_size=5), st.integers(1, 16))
def test_what_is_recalled_is_what_was_remembered_last_or_nothing(
    calls: list[dict[int, tuple[float, int]]], places: int
) -> None:
    past, model = PastUses(places), dict[int, tuple[float, int]]()
    for call in calls:
        who = np.array(list(call), dtype=np.int64)
        told = np.array([count for count, _ in call.values()])
        past.remember(who, told, np.array([moment for _, moment in call.values()], dtype=np.int64))
        model |= call
    every = np.array([*model, 2**51], dtype=np.int64)
    recalled = list(zip(*(each.tolist() for each in past.recall(every)), strict=True))
    assert recalled.pop() == (0, 0)
    assert all(found in ((0, 0), told) for found, told in zip(recalled, model.values(), strict=True))
    last = list(calls[-1]) if calls else []
    if len(last) == 1:  # nothing came after it in its place
        assert recalled[list(model).index(last[0])] == model[last[0]]


def test_with_enough_places_all_are_remembered() -> None:
    past, who = PastUses(1 << 12), np.arange(64)
    past.remember(who, (who + 1).astype(np.float64), who + 5)
    counts, used_at = past.recall(who[::-1])
    assert counts.tolist() == list(range(64, 0, -1))
    assert used_at.tolist() == list(range(68, 4, -1))


def test_what_came_back_often_outlives_what_was_used_as_often_since() -> None:
    table = FrameTable(2, "lfu")

    def visit(page: int) -> None:
        if table.free:
            frames = table.take(np.array([page]))
            table.step(FrameEvent.FILLED, frames)
        else:
            frames = np.flatnonzero(table.pages == page)
        table.use(frames)

    for stranger in range(10, 13):
        visit(1)
        visit(stranger)
        table.step(FrameEvent.FORGOTTEN, np.array([0, 1]))
    visit(1)  # once since it is here, but four times in all
    visit(10)
    visit(10)
    (victim,) = table.victims(1)
    assert table.pages[victim] == 10
