"""Gradients of modules on the host are averaged where the model computes: NCCL's groups send nothing else.

No group of PyTorch sends what is on the simulated accelerator, so a second process is played here: it
has the same gradients, and values of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, distributed, nn

from tests.accelerator import DEVICE
from tierstore.errors import UsageError
from tierstore.training import offload
from tierstore.training.ranks.averaging import GradientAverages
from tierstore.training.ranks.meeting import Meeting
from tierstore.training.ranks.where import RankPlace


class _Meeting:
    """Two processes that say the same."""

    def exchange(self, mine: object, what: str) -> list[object]:
        """Return what both say."""
        del what
        return [mine, mine]


class _Place:
    """Of the second of two processes."""

    rank, world_size, name = 1, 2, "rank 1"


class _Net(nn.Module):
    """A module on the host, one that this process leaves out, and one of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.host, self.unused, self.fast = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        made: Tensor = self.fast(self.host(x))
        return made


def _config(path: Path) -> dict[str, object]:
    return {
        "device": "openreg",
        "max_device_memory": torch.accelerator.memory_allocated() + 2**20,
        "offload_cpu_size": "4MB",
        "offload_disk_size": 0,
        "offload_path": str(path),
    }


def test_what_is_sent_is_on_the_device_and_comes_back_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_reduce(values: Tensor) -> None:
        assert values.device == DEVICE
        if values.dtype == torch.int32:
            values.fill_(1)  # the other one has gradients of all
        else:
            values.add_(1)

    def broadcast(values: Tensor, source: int) -> None:
        assert (values.device, source) == (DEVICE, 0)
        values.fill_(0.5)

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(distributed, "broadcast", broadcast)
    model = _Net()
    with offload(model, None, _config(tmp_path), placement={"host|unused": "cpu"}):
        averages = GradientAverages(
            cast("RankPlace", _Place()),
            cast("Meeting", _Meeting()),
            dict(model.named_parameters()),
            DEVICE,
            lambda _: None,
        )
        averages.send_values(dict(model.named_parameters()))
        for parameter in model.parameters():
            assert torch.equal(parameter.detach().cpu(), torch.full(parameter.shape, 0.5))
        model(torch.ones(2, 4, device=DEVICE)).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.device.type == ("openreg" if name.startswith("fast") else "cpu"), name
        expected = torch.full((4, 4), 1.0 + 0.5)  # half of two rows of ones times 0.5, and the other's one
        assert torch.equal(cast("Tensor", model.host.weight.grad).cpu(), expected)
        assert torch.equal(cast("Tensor", model.unused.weight.grad).cpu(), torch.ones(4, 4))
        averages.remove()


def test_a_wrapper_inside_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.parallel.DistributedDataParallel(_Net().to(DEVICE), init_sync=False))
        with pytest.raises(UsageError, match=r"2 tensors are used on the host .* run\.average_gradients\(\)"):
            offload(model, None, _config(tmp_path), placement={r"0\.module\.host": "cpu"})
    finally:
        distributed.destroy_process_group()
