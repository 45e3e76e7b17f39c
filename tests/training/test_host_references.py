"""Modules that one side calls by a reference of its own: values travel by who calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from tests import target
from tests.training.host_models import WIDTH, has_device
from tests.training.twins import LAYOUTS, assert_equal_lists, config_of, with_device, with_rest
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload
from tierstore.training.activations.swapping import forward_pass

Call = Callable[[nn.Module, Tensor], Tensor]

on_a_device = pytest.mark.parametrize("layout", [each for each in LAYOUTS if has_device(each)])


def line() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def _plainly(module: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = module(x)
    return made


def _twice(module: nn.Module, x: Tensor) -> Tensor:
    return _plainly(module, _plainly(module, x).tanh()) + x


def _checkpointed(module: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = checkpoint.checkpoint(module, x, use_reentrant=False)
    return made


def _reentrant(module: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = checkpoint.checkpoint(module, x, use_reentrant=True)
    return made


def _without_graph(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        made = _plainly(module, x)
    return x * made


def _functional(module: nn.Module, x: Tensor) -> Tensor:
    changed = {name: p * 2 for name, p in module.named_parameters()}
    made: Tensor = torch.func.functional_call(module, changed, (x,))
    return made


def _by_name(module: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = module(**{"input" if isinstance(module, nn.Linear) else "x": x})
    return made


WAYS: dict[str, Call] = {
    "once": _plainly,
    "twice": _twice,
    "under a checkpoint": _checkpointed,
    "under a reentrant checkpoint": _reentrant,
    "without a graph": _without_graph,
    "functionally": _functional,
    "by name": _by_name,
}


class Across(nn.Module):
    """Plain PyTorch's call of a module on the other side: brings what it is given and what it returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Bring, call, bring back."""
        there = target.accelerator or "cpu" if x.device.type == "cpu" else "cpu"
        made: Tensor = self.module(x.to(there, copy=True))
        return made.to(x.device, copy=True)


Wrap = Callable[[nn.Module], nn.Module]


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


class Calling(nn.Module):
    """Calls what it has no name for: nobody finds a module in a tuple."""

    def __init__(self, call: Call, *lent: nn.Module) -> None:
        super().__init__()
        self.own = line()
        self.lent = lent
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        x = self.own(x)
        for each in self.lent:
            x = self.call(each, x)
        return x.tanh()


class Net(nn.Module):
    """Modules of the device and of the host, called by this one and by one of the other side.

    A module on the host calls `fast`, and one of the device calls `slow`; around both is one on the host that
    calls them, so that values go to and fro three modules deep.
    """

    def __init__(self, call: Call, across: Wrap) -> None:
        super().__init__()
        self.fast = line()
        self.slow = line()
        self.on_host = Calling(call, across(self.fast))
        self.on_device = Calling(call, across(self.slow))
        self.around = Calling(call, across(self.on_device), self.on_host)
        self.norm = nn.LayerNorm(WIDTH)
        self.across = across

    def forward(self, x: Tensor) -> Tensor:
        """Call each from either side."""
        x = self.fast(x) + self.across(self.slow)(x)
        x = x + self.across(self.on_host)(x) * self.on_device(x)
        made: Tensor = self.norm(self.across(self.around)(x) + x)
        return made


PLACEMENT = {"slow": "cpu", "on_host": "cpu", "around": "cpu"}


