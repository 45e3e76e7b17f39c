"""Parameters that are pointed at other memory within a run, and parameters that come into being in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.training.twins import (
    WIDTH,
    Optimizer,
    Trial,
    assert_equal_lists,
    assert_equal_models,
    assert_equal_states,
    assert_same,
    config_of,
    every_layout,
    with_device,
)
from tierstore.errors import UsageError
from tierstore.training import offload
from tierstore.training.faults import guard

Act = Callable[[nn.Sequential], object]
"""Does something to the model; what it returns is kept until the end, and logged."""


def _weight(model: nn.Sequential, layer: int = 0) -> nn.Parameter:
    return model.get_parameter(f"{layer}.weight")


def _set(model: nn.Sequential) -> object:
    with torch.no_grad():
        _weight(model).set_(torch.full((WIDTH, WIDTH), 0.01))  # type: ignore[call-overload]
    return None


def _set_to_what_lives_on(model: nn.Sequential) -> Tensor:
    source = torch.full((WIDTH, WIDTH), 0.01)
    with torch.no_grad():
        _weight(model).set_(source)  # type: ignore[call-overload]
    return source


def _set_unbound(model: nn.Sequential) -> object:
    with torch.no_grad():
        torch.Tensor.set_(_weight(model), torch.full((WIDTH, WIDTH), 0.01))  # type: ignore[call-overload]
    return None


def _point(model: nn.Sequential) -> object:
    _weight(model).data = torch.full((WIDTH, WIDTH), 0.01)
    return None


def _point_at_what_lives_on(model: nn.Sequential) -> Tensor:
    source = torch.full((WIDTH, WIDTH), 0.01)
    _weight(model).data = source
    source[3] = 0.5
    return source


def _transpose(model: nn.Sequential) -> object:
    _weight(model).data = _weight(model).data.t()
    return None


def _keep_an_alias_and_point(model: nn.Sequential) -> Tensor:
    alias = _weight(model).detach()
    _point(model)
    return alias


def _keep_an_alias_and_set(model: nn.Sequential) -> Tensor:
    alias = _weight(model).data
    _set(model)
    return alias


def _point_at_a_transposed_copy(model: nn.Sequential) -> object:
    _weight(model).data = _weight(model).data.t().clone().t()
    return None


def _to_double_and_back(model: nn.Sequential) -> object:
    model.double()
    model.float()
    return None


def _flatten(model: nn.Sequential) -> object:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(flat, model.parameters())
    return None


def _flatten_and_keep(model: nn.Sequential) -> Tensor:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(flat, model.parameters())
    flat[7:99] = 0.125
    return flat


def _tie(model: nn.Sequential) -> object:
    _weight(model, 2).data = _weight(model, 0).data
    return None


def _tie_to_the_parameter(model: nn.Sequential) -> object:
    _weight(model, 2).data = _weight(model, 0)
    return None


def _keep_an_alias(model: nn.Sequential) -> Tensor:
    return _weight(model).detach()[2:5]


class Symmetric(nn.Module):
    """A parametrization that can be assigned to."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a symmetric matrix."""
        return x.triu() + x.triu(1).mT

    def right_inverse(self, x: Tensor) -> Tensor:
        """Return what `forward` makes ``x`` of."""
        return x.triu()


def _parametrize(model: nn.Sequential) -> object:
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return None


def _assign_to_what_is_parametrized(model: nn.Sequential) -> object:
    _parametrize(model)
    model[0].weight = torch.full((WIDTH, WIDTH), 0.02)
    return None


def _parametrize_and_remove(model: nn.Sequential) -> object:
    _parametrize(model)
    parametrize.remove_parametrizations(model[0], "weight")
    return None


def _orthogonal(model: nn.Sequential) -> object:
    parametrizations.orthogonal(model[0])
    return None


def _weight_norm(model: nn.Sequential) -> object:
    parametrizations.weight_norm(model[0])
    return None


