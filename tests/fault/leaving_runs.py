"""What tests of leaving a run share: layouts, a training with all kinds of tensors, and what to expect."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.fault.failing_memory import Raise, no_accelerator_memory, no_map, no_memory
from tests.fault.test_endings import everything, is_ordinary
from tests.training.twins import same
from tierstore.config.host_memory import HostRoom
from tierstore.errors import BackendError, StoreClosed
from tierstore.training import Offload, offload
from tierstore.training.budgets import host_room

LAYOUTS: dict[str, dict[str, object]] = {
    "host": {"device": "cpu", "offload_cpu_size": "4MB", "offload_disk_size": 0},
    "disk": {"device": "cpu", "offload_cpu_size": "48KB", "offload_disk_size": "8MB"},
    "durable": {"device": "cpu", "offload_cpu_size": "48KB", "offload_disk_size": "8MB", "durable": True},
    "three": {
        "device": "emulated",
        "max_device_memory": "64KB",
        "offload_cpu_size": "48KB",
        "offload_disk_size": "8MB",
        "device_options": {"overwrite_freed": True},
    },
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

ERRORS: dict[str, Raise] = {
    "memory": no_memory,
    "map": no_map,
    "allocator": no_accelerator_memory,
    "backend": lambda: BackendError("the medium failed"),
    "interrupt": KeyboardInterrupt,
}
every_error = pytest.mark.parametrize("error", ERRORS)

WIDTH = 24


class Scaled(nn.Module):
    """A model with tied weights, a transposed one, a large buffer and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())
        self.last = nn.Linear(2 * WIDTH, 3)
        self.last.bias.requires_grad = False
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4096).view(4, -1)[:, ::2].contiguous())
        self.register_buffer("passing", torch.ones(2048), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, width)``."""
        x = torch.tanh(self.again(self.first(x)))
        scale: Tensor = self.get_buffer("scale")
        return self.last(x @ self.turned.t()) * scale[0, :3] + self.get_buffer("passing")[0]  # type: ignore[no-any-return]


class Training:
    """A model that is trained, offloaded or not."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Scaled()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=0.01)
        self.run: Offload | None = None

    def backward(self) -> None:
        """Make gradients."""
        self.model(torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)).square().sum().backward()

    def step(self, count: int = 1) -> Training:
        """Make steps, and gradients for the next."""
        for _ in range(count):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.backward()
        return self

    def everything(self) -> dict[str, Tensor]:
        """Return every tensor that there has to be."""
        return {**everything(self.model, self.optimizer), **dict(self.model.named_buffers())}

    def offload(self, layout: str, path: Path, on_close: str = "auto") -> Offload:
        """Begin a run."""
        config = {**LAYOUTS[layout], "offload_path": str(path / "files"), "offload_grad": "cpu"}
        config["buffer_min_size"] = "4KB"
        self.run = offload(self.model, self.optimizer, config, on_close=on_close)
        return self.run


def begun(layout: str, path: Path, on_close: str = "auto") -> tuple[Training, Offload]:
    training = Training()
    run = training.offload(layout, path, on_close)
    training.step(2)
    return training, run


def assert_restored(training: Training, expected: dict[str, Tensor]) -> None:
    found = training.everything()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert is_ordinary(tensor), name
        assert same(tensor, expected[name]), name
    assert training.model.again.weight is training.model.first.weight
    assert training.model.turned.stride() == (1, 2 * WIDTH)
    assert not any(module._forward_pre_hooks for module in training.model.modules())


def assert_read(training: Training, expected: dict[str, Tensor]) -> None:
    for name, tensor in training.everything().items():
        assert same(tensor, expected[name]), name


def assert_released(training: Training, match: str) -> None:
    for name, tensor in training.everything().items():
        if tensor.dim() == 0 or is_ordinary(tensor):  # the numbers of steps
            assert tensor.numel() < 4, name
            continue
        with pytest.raises(StoreClosed, match=match):
            tensor.sum()


def limited(monkeypatch: pytest.MonkeyPatch, nbytes: int, *, is_of_addresses: bool = True) -> None:
    """Let there be so much host memory."""
    monkeypatch.setattr(
        host_room, "host_rooms", lambda: [HostRoom(nbytes, "the test's limit", is_of_addresses)]
    )
