"""Tables whose run was left without bringing them back: what gives them rows again, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.table_models import (
    STEPPERS,
    Clicks,
    assert_alike,
    begin,
    build,
    plain,
    rows_of,
    step,
    table_config,
)
from tests.training.twins import Trial, every_layout
from tierstore.errors import BackendError, StoreClosed, UsageError
from tierstore.formats.safetensors_files import HeaderEntry, TensorFile, write_file
from tierstore.nn import EmbeddingTable
from tierstore.optim import SGD, LazyAdam
from tierstore.training import Offload, offload


def released(layout: str, path: Path) -> tuple[Trial, Clicks]:
    trial = begin(layout, path)
    torch.manual_seed(1)
    for _ in range(2):
        step(trial)
    assert trial.run is not None
    trial.run.close(restore=False)
    assert isinstance(trial.model, Clicks)
    return trial, trial.model


def read(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in state.items()}


@every_layout
def test_a_state_dict_gives_rows_again_and_training_goes_on(layout: str, tmp_path: Path) -> None:
    expected = plain(5)
    twin = plain(2)
    model_state = read(twin.model.state_dict())
    states = [
        {**each.state_dict(), "state": {k: dict(v) for k, v in each.state_dict()["state"].items()}}
        for each in twin.optimizers
    ]
    trial, model = released(layout, tmp_path)
    model.load_state_dict(model_state)
    for optimizer, state in zip(trial.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    for _ in range(3):
        step(trial)
    assert_alike(expected, trial)


def test_a_step_without_the_state_that_was_released_is_refused(tmp_path: Path) -> None:
    state = read(plain(2).model.state_dict())
    trial, model = released("disk", tmp_path)
    model.load_state_dict(state)
    loss = model.deep(torch.arange(4)).sum()
    loss.backward()
    before = rows_of(model)
    with pytest.raises(StoreClosed, match=r"what LazyAdam keeps of the table 'deep\.weight'.* was released"):
        trial.optimizers[0].step()
    assert all(map(torch.equal, rows_of(model), before))
    del trial  # nobody refers to the former one, whose state is gone
    STEPPERS["LazyAdam"]([model.deep.weight]).step()
    assert not torch.equal(rows_of(model)[1], before[1])


def test_files_and_tensors_give_rows_again(tmp_path: Path) -> None:
    twin = plain(2).model
    assert isinstance(twin, Clicks)
    twin.deep.export(tmp_path / "exported")
    _, model = released("disk", tmp_path / "run")
    with pytest.raises(StoreClosed, match="released"):
        model.deep.set_rows(torch.arange(2), torch.zeros(2, 48))  # what others are nobody would know
    with pytest.raises(UsageError, match="holds no shards"):
        model.deep.load(tmp_path)
    with pytest.raises(StoreClosed, match="released"):
        model.deep.rows(torch.arange(2))
    model.deep.load(tmp_path / "exported")
    assert torch.equal(rows_of_table(model.deep), rows_of(twin)[1])
    with torch.no_grad():
        model.wide.weight.copy_(torch.full((6000, 1), 3.0))
    assert rows_of_table(model.wide).eq(3).all()


def rows_of_table(table: torch.nn.Module) -> Tensor:
    found: Tensor = table.rows(torch.arange(6000))  # type: ignore[operator]
    return found


def test_what_is_released_gives_nobody_rows(tmp_path: Path) -> None:
    _, model = released("disk", tmp_path)
    _, other = released("disk", tmp_path / "other")
    with pytest.raises((StoreClosed, RuntimeError), match="released"):
        other.load_state_dict(model.state_dict())
    with pytest.raises(StoreClosed, match="released"):
        other.deep.rows(torch.arange(2))


def _weights(path: Path) -> dict[str, Tensor]:
    made = read(plain(2).model.state_dict())
    write_file(path, [HeaderEntry.of(*each) for each in made.items()], made.values(), {})
    return made


@every_layout
def test_another_run_begins_with_weights(layout: str, tmp_path: Path) -> None:
    expected = _weights(tmp_path / "weights.safetensors")
    trial, model = released(layout, tmp_path / "run")
    del trial
    optimizers = [STEPPERS["SparseAdam"]([model.wide.weight, model.deep.weight])]
    config = table_config(layout, tmp_path / "again")
    with offload(model, optimizers, config, weights=tmp_path / "weights.safetensors"):
        assert torch.equal(rows_of(model)[1], expected["deep.weight"])
        model.deep(torch.arange(4)).sum().backward()
        optimizers[0].step()
    assert not torch.equal(rows_of(model)[1], expected["deep.weight"])


def test_another_run_without_values_is_refused(tmp_path: Path) -> None:
    _, model = released("disk", tmp_path / "run")
    model.dense = build()[0].dense
    with pytest.raises(
        UsageError, match=r"'wide\.weight' cannot be offloaded: it was released when a former"
    ):
        offload(model, None, table_config("disk", tmp_path / "again"))
    with pytest.raises(StoreClosed, match="released"):
        model.wide.rows(torch.arange(2))


def test_a_run_that_could_not_be_opened_leaves_it_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _weights(tmp_path / "weights.safetensors")
    trial, model = released("disk", tmp_path / "run")
    del trial
    read_rows = TensorFile.read_rows

    def fail(self: TensorFile, name: str, begin: int, end: int) -> Tensor:
        if name == "deep.weight":
            raise BackendError("the disk failed")
        return read_rows(self, name, begin, end)

    monkeypatch.setattr(TensorFile, "read_rows", fail)
    with pytest.raises(BackendError, match="the disk failed"):
        offload(
            model, None, table_config("disk", tmp_path / "again"), weights=tmp_path / "weights.safetensors"
        )
    for table in (model.wide, model.deep):
        with pytest.raises(StoreClosed, match=r"was released when its run was closed"):
            table.rows(torch.arange(2))


def test_a_closed_run_has_its_optimizers_still_and_that_is_said(tmp_path: Path) -> None:
    """So that it can be saved: whoever makes another optimizer has to let go of the run."""
    table = EmbeddingTable(100, 4)
    optimizer: SGD | None = SGD(table.parameters(), lr=0.1)
    run: Offload | None = offload(table, optimizer, table_config("host", tmp_path))
    assert run is not None
    run.close()
    optimizer = None
    with pytest.raises(UsageError, match=r"has it as long as anybody has the run.*\(run = None\)"):
        LazyAdam(table.parameters(), lr=0.1)
    run = None
    LazyAdam(table.parameters(), lr=0.1)
