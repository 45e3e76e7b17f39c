"""An adapter of one's own: an optimizer that keeps one flat tensor for a whole group of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.training.twins import (
    Optimizer,
    Trial,
    assert_same,
    blocks,
    config_of,
    every_layout,
    steps,
    with_device,
)
from tierstore.training import offload
from tierstore.training.faults import guard
from tierstore.training.optimizers.adapters import (
    EntriesAdapter,
    Options,
    Taken,
    adapter_of,
    add_adapter,
)
from tierstore.units import align_up


class FlatMomentum(torch.optim.Optimizer):
    """SGD whose momentum is one tensor, in the entries of the first parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # noqa: ANN401 - as PyTorch's
        """Step once."""
        del closure
        for group in self.param_groups:
            parameters = group["params"]
            gradients = torch.cat([each.grad.reshape(-1) for each in parameters])
            flat = self.state[parameters[0]].setdefault("flat", torch.zeros_like(gradients))
            flat.mul_(0.9).add_(gradients)
            for each, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                each.sub_(part.view_as(each), alpha=0.1)


class FlatAdapter(EntriesAdapter):
    """Says that the flat tensor is its optimizer's alone, and how large it will be."""

    def taken(self, optimizer: Optimizer) -> Taken:
        """All of it."""
        del optimizer
        return Taken.ALL

    def state_bytes(self, optimizer: Optimizer, parameter: torch.Tensor, options: Options) -> int:
        """Return all bytes of a group for its first parameter, and none for the others."""
        del optimizer
        parameters: Any = options["params"]
        is_first = parameter is parameters[0]
        return align_up(sum(each.nbytes for each in parameters), 64) if is_first else 0


ADAPTER = FlatAdapter()
add_adapter(FlatMomentum, ADAPTER)


def build() -> tuple[nn.Module, Sequence[Optimizer]]:
    model = blocks()
    return model, [FlatMomentum(model.parameters(), {})]


@every_layout
def test_an_optimizer_with_an_adapter_of_its_own_trains_bit_for_bit(layout: str, tmp_path: Path) -> None:
    more = with_device(layout, "1200KB") or {"offload_cpu_size": "1200KB"}
    assert_same(build, steps(3), layout, tmp_path, more)


def test_its_state_is_in_the_store_in_the_bytes_that_it_said_and_a_checkpoint_has_it(tmp_path: Path) -> None:
    more = {"offload_cpu_size": "2MB", "durable": True}
    trial = Trial(*build())
    (options,) = trial.optimizer.param_groups
    assert adapter_of(trial.optimizer) is ADAPTER
    said = [ADAPTER.state_bytes(trial.optimizer, each, options) for each in options["params"]]
    with offload(trial.model, list(trial.optimizers), config_of("disk", tmp_path, more)) as run:
        steps(2)(trial)
        (flat,) = [entries["flat"] for entries in trial.optimizer.state.values() if entries]
        assert guard.guarded_tensor_of(flat) is not None
        assert align_up(flat.nbytes, 64) == sum(said)
        run.checkpoint()
        before = flat.clone()
    again = Trial(*build())
    with offload(again.model, list(again.optimizers), config_of("disk", tmp_path, more)):
        (flat,) = [entries["flat"] for entries in again.optimizer.state.values() if entries]
        assert guard.guarded_tensor_of(flat) is not None
        assert torch.equal(flat, before)
        steps(1)(again)
