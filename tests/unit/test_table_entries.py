"""Entries of a table's state dict: read as dense tensors, and written by nobody, whatever is tried."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tierstore.errors import UsageError
from tierstore.nn import EmbeddingTable, Normal
from tierstore.nn.copied_rows import RowsView
from tierstore.optim import SparseAdam

ROWS, WIDTH = 30, 4
Write = Callable[[Any], Any]


def _table() -> EmbeddingTable:
    table = EmbeddingTable(ROWS, WIDTH, init=Normal(0.1), seed=3)
    table.set_rows(torch.tensor([3]), torch.ones(1, WIDTH))
    return table


def _all(table: EmbeddingTable) -> Tensor:
    return table.rows(torch.arange(table.num_embeddings))


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, rows: Tensor) -> Tensor:
        del ctx
        return rows * 1


def _scripted(rows: Tensor) -> Tensor:
    return rows * 1


VIEWS: Mapping[str, Write] = {
    "the entry": lambda entry: entry,
    "[0]": lambda entry: entry[0],
    "[1:3]": lambda entry: entry[1:3],
    "[:, 1]": lambda entry: entry[:, 1],
    "[..., None]": lambda entry: entry[..., None],
    "view": lambda entry: entry.view(-1),
    "reshape": lambda entry: entry.reshape(-1),
    "flatten": lambda entry: entry.flatten(),
    "T": lambda entry: entry.T if entry.ndim == 2 else VIEWS["mT"](entry),
    "mT": lambda entry: entry.mT if entry.ndim else entry,
    "t()": lambda entry: entry.t(),
    "transpose": lambda entry: entry.transpose(0, 1),
    "permute": lambda entry: torch.permute(entry, (1, 0)),
    "select": lambda entry: entry.select(0, 1),
    "narrow": lambda entry: entry.narrow(0, 1, 2),
    "unbind": lambda entry: entry.unbind()[1],
    "split": lambda entry: torch.split(entry, 7)[1],
    "chunk": lambda entry: entry.chunk(3)[2],
    "tensor_split": lambda entry: torch.tensor_split(entry, 3)[0],
    "iter": lambda entry: next(iter(entry)),
    "diagonal": lambda entry: entry.diagonal(),
    "as_strided": lambda entry: entry.as_strided((2, 2), (4, 1)),
    "expand": lambda entry: entry.expand(ROWS, WIDTH),
    "unsqueeze": lambda entry: entry.unsqueeze(0),
    "squeeze": lambda entry: entry.squeeze(),
    "unfold": lambda entry: entry.unfold(0, 2, 2),
    "view_as": lambda entry: entry.view_as(entry),
    "view(int32)": lambda entry: entry.view(torch.int32),
    "data": lambda entry: entry.data[0],
    "detach": lambda entry: entry.detach()[0],
    "cpu": lambda entry: entry.cpu(),
    "contiguous": lambda entry: entry.contiguous(),
    "float": lambda entry: entry.float(),
    "to": lambda entry: entry.to("cpu"),
    "aten": lambda entry: torch.ops.aten.select.int(entry, 0, 1),
}
ONLY_FLOAT = {"view(int32)": {"uniform_", "addcmul_", "foreach lerp", "foreach add, beside another"}}
WRITES: Mapping[str, Write] = {
    "zero_": lambda rows: rows.zero_(),
    "mul_": lambda rows: rows.mul_(2),
    "copy_": lambda rows: rows.copy_(torch.zeros(rows.shape)),
    "+=": lambda rows: rows.__iadd__(1),
    "[...] = 1": lambda rows: rows.__setitem__(..., 1),
    "uniform_": nn.init.uniform_,
    "zeros_": nn.init.zeros_,
    "out": lambda rows: torch.add(torch.ones(rows.shape), 1, out=rows),
    "addcmul_": lambda rows: rows.addcmul_(torch.ones(rows.shape), torch.ones(rows.shape)),
    "relu": lambda rows: nn.functional.relu(rows, inplace=True),
    "foreach": lambda rows: torch._foreach_mul_([rows], 0),
    "foreach lerp": lambda rows: torch._foreach_lerp_([rows], [torch.ones(rows.shape)], 0.5),
    "foreach add, beside another": lambda rows: torch._foreach_add_([torch.ones(1), rows], 1.0),
    "foreach copy": lambda rows: torch._foreach_copy_([rows], [torch.zeros(rows.shape)]),
    "packet": torch.ops.aten.zero_,
    "overload": torch.ops.aten.zero_.default,
    "overload out": lambda rows: torch.ops.aten.mul.out(rows, torch.zeros(()), out=rows),
    "numpy": lambda rows: rows.numpy().fill(0),
    "asarray": lambda rows: np.asarray(rows).fill(0),
    "data = ": lambda rows: setattr(rows, "data", torch.ones(1)),
    "resize_": lambda rows: rows.resize_(1),
}


@pytest.mark.parametrize("of_state", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_no_write_to_an_entry_or_a_view_of_one_is_lost(view: str, of_state: bool) -> None:
    table = _table()
    optimizer = SparseAdam(table.parameters())
    table(torch.arange(ROWS)).square().sum().backward()
    optimizer.step()
    state: Mapping[str, Any] = optimizer.state_dict()["state"][0] if of_state else table.state_dict()
    entry = state["exp_avg" if of_state else "weight"]
    before = entry.clone()
    for name, write in WRITES.items():
        if name not in ONLY_FLOAT.get(view, ()):
            with (
                torch.no_grad(),
                pytest.raises((UsageError, ValueError), match=r"written|read-only") as caught,
            ):
                write(VIEWS[view](entry))
            assert caught.type is UsageError or name.startswith(("numpy", "asarray")), name
    assert torch.equal(entry, before)


def test_nothing_else_of_a_list_is_written_where_an_entry_is_in_it() -> None:
    other, entry = torch.ones(2), _table().state_dict()["weight"]
    for rows in (entry, entry[0]):
        with pytest.raises(UsageError, match=r"_foreach_mul_.* cannot be written to"):
            torch._foreach_mul_([other, rows], 2)
        with pytest.raises(UsageError, match="cannot be written to"):
            torch.ops.aten._foreach_mul_.Scalar([other, rows], 2)
    assert other.tolist() == [1, 1]


def test_what_writes_its_argument_inside_of_another_function_is_refused() -> None:
    entry = _table().state_dict()["weight"]
    with pytest.raises(UsageError, match=r"cannot be written to. Write rows with table.set_rows"):
        nn.functional.embedding(torch.tensor([3]), entry, max_norm=0.1)


def _saved(rows: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(rows, file)
    loaded: Tensor = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert type(loaded) is Tensor
    return loaded


READS: Mapping[str, Write] = {
    "tensor": torch.tensor,
    "as_tensor": lambda rows: torch.as_tensor(rows).clone(),
    "new_tensor": lambda rows: torch.ones(1).new_tensor(rows),
    "numpy": lambda rows: torch.tensor(rows.numpy()),
    "tolist": lambda rows: torch.tensor(rows.tolist()),
    "stack": lambda rows: torch.stack(list(rows)),
    "as_subclass": lambda rows: rows.as_subclass(Tensor),
    "vmap": torch.func.vmap(lambda row: row * 1),
    "script": lambda rows: torch.jit.script(_scripted)(rows),  # noqa: PLW0108 - says that it is deprecated
    "function": _Pair.apply,
    "sparse": lambda rows: torch.sparse_coo_tensor(
        torch.arange(ROWS)[None], rows, (ROWS, WIDTH), check_invariants=False
    ).to_dense(),
    "foreach": lambda rows: torch._foreach_mul([rows], 1)[0],
    "overload": torch.ops.aten.clone.default,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "frozen": lambda rows: nn.Embedding.from_pretrained(rows)(torch.arange(ROWS)),
    "buffer": lambda rows: torch.func.functional_call(
        nn.Embedding(ROWS, WIDTH), {"weight": rows}, torch.arange(ROWS)
    ),
    "saved": _saved,
}


@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("read", READS)
def test_whatever_reads_an_entry_finds_the_rows(read: str) -> None:
    table = _table()
    entry = table.state_dict()["weight"]
    for rows in (entry, entry[:], entry.T.T):
        assert torch.equal(READS[read](rows), _all(table))


@given(st.lists(st.sampled_from(sorted(VIEWS)), min_size=1, max_size=4), st.sampled_from(sorted(WRITES)))
def test_no_write_to_a_view_of_views_is_lost(path: list[str], write: str) -> None:
    table = _table()
    entry, plain = table.state_dict()["weight"], _all(table)
    rows: Any = entry
    shown: Tensor = plain
    for view in path:
        try:
            shown = VIEWS[view](shown)
        except (RuntimeError, IndexError, ValueError, TypeError, StopIteration):
            return  # there is no such view of it in PyTorch
        rows = VIEWS[view](rows)
    assert torch.equal(rows, shown)
    if shown.numel() and shown.untyped_storage().data_ptr() == plain.untyped_storage().data_ptr():
        try:
            WRITES[write](shown)
        except (RuntimeError, TypeError, ValueError):
            return
        with pytest.raises((UsageError, ValueError), match=r"written|read-only"):
            WRITES[write](rows)
    assert torch.equal(_all(table), _table().state_dict()["weight"])


def test_what_is_made_of_an_entry_is_an_ordinary_tensor() -> None:
    entry = _table().state_dict()["weight"]
    for made in (entry * 2, entry.clone(), entry[0].clone(), entry[[1, 2]], entry.double(), entry.sum(0)):
        assert type(made) is Tensor
        made.zero_()
    assert isinstance(entry[0], RowsView)
    assert repr(entry[3]) == "tensor([1., 1., 1., 1.])"


TRAINED: Mapping[str, Write] = {
    "Parameter": nn.Parameter,
    "requires_grad_": lambda rows: rows.detach().requires_grad_(),
    "requires_grad_(by name)": lambda rows: rows.requires_grad_(requires_grad=True),
    "requires_grad =": lambda rows: setattr(rows, "requires_grad", True),
    "from_pretrained": lambda rows: nn.Embedding.from_pretrained(rows, freeze=False),
}


@pytest.mark.parametrize("way", TRAINED)
def test_an_entry_does_not_become_a_parameter_that_nobody_trains(way: str) -> None:
    entry = _table().state_dict()["weight"]
    for rows in (entry, entry[2:5], copy.deepcopy(entry)):
        with pytest.raises(UsageError, match=r"no parameter, .* nn.Parameter\(entry.clone\(\)\)"):
            TRAINED[way](rows)
        assert not rows.requires_grad
        assert nn.Parameter(rows, requires_grad=False).shape == rows.shape
        assert nn.Parameter(rows.clone()).requires_grad


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_plain_module_is_given_copies_and_no_entries(device: str) -> None:
    table = _table()
    with torch.device(device):
        plain = nn.Embedding(ROWS, WIDTH)
    with pytest.raises(RuntimeError, match="load without assign=True"):
        plain.load_state_dict(table.state_dict(), assign=True)
    assert type(plain.weight) is nn.Parameter
    plain.load_state_dict({"weight": table.state_dict()["weight"].clone()}, assign=True)
    assert torch.equal(plain.weight, _all(table))


def test_another_tensor_does_not_share_what_is_a_copy() -> None:
    entry, other = _table().state_dict()["weight"], torch.ones(ROWS, WIDTH)
    for rows in (entry, entry[:]):
        with pytest.raises(UsageError, match=r"set_.*: an entry of a state dict"):
            other.set_(rows)
        with pytest.raises(UsageError, match=r"__dlpack__: an entry .* cannot be written to by others"):
            np.from_dlpack(rows)
    assert torch.equal(other, torch.ones(ROWS, WIDTH))
