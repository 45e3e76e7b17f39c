"""What is released when a run is left: looks that say where the bytes are, and the way back to them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tierstore as ts
from tests.fault.failing_memory import MemoryOut
from tests.fault.leaving_runs import (
    LAYOUTS,
    WIDTH,
    Scaled,
    Training,
    assert_restored,
    begun,
    every_layout,
)
from tests.fault.test_endings import copies, is_ordinary
from tests.training.twins import same
from tierstore.errors import CapacityError, StoreClosed, UsageError
from tierstore.training import offload


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Tensor]]:
    """Return what there is after so many calls of `Training.step` with two, then one step each."""
    plain = Training()
    return [copies(plain.step(count).everything()) for count in (2, 1, 1)]


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """Leave nothing that dies in the midst of another test."""
    yield
    gc.collect()


# ---------------------------------------------------------------------- what is released


@every_layout
def test_releasing_takes_no_memory(layout: str, tmp_path: Path) -> None:
    _, run = begun(layout, tmp_path)
    with MemoryOut(0) as out:
        run.close(restore=False)
    assert out.allocations == 0


@every_layout
def test_a_released_model_tells_its_looks_and_raises_where_bytes_are_needed(
    layout: str, tmp_path: Path
) -> None:
    training, run = begun(layout, tmp_path)
    looks = [(p.shape, p.dtype, p.stride(), p.device, p.requires_grad) for p in training.model.parameters()]
    run.close(restore=False)
    model, optimizer = training.model, training.optimizer
    found = [(p.shape, p.dtype, p.stride(), p.device, p.requires_grad) for p in model.parameters()]
    assert found == looks
    assert len(list(model.parameters())) == len(looks)
    assert [isinstance(p, nn.Parameter) for p in model.parameters()] == [True] * len(looks)
    assert model.again.weight is model.first.weight
    assert "was released when its run was closed" in repr(model.first.weight)
    assert "Linear" in repr(model)
    entries = model.state_dict()
    assert entries["first.weight"].shape == (WIDTH, WIDTH)
    assert len(optimizer.state_dict()["state"]) == len(optimizer.state)
    uses: list[Callable[[], object]] = [
        lambda: copy.deepcopy(model),
        lambda: model(torch.ones(1, WIDTH)),
        lambda: torch.save(entries, tmp_path / "entries.pt"),
        lambda: model.turned.data,
        entries["first.weight"].numpy,
        model.double,
        optimizer.step,
    ]
    for use in uses:
        with pytest.raises(StoreClosed, match="released"):
            use()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@every_layout
def test_a_released_model_can_be_given_values(layout: str, tmp_path: Path) -> None:
    training, run = begun(layout, tmp_path)
    values = {name: torch.ones_like(each, device="cpu") for name, each in Scaled().state_dict().items()}
    run.close(restore=False)
    training.model.load_state_dict(values)
    training.model.passing = torch.ones(2048)
    for name, parameter in training.model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert same(parameter, values[name]), name
    training.model(torch.ones(1, WIDTH)).sum()


@every_layout
def test_an_alias_of_released_bytes_raises(layout: str, tmp_path: Path) -> None:
    training, run = begun(layout, tmp_path)
    alias = training.model.first.weight.data
    run.close(restore=False)
    assert alias.shape == (WIDTH, WIDTH)
    with pytest.raises(StoreClosed, match="released"):
        alias.sum()


def test_a_graph_of_a_released_run_raises_and_reads_nothing(tmp_path: Path) -> None:
    training, run = begun("disk", tmp_path)
    training.optimizer.zero_grad()
    loss = training.model(torch.ones(1, WIDTH)).sum()
    run.close(restore=False)
    with pytest.raises(StoreClosed):
        loss.backward()


def test_what_was_pointed_at_other_memory_keeps_it(tmp_path: Path) -> None:
    training, run = begun("disk", tmp_path)
    training.model.last.weight.data = torch.full((3, 2 * WIDTH), 7.0)
    run.close(restore=False)
    assert same(training.model.last.weight.detach(), torch.full((3, 2 * WIDTH), 7.0))


def test_what_is_released_names_the_directory_and_the_key_that_hold_it(tmp_path: Path) -> None:
    training, run = begun("durable", tmp_path)
    training.optimizer.zero_grad()
    run.checkpoint()
    training.backward()
    run.close(restore=False)
    with pytest.raises(StoreClosed) as raised:
        training.model.first.weight.sum()
    with ts.Store(run.store.config) as store:
        (key,) = [key for key in store if f"{key!r}" in str(raised.value)]
    assert str(tmp_path / "files") in str(raised.value)
    assert key.startswith("param/")
    assert raised.value.key == "first.weight"
    gradient = training.model.first.weight.grad
    assert gradient is not None
    with pytest.raises(StoreClosed, match="a gradient is no part of a checkpoint"):
        gradient.sum()


def test_nothing_is_flushed_by_either_choice(tmp_path: Path, expected: list[dict[str, Tensor]]) -> None:
    for restore in (True, False):
        path = tmp_path / str(restore)
        training, run = begun("durable", path)
        run.checkpoint()
        training.step(3)
        run.close(restore=restore)
        other = Training()
        with other.offload("durable", path):
            other.backward()
        assert_restored(other, expected[0])


@pytest.mark.parametrize("layout", ["durable", "three"])
def test_a_released_model_is_offloaded_again_and_goes_on_bit_for_bit(
    layout: str, tmp_path: Path, expected: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAYOUTS, layout, {**LAYOUTS[layout], "durable": True})
    training, run = begun(layout, tmp_path)
    identities = [id(parameter) for parameter in training.model.parameters()]
    run.checkpoint({"done": 2})
    training.step(2)  # which is not made durable
    run.close(restore=False)
    training.model.passing = torch.ones(2048)  # which no checkpoint has
    with training.offload(layout, tmp_path) as run:
        assert run.resumed is not None
        assert run.resumed.extra == {"done": 2}
        training.backward()
        training.step()
        run.checkpoint()
        training.step()
    assert [id(parameter) for parameter in training.model.parameters()] == identities
    assert_restored(training, expected[2])


def test_a_released_model_that_does_not_open_is_as_it_was(tmp_path: Path) -> None:
    training, run = begun("durable", tmp_path)
    run.checkpoint()
    run.close(restore=False)
    text = repr(training.model.first.weight)
    with pytest.raises(UsageError, match="it was released when a former run was closed"):
        training.offload("host", tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="passing has no values"):
        training.offload("durable", tmp_path)
    training.model.passing = torch.ones(2048)
    with pytest.raises(CapacityError):
        offload(
            training.model,
            training.optimizer,
            {**LAYOUTS["durable"], "offload_path": str(tmp_path / "files"), "offload_disk_size": "1KB"},
        )
    assert repr(training.model.first.weight) == text
    assert len(training.optimizer.state) == 5
    with training.offload("durable", tmp_path):
        training.step()


def test_weights_fill_a_released_model_and_an_optimizer_without_state(tmp_path: Path) -> None:
    training, run = begun("disk", tmp_path)
    run.save(tmp_path / "saved")
    run.close(restore=False)
    training.model.passing = torch.ones(2048)
    config = {**LAYOUTS["disk"], "offload_path": str(tmp_path / "again")}
    weights = tmp_path / "saved" / "model.safetensors"
    with pytest.raises(UsageError, match="Adam has state without values"):
        offload(training.model, training.optimizer, config, weights=weights)
    fresh = torch.optim.Adam(training.model.parameters(), lr=0.01)
    training.optimizer.zero_grad()
    with offload(training.model, fresh, config, weights=weights):
        training.backward()
        fresh.step()
    assert is_ordinary(training.model.first.weight)
