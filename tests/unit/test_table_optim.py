"""Optimizers of tables: whose a table is, what is kept, saved, loaded, and refused."""

from __future__ import annotations

import copy
import gc
import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tierstore.errors import ConfigError, UsageError
from tierstore.nn import EmbeddingTable
from tierstore.nn.table_entry import TableEntry
from tierstore.optim import FTRL, SGD, Adagrad, LazyAdam, SparseAdam
from tierstore.tables import RowStore, Visit

ROWS, WIDTH = 20, 4
Make = Callable[..., Any]
KINDS: list[Make] = [SparseAdam, Adagrad, SGD, LazyAdam, FTRL]
WITH_STATE: list[Make] = [SparseAdam, Adagrad, LazyAdam, FTRL]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_kind_with_state = pytest.mark.parametrize("kind", WITH_STATE)
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks:UserWarning"
)  # PyTorch's own optimizers


def _table(rows: int = ROWS, **options: Any) -> EmbeddingTable:  # noqa: ANN401
    return EmbeddingTable(rows, WIDTH, **{"seed": 0, **options})


def _plain() -> Any:  # noqa: ANN401
    return nn.Embedding.from_pretrained(_all(_table()), freeze=False, sparse=True)


def _all(table: EmbeddingTable) -> Tensor:
    return table.rows(torch.arange(table.num_embeddings))


def _step(module: nn.Module, optimizer: Any, *ids: int) -> None:  # noqa: ANN401
    optimizer.zero_grad()
    module(torch.tensor(ids, dtype=torch.int64)).square().sum().backward()
    optimizer.step()


# ---------------------------------------------------------------------- whose a table is