def _train(model: nn.Module, log: list[Tensor | None]) -> None:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(4, WIDTH, requires_grad=True)
        loss = model(x).square().mean()
        loss.backward()
        log += [loss.detach().cpu(), x.grad.cpu() if x.grad is not None else None]
        log += [p.grad.cpu().clone() if p.grad is not None else None for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()


def _assert_equal(
    build: Callable[[Wrap], nn.Module],
    layout: str,
    path: Path,
    placement: Mapping[str, str],
    sections: Mapping[str, object] | None = None,
) -> None:
    torch.manual_seed(0)
    plain, expected = build(Across), list[Tensor | None]()
    for name, side in reversed(list(placement.items())):
        plain.get_submodule(name.replace("\\", "")).to("cpu" if side == "cpu" else target.accelerator)
    _train(plain, expected)
    torch.manual_seed(0)
    ours, found = build(_as_it_is), list[Tensor | None]()
    config = with_rest(config_of(layout, path, with_device(layout, "1MB")), ours)
    document = {"offload_config": config, **(sections or {})}
    layers = "" if sections else None
    with (
        offload(ours, None, document, placement=placement, layers=layers) as run,
        DeviceBudget("1GiB", mixing="raise"),
    ):
        _train(ours, found)
        assert run.stats().traffic[("host", "device")].nbytes
        run.store.check()
    if target.accelerator is None:
        assert_equal_lists(expected, found)
    else:  # whose thread of backward and the host's race: plain PyTorch sums gradients now so and now so
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("way", WAYS)
@on_a_device
def test_each_side_calls_what_is_on_the_other(way: str, layout: str, tmp_path: Path) -> None:
    _assert_equal(lambda across: Net(WAYS[way], across), layout, tmp_path, PLACEMENT)


SECTIONS: dict[str, Mapping[str, object]] = {
    "computed again": {"recompute_config": {"recompute": True}},
    "swapped": {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": True}]}},
}


@pytest.mark.parametrize("section", SECTIONS)
@on_a_device
def test_what_the_other_side_calls_is_computed_again_or_swapped(
    section: str, layout: str, tmp_path: Path
) -> None:
    with mock.patch.object(forward_pass, "SMALLEST_BYTES", 1):
        _assert_equal(lambda across: Net(_twice, across), layout, tmp_path, PLACEMENT, SECTIONS[section])


class Shared(nn.Module):
    """Calls a module that is a part of another one as well."""

    def __init__(self, shared: nn.Module, across: Wrap) -> None:
        super().__init__()
        self.own = line()
        self.shared = shared
        self.called = (across(shared),)

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        made: Tensor = checkpoint.checkpoint(self.called[0], self.own(x), use_reentrant=False)
        again: Tensor = self.called[0](x)
        return made + again


class Sharing(nn.Module):
    """Has one on the host and one on the device: the module that both call is on one of these."""

    def __init__(self, side: str, across: Wrap) -> None:
        super().__init__()
        shared = line()
        self.on_host = Shared(shared, across if side == "device" else _as_it_is)
        self.on_device = Shared(shared, across if side == "cpu" else _as_it_is)
        self.norm = nn.LayerNorm(WIDTH)
        self.across = across

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        made: Tensor = self.norm(self.across(self.on_host)(x) + self.on_device(x))
        return made


@pytest.mark.parametrize("side", ["cpu", "device"])
@on_a_device
def test_a_module_within_modules_of_both_sides_is_where_it_is_placed(
    side: str, layout: str, tmp_path: Path
) -> None:
    placement = {r"on_host\.shared": side, r"on_device\.shared": side, "on_host": "cpu"}
    _assert_equal(lambda across: Sharing(side, across), layout, tmp_path, placement)


class Region(nn.Module):
    """Computes a part again in which a module on the host is given what that part makes itself."""

    def __init__(self, across: Wrap) -> None:
        super().__init__()
        self.table, self.line = nn.Embedding(8, WIDTH), line()
        self.across = across

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        made: Tensor = checkpoint.checkpoint(self._part, x, use_reentrant=False)
        return made

    def _part(self, x: Tensor) -> Tensor:
        rows: Tensor = self.across(self.table)(torch.arange(len(x)))
        made: Tensor = self.line(x) * rows
        return made.tanh()


@on_a_device
def test_in_a_part_that_is_computed_again_values_cross_as_in_forward(layout: str, tmp_path: Path) -> None:
    _assert_equal(Region, layout, tmp_path, {"table": "cpu"})
