"""A run that cannot fit is refused before a step begins, and only such a run."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests import target
from tests.training.traced_models import BUILDS
from tests.training.twins import assert_equal_lists
from tierstore.errors import CapacityError
from tierstore.training import offload
from tierstore.training.tracing.twin import LARGEST_BYTES, ModelTwin

pytestmark = pytest.mark.skipif(target.accelerator is not None, reason="the meter is of host memory")

KIB = 1024
STEPS = 2
NOTHING = "Nothing was computed"


def config_of(path: Path, quota_bytes: int | str, **more: object) -> dict[str, object]:
    return {
        "device": "emulated",
        "max_device_memory": quota_bytes,
        "offload_cpu_size": "64MB",
        "host_mem_block_size": "1MB",
        "offload_disk_size": 0,
        "offload_path": str(path),
        **more,
    }


class Outcome(NamedTuple):
    """What became of a run: what was raised, losses and parameters."""

    error: str
    logged: list[Tensor]


def outcome(name: str, config: dict[str, object] | None) -> Outcome:
    torch.manual_seed(0)
    model, inputs, optimizer = BUILDS[name]()
    logged: list[Tensor] = []
    error = ""
    try:
        with offload(model, optimizer, config or {"memory_offload": "OFF"}):
            for _ in range(STEPS):
                loss = model(*inputs).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                logged.append(loss.detach())
    except CapacityError as caught:
        error = str(caught)
    return Outcome(error, [*logged, *(each.detach() for each in model.parameters())])


GRID = {
    "mlp": (300_000, 410_000, 480_000),
    "deep": (130_000, 220_000),
    "checkpointed": (600_000, 1_300_000),
}
"""Quotas from far below what a step needs to a little more than that."""


@pytest.mark.parametrize("name", GRID)
def test_what_is_refused_would_not_have_fit_and_what_is_not_trains_as_ever(name: str, tmp_path: Path) -> None:
    plain = outcome(name, None)
    verdicts = []
    for quota_bytes in GRID[name]:
        asked = outcome(name, config_of(tmp_path, quota_bytes))
        tried = outcome(name, config_of(tmp_path, quota_bytes, foresee=False))
        verdicts.append(NOTHING in asked.error)
        assert NOTHING not in tried.error
        if verdicts[-1]:
            assert tried.error
        else:
            assert asked.error == tried.error
            assert_equal_lists(asked.logged, tried.logged)
        if not asked.error:
            assert_equal_lists(asked.logged, plain.logged)
    assert verdicts == sorted(verdicts, reverse=True)
    assert verdicts[0]
    assert not verdicts[-1]


def test_a_quota_that_a_refusal_names_lets_the_run_train(tmp_path: Path) -> None:
    refused = outcome("mlp", config_of(tmp_path, 300_000))
    named = re.search(r"Raise max_device_memory to ([\d.]+[KM]B)", refused.error)
    assert named is not None, refused.error
    trained = outcome("mlp", config_of(tmp_path, named[1]))
    assert not trained.error
    assert_equal_lists(trained.logged, outcome("mlp", None).logged)


# ---------------------------------------------------------------------- what a refused run leaves

WIDTH = 64
ROWS = 500
QUOTA = 224 * KIB
"""Of which layers take 64 KiB each, and what is kept of their rows 250 KiB."""
ROOM = 700 * KIB


class Counting(nn.Module):
    """A layer that counts how often it ran, and draws random numbers of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.seen: list[int] = []
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(rows, WIDTH)``."""
        self.seen.append(len(x))
        self.calls.add_(1)
        if random.random() > 2:
            x = x + 1
        found: Tensor = self.dropout(torch.relu(self.linear(x)))
        return found


def layers() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Counting() for _ in range(6)))
    return model, torch.optim.Adam(model.parameters(), 1e-3)


def test_a_refused_run_has_computed_nothing_and_loses_nothing(tmp_path: Path) -> None:
    model, optimizer = layers()
    before = [each.detach().clone() for each in (*model.parameters(), *model.buffers())]
    x = torch.randn(ROWS, WIDTH)
    states = torch.get_rng_state(), random.getstate()
    text = r"into max_device_memory, which is 224\.0 KiB.*In 'device' were .*input.*Raise max"
    run = offload(model, optimizer, config_of(tmp_path, QUOTA))
    with run, pytest.raises(CapacityError, match=text) as caught:
        model(x)
    assert caught.value.tier == "device"
    assert caught.value.needed_bytes is not None
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(each.seen == [] for each in model)
    assert_equal_lists(before, [*model.parameters(), *model.buffers()])
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in model.modules())
    model(x).sum().backward()
    optimizer.step()


def test_a_run_that_fits_is_not_changed_by_the_look(tmp_path: Path) -> None:
    logged = []
    for foresee in (True, False):
        model, optimizer = layers()
        random.seed(1)
        with offload(model, optimizer, config_of(tmp_path, QUOTA, foresee=foresee)):
            for _ in range(2):
                model(torch.randn(4, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert all(each.seen == [4, 4] for each in model)
        logged.append([*model.parameters(), *model.buffers(), torch.tensor(random.random())])
    assert_equal_lists(*logged)


def test_after_a_refusal_smaller_inputs_train_in_the_same_run(tmp_path: Path) -> None:
    model, optimizer = layers()
    with offload(model, optimizer, config_of(tmp_path, QUOTA)):
        with pytest.raises(CapacityError, match=NOTHING):
            model(torch.randn(ROWS, WIDTH))
        model(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
    assert all(each.seen == [4] for each in model)


def test_calls_that_train_nothing_are_not_refused_and_the_next_one_that_does_is(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x = torch.randn(ROWS, WIDTH)
    with offload(model, optimizer, config_of(tmp_path, QUOTA)):
        with torch.no_grad():
            model(x[:8].clone())
        model.eval()
        model(x[:8].clone())
        model.train()
        with pytest.raises(CapacityError, match=NOTHING):
            model(x)


# ---------------------------------------------------------------------- what is not known is not refused


Change = Callable[[nn.Sequential], object]


def _of_two(model: nn.Sequential) -> None:
    model.append(Two())


class Two(nn.Module):
    """Returns what it is given, twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tensors."""
        return x, x + 1


class Branching(nn.Module):
    """Asks for a value."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what it is given, if it is large."""
        return x if x.sum() > -1e9 else x + 1


