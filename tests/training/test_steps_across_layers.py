"""Steps that work on tensors of several layers at once, just after one of them was given more state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.training.twins import Trial, assert_same, every_layout
from tests.training.whole_step_kinds import Kind
from tierstore.training.faults import guard

WIDTH = 16


class CrossesLayers(Kind):
    """Keeps something for each parameter as it comes to it, then adds the first layer's to the second."""

    def apply(self) -> None:
        """Change parameters."""
        parameters = self.param_groups[0]["params"]
        for number, p in enumerate(parameters):
            self.state[p].setdefault("m", torch.full_like(p, number + 1))
        first, second = parameters[0], parameters[1]
        second.add_(self.state[first]["m"], alpha=-0.1)
        self.state[first]["m"].mul_(0.5).add_(second)


@every_layout
@pytest.mark.parametrize("names", [("weight", "bias"), ("bias", "weight")], ids=" first, then ".join)
def test_one_use_of_two_layers_after_one_of_them_was_given_more_state(
    names: tuple[str, str], layout: str, tmp_path: Path
) -> None:
    def build() -> tuple[nn.Module, Sequence[torch.optim.Optimizer]]:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        first, second = model[0], model[2]
        one, other = names
        layers = [(first, one), (second, one), (second, other), (first, other)]
        return model, [CrossesLayers([getattr(layer, name) for layer, name in layers])]

    def loop(trial: Trial) -> None:
        guarded_tensors = [guard.guarded_tensor_of(trial.model[number].weight) for number in (0, 2)]  # type: ignore[index]
        bundles = {guarded_tensor.binding for guarded_tensor in guarded_tensors if guarded_tensor is not None}
        assert layout == "host" or len(bundles) in (0, 2), "each layer has a bundle of its own"
        for _ in range(3):
            trial.model(torch.ones(2, WIDTH)).sum().backward()
            trial.optimizer.step()
            for entries in trial.optimizer.state.values():
                trial.log(entries["m"])
            trial.optimizer.zero_grad()

    assert_same(build, loop, layout, tmp_path)
