"""``tierstore ls | du | verify | export | import`` on real durable directories."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import zarr

import tierstore as ts
from tierstore.cli import main
from tierstore.testing.conformance import succeed
from tierstore.units import format_bytes
from tierstore_backends.files import DurableFiles, open_backend

_Output = pytest.CaptureFixture[str]

TENSORS = {
    "layers.0.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "layers.0.bias": torch.arange(3, dtype=torch.bfloat16),
    "layers.1.weight": torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
    "step": torch.tensor(7.5, dtype=torch.float64),
    "nothing": torch.empty(0, 2),
}


def open_store(path: Path) -> ts.Store:
    options = {"path": str(path), "durable": True}
    return ts.Store(ts.StoreConfig([ts.TierConfig("disk", "files", "64MiB", options=options)]))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    with open_store(path) as store:
        for key, tensor in TENSORS.items():
            store.put(key, tensor)
    return path


def contents(path: Path) -> dict[str, torch.Tensor]:
    with open_store(path) as store:
        return {key: store.get(key) for key in store}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor] = TENSORS) -> bool:
    return set(found) == set(expected) and all(
        found[key].dtype == tensor.dtype and torch.equal(found[key], tensor)
        for key, tensor in expected.items()
    )


def damage(path: Path, key: str) -> None:
    """Flip a bit of a key's bytes, wherever they lie."""
    needle = TENSORS[key].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    for file in path.glob("*.bin"):
        data = bytearray(file.read_bytes())
        if needle in data:
            data[data.index(needle)] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError(f"{key} is nowhere")


# ------------------------------------------------------------------------------ ls and du


