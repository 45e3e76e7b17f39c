"""A model's state dict in a run: what is written to it is written to the parameters, and it follows them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.training.twins import (
    Trial,
    adam,
    assert_equal_lists,
    assert_equal_models,
    assert_equal_states,
    batch,
    blocks,
    config_of,
    every_layout,
    step,
    with_device,
)
from tierstore.training import offload

State = dict[str, Tensor]
Act = Callable[[nn.Module, State], object]
"""Does something to a state dict of the model; the tensors that it returns are logged."""

_WEIGHT = "1.up.weight"


def _average(_: nn.Module, state: State) -> object:
    for name in state:
        state[name] *= 0.5
        state[name] += 0.25 * state[name].detach().clone()
    return None


def _average_of_another_dict(model: nn.Module, state: State) -> object:
    now = model.state_dict()
    for name, value in state.items():
        value.mul_(0.9).add_(now[name], alpha=0.1)
    return None


def _copy(model: nn.Module, state: State) -> object:
    own = model.state_dict()
    for name, value in state.items():
        own[name].copy_(value + 1)
    return None


def _copy_parameters(model: nn.Module, state: State) -> object:
    with torch.no_grad():
        for parameter, value in zip(
            reversed(list(model.parameters())), reversed(state.values()), strict=True
        ):
            value.copy_(parameter * 2)
            parameter.copy_(value + 1)
    return None


def _write_to_views(_: nn.Module, state: State) -> object:
    value = state[_WEIGHT]
    value[3] = 0.5
    value.view(-1)[7:9] = 0.25
    value.t()[2].mul_(3)
    value.narrow(1, 2, 3).reshape(-1)
    for row in value.split(5)[1].unbind():
        row.add_(1)
    with torch.no_grad():
        value[1:2].data.detach()[0].zero_()
    value.view(torch.int32)[0, 0] = 3
    return value[4:6]


def _write_over_lists(_: nn.Module, state: State) -> object:
    torch._foreach_mul_(list(state.values()), 0.5)
    torch._foreach_copy_(list(state.values())[:1], [torch.ones_like(each) for each in state.values()][:1])
    return None


def _write_what_is_given_out(_: nn.Module, state: State) -> object:
    torch.add(state[_WEIGHT], 1, out=state[_WEIGHT])
    return None


def _write_in_inference_mode(model: nn.Module, state: State) -> object:
    with torch.inference_mode():
        state[_WEIGHT].add_(1)
        model.state_dict()[_WEIGHT].mul_(2)
    return None


def _initialise(_: nn.Module, state: State) -> object:
    nn.init.constant_(state[_WEIGHT], 0.125)
    return None


def _change_looks(_: nn.Module, state: State) -> object:
    state[_WEIGHT].t_().unsqueeze_(0)
    state[_WEIGHT][0, 1] = 0.5
    return None


def _point_an_entry_elsewhere(_: nn.Module, state: State) -> object:
    state[_WEIGHT].data = torch.ones(3)
    state[_WEIGHT].add_(1)
    return None


def _point_the_parameter_elsewhere(model: nn.Module, state: State) -> object:
    parameter = model.get_parameter(_WEIGHT)
    parameter.data = parameter.detach().clone() + 1
    state[_WEIGHT].add_(0.5)
    return None


def _write_to_the_parameter(model: nn.Module, state: State) -> object:
    with torch.no_grad():
        model.get_parameter(_WEIGHT).add_(1)
    model.get_parameter(_WEIGHT).data[2] = 0.5
    return state[_WEIGHT] + 0


def _save(_: nn.Module, state: State) -> object:
    file = io.BytesIO()
    torch.save(state, file)
    size_bytes = file.tell()
    file.seek(0)
    found = list(torch.load(file).values())
    assert all(type(each) is Tensor for each in found)
    assert size_bytes < 2 * sum(each.nbytes for each in found) + 32768
    return found


def _copy_deeply(_: nn.Module, state: State) -> object:
    found = copy.deepcopy(state)
    for value in found.values():
        value.add_(1)
        assert type(value) is Tensor
    return found


def _make_arrays(_: nn.Module, state: State) -> object:
    return [torch.tensor(np.asarray(value)) + torch.tensor(value.cpu().numpy()) for value in state.values()]


def _read_where_nobody_sees_it(model: nn.Module, _: State) -> object:
    return [torch.tensor(value.tolist()) + torch.Tensor(value) for value in model.state_dict().values()]


def _load(model: nn.Module, state: State) -> object:
    model.load_state_dict({name: value * 0.5 for name, value in state.items()})
    model.load_state_dict(state)
    return None


def _use_in_a_graph(_: nn.Module, state: State) -> object:
    x = torch.ones(state[_WEIGHT].shape[1], requires_grad=True)
    (state[_WEIGHT] @ x).sum().backward()
    return x.grad


ACTS: dict[str, Act] = {
    act.__name__.strip("_").replace("_", " "): act
    for act in (
        _average,
        _average_of_another_dict,
        _copy,
        _copy_parameters,
        _write_to_views,
        _write_over_lists,
        _write_what_is_given_out,
        _write_in_inference_mode,
        _initialise,
        _change_looks,
        _point_an_entry_elsewhere,
        _point_the_parameter_elsewhere,
        _write_to_the_parameter,
        _save,
        _copy_deeply,
        _make_arrays,
        _read_where_nobody_sees_it,
        _load,
        _use_in_a_graph,
    )
}


def _tensors(made: object) -> list[Tensor]:
    values = made.values() if isinstance(made, dict) else made if isinstance(made, list) else [made]
    return [each for each in values if isinstance(each, Tensor)]


def _log_all(trial: Trial, state: State) -> None:
    for tensor in (*trial.model.parameters(), *state.values()):
        trial.log(torch.tensor([*tensor.shape, *tensor.stride()]))
        trial.log(tensor)


def _loop(trial: Trial, act: Act) -> tuple[State, list[Tensor]]:
    """Act on a new state dict between two steps, and step; look at everything after each of them."""
    step(trial)
    state = dict(trial.model.state_dict())
    made = _tensors(act(trial.model, state))
    for _ in range(2):
        for tensor in made:
            trial.log(tensor)
        _log_all(trial, state)
        step(trial)
    _log_all(trial, state)
    return state, made


@every_layout
@pytest.mark.parametrize("name", ACTS)
def test_a_state_dict_is_one_with_the_parameters(layout: str, name: str, tmp_path: Path) -> None:
    trials = []
    for _ in range(2):
        torch.manual_seed(0)
        model = blocks()
        trials.append(Trial(model, adam(model)))
    plain, ours = trials
    torch.manual_seed(1)
    expected = _loop(plain, ACTS[name])
    torch.manual_seed(1)
    config = config_of(layout, tmp_path, with_device(layout, "640KB"))
    with offload(ours.model, list(ours.optimizers), config) as run:
        found = _loop(ours, ACTS[name])
        run.store.check()
    for trial, (state, made) in ((plain, expected), (ours, found)):
        with torch.no_grad():
            for tensor in (*trial.model.parameters(), *state.values(), *made):
                tensor.mul_(0.5)
        _log_all(trial, state)
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)
    assert_equal_states(plain.optimizer, ours.optimizer)
    assert all(type(each) in (Tensor, nn.Parameter) for each in (*found[0].values(), *found[1]))


def test_an_array_of_an_entry_cannot_be_written_to(tmp_path: Path) -> None:
    model = blocks()
    with offload(model, None, config_of("disk", tmp_path)):
        for array in (model.state_dict()[_WEIGHT].numpy(), np.asarray(model.state_dict()[_WEIGHT])):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


@every_layout
def test_a_state_dict_is_written_to_a_file_by_its_addresses(layout: str, tmp_path: Path) -> None:
    model = blocks()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with offload(model, None, config_of(layout, tmp_path)):
        batch()
        save_file(model.state_dict(), tmp_path / "all.safetensors")
    found = load_file(tmp_path / "all.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_entries_of_tied_parameters_are_tied(tmp_path: Path) -> None:
    def build() -> nn.ModuleList:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])
        weight = model.get_parameter("0.weight").data
        model.get_parameter("1.weight").data = weight
        model.get_parameter("2.weight").data = weight[:32]
        return model

    def act(model: nn.ModuleList) -> list[Tensor]:
        state = model.state_dict()
        state["0.weight"].mul_(0.5)
        seen = [value.clone() for value in state.values()]
        state["2.weight"][3:5] = 0.25
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file)
        loaded["1.weight"].add_(1)
        return [*seen, *(value.clone() for value in state.values()), *loaded.values()]

    plain, ours = build(), build()
    expected = act(plain)
    with offload(ours, None, config_of("disk", tmp_path)):
        found = act(ours)
    assert_equal_lists(list(expected), list(found))
    assert_equal_models(plain, ours)


@every_layout
def test_a_parameter_that_is_made_of_an_entry_shares_its_memory(layout: str, tmp_path: Path) -> None:
    def act(model: nn.Module, other: nn.Module) -> list[Tensor]:
        state = model.state_dict()
        other.load_state_dict(state, assign=True)
        parameter = nn.Parameter(state[_WEIGHT][:3])
        assert type(nn.Parameter(state[_WEIGHT]).detach()) is Tensor
        assert parameter.is_leaf
        parameter.sum().backward()
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        with torch.no_grad():
            parameter.add_(1)
            state[_WEIGHT].mul_(0.5)
        for each in (model, other):
            each(batch()[0]).square().sum().backward()
            optimizer.step()
        assert parameter.grad is not None
        assert all(type(each) is nn.Parameter and each.grad is not None for each in other.parameters())
        assert not any(vars(each) for each in other.parameters())
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [parameter, parameter.grad, *other.parameters(), *gradients]

    torch.manual_seed(0)
    plain, others = blocks(), blocks()
    torch.manual_seed(1)
    expected = act(plain, others)
    torch.manual_seed(0)
    model, other = blocks(), blocks()
    with offload(
        model, None, config_of(layout, tmp_path, {"offload_cpu_size": "8MB", **with_device(layout, "8MB")})
    ):
        torch.manual_seed(1)
        found = act(model, other)
        assert_equal_lists(expected, found)
        with torch.no_grad():
            other.get_parameter(_WEIGHT).add_(1)
    with torch.no_grad():
        others.get_parameter(_WEIGHT).add_(1)
    assert_equal_lists(expected, found)
    assert_equal_models(plain, model)


def test_parameters_made_of_entries_are_refused_where_they_have_no_room(tmp_path: Path) -> None:
    model, other = blocks(), blocks()
    with offload(model, None, config_of("disk", tmp_path)):
        with pytest.raises(RuntimeError, match="Raise offload_cpu_size"):
            other.load_state_dict(model.state_dict(), assign=True)
        copies = {name: entry.clone() for name, entry in model.state_dict().items()}
        other.load_state_dict(copies, assign=True)
        other(batch()[0]).sum().backward()
    assert_equal_lists(list(model.parameters()), list(other.parameters()))
