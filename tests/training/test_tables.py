"""Tables in a run: the same bits as without it, wherever their rows lie and whatever interrupts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Never

import pytest
import torch
from torch import nn

from tests.training.table_models import (
    STEPPERS,
    Clicks,
    assert_alike,
    begin,
    build,
    loss_of_clicks,
    plain,
    step,
    table_config,
)
from tests.training.twins import Trial, every_layout
from tierstore.errors import CapacityError, StoreClosed, UsageError
from tierstore.nn import EmbeddingTable
from tierstore.nn.table_entry import TableEntry
from tierstore.nn.table_weight import TableWeight
from tierstore.optim import SparseAdam
from tierstore.testing.memory import DeviceBudget
from tierstore.training import Offload, offload

with_disk = pytest.mark.parametrize("layout", ["disk", "three"])
DURABLE = {"durable": True}


def run_of(trial: Trial) -> Offload:
    assert trial.run is not None
    return trial.run


def some_steps(trial: Trial, count: int) -> None:
    for _ in range(count):
        step(trial)


@every_layout
@pytest.mark.parametrize("kind", STEPPERS)
def test_a_run_trains_tables_as_if_there_were_none(layout: str, kind: str, tmp_path: Path) -> None:
    expected = plain(6, kind)
    trial = begin(layout, tmp_path, kind)
    torch.manual_seed(1)
    some_steps(trial, 6)
    run_of(trial).store.check()
    if layout in ("disk", "three"):
        read = run_of(trial).stats().tables["deep.weight"]
        assert read.page_bytes_written, "the table is to be larger than its frames"
    run_of(trial).close()
    assert_alike(expected, trial)


@with_disk
def test_frames_are_charged_to_host_memory_and_blocks_to_the_disk(layout: str, tmp_path: Path) -> None:
    trial = begin(layout, tmp_path)
    torch.manual_seed(1)
    some_steps(trial, 4)
    with run_of(trial) as run:
        tiers = run.stats().tiers
        for name in ("host", "disk"):  # the device's quota is what the program leaves of it
            assert tiers[name].peak_charged_bytes <= tiers[name].capacity_bytes
        for name in ("wide.weight", "deep.weight"):
            key = f"table/{name}/frames"
            stats = run.stats().tables[name]
            assert run.store.where(key) == ("host",)
            assert stats.frames * stats.page_bytes <= run.store.spec(key).nbytes
        blocks = [key for key in run.store if key.startswith("table/deep.weight/log/")]
        assert {run.store.where(key) for key in blocks} == {("disk",)}


@every_layout
def test_a_table_that_is_brought_back_leaves_nothing_in_the_store(layout: str, tmp_path: Path) -> None:
    trial = begin(layout, tmp_path)
    some_steps(trial, 3)
    with run_of(trial) as run:
        assert isinstance(trial.model, Clicks)
        session = run._session
        assert session is not None
        tables = session.tables
        for weight in list(tables.attached()):
            tables.restore(weight)
        assert [key for key in run.store if key.startswith("table/")] == []
        some_steps(trial, 1)
        tables.take_in(session.bindings.leasing)
        some_steps(trial, 1)
        assert len(tables.attached()) == 2


@with_disk
def test_training_goes_on_from_a_checkpoint_bit_for_bit(layout: str, tmp_path: Path) -> None:
    expected = plain(9)
    first = begin(layout, tmp_path, more=DURABLE)
    torch.manual_seed(1)
    some_steps(first, 3)
    run_of(first).checkpoint()
    some_steps(first, 2)
    run_of(first).checkpoint({"step": 5})
    some_steps(first, 3)  # lost
    run_of(first).close(restore=False)
    second = begin(layout, tmp_path, more=DURABLE)
    resumed = run_of(second).resumed
    assert resumed is not None
    assert resumed.extra == {"step": 5}
    assert run_of(second).stats().tables["deep.weight"].page_bytes_read == 0, "no page is read to resume"
    some_steps(second, 4)
    run_of(second).close(restore=True)
    assert_alike(expected, second)


def test_a_table_whose_seed_was_drawn_goes_on_with_that_of_its_checkpoint(tmp_path: Path) -> None:
    ids = torch.arange(3000)
    found: list[tuple[int | None, torch.Tensor]] = []
    config = table_config("disk", tmp_path, DURABLE)
    for number in range(2):
        torch.manual_seed(number)
        table = EmbeddingTable(3000, 48)
        optimizer = SparseAdam(table.parameters(), lr=0.1)
        with offload(table, optimizer, config) as run:
            if not number:
                table(torch.tensor([1, 2])).sum().backward()
                optimizer.step()
                run.checkpoint()
            found.append((table.seed, table.rows(ids)))
    assert found[0][0] == found[1][0] == table.seed
    assert torch.equal(found[0][1], found[1][1]), "rows that nobody had written are those of the checkpoint"
    assert torch.equal(table.rows(ids), found[0][1]), "after the run, too"
    torch.manual_seed(5)
    with pytest.raises(UsageError, match=r"rows of the table weight begin as NormalRows\(.*seed=5"):
        offload(given := EmbeddingTable(3000, 48, seed=5), SparseAdam(given.parameters()), config)


@with_disk
def test_a_released_table_says_where_its_rows_are(layout: str, tmp_path: Path) -> None:
    trial = begin(layout, tmp_path, more=DURABLE)
    some_steps(trial, 2)
    run_of(trial).checkpoint()
    run_of(trial).close(restore=False)
    with pytest.raises(StoreClosed, match=r"'deep\.weight' was released .*checkpoint\(\) number 1 left them"):
        trial.model(torch.zeros(1, 1, dtype=torch.int64))
    assert isinstance(trial.model, Clicks)
    assert trial.model.deep.weight.shape == (6000, 48)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: setattr(model, "deep", EmbeddingTable(6000, 48, seed=8)),
            r"rows of the table deep\.weight",
        ),
        (
            lambda model: setattr(model, "deep", EmbeddingTable(7000, 48, seed=7)),
            r"parameter deep\.weight is float32\[7",
        ),
        (
            lambda model: setattr(model, "deep", nn.Embedding(6000, 48)),
            r"deep\.weight is no table, saved was one",
        ),
    ],
    ids=["seed", "rows", "no table"],
)
def test_a_checkpoint_of_another_table_is_refused(
    change: Callable[[Clicks], None], message: str, tmp_path: Path
) -> None:
    first = begin("disk", tmp_path, more=DURABLE)
    some_steps(first, 1)
    run_of(first).checkpoint()
    run_of(first).close(restore=False)
    model, _ = build()
    change(model)
    optimizers = [torch.optim.SGD(model.dense.parameters())]
    with pytest.raises(UsageError, match=message):
        offload(model, optimizers, table_config("disk", tmp_path, {**DURABLE, "offload_cpu_size": "4MB"}))


def test_without_room_for_frames_a_table_is_refused_with_numbers(tmp_path: Path) -> None:
    model, optimizers = build()
    with pytest.raises(CapacityError, match=r"2 tables need at least .* Raise offload_cpu_size"):
        offload(model, optimizers, table_config("disk", tmp_path, {"offload_cpu_size": "150KB"}))
    assert torch.equal(model.deep.rows(torch.arange(3)), build()[0].deep.rows(torch.arange(3)))


def test_a_table_cannot_be_pinned(tmp_path: Path) -> None:
    model, optimizers = build()
    with pytest.raises(UsageError, match=r"'deep\.weight' is a table.*cannot be pinned"):
        offload(model, optimizers, table_config("three", tmp_path), pinned=[r"deep"])


def test_two_parameters_with_the_rows_of_one_table_are_refused(tmp_path: Path) -> None:
    model, optimizers = build()
    other = EmbeddingTable(6000, 48)
    other.weight = TableWeight(model.deep.weight.row_store)
    model.other = other
    with pytest.raises(UsageError, match=r"'deep\.weight' and 'other\.weight'"):
        offload(model, optimizers, table_config("three", tmp_path))


def test_without_a_disk_a_full_host_is_named(tmp_path: Path) -> None:
    trial = begin("device", tmp_path, more={"offload_cpu_size": "400KB"})
    with run_of(trial), pytest.raises(CapacityError, match=r"deep.*offload_cpu_size"):
        some_steps(trial, 60)


def test_what_a_lookup_makes_on_the_host_crosses_and_is_nothing_of_the_device(tmp_path: Path) -> None:
    trial = begin("three", tmp_path)
    with run_of(trial) as run, DeviceBudget("256KB", mixing="raise"):
        before = run.stats().traffic
        some_steps(trial, 2)
        after = run.stats().traffic
    ids, rows = 2 * 16 * 8 * 8, 2 * 16 * (8 * 48 + 1) * 4  # of two lookups in each of two steps
    up, down = ("host", "device"), ("device", "host")
    crossed = {way: after[way].nbytes - (before[way].nbytes if way in before else 0) for way in (up, down)}
    assert crossed[up] >= rows
    assert crossed[down] >= 2 * ids + rows


def test_a_table_without_a_cache_looks_up_on_the_host_whatever_a_placement_says(tmp_path: Path) -> None:
    model, optimizers = build()
    with offload(model, optimizers, table_config("three", tmp_path), placement={"wide": "device"}) as run:
        placed = run._session.placed  # type: ignore[union-attr]
        assert placed.is_on_host(model.deep)
        assert placed.is_on_host(model.wide)


@every_layout
def test_a_saved_run_is_loaded_with_its_tables(layout: str, tmp_path: Path) -> None:
    expected = plain(5)
    first = begin(layout, tmp_path / "first")
    torch.manual_seed(1)
    some_steps(first, 3)
    with run_of(first) as run:
        run.save(tmp_path / "saved")
    state = torch.get_rng_state()
    second = begin(layout, tmp_path / "second")
    some_steps(second, 1)  # what there is, is written over
    torch.set_rng_state(state)
    second.logged.clear()
    with run_of(second) as run:
        run.load(tmp_path / "saved")
        some_steps(second, 2)
    assert_alike(expected, second)


def test_a_checkpoint_of_a_table_is_saved_and_loaded_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = begin("disk", tmp_path)
    some_steps(trial, 2)

    def refuse(*_: object) -> Never:
        raise AssertionError("the whole table is made")

    monkeypatch.setattr(TableEntry, "dense", refuse)
    with run_of(trial) as run:
        run.save(tmp_path / "saved")
        run.load(tmp_path / "saved")


@every_layout
def test_a_table_has_the_columns_of_its_first_step_before_it_is_large(layout: str, tmp_path: Path) -> None:
    trial = begin(layout, tmp_path)
    table = trial.model.get_submodule("deep")
    assert isinstance(table, EmbeddingTable)
    before = table.weight.row_store.columns
    some_steps(trial, 1)
    assert table.weight.row_store.columns == before
    assert len(before) > 1
    run_of(trial).close()


@pytest.mark.parametrize("kind", ["LazyAdam", "FTRL", "SparseAdam", "Adagrad"])
def test_a_durable_run_is_told_who_keeps_state_of_its_tables(kind: str, tmp_path: Path) -> None:
    model, (stranger, dense) = build(kind)
    with pytest.raises(UsageError, match=rf"'wide\.weight' is stepped by {kind}, which .* not given"):
        offload(model, [dense], table_config("disk", tmp_path, DURABLE))
    loss_of_clicks(model).backward()
    stranger.step()  # nothing has changed
    del stranger
    offload(model, [dense], table_config("disk", tmp_path, DURABLE)).close()


def test_who_comes_to_keep_state_of_a_table_later_is_refused_with_the_checkpoint(tmp_path: Path) -> None:
    model, optimizers = build()
    dense = optimizers.pop()
    optimizers.clear()
    run = offload(model, [dense], table_config("disk", tmp_path, DURABLE))
    with run:
        run.checkpoint()
        stranger = STEPPERS["SparseAdam"]([model.deep.weight])
        loss_of_clicks(model).backward()
        stranger.step()
        with pytest.raises(UsageError, match=r"'deep\.weight' is stepped by SparseAdam"):
            run.checkpoint()
        rows = model.deep.rows(torch.arange(6000))
        del stranger
        run.checkpoint()
        run.close(restore=False)
    again = build()[0]
    with offload(
        again, [torch.optim.Adam(again.dense.parameters())], table_config("disk", tmp_path, DURABLE)
    ):
        assert torch.equal(again.deep.rows(torch.arange(6000)), rows)


@every_layout
def test_an_optimizer_that_a_run_was_not_given_steps_tables_all_the_same(layout: str, tmp_path: Path) -> None:
    expected = plain(4)
    trial = Trial(*build())
    with offload(trial.model, trial.optimizers[1:], table_config(layout, tmp_path)):
        torch.manual_seed(1)
        some_steps(trial, 4)
    assert_alike(expected, trial)


def test_sgd_keeps_nothing_of_a_table_that_a_checkpoint_could_lack(tmp_path: Path) -> None:
    model, optimizers = build("SGD")
    with offload(model, optimizers[1:], table_config("disk", tmp_path, DURABLE)) as run:
        loss_of_clicks(model).backward()
        optimizers[0].step()
        run.checkpoint()
