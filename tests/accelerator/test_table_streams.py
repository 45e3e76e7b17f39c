"""Hot rows of a table on two streams, neither of which a program has ordered behind the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.accelerator import DEVICE, held
from tests.row_carriers import device_home
from tierstore.tables import NormalRows, RowStore
from tierstore.tables.device_link import DeviceLink

_WIDTH = 4
_HELD_S = 0.2


@contextlib.contextmanager
def _stands_still_before_slots_are_written(monkeypatch: pytest.MonkeyPatch) -> Iterator[contextlib.ExitStack]:
    """Let the current stream be held as soon as the places of slots are there, until the stack is closed."""
    bring_places, stack = DeviceLink.bring_places, contextlib.ExitStack()

    def hold(self: DeviceLink, *places: object) -> tuple[torch.Tensor, ...]:
        found = bring_places(self, *places)  # type: ignore[arg-type]
        stack.enter_context(held(torch.accelerator.current_stream()))
        return found

    with stack:
        monkeypatch.setattr(DeviceLink, "bring_places", hold)
        yield stack


def _table(slots: int) -> RowStore:
    """Return a table whose first pages are in memory."""
    table = RowStore(1000, _WIDTH, torch.float32, NormalRows(_WIDTH, torch.float32, 5), name="deep")
    list(table.visit(torch.arange(500)))
    table.attach_device(device_home(slots, _WIDTH)[0])
    torch.accelerator.synchronize()
    return table


def test_rows_that_another_stream_has_prefetched_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    table, ids, side = _table(16), torch.arange(8), torch.Stream(DEVICE)
    with _stands_still_before_slots_are_written(monkeypatch) as stack:
        with side:
            table.prefetch(ids)
        monkeypatch.undo()
        threading.Timer(_HELD_S, stack.close).start()  # whoever waits goes on then
        found = table.gather(ids, is_lookup=True)["rows"]
        assert torch.equal(found.cpu(), table.initial_rows(ids))
    cache = table.stats().cache
    assert cache is not None
    assert cache.hits == 8


@pytest.mark.parametrize("ends", [RowStore.detach_device, RowStore.close])
def test_memory_is_given_back_behind_what_another_stream_does_with_it(
    ends: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, side = _table(16), torch.Stream(DEVICE)
    with _stands_still_before_slots_are_written(monkeypatch) as stack:
        with side:
            table.prefetch(torch.arange(8))
        written = side.record_event()
        assert callable(ends)
        ends(table)
        given_back = torch.accelerator.current_stream().record_event()
        threading.Timer(_HELD_S, stack.close).start()
        given_back.synchronize()
        assert written.query()