def _weight_norm_and_remove(model: nn.Sequential) -> object:
    parametrizations.weight_norm(model[0])
    parametrize.remove_parametrizations(model[0], "weight")
    return None


def _spectral_norm(model: nn.Sequential) -> object:
    parametrizations.spectral_norm(model[0])
    return None


def _former_weight_norm(model: nn.Sequential) -> object:
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(model[0])
    return None


def _former_weight_norm_and_remove(model: nn.Sequential) -> object:
    _former_weight_norm(model)
    nn.utils.remove_weight_norm(model[0])
    return None


def _former_spectral_norm(model: nn.Sequential) -> object:
    nn.utils.spectral_norm(model[0])
    return None


def _new_parameter_of_the_old(model: nn.Sequential) -> object:
    model[0].weight = nn.Parameter(_weight(model))
    return None


def _new_parameter(model: nn.Sequential) -> object:
    model[0].weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.01))
    return None


def _new_module(model: nn.Sequential) -> object:
    model.append(nn.Linear(WIDTH, 3))
    return None


def _assign_a_state_dict(model: nn.Sequential) -> object:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return None


def _assign_its_own_state_dict(model: nn.Sequential) -> object:
    model.load_state_dict(model.state_dict(), assign=True)
    return None


def _new_parameter_of_an_entry(model: nn.Sequential) -> object:
    entry = model.state_dict()["0.weight"]
    model[0].weight = nn.Parameter(entry)
    return entry


def _point_at_an_entry(model: nn.Sequential) -> object:
    model[1].weight.data = model.state_dict()["0.weight"]
    return None


def _set_to_an_entry(model: nn.Sequential) -> object:
    with torch.no_grad():
        model.get_parameter("1.weight").set_(model.state_dict()["0.weight"])
    return None


def _set_to_an_entry_by_name(model: nn.Sequential) -> object:
    with torch.no_grad():
        model.get_parameter("1.weight").set_(source=model.state_dict()["0.weight"])
    return None


def _point_at_its_own_entry(model: nn.Sequential) -> object:
    model[1].weight.data = model.state_dict()["1.weight"]
    return None


def _new_parameter_of_a_part_of_an_entry(model: nn.Sequential) -> object:
    model[5] = nn.Linear(WIDTH, 3)
    model[5].weight = nn.Parameter(model.state_dict()["0.weight"][2:5])
    return None


def _another_model_of_its_entries(model: nn.Sequential) -> object:
    other = nn.Linear(WIDTH, WIDTH)
    other.load_state_dict(model.get_submodule("2").state_dict(), assign=True)
    with torch.no_grad():
        other.weight.mul_(0.5)
    return other.weight


def _point_at_less_and_resize(model: nn.Sequential) -> object:
    model[0].bias.requires_grad = False
    model[0].bias.data = torch.ones(1)
    model.get_parameter("0.bias").resize_(WIDTH).fill_(0.5)
    return None


def _point_gradients(model: nn.Sequential) -> object:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = torch.full_like(parameter, 0.25)
    return None


ACTS: dict[str, Act] = {
    act.__name__.strip("_").replace("_", " "): act
    for act in (
        _set,
        _set_to_what_lives_on,
        _set_unbound,
        _point,
        _point_at_what_lives_on,
        _transpose,
        _point_at_a_transposed_copy,
        _to_double_and_back,
        _flatten,
        _flatten_and_keep,
        _tie,
        _tie_to_the_parameter,
        _keep_an_alias,
        _keep_an_alias_and_point,
        _keep_an_alias_and_set,
        _parametrize,
        _assign_to_what_is_parametrized,
        _parametrize_and_remove,
        _orthogonal,
        _weight_norm,
        _weight_norm_and_remove,
        _spectral_norm,
        _former_weight_norm,
        _former_weight_norm_and_remove,
        _former_spectral_norm,
        _new_parameter_of_the_old,
        _new_parameter,
        _new_module,
        _assign_a_state_dict,
        _assign_its_own_state_dict,
        _new_parameter_of_an_entry,
        _point_at_an_entry,
        _set_to_an_entry,
        _set_to_an_entry_by_name,
        _point_at_its_own_entry,
        _new_parameter_of_a_part_of_an_entry,
        _another_model_of_its_entries,
        _point_at_less_and_resize,
        _point_gradients,
    )
}