def test_ls_shows_keys_with_dtypes_shapes_sizes_and_tiers(directory: Path, capsys: _Output) -> None:
    assert main(["ls", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.split(r"\s{2,}", lines[0].rstrip()) == ["KEY", "DTYPE", "SHAPE", "SIZE", "TIER"]
    assert [line.split()[0] for line in lines[1:]] == sorted(TENSORS)
    assert re.search(r"layers\.0\.weight +float32 +\[3, 4\] +48 B +disk", lines[2])


def test_ls_tells_a_machine_the_same(directory: Path, capsys: _Output) -> None:
    assert main(["ls", "--json", str(directory), "layers.*.weight"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["key"] for row in rows] == ["layers.0.weight", "layers.1.weight"]
    assert rows[1] == {
        "key": "layers.1.weight",
        "dtype": "int64",
        "shape": [3, 2],
        "nbytes": 48,
        "tiers": ["disk"],
    }


def test_du_adds_up_under_the_parts_of_names(directory: Path, capsys: _Output) -> None:
    assert main(["du", "--json", "--depth", "2", str(directory)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["keys"], found["nbytes"]) == (5, 48 + 6 + 48 + 8)
    groups = {group["prefix"]: (group["keys"], group["nbytes"]) for group in found["groups"]}
    assert groups == {"layers.0*": (2, 54), "layers.1*": (1, 48), "nothing": (1, 0), "step": (1, 8)}
    assert found["store_held_bytes"] >= found["nbytes"]


def test_du_is_readable(directory: Path, capsys: _Output) -> None:
    assert main(["du", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r" +102 B +3 keys  layers\*", lines[0])
    assert re.fullmatch(r" +110 B +5 keys  in all", lines[-3])


# ------------------------------------------------------------------------------ verify


def test_verify_names_a_key_of_which_a_part_is_lost_and_reads_the_others(
    tmp_path: Path, capsys: _Output
) -> None:
    path = tmp_path / "store"
    options = {"path": str(path), "durable": True}
    packed = {name: torch.arange(2_500_000, dtype=torch.int32) for name in ("lost", "whole")}
    with ts.Store(
        ts.StoreConfig([ts.TierConfig("disk", "files", "64MiB", options=options, codec="lz4")])
    ) as store:
        for key, tensor in (packed | TENSORS).items():
            store.put(key, tensor)
    files = open_backend(capacity_bytes=64 << 20, options=options)
    assert isinstance(files, DurableFiles)
    succeed(
        files.commit([record for record in files.recovered() if record.name != "lost"])
    )  # its first chunk
    files.close()
    assert main(["verify", "--json", str(path)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["keys"] == len(TENSORS) + 2
    assert list(told["damaged"]) == ["lost"]
    assert "does not agree with what is there" in told["damaged"]["lost"]
    assert main(["ls", str(path)]) == 0
    assert main(["du", str(path)]) == 0


def test_verify_says_that_everything_is_whole(directory: Path, capsys: _Output) -> None:
    assert main(["verify", str(directory)]) == 0
    assert capsys.readouterr().out == "5 of 5 keys are whole (110 B read)\n"


def test_verify_names_damaged_keys_and_leaves_the_others(directory: Path, capsys: _Output) -> None:
    damage(directory, "layers.0.weight")
    assert main(["verify", str(directory)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^damaged: layers\.0\.weight: .*offset \d+ of .*\.bin", out, re.MULTILINE)
    assert "4 of 5 keys are whole" in out
    assert main(["verify", "--json", str(directory)]) == 1
    assert list(json.loads(capsys.readouterr().out)["damaged"]) == ["layers.0.weight"]


def test_verify_says_what_has_no_checksum(directory: Path, capsys: _Output) -> None:
    options = {"path": str(directory), "durable": True, "checksum": False}
    config = ts.StoreConfig([ts.TierConfig("disk", "files", "64MiB", options=options)])
    with ts.Store(config) as store:
        store.put("layers.0.weight", TENSORS["layers.0.weight"], replace=True)
    damage(directory, "layers.0.weight")
    assert main(["verify", str(directory)]) == 0
    readable, unchecked = capsys.readouterr().out.splitlines()
    assert readable == "5 of 5 keys can be read (110 B read)"
    assert unchecked.startswith("48 B of that have no checksum in the files")
    assert main(["verify", "--json", str(directory)]) == 0
    assert json.loads(capsys.readouterr().out)["unchecked_bytes"] == 48


# ------------------------------------------------------------------------------ export and import


@pytest.mark.parametrize("target", ["out.safetensors", "out.zarr"])
def test_what_was_exported_can_be_imported(directory: Path, target: str, tmp_path: Path) -> None:
    file, copy = tmp_path / target, tmp_path / "copy"
    assert main(["export", str(directory), str(file)]) == 0
    assert main(["import", str(copy), str(file)]) == 0
    assert same(contents(copy))


def test_others_read_what_was_exported(directory: Path, tmp_path: Path) -> None:
    file, group = tmp_path / "out.safetensors", tmp_path / "out.zarr"
    assert main(["export", str(directory), str(file)]) == 0
    assert same(safetensors.torch.load_file(file))
    assert main(["export", "--codec", "zstd", str(directory), str(group), "layers.*"]) == 0
    opened = zarr.open_group(str(group), mode="r")
    assert sorted(opened.array_keys()) == ["layers.0.bias", "layers.0.weight", "layers.1.weight"]
    bias = opened["layers.0.bias"]
    assert isinstance(bias, zarr.Array)
    assert dict(bias.attrs) == {"key": "layers.0.bias", "torch_dtype": "bfloat16"}
    assert torch.equal(torch.from_numpy(np.asarray(bias[...])).view(torch.bfloat16), TENSORS["layers.0.bias"])


def test_arrays_of_groups_within_a_group_are_imported(tmp_path: Path) -> None:
    group = zarr.open_group(str(tmp_path / "w.zarr"), mode="w")
    group.create_array("a", data=np.arange(3))
    within = group.create_group("layers").create_group("0")
    within.create_array("weight", data=np.arange(4))
    within.create_array("%2F", data=np.arange(5), attributes={"key": "/"})
    (tmp_path / "w.zarr" / "layers" / "README").write_text("files beside arrays may be anything")
    assert main(["import", str(tmp_path / "copy"), str(tmp_path / "w.zarr")]) == 0
    expected = {"a": 3, "layers/0/weight": 4, "layers/0//": 5}
    assert same(contents(tmp_path / "copy"), {key: torch.arange(n) for key, n in expected.items()})


def test_strange_keys_survive_zarr(tmp_path: Path) -> None:
    names = ["a/b", "..", "", "__init__", "zarr.json", "ü €", ".x", "%41", "a b"]
    with open_store(tmp_path / "store") as store:
        for index, name in enumerate(names):
            store.put(name, torch.tensor(index))
    assert main(["export", str(tmp_path / "store"), str(tmp_path / "out.zarr")]) == 0
    assert main(["import", str(tmp_path / "copy"), str(tmp_path / "out.zarr")]) == 0
    assert {key: int(value) for key, value in contents(tmp_path / "copy").items()} == {
        name: index for index, name in enumerate(names)
    }


def test_an_export_that_fails_leaves_nothing(directory: Path, tmp_path: Path, capsys: _Output) -> None:
    damage(directory, "layers.0.weight")
    for name in ("out.zarr", "out.safetensors"):
        assert main(["export", str(directory), str(tmp_path / name)]) == 1
        assert "offset" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_store_whose_manifest_is_gone_is_no_empty_place(directory: Path, capsys: _Output) -> None:
    (directory / "tierstore.db").unlink()
    assert main(["ls", str(directory)]) == 1
    assert "put that back, or remove the files" in capsys.readouterr().err


def test_a_chunk_that_is_missing_is_not_imported_as_zeros(
    directory: Path, tmp_path: Path, capsys: _Output
) -> None:
    assert main(["export", str(directory), str(tmp_path / "out.zarr")]) == 0
    for chunk in (tmp_path / "out.zarr" / "layers.0.weight" / "c").rglob("*"):
        if chunk.is_file():
            chunk.unlink()
    assert main(["import", str(tmp_path / "copy"), str(tmp_path / "out.zarr")]) == 1
    assert "chunks of array 'layers.0.weight'" in capsys.readouterr().err


def test_an_import_that_fails_leaves_nothing_of_itself(
    directory: Path, tmp_path: Path, capsys: _Output
) -> None:
    assert main(["export", str(directory), str(tmp_path / "out.safetensors"), "layers.0.*"]) == 0
    with open_store(tmp_path / "other") as store:
        store.put("layers.0.weight", torch.zeros(1))
    capsys.readouterr()
    assert main(["import", str(tmp_path / "other"), str(tmp_path / "out.safetensors")]) == 2
    assert "other already: --replace takes" in capsys.readouterr().err
    assert {key: value.tolist() for key, value in contents(tmp_path / "other").items()} == {
        "layers.0.weight": [0.0]
    }
    assert main(["import", "--replace", str(tmp_path / "other"), str(tmp_path / "out.safetensors")]) == 0
    assert set(contents(tmp_path / "other")) == {"layers.0.weight", "layers.0.bias"}


def test_a_dtype_that_safetensors_does_not_know_is_named_before_anything_is_written(
    tmp_path: Path, capsys: _Output
) -> None:
    with open_store(tmp_path / "store") as store:
        store.put("z", torch.zeros(2, dtype=torch.complex128))
    assert main(["export", str(tmp_path / "store"), str(tmp_path / "out.safetensors")]) == 2
    assert "'z' is torch.complex128, which a safetensors file cannot hold" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


# ------------------------------------------------------------------------------ only looking


@pytest.mark.parametrize("verb", ["ls", "du", "verify", "export"])
def test_verbs_that_look_change_nothing(verb: str, directory: Path, tmp_path: Path) -> None:
    with open_store(directory) as store:
        store.flush()
        shutil.copytree(directory, tmp_path / "killed")  # with a lock and a log
    before = {path: path.read_bytes() for path in (tmp_path / "killed").iterdir()}
    target = [str(tmp_path / "out.safetensors")] if verb == "export" else []
    assert main([verb, str(tmp_path / "killed"), *target]) == 0
    assert {path: path.read_bytes() for path in (tmp_path / "killed").iterdir()} == before


def test_several_may_look_at_a_time(directory: Path, capsys: _Output) -> None:
    options = {"path": str(directory), "durable": True, "read_only": True}
    with ts.Store(ts.StoreConfig([ts.TierConfig("disk", "files", "64MiB", options=options)])):
        assert main(["verify", str(directory)]) == 0
    assert "5 of 5 keys are whole" in capsys.readouterr().out


def test_du_shows_what_the_files_take_beside_what_is_in_them(directory: Path, capsys: _Output) -> None:
    assert main(["du", "--json", str(directory)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nbytes"] < found["store_held_bytes"] < found["store_disk_bytes"]
    assert found["store_disk_bytes"] == 512 * sum(path.stat().st_blocks for path in directory.iterdir())
    assert main(["du", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split("  ")[-2].strip() == format_bytes(found["store_disk_bytes"])
    assert "that its files take of the disk" in lines[-1]


STRANGE = {
    "two\nlines": "two\\nlines",
    "\x1b[31mred": "\\x1b[31mred",
    "back\\slash": "back\\\\slash",
    "ü €": "ü €",
}


@pytest.mark.parametrize("verb", ["ls", "du", "verify"])
def test_a_key_is_one_line_whatever_is_in_it(verb: str, tmp_path: Path, capsys: _Output) -> None:
    with open_store(tmp_path / "store") as store:
        for key in STRANGE:
            store.put(key, torch.arange(100))
    if verb == "verify":  # which names those that are damaged
        (tmp_path / "store" / "tierstore-0000.bin").write_bytes(b"")
    assert main([verb, str(tmp_path / "store")]) == (verb == "verify")
    out = capsys.readouterr().out
    assert len(out.splitlines()) == len(STRANGE) + {"ls": 1, "du": 3, "verify": 1}[verb]
    assert all(shown in out for shown in STRANGE.values())
    assert out.replace("\n", "").isprintable()


# ------------------------------------------------------------------------------ wrong calls


def test_a_key_that_looks_like_a_pattern_is_itself(tmp_path: Path, capsys: _Output) -> None:
    with open_store(tmp_path / "store") as store:
        store.put("layers[0]", torch.zeros(1))
        store.put("layers[1]", torch.zeros(1))
    assert main(["ls", "--json", str(tmp_path / "store"), "layers[0]"]) == 0
    assert [row["key"] for row in json.loads(capsys.readouterr().out)] == ["layers[0]"]


def test_each_pattern_has_to_match_something(directory: Path, tmp_path: Path, capsys: _Output) -> None:
    target = tmp_path / "out.safetensors"
    assert main(["export", str(directory), str(target), "layers.*", "stepp"]) == 2
    assert "none of 5 keys matches stepp" in capsys.readouterr().err
    assert not target.exists()


def test_keys_are_not_called_required(capsys: _Output) -> None:
    assert main(["ls"]) == 2
    assert "required: STORE_PATH;" in capsys.readouterr().err


@pytest.mark.parametrize("depth", ["-1", "half", "1.5", ""])
def test_a_depth_that_is_none_is_refused(depth: str, directory: Path, capsys: _Output) -> None:
    assert main(["du", "--depth", depth, str(directory)]) == 2
    assert "accepted: a whole number, 0 or more" in capsys.readouterr().err


def test_a_codec_is_refused_where_the_format_has_none(
    directory: Path, tmp_path: Path, capsys: _Output
) -> None:
    assert main(["export", "--codec", "zstd", str(directory), str(tmp_path / "out.safetensors")]) == 2
    assert "a safetensors file, which knows no codecs" in capsys.readouterr().err
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("name", ["out.safetensors", "out.zarr"])
def test_an_export_to_no_directory_is_refused(
    directory: Path, name: str, tmp_path: Path, capsys: _Output
) -> None:
    assert main(["export", str(directory), str(tmp_path / "nowhere" / name)]) == 2
    assert f"'{tmp_path}/nowhere' is not a directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_target_may_have_as_long_a_name_as_a_file(directory: Path, tmp_path: Path) -> None:
    assert main(["export", str(directory), str(tmp_path / ("x" * 255)), "step"]) == 0
    assert (tmp_path / ("x" * 255)).exists()


def test_a_key_that_a_safetensors_file_cannot_have_is_named(tmp_path: Path, capsys: _Output) -> None:
    with open_store(tmp_path / "store") as store:
        store.put("__metadata__", torch.zeros(1))
    assert main(["export", str(tmp_path / "store"), str(tmp_path / "out.safetensors")]) == 2
    assert "'__metadata__' is a name that the safetensors format keeps for itself" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "store"), str(tmp_path / "out.zarr")]) == 0


def test_a_source_that_is_none_makes_no_store(directory: Path, tmp_path: Path, capsys: _Output) -> None:
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "folder").mkdir()
    for source, why in {
        "empty.safetensors": "header too small",
        "folder": "is not a zarr group",
        directory.name: "is itself a durable store: export it",
    }.items():
        assert main(["import", str(tmp_path / "new"), str(tmp_path / source)]) == 2
        assert why in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("path", ["", ",", "a,", ",a"])
def test_a_path_that_is_none_is_not_the_current_directory(path: str, capsys: _Output) -> None:
    assert main(["ls", path]) == 2
    assert "names no directory, or has a comma too many" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.safetensors", "out.zarr"])
def test_an_export_that_cannot_be_written_names_what_was_asked_for(
    directory: Path, shut_out: Path, name: str, capsys: _Output
) -> None:
    os.seteuid(0)
    shutil.copytree(directory, shut_out / "readable")
    for path in (shut_out / "readable").iterdir():
        path.chmod(0o644)
    os.seteuid(65534)
    assert main(["export", str(shut_out / "readable"), str(shut_out / name)]) == 1
    err = capsys.readouterr().err
    assert f"'{shut_out}/{name}' could not be written" in err
    assert "Permission denied" in err
    assert ".tierstore-export" not in err


def test_an_import_that_meets_a_key_names_the_switch(
    directory: Path, tmp_path: Path, capsys: _Output
) -> None:
    assert main(["export", str(directory), str(tmp_path / "out.safetensors")]) == 0
    assert main(["import", str(directory), str(tmp_path / "out.safetensors")]) == 2
    assert "already: --replace takes the new tensor" in capsys.readouterr().err


@pytest.fixture
def shut_out(directory: Path) -> Iterator[Path]:
    """The store of somebody else, and a file beside it; this process may not look into either."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as room:
        place = Path(room)
        place.chmod(0o755)
        shutil.copytree(directory, place / "store")
        (place / "store").chmod(0o700)
        safetensors.torch.save_file({"x": torch.zeros(1)}, place / "in.safetensors")
        shutil.copyfile(place / "in.safetensors", place / "all.safetensors")
        (place / "in.safetensors").chmod(0o600)
        (place / "all.safetensors").chmod(0o644)
        os.seteuid(65534)
        try:
            yield place
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("verb", ["ls", "du", "verify", "import"])
def test_a_store_of_somebody_else_says_whose_it_is(verb: str, shut_out: Path, capsys: _Output) -> None:
    source = [str(shut_out / "all.safetensors")] if verb == "import" else []
    assert main([verb, str(shut_out / "store"), *source]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "store belongs to user 0 and has mode 0700, and this process is user 65534" in err


def test_a_source_that_may_not_be_read_is_not_called_missing(shut_out: Path, capsys: _Output) -> None:
    assert main(["import", str(shut_out / "own"), str(shut_out / "in.safetensors")]) == 1
    err = capsys.readouterr().err
    assert "in.safetensors' cannot be read" in err
    assert "Permission denied" in err


@pytest.mark.parametrize("verb", ["ls", "du", "verify"])
def test_what_is_no_durable_store_is_left_alone(verb: str, tmp_path: Path, capsys: _Output) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main([verb, str(tmp_path)]) == 2
    assert "is not a durable store" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert main([verb, str(tmp_path / "nowhere")]) == 2
    assert "is not a directory" in capsys.readouterr().err


def test_a_store_that_is_in_use_is_named_with_its_owner(directory: Path, capsys: _Output) -> None:
    with open_store(directory):
        assert main(["ls", str(directory)]) == 2
    assert "in use by a live backend of this process" in capsys.readouterr().err


def test_a_pattern_that_matches_nothing_says_so(directory: Path, capsys: _Output) -> None:
    assert main(["ls", str(directory), "nothing.like.it"]) == 2
    assert "none of 5 keys matches nothing.like.it" in capsys.readouterr().err


def test_a_target_that_is_there_is_not_overwritten(directory: Path, tmp_path: Path, capsys: _Output) -> None:
    (tmp_path / "out.safetensors").write_bytes(b"mine")
    assert main(["export", str(directory), str(tmp_path / "out.safetensors")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "out.safetensors").read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["nowhere.safetensors", "nowhere.zarr"])
def test_a_source_that_is_not_there_is_named(name: str, tmp_path: Path, capsys: _Output) -> None:
    assert main(["import", str(tmp_path / "store"), str(tmp_path / name)]) == 2
    assert f"{name}' is not there" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
