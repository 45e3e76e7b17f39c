"""Tables whose hot rows are on a device against PyTorch's modules there: the same bits, whatever fits."""

from __future__ import annotations

import copy
import itertools
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.property.test_table_optimizers import OPTIONS, OURS, THEIRS, every_kind
from tests.property.test_tables import DTYPES, ROWS, batches, same
from tests.row_carriers import DEVICE, CopyingCarrier, device_home
from tests.unit.tables.homes import Sometimes, faulty_store
from tierstore.errors import BackendError, UsageError
from tierstore.nn import EmbeddingTable
from tierstore.optim import SGD, SparseAdam
from tierstore.tables import ROWS as ROWS_COLUMN
from tierstore.tables import LogPlace, StoreBlocks, TableHome
from tierstore.tables.frames import Policy

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
SIZES = [0, 1, 5, ROWS, 3 * ROWS]
every_size = pytest.mark.parametrize("slots", SIZES)
_WIDTH = 6
_COLUMNS = 3  # at most
_ROW_OF_A_PAGE = 1024


def twins(
    slots: int,
    policy: Policy = "lfu",
    mode: str | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    sparse: bool = True,
    max_norm: float | None = None,
    out_of_range: str = "error",
) -> tuple[Any, Any, CopyingCarrier]:
    """Make a table on a device, and PyTorch's module there with the same rows."""
    table = EmbeddingTable(
        ROWS, _WIDTH, mode=mode, dtype=dtype, target="device", sparse=sparse, max_norm=max_norm,
        out_of_range=out_of_range,
    )  # fmt: skip
    rows = table.rows(torch.arange(ROWS)).to(DEVICE)
    home, carrier = device_home(slots * _COLUMNS, _WIDTH, dtype, policy)
    table.weight.attach_device(home)
    if mode is None:
        return table, nn.Embedding.from_pretrained(rows, freeze=False, sparse=sparse), carrier
    return table, nn.EmbeddingBag.from_pretrained(rows, freeze=False, sparse=sparse, mode=mode), carrier


def same_on_device(found: Tensor, expected: Tensor) -> None:
    """Both are on the device, with the same bits."""
    assert found.device == expected.device
    assert found.device.type == DEVICE.type
    if found.is_sparse:
        found, expected = (
            torch.sparse_coo_tensor(
                each._indices().cpu(), each._values().cpu(), each.shape, is_coalesced=each.is_coalesced()
            )
            for each in (found, expected)
        )
    same(found.cpu(), expected.cpu())


def backward(module: nn.Module, batch: list[int], seed: int) -> Tensor:
    """Look a batch up on the device, and give a gradient to what was found."""
    index = torch.tensor(batch, dtype=torch.int64).to(DEVICE)
    out: Tensor = module(index if getattr(module, "mode", None) is None else index.view(1, -1))
    chance = torch.Generator().manual_seed(seed)
    out.backward(torch.randn(out.shape, generator=chance, dtype=torch.float64).to(DEVICE, out.dtype))
    return out.detach()


def same_states(table: EmbeddingTable, ours: Any, plain: nn.Embedding, theirs: Any) -> None:  # noqa: ANN401
    """What the tables hold, and what is kept beside it, is the same."""
    same(table.rows(torch.arange(ROWS)), plain.weight.detach().cpu())
    found, expected = ours.state_dict()["state"].get(0, {}), theirs.state_dict()["state"].get(0, {})
    for name, value in expected.items():
        if isinstance(value, Tensor) and value.ndim:
            same(found[name].dense(), value.cpu())
        elif value is not None:
            assert found[name] == value


@every_kind
@given(
    data=st.data(), accumulated=st.lists(batches, min_size=1, max_size=4), dtype=st.sampled_from(DTYPES),
    slots=st.sampled_from(SIZES), policy=st.sampled_from(get_args(Policy)),
)  # fmt: skip
@settings(deadline=None, max_examples=8)
def test_every_step_has_the_bits_of_the_same_on_an_embedding_there(
    kind: str, data: st.DataObject, accumulated: list[list[list[int]]], dtype: torch.dtype, slots: int,
    policy: Policy,
) -> None:  # fmt: skip
    options = data.draw(OPTIONS[kind])
    table, plain, _ = twins(slots, policy, dtype=dtype)
    ours, theirs = OURS[kind](table.parameters(), **options), THEIRS[kind](plain.parameters(), **options)
    for number, several in enumerate(accumulated):
        ours.zero_grad()
        theirs.zero_grad()
        for batch in several:
            if number % 2:
                table.prefetch(torch.tensor(batch, dtype=torch.int64))
            same_on_device(backward(table, batch, number), backward(plain, batch, number))
        same_on_device(table.weight.grad, plain.weight.grad)
        ours.step()
        theirs.step()
        if (
            number % 2
        ):  # reading gives slots back: the next step is to find them as they are without that, too
            same_states(table, ours, plain, theirs)
    same_states(table, ours, plain, theirs)
    table.weight.detach_device()
    assert table.weight.device.type == "cpu"
    same_states(table, ours, plain, theirs)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@every_size