def _build() -> tuple[nn.Module, Sequence[Optimizer]]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    return model, [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]


def _log_all(trial: Trial) -> None:
    for name, parameter in trial.model.named_parameters():
        trial.log(torch.tensor([*name.encode()]))
        trial.log(torch.tensor([*parameter.shape, *parameter.stride()]))
        trial.log(parameter)
        trial.log(parameter.grad)
    for group in trial.optimizer.param_groups:
        for parameter in group["params"]:
            trial.log(parameter)


def _loop(trial: Trial, act: Act) -> object:
    """Act between backward and the step of the second turn, and look at everything in every turn."""
    assert isinstance(trial.model, nn.Sequential)
    kept: object = None
    for turn in range(4):
        loss = trial.model(torch.randn(3, WIDTH)).square().mean()
        loss.backward()
        trial.log(loss)
        del loss
        if turn == 1:
            kept = act(trial.model)
        _log_all(trial)
        trial.optimizer.step()
        trial.optimizer.zero_grad()
        _log_all(trial)
        if isinstance(kept, Tensor):
            trial.log(kept)
    return kept


@every_layout
@pytest.mark.parametrize("name", ACTS)
def test_what_points_a_parameter_elsewhere_does_what_it_does_in_pytorch(
    layout: str, name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain, ours = Trial(*_build()), Trial(*_build())
    ours.model.load_state_dict(plain.model.state_dict())
    torch.manual_seed(1)
    expected = _loop(plain, ACTS[name])
    torch.manual_seed(1)
    # What is new or pointed elsewhere is the program's, on the device as well.
    config = config_of(layout, tmp_path, with_device(layout, "640KB"))
    with offload(ours.model, ours.optimizer, config) as run:
        found = _loop(ours, ACTS[name])
        run.store.check()
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)
    assert_equal_states(plain.optimizer, ours.optimizer)
    for trial, alias in ((plain, expected), (ours, found)):
        with torch.no_grad():
            for parameter in trial.optimizer.param_groups[0]["params"]:
                parameter.add_(0.5)
            if isinstance(alias, Tensor):
                alias.mul_(2)
        _log_all(trial)
    assert_equal_lists(plain.logged, ours.logged)
    assert not isinstance(expected, Tensor) or torch.equal(expected, found)  # type: ignore[arg-type]


def test_what_was_pointed_elsewhere_comes_home_when_nobody_else_has_it(tmp_path: Path) -> None:
    model, (optimizer,) = _build()
    assert isinstance(model, nn.Sequential)
    with offload(model, optimizer, config_of("disk", tmp_path)) as run:

        def is_abroad() -> bool:
            guarded_tensor = guard.guarded_tensor_of(_weight(model))
            assert guarded_tensor is not None
            return guarded_tensor.is_abroad

        source = torch.ones(WIDTH, WIDTH)
        _weight(model).data = source
        model(torch.randn(2, WIDTH))
        assert is_abroad()
        del source
        model(torch.randn(2, WIDTH))
        assert not is_abroad()
        assert _weight(model).eq(1).all()
        _weight(model).data = torch.ones(5, 7, dtype=torch.float64).t()
        model[1](torch.randn(2, WIDTH))
        assert not is_abroad()
        assert _weight(model).stride() == (1, 7)
        assert run.store.spec("param/0.weight").nbytes < WIDTH * WIDTH * 4
        run.store.check()
    assert torch.equal(_weight(model), torch.ones(7, 5, dtype=torch.float64))
    assert _weight(model).stride() == (1, 7)


