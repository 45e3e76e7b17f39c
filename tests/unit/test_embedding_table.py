"""A table as a module of PyTorch: what it shows, copies, saves, grows, and refuses."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tierstore.config.host_memory import HostRoom
from tierstore.errors import CapacityError, ConfigError, UsageError
from tierstore.nn import EmbeddingTable, Normal, Uniform, row_blocks
from tierstore.nn.table_weight import TableWeight
from tierstore.tables import RowStore, TableHome

ROWS, WIDTH = 50, 4
HUGE = 2**40


def _table(**options: Any) -> EmbeddingTable:  # noqa: ANN401
    return EmbeddingTable(ROWS, WIDTH, **{"seed": 0, **options})


def _all(table: EmbeddingTable) -> Tensor:
    return table.rows(torch.arange(table.num_embeddings))


def _train(table: EmbeddingTable, *ids: int) -> None:
    table(torch.tensor(ids)).sum().backward()


# ---------------------------------------------------------------------- one parameter


def test_a_table_has_one_parameter_of_its_shape_and_no_bytes() -> None:
    table = EmbeddingTable(HUGE, 64)
    assert [name for name, _ in table.named_parameters()] == ["weight"]
    weight = table.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.numel(), weight.dtype) == ((HUGE, 64), HUGE * 64, torch.float32)
    assert weight.device == torch.device("cpu")
    assert weight.is_leaf
    assert weight.requires_grad
    assert len(weight) == HUGE
    assert weight.untyped_storage().nbytes() == 4


def test_a_table_of_2_to_the_40_rows_costs_what_was_touched() -> None:
    table = EmbeddingTable(HUGE, 64, mode="sum")
    table(torch.tensor([[0, HUGE - 1, 12345]])).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.shape == (HUGE, 64)
    assert table.weight.grad._indices().tolist() == [[0, HUGE - 1, 12345]]
    assert table.stats().row_store.pages == 3


def test_a_table_can_be_frozen_and_thawed() -> None:
    table = _table()
    assert not table.requires_grad_(requires_grad=False)(torch.tensor([1])).requires_grad
    table.requires_grad_(requires_grad=True)
    _train(table, 1)
    assert table.weight.grad is not None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_cleared(set_to_none: bool) -> None:
    table = _table()
    plain = nn.Embedding(ROWS, WIDTH, sparse=True)
    for module in (table, plain):
        module(torch.tensor([1, 1])).sum().backward()
        module.zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert table.weight.grad is None
    else:
        assert table.weight.grad is not None
        assert plain.weight.grad is not None
        assert torch.equal(table.weight.grad.to_dense(), plain.weight.grad.to_dense())


def test_hooks_see_the_gradient() -> None:
    table = _table()
    seen: list[Tensor] = []
    weight: Any = table.weight
    weight.register_hook(seen.append)
    weight.register_post_accumulate_grad_hook(seen.append)
    _train(table, 3, 4)
    assert [tuple(each.shape) for each in seen] == [(ROWS, WIDTH)] * 2
    assert seen[1] is table.weight


def test_a_gradient_can_be_replaced() -> None:
    table = _table()
    _train(table, 3, 3)
    assert table.weight.grad is not None
    table.weight.grad = table.weight.grad.coalesce() * 2
    assert table.weight.grad.to_dense()[3].tolist() == [4.0] * WIDTH


def test_a_graph_may_be_kept_but_not_differentiated_again() -> None:
    table = _table()
    loss = table(torch.tensor([1])).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    (gradient,) = torch.autograd.grad(
        table(torch.tensor([1])).square().sum(), table.weight, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.to_dense().sum().backward()


# ---------------------------------------------------------------------- what it is not

REFUSED: dict[str, Callable[[Any], object]] = {
    "normal_": nn.init.normal_,
    "data": lambda weight: weight.data,
    "add_": lambda weight: weight.detach().add_(1),
    "zeros_like": torch.zeros_like,
    "add": lambda weight: weight + 1,
    "embedding": lambda weight: nn.functional.embedding(torch.tensor([1]), weight),
    "__getitem__": lambda weight: weight[0],
    "clone": lambda weight: weight.clone(),
    "cat": lambda weight: torch.cat([torch.ones(1, WIDTH), weight]),
    "__set__": lambda weight: setattr(weight, "data", torch.ones(1)),
    "numpy": lambda weight: weight.numpy(),
    "copy_": lambda weight: torch.ones(ROWS, WIDTH).copy_(weight),
    "requires a copy": lambda weight: weight.copy_(torch.ones(ROWS, WIDTH + 1)),
}


@pytest.mark.parametrize("use", REFUSED)
def test_what_would_use_its_elements_is_refused_by_name(use: str) -> None:
    table = _table()
    before = _all(table)
    with pytest.raises(UsageError, match=r"table") as caught, torch.no_grad():
        REFUSED[use](table.weight)
    assert "set_rows" in str(caught.value) or "copy_" in str(caught.value)
    assert torch.equal(_all(table), before)


def test_a_refusal_says_which_table_and_how_large_it_is() -> None:
    with pytest.raises(
        UsageError, match=r"zeros_like: table 'EmbeddingTable' of \[1099511627776, 64\] \(256.0 TiB\)"
    ):
        torch.zeros_like(EmbeddingTable(HUGE, 64).weight)


THEIRS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SparseAdam, the same bits": torch.optim.SparseAdam,
    "SGD, the same bits": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "one of tierstore.optim": torch.optim.Adam,
}


@pytest.mark.parametrize("advice", THEIRS)
def test_optimizers_of_others_are_refused_before_they_change_anything(advice: str) -> None:
    table, dense = _table(), nn.Parameter(torch.ones(2))
    before = _all(table)
    optimizer = THEIRS[advice]([dense, *table.parameters()])
    dense.grad = torch.ones(2)
    _train(table, 1)
    with pytest.raises(UsageError, match=rf"{type(optimizer).__name__} cannot step the table .*{advice}"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(2))
    assert torch.equal(_all(table), before)
    assert not optimizer.state


def test_an_optimizer_that_makes_state_at_once_is_refused_at_once() -> None:
    with pytest.raises(
        UsageError, match=r"Adagrad cannot step the table .*tierstore.optim.Adagrad, the same bits"
    ):
        torch.optim.Adagrad(_table().parameters())


def test_an_optimizer_of_others_may_hold_a_table_that_has_no_gradient() -> None:
    table, dense = _table().requires_grad_(requires_grad=False), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([dense, *table.parameters()], lr=1.0)
    dense.grad = torch.ones(2)
    optimizer.step()
    assert dense.tolist() == [0, 0]


# ---------------------------------------------------------------------- moved, copied, saved


def test_a_table_stays_where_it_is() -> None:
    model = nn.Sequential(_table(), nn.Linear(WIDTH, 1))
    weight = model[0].weight
    model.to("meta")
    assert model[0].weight is weight
    assert weight.device.type == "cpu"
    assert model[1].weight.device.type == "meta"


@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.double, lambda each: each.to(torch.bfloat16)])
def test_a_change_of_type_is_refused(change: Callable[[nn.Module], object]) -> None:
    with pytest.raises(UsageError, match=r"is of torch.float32 and cannot become torch.\w+: set dtype="):
        change(_table())


def test_rows_are_not_shared_with_other_processes() -> None:
    with pytest.raises(UsageError, match="cannot be shared"):
        _table().share_memory()


def _pickled(table: EmbeddingTable) -> EmbeddingTable:
    made: EmbeddingTable = pickle.loads(pickle.dumps(table))
    return made


def _saved(table: EmbeddingTable) -> EmbeddingTable:
    file = io.BytesIO()
    torch.save(table, file)
    made: EmbeddingTable = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    return made


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved])
def test_copies_have_rows_of_their_own(copied: Callable[[EmbeddingTable], EmbeddingTable]) -> None:
    table = EmbeddingTable(HUGE, WIDTH, init=Uniform(-1, 1), seed=7)
    ids = torch.tensor([5, 6, HUGE - 1])
    table.set_rows(ids[:1], torch.ones(1, WIDTH))
    made = copied(table)
    assert torch.equal(made.rows(ids), table.rows(ids))
    made.set_rows(ids[1:2], torch.zeros(1, WIDTH))
    assert not torch.equal(made.rows(ids), table.rows(ids))
    assert isinstance(made.weight, TableWeight)
    _train(made, 1)
    assert table.weight.grad is None


def test_a_deep_copy_has_no_gradient_as_of_any_parameter_and_ties_are_kept() -> None:
    table = _table().requires_grad_(requires_grad=True)
    _train(table, 1)
    first, second = copy.deepcopy([table, table])
    assert first is second
    plain = nn.Embedding(ROWS, WIDTH, sparse=True)
    plain(torch.tensor([1])).sum().backward()
    assert table.weight.grad is not None
    assert first.weight.grad is copy.deepcopy(plain).weight.grad is None
    frozen = copy.deepcopy(table.requires_grad_(requires_grad=False))
    assert not frozen.weight.requires_grad


def test_without_a_seed_pytorch_draws_one() -> None:
    ids = torch.arange(4)
    torch.manual_seed(3)
    first, second = EmbeddingTable(8, 4), EmbeddingTable(8, 4)
    assert not torch.equal(first.rows(ids), second.rows(ids))
    torch.manual_seed(3)
    with torch.device("meta"):
        again = EmbeddingTable(8, 4)
    assert torch.equal(again.rows(ids), first.rows(ids))
    assert again.seed == first.seed != second.seed
    assert torch.equal(EmbeddingTable(8, 4, seed=first.seed).rows(ids), first.rows(ids))
    state = torch.get_rng_state()
    assert EmbeddingTable(8, 4, seed=5).seed == 5
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn where a seed is given"
    assert EmbeddingTable(8, 4, init="zeros").seed is None


def test_a_state_dict_is_a_dense_entry_that_plain_pytorch_takes() -> None:
    table, plain = _table(), nn.Embedding(ROWS, WIDTH)
    table.set_rows(torch.tensor([3]), torch.ones(1, WIDTH))
    entries = table.state_dict()
    assert list(entries) == ["weight"]
    assert entries["weight"].shape == (ROWS, WIDTH)
    plain.load_state_dict(entries)
    assert torch.equal(plain.weight, _all(table))
    file = io.BytesIO()
    torch.save(entries, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert type(loaded["weight"]) is Tensor
    assert torch.equal(loaded["weight"], _all(table))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("is_of_table", [False, True])
def test_a_state_dict_is_loaded(assign: bool, is_of_table: bool) -> None:
    source = _table(seed=3) if is_of_table else nn.Embedding(ROWS, WIDTH)
    table = _table()
    weight = table.weight
    assert str(table.load_state_dict(source.state_dict(), assign=assign)) == "<All keys matched successfully>"
    assert table.weight is weight
    assert torch.equal(_all(table), source(torch.arange(ROWS)))


def test_a_state_dict_with_other_names_or_another_shape_is_refused() -> None:
    table = _table()
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight".*\s.*Unexpected key.*"other"'):
        table.load_state_dict({"other": torch.ones(ROWS, WIDTH)})
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        table.load_state_dict({"weight": torch.ones(ROWS + 1, WIDTH)})


def test_an_entry_shows_what_the_rows_are_now() -> None:
    table = _table()
    entry = table.state_dict()["weight"]
    copied = copy.deepcopy(entry)
    before = entry.clone()
    table.set_rows(torch.tensor([2]), torch.ones(1, WIDTH))
    assert entry[2].tolist() == [1.0] * WIDTH
    assert torch.equal(copied, before), "a copy keeps what it was"
    assert torch.equal(entry.detach().data.float(), _all(table))
    assert torch.equal(torch.cat([entry, entry])[ROWS:], _all(table))


def test_an_entry_can_be_read_by_its_address() -> None:
    table = _table()
    entry = table.state_dict()["weight"]
    address = entry.data_ptr()
    memory = (ctypes.c_float * (ROWS * WIDTH)).from_address(address)
    assert list(memory) == _all(table).flatten().tolist()
    table.set_rows(torch.tensor([0]), torch.ones(1, WIDTH))
    assert entry.untyped_storage().data_ptr() == address, "whoever knows the address may still read there"
    assert memory[0] == 1.0
    assert entry.stride() == (WIDTH, 1)
    assert entry.is_contiguous()
    assert entry.untyped_storage().nbytes() == ROWS * WIDTH * 4
    assert np.array_equal(entry.numpy(), entry.dense().numpy())


def test_an_entry_that_does_not_fit_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = EmbeddingTable(HUGE, 64).state_dict()["weight"]
    assert huge.shape == (HUGE, 64)
    with pytest.raises(CapacityError, match=r"needs 256.0 TiB as one tensor") as caught:
        huge.sum()
    assert caught.value.needed_bytes == HUGE * 256
    entry = _table().state_dict()["weight"]
    monkeypatch.setattr(row_blocks, "host_rooms", lambda: [HostRoom(ROWS * WIDTH * 4 - 1, "a bound")])
    with pytest.raises(CapacityError, match=r"needs 800 B as one tensor, of 799 B \(a bound\)"):
        entry.sum()


class _Use:
    """Refuses every use of rows."""

    def require(self, what: str) -> None:
        raise UsageError(f"not now, {what}")


def test_the_home_of_rows_says_whether_they_may_be_used_as_long_as_they_lie_there() -> None:
    table, ids = _table(), torch.tensor([1])
    expected = table.rows(ids)
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    table.weight.row_store.attach(TableHome(memory, name="deep", use=_Use()))
    uses: dict[str, Callable[[], object]] = {
        "is read": lambda: table.rows(ids),
        "is looked up": lambda: table(ids),
        "is written": lambda: table.set_rows(ids, torch.ones(1, WIDTH)),
        "is prefetched": lambda: table.prefetch(ids),
        "grows": lambda: table.grow(ROWS + 1),
        "is loaded": lambda: table.load_state_dict(table.state_dict()),
    }
    for what, use in uses.items():
        with pytest.raises((UsageError, RuntimeError), match=f"not now, the table 'deep' {what}"):
            use()
    assert torch.equal(copy.deepcopy(table).rows(ids), expected), "a copy lies elsewhere"
    table.weight.row_store.detach()
    for use in uses.values():
        use()


def test_rows_may_be_kept_elsewhere() -> None:
    """What keeps rows elsewhere gives the parameter another store of the same rows."""
    table = _table()
    other = RowStore(ROWS, WIDTH, torch.float32, lambda ids: torch.full((len(ids), WIDTH), 2.0), name="deep")
    table.weight.row_store = other
    assert table(torch.tensor([1])).tolist() == [[2.0] * WIDTH]
    with pytest.raises(IndexError, match="table 'deep'"):
        table(torch.tensor([ROWS]))


# ---------------------------------------------------------------------- made, grown, prefetched


@pytest.mark.parametrize(
    ("init", "expected"),
    [(0.5, 0.5), (2, 2.0), ("zeros", 0.0), (lambda ids: ids[:, None].float().expand(-1, WIDTH), 1.0)],
)
def test_rows_begin_as_they_are_said_to(init: Any, expected: float) -> None:  # noqa: ANN401
    assert _table(init=init).rows(torch.tensor([1])).tolist() == [[expected] * WIDTH]


@pytest.mark.parametrize(
    ("init", "mean", "std"),
    [
        (None, 0.0, 1.0),
        (Normal(0.01), 0.0, 0.01),
        (Normal(2.0, 5.0), 5.0, 2.0),
        (Uniform(1.0, 3.0), 2.0, 3**-0.5),
    ],
)
def test_rows_begin_as_distributed(init: Any, mean: float, std: float) -> None:  # noqa: ANN401
    rows = _all(EmbeddingTable(4000, 8, init=init, seed=0, dtype=torch.float64))
    assert rows.mean().item() == pytest.approx(mean, abs=std / 20)
    assert rows.std().item() == pytest.approx(std, rel=0.05)


def test_rows_are_of_the_seed_alone() -> None:
    first, again, other = _table(seed=1), _table(seed=1), _table(seed=2)
    last = again.rows(torch.tensor([ROWS - 1]))
    assert torch.equal(_all(first)[-1:], last)
    assert not torch.equal(_all(first), _all(other))


def test_a_table_grows_to_what_it_would_have_been() -> None:
    table, large = _table(seed=5), EmbeddingTable(3 * ROWS, WIDTH, seed=5)
    weight = table.weight
    _train(table, 1)
    with pytest.raises(UsageError, match=r"grow\(150\): table 'EmbeddingTable' has a gradient of 50 rows"):
        table.grow(3 * ROWS)
    assert table.num_embeddings == ROWS
    table.zero_grad()
    out = table(torch.tensor([1]))
    table.grow(3 * ROWS)
    assert table.weight is weight
    assert table.weight.shape == (3 * ROWS, WIDTH)
    assert torch.equal(_all(table), _all(large))
    _train(table, 3 * ROWS - 1, 0)
    assert table.weight.grad is not None
    assert table.weight.grad.shape == (3 * ROWS, WIDTH)
    assert out.requires_grad
    with pytest.raises(ConfigError, match=r"grow\(1\): .* has 150 rows"):
        table.grow(1)
    with pytest.raises(TypeError, match=r"grow\(2.0\)"):
        table.grow(2.0)  # type: ignore[arg-type]


def test_prefetching_is_advice() -> None:
    table = _table()
    table.prefetch(torch.tensor([[1, 1], [-5, ROWS]], dtype=torch.int32))
    table.prefetch(torch.tensor([], dtype=torch.int64))
    with pytest.raises(TypeError, match=r"ids are of torch\.float32"):
        table.prefetch(torch.ones(2))


def test_a_cache_is_no_larger_than_the_table(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tierstore")
    assert _table(cache_rows=ROWS, target="device").cache_rows == ROWS
    assert caplog.messages == []
    assert _table(cache_rows=ROWS + 1, target="device").cache_rows == ROWS
    assert caplog.messages == ["cache_rows=51: all 50 rows of the table"]


def test_dense_gradients_that_do_not_fit_are_refused_where_the_table_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CapacityError, match=r"'grad' of the table .* needs 256"):
        EmbeddingTable(HUGE, 64, sparse=False, target="device")
    monkeypatch.setattr(row_blocks, "host_rooms", lambda: [HostRoom(ROWS * WIDTH * 4, "a bound")])
    table = _table(sparse=False, target="device")
    with pytest.raises(CapacityError, match=r"needs 816 B as one tensor, of 800 B \(a bound\)"):
        table.grow(ROWS + 1)
    assert table.num_embeddings == ROWS


def test_data_parallel_around_a_table_is_refused_but_where_it_ignores_it() -> None:
    """In one process, as what it would do to a table is the same."""
    distributed: Any = torch.distributed
    if not distributed.is_available():
        pytest.skip("PyTorch was built without it")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.ModuleDict({"deep": _table(), "net": nn.Linear(WIDTH, 1)})
        before = _all(model["deep"])  # type: ignore[arg-type]
        parallel: Any = nn.parallel.DistributedDataParallel
        with pytest.raises(
            UsageError, match="DistributedDataParallel would send and keep all rows of the table"
        ):
            parallel(model)
        parallel._set_params_and_buffers_to_ignore_for_model(model, ["deep.weight"])
        assert "deep.weight" in parallel(model).module.state_dict()
        assert torch.equal(_all(model["deep"]), before)  # type: ignore[arg-type]
    finally:
        distributed.destroy_process_group()


def test_statistics_count_lookups() -> None:
    table = _table()
    table(torch.tensor([[1, 2], [2, 2]]))
    table(torch.tensor([], dtype=torch.int64))
    stats = table.stats()
    assert (stats.num_embeddings, stats.lookups, stats.ids, stats.rows) == (ROWS, 2, 4, 2)


def test_what_a_table_is_called() -> None:
    assert repr(_table()) == "EmbeddingTable(50, 4, target='cpu')"
    text = repr(_table(mode="sum", max_norm=1.0, sparse=False, target="DEVICE"))
    assert text == "EmbeddingTable(50, 4, target='device', mode='sum', max_norm=1.0, sparse=False)"
    assert "TableWeight(table 'EmbeddingTable' of [50, 4] (800 B), torch.float32" in repr(_table().weight)
    assert "TableEntry('rows' of the table" in repr(_table().state_dict()["weight"])
