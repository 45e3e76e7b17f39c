"""Weights from outside: right values, or one typed error that says what was found."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.hostile_tensorfiles import FILES, UNKNOWN_DTYPES, many_empty, one
from tierstore.errors import BackendError, CapacityError, UsageError
from tierstore.formats.safetensors_files import HeaderEntry, TensorFile, pack, unpack, write_file
from tierstore.formats.safetensors_headers import MOST_BYTES
from tierstore.formats.sharded_weights import open_source
from tierstore.training import offload

_MOST_MESSAGE_CHARS = 2_000


def _written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(("content", "why"), FILES.values(), ids=FILES)
def test_a_hostile_file_is_refused_with_the_reason(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        TensorFile(_written(tmp_path, content))
    assert why in str(refused.value)
    assert len(str(refused.value)) < _MOST_MESSAGE_CHARS
    packed = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
    with pytest.raises(UsageError):
        unpack(packed)


@pytest.mark.parametrize("name", ["deep lists", "deep mappings", "many lists", "backslashes"])
def test_a_hostile_file_takes_little_more_memory_than_its_header(tmp_path: Path, name: str) -> None:
    path = _written(tmp_path, FILES[name][0])
    tracemalloc.start()
    try:
        with pytest.raises(UsageError):
            TensorFile(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * path.stat().st_size + 2**20


@pytest.mark.parametrize("dtype", UNKNOWN_DTYPES)
def test_a_dtype_that_pytorch_has_not_is_refused_where_it_is_read(tmp_path: Path, dtype: str) -> None:
    path = _written(tmp_path, one(dtype=dtype))
    with TensorFile(path) as file:
        assert file.dtype("w") is None
        with pytest.raises(UsageError, match="a dtype that PyTorch has not") as refused:
            file.read("w")
        assert refused.value.key == "w"
        assert len(str(refused.value)) < _MOST_MESSAGE_CHARS
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2))
    with pytest.raises(UsageError, match="w has an element type that PyTorch has not"):
        offload(model, config={"offload_disk_size": 0, "device": "cpu"}, weights=path)


def test_a_hundred_thousand_empty_tensors_are_read_within_seconds(tmp_path: Path) -> None:
    path = _written(tmp_path, many_empty())
    began = time.process_time()
    with open_source(path) as source:
        assert len(source.names) == 100_000
        assert all(source.shape(name) == (0,) and source.read(name).numel() == 0 for name in source.names)
    assert time.process_time() - began < 20


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error_of_that_call(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.ones(1 << 20)}, path)
    with TensorFile(path) as file:
        os.truncate(path, 4096)
        with pytest.raises(
            BackendError, match="was cut short while it was read: of the 4194304 bytes"
        ) as failed:
            file.read("b")
    assert failed.value.key == "b"


def test_a_tensor_that_no_memory_holds_is_refused_with_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(4)}, path)
    with TensorFile(path) as file:
        monkeypatch.setattr(np, "empty", refuse)
        with pytest.raises(CapacityError) as refused:
            file.read("w")
    assert (refused.value.key, refused.value.needed_bytes) == ("w", 16)


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "proc", "socket", "nothing"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, 0o140600)
    elif kind != "nothing":
        path.symlink_to({"device": "/dev/zero", "proc": "/proc/self/maps"}[kind])
    with pytest.raises(UsageError):
        open_source(path)
    with pytest.raises(UsageError):
        open_source(tmp_path)


INDICES: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "cannot read the index"),
    "deep": ('{"weight_map":' + "[" * 100_000, "cannot read the index"),
    "many digits": (f'{{"weight_map": {"9" * 5_000}}}', "cannot read the index"),
    "a key twice": ('{"weight_map": {"a": "x", "a": "y"}}', "the key 'a' is given twice"),
    "a list": ("[]", "it has no 'weight_map'"),
    "an empty map": ('{"weight_map": {}}', "it has no 'weight_map'"),
    "a number for a file": ('{"weight_map": {"a": 1}}', "accepted are names of files"),
    "the parent": ('{"weight_map": {"a": "../x.safetensors"}}', "accepted are names of files"),
    "an absolute path": ('{"weight_map": {"a": "/x.safetensors"}}', "accepted are names of files"),
    "a drive": ('{"weight_map": {"a": "C:\\\\x.safetensors"}}', "accepted are names of files"),
    "a null byte": ('{"weight_map": {"a": "x\\u0000"}}', "accepted are names of files"),
    "many of them": (json.dumps({"weight_map": {str(n): f"../{n}" for n in range(10_000)}}), "and 9996 more"),
}


@pytest.mark.parametrize(("text", "why"), INDICES.values(), ids=INDICES)
def test_a_hostile_index_is_refused_with_the_reason(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        open_source(path)
    assert why in str(refused.value)
    assert len(str(refused.value)) < _MOST_MESSAGE_CHARS


def test_an_index_of_many_files_that_are_not_there_says_so_within_seconds(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {f"t{n}": f"{n}.safetensors" for n in range(20_000)}}))
    began = time.process_time()
    with open_source(path) as source:
        assert len(source.faults) == 40_000
    assert time.process_time() - began < 20


_UNNAMEABLE = {
    "a surrogate": ("\ud800", "UTF-8"),
    "a surrogate inside": ("w\udcffx", "at character 1"),
    "the format's own": ("__metadata__", "keeps for itself"),
    "a very long one": ("w" * MOST_BYTES, "file holds 100000000"),
}


@pytest.mark.parametrize(("name", "why"), _UNNAMEABLE.values(), ids=_UNNAMEABLE)
@pytest.mark.parametrize("kind", ["file", "packed"])
def test_a_name_that_the_format_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path, name: str, why: str, kind: str
) -> None:
    entry, tensor = HeaderEntry(name, torch.float32, (2,)), torch.zeros(2)
    write: Callable[[], object] = (
        (lambda: write_file(tmp_path / "w", [entry], [tensor], {}))
        if kind == "file"
        else (lambda: pack([entry], [tensor], {}))
    )
    with pytest.raises(UsageError) as refused:
        write()
    assert why in str(refused.value)
    assert refused.value.key == name
    assert len(str(refused.value)) < _MOST_MESSAGE_CHARS
    assert not (tmp_path / "w").exists()


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    entry = HeaderEntry("w", torch.float32, (2,))
    with pytest.raises(UsageError, match="'w' is the name of two tensors"):
        write_file(tmp_path / "w", [entry, entry], [torch.zeros(2)] * 2, {})
