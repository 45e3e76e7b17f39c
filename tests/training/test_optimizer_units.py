"""What an optimizer keeps, asked of its adapter; and that a step is linear in its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.twins import Optimizer, config_of
from tierstore.optim import FTRL, SGD, Adagrad, LazyAdam, SparseAdam
from tierstore.training import offload
from tierstore.training.optimizers.adapters import EntriesAdapter, StateTensor, adapter_of
from tierstore.units import align_up

KINDS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
    "NAdam": torch.optim.NAdam,
    "Rprop": torch.optim.Rprop,
    "LazyAdam": LazyAdam,
    "FTRL": FTRL,
    "our SparseAdam": SparseAdam,
    "our Adagrad": Adagrad,
    "our SGD": SGD,
    "our momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3,), (5, 7), (16, 16), (300, 1), (2, 3, 40)])
def test_what_is_certain_is_no_more_than_what_a_step_makes_and_what_there_is_is_counted(
    kind: str, shape: tuple[int, ...]
) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = KINDS[kind]([parameter])
    adapter, (options,) = adapter_of(optimizer), optimizer.param_groups
    certain_bytes = adapter.certain_bytes(optimizer, parameter, options)
    expected_bytes = adapter.state_bytes(optimizer, parameter, options)
    parameter.grad = torch.ones(shape)
    optimizer.step()
    there = [each.tensor for each in adapter.state_tensors(optimizer, [parameter])]
    made_bytes = sum(each.nbytes for each in there)
    assert certain_bytes <= made_bytes
    assert expected_bytes == sum(align_up(each.nbytes, 64) for each in there)
    assert adapter.certain_bytes(optimizer, parameter, options) == made_bytes
    assert adapter.state_bytes(optimizer, parameter, options) == sum(
        align_up(each.nbytes, 64) for each in there
    )


def small_layers(count: int) -> nn.Sequential:
    """Return layers that travel together."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def count_looks(
    count: int, more: dict[str, object], path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Return how many parameters there are, and how often a step asks for the state of one."""
    looks = 0
    state_tensors = EntriesAdapter.state_tensors

    def noted(adapter: EntriesAdapter, optimizer: Optimizer, unit: Sequence[Tensor]) -> Iterator[StateTensor]:
        nonlocal looks
        looks += len(unit)
        return state_tensors(adapter, optimizer, unit)

    model = small_layers(count)
    optimizer = torch.optim.Adam(model.parameters())
    with offload(model, optimizer, config_of("host", path, more)) as run:
        assert len(run.placement.bundles) == 1
        with monkeypatch.context() as patched:
            for number in range(3):
                if number == 2:  # state is there
                    patched.setattr(EntriesAdapter, "state_tensors", noted)
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return 2 * count, looks


@pytest.mark.parametrize("is_in_backward", [False, True])
def test_a_step_is_linear_in_its_parameters(
    is_in_backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (4, 16, 64):
        parameters, looks = count_looks(
            count, {"optimizer_in_backward": is_in_backward}, tmp_path, monkeypatch
        )
        assert parameters <= looks <= 2 * parameters
