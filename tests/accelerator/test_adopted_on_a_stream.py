"""Memory that a tier adopts was written by the caller's stream, whichever thread tells the backend."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

import tierstore as ts
from tests.accelerator import DEVICE, held
from tierstore.engine.given import Given
from tierstore.engine.mover import DataMover
from tierstore.units import MIB


def test_what_another_thread_adopts_is_read_when_the_caller_s_stream_has_written_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any thread of a store may carry out what a call asks for, such as the one in which a copy ends."""
    reserve = DataMover.reserve

    def elsewhere(self: DataMover, command: object, given: Given | None = None) -> object:
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(reserve(self, command, given)))  # type: ignore[arg-type]
        thread.start()
        thread.join()
        return found[0]

    monkeypatch.setattr(DataMover, "reserve", elsewhere)
    config = ts.StoreConfig.default(
        "openreg", 4 * MIB, offload_cpu_size=16 * MIB, offload_disk_size=0, host_mem_block_size=MIB
    )
    side = torch.Stream(DEVICE)
    with ts.Store(config) as store:
        value = torch.zeros(1000, device=DEVICE)
        torch.accelerator.synchronize()
        with contextlib.ExitStack() as stack:
            stack.enter_context(held(side))
            with side:
                value.fill_(7)
                store.adopt("k", value)
            threading.Timer(0.2, stack.close).start()  # whoever waits for the stream goes on then
            store.evict("k", to="host").result()
        with store.lease("k", tier="host") as lease:
            assert torch.equal(lease.tensor, torch.full((1000,), 7.0))