def test_a_parameter_cannot_be_swapped_shared_or_sent_to_another_device_in_a_run(tmp_path: Path) -> None:
    model, _ = _build()
    assert isinstance(model, nn.Sequential)
    before = _weight(model).detach().clone()
    with offload(model, None, config_of("disk", tmp_path)):
        other = nn.Parameter(torch.ones(WIDTH, WIDTH))
        for pair in ((_weight(model), other), (other, _weight(model))):
            with pytest.raises((UsageError, RuntimeError), match=r"cannot swap '0\.weight'|Cannot swap"):
                torch.utils.swap_tensors(*pair)
        with pytest.raises(UsageError, match=r"cannot share the memory of '0\.weight'"):
            model.share_memory()
        with pytest.raises(UsageError, match=r"cannot point '0\.weight' at memory of meta"):
            _weight(model).data = torch.ones(WIDTH, WIDTH, device="meta")
    assert torch.equal(_weight(model), before)
    assert other.eq(1).all()


@pytest.mark.parametrize("layout", ["disk", "three"])
def test_a_checkpoint_with_what_is_elsewhere_is_refused_until_it_is_home(layout: str, tmp_path: Path) -> None:
    model, _ = _build()
    assert isinstance(model, nn.Sequential)
    config = config_of(layout, tmp_path, {"durable": True})
    with offload(model, None, config) as run:
        source = torch.ones(WIDTH, WIDTH)
        _weight(model).data = source
        with pytest.raises(UsageError, match=r"0\.weight"):
            run.checkpoint()
        del source
        run.checkpoint()
    again, _ = _build()
    with offload(again, None, config) as run:
        assert run.resumed is not None
    assert again[0].weight.eq(1).all()  # type: ignore[index]


@every_layout
def test_a_parameter_made_of_one_is_an_ordinary_one_after_the_run(layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    inputs = torch.ones(2, WIDTH)
    with offload(model, None, config_of(layout, tmp_path)):
        torch.nn.utils.parametrizations.weight_norm(model[0])
        model[1].weight = nn.Parameter(cast("Tensor", model[1].weight))
        model(inputs).sum().backward()
    assert [type(p) for p in model.parameters()] == [nn.Parameter] * len(list(model.parameters()))
    assert not any(map(vars, model.parameters()))


@every_layout
def test_a_parameter_of_another_type_keeps_the_gradient_that_it_has(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(2):
            trial.model(torch.randn(3, WIDTH)).square().mean().backward()
            for dtype in (torch.float64, torch.bfloat16):
                for parameter in trial.model.parameters():
                    parameter.data = parameter.data.to(dtype)
                _log_all(trial)
                trial.optimizer.step()
                _log_all(trial)
            trial.optimizer.zero_grad()
            trial.model.float()
        trial.model(torch.randn(3, WIDTH)).square().mean().backward()
        for parameter in trial.model.parameters():
            parameter.data = parameter.data[:1].bfloat16()

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model, _ = _build()
        return model, [torch.optim.SGD(model.parameters(), lr=0.05)]

    assert_same(build, loop, layout, tmp_path, with_device(layout, "640KB"))


class _Scaled(nn.Module):
    """Multiplies by everything of a parameter of some shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(shape, 1.5))

    def forward(self, x: Tensor) -> Tensor:
        """Scale."""
        return x * (1 + self.scale.sum()).to(x.dtype)


@every_layout
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3), (3, 0)])
def test_a_gradient_of_any_shape_stays_with_a_parameter_of_another_type(
    shape: tuple[int, ...], layout: str, tmp_path: Path
) -> None:
    def loop(trial: Trial) -> None:
        trial.model(torch.randn(3, WIDTH)).square().mean().backward()
        for parameter in trial.model.parameters():
            parameter.data = parameter.data.double()
        _log_all(trial)

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        torch.manual_seed(0)
        model = nn.Sequential(_Scaled(shape), nn.Linear(WIDTH, WIDTH))
        return model, [torch.optim.SGD(model.parameters(), lr=0.05)]

    assert_same(build, loop, layout, tmp_path, with_device(layout, "640KB"))
