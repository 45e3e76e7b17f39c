"""What stays where backward steps, on models whose layers are not alike: the bits are plain PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.quiet import be_quiet
from tests.training.test_optimizer_in_backward import assert_same_as_hooks
from tests.training.twins import WIDTH, Optimizer, Trial, batch, loss_of
from tierstore.training import Offload

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "without state": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "small state": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "large state": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}


class Uneven(nn.Module):
    """One layer is frozen, one used twice, and one much larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(requires_grad=False)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.others = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify ``(batch, WIDTH)``."""
        x = torch.tanh(self.twice(torch.tanh(self.frozen(torch.tanh(self.twice(x))))))
        output: torch.Tensor = self.head(torch.tanh(self.others(self.down(torch.tanh(self.up(x))))))
        return output


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quota", ["160KB", "200KB", "280KB"])
def test_layers_that_are_not_alike_are_trained_bit_for_bit_under_any_quota(
    kind: str, quota: str, tmp_path: Path
) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Uneven()
        return model, [KINDS[kind](model.parameters())]

    runs: list[Offload] = []

    def loop(trial: Trial) -> None:
        for _ in range(5):
            loss = loss_of(trial.model, *batch())
            loss.backward()
            trial.log(loss)
        if trial.run is not None:
            be_quiet(trial.run.store)
            runs.append(trial.run)
            residents = trial.run.placement.residents
            assert residents is not None
            assert trial.run.placement.residents_without_state <= residents
            stay = trial.run.store.where
            assert {key for key in residents if stay(key)[0] != "host"} == set()

    more: dict[str, object] = {"offload_cpu_size": quota}
    assert_same_as_hooks(build, loop, "disk", tmp_path, more)
    assert runs
