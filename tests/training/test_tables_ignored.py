"""A table beside an offloaded net, left out of the run, with one optimizer for both: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tierstore import OffloadConfig
from tierstore.nn import EmbeddingTable
from tierstore.optim import FTRL, SGD, Adagrad, LazyAdam, SparseAdam
from tierstore.training import offload

ROWS, WIDTH = 100, 8
KINDS: list[Callable[..., Any]] = [FTRL, SGD, Adagrad, LazyAdam, SparseAdam]


class Recommender(nn.Module):
    """Bags of ids, and a net over what they come to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.deep = EmbeddingTable(ROWS, WIDTH, mode="sum")
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Map ``(batch, n)`` ids."""
        return torch.as_tensor(self.net(self.deep(ids)))


def _train(model: nn.Module, optimizer: Any) -> list[float]:  # noqa: ANN401
    chance, losses = torch.Generator().manual_seed(7), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randint(0, ROWS, (6, 3), generator=chance)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_table_that_is_ignored_is_stepped_as_without_a_run(
    kind: Callable[..., Any], tmp_path: Path
) -> None:
    plain, model = Recommender(), Recommender()
    expected = _train(plain, kind(plain.parameters(), lr=0.1))
    optimizer = kind(model.parameters(), lr=0.1)
    with offload(model, optimizer, OffloadConfig(offload_path=str(tmp_path)), ignored=[r"deep\.weight"]):
        assert _train(model, optimizer) == expected
    every = torch.arange(ROWS)
    assert torch.equal(model.deep.rows(every), plain.deep.rows(every))
    for found, wanted in zip(model.net.parameters(), plain.net.parameters(), strict=True):
        assert torch.equal(found, wanted)