@every_kind
def test_a_table_has_one_optimizer_at_a_time(kind: Make) -> None:
    table = _table()
    first = kind(table.parameters(), lr=0.1)
    _step(table, first, 1)
    with pytest.raises(UsageError, match=r"cannot step the table .*: another optimizer does"):
        SparseAdam(table.parameters())
    other = kind([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(UsageError, match="another optimizer does"):
        other.add_param_group({"params": [table.weight]})
    assert len(other.param_groups) == 1
    _step(table, first, 1)


@every_kind_with_state
def test_another_optimizer_begins_anew_when_the_first_is_gone(kind: Make) -> None:
    table, plain = _table(), _plain()
    for lr in (0.1, 0.3):
        for module in (table, plain):
            optimizer = kind(module.parameters(), lr=lr)
            for _ in range(2):
                _step(module, optimizer, 1, 2, 1)
            del optimizer
    assert torch.equal(_all(table), plain.weight)
    _step(table, SGD(table.parameters(), lr=0.1), 3)


def test_an_optimizer_in_a_circle_is_gone_when_nobody_has_it() -> None:
    table = _table()
    gc.disable()
    try:
        optimizer: Any = SGD(table.parameters(), lr=0.1)
        optimizer.itself = optimizer
        del optimizer
        SGD(table.parameters(), lr=0.1)
    finally:
        gc.enable()


@every_kind
def test_a_table_in_two_groups_is_refused_as_any_parameter(kind: Make) -> None:
    table = _table()
    with pytest.raises(ValueError, match="more than one parameter group"):
        kind([{"params": [table.weight]}, {"params": [table.weight]}], lr=0.1)


# ---------------------------------------------------------------------- state


@every_kind_with_state
def test_state_lies_beside_the_rows_and_is_dense_for_whoever_reads_it(kind: Make) -> None:
    table = _table(2**40)
    optimizer = kind(table.parameters(), lr=0.1)
    _step(table, optimizer, 3, 2**39, 3)
    state = optimizer.state[table.weight]
    assert {column.name for column in table.weight.row_store.columns[1:]} == set(state) - {"step"}
    entries = [value for name, value in state.items() if name != "step"]
    assert all(isinstance(entry, TableEntry) and entry.shape == (2**40, WIDTH) for entry in entries)
    assert table.stats().row_store.pages < 20


@every_kind_with_state
def test_state_of_a_table_and_of_an_embedding_are_exchanged(kind: Make) -> None:
    """Each loads what the other has saved, and both go on with the same bits."""
    theirs: Make = getattr(torch.optim, kind.__name__, kind)
    table, plain = _table(), _plain()
    ours, other = kind(table.parameters(), lr=0.1), theirs(plain.parameters(), lr=0.1)
    for ids in ((1, 2, 1), (2, 3)):
        _step(table, ours, *ids)
        _step(plain, other, *ids)
    file = io.BytesIO()
    torch.save({"table": ours.state_dict(), "plain": other.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    new_table, new_plain = _table(), _plain()
    new_table.load_state_dict(plain.state_dict())
    new_plain.load_state_dict(table.state_dict())
    ours, other = kind(new_table.parameters(), lr=0.5), theirs(new_plain.parameters(), lr=0.5)
    ours.load_state_dict(saved["plain"])
    other.load_state_dict(saved["table"])
    assert ours.param_groups[0]["lr"] == 0.1
    entry = next(value for name, value in ours.state[new_table.weight].items() if name != "step")
    assert isinstance(entry, TableEntry), "what was loaded lies beside the rows"
    for ids in ((1, 5, 5), (2, 3)):
        _step(new_table, ours, *ids)
        _step(new_plain, other, *ids)
    assert torch.equal(_all(new_table), new_plain.weight)
    for name, value in other.state[new_plain.weight].items():
        found = ours.state[new_table.weight][name]
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(value))


@every_kind_with_state
@pytest.mark.parametrize("of_pytorch", [False, True])
def test_state_of_a_table_goes_to_an_embedding_in_one_process(kind: Make, of_pytorch: bool) -> None:
    theirs: Make = getattr(torch.optim, kind.__name__, kind) if of_pytorch else kind
    table, plain = _table(), _plain()
    ours, other = kind(table.parameters(), lr=0.1), theirs(plain.parameters(), lr=0.5)
    _step(table, ours, 1, 2, 1)
    plain.load_state_dict(table.state_dict())
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    for module, optimizer in ((table, ours), (plain, other)):
        _step(module, optimizer, 2, 3)
    assert torch.equal(_all(table), plain.weight)


@every_kind_with_state
def test_state_goes_from_table_to_table_without_being_dense(
    kind: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, other = _table(), _table()
    ours = kind(table.parameters(), lr=0.1)
    _step(table, ours, 1, 2, 1)
    other.load_state_dict(table.state_dict())
    loaded = kind(other.parameters(), lr=0.5)
    monkeypatch.setattr(TableEntry, "dense", lambda entry: pytest.fail("made dense"))
    loaded.load_state_dict(ours.state_dict())
    monkeypatch.undo()
    for module, optimizer in ((table, ours), (other, loaded)):
        _step(module, optimizer, 2, 3)
    assert torch.equal(_all(table), _all(other))


@every_kind_with_state
def test_state_is_loaded_over_what_another_optimizer_has_left(kind: Make) -> None:
    table, source = _table(), _table()
    first = kind(source.parameters(), lr=0.1)
    _step(source, first, 1, 2)
    old = FTRL(table.parameters(), initial_accumulator_value=3.0)
    _step(table, old, 5, 6)
    del old
    table.load_state_dict(source.state_dict())
    second = kind(table.parameters(), lr=0.1)
    second.load_state_dict(first.state_dict())
    for module, optimizer in ((source, first), (table, second)):
        _step(module, optimizer, 1, 5)
    assert torch.equal(_all(table), _all(source))


def _saved(pair: tuple[EmbeddingTable, Any]) -> Any:  # noqa: ANN401
    file = io.BytesIO()
    torch.save(pair, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@every_kind
@pytest.mark.parametrize("copied", [copy.deepcopy, _saved])
def test_a_model_and_its_optimizer_are_copied_together(kind: Make, copied: Callable[..., Any]) -> None:
    table = _table()
    optimizer = kind(table.parameters(), lr=0.1)
    _step(table, optimizer, 1, 2)
    other, stepper = copied((table, optimizer))
    before = _all(table)
    _step(other, stepper, 2, 3)
    assert torch.equal(_all(table), before)
    _step(table, optimizer, 2, 3)
    assert torch.equal(_all(table), _all(other))


@every_kind_with_state
def test_a_table_grows_with_its_state(kind: Make) -> None:
    table, large = _table(), _table(3 * ROWS)
    small, whole = kind(table.parameters(), lr=0.1), kind(large.parameters(), lr=0.1)
    for module, optimizer in ((table, small), (large, whole)):
        _step(module, optimizer, 1, ROWS - 1)
        optimizer.zero_grad()
    table.grow(3 * ROWS)
    for module, optimizer in ((table, small), (large, whole)):
        _step(module, optimizer, 1, ROWS, 3 * ROWS - 1)
    assert torch.equal(_all(table), _all(large))


class Failing(RowStore):
    """A store that brings one row at a time, and not the n-th."""

    fails_at = -1

    def visit(self, ids: Tensor) -> Iterator[Visit]:
        for number in range(len(ids)):
            self.fails_at -= 1
            if self.fails_at == 0:
                raise OSError("no disk")
            for visit in super().visit(ids[number : number + 1]):
                visit.part = slice(number, number + 1)
                yield visit


@every_kind
@pytest.mark.parametrize("failures", [1, 2])
def test_a_step_that_fails_anywhere_has_changed_nothing_and_can_be_taken_again(
    kind: Make, failures: int
) -> None:
    """Of three rows, which are read and then written one by one; also where putting them back fails."""
    other = _table()
    theirs = kind(other.parameters(), lr=0.1)
    rows = _all(other)
    _step(other, theirs, 1, 5)
    before = _all(other)
    _step(other, theirs, 1, 2, 3)
    failed_at = []
    for n in itertools.count(1):
        table = _table()
        store = table.weight.row_store = Failing(ROWS, WIDTH, torch.float32, lambda ids: rows[ids])
        ours = kind(table.parameters(), lr=0.1)
        _step(table, ours, 1, 5)
        ours.zero_grad()
        table(torch.tensor([1, 2, 3])).square().sum().backward()
        store.fails_at = n
        try:
            ours.step()
        except OSError:
            failed_at.append(n)
            for _ in range(failures - 1):
                if n > 4:  # something was written, and has to be put back
                    store.fails_at = 1
                    with pytest.raises(OSError, match="no disk"):
                        table(torch.tensor([1]))
            store.fails_at = -1
            assert torch.equal(_all(table), before)
            ours.step()
        else:
            break
        assert torch.equal(_all(table), _all(other))
    assert failed_at == [1, 2, 3, 4, 5, 6]


# ---------------------------------------------------------------------- as PyTorch's


@every_kind
def test_hooks_of_a_step_are_called_once(kind: Make) -> None:
    for theirs in (torch.optim.SGD, torch.optim.Adagrad):  # PyTorch puts hooks around their steps now
        theirs([nn.Parameter(torch.ones(1))], lr=0.1)
    table, seen = _table(), list[str]()
    optimizer = kind([*table.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    _step(table, optimizer, 1)
    assert seen == ["before", "after"]
    assert len(optimizer.param_groups[0]["params"]) == 2


@every_kind
def test_a_closure_is_evaluated_once_and_its_loss_returned(kind: Make) -> None:
    table, calls = _table(), list[int]()
    optimizer = kind(table.parameters(), lr=0.1)

    def closure() -> float:
        calls.append(1)
        optimizer.zero_grad()
        loss = table(torch.tensor([1])).sum()
        loss.backward()
        return float(loss.item())

    assert optimizer.step(closure) == pytest.approx(_table().rows(torch.tensor([1])).sum().item())
    assert calls == [1]


@every_kind
def test_a_rate_may_be_a_tensor_and_be_scheduled(kind: Make) -> None:
    table, other = _table(), _table()
    ours, theirs = kind(table.parameters(), lr=torch.tensor(0.5).double()), kind(other.parameters(), lr=0.5)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (ours, theirs)]
    for _ in range(3):
        _step(table, ours, 1, 2)
        _step(other, theirs, 1, 2)
        for each in schedules:
            each.step()
    assert torch.equal(_all(table), _all(other))


@pytest.mark.parametrize(
    "rate", [torch.tensor(0.03), torch.tensor([0.03]), torch.tensor(0.03).double(), 0.03]
)
@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (SparseAdam, torch.optim.SparseAdam, {}),
        (Adagrad, torch.optim.Adagrad, {"lr_decay": 0.3}),
        (SGD, torch.optim.SGD, {}),
    ],
)
def test_a_rate_that_is_a_tensor_counts_as_pytorch_counts_it(
    ours: Make, theirs: Make, options: dict[str, Any], rate: float | Tensor
) -> None:
    table, plain = _table(seed=1), nn.Embedding(ROWS, WIDTH, sparse=True)
    plain.load_state_dict(table.state_dict())
    for module, kind in ((table, ours), (plain, theirs)):
        optimizer = kind(module.parameters(), lr=copy.deepcopy(rate), **options)
        for _ in range(4):
            _step(module, optimizer, *range(ROWS), 3, 3)
    assert torch.equal(_all(table), plain.weight)


def test_a_group_does_not_say_what_adagrad_begins_with_as_in_pytorch() -> None:
    table, plain = _table(seed=1), nn.Embedding(ROWS, WIDTH, sparse=True)
    plain.load_state_dict(table.state_dict())
    for module, kind in ((table, Adagrad), (plain, torch.optim.Adagrad)):
        groups = [{"params": list(module.parameters()), "initial_accumulator_value": 0.5}]
        optimizer = kind(groups, initial_accumulator_value=0.25)
        _step(module, optimizer, 1, 2, 2)
    assert torch.equal(_all(table), plain.weight)


@every_kind
def test_a_grad_scaler_scales_and_skips(kind: Make) -> None:
    table, plain = _table(), _plain()
    theirs: Make = getattr(torch.optim, kind.__name__, kind)
    ours, other = kind(table.parameters(), lr=0.1), theirs(plain.parameters(), lr=0.1)
    for module, optimizer in ((table, ours), (plain, other)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            scaler.scale(module(torch.tensor([1, 2, 1])).square().sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
    assert torch.equal(_all(table), plain.weight)


def test_clipping_the_norm_of_sparse_gradients_is_refused_by_pytorch_as_for_an_embedding() -> None:
    for module in (_table(), _plain()):
        module(torch.tensor([1, 2, 1])).square().sum().backward()
        with pytest.raises(NotImplementedError, match="SparseCPU"):
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)


@every_kind
@pytest.mark.parametrize("ids", [[], [2], [2] * 1000])
def test_a_batch_of_no_rows_and_of_one_row_often(kind: Make, ids: list[int]) -> None:
    table, plain = _table(), _plain()
    for module in (table, plain):
        _step(module, kind(module.parameters(), lr=0.1), *ids)
    assert torch.equal(_all(table), plain.weight)
    assert (plain.weight != _all(_table())).any(dim=1).nonzero().flatten().tolist() == sorted(set(ids))


@pytest.mark.parametrize("kind", [LazyAdam, FTRL])
def test_the_scale_of_a_loss_is_taken_from_its_gradients(kind: Make) -> None:
    table, other = _table(), _table()
    ours, theirs = kind(table.parameters(), lr=0.1, loss_scale=8.0), kind(other.parameters(), lr=0.1)
    for _ in range(3):
        for module, optimizer, scale in ((table, ours, 8.0), (other, theirs, 1.0)):
            optimizer.zero_grad()
            (module(torch.tensor([1, 2, 1])).square().sum() * scale).backward()
            optimizer.step()
    assert torch.equal(_all(table), _all(other))
    with pytest.raises(ValueError, match="loss_scale is 0; it has to be more than 0"):
        kind([nn.Parameter(torch.ones(1))], loss_scale=0)


# ---------------------------------------------------------------------- targets


@every_kind
@pytest.mark.parametrize(
    ("given", "kept"),
    [("cpu", "cpu"), ("CPU", "cpu"), ("Device", "device"), ("GPU", "device"), ("Ascend", "device")],
)
def test_a_target_is_kept_in_the_groups(kind: Make, given: str, kept: str) -> None:
    parameters = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))]
    optimizer = kind(
        [{"params": parameters[:1]}, {"params": parameters[1:], "target": "cpu"}], lr=0.1, target=given
    )
    assert [group["target"] for group in optimizer.param_groups] == [kept, "cpu"]
    assert optimizer.target == ("cpu" if kept == "cpu" else None)
    optimizer.target = given
    assert optimizer.target == kept
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert optimizer.param_groups[2]["target"] == kept


@every_kind
def test_a_target_that_is_none_is_refused(kind: Make) -> None:
    def parameters() -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(1))]

    for wrong, error in ((1, TypeError), ("tpu", ValueError), ("", ConfigError)):
        with pytest.raises(error, match=r"target=.*: it has to be 'cpu' or 'device'"):
            kind(parameters(), lr=0.1, target=wrong)
        with pytest.raises(error, match="it has to be 'cpu' or 'device'"):
            kind([{"params": parameters(), "target": wrong}], lr=0.1)
        optimizer = kind(parameters(), lr=0.1)
        with pytest.raises(error, match="it has to be 'cpu' or 'device'"):
            optimizer.target = wrong
        assert optimizer.target is None


