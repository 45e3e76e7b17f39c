"""Memory of entries of a table's state dict: read as that of a plain tensor, and shared with nobody."""

from __future__ import annotations

import copy
import ctypes
import functools
import io
import multiprocessing.reduction
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import dlpack

from tierstore.errors import UsageError
from tierstore.nn import EmbeddingTable, Normal

ROWS, WIDTH = 7, 3
Act = Callable[[Any], Any]
KINDS: Mapping[str, Act] = {
    "entry": lambda entry: entry,
    "view": lambda entry: entry[:],
    "view of a view": lambda entry: entry.T.T,
}


def _table() -> EmbeddingTable:
    table = EmbeddingTable(ROWS, WIDTH, init=Normal(0.1), seed=3)
    table.set_rows(torch.tensor([3]), torch.ones(1, WIDTH))
    return table


def _at(address: int) -> Tensor:
    return torch.tensor(list((ctypes.c_float * (ROWS * WIDTH)).from_address(address)))


def _as_floats(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.uint8).view(torch.float32)


def _loaded(value: object) -> Any:  # noqa: ANN401 - whatever was saved
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


READS: Mapping[str, Act] = {
    "data_ptr": lambda rows: _at(rows.data_ptr()),
    "const_data_ptr": lambda rows: _at(rows.const_data_ptr()),
    "untyped_storage, data_ptr": lambda rows: _at(rows.untyped_storage().data_ptr()),
    "untyped_storage, tolist": lambda rows: _as_floats(rows.untyped_storage().tolist()),
    "untyped_storage, iter": lambda rows: _as_floats(list(rows.untyped_storage())),
    "untyped_storage, clone": lambda rows: torch.empty(0).set_(rows.untyped_storage().clone()),
    "untyped_storage, cpu": lambda rows: torch.empty(0).set_(copy.copy(rows.untyped_storage())),
    "untyped_storage, deepcopy": lambda rows: torch.empty(0).set_(copy.deepcopy(rows.untyped_storage())),
    "untyped_storage, pickle": lambda rows: torch.empty(0).set_(
        pickle.loads(pickle.dumps(rows.untyped_storage()))
    ),
    "untyped_storage, saved": lambda rows: torch.empty(0).set_(_loaded(rows.untyped_storage())),
    "numpy": lambda rows: torch.tensor(rows.numpy()),
    "numpy, force": lambda rows: torch.tensor(rows.numpy(force=True)),
    "asarray": lambda rows: torch.tensor(np.asarray(rows)),
    "array": lambda rows: torch.tensor(np.array(rows)),
    "ufunc": lambda rows: torch.as_tensor(np.add(rows, 0)),
    "pickle": lambda rows: pickle.loads(pickle.dumps(rows)),
    "saved": _loaded,
    "saved twice": lambda rows: _loaded([rows, rows])[1],
    "of other processes": lambda rows: pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(rows)),
}


@pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", READS)
def test_what_reads_memory_finds_the_rows_as_they_are(read: str, kind: str) -> None:
    table = _table()
    entry = table.state_dict()["weight"]
    for number in (1.0, 2.0):  # an entry that was read before is as one that was not
        table.set_rows(torch.tensor([3]), torch.full((1, WIDTH), number))
        rows, expected = KINDS[kind](entry), table.rows(torch.arange(ROWS))
        assert torch.equal(READS[read](rows).reshape(ROWS, WIDTH), expected)


def _asked_of_memory(name: str, rows: Any) -> None:  # noqa: ANN401 - whatever stands for a tensor
    getattr(rows.untyped_storage(), name)()


