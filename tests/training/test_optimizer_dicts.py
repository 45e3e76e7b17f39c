"""An optimizer's state dict in a run: it follows the state, writes to it, and is it once loaded."""

from __future__ import annotations

import copy
import io
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.twins import (
    WIDTH,
    Trial,
    assert_equal_lists,
    assert_equal_models,
    assert_equal_states,
    assert_same,
    blocks,
    config_of,
    step,
    with_device,
)
from tierstore.training import offload

StateDict = dict[str, Any]


class OwnStep(torch.optim.Adam):
    """Steps by itself, as the library does not know it."""


class Holder(torch.optim.SGD):
    """Holds an optimizer, in common with which it has groups and state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups)
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 - as torch's own
        return self.inner.step(closure)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "own step": lambda m: OwnStep(m.parameters(), lr=0.01),
    "holder": lambda m: Holder(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
}


def tensors_in(state_dict: StateDict) -> Iterator[Tensor]:
    for entries in state_dict["state"].values():
        yield from (each for each in entries.values() if isinstance(each, Tensor))


def halve(state_dict: StateDict) -> None:
    with torch.no_grad():
        for each in tensors_in(state_dict):
            if each.dim():
                each.mul_(0.5)


def _again(trial: Trial, state_dict: StateDict) -> None:
    trial.optimizer.load_state_dict(state_dict)


def _copied(trial: Trial, state_dict: StateDict) -> None:
    again = copy.deepcopy(state_dict)
    step(trial)
    trial.optimizer.load_state_dict(again)
    step(trial)
    trial.optimizer.load_state_dict(again)


def _from_a_file(trial: Trial, state_dict: StateDict) -> None:
    file = io.BytesIO()
    torch.save(state_dict, file)
    step(trial)
    file.seek(0)
    trial.optimizer.load_state_dict(torch.load(file))


def _in_double(trial: Trial, state_dict: StateDict) -> None:
    doubles = copy.deepcopy(state_dict)
    for entries in doubles["state"].values():
        entries |= {name: each.double() for name, each in entries.items() if isinstance(each, Tensor)}
    trial.optimizer.load_state_dict(doubles)


def _views(trial: Trial, state_dict: StateDict) -> None:
    for each in tensors_in(state_dict):
        if each.dim():
            each.view(-1)[:2].fill_(0.25)


def _of_one_alone(trial: Trial, state_dict: StateDict) -> None:
    state = {number: entries for number, entries in state_dict["state"].items() if number}
    trial.optimizer.load_state_dict({**state_dict, "state": state})


def _written_and_loaded(trial: Trial, state_dict: StateDict) -> None:
    halve(state_dict)
    trial.optimizer.load_state_dict(state_dict)


ACTS: dict[str, Callable[[Trial, StateDict], object]] = {
    "nothing": lambda trial, state_dict: None,
    "written": lambda trial, state_dict: halve(state_dict),
    "views written": _views,
    "loaded": _again,
    "a copy loaded twice": _copied,
    "loaded from a file": _from_a_file,
    "doubles loaded": _in_double,
    "written and loaded": _written_and_loaded,
    "all but one's loaded": _of_one_alone,
}


def _loop(trial: Trial, act: Callable[[Trial, StateDict], object]) -> StateDict:
    step(trial)
    step(trial)
    state_dict = trial.optimizer.state_dict()
    for _ in range(2):
        act(trial, state_dict)
        for _ in range(2):
            for each in tensors_in(state_dict):
                trial.log(each)
            step(trial)
    return state_dict


@pytest.mark.parametrize("layout", ["disk", "three"])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_state_dict_is_one_with_the_state(kind: str, act: str, layout: str, tmp_path: Path) -> None:
    trials = []
    for _ in range(2):
        torch.manual_seed(0)
        model = blocks()
        trials.append(Trial(model, [OPTIMIZERS[kind](model)]))
    plain, ours = trials
    torch.manual_seed(1)
    expected = _loop(plain, ACTS[act])
    torch.manual_seed(1)
    config = config_of(layout, tmp_path, with_device(layout, "640KB"))
    with offload(ours.model, list(ours.optimizers), config) as run:
        found = _loop(ours, ACTS[act])
        run.store.check()
    for trial, state_dict in ((plain, expected), (ours, found)):
        halve(state_dict)
        for each in tensors_in(state_dict):
            trial.log(each)
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)
    assert_equal_states(plain.optimizer, ours.optimizer)
    assert all(type(each) is Tensor for each in tensors_in(found))


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_a_state_dict_that_somebody_keeps_does_not_keep_former_state(kind: str, tmp_path: Path) -> None:
    model = blocks()
    trial = Trial(model, [OPTIMIZERS[kind](model)])
    with offload(
        model, list(trial.optimizers), config_of("disk", tmp_path, with_device("disk", "640KB"))
    ) as run:
        step(trial)
        kept = trial.optimizer.state_dict()
        expected = [each.clone() for each in tensors_in(kept)]
        keys = set(run.store.keys())
        former = [weakref.ref(each) for each in tensors_in({"state": trial.optimizer.state}) if each.dim()]
        trial.optimizer.load_state_dict(copy.deepcopy(kept))
        assert set(run.store.keys()) == keys
        assert not [each for each in former if each() is not None]
        step(trial)
        assert_equal_lists(
            [each for each in expected if each.dim()], [each for each in tensors_in(kept) if each.dim()]
        )


class Renaming(torch.optim.Adam):
    """Reads state that it wrote under another name and at half its size."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take in state, also of the former format."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for entries in self.state.values():
            if "half_avg" in entries:
                entries["exp_avg"] = entries.pop("half_avg") * 2


def _with_numbers(state_dict: StateDict) -> None:
    for entries in state_dict["state"].values():
        if isinstance(entries.get("step"), Tensor):
            entries["step"] = entries["step"].item()  # as PyTorch before 1.12 wrote them


def _with_halves(state_dict: StateDict) -> None:
    for entries in state_dict["state"].values():
        entries["half_avg"] = entries.pop("exp_avg") / 2


FORMER_FORMATS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[[StateDict], None]]] = {
    **{
        kind.__name__: (kind, _with_numbers)
        for kind in vars(torch.optim).values()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and "__setstate__" in vars(kind)
        and kind is not torch.optim.Optimizer
    },
    "renaming": (Renaming, _with_halves),
}


@pytest.mark.parametrize("layout", ["disk", "three"])
@pytest.mark.parametrize("kind", FORMER_FORMATS)
def test_state_of_a_former_format_is_converted_when_it_is_loaded(
    kind: str, layout: str, tmp_path: Path
) -> None:
    make, make_former = FORMER_FORMATS[kind]

    def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)), nn.Linear(WIDTH, 5))
        return model, [make([each for each in model.parameters() if each.dim() == 2])]

    def loop(trial: Trial) -> None:
        step(trial)
        state_dict = copy.deepcopy(trial.optimizer.state_dict())
        make_former(state_dict)
        trial.optimizer.load_state_dict(state_dict)
        kinds = [
            sorted((n, isinstance(v, Tensor)) for n, v in e.items()) for e in trial.optimizer.state.values()
        ]
        trial.log(torch.tensor(zlib.crc32(repr(kinds).encode())))
        step(trial)

    assert_same(build, loop, layout, tmp_path)