@every_kind
def test_groups_without_a_target_are_those_of_pytorch(kind: Make) -> None:
    ours = kind([nn.Parameter(torch.ones(1))], lr=0.1)
    assert "target" not in ours.param_groups[0]
    theirs = getattr(torch.optim, kind.__name__, None)
    if theirs is not None:
        assert (
            ours.state_dict()["param_groups"]
            == theirs([nn.Parameter(torch.ones(1))], lr=0.1).state_dict()["param_groups"]
        )


# ---------------------------------------------------------------------- what is refused

WRONG: list[tuple[Make, dict[str, Any], str]] = [
    (SGD, {"momentum": 0.9}, r"momentum=0.9 is not for the table 'EmbeddingTable' of \[20, 4\] \(320 B\)"),
    (SGD, {"weight_decay": 0.1}, "weight_decay=0.1 is not for the table"),
    (SGD, {"fused": True}, "fused=True is not for the table"),
    (SGD, {"differentiable": True}, "differentiable=True is not for the table"),
    (Adagrad, {"weight_decay": 0.1}, "weight_decay=0.1 is not for the table"),
    (Adagrad, {"fused": True}, "fused=True is not for the table"),
]


@pytest.mark.parametrize(("kind", "options", "message"), WRONG)
def test_options_that_are_not_for_tables_are_refused(
    kind: Make, options: dict[str, Any], message: str
) -> None:
    table, dense = _table(), nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match=message):
        kind([*table.parameters()], lr=0.1, **options)
    optimizer = kind([{"params": [dense], **options}, {"params": [table.weight]}], lr=0.1)
    optimizer.param_groups[1] |= options
    before = _all(table)
    dense.grad = torch.ones(2)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=message):
        optimizer.step()
    assert torch.equal(_all(table), before)
    assert dense.tolist() == [1.0, 1.0]


