"""Errors that say that there is too little of the device say who holds it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import target
from tierstore.errors import CapacityError
from tierstore.testing.memory import DeviceBudget, OutOfDeviceMemory
from tierstore.training import offload

pytestmark = pytest.mark.skipif(target.accelerator is not None, reason="the meter is of host memory")

WIDTH = 64
KIB = 1024


def layers() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(6)))
    return model, torch.optim.Adam(model.parameters(), 1e-3)


def config_of(path: Path, quota_bytes: int) -> dict[str, object]:
    return {
        "device": "emulated",
        "max_device_memory": quota_bytes,
        "offload_cpu_size": "64MB",
        "host_mem_block_size": "1MB",
        "offload_disk_size": 0,
        "offload_path": str(path),
        "foresee": False,
    }


def notes_of(error: BaseException) -> str:
    (note,) = (each for each in error.__notes__ if each.startswith("Who holds the device: "))
    return note


def test_an_error_of_the_stores_says_what_it_and_the_program_hold(tmp_path: Path) -> None:
    model, optimizer = layers()
    run = offload(model, optimizer, config_of(tmp_path, 224 * KIB))
    with pytest.raises(CapacityError, match="no room for") as caught:
        model(torch.randn(500, WIDTH)).sum().backward()
    note = notes_of(caught.value)  # at once: nobody has to be in the run's block
    assert "of 'device' (" in note
    (own,) = re.findall(r"the program has (\S+ \S+) beside the store", str(caught.value))
    assert f"{own} beside it" in note
    assert "most was held so" not in note  # no step was whole
    run.close()


def test_an_allocators_error_says_who_held_most_in_the_steps_before(tmp_path: Path) -> None:
    model, optimizer = layers()
    caught = None
    with DeviceBudget(600 * KIB) as budget:
        try:
            with offload(model, optimizer, config_of(tmp_path, 500 * KIB)):
                for rows in (4, 4, 4, 4, 4, 2000):
                    model(torch.randn(rows, WIDTH)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except OutOfDeviceMemory as error:
            caught = error
    assert caught is not None
    assert budget.peak_bytes <= 600 * KIB
    note = notes_of(caught)
    assert "of 'device' (" in note
    assert "In the steps that were recorded most was held so: In 'device' were " in note
    for kind in ("parameters", "state"):
        assert kind in note.partition("In the steps that were recorded")[2]


def test_errors_of_other_sorts_are_left_alone(tmp_path: Path) -> None:
    model, optimizer = layers()
    run = offload(model, optimizer, config_of(tmp_path, 500 * KIB))
    with pytest.raises(ValueError, match="of the program's own") as caught, run:
        raise ValueError("of the program's own")
    assert not getattr(caught.value, "__notes__", [])


def test_an_error_of_host_memory_says_nothing_of_a_device(tmp_path: Path) -> None:
    model, optimizer = layers()
    host = {
        "device": "cpu",
        "offload_cpu_size": "64MB",
        "offload_disk_size": 0,
        "offload_path": str(tmp_path),
    }
    with pytest.raises(torch.OutOfMemoryError) as caught, offload(model, optimizer, host):
        raise torch.OutOfMemoryError("elsewhere")
    assert not getattr(caught.value, "__notes__", [])
