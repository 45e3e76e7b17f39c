"""LazyAdam and FTRL against their formulas in float64, a dict of rows, over batches of any rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tierstore.optim import FTRL, LazyAdam
from tierstore.optim.row_optimizer import RowOptimizer

ROWS, COLUMNS = 7, 3
SHAPES = ((ROWS, COLUMNS), (ROWS,), (ROWS, 2, 2))

batches = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=9), min_size=1, max_size=5)
lazy_adam = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-3, 0.1]),
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.0), (0.7, 0.9)]),
        "eps": st.sampled_from([1e-8, 1e-2]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "nesterov": st.booleans(),
        "maximize": st.booleans(),
    }
)
ftrl = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-2, 0.5]),
        "lr_power": st.sampled_from([-0.5, -0.3, 0.0]),
        "l1": st.sampled_from([0.0, 0.3]),
        "l2": st.sampled_from([0.0, 0.2]),
        "initial_accumulator_value": st.sampled_from([0.1, 1.0]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "maximize": st.booleans(),
    }
)


class Rows:
    """What an optimizer should make of a table, row by row."""

    def __init__(self, table: Tensor, options: dict[str, Any]) -> None:
        self.weights = {row: table[row].double() for row in range(len(table))}
        start = options.get("initial_accumulator_value", 0.0)
        self.first = {row: torch.full_like(value, start) for row, value in self.weights.items()}
        self.second = {row: torch.zeros_like(value) for row, value in self.weights.items()}
        self._options = options
        self._steps = 0

    def step(self, index: list[int], values: Tensor) -> None:
        """Take a batch of gradients, each of one row."""
        self._steps += 1
        sign = -1.0 if self._options["maximize"] else 1.0
        for row in set(index):
            named = [place for place, each in enumerate(index) if each == row]
            gradient = sum((values[place].double() * sign for place in named), torch.zeros(()).double())
            gradient = gradient + self._options["weight_decay"] * len(named) * self.weights[row]
            self._update(row, gradient)

    def _update(self, row: int, gradient: Tensor) -> None:
        options = self._options
        weight, first, second = self.weights[row], self.first[row], self.second[row]
        if "betas" in options:
            (beta1, beta2), number = options["betas"], self._steps
            first = self.first[row] = beta1 * first + (1 - beta1) * gradient
            second = self.second[row] = beta2 * second + (1 - beta2) * gradient**2
            mean = beta1 * first + (1 - beta1) * gradient if options["nesterov"] else first
            size = options["lr"] * math.sqrt(1 - beta2**number) / (1 - beta1**number)
            self.weights[row] = weight - size * mean / (second.sqrt() + options["eps"])
            return
        lr, power, l1, l2 = options["lr"], -options["lr_power"], options["l1"], options["l2"]
        grown = self.first[row] = first + gradient**2
        linear = second + gradient - (grown**power - first**power) / lr * weight
        self.second[row] = linear
        solved = (linear.sign() * l1 - linear) / (grown**power / lr + 2 * l2)
        self.weights[row] = torch.where(linear.abs() > l1, solved, torch.zeros_like(solved))


def _train(make: type[RowOptimizer], options: dict[str, Any], batches: list[list[int]], shape: Any) -> None:  # noqa: ANN401
    chance = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=chance))
    before = parameter.detach().clone()
    optimizer = make([parameter], **options)
    model = Rows(before, options)
    for index in batches:
        values = torch.randn(len(index), *shape[1:], dtype=torch.float64, generator=chance)
        parameter.grad = torch.sparse_coo_tensor(
            torch.tensor([index], dtype=torch.int64), values, shape, check_invariants=True
        )
        optimizer.step()
        model.step(index, values)
    torch.testing.assert_close(parameter.detach(), torch.stack(list(model.weights.values())))
    untouched = sorted(set(range(ROWS)) - {row for index in batches for row in index})
    assert torch.equal(parameter.detach()[untouched], before[untouched])


@pytest.mark.parametrize("shape", SHAPES)
@given(options=lazy_adam, batches=batches)
@settings(deadline=None)
def test_lazy_adam_is_its_formula(shape: Any, options: dict[str, Any], batches: list[list[int]]) -> None:  # noqa: ANN401
    _train(LazyAdam, options, batches, shape)


@pytest.mark.parametrize("shape", SHAPES)
@given(options=ftrl, batches=batches)
@settings(deadline=None)
def test_ftrl_is_its_formula(shape: Any, options: dict[str, Any], batches: list[list[int]]) -> None:  # noqa: ANN401
    _train(FTRL, options, batches, shape)
