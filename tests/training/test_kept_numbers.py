"""State dicts of optimizers that somebody keeps: their numbers follow, as their tensors do."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.twins import config_of, every_layout, is_on_accelerator
from tierstore.training import offload


class Counting(torch.optim.Optimizer):
    """An optimizer that nobody knows, and that counts its steps in a number."""

    def __init__(self, parameters: Any) -> None:  # noqa: ANN401 - PyTorch's own type is private
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Step."""
        del closure
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            state.setdefault("sum", torch.zeros_like(p)).add_(p.grad.to_dense())
            p.sub_(state["sum"], alpha=0.1 / state["step"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1),
    "of a user": Counting,
}


def _build(name: str) -> tuple[nn.Embedding, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Embedding(16, 4, sparse=True)
    return model, OPTIMIZERS[name](model.parameters())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for number in range(count):
        model((torch.arange(3) + number) % 16).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _assert_equal(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    one, other = expected["state"][0], found["state"][0]
    assert type(other) is dict
    assert list(one) == list(other)
    for name, value in one.items():
        is_tensor = isinstance(value, torch.Tensor)
        assert torch.equal(value.cpu(), other[name].cpu()) if is_tensor else value == other[name], name


@pytest.mark.parametrize("name", OPTIMIZERS)
@every_layout
def test_numbers_follow_in_the_run_and_after_it_and_not_in_a_copy(
    name: str, layout: str, tmp_path: Path
) -> None:
    plain, its = _build(name)
    ours, own = _build(name)
    _step(plain, its, 2)
    with offload(ours, own, config_of(layout, tmp_path)):
        _step(ours, own, 2)
        kept, copied = own.state_dict(), copy.deepcopy(own.state_dict())
        expected, expected_copy = its.state_dict(), copy.deepcopy(its.state_dict())
        for _ in range(2):
            _step(plain, its, 1)
            _step(ours, own, 1)
            assert kept["state"][0]["step"] == expected["state"][0]["step"]
        _assert_equal(expected, kept)
        _assert_equal(expected_copy, copied)
        file = io.BytesIO()
        torch.save(kept, file)
        file.seek(0)
        _assert_equal(expected, torch.load(file))
    if is_on_accelerator and name == "SparseAdam":  # its entries, in host memory, are of their own now
        expected = copy.deepcopy(expected)
    _step(plain, its, 1)
    _step(ours, own, 1)
    _assert_equal(expected, kept)
    assert own.state_dict()["state"][0]["step"] == 5


def test_nobody_keeps_a_state_dict_whose_program_has_let_it_go(tmp_path: Path) -> None:
    model, optimizer = _build("SparseAdam")
    with offload(model, optimizer, config_of("device", tmp_path)):
        _step(model, optimizer, 1)
        hooks: Any = optimizer._optimizer_step_post_hooks
        before = len(hooks)
        kept = optimizer.state_dict()
        entry = weakref.ref(kept["state"][0]["exp_avg"])
        _step(model, optimizer, 1)
        assert len(hooks) == before + 1
        del kept
        _step(model, optimizer, 1)
        assert entry() is None
        assert len(hooks) == before
