"""Two runs of one loop, one plain and one offloaded: what they log and leave has to be the same bits."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests import target
from tierstore.training import Offload, offload
from tierstore.training.pytorch.own_work import ordinary_mode
from tierstore.units import align_up, parse_bytes

Optimizer = torch.optim.Optimizer
Log = Callable[[Tensor | None], None]
Build = Callable[[], tuple[nn.Module, Sequence[Optimizer]]]


@dataclass
class Trial:
    """What a loop trains, and what it says.

    Attributes:
        model: plain or offloaded.
        optimizers: of the model.
        run: the offloading; ``None`` where there is none.
        logged: copies of what the loop logged.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    run: Offload | None = None
    logged: list[Tensor | None] = field(default_factory=list)

    @property
    def optimizer(self) -> Optimizer:
        """The first one."""
        return self.optimizers[0]

    def log(self, tensor: Tensor | None) -> None:
        """Keep a copy in host memory, to be compared: no meter takes it for an emulated device's."""
        with ordinary_mode():
            self.logged.append(None if tensor is None else tensor.detach().to("cpu", copy=True))

    def log_gradients(self) -> None:
        """Keep a copy of every gradient."""
        for parameter in self.model.parameters():
            self.log(parameter.grad)


Loop = Callable[[Trial], None]

LATE_AND_OVERWRITTEN = {"overwrite_freed": True, "late_events": 7}

_LAYOUTS: dict[str, dict[str, object]] = {
    "host": {"device": "cpu", "offload_cpu_size": "64MB", "offload_disk_size": 0},
    "disk": {"device": "cpu", "offload_cpu_size": "112KB", "offload_disk_size": "64MB"},
    "device": {
        "device": "emulated",
        "max_device_memory": "112KB",
        "offload_cpu_size": "64MB",
        "offload_disk_size": 0,
        "device_options": LATE_AND_OVERWRITTEN,
    },
    "three": {
        "device": "emulated",
        "max_device_memory": "112KB",
        "offload_cpu_size": "144KB",
        "offload_disk_size": "64MB",
        "device_options": LATE_AND_OVERWRITTEN,
    },
}
"""The models of these tests need 200 KB and more with gradients and Adam's state."""

_ON_ACCELERATOR: dict[str, dict[str, object]] = {
    "device": {
        "device": target.accelerator,
        "max_device_memory": "144KB",
        "offload_cpu_size": "64MB",
        "offload_disk_size": 0,
        "host_mem_block_size": "1MB",
    },
    "three": {
        "device": target.accelerator,
        "max_device_memory": "144KB",
        "offload_cpu_size": "144KB",
        "offload_disk_size": "64MB",
        "host_mem_block_size": "144KB",
    },
}
"""Allocators round up to 512 bytes.  The limit is for what a run adds: see `with_rest`."""

is_on_accelerator = target.accelerator is not None
"""Whether these tests run on an accelerator: this folder's fixture puts every tensor there."""

is_simulated = target.accelerator == "openreg"
"""Whether that is the simulated one."""

LAYOUTS = _ON_ACCELERATOR if is_on_accelerator else _LAYOUTS

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def config_of(layout: str, path: Path, more: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return the configuration of a layout, with its files at ``path``."""
    return {**LAYOUTS[layout], "offload_path": str(path / "files"), **(more or {})}


def with_rest(config: dict[str, object], model: nn.Module) -> dict[str, object]:
    """Let the limit of an accelerator's memory be what the run may have beside the other run's tensors."""
    if not is_on_accelerator:
        return config
    gc.collect()  # what former tests left is no rest that stays
    own_bytes = sum(align_up(each.nbytes, 512) for each in model.parameters())
    rest_bytes = torch.accelerator.memory_allocated() - own_bytes
    return {**config, "max_device_memory": parse_bytes(str(config["max_device_memory"])) + rest_bytes}


def with_device(layout: str, capacity: str) -> dict[str, object]:
    """Return what gives a layout's device, if it has one, room for what a loop keeps there itself."""
    return {"max_device_memory": capacity} if "max_device_memory" in LAYOUTS[layout] else {}


def with_copies(layout: str, capacity: str | None = None) -> dict[str, object]:
    """Return what gives an accelerator room for what a loop makes of all parameters.

    Copies, gradients that it keeps, or state that its own optimizer makes before the run has taken it in.

    Args:
        layout: which.
        capacity: for an emulated device, which does not count them; ``None``: what it always has.
    """
    if is_on_accelerator:
        return with_device(layout, "416KB")
    return {} if capacity is None else with_device(layout, capacity)


def assert_same(
    build: Build, loop: Loop, layout: str, path: Path, more: Mapping[str, object] | None = None
) -> None:
    """Run the loop plain and offloaded; compare all that it logged and all that is left."""
    torch.manual_seed(0)
    plain = Trial(*build())
    torch.manual_seed(1)
    loop(plain)
    torch.manual_seed(0)
    ours = Trial(*build())
    identities = [id(parameter) for parameter in ours.model.parameters()]
    config = with_rest(config_of(layout, path, more), ours.model)
    with offload(ours.model, list(ours.optimizers), config) as run:
        ours.run = run
        torch.manual_seed(1)
        loop(ours)
        run.store.check()
        assert identities == [id(parameter) for parameter in ours.model.parameters()]
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)
    for expected, found in zip(plain.optimizers, ours.optimizers, strict=True):
        assert_equal_states(expected, found)


