"""``weights=`` from several files: what an index or a directory says is read, or every fault is listed."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.training.twins import (
    Trial,
    adam,
    assert_equal_lists,
    assert_equal_models,
    blocks,
    config_of,
    every_layout,
    steps,
)
from tierstore.errors import UsageError
from tierstore.formats.sharded_weights import Shards, open_source
from tierstore.training import offload

INDEX = "model.safetensors.index.json"
State = dict[str, Tensor]


def write_index(directory: Path, where: Mapping[str, object], name: str = INDEX) -> Path:
    (directory / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return directory / name


def write_shards(directory: Path, state: State, count: int = 3) -> dict[str, str]:
    """Write a state in ``count`` files, tensors in turn, and return which file each is in."""
    directory.mkdir(exist_ok=True)
    files = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    where = {name: files[number % count] for number, name in enumerate(state)}
    for file in files:
        save_file({name: state[name] for name, each in where.items() if each == file}, directory / file)
    return where


def empty(build: Callable[[], nn.Module] = blocks) -> nn.Module:
    with torch.device("meta"):
        return build()


def filled(seed: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return blocks()


@pytest.mark.parametrize("named", ["index", "directory", "no index"])
@every_layout
def test_a_model_without_values_trains_on_from_shards(layout: str, named: str, tmp_path: Path) -> None:
    plain = Trial(model := filled(), adam(model))
    where = write_shards(tmp_path / "w", plain.model.state_dict())
    path = tmp_path / "w" if named == "no index" else write_index(tmp_path / "w", where)
    ours = Trial(model := empty(), adam(model))
    with offload(
        ours.model,
        ours.optimizers,
        config_of(layout, tmp_path),
        weights=path.parent if named == "directory" else path,
    ):
        for trial in (plain, ours):
            torch.manual_seed(1)
            steps(2)(trial)
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)


@given(data=st.data())
def test_every_way_of_cutting_a_state_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("cut")
    dtypes = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
    count = data.draw(st.integers(1, 5))
    state: State = {}
    where: dict[str, str] = {}
    for number in range(data.draw(st.integers(1, 12))):
        shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = data.draw(st.sampled_from(dtypes))
        state[f"t.{number}"] = torch.randn(shape).to(dtype)
        where[f"t.{number}"] = f"{data.draw(st.integers(0, count - 1))}.safetensors"
    for file in set(where.values()):
        save_file({name: state[name] for name in state if where[name] == file}, directory / file)
    write_index(directory, where)
    with open_source(directory) as source:
        assert set(source.names) == set(state)
        for name, tensor in state.items():
            assert source.shape(name) == tuple(tensor.shape)
            assert source.dtype(name) == tensor.dtype
            assert torch.equal(source.read(name), tensor)


def test_a_directory_with_one_file_is_that_file(tmp_path: Path) -> None:
    plain = filled()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    save_file({"unrelated": torch.zeros(1)}, tmp_path / "optimizer.safetensors")  # as run.save leaves it
    with offload(model := empty(), None, config_of("host", tmp_path), weights=tmp_path):
        pass
    assert_equal_models(plain, model)


def test_weights_may_be_what_run_save_has_written(tmp_path: Path) -> None:
    ours = Trial(model := filled(), adam(model))
    with offload(ours.model, ours.optimizers, config_of("three", tmp_path)) as run:
        steps(1)(ours)
        run.save(tmp_path / "saved")
    with offload(again := empty(), None, config_of("host", tmp_path), weights=tmp_path / "saved"):
        pass
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_shards_may_be_links_as_in_caches(tmp_path: Path) -> None:
    plain = filled()
    where = write_shards(tmp_path / "blobs", plain.state_dict())
    (tmp_path / "snapshot").mkdir()
    for file in set(where.values()):
        (tmp_path / "snapshot" / file).symlink_to(Path("..") / "blobs" / file)
    write_index(tmp_path / "blobs", where)
    (tmp_path / "snapshot" / INDEX).symlink_to(Path("..") / "blobs" / INDEX)
    (tmp_path / "blobs" / INDEX).rename(tmp_path / "blobs" / "0f3a")
    (tmp_path / "snapshot" / INDEX).unlink()
    (tmp_path / "snapshot" / INDEX).symlink_to(Path("..") / "blobs" / "0f3a")
    with offload(model := empty(), None, config_of("disk", tmp_path), weights=tmp_path / "snapshot"):
        pass
    assert_equal_models(plain, model)


def test_shards_may_lie_in_directories_below_the_index(tmp_path: Path) -> None:
    plain = filled()
    where = write_shards(tmp_path / "parts", plain.state_dict())
    path = write_index(tmp_path, {name: f"parts/{file}" for name, file in where.items()})
    with offload(model := empty(), None, config_of("host", tmp_path), weights=path):
        pass
    assert_equal_models(plain, model)


# ---------------------------------------------------------------------- what is listed


def refusal_of(weights: Path, path: Path, build: Callable[[], nn.Module] = blocks) -> str:
    """Return why weights are refused, and make sure that nothing was changed."""
    model = empty(build)
    with pytest.raises(UsageError) as caught:
        offload(model, None, config_of("host", path), weights=weights)
    assert all(parameter.is_meta for parameter in model.parameters())
    return str(caught.value)


def test_all_that_does_not_fit_is_listed_at_once(tmp_path: Path) -> None:
    state = filled().state_dict()
    where = write_shards(tmp_path / "w", state)
    last = max(where.values())
    shard = load_file(tmp_path / "w" / last)
    gone = next(name for name in shard if name.startswith("0."))
    del shard[gone]
    odd, wrong = [name for name in shard if name.startswith("2.")][:2]
    shard[odd] = torch.zeros(7)
    shard[wrong] = shard[wrong].to(torch.complex64)
    shard["stranger"] = torch.zeros(1)
    double = next(name for name, file in where.items() if file != last)
    shard[double] = state[double]
    save_file(shard, tmp_path / "w" / last)
    where["phantom"] = "model-00009-of-00009.safetensors"
    text = refusal_of(write_index(tmp_path / "w", where), tmp_path)
    assert f"missing: {gone}" in text
    assert f"missing in {last!r}: {gone}" in text
    assert f"{odd} is [7], the model's is {list(state[odd].shape)}" in text
    assert f"{wrong} is torch.complex64, which cannot become the model's torch.float32" in text
    assert f"stranger is in {last!r}, and the index does not name it" in text
    assert f"{double} is in {last!r}, and the index says {where[double]!r}" in text
    assert "model-00009-of-00009.safetensors" in text


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    state = filled().state_dict()
    where = write_shards(tmp_path / "w", state)
    save_file({"3.bias": state["3.bias"]}, tmp_path / "w" / "z.safetensors")
    text = refusal_of(tmp_path / "w", tmp_path)
    assert f"3.bias is in {where['3.bias']!r} and in 'z.safetensors'" in text


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "a/../../x.safetensors", "/x.safetensors", "a\0b", "", 7, None, "C:\\x", ".."],
)
def test_an_index_that_leaves_its_directory_is_refused(file: object, tmp_path: Path) -> None:
    state = filled().state_dict()
    save_file(state, tmp_path / "x.safetensors")
    (tmp_path / "w" / "a").mkdir(parents=True)
    path = write_index(tmp_path / "w", dict.fromkeys(state, file))
    assert "accepted are names of files in its own directory or below" in refusal_of(path, tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"weight_map": {}}', '{"weight_map": 3}', "\xff"])
def test_a_file_that_is_no_index_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.index.json").write_bytes(content.encode("latin-1"))
    assert "index" in refusal_of(tmp_path / "x.index.json", tmp_path)


def test_a_directory_with_two_sets_of_weights_is_refused(tmp_path: Path) -> None:
    state = filled().state_dict()
    directory = tmp_path / "w"
    where = write_shards(directory, state)
    write_index(directory, where)
    save_file(state, directory / "model.safetensors")
    assert "more than one set of weights" in refusal_of(directory, tmp_path)
    (directory / "model.safetensors").unlink()
    write_index(directory, where, "model.fp16.safetensors.index.json")
    assert "more than one set of weights" in refusal_of(directory, tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    assert "holds no weights" in refusal_of(tmp_path / "w", tmp_path)


def test_a_shard_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    where = write_shards(tmp_path / "w", filled().state_dict())
    path = write_index(tmp_path / "w", where)
    file = tmp_path / "w" / where["3.bias"]
    os.truncate(file, file.stat().st_size - 4)
    assert file.name in refusal_of(path, tmp_path)


def test_an_element_type_that_pytorch_has_not_is_refused(tmp_path: Path) -> None:
    header = b'{"t":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    content = struct.pack("<Q", len(header)) + header + b"\0\0"
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match=r"t has an element type that PyTorch has not|cannot read"):
        offload(nn.ParameterDict({"t": torch.zeros(4)}), None, config_of("host", tmp_path), weights=tmp_path)


# ---------------------------------------------------------------------- tied, buffers


class Tied(nn.Module):
    """Two names of a parameter, two of a buffer, and a buffer that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mean", self.norm.running_mean)
        self.register_buffer("table", torch.ones(3, device="cpu"), persistent=False)


