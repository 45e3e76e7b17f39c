"""Values between modules on the host: what need not travel does not, and the bits are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.host_models import WIDTH, Case, assert_same_placed
from tests.training.twins import Trial

VALUE_BYTES = 4 * WIDTH * 4
"""Of one value of a batch of four."""


class Writes(nn.Module):
    """Changes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        """Double it in place."""
        x *= 2
        return x


class Keeps(nn.Module):
    """Keeps what it returns, and changes it later."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        if self.last is not None:
            self.last.zero_()
        y: Tensor = self.line(x)
        self.last = y.detach()
        return y


class Expanded(nn.Module):
    """Returns what is not dense; its gradient is not, either."""

    def forward(self, x: Tensor) -> Tensor:
        """Repeat the mean."""
        return x.mean(1, keepdim=True).expand(-1, WIDTH)


class Between(nn.Module):
    """Two host modules, one of which is given what the other has returned, and what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.fast = nn.LayerNorm(WIDTH)
        self.changes = False

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        y = self.one(x)
        if self.changes:
            with torch.no_grad():
                y.mul_(0.5)
        z: Tensor = self.other(y) + self.other(x)
        made: Tensor = self.fast(z + y)
        return made


def chain(make: Callable[[], list[nn.Module]]) -> Case:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Tanh(), *make(), nn.Tanh())

    names = [str(number + 1) for number in range(len(make()))]
    return Case(build, dict.fromkeys(names, "cpu"), dict.fromkeys(names, "cpu"), names)


def line() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


CHAINS: dict[str, Callable[[], list[nn.Module]]] = {
    "own": lambda: [line(), nn.LayerNorm(WIDTH), nn.Sigmoid()],
    "in place": lambda: [line(), nn.Sigmoid(), nn.ReLU(inplace=True), line()],
    "writes": lambda: [line(), nn.Sigmoid(), Writes(), line()],
    "keeps": lambda: [Keeps(), line()],
    "expanded": lambda: [line(), Expanded(), line()],
    "nested": lambda: [nn.Sequential(line(), nn.ReLU(inplace=True)), nn.Sigmoid()],
}


def steps(trial: Trial) -> None:
    trial.passes = []  # type: ignore[attr-defined]
    for number in range(4):
        before = traffic_of(trial)
        x = torch.randn(4, WIDTH).requires_grad_()
        loss = trial.model(x).square().mean()
        loss.backward(retain_graph=number == 2)
        trial.log(loss)
        trial.log(x.grad)
        after = traffic_of(trial)
        trial.passes.append({way: after[way] - before[way] for way in after})  # type: ignore[attr-defined]
        for optimizer in trial.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def traffic_of(trial: Trial) -> dict[str, int]:
    if trial.run is None:
        return {}
    moved = trial.run.stats().traffic
    ways = {"down": ("device", "host"), "up": ("host", "device")}
    return {name: moved[way].nbytes if way in moved else 0 for name, way in ways.items()}


def passes_of(case: Case, path: Path, more: Mapping[str, object]) -> list[dict[str, int]]:
    _, trial = assert_same_placed(case, steps, "device", path, {"max_device_memory": "4MB", **more})
    found: list[dict[str, int]] = trial.passes  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("name", CHAINS)
def test_between_children_of_a_sequential_nothing_travels(name: str, tmp_path: Path) -> None:
    """One value goes down and one up in forward, and one gradient each in backward."""
    for each in passes_of(chain(CHAINS[name]), tmp_path, {}):
        assert each == {"down": 2 * VALUE_BYTES, "up": 2 * VALUE_BYTES}


def test_where_a_hook_is_between_two_children_values_travel(tmp_path: Path) -> None:
    case = chain(lambda: [line(), line()])

    def build() -> nn.Module:
        model = case.build()
        model.get_submodule("2").register_forward_pre_hook(lambda _, given: (given[0] * 2,))
        return model

    hooked = Case(build, case.patterns, case.borders, case.on_host)
    found = passes_of(hooked, tmp_path, {})
    assert found == [{"down": 4 * VALUE_BYTES, "up": 4 * VALUE_BYTES}] * 4


class Again(nn.Module):
    """Calls a module twice that changes what it has returned before; then uses that."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Keeps()
        self.other = nn.Linear(WIDTH, WIDTH)
        self.fast = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        y = self.one(x)
        made: Tensor = self.fast(self.other(y) + self.one(x) + self.other(y))
        return made


def test_what_a_module_has_changed_since_is_brought_again(tmp_path: Path) -> None:
    case = Case(
        lambda: nn.Sequential(nn.Tanh(), Again()),
        {r"1\.(one|other)": "cpu"},
        {"1.one": "cpu", "1.other": "cpu"},
        ["1.one", "1.other"],
    )
    passes_of(case, tmp_path, {"ignored": [r"1\.fast"]})
