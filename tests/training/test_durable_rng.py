"""The random numbers of an accelerator go on with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tierstore.training import offload
from tierstore.training.formats import rng_state


class Generators:
    """What an accelerator's module offers: one state a device."""

    def __init__(self) -> None:
        self.states = {"cuda:1": torch.tensor([1, 2], dtype=torch.uint8)}

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """Return the state of one device."""
        return self.states[str(device)]

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Set the state of one device."""
        self.states[str(device)] = state


def test_the_state_of_the_device_is_saved_and_set_where_the_device_is_of_the_same_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generators = Generators()
    monkeypatch.setattr(torch, "get_device_module", lambda _: generators)
    tensors: dict[str, torch.Tensor] = {}
    cuda, xpu = torch.device("cuda", 1), torch.device("xpu", 0)
    saved: dict[str, Any] = rng_state.save(cuda, tensors)
    expected = torch.rand(3)
    generators.states["cuda:1"] = torch.tensor([9], dtype=torch.uint8)
    rng_state.restore(saved, tensors, xpu)  # only the CPU's generator can go on there
    assert torch.equal(torch.rand(3), expected)
    assert generators.states["cuda:1"].tolist() == [9]
    rng_state.restore(saved, tensors, cuda)
    assert generators.states["cuda:1"].tolist() == [1, 2]


@pytest.mark.gpu
def test_dropout_on_the_accelerator_goes_on(tmp_path: Path) -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    config: dict[str, object] = {
        "device": accelerator.type,
        "max_device_memory": "256MB",
        "offload_cpu_size": "64MB",
        "offload_disk_size": "64MB",
        "offload_path": str(tmp_path / "files"),
        "durable": True,
    }
    outputs = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 8))
        optimizer = torch.optim.Adam(model.parameters())
        with offload(model, optimizer, config) as run:
            inputs = torch.ones(16, 64, device=run.store.device)
            if run.resumed is None:
                model(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                run.checkpoint()
            outputs.append(model(inputs).detach().cpu())
    assert torch.equal(*outputs)