REFUSED: Mapping[str, tuple[type[Exception], str, Act]] = {
    "other.data =": (
        RuntimeError,
        "set_data.*incompatible tensor type",
        lambda rows: setattr(torch.zeros(ROWS, WIDTH), "data", rows),
    ),
    "parameter.data =": (
        RuntimeError,
        "set_data.*incompatible tensor type",
        lambda rows: setattr(nn.Linear(WIDTH, ROWS).weight, "data", rows),
    ),
    "to_dlpack": (RuntimeError, "Cannot access data pointer of Tensor", torch._C._to_dlpack),
    "from_dlpack": (UsageError, "__dlpack__: an entry", dlpack.from_dlpack),
    "np.from_dlpack": (UsageError, "__dlpack__: an entry", np.from_dlpack),
    "storage": (UsageError, r"storage: an entry .* entry.clone\(\)", lambda rows: rows.storage()),
    "_typed_storage": (TypeError, "RowsMemory", lambda rows: rows._typed_storage()),
    "share_memory_": (UsageError, "share_memory_: an entry", lambda rows: rows.share_memory_()),
    "set_(rows)": (UsageError, "set_.*: an entry", lambda rows: torch.zeros(1).set_(rows)),
    "set_(storage)": (
        TypeError,
        r"(?s)set_\(\).*RowsMemory",
        lambda rows: torch.zeros(1).set_(rows.untyped_storage()),
    ),
    "FloatTensor(storage)": (TypeError, "RowsMemory", lambda rows: torch.FloatTensor(rows.untyped_storage())),
    "TypedStorage(storage)": (
        TypeError,
        "RowsMemory",
        lambda rows: torch.TypedStorage(wrap_storage=rows.untyped_storage(), dtype=torch.float32),
    ),
    "tensor(storage)": (RuntimeError, "RowsMemory", lambda rows: torch.tensor(rows.untyped_storage())),
    "storage[0]": (TypeError, "RowsMemory", lambda rows: rows.untyped_storage()[0]),
    "storage[0] =": (
        UsageError,
        r"__setitem__: the memory of an entry .* entry.clone\(\)",
        lambda rows: rows.untyped_storage().__setitem__(0, 1),
    ),
    **{
        name: (
            UsageError,
            f"{name}: the memory of an entry",
            functools.partial(_asked_of_memory, name),
        )
        for name in ("fill_", "copy_", "resize_", "byteswap", "share_memory_", "_share_fd_cpu_", "_weak_ref")
    },
    "numpy() =": (ValueError, "read-only", lambda rows: rows.numpy().fill(0)),
    "numpy().flags": (
        ValueError,
        "WRITEABLE",
        lambda rows: setattr(rows.numpy().flags, "writeable", True),
    ),
    "ufunc, out": (
        ValueError,
        "read-only",
        lambda rows: np.add(np.ones((ROWS, WIDTH), np.float32), 0, out=rows.numpy()),
    ),
    "__setstate__": (
        TypeError,
        "RowsMemory",
        lambda rows: rows.__setstate__((rows.untyped_storage(), 0, (ROWS, WIDTH), (WIDTH, 1))),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", REFUSED)
def test_what_would_share_or_write_memory_is_refused(way: str, kind: str) -> None:
    table = _table()
    entry, before = table.state_dict()["weight"], table.rows(torch.arange(ROWS))
    rows = KINDS[kind](entry)
    error, said, act = REFUSED[way]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are deprecated
        with pytest.raises(error, match=said):
            act(rows)
    for each in (entry, rows):
        assert torch.equal(each, before)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_read_is_asked_as_a_storage_is(kind: str) -> None:
    table = _table()
    rows, plain = KINDS[kind](table.state_dict()["weight"]), table.rows(torch.arange(ROWS))
    memory, wanted = rows.untyped_storage(), plain.untyped_storage()
    for name in ("nbytes", "size", "element_size", "is_pinned", "is_shared", "get_device"):
        assert getattr(memory, name)() == getattr(wanted, name)()
    assert (memory.device, memory.is_cuda, len(memory)) == (wanted.device, wanted.is_cuda, len(wanted))
    assert memory == rows.untyped_storage()
    assert hash(memory) == hash(rows.untyped_storage())
    assert memory != _table().state_dict()["weight"].untyped_storage()
    assert memory.data_ptr() == rows.data_ptr()
    assert repr(memory).startswith("RowsMemory(84 bytes of an entry of a state dict of the table")
    assert not hasattr(memory, "nothing_of_that_name")


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_is_said_to_be_where_rows_are_read(kind: str) -> None:
    rows, plain = KINDS[kind](_table().state_dict()["weight"]), torch.zeros(ROWS, WIDTH)
    for name in ("device", "is_cpu", "is_meta", "is_cuda", "layout", "dtype", "shape", "is_leaf"):
        assert getattr(rows, name) == getattr(plain, name)
    assert rows.get_device() == plain.get_device()
    assert torch.result_type(rows, 1.0) is torch.float32
    assert torch.zeros_like(rows).device.type == "cpu"
    assert torch.equal(torch.zeros(ROWS, WIDTH).copy_(rows), rows.clone())
