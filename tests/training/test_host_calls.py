"""Modules on the host that somebody calls past the module around them, or from their own side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from tests.training.host_models import WIDTH
from tests.training.twins import assert_equal_lists, assert_equal_models, config_of
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload
from tierstore.training.modules.link import Link


def line() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Wide(nn.Module):
    """Has children that it calls, and that others call."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.one = nn.Sequential(line(), nn.Tanh())
        self.other = line()
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        if self.is_checkpointed:
            x = checkpoint.checkpoint(self.one, x, use_reentrant=False)
            again: Tensor = checkpoint.checkpoint(self.other, x, use_reentrant=False)
            return again
        made: Tensor = self.other(self.one(x))
        return made


class Past(nn.Module):
    """Calls a module on the host, and what is inside of it, by itself."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.first = line()
        self.wide = Wide(is_checkpointed=is_checkpointed)
        self.last = line()

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        x = self.first(x)
        x = x * self.wide.other(x) + self.wide.one[0](x)
        made: Tensor = self.last(self.wide(x) + x)
        return made


class Borrowing(nn.Module):
    """Has a module that is on the host, and in another place of the model, and is on the host itself."""

    def __init__(self, lent: nn.Module) -> None:
        super().__init__()
        self.own = line()
        self.lent = [lent]  # which nobody finds there

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        made: Tensor = self.lent[0](self.own(x))
        return made


class Lending(nn.Module):
    """Calls a module on the host, and one that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.lent = line()
        self.norm = nn.LayerNorm(WIDTH)
        self.borrowing = Borrowing(self.lent)

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        made: Tensor = self.norm(self.borrowing(self.lent(x)) + x)
        return made


CASES: dict[str, tuple[Callable[[], nn.Module], Mapping[str, str], int]] = {
    # How often the model's values cross, there and back, in a forward pass.
    "past the module around them": (Past, {"wide": "cpu"}, 3),
    "with parts computed again": (lambda: Past(is_checkpointed=True), {"wide": "cpu"}, 3),
    "from their own side": (Lending, {"lent": "cpu", "borrowing": "cpu"}, 2),
}


def train(model: nn.Module, log: list[Tensor | None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        log.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how many values were carried, by where to."""
    found, carry = Counter[str](), Link.carry

    def count(link: Link, tensor: Tensor, side: str) -> Tensor:
        found[side] += 1
        return carry(link, tensor, side)

    monkeypatch.setattr(Link, "carry", count)
    return found


@pytest.mark.parametrize("case", CASES)
def test_values_cross_where_a_side_ends_and_nowhere_else(
    case: str, tmp_path: Path, carried: Counter[str]
) -> None:
    build, patterns, crossings = CASES[case]
    torch.manual_seed(0)
    plain, expected = build(), list[Tensor | None]()
    train(plain, expected)
    torch.manual_seed(0)
    ours, found = build(), list[Tensor | None]()
    config = config_of("device", tmp_path, {"max_device_memory": "1MB"})
    with offload(ours, None, config, placement=patterns), DeviceBudget("1GiB", mixing="raise"):
        train(ours, found)
        carried.clear()
        loss = ours(torch.randn(4, WIDTH, requires_grad=True)).square().mean()
        assert carried == {"cpu": crossings, "device": crossings}
        loss.backward()
        assert carried == {"cpu": 2 * crossings, "device": 2 * crossings}, "each gradient the other way"
        ours.zero_grad()
    assert_equal_lists(expected, found)
    plain.zero_grad()
    assert_equal_models(plain, ours)


def test_what_an_interrupt_has_left_does_not_count_as_running(tmp_path: Path, carried: Counter[str]) -> None:
    class Interrupted(Wide):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    wide = Interrupted()
    model = nn.Sequential(line(), wide, nn.LayerNorm(WIDTH))
    config = config_of("device", tmp_path)
    with offload(model, None, config, placement={"1": "cpu"}), DeviceBudget("1GiB", mixing="raise"):
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2, WIDTH))
        carried.clear()
        x = model[0](torch.ones(2, WIDTH))
        assert (x + wide.other(x)).shape == (2, WIDTH)
        assert carried == {"cpu": 1, "device": 1}