@every_kind
def test_gradients_of_single_elements_are_refused(kind: Make) -> None:
    table = _table()
    before = _all(table)
    optimizer = kind(table.parameters(), lr=0.1)
    table.weight.grad = torch.ones(ROWS, WIDTH).to_sparse(2)
    with pytest.raises(UsageError, match=r"the gradient of the table .* is of single elements"):
        optimizer.step()
    assert torch.equal(_all(table), before)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"lr": 0.0}, "lr is 0.0; it has to be more than 0"),
    ({"betas": (1.0, 0.9)}, r"betas\[0\] is 1.0"),
    ({"betas": (0.9, -0.1)}, r"betas\[1\] is -0.1"),
    ({"eps": 0.0}, "eps is 0.0; it has to be more than 0"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options_of_sparse_adam_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseAdam(_table().parameters(), **options)


@every_kind
def test_a_group_that_is_refused_is_not_taken(kind: Make) -> None:
    taken, free = _table(), _table()
    holder = SGD(taken.parameters(), lr=0.1)
    optimizer = kind([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(UsageError, match="another optimizer"):
        optimizer.add_param_group({"params": [free.weight, taken.weight]})
    with pytest.raises(ConfigError, match="target"):
        optimizer.add_param_group({"params": [free.weight], "target": "tpu"})
    _step(free, SGD(free.parameters(), lr=0.1), 1)
    _step(taken, holder, 1)
    assert len(optimizer.param_groups) == 1


def test_an_optimizer_that_is_refused_has_not_taken_the_table() -> None:
    table = _table()
    with pytest.raises(ValueError, match="eps"):
        SparseAdam(table.parameters(), eps=0.0)
    with pytest.raises(ConfigError, match="momentum"):
        SGD(table.parameters(), momentum=0.9)
    SGD(table.parameters(), lr=0.1)


def test_columns_that_were_loaded_are_not_taken_for_new_ones(tmp_path: Path) -> None:
    """They begin anew, as those of any table whose optimizer has no state."""
    table, ids = EmbeddingTable(8, 4, init="zeros"), torch.arange(8)
    optimizer = SparseAdam(table.parameters(), lr=0.1)
    optimizer.begin_tables()
    store = table.weight.row_store
    for visit in store.visit(ids):
        visit.scatter("exp_avg", torch.ones(8, 4))
    table.export(tmp_path / "rows", state=True)
    table.load(tmp_path / "rows", state=True)
    table(ids).sum().backward()
    optimizer.step()
    first = torch.zeros(8, 4).add_(torch.ones(8, 4) * (1 - 0.9))
    assert torch.equal(optimizer.state[table.weight]["exp_avg"].dense(), first)
