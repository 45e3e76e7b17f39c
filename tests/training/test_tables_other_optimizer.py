"""A table whose optimizer is changed: not in the midst of a run, which says so, but between two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.training.twins import config_of
from tierstore.errors import UsageError
from tierstore.nn import EmbeddingTable
from tierstore.optim import Adagrad, SparseAdam
from tierstore.training import offload

IDS = torch.arange(64)


def _table() -> EmbeddingTable:
    return EmbeddingTable(64, 4, seed=1)


def _step(table: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    table((IDS[:6] + number) % 64).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("layout", ["disk", "device", "three"])
def test_a_run_keeps_its_optimizer_and_the_next_one_may_have_another(layout: str, tmp_path: Path) -> None:
    ours, twin = _table(), _table()
    own, its = SparseAdam(ours.parameters(), lr=0.1), SparseAdam(twin.parameters(), lr=0.1)
    with offload(ours, own, config_of(layout, tmp_path)):
        _step(ours, own, 0)
        with pytest.raises(
            UsageError, match=r"A run that was given it has it as long as anybody has the run"
        ):
            Adagrad(ours.parameters(), lr=0.1)
        _step(ours, own, 1)
    for number in range(2):
        _step(twin, its, number)
    assert torch.equal(ours(IDS), twin(IDS))
    del own, its
    other, its_other = Adagrad(ours.parameters(), lr=0.1), Adagrad(twin.parameters(), lr=0.1)
    with offload(ours, other, config_of(layout, tmp_path / "next")):
        _step(ours, other, 2)
    _step(twin, its_other, 2)
    assert torch.equal(ours(IDS), twin(IDS))
    expected = its_other.state[twin.weight]["sum"]
    assert torch.equal(other.state[ours.weight]["sum"][IDS], expected[IDS])
