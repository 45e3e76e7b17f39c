"""How much wider the widest layer of a model makes what it is given."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from tierstore.training.budgets.widening import widening_of


class Weight(nn.Module):
    """A layer of somebody's own, with one weight of some shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([], 1),
        ([nn.Linear(4, 4)], 1),
        ([nn.Linear(4, 32)], 8),
        ([nn.Linear(32, 4)], 8),  # of a table that is tied to it nobody knows which way it is used
        ([nn.Linear(4, 8), nn.Embedding(40, 4)], 10),
        ([nn.LayerNorm(64)], 1),
        ([nn.Conv1d(4, 8, 3)], 2),
        ([nn.Conv2d(4, 4, 7)], 1),
        ([nn.ConvTranspose2d(4, 4, 2, stride=2)], 4),
        ([Weight(8, 4, 16)], 32),  # eight experts, each of them given all
        ([Weight(2, 3, 4, 8)], 12),
        ([Weight(4, 0)], 1),
        ([Weight(8)], 1),
    ],
)
def test_the_widest_layer_counts(layers: Sequence[nn.Module], expected: float) -> None:
    model = nn.Sequential(*layers)
    assert widening_of(model, set()) == expected
    assert widening_of(model, set(model.parameters())) <= expected


def test_what_is_elsewhere_makes_nothing() -> None:
    host = nn.Linear(4, 32, bias=False)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), host)
    assert widening_of(model, {host.weight}) == 2
