"""The net of the Host&Device document: the losses of the original system, with and without placement."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.training.host_models import Dense
from tests.training.twins import LATE_AND_OVERWRITTEN, assert_equal_lists, assert_equal_models
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload

VECTORS: Mapping[str, Any] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "host_device.json").read_text(encoding="utf-8")
)
RATES = [run["learning_rate"] for run in VECTORS["runs"]]
PLACED = {r"layer\d\.(matmul|add)": "cpu"}
"""What the document does line by line: ``net.layer1.matmul.set_device("CPU")`` and so on."""

LAYOUTS: Mapping[str, Mapping[str, object]] = {
    "device": {"max_device_memory": "8MB", "offload_cpu_size": "64MB", "offload_disk_size": 0},
    "three": {"max_device_memory": "2MB", "offload_cpu_size": "6MB", "offload_disk_size": "64MB"},
}


class Network(nn.Module):
    """The document's."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = Dense(28 * 28, 512)
        self.relu1 = nn.ReLU()
        self.layer2 = Dense(512, 512)
        self.relu2 = nn.ReLU()
        self.layer3 = Dense(512, 10)
        with torch.no_grad():
            for parameter, weight in zip(self.parameters(), weights, strict=True):
                parameter.copy_(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to scores."""
        x = self.flatten(x)
        x = self.relu1(self.layer1(x))
        x = self.relu2(self.layer2(x))
        logits: Tensor = self.layer3(x)
        return logits


class Recipe(NamedTuple):
    """What the vectors were made of."""

    weights: list[Tensor]
    images: Tensor
    classes: Tensor


def recipe() -> Recipe:
    """Return what the vectors' ``recipe`` says."""
    r = np.random.RandomState(3)
    shapes = [(784, 512), (512,), (512, 512), (512,), (512, 10), (10,)]
    weights = [r.normal(0, 0.01, shape).astype(np.float32) for shape in shapes]
    classes = r.randint(0, 10, (20, 32))
    prototypes, noise = r.rand(10, 784), r.rand(20, 32, 784)
    images = (((0.5 * prototypes[classes] + 0.5 * noise) - 0.1307) / 0.3081).astype(np.float32)
    assert hashlib.sha256(images.tobytes()).hexdigest() == VECTORS["sha256_of_images"]
    return Recipe(
        [torch.from_numpy(each) for each in weights], torch.from_numpy(images), torch.from_numpy(classes)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, given: Recipe) -> list[Tensor | None]:
    """Do the vectors' steps; return the losses, and the first row of the last scores."""
    found: list[Tensor | None] = []
    for images, classes in zip(given.images, given.classes, strict=True):
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach().clone())
    return [*found, logits[0].detach().clone()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("run", VECTORS["runs"], ids=map(str, RATES))
def test_the_losses_are_the_original_s_and_the_bits_plain_pytorch_s(
    run: Mapping[str, Any], layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = recipe()
    plain, ours = Network(given.weights), Network(given.weights)
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=run["learning_rate"]), given)
    optimizer = torch.optim.SGD(ours.parameters(), lr=run["learning_rate"])
    config = {
        "device": "emulated",
        "device_options": LATE_AND_OVERWRITTEN,
        "offload_path": str(tmp_path),
        **LAYOUTS[layout],
    }
    with (
        caplog.at_level(logging.INFO, "tierstore"),
        offload(ours, optimizer, {"placement": PLACED, "offload_config": config}) as opened,
        DeviceBudget("64MiB", mixing="raise"),
    ):
        found = train(ours, optimizer, given)
        assert all("device" not in opened.store.where(key) for key in opened.store)
    assert_equal_lists(expected, found)
    assert_equal_models(plain, ours)
    losses = torch.stack([each for each in found[:-1] if each is not None])
    torch.testing.assert_close(losses, torch.tensor(run["losses"]), rtol=1e-5, atol=0)
    assert found[-1] is not None
    torch.testing.assert_close(found[-1], torch.tensor(run["last_logits_first_row"]), rtol=1e-4, atol=1e-6)
    lines = [each for each in caplog.messages if each.startswith("primitive target")]
    assert lines == [
        f"primitive target does not match backend: GPU, primitive_target: CPU, node name: Default/{node}"
        for node in (
            *("layer1/MatMul-op3", "layer1/Add-op4", "layer2/MatMul-op7"),
            *("layer2/Add-op8", "layer3/MatMul-op11", "layer3/Add-op12"),
        )
    ]
