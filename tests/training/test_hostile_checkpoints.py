"""``run.load`` of damaged and hostile checkpoints: one `UsageError`, and nothing was changed."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hostile_tensorfiles import FILES
from tests.training.twins import adam, blocks
from tierstore.errors import UsageError
from tierstore.training import offload
from tierstore.training.checkpoints.files import MODEL, SCALARS, STATE

_MOST_MESSAGE_CHARS = 5_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    model = blocks()
    optimizer = adam(model)
    with offload(model, optimizer, {"device": "cpu", "offload_disk_size": 0}) as run:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer[0].step()
        run.save(directory / "c")
    return directory / "c"


def _copied(saved: Path, tmp_path: Path) -> Path:
    (tmp_path / "c").mkdir()
    for file in saved.iterdir():
        (tmp_path / "c" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "c"


def _refusal(path: Path) -> str:
    """Load a checkpoint into a new run, which has to refuse it and stay as it was."""
    model = blocks()
    optimizers = adam(model)
    with offload(model, optimizers, {"device": "cpu", "offload_disk_size": 0}) as run:
        before = looked_at(model, optimizers)
        with pytest.raises(UsageError) as refused:
            run.load(path)
        after = looked_at(model, optimizers)
    assert before == after
    return str(refused.value)


def looked_at(model: torch.nn.Module, optimizers: list[Any]) -> tuple[object, ...]:
    """Return what a refused checkpoint must not change."""
    values = {name: each.tolist() for name, each in model.state_dict().items()}
    groups = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in optimizers]
    return values, copy.deepcopy(groups), [len(o.state) for o in optimizers]


@pytest.mark.parametrize("name", [MODEL, STATE])
@pytest.mark.parametrize("kind", ["nothing", "deep mappings", "a gap", "the largest length", "a name twice"])
def test_a_hostile_file_of_tensors_is_refused(saved: Path, tmp_path: Path, name: str, kind: str) -> None:
    path = _copied(saved, tmp_path)
    content, why = FILES[kind]
    (path / name).write_bytes(content)
    assert why in _refusal(path)


@pytest.mark.parametrize("name", [MODEL, STATE, SCALARS])
@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "missing"])
def test_what_is_no_regular_file_is_refused_without_waiting(
    saved: Path, tmp_path: Path, name: str, kind: str
) -> None:
    path = _copied(saved, tmp_path)
    (path / name).unlink()
    if kind == "pipe":
        os.mkfifo(path / name)
    elif kind == "directory":
        (path / name).mkdir()
    elif kind == "device":
        (path / name).symlink_to("/dev/zero")
    _refusal(path)


TEXTS = {
    "nothing": "",
    "no mapping": "[1]",
    "deep": '{"format": 1, "optimizers":' + "[" * 100_000,
    "many digits": '{"format": 1' + "0" * 5_000 + "}",
    "another format": '{"format": 2}',
    "a hostile format": '{"format": "' + "x" * 100_000 + '"}',
    "no optimizers": '{"format": 1}',
    "optimizers of another kind": '{"format": 1, "optimizers": {"groups": []}}',
    "a key twice": '{"format": 1, "format": 1}',
    "no UTF-8": "\udcff",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_hostile_document_is_refused(saved: Path, tmp_path: Path, text: str) -> None:
    path = _copied(saved, tmp_path)
    (path / SCALARS).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert len(_refusal(path)) < _MOST_MESSAGE_CHARS


def _deep() -> object:
    value: object = 1
    for _ in range(300):
        value = {"list": [value]}
    return value


VALUES: dict[str, object] = {
    "a tensor that is not there": {"tensor": "nobody's", "device": "cpu"},
    "a tensor that has no name": {"tensor": ["x"], "device": "cpu"},
    "a device that is none": {"tensor": None, "device": "os.system"},
    "a device that is not here": {"tensor": None, "device": "cuda:99"},
    "a device of torch's that is a module": {"tensor": None, "device": "privateuseone"},
    "a device that is a number": {"tensor": None, "device": 3},
    "another kind": {"set": [1]},
    "two kinds": {"list": [], "tuple": []},
    "no kind": {},
    "a list": [1, 2],
    "a list that is none": {"list": 3},
    "a mapping of lists": {"dict": [[["a"], 1]]},
    "a mapping of threes": {"dict": [[1, 2, 3]]},
    "a fault inside": {"tuple": [1, {"dict": [["a", {"what": 1}]]}]},
    "deep": _deep(),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("where", ["options", "state"])
def test_a_value_that_cannot_be_decoded_is_refused_before_anything_is_loaded(
    saved: Path, tmp_path: Path, value: object, where: str
) -> None:
    path = _copied(saved, tmp_path)
    document = json.loads((path / SCALARS).read_text())
    optimizer = document["optimizers"][-1]
    parameter, entries = list(optimizer["state"].items())[-1]
    if isinstance(value, dict) and value.get("tensor", "") is None:
        tensor = next(each["tensor"] for each in entries.values() if isinstance(each, dict))
        value = value | {"tensor": tensor}
    if where == "options":
        optimizer["groups"][-1]["options"]["lr"] = value
    else:
        optimizer["state"][parameter]["exp_avg"] = value
    (path / SCALARS).write_text(json.dumps(document))
    told = _refusal(path)
    assert "cannot be read: optimizer" in told
    assert len(told) < _MOST_MESSAGE_CHARS


_CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no groups": lambda optimizer: optimizer.pop("groups"),
    "no state": lambda optimizer: optimizer.pop("state"),
    "groups of numbers": lambda optimizer: optimizer.update(groups=[1]),
    "state of numbers": lambda optimizer: optimizer["state"].update(x=1),
    "names that are numbers": lambda optimizer: optimizer["groups"][0].update(params=[1]),
    "options that are a list": lambda optimizer: optimizer["groups"][0].update(options=[1]),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_a_document_of_another_form_is_refused(
    saved: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    path = _copied(saved, tmp_path)
    document = json.loads((path / SCALARS).read_text())
    change(document["optimizers"][0])
    (path / SCALARS).write_text(json.dumps(document))
    assert "what its groups and its state are" in _refusal(path)
