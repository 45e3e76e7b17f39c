"""Several runs at a time, and models that others have changed: what is served and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.training.twins import (
    Block,
    assert_equal_lists,
    batch,
    blocks,
    config_of,
    every_layout,
    loss_of,
    with_device,
)
from tierstore.errors import UsageError
from tierstore.training import offload


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        loss = loss_of(model, *batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    return found


def _build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = blocks(4)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


@every_layout
def test_an_optimizer_steps_what_another_run_has_offloaded_later(layout: str, tmp_path: Path) -> None:
    expected = _losses(*_build())
    model, optimizer = _build()
    room = with_device(layout, "224KB")  # what the optimizer keeps for the other run is the program's
    with (
        offload(model[:2], optimizer, config_of(layout, tmp_path / "a", room)),
        offload(model[2:], None, config_of(layout, tmp_path / "b", room)),
    ):
        found = _losses(model, optimizer)
    assert_equal_lists(expected, found)


@every_layout
def test_an_operation_on_parameters_of_two_runs_asks_each_one_for_its_own(
    layout: str, tmp_path: Path
) -> None:
    def average(model: nn.Module, other: nn.Module) -> None:
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), reversed(list(other.parameters())), strict=True):
                if ours.shape == theirs.shape:
                    ours.copy_(theirs)
            for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
                ours.lerp_(theirs, 0.25)
            torch._foreach_add_(list(model.parameters()), list(other.parameters()))

    def built() -> tuple[nn.Sequential, nn.Sequential]:
        return _build()[0], nn.Sequential(*(each.requires_grad_(requires_grad=False) for each in blocks(4)))

    expected, its_other = built()
    average(expected, its_other)
    model, other = built()
    with (
        offload(model, None, config_of(layout, tmp_path / "a")) as run,
        offload(other, None, config_of(layout, tmp_path / "b")) as its_run,
    ):
        average(model, other)
        run.store.check()
        its_run.store.check()
    assert_equal_lists(list(expected.parameters()), list(model.parameters()))
    assert_equal_lists(list(its_other.parameters()), list(other.parameters()))


def test_an_optimizer_that_another_run_steps_is_refused(tmp_path: Path) -> None:
    model, optimizer = _build()
    with (
        offload(model[:2], optimizer, config_of("host", tmp_path)),
        pytest.raises(UsageError, match="which another run has offloaded: both would step it"),
    ):
        offload(model[2:], optimizer, config_of("host", tmp_path))


def test_parameters_made_in_inference_mode_are_refused_by_name(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(8, 8))
    model.requires_grad_(requires_grad=False)
    with pytest.raises(UsageError, match=r"'0\.weight' cannot be offloaded: it was made under"):
        offload(model, None, config_of("host", tmp_path))
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@every_layout
def test_a_tool_that_moves_hooks_to_another_module_does_no_harm(layout: str, tmp_path: Path) -> None:
    class Doubled(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.weight, self.bias = linear.weight, linear.bias

        def forward(self, x: Tensor) -> Tensor:
            return 2 * nn.functional.linear(x, self.weight, self.bias)

    def train(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        first = _losses(model, optimizer)
        head: Any = model[-1]
        other = Doubled(head)
        for hook in head._forward_pre_hooks.values():
            other.register_forward_pre_hook(hook)
        for hook in head._forward_hooks.values():
            other.register_forward_hook(hook)
        model[-1] = other
        return [*first, *_losses(model, optimizer)]

    expected = train(*_build())
    model, optimizer = _build()
    with offload(model, optimizer, config_of(layout, tmp_path)):
        assert_equal_lists(expected, train(model, optimizer))


def _normed(kind: str) -> nn.Sequential:
    model = blocks(3)
    for module in list(model)[:3]:
        assert isinstance(module, Block)
        if kind == "pruned":
            prune.random_unstructured(module.up, "weight", amount=0.5)
        elif kind == "spectral":
            nn.utils.spectral_norm(module.up)
        else:
            with pytest.warns(FutureWarning, match="weight_norm"):
                nn.utils.weight_norm(module.up)
    return model


@pytest.mark.parametrize("kind", ["spectral", "weight", "pruned"])
@every_layout
def test_norms_and_masks_whose_hooks_make_the_weight_before_each_forward(
    layout: str, tmp_path: Path, kind: str
) -> None:
    def run(config: dict[str, object] | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = _normed(kind)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        if config is None:
            return _losses(model, optimizer)
        with offload(model, optimizer, config):
            return _losses(model, optimizer)

    assert_equal_lists(run(None), run(config_of(layout, tmp_path, with_device(layout, "320KB"))))
