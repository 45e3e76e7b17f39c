"""What reads all parameters at once, where only some fit: averages, vectors; and what is saved of one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from tests.training.twins import (
    WIDTH,
    Optimizer,
    Trial,
    adam,
    assert_equal_lists,
    assert_same,
    blocks,
    config_of,
    every_layout,
    step,
    with_device,
)
from tierstore.training import offload


def _build() -> tuple[nn.Module, Sequence[Optimizer]]:
    model = blocks(5)
    return model, adam(model)


def _averages(**options: object) -> Callable[[Trial], None]:
    def loop(trial: Trial) -> None:
        average = AveragedModel(trial.model, **options)  # type: ignore[arg-type]
        for _ in range(3):
            step(trial)
            average.update_parameters(trial.model)
            for parameter in average.parameters():
                trial.log(parameter)

    return loop


def _write_in_an_average(trial: Trial) -> None:
    """What averages may write to what it is given, as in plain PyTorch."""

    def write(average: Tensor, current: Tensor, _: object) -> Tensor:
        current.mul_(0.5)
        return average + current

    average = AveragedModel(trial.model, avg_fn=write)
    for _ in range(2):
        average.update_parameters(trial.model)
    for each in (*average.parameters(), *trial.model.parameters()):
        trial.log(each)


def _vector(trial: Trial) -> None:
    for _ in range(2):
        step(trial)
        vector = parameters_to_vector(trial.model.parameters())
        trial.log(vector)
        vector.square().sum().backward()
        trial.log_gradients()
        with torch.no_grad():
            trial.log(parameters_to_vector(trial.model.parameters()))
        vector_to_parameters(vector.detach() * 0.5, trial.model.parameters())


def _prune(trial: Trial) -> None:
    layers = [(each, "weight") for each in trial.model.modules() if isinstance(each, nn.Linear)]
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=0.25)
    trial.model(torch.randn(2, WIDTH)).sum().backward()
    trial.log_gradients()
    for layer, name in layers:
        prune.remove(layer, name)
        own = layer._parameters
        own["bias"] = own.pop("bias")  # after the weight, as it was


def _refused_view(trial: Trial) -> None:
    weight = trial.model.get_parameter("0.up.weight")
    weight.data = weight.data.t()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        parameters_to_vector(trial.model.parameters())


LOOPS: dict[str, Callable[[Trial], None]] = {
    "average": _averages(),
    "with buffers": _averages(use_buffers=True),
    "moving": _averages(avg_fn=get_ema_avg_fn(0.9)),
    "moving over lists": _averages(multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "on the host": _averages(device=torch.device("cpu")),
    "that writes": _write_in_an_average,
    "vector": _vector,
    "pruning": _prune,
    "view that is refused": _refused_view,
}


@every_layout
@pytest.mark.parametrize("name", LOOPS)
def test_what_reads_all_parameters_at_once(layout: str, name: str, tmp_path: Path) -> None:
    # Averages and vectors are the program's, on the device as well.
    assert_same(_build, LOOPS[name], layout, tmp_path, with_device(layout, "900KB"))


# --- what is saved of one --------------------------------------------------------------------------


Save = Callable[[object], tuple[int, Any]]
"""Returns how many bytes were written, and what is read from them."""


def _saved(value: object) -> tuple[int, Any]:
    file = io.BytesIO()
    torch.save(value, file)
    size = file.tell()
    file.seek(0)
    return size, torch.load(file)


def _pickled(value: object) -> tuple[int, Any]:
    found = pickle.dumps(value)
    return len(found), pickle.loads(found)


def _saved_in_the_former_format(value: object) -> tuple[int, Any]:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False)
    size = file.tell()
    file.seek(0)
    return size, torch.load(file)


def _of_shared_memory(model: nn.Sequential, save: Save) -> list[Tensor]:
    """Save aliases that share memory, and write to one of what comes back: of ``pickle`` none share any."""
    weights = [model.get_parameter(f"{layer}.weight") for layer in range(2)]
    _, found = save([weights[0].data, weights[1].data, weights[0].data[1]])
    found[0].zero_()
    return [*found]


class _Saving(nn.Module):
    """A layer that saves its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.found: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, WIDTH)``."""
        self.found = _saved([self.weight.data, self.scale.data])
        return x @ self.weight * self.scale


@every_layout
@pytest.mark.parametrize("save", [_saved, _pickled, _saved_in_the_former_format])
def test_an_alias_is_saved_as_large_as_it_is_and_shares_what_it_shares(
    layout: str, save: Save, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), last := _Saving())
    model.get_parameter("1.weight").data = model.get_parameter("0.weight").data.t()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = {name: save(p.detach()) for name, p in model.named_parameters()}
    sharing = _of_shared_memory(model, save)
    with offload(model, None, config_of(layout, tmp_path)) as run, torch.no_grad():
        for name, parameter in model.named_parameters():
            for alias in (parameter.data, parameter.detach(), parameter.view(parameter.shape)):
                size, found = save(alias)
                assert size <= plain[name][0] + 128
                assert torch.equal(found, expected[name])
                looks = (Tensor, alias.requires_grad, parameter.stride())
                assert (type(found), found.requires_grad, found.stride()) == looks
        del alias
        bias = model.get_parameter("0.bias")
        _, part = save(bias.data[3:5])
        assert torch.equal(part, bias[3:5])
        assert_equal_lists(sharing, _of_shared_memory(model, save))
        kept = bias.detach()
        _, former = save(kept)
        bias.add_(1)
        _, found = save([kept, kept])
        assert torch.equal(former + 1, found[0])
        assert found[0] is found[1]
        assert copy.copy(kept).data_ptr() == kept.data_ptr()
        model(torch.randn(2, WIDTH))
        size, found = last.found
        assert size < 4 * (WIDTH + 1) * WIDTH + 4096
        assert torch.equal(found[0], expected["2.weight"])
        del kept
        run.store.check()
    assert torch.equal(model.get_parameter("2.scale"), expected["2.scale"])


def test_a_saved_alias_that_requires_a_gradient_does_so_again(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with offload(model, None, config_of("disk", tmp_path)):
        _, found = _saved(model.get_parameter("0.weight").detach().requires_grad_())
        assert found.requires_grad
        assert torch.equal(found, model.get_parameter("0.weight"))
