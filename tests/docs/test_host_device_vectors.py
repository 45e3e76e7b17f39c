"""The net of the host and device example against what the original system computed: losses, logits, sums."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from host_device import PLACEMENT, Network
from tierstore.training import offload

DOCUMENT: Mapping[str, Any] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "host_device.json").read_text(encoding="utf-8")
)
RUNS = [pytest.param(each, id=str(each["learning_rate"])) for each in DOCUMENT["runs"]]
SHAPES = ((784, 512), (512,), (512, 512), (512,), (512, 10), (10,))

Around = Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[object]]


def _recipe() -> tuple[list[Tensor], Tensor, Tensor]:
    """Return parameters, images and labels as the vectors' ``recipe`` makes them."""
    chance = np.random.RandomState(3)
    parameters = [torch.from_numpy(chance.normal(0, 0.01, shape).astype(np.float32)) for shape in SHAPES]
    labels = chance.randint(0, 10, (20, 32))
    patterns, noise = chance.rand(10, 784), chance.rand(20, 32, 784)
    images = (((0.5 * patterns[labels] + 0.5 * noise) - 0.1307) / 0.3081).astype(np.float32)
    assert hashlib.sha256(images.tobytes()).hexdigest() == DOCUMENT["sha256_of_images"]
    return parameters, torch.from_numpy(images), torch.from_numpy(labels)


def _train(learning_rate: float, around: Around) -> tuple[list[float], Tensor, Network]:
    """Return the losses, the last logits, and the net."""
    parameters, images, labels = _recipe()
    net = Network()
    with torch.no_grad():
        for parameter, values in zip(net.parameters(), parameters, strict=True):
            parameter.copy_(values)
    optimizer = torch.optim.SGD(net.parameters(), learning_rate)
    losses, logits = [], torch.empty(0)
    with around(net, optimizer):
        for batch, expected in zip(images, labels, strict=True):
            logits = net(batch.view(32, 1, 28, 28))
            loss = nn.functional.cross_entropy(logits, expected)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        logits = logits.detach().clone()
    return losses, logits, net


def _plain(_net: nn.Module, _optimizer: torch.optim.Optimizer) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


@pytest.mark.parametrize("run", RUNS)
def test_losses_are_the_original_s(run: Mapping[str, Any]) -> None:
    losses, logits, net = _train(run["learning_rate"], _plain)
    assert losses == pytest.approx(run["losses"], rel=1e-5)
    assert logits[0].tolist() == pytest.approx(run["last_logits_first_row"], rel=1e-4, abs=1e-6)
    assert net.layer3.bias.tolist() == pytest.approx(run["layer3_bias"], rel=1e-4, abs=1e-6)
    sums = [parameter.detach().double().sum().item() for parameter in net.parameters()]
    assert sums == pytest.approx(run["parameter_sums"], rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("placement", [{}, PLACEMENT], ids=["on the device", "placed"])
def test_offloaded_every_bit_is_that_of_plain_pytorch(
    placement: Mapping[str, str], run: Mapping[str, Any], tmp_path: Path
) -> None:
    config = {
        "device": "emulated",
        "max_device_memory": "8MB",
        "offload_cpu_size": "32MB",
        "offload_path": str(tmp_path),
    }
    plain = _train(run["learning_rate"], _plain)
    ours = _train(
        run["learning_rate"], lambda net, optimizer: offload(net, optimizer, config, placement=placement)
    )
    assert ours[0] == plain[0]
    assert torch.equal(ours[1], plain[1])
    assert all(map(torch.equal, ours[2].parameters(), plain[2].parameters()))