class Casting(nn.Module):
    """Computes in half precision inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(rows, WIDTH)``."""
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = self.linear(x)
        return found


class Large:
    """Something that hangs on a module and would take memory."""

    def __init__(self) -> None:
        self.values = bytearray(8)
        self.nbytes = LARGEST_BYTES + 1


def _hooked(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda *_: None)


def _compiled(model: nn.Sequential) -> None:
    model[3]._compiled_call_impl = model[3]._call_impl  # as `nn.Module.compile` sets it


def _with_large(model: nn.Sequential) -> None:
    vars(model[1])["kept"] = Large()


def _seen(model: nn.Sequential) -> None:
    vars(model[2])["seen"] = [7]


def _dropping_more(model: nn.Sequential) -> None:
    model[2].dropout = nn.Dropout(0.5)


def _forward_of_its_own(model: nn.Sequential) -> None:
    inner = model[2].forward
    model[2].forward = lambda x: inner(x) + 0


EARLY: dict[str, tuple[Change, str]] = {
    "hooks": (_hooked, "'0' has hooks"),
    "two outputs": (_of_two, "which part of a tuple is trained for"),
    "branches": (lambda model: model.append(Branching()), "depends on values"),
    "casts": (lambda model: model.append(Casting()), "numbers are cast"),
    "compiled": (_compiled, "is compiled"),
    "large": (_with_large, "a Large of"),
}
LATE: dict[str, tuple[Change, str]] = {
    "late hooks": (_hooked, "'0' has hooks"),
    "attributes": (_seen, "was changed since"),
    "modules": (_dropping_more, "was changed since"),
    "forwards": (_forward_of_its_own, "was changed since"),
}


@pytest.mark.parametrize("case", [*EARLY, *LATE])
def test_what_a_copy_cannot_tell_is_not_refused(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, reason = {**EARLY, **LATE}[case]
    model, _ = layers()
    if case in EARLY:
        change(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    caplog.set_level(logging.DEBUG, "tierstore")
    with offload(model, optimizer, config_of(tmp_path, QUOTA)):
        if case in LATE:
            change(model)
        with pytest.raises(CapacityError, match="the program has") as caught:  # as without: in its midst
            model(torch.randn(8 * ROWS, WIDTH))
        assert NOTHING not in str(caught.value)
    said = [each.getMessage() for each in caplog.records if "is not known before" in each.getMessage()]
    assert len(said) == 1
    assert reason in said[0]


def test_layers_that_are_frozen_after_opening_need_no_room_for_what_they_keep(tmp_path: Path) -> None:
    model, optimizer = layers()  # that take as much together
    with offload(model, optimizer, config_of(tmp_path, ROOM)):
        model[:5].requires_grad_(requires_grad=False)
        model(torch.randn(ROWS, WIDTH)).sum().backward()
        optimizer.step()
    model, optimizer = layers()
    with offload(model, optimizer, config_of(tmp_path, ROOM)), pytest.raises(CapacityError, match=NOTHING):
        model(torch.randn(ROWS, WIDTH))


def test_a_twin_takes_no_memory_and_keeps_what_is_shared() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    vars(model[0])["kept"] = {"table": [torch.ones(2**20)]}
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    twin = ModelTwin(model, [optimizer])
    first, second = twin.model.children()
    assert all(each.is_meta for each in (*twin.model.parameters(), *twin.model.buffers()))
    assert second.weight is first.weight
    assert vars(first)["kept"]["table"][0].is_meta
    (group,) = twin.optimizers[0].param_groups
    assert [id(each) for each in group["params"]] == [id(each) for each in twin.model.parameters()]
    kept = [each for state in twin.optimizers[0].state.values() for each in state.values()]
    assert all(each.is_meta for each in kept if each.dim())
    assert any(each.dim() for each in kept)
    assert twin.follow()
