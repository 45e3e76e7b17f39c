"""``tierstore export`` and ``import`` of hostile names and files: refused, with nothing half done."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from safetensors.torch import load_file, save_file

import tierstore as ts
from tests.hostile_tensorfiles import FILES, many_empty, one
from tests.unit.test_cli_stores import contents, open_store
from tierstore.cli import array_names, exchange, main

_Output = pytest.CaptureFixture[str]

_NAMEABLE = [
    "",
    "\0",
    "..",
    ".",
    "../a",
    "/a",
    "a/b",
    "A",
    "a",
    "_a",
    "zarr.json",
    "%",
    "é",
    "\U0001f600",
    "a\nb",
]


def _store(path: Path, *keys: str) -> Path:
    with open_store(path) as store:
        for number, key in enumerate(keys):
            store.put(key, torch.full((2,), float(number)))
    return path


@pytest.mark.parametrize("name", ["out.safetensors", "out.zarr"])
def test_unusual_names_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    store = _store(tmp_path / "store", *_NAMEABLE)
    assert main(["export", str(store), str(tmp_path / "there" / name)]) == 2
    assert main(["export", str(store), str(tmp_path / name)]) == 0
    assert main(["import", str(tmp_path / "again"), str(tmp_path / name)]) == 0
    found = contents(tmp_path / "again")
    assert {key: found[key].tolist() for key in found} == {
        key: [float(number)] * 2 for number, key in enumerate(_NAMEABLE)
    }
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["store", "again", name])


@pytest.mark.parametrize(
    ("name", "key", "why"),
    [
        ("out.safetensors", "w\ud800", "which is UTF-8: the surrogate at character 1"),
        ("out.safetensors", "__metadata__", "keeps for itself"),
        ("out.zarr", "w\ud800", "which is UTF-8: the surrogate at character 1"),
        ("out.zarr", "k" * 256, "takes 256 bytes as the name of an array"),
        ("out.zarr", "é" * 43, "takes 258 bytes as the name of an array"),
    ],
)
def test_a_key_that_a_format_cannot_name_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: _Output, name: str, key: str, why: str
) -> None:
    store = _store(tmp_path / "store", "a", key, "z")
    assert main(["export", str(store), str(tmp_path / name)]) == 2
    told = capsys.readouterr().err
    assert why in told
    assert repr(key)[:40] in told
    assert [each.name for each in tmp_path.iterdir()] == ["store"]


def test_names_that_a_place_does_not_tell_apart_are_refused(
    tmp_path: Path, capsys: _Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _store(tmp_path / "store", "Layer.w", "layer.w")
    monkeypatch.setattr(array_names, "_tells_case", lambda place: False)
    assert main(["export", str(store), str(tmp_path / "out.zarr")]) == 2
    assert "'Layer.w' and 'layer.w' differ in capitals only" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("name", ["out.safetensors", "out.zarr"])
def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, capsys: _Output, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def broken(*_: object) -> object:
        yield "a", torch.zeros(2)
        raise OSError(5, "the disk failed")

    store = _store(tmp_path / "store", "a", "b")
    monkeypatch.setattr(exchange, "_read", broken)
    assert main(["export", str(store), str(tmp_path / name)]) == 1
    assert "the disk failed" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("name", ["out.safetensors", "out.zarr"])
def test_what_came_under_the_name_while_an_export_was_written_stays(
    tmp_path: Path, capsys: _Output, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store, target = _store(tmp_path / "store", "a"), tmp_path / name
    read = exchange._read

    def late(*given: object) -> object:
        target.write_bytes(b"somebody else's")
        yield from read(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(exchange, "_read", late)
    assert main(["export", str(store), str(target)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert target.read_bytes() == b"somebody else's"
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["store", name])


@pytest.mark.parametrize(("content", "why"), FILES.values(), ids=FILES)
def test_a_hostile_file_is_not_imported(tmp_path: Path, capsys: _Output, content: bytes, why: str) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    assert main(["import", str(tmp_path / "new"), str(tmp_path / "w.safetensors")]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_file_with_a_dtype_that_pytorch_has_not_is_imported_in_no_part(
    tmp_path: Path, capsys: _Output
) -> None:
    (tmp_path / "w.safetensors").write_bytes(one(dtype="F4"))
    assert main(["import", str(tmp_path / "new"), str(tmp_path / "w.safetensors")]) == 2
    assert "w is 'F4', a dtype that PyTorch has not" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["w.safetensors", "w.zarr"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_is_refused_without_waiting(
    tmp_path: Path, capsys: _Output, name: str, kind: str
) -> None:
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert main(["import", str(tmp_path / "new"), str(path)]) == 2
    assert "accepted: a regular file" in capsys.readouterr().err


def _group(path: Path, **arrays: object) -> Path:
    group = zarr.open_group(str(path), mode="w")
    for name, key in arrays.items():
        group.create_array(name, data=np.zeros(2, np.float32), attributes={"key": key})  # type: ignore[dict-item]
    return path


def _pipe_inside(path: Path) -> None:
    _group(path, a="a")
    os.mkfifo(path / "b")


def _of_enormous_shape(path: Path) -> None:
    _group(path, a="a")
    described = json.loads((path / "a" / "zarr.json").read_text())
    described["shape"], described["attributes"] = [2**50], {}
    (path / "a" / "zarr.json").write_text(json.dumps(described))


def _without_a_description(path: Path) -> None:
    _group(path, a="a", b="b")
    (path / "b" / "zarr.json").unlink()


def _deep_without_a_description(path: Path) -> None:
    _group(path, a="a")
    _group(path / "deep" / "er", x="x")
    zarr.open_group(str(path / "deep"), mode="a")
    (path / "deep" / "er" / "zarr.json").unlink()


def _damaged_within(text: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        _group(path, a="a")
        _group(path / "deep", x="x")
        (path / "deep" / "zarr.json").write_text(text)

    return make


def _described_by_a_number(path: Path) -> None:
    _group(path, a="a")
    (path / "zarr.json").write_text("1")


def _linked_to_itself(path: Path) -> None:
    _group(path, a="a")
    (path / "again").symlink_to(path)


GROUPS: dict[str, tuple[Callable[[Path], object], str, int]] = {
    "a key that is no text": (
        lambda path: _group(path, a=5),
        "has 5 as its attribute 'key'; accepted: a text",
        2,
    ),
    "a key twice": (lambda path: _group(path, a="x", b="x"), "are both 'x'", 2),
    "a name and a key": (lambda path: _group(path, a="b", b="b"), "are both 'b'", 2),
    "a pipe inside": (_pipe_inside, "is no regular file", 2),
    "an array without its description": (_without_a_description, "'b' is neither an array nor a group", 2),
    "a group without its description": (
        _deep_without_a_description,
        "'deep/er' is neither an array nor a group",
        2,
    ),
    "a number for a description": (_described_by_a_number, "is not a zarr group: AttributeError", 2),
    "a description that is cut": (_damaged_within("{"), "is not a zarr group", 2),
    "a description that is a number": (_damaged_within("5"), "is not a zarr group", 2),
    "a description without an end": (_damaged_within("[" * 100_000), "is not a zarr group", 2),
    "a link back": (_linked_to_itself, "which is in the group once already", 2),
    "a key twice, by its group": (
        lambda path: (_group(path, a="g/x"), _group(path / "g", b="x")),
        "are both 'g/x'",
        2,
    ),
    "an enormous shape": (_of_enormous_shape, "of host memory are available", 1),
}


@pytest.mark.parametrize(("make", "why", "code"), GROUPS.values(), ids=GROUPS)
def test_a_hostile_group_is_refused_with_the_reason(
    tmp_path: Path, capsys: _Output, make: Callable[[Path], object], why: str, code: int
) -> None:
    make(tmp_path / "w.zarr")
    assert main(["import", "--replace", str(tmp_path / "new"), str(tmp_path / "w.zarr")]) == code
    assert re.search(re.escape(why), capsys.readouterr().err)
    assert not (tmp_path / "new").exists()


def test_an_array_without_its_description_is_refused_at_a_url(tmp_path: Path, capsys: _Output) -> None:
    _without_a_description(tmp_path / "w.zarr")
    assert main(["import", "--format=zarr", str(tmp_path / "new"), f"file://{tmp_path}/w.zarr"]) == 2
    assert "an array that has lost its description: Object at b is not recognized" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_very_long_keys_go_to_a_safetensors_file(tmp_path: Path) -> None:
    store = _store(tmp_path / "store", "k" * 100_000)
    assert main(["export", str(store), str(tmp_path / "out.safetensors")]) == 0
    assert list(load_file(tmp_path / "out.safetensors")) == ["k" * 100_000]


@pytest.mark.long
def test_a_hundred_thousand_empty_tensors_are_imported_and_exported(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(many_empty())
    assert main(["import", str(tmp_path / "new"), str(tmp_path / "w.safetensors")]) == 0
    assert main(["export", str(tmp_path / "new"), str(tmp_path / "out.safetensors")]) == 0
    assert len(load_file(tmp_path / "out.safetensors")) == 100_000


def test_a_file_that_is_replaced_by_a_shorter_one_while_it_is_imported_leaves_the_store_as_it_was(
    tmp_path: Path, capsys: _Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, path = _store(tmp_path / "store", "old"), tmp_path / "w.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.ones(1 << 16)}, path)
    put = ts.Store.put

    def cut(self: ts.Store, key: str, tensor: torch.Tensor, **more: bool) -> None:
        os.truncate(path, 300)
        put(self, key, tensor, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ts.Store, "put", cut)
    assert main(["import", str(store), str(path)]) == 1
    assert "was cut short while it was read" in capsys.readouterr().err
    monkeypatch.undo()
    assert list(contents(store)) == ["old"]
