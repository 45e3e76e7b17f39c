"""Models on the meta device: what users hung on parameters stays, and openings that fail leave no values."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tests.training.twins import Trial, adam, assert_equal_lists, assert_equal_models, config_of, every_layout
from tierstore.errors import StoreClosed, TierStoreError
from tierstore.formats.safetensors_files import TensorFile
from tierstore.training import InitialValues, offload, without_values


class Shared(nn.Module):
    """Layers of which two have one weight, with a buffer and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)
        self.last.bias.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(torch.tanh(self.second(torch.tanh(self.first(x))))))
        return y


def made(where: str) -> Shared:
    torch.manual_seed(3)
    with torch.device(where):
        return Shared()


def written(path: Path) -> Path:
    state = made("cpu").state_dict()
    del state["second.weight"]
    save_file(state, path)
    return path


def train(*trials: Trial) -> None:
    for trial in trials:
        torch.manual_seed(1)
        for _ in range(2):
            loss = trial.model(torch.randn(8, 16)).square().sum()
            loss.backward()
            trial.logged.append(loss.detach())
            trial.optimizer.step()
            trial.optimizer.zero_grad()


# ---------------------------------------------------------------------- attributes and hooks

Hang = Callable[[nn.Parameter, Callable[[Tensor], Tensor | None]], RemovableHandle]
HANGS: dict[str, Hang] = {
    "on the gradient": lambda parameter, act: parameter.register_hook(act),
    "after accumulation": lambda parameter, act: parameter.register_post_accumulate_grad_hook(act),
}


def half(tensor: Tensor) -> Tensor | None:
    """Halve a gradient: given as such, or as that of a parameter."""
    if tensor.grad is None:
        return tensor / 2
    tensor.grad /= 2
    return None


def hung(trial: Trial, hook: str) -> tuple[RemovableHandle, list[Tensor]]:
    """Give a parameter an attribute and a hook; return its handle, and what it was called with."""
    noted: list[Tensor] = []

    def act(tensor: Tensor) -> Tensor | None:
        noted.append(tensor)
        return half(tensor)

    weight = trial.model.get_parameter("first.weight")
    weight.is_mine = trial  # type: ignore[attr-defined]
    return HANGS[hook](weight, act), noted


def without(how: str, path: Path) -> tuple[nn.Module, Any]:
    """Return a model without values, and where they come from."""
    if how == "without_values":
        with without_values():
            model = made("cpu")
    else:
        model = made("meta")
    return model, InitialValues(model) if how == "initial values" else written(path)


@pytest.mark.parametrize("how", ["file", "initial values", "without_values"])
@pytest.mark.parametrize("hook", HANGS)
@every_layout
def test_hooks_and_attributes_that_parameters_had_before_they_had_values_stay(
    layout: str, hook: str, how: str, tmp_path: Path
) -> None:
    plain = Trial(first := made("cpu"), adam(first))
    second, weights = without(how, tmp_path / "all.safetensors")
    ours = Trial(second, adam(second))
    (handle, expected), (own, halved) = hung(plain, hook), hung(ours, hook)
    with offload(ours.model, ours.optimizers, config_of(layout, tmp_path), weights=weights):
        assert ours.model.get_parameter("first.weight").is_mine is ours  # type: ignore[attr-defined]
        train(plain, ours)
        handle.remove()
        own.remove()
        train(plain, ours)
    assert len(halved) == len(expected) == 2
    if how != "initial values":  # which are others
        assert_equal_lists(plain.logged, ours.logged)
        assert_equal_models(plain.model, ours.model)


# ---------------------------------------------------------------------- openings that fail


class Failing(TensorFile):
    """A file of which one read fails.

    Args:
        path: of the file.
        at: which, from 0.
    """

    def __init__(self, path: Path, at: int) -> None:
        super().__init__(path)
        self.left = at

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def read(self, name: str) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise OSError(5, "the disk is gone")
        return super().read(name)


@every_layout
def test_an_opening_that_fails_at_any_read_leaves_the_model_without_values(
    layout: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "all.safetensors")
    plain = Trial(model := made("cpu"), adam(model))
    ours = Trial(model := made("meta"), adam(model))
    before = {name: (id(each), each.requires_grad) for name, each in ours.model.named_parameters()}
    failures = 0
    for at in range(20):
        source = Failing(path, at)
        try:
            run = offload(ours.model, ours.optimizers, config_of(layout, tmp_path / str(at)), weights=source)
        except (OSError, TierStoreError):
            failures += 1
        else:
            run.close()
            break
        named = dict(ours.model.named_parameters())
        assert {name: (id(each), each.requires_grad) for name, each in named.items()} == before
        assert {type(each) for each in named.values()} == {nn.Parameter}
        assert all(each.is_meta for each in named.values())
        assert ours.model.get_parameter("second.weight") is ours.model.get_parameter("first.weight")
    assert 5 < failures < 20
    assert_equal_models(plain.model, ours.model)
    train(plain, ours)
    assert_equal_lists(plain.logged, ours.logged)


class Watching(Failing):
    """A file that fails after somebody has begun to watch a parameter that has its values already.

    Args:
        path: of the file.
        watched: the parameter.
    """

    def __init__(self, path: Path, watched: Tensor) -> None:
        super().__init__(path, 100)
        self._watched = watched
        self.reference: object = None

    def read(self, name: str) -> Tensor:
        if not self._watched.is_meta and self.reference is None:
            self.reference = weakref.ref(self._watched)
            self.left = 0
        return super().read(name)


def test_what_cannot_be_on_the_meta_device_again_says_that_it_has_no_values(tmp_path: Path) -> None:
    path = written(tmp_path / "all.safetensors")
    ours = Trial(model := made("meta"), adam(model))
    weight = ours.model.get_parameter("first.weight")
    source = Watching(path, weight)
    with pytest.raises(OSError, match="the disk is gone"):
        offload(ours.model, ours.optimizers, config_of("three", tmp_path), weights=source)
    assert source.reference is not None
    with pytest.raises(StoreClosed, match=r"'first\.weight' has no values"):
        weight.sum()
    others = [each for each in ours.model.parameters() if each is not weight]
    assert all(each.is_meta for each in others)
    plain = Trial(model := made("cpu"), adam(model))
    with offload(ours.model, ours.optimizers, config_of("three", tmp_path), weights=path):
        train(plain, ours)
    assert_equal_lists(plain.logged, ours.logged)
