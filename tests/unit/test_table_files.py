"""Tables written to files and read from files of ours and of others."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from tierstore.errors import BackendError, ConfigError, UsageError
from tierstore.formats import row_files
from tierstore.nn import EmbeddingTable, row_blocks
from tierstore.optim import FTRL, LazyAdam

ROWS, WIDTH = 50, 4
FORMATS = ["npy", "safetensors"]
every_format = pytest.mark.parametrize("format_", FORMATS)


def _table(rows: int = ROWS, **options: Any) -> EmbeddingTable:  # noqa: ANN401
    return EmbeddingTable(rows, WIDTH, **{"seed": 0, **options})


def _all(table: EmbeddingTable) -> Tensor:
    return table.rows(torch.arange(table.num_embeddings))


@every_format
@given(
    rows=st.integers(1, 70), shard_rows=st.integers(1, 80), block_rows=st.integers(1, 30),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
)  # fmt: skip
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_exported_is_loaded(
    format_: str, rows: int, shard_rows: int, block_rows: int, dtype: torch.dtype,
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if format_ == "npy" and dtype is torch.bfloat16:
        dtype = torch.float32
    row_bytes = WIDTH * dtype.itemsize
    monkeypatch.setattr(row_blocks, "_AT_A_TIME", block_rows * row_bytes)
    path = tmp_path_factory.mktemp("export") / "table"
    table, other = _table(rows, dtype=dtype, seed=1), _table(rows, dtype=dtype, seed=2)
    table.export(path, format=format_, shard_bytes=shard_rows * row_bytes)
    assert len(list(path.iterdir())) == -(-rows // shard_rows)
    other.load(path)
    assert torch.equal(_all(other), _all(table))


def test_rows_that_nobody_wrote_take_no_room_when_all_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_blocks, "_AT_A_TIME", 3000)
    table = _table(10_000)
    optimizer = FTRL(table.parameters(), lr=0.1)
    table(torch.tensor([1, 500, 9_999])).square().sum().backward()
    optimizer.step()
    pages = table.stats().row_store.pages
    assert pages < 10
    table.export(tmp_path / "table", state=True, shard_bytes="10KB")
    dense = table.state_dict()["weight"].clone()
    accumulator = optimizer.state[table.weight]["accumulator"].clone()
    assert table.stats().row_store.pages == pages
    shards = sorted((tmp_path / "table").glob("rows-*"))
    assert np.array_equal(np.concatenate([np.load(each) for each in shards]), dense.numpy())
    assert torch.equal(dense, _all(table)), "which brings them"
    assert accumulator.ne(0.1).any(dim=1).nonzero().flatten().tolist() == [1, 500, 9_999]


def test_numpy_reads_what_is_exported(tmp_path: Path) -> None:
    table = _table()
    table.export(tmp_path / "table", shard_bytes=20 * WIDTH * 4)
    names = [f"rows-0000{number}-of-00003.npy" for number in (1, 2, 3)]
    assert sorted(each.name for each in (tmp_path / "table").iterdir()) == names
    shards = [np.load(tmp_path / "table" / name) for name in names]
    assert np.array_equal(np.concatenate(shards), _all(table).numpy())


def test_safetensors_reads_what_is_exported(tmp_path: Path) -> None:
    table = _table(dtype=torch.bfloat16)
    table.export(tmp_path / "table", format="safetensors")
    (file,) = (tmp_path / "table").iterdir()
    assert torch.equal(load_file(file)["rows"], _all(table))


def _numpy_file(path: Path, values: Tensor) -> Path:
    np.save(path / "any.npy", values.numpy())
    return path / "any.npy"


def _one_tensor(path: Path, values: Tensor) -> Path:
    save_file({"emb.weight": values}, path / "any.safetensors")
    return path / "any.safetensors"


def _weight_of_a_module(path: Path, values: Tensor) -> Path:
    save_file({"weight": values, "bias": torch.ones(3)}, path / "any.safetensors")
    return path / "any.safetensors"


@pytest.mark.parametrize("write", [_numpy_file, _one_tensor, _weight_of_a_module])
def test_files_of_others_are_loaded(write: Callable[[Path, Tensor], Path], tmp_path: Path) -> None:
    values = torch.randn(ROWS, WIDTH)
    table = _table()
    table.load(write(tmp_path, values))
    assert torch.equal(_all(table), values)


@every_format
def test_states_are_exported_and_loaded_beside_the_rows(format_: str, tmp_path: Path) -> None:
    tables = [_table(seed=1), _table(seed=2)]
    optimizers = [LazyAdam(table.parameters(), lr=0.1) for table in tables]
    for table, optimizer, ids in zip(tables, optimizers, ([1, 2], [3]), strict=True):
        table(torch.tensor(ids)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    tables[0].export(tmp_path / "table", format=format_, state=True, shard_bytes="400B")
    tables[1].load(tmp_path / "table", state=True)
    for table, optimizer in zip(tables, optimizers, strict=True):
        table(torch.tensor([1, 3])).square().sum().backward()
        optimizer.step()
    assert torch.equal(_all(tables[0]), _all(tables[1]))


# ---------------------------------------------------------------------- what is refused


def _raw_npy(header: dict[str, Any], content: bytes) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + content


_FLOATS = {"descr": "<f4", "fortran_order": False, "shape": (ROWS, WIDTH)}
BAD: dict[str, tuple[str, bytes]] = {
    "nothing": ("magic string is not correct|the magic string|EOF", b""),
    "no header": ("EOF|magic string", b"\x93NUMPY\x01\x00\xff\xff"),
    "another version": (r"version \(9, 0\)|of version", b"\x93NUMPY\x09\x00\x10\x00"),
    "ints": ("it holds 'int32' of shape", _raw_npy(_FLOATS | {"descr": "<i4"}, bytes(800))),
    "big endian": ("it holds '>f4'", _raw_npy(_FLOATS | {"descr": ">f4"}, bytes(800))),
    "objects": ("it holds 'object'", _raw_npy(_FLOATS | {"descr": "|O"}, bytes(800))),
    "by columns": ("in the order of Fortran", _raw_npy(_FLOATS | {"fortran_order": True}, bytes(800))),
    "a vector": (r"of shape \[200\]", _raw_npy(_FLOATS | {"shape": (200,)}, bytes(800))),
    "cut short": (r"799 bytes follow .*, and \[50, 4\] of float32 has 800", _raw_npy(_FLOATS, bytes(799))),
    "too long": ("801 bytes follow", _raw_npy(_FLOATS, bytes(801))),
    "another width": (
        "holds torch.float32 of width 5, not torch.float32 of width 4",
        _raw_npy(_FLOATS | {"shape": (ROWS, 5)}, bytes(1000)),
    ),
    "another type": (
        "holds torch.float64 of width 4", _raw_npy(_FLOATS | {"descr": "<f8"}, bytes(1600)),
    ),
    "fewer rows": ("there are 49 rows, not 50", _raw_npy(_FLOATS | {"shape": (49, WIDTH)}, bytes(784))),
    "more rows": ("there are 51 rows, not 50", _raw_npy(_FLOATS | {"shape": (51, WIDTH)}, bytes(816))),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(fault: str, tmp_path: Path) -> None:
    message, content = BAD[fault]
    (tmp_path / "any.npy").write_bytes(content)
    table = _table()
    before = _all(table)
    with pytest.raises(UsageError, match=message):
        table.load(tmp_path / "any.npy")
    assert torch.equal(_all(table), before)


def test_safetensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    table, file = _table(), tmp_path / "any.safetensors"
    for tensors, message in (
        (
            {"a": torch.ones(ROWS, WIDTH), "b": torch.ones(1)},
            "accepted: one tensor, or one named 'rows', 'weight'",
        ),
        ({"a": torch.ones(ROWS)}, r"of shape \[50\], no matrix"),
        ({"a": torch.ones(ROWS, WIDTH).half()}, "holds torch.float16 of width 4"),
        ({}, "holds ; accepted: one tensor"),
    ):
        save_file(tensors, file)
        with pytest.raises(UsageError, match=message):
            table.load(file)
    with pytest.raises(UsageError, match=r"rows are read from .npy and .safetensors"):
        table.load(tmp_path / "any.pt")
    with pytest.raises(UsageError, match="cannot read the rows"):
        table.load(tmp_path / "none.npy")


def test_shards_that_are_not_all_there_are_refused(tmp_path: Path) -> None:
    table = _table()
    before = _all(table)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no shards of 'rows'"):
        table.load(tmp_path / "empty")
    other = _table(seed=3)
    other.export(tmp_path / "some", shard_bytes=20 * 16)
    (tmp_path / "some" / "rows-00002-of-00003.npy").unlink()
    with pytest.raises(UsageError, match="not all shards of one export of 'rows'"):
        table.load(tmp_path / "some")
    other(torch.tensor([1])).sum().backward()
    LazyAdam(other.parameters()).step()
    other.export(tmp_path / "rows_only")
    with pytest.raises(UsageError, match="holds no shards of 'exp_avg'"):
        other.load(tmp_path / "rows_only", state=True)
    assert torch.equal(_all(table), before)


def test_an_export_that_cannot_be_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = _table()
    with pytest.raises(ConfigError, match="format='csv': it has to be 'npy' or 'safetensors'"):
        table.export(tmp_path / "table", format="csv")
    with pytest.raises(ConfigError, match="shard_bytes=0"):
        table.export(tmp_path / "table", shard_bytes=0)
    with pytest.raises(UsageError, match=r"NumPy has no torch\.bfloat16: use format='safetensors'"):
        _table(dtype=torch.bfloat16).export(tmp_path / "table")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(UsageError, match="is there already"):
        table.export(tmp_path / "full")
    synced: list[int] = []

    def fail(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(BackendError, match="No space left on device"):
        table.export(tmp_path / "table", shard_bytes=320)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["full"]


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_blocks, "_AT_A_TIME", 320)
    np.save(tmp_path / "any.npy", np.ones((ROWS, WIDTH), dtype=np.float32))
    with row_files.open_rows(tmp_path / "any.npy", ()) as rows:
        assert rows.read(0, 3).tolist() == [[1.0] * WIDTH] * 3
        with (tmp_path / "any.npy").open("r+b") as file:
            file.truncate(200)
        with pytest.raises(
            BackendError, match=r"was cut short while it was read: of the 64 bytes of rows 46 to 49"
        ):
            rows.read(46, ROWS)
