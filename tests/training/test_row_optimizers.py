"""Our optimizers where an offloaded model has sparse gradients: the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.test_optimizers import KINDS
from tests.training.twins import Optimizer, Trial, assert_same, every_layout
from tierstore.optim import FTRL, SGD, Adagrad, LazyAdam, SparseAdam
from tierstore.training.optimizers.registered import is_known

ROWS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]]
ROWS = {name: kind for name, kind in KINDS.items() if name.startswith(("lazy-adam", "ftrl", "our-sparse"))}
ROWS["our-adagrad"] = Adagrad, {"lr": 1e-2}
ROWS["our-sgd"] = SGD, {"lr": 0.1}


class Tables(nn.Module):
    """Two embeddings with sparse gradients, one of bags, below a dense net."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(300, 16, sparse=True)
        self.bags = nn.EmbeddingBag(200, 16, sparse=True, mode="sum")
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ``(batch, 6)`` ids below 200."""
        return torch.as_tensor(self.head(torch.cat([self.words(ids[:, 0]), self.bags(ids)], dim=1)))


def _train(trial: Trial) -> None:
    chance = torch.Generator().manual_seed(7)
    for _ in range(4):
        ids = torch.randint(0, 200, (8, 6), generator=chance).square() % 200
        loss = trial.model(ids.to(next(trial.model.parameters()).device)).square().mean()
        loss.backward()
        trial.log(loss)
        for optimizer in trial.optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # PyTorch's own Adagrad
@every_layout
@pytest.mark.parametrize("kind", ROWS)
def test_sparse_gradients_beside_another_optimizer(layout: str, kind: str, tmp_path: Path) -> None:
    make, options = ROWS[kind]

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Tables()
        tables = [model.words.weight, model.bags.weight]
        return model, [make(tables, **options), torch.optim.Adam(model.head.parameters(), lr=1e-2)]

    assert_same(build, _train, layout, tmp_path)


class More(LazyAdam):
    """May do more in its step."""


def test_they_are_stepped_by_bundle_and_their_subclasses_are_not() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    assert all(is_known(kind(parameters)) for kind in (FTRL, SGD, Adagrad, LazyAdam, SparseAdam))
    assert not is_known(More(parameters))
