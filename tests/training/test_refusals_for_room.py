"""Whoever trains and runs out of room is told which key of the configuration to raise, with numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tierstore.errors import CapacityError
from tierstore.optim import FTRL, LazyAdam
from tierstore.training import Offload, offload

WIDTH = 128  # a layer's weight takes 64 KiB
_KEYS = r"max_device_memory|offload_cpu_size|offload_disk_size"
_NOT_FOR_WHO_TRAINS = (
    "Drop keys",
    "drop keys",
    "Release a lease",
    "Release leases",
    "the capacity of",
    "flush some keys",
    "()",
)


class Unknown(torch.optim.SGD):
    """An optimizer whose own step runs as a whole, and makes as much state as it likes."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                entries = self.state[parameter]
                entries.setdefault("copies", [torch.zeros_like(parameter) for _ in range(2)])
        super().step(closure)


def layers(count: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def unknown(model: nn.Module) -> torch.optim.Optimizer:
    return Unknown(model.parameters(), lr=0.1, momentum=0.9)


def trained(run: Offload, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del run
    for _ in range(3):
        step(model, optimizer)


def suspended(run: Offload, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(model, optimizer)
    run.suspend("disk")


def kept(run: Offload, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(3):
        step(model, optimizer)
        run.checkpoint({"number": number})


Make = Callable[[nn.Module], torch.optim.Optimizer]
Do = Callable[[Offload, nn.Module, torch.optim.Optimizer], None]
TIGHT: dict[str, tuple[dict[str, object], Make, Do]] = {
    "parameters in host memory alone": (
        {"device": "cpu", "offload_cpu_size": "300KB", "offload_disk_size": 0},
        adam,
        trained,
    ),
    "state in host memory alone": (
        {"device": "cpu", "offload_cpu_size": "600KB", "offload_disk_size": 0},
        adam,
        trained,
    ),
    "state that nobody knows, in host memory alone": (
        {"device": "cpu", "offload_cpu_size": "600KB", "offload_disk_size": 0},
        unknown,
        trained,
    ),
    "parameters on disk": (
        {"device": "cpu", "offload_cpu_size": "300KB", "offload_disk_size": "64KB"},
        adam,
        trained,
    ),
    "state on disk": (
        {"device": "cpu", "offload_cpu_size": "300KB", "offload_disk_size": "400KB"},
        adam,
        trained,
    ),
    "state that nobody knows": (
        {"device": "cpu", "offload_cpu_size": "600KB", "offload_disk_size": "100KB"},
        unknown,
        trained,
    ),
    "one layer in host memory": (
        {"device": "cpu", "offload_cpu_size": "80KB", "offload_disk_size": "10MB"},
        adam,
        trained,
    ),
    "one layer on the device": (
        {"max_device_memory": "100KB", "offload_cpu_size": "10MB", "offload_disk_size": "10MB"},
        adam,
        trained,
    ),
    "a step as a whole": (
        {"max_device_memory": "300KB", "offload_cpu_size": "10MB", "offload_disk_size": "10MB"},
        unknown,
        trained,
    ),
    "everything on all tiers": (
        {"max_device_memory": "300KB", "offload_cpu_size": "100KB", "offload_disk_size": "300KB"},
        adam,
        trained,
    ),
    "what is pinned": (
        {"max_device_memory": "300KB", "offload_cpu_size": "10MB", "pinned": [".*"]},
        adam,
        trained,
    ),
    "a run that is suspended": (
        {"max_device_memory": "2MB", "offload_cpu_size": "2MB", "offload_disk_size": "300KB"},
        adam,
        suspended,
    ),
    "a checkpoint beside the former": (
        {"device": "cpu", "offload_cpu_size": "2MB", "offload_disk_size": "1300KB", "durable": True},
        adam,
        kept,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TIGHT)
def test_a_quota_that_is_too_small_is_named_with_numbers(tmp_path: Path, name: str) -> None:
    settings, make, do = TIGHT[name]
    model = layers()
    optimizer = make(model)
    config = {"device": "emulated", "offload_path": str(tmp_path / "disk"), **settings}
    with pytest.raises(CapacityError) as caught, offload(model, optimizer, config) as run:
        do(run, model, optimizer)
    text = str(caught.value)
    assert re.search(_KEYS, text), text
    assert re.search(r"[0-9.]+ (B|[KMG]iB)", text), text
    assert not [each for each in _NOT_FOR_WHO_TRAINS if each in text], text


KNOWN: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], int]] = {
    "SGD": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 0),
    "SGD with momentum": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), 1),
    "Adam": (adam, 2),
    "AdamW with amsgrad": (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), 3),
    "RMSprop": (lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9, centered=True), 3),
    "Adagrad": (lambda m: torch.optim.Adagrad(m.parameters()), 1),
    "Adadelta": (lambda m: torch.optim.Adadelta(m.parameters()), 2),
    "Rprop": (lambda m: torch.optim.Rprop(m.parameters()), 2),
    "RAdam": (lambda m: torch.optim.RAdam(m.parameters()), 2),
    "NAdam": (lambda m: torch.optim.NAdam(m.parameters()), 2),
    "Adamax": (lambda m: torch.optim.Adamax(m.parameters()), 2),
    "LazyAdam": (lambda m: LazyAdam(m.parameters()), 2),
    "FTRL": (lambda m: FTRL(m.parameters()), 2),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_state_that_fits_in_no_tier_is_refused_at_opening_with_a_table(tmp_path: Path, kind: str) -> None:
    make, copies = KNOWN[kind]
    model = layers()
    own_bytes = sum(each.nbytes for each in model.parameters())
    room_bytes = (1 + copies) * own_bytes - 4096
    host_bytes = own_bytes if copies else own_bytes // 2
    config = {"device": "cpu", "offload_cpu_size": host_bytes, "offload_path": str(tmp_path / "disk")}
    with pytest.raises(
        CapacityError, match=r"training needs .*\(parameters .*offload_cpu_size \(host\)"
    ) as caught:
        offload(model, make(model), {**config, "offload_disk_size": room_bytes - host_bytes})
    assert ("optimizer state" in str(caught.value)) == bool(copies)
    assert caught.value.needed_bytes is not None
    assert (1 + copies) * own_bytes <= caught.value.needed_bytes <= (1 + copies) * own_bytes + 6 * 512
    assert not (tmp_path / "disk").exists()
    assert all(type(each) is nn.Parameter and each.nbytes for each in model.parameters())


