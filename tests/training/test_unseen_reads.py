"""What reads parameters and gradients where PyTorch asks nobody: it raises, and never gets NaN."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.twins import Trial, adam, batch, blocks, config_of, every_layout, loss_of, step
from tierstore.training import offload
from tierstore.training.bundles import poisons
from tierstore.training.bundles.layout import place_of

Read = Callable[[Tensor], object]


def _natively(read: Read) -> Read:
    def act(tensor: Tensor) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            return read(tensor)

    return act


def _point_another_tensor_at_it(tensor: Tensor) -> object:
    other = torch.zeros(3)
    other.data = tensor
    return other + 1


def _saved_natively(tensor: Tensor) -> object:
    x = torch.ones(tensor.shape, requires_grad=True)
    with torch._C.DisableTorchFunctionSubclass():
        (x * tensor).sum().backward()
    return x.grad


READS: dict[str, Read] = {
    "torch.tensor": torch.tensor,
    "torch.asarray": lambda tensor: torch.asarray(tensor, copy=True),
    "torch.Tensor": lambda tensor: torch.Tensor(tensor).sum(),
    "to_dlpack": vars(torch.utils.dlpack)["to_dlpack"],
    "kernels": _natively(lambda tensor: tensor.sum()),
    "copies": _natively(lambda tensor: torch.zeros(tensor.shape).copy_(tensor)),
    "views": _natively(lambda tensor: tensor.view(-1)[:2].tolist()),
    "writes": _natively(lambda tensor: tensor.detach().zero_()),
    "writes over lists": _natively(lambda tensor: torch._foreach_zero_([tensor.detach()])),
    "addresses": _natively(lambda tensor: tensor.data_ptr()),
    "arrays": _natively(lambda tensor: tensor.detach().numpy()),
    "another tensor": _point_another_tensor_at_it,
    "graphs": _saved_natively,
}


@every_layout
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor", "ignore:torch.asarray")
@pytest.mark.parametrize("name", READS)
def test_what_nobody_sees_raises_and_the_next_use_is_right(layout: str, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = blocks()
    torch.manual_seed(0)
    plain = blocks()
    with offload(model, None, config_of(layout, tmp_path)):
        for tensor, expected in zip(model.parameters(), plain.parameters(), strict=True):
            with pytest.raises(RuntimeError, match="Cannot access data pointer"):
                READS[name](tensor)
            assert torch.equal(tensor, expected)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor", "ignore:torch.asarray")
@pytest.mark.parametrize("name", [name for name in READS if name != "to_dlpack"])
def test_gradients_and_moments_that_are_away_raise_as_well(name: str, tmp_path: Path) -> None:
    model = blocks()
    trial = Trial(model, adam(model))
    with offload(model, list(trial.optimizers), config_of("disk", tmp_path)):
        step(trial)
        loss_of(model, *batch()).backward()
        parameter = model.get_parameter("0.up.weight")
        assert parameter.grad is not None
        for tensor in (parameter.grad, trial.optimizer.state[parameter]["exp_avg"]):
            with pytest.raises(RuntimeError, match="Cannot access data pointer"):
                READS[name](tensor)
            assert torch.isfinite(tensor).all()
        step(trial)
    assert all(torch.isfinite(each).all() for each in model.parameters())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int8, torch.complex64]
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_no_poison_can_be_read(dtype: torch.dtype, *, is_transposed: bool) -> None:
    tensor = torch.zeros(3, 5, dtype=dtype)
    place = place_of("w", tensor.t() if is_transposed else tensor)
    cpu = torch.device("cpu")
    for poison in (poisons.poison_for(place, cpu), poisons.Poisons(cpu).like(place)):
        assert (poison.shape, poison.dtype) == (place.shape, dtype)
        for act in (poison.clone, poison.view(torch.uint8).tolist if dtype.itemsize == 1 else poison.tolist):
            with pytest.raises(RuntimeError, match="Cannot access data pointer"):
                act()
    assert torch.zeros(3).sum() == 0
