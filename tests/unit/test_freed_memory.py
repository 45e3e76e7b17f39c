"""Memory that is free is returned when much of it is, and as the next steps begin; what is resident tells."""

from __future__ import annotations

import pytest

from tests.forked import run_python
from tierstore.training.bundles import freed_memory
from tierstore.training.bundles.freed_memory import FreedMemory
from tierstore.units import MIB

_RESIDENT = """
import sys
from pathlib import Path
import torch
from tierstore.training import offload

def resident():
    return next(int(x.split()[1]) for x in Path("/proc/self/status").open() if x.startswith("VmRSS"))

before = resident()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16)))
optimizer = torch.optim.Adam(model.parameters())
config = {"device": "cpu", "offload_cpu_size": "1GB", "offload_disk_size": 0}
run = offload(model, optimizer, config) if sys.argv[1] == "offloaded" else None
most = 0
for _ in range(8):
    model(torch.randn(4, 1024)).square().mean().backward()
    optimizer.step()
    most = resident() - before
    optimizer.zero_grad()
print(most)
"""


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    calls: list[None] = []
    monkeypatch.setattr(freed_memory, "return_free_memory", lambda: calls.append(None))
    return calls


def test_much_is_returned_at_once_and_little_waits(returned: list[None]) -> None:
    freed = FreedMemory()
    freed.note(63 * MIB)
    freed.begin_forward()
    assert len(returned) == 0
    freed.note(MIB)
    assert len(returned) == 1


def test_what_next_steps_leave_is_returned_and_later_ones_are_left_alone(returned: list[None]) -> None:
    freed = FreedMemory()
    freed.note(100 * MIB)
    for _ in range(10):
        freed.begin_forward()
    assert len(returned) == 1 + 3


def test_what_is_in_host_memory_as_a_whole_takes_little_more_than_without_tiers() -> None:
    plain, offloaded = (int(run_python(_RESIDENT, how)) for how in ("plain", "offloaded"))
    assert offloaded < 1.25 * plain