@pytest.mark.parametrize("kind", KNOWN)
def test_what_is_needed_for_certain_is_no_more_than_what_is_there_after_a_step(
    tmp_path: Path, kind: str
) -> None:
    make, copies = KNOWN[kind]
    model = layers()
    optimizer = make(model)
    step(model, optimizer)
    made = [
        v for entries in optimizer.state.values() for v in entries.values() if torch.is_tensor(v) and v.dim()
    ]
    assert sum(each.nbytes for each in made) == copies * sum(each.nbytes for each in model.parameters())


@pytest.mark.parametrize("make", [unknown, lambda m: torch.optim.Adafactor(m.parameters())])
def test_state_that_is_not_certain_refuses_nothing_at_opening(tmp_path: Path, make: Make) -> None:
    model = layers()
    config = {"device": "cpu", "offload_cpu_size": "450KB", "offload_disk_size": "64KB"}
    with offload(model, make(model), {**config, "offload_path": str(tmp_path / "disk")}):
        pass


def test_frozen_parameters_need_no_state(tmp_path: Path) -> None:
    model = layers()
    for each in model[:5].parameters():
        each.requires_grad = False
    config = {"device": "cpu", "offload_cpu_size": "500KB", "offload_disk_size": "400KB"}
    optimizer = adam(model)
    with offload(model, optimizer, {**config, "offload_path": str(tmp_path / "disk")}):
        step(model, optimizer)