@given(batch=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=60), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=3)
def test_bags_are_summed_on_the_device(mode: str, slots: int, batch: list[int], seed: int) -> None:
    table, plain, _ = twins(slots, mode=mode)
    same_on_device(backward(table, batch, seed), backward(plain, batch, seed))
    same_on_device(table.weight.grad, plain.weight.grad)
    ids, offsets = torch.tensor(batch).to(DEVICE), torch.tensor([0, len(batch) // 2]).to(DEVICE)
    by = torch.linspace(-1, 1, len(batch)).to(DEVICE) if mode == "sum" else None
    same_on_device(
        table(ids, offsets, per_sample_weights=by).detach(),
        plain(ids, offsets, per_sample_weights=by).detach(),
    )


@every_kind
@every_size
def test_dense_gradients_are_on_the_device(kind: str, slots: int) -> None:
    table, plain, _ = twins(slots, sparse=False)
    theirs = (OURS if kind == "SparseAdam" else THEIRS)[kind](plain.parameters(), lr=0.1)
    ours = OURS[kind](table.parameters(), lr=0.1)
    for number, batch in enumerate([[1, 1, 39], [0, 5, 1], list(range(30))]):
        ours.zero_grad()
        theirs.zero_grad()
        same_on_device(backward(table, batch, number), backward(plain, batch, number))
        same_on_device(table.weight.grad, plain.weight.grad)
        ours.step()
        theirs.step()
    same_states(table, ours, plain, theirs)


@every_size
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_strangers_give_zeros_and_long_rows_are_clipped(slots: int, max_norm: float | None) -> None:
    table, plain, _ = twins(slots, out_of_range="zeros", max_norm=max_norm)
    ids = torch.tensor([3, -1, 3, ROWS, 7])
    rows = plain.weight.detach().cpu()
    expected = torch.stack([rows[3], torch.zeros(_WIDTH), rows[3], torch.zeros(_WIDTH), rows[7]])
    if max_norm is not None:
        expected = expected * (1.0 / torch.linalg.vector_norm(expected, dim=1, keepdim=True).clamp(min=1.0))
    found = table(ids.to(DEVICE))
    assert torch.equal(found.detach().cpu(), expected)
    found.sum().backward()
    gradient = table.weight.grad
    assert gradient.device.type == DEVICE.type
    assert set(gradient._indices()[0].tolist()) <= {3, 7}
    assert table(torch.tensor([], dtype=torch.int64).to(DEVICE)).shape == (0, _WIDTH)


def test_what_is_read_and_written_on_the_host_is_what_the_device_has() -> None:
    table, plain, _ = twins(ROWS)
    ours, theirs = SparseAdam(table.parameters()), torch.optim.SparseAdam([*plain.parameters()])
    for number in range(3):
        backward(table, [1, 2, 3, 30], number)
        backward(plain, [1, 2, 3, 30], number)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        table.set_rows(torch.tensor([2]), torch.full((1, _WIDTH), float(number)))
        with torch.no_grad():
            plain.weight[2] = float(number)
        same(copy.deepcopy(table).rows(torch.arange(ROWS)), plain.weight.detach().cpu())
        same(table.state_dict()["weight"].dense(), plain.weight.detach().cpu())
    ours.load_state_dict(ours.state_dict())  # reads its entries where they are
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    same_states(table, ours, plain, theirs)
    grown = EmbeddingTable(ROWS + 9, _WIDTH, target="device", seed=table.seed)
    table.grow(ROWS + 9)
    assert table.weight.device.type == DEVICE.type
    found = table(torch.tensor([1, ROWS + 8]).to(DEVICE)).detach().cpu()
    same(found[1], grown.rows(torch.tensor(ROWS + 8)))
    same(found[0], plain.weight.detach().cpu()[1])


def test_a_gradient_that_is_set_keeps_a_table_from_the_device_and_comes_back_from_it() -> None:
    table, plain, _ = twins(4)
    backward(table, [1, 1, 5], 0)
    backward(plain, [1, 1, 5], 0)
    assert copy.deepcopy(table).weight.grad is None  # as of any parameter
    table.weight.detach_device()
    gradient = table.weight.grad
    assert gradient.device.type == "cpu"
    same(gradient._values(), plain.weight.grad._values().cpu())
    home, _ = device_home(4, _WIDTH)
    with pytest.raises(UsageError, match="has a gradient on cpu and cannot be computed with on"):
        table.weight.attach_device(home)
    assert table.weight.row_store.device is None
    table.weight.grad = None
    table.weight.attach_device(home)
    with pytest.raises(UsageError, match="has a device already"):
        table.weight.attach_device(home)


@every_kind
@pytest.mark.parametrize("slots", [0, 2, ROWS])
def test_a_step_that_fails_at_any_carry_has_changed_nothing_and_can_be_taken_again(
    kind: str, slots: int
) -> None:
    table, plain, carrier = twins(slots)
    ours, theirs = OURS[kind](table.parameters(), lr=0.1), THEIRS[kind](plain.parameters(), lr=0.1)
    failed = 0
    for number in range(1, 9):
        for module in (table, plain):
            backward(module, [1, 2, 3, 3, number + 20, 38], number)
        carrier.fail_next(number)
        try:
            ours.step()
        except BackendError:
            failed += 1
            same(table.rows(torch.arange(ROWS)), plain.weight.detach().cpu())
            ours.step()
        theirs.step()
        carrier.heal()
        ours.zero_grad()
        theirs.zero_grad()
    assert failed
    same_states(table, ours, plain, theirs)


@pytest.mark.parametrize("slots", [0, 2])
def test_a_step_that_the_disk_ends_half_way_has_changed_nothing(slots: int) -> None:
    """Two pages of one row each are in memory, and most of the rows pass by the slots."""
    has_owed = False
    for number in itertools.count(1):
        store, disk = faulty_store()
        table = EmbeddingTable(12, _ROW_OF_A_PAGE, target="device")
        place = LogPlace(StoreBlocks(store), "table/deep/", 2 * 4096)
        table.weight.row_store.attach(TableHome(torch.empty(2 * 1024), place, executor=Sometimes()))
        table.weight.attach_device(device_home(slots, _ROW_OF_A_PAGE)[0])
        optimizer = SGD(table.parameters(), lr=1.0)
        before = table.rows(torch.arange(12))
        table(torch.arange(12).to(DEVICE)).sum().backward()
        disk.fail_next(number)
        try:
            optimizer.step()
        except BackendError:
            disk.heal()
            has_owed |= bool(table.weight._owed)
            assert torch.equal(table.rows(torch.arange(12)), before)
            optimizer.step()
        disk.heal()
        assert torch.equal(table.rows(torch.arange(12)), before - 1)
        is_over = not disk.failures
        table.weight.row_store.close()
        store.close()
        if is_over:
            break
    assert has_owed


@pytest.mark.parametrize("slots", [2, ROWS])
def test_the_statistics_say_what_was_carried(slots: int) -> None:
    table, _, _ = twins(slots)
    store, row_bytes = table.weight.row_store, _WIDTH * 4
    store.ensure_columns([])
    there = min(slots * _COLUMNS, ROWS)  # one column: a slot takes one cell
    first = torch.arange(30).to(DEVICE)
    table(first)
    table(first)
    cache = table.stats().row_store.cache
    assert cache is not None
    passed = max(0, 30 - there)
    assert (cache.misses, cache.hits) == (30 + passed, 30 - passed)
    assert cache.hit_ratio == (30 - passed) / 60
    assert cache.bypassed == 2 * passed
    assert cache.used == min(30, there)
    assert cache.rows_to_device == 30 + passed
    # Beside the rows, four bytes for each number: ids, where they stand in the batch, and slots.
    assert cache.bytes_to_device - cache.rows_to_device * row_bytes <= 60 * 4 * 5
    assert cache.rows_to_host == cache.bytes_to_host == 0
    assert store.gather(torch.tensor([3]))[ROWS_COLUMN].device.type == DEVICE.type