@pytest.mark.parametrize("left_out", ["first.weight", "second.weight"])
@pytest.mark.parametrize("buffer", ["mean", "norm.running_mean"])
def test_one_name_of_what_is_shared_is_enough(left_out: str, buffer: str, tmp_path: Path) -> None:
    plain = Tied()
    nn.init.normal_(plain.get_buffer("mean"))
    state = plain.state_dict()
    del state[left_out], state[buffer]
    write_index(tmp_path, write_shards(tmp_path, state, 2))
    model = empty(Tied)
    with offload(model, None, config_of("disk", tmp_path), weights=tmp_path):
        pass
    assert model.get_parameter("second.weight") is model.get_parameter("first.weight")
    assert model.get_buffer("mean") is model.get_buffer("norm.running_mean")
    assert_equal_models(plain, model)


def test_names_of_one_tensor_with_different_values_are_refused(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in Tied().state_dict().items()}
    state["second.weight"] += 1
    write_index(tmp_path, write_shards(tmp_path, state, 2))
    text = refusal_of(tmp_path, tmp_path, Tied)
    assert "first.weight and second.weight are one tensor in the model, and their values differ" in text


def test_a_cast_keeps_the_kind_of_a_tensor(tmp_path: Path) -> None:
    plain = filled().to(torch.bfloat16)
    write_index(tmp_path, write_shards(tmp_path, plain.state_dict()))
    with offload(model := empty(), None, config_of("host", tmp_path), weights=tmp_path):
        pass
    assert_equal_models(plain.to(torch.float32), model)


def test_at_most_two_files_are_open_while_tensors_are_read(tmp_path: Path) -> None:
    state = {f"t{number}": torch.full((4,), float(number)) for number in range(12)}
    shards = Shards.of_index(write_index(tmp_path, write_shards(tmp_path, state, 6)))
    for name in [*state, *reversed(state)]:
        assert torch.equal(shards.read(name), state[name])
        assert len(shards._open) <= 2
    with shards:
        pass
    assert not shards._open
