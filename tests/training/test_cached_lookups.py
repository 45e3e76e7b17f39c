"""Rows that a run keeps on its device, on the accelerator of these tests too: what is looked up is right."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from tests.training.table_models import ROWS, WIDTH, HotClicks, step
from tests.training.twins import Trial, config_of, is_on_accelerator
from tierstore.errors import UsageError
from tierstore.optim import SparseAdam
from tierstore.training import offload

beside_device = pytest.mark.parametrize("layout", ["device", "three"])
ROOM = {"max_device_memory": "64MB", "offload_cpu_size": "4MB", "host_mem_block_size": "1MB"}


@beside_device
@pytest.mark.parametrize("cache_rows", [20, 300])
def test_rows_are_those_that_were_written_last(layout: str, cache_rows: int, tmp_path: Path) -> None:
    """With late copies, too: rows enter, leave and pass by while others are computed with."""
    model = HotClicks(cache_rows, cache_rows)
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    chance = torch.Generator("cpu").manual_seed(3)
    expected = model.deep.rows(torch.arange(ROWS, device="cpu"))
    found, wanted = [], []
    with offload(model, optimizer, config_of(layout, tmp_path, ROOM)) as run, torch.no_grad():
        for _ in range(12):
            ids = torch.randint(0, 900, (40,), generator=chance, device="cpu")
            found.append(model.deep(ids.to(run.store.device)))
            wanted.append(expected[ids])
            written = torch.randperm(900, generator=chance, device="cpu")[:5]
            values = torch.randn(5, WIDTH, generator=chance, device="cpu")
            model.deep.set_rows(written, values)
            expected[written] = values
        cache = run.stats().tables["deep.weight"].cache
        assert cache is not None
        assert cache.hits
        assert cache.evictions
        assert all(each.device.type == run.store.device.type for each in found)
        for each, other in zip(found, wanted, strict=True):
            assert torch.equal(each.cpu(), other)
    assert torch.equal(model.deep.rows(torch.arange(ROWS, device="cpu")), expected)


@beside_device
def test_a_table_is_trained_where_its_rows_are(layout: str, tmp_path: Path) -> None:
    """As one whose rows all pass by, since there is room for one: bit for bit on any device."""
    trials = []
    for cache_rows in (1, 300):
        torch.manual_seed(0)
        model = HotClicks(cache_rows, cache_rows)
        trial = Trial(model, [SparseAdam(model.parameters(), lr=0.05)])
        torch.manual_seed(1)
        path = tmp_path / str(cache_rows)
        with offload(model, trial.optimizers, config_of(layout, path, ROOM)):
            for _ in range(4):
                step(trial)
        trials.append((trial, model.deep.rows(torch.arange(ROWS, device="cpu"))))
    (one, rows), (other, others) = trials
    assert all(map(torch.equal, map(torch.as_tensor, one.logged), map(torch.as_tensor, other.logged)))
    assert torch.equal(rows, others)


@pytest.mark.skipif(not is_on_accelerator, reason="tensors of an emulated device are of the host's type")
@pytest.mark.parametrize("layout", ["device"])
@pytest.mark.parametrize("is_opened", [True, False], ids=["opened", "closed"])
def test_no_gradient_is_added_to_a_table_that_is_elsewhere_by_now(
    is_opened: bool, layout: str, tmp_path: Path
) -> None:
    """Autograd would set it, of the wrong device, and the step raise what nobody understands."""
    model = HotClicks(20, 20)
    optimizer = SparseAdam(model.parameters(), lr=0.05)
    ids = torch.arange(5)
    with contextlib.ExitStack() as stack:
        found = model.deep(ids) if is_opened else None
        run = stack.enter_context(offload(model, optimizer, config_of(layout, tmp_path, ROOM)))
        if found is None:
            found = model.deep(ids)
            run.suspend()
            with pytest.raises(UsageError, match=r"the run is suspended.*run\.resume\(\)"):
                found.sum().backward(retain_graph=True)
            run.resume()
            run.close()
        with pytest.raises(UsageError, match=r"'.*' of .* was looked up on .* and is on .* now"):
            found.sum().backward()
        assert model.deep.weight.grad is None
        model.deep(ids).sum().backward()
        optimizer.step()