def assert_equal_lists(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> None:
    """Compare two lists of tensors, bit for bit."""
    assert len(expected) == len(found)
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert (a is None) == (b is None), f"tensor {number}: one of the two is None"
        assert a is None or b is None or same(a, b), f"tensor {number} differs: {a} and {b}"


def assert_equal_models(expected: nn.Module, found: nn.Module) -> None:
    """Compare parameters with their gradients, and buffers; all have to be ordinary tensors."""
    others = dict(found.named_parameters())
    for name, parameter in expected.named_parameters():
        other = others[name]
        assert type(other) is type(parameter), name
        assert other.stride() == parameter.stride(), name
        assert same(parameter, other), name
        assert_equal_lists([parameter.grad], [other.grad])
    for (name, a), (its_name, b) in zip(expected.named_buffers(), found.named_buffers(), strict=True):
        assert name == its_name
        assert type(b) is type(a), name
        assert b.stride() == a.stride(), name
        assert same(a, b), name


def assert_equal_states(expected: Optimizer, found: Optimizer) -> None:
    """Compare what two optimizers keep for each parameter."""
    for group, other in zip(expected.param_groups, found.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in other.items() if k != "params"
        }
        for a, b in zip(group["params"], other["params"], strict=True):
            assert (a in expected.state) == (b in found.state)
            if a in expected.state:
                one, other_one = expected.state[a], found.state[b]
                if not isinstance(one, Mapping):  # optimizers may keep anything
                    one, other_one = {"state": one}, {"state": other_one}
                assert_equal_entries(one, other_one)
    assert _places(expected) == _places(found), "the state came in another order"


def _places(optimizer: Optimizer) -> list[int | None]:
    """Return the numbers of the parameters that have state, in its order."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers: dict[object, int] = {each: number for number, each in enumerate(parameters)}
    return [numbers.get(each) for each in optimizer.state]


def assert_equal_entries(expected: Mapping[str, object], found: Mapping[str, object]) -> None:
    """Compare the state of one parameter."""
    assert list(expected) == list(found)
    for name, value in expected.items():
        assert_equal_values(value, found[name], name)


def assert_equal_values(expected: object, found: object, name: str) -> None:
    """Compare two values, of tensors at any depth."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert type(found) is type(expected)
        assert same(expected, found), name
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple)
        assert len(found) == len(expected), name
        for number, (a, b) in enumerate(zip(expected, found, strict=True)):
            assert_equal_values(a, b, f"{name}/{number}")
    else:
        assert expected == found, name


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits, on the same device."""
    if a.device != b.device:
        return False
    if torch.sparse_coo in (a.layout, b.layout):
        return a.layout is b.layout and same(a.to_dense(), b.to_dense())
    a, b = a.detach(), b.detach()
    if a.is_sparse and b.is_sparse:
        a, b = a.coalesce(), b.coalesce()
        return a.shape == b.shape and same(a.indices(), b.indices()) and same(a.values(), b.values())
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


# ---------------------------------------------------------------------- what is trained

WIDTH = 48


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, width)``."""
        changed: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + changed


def blocks(count: int = 3) -> nn.Sequential:
    """Return some blocks and a head."""
    return nn.Sequential(*(Block() for _ in range(count)), nn.Linear(WIDTH, 5))


def like_blocks(count: int = 4) -> nn.Sequential:
    """Return blocks that are all alike: layers that documents can name by numbers."""
    return nn.Sequential(*(Block() for _ in range(count)))


def adam(model: nn.Module) -> list[Optimizer]:
    """Return Adam for all parameters."""
    return [torch.optim.Adam(model.parameters(), lr=1e-2)]


def build_blocks() -> tuple[nn.Module, Sequence[Optimizer]]:
    """Return blocks with Adam."""
    model = blocks()
    return model, adam(model)


def batch(size: int = 6) -> tuple[Tensor, Tensor]:
    """Return random inputs and classes."""
    return torch.randn(size, WIDTH), torch.randint(0, 5, (size,))


def loss_of(model: nn.Module, inputs: Tensor, classes: Tensor) -> Tensor:
    """Return the loss of one batch."""
    return nn.functional.cross_entropy(model(inputs), classes)


def step(trial: Trial) -> None:
    """Do one ordinary step with every optimizer."""
    loss = loss_of(trial.model, *batch())
    loss.backward()
    trial.log(loss)
    trial.log_gradients()
    for optimizer in trial.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def steps(count: int = 4) -> Loop:
    """Return a loop of ordinary steps."""

    def loop(trial: Trial) -> None:
        for _ in range(count):
            step(trial)

    return loop


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return independent copies."""
    return [copy.deepcopy(tensor.detach()) for tensor in tensors]
