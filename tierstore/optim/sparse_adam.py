"""PyTorch's SparseAdam, which steps tables as well."""

from __future__ import annotations

import math

import torch

from tierstore.optim.row_optimizer import Parameters, RowOptimizer, State, options, refuse_unless
from tierstore.optim.table_optimizer import Options, rate_of


class SparseAdam(RowOptimizer):
    """``torch.optim.SparseAdam``, bit for bit, for tables and other parameters.

    Its formulas are those of `LazyAdam` without ``nesterov`` and ``weight_decay``; the order of operations is
    PyTorch's.  Dense gradients, which PyTorch's refuses, change every element by the same formulas.

    Args:
        params: as of any optimizer of PyTorch; dense and real.
        lr: the learning rate, more than 0.
        betas: decay of the moments, each at least 0 and below 1.
        eps: more than 0.
        maximize: climb instead of descending.
        target: ``"cpu"`` or ``"device"``: where it steps, in a run; ``None``: as the run says.

    Raises:
        ValueError: an option is out of its range, or a parameter is complex or sparse.
        TypeError: ``target`` is no text.
        UsageError: another optimizer steps a table.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        *,
        target: str | None = None,
    ) -> None:
        defaults: Options = {"lr": lr, "betas": betas, "eps": eps, "maximize": maximize}
        super().__init__(params, options(defaults, target))

    def check(self, group: Options) -> None:
        """See `RowOptimizer.check`."""
        super().check(group)
        refuse_unless(bool(group["lr"] > 0), "lr", group["lr"], "more than 0")
        for number, beta in enumerate(group["betas"]):
            refuse_unless(0 <= beta < 1, f"betas[{number}]", beta, "at least 0 and below 1")
        refuse_unless(group["eps"] > 0, "eps", group["eps"], "more than 0")

    def initial_state(self, group: Options) -> dict[str, float]:
        """See `TableOptimizer.initial_state`."""
        del group
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def first_step(self) -> object:
        """See `TableOptimizer.first_step`: PyTorch's is a number here, so that state dicts fit."""
        return 0

    def update(
        self, rows: torch.Tensor, kept: State, gradient: torch.Tensor, group: Options, step: float
    ) -> None:
        """See `RowOptimizer.update`."""
        beta1, beta2 = group["betas"]
        mean, square = kept["exp_avg"], kept["exp_avg_sq"]
        change = gradient.sub(mean).mul_(1 - beta1)  # one temporary for all: each is as large as the gradient
        mean.add_(change)
        square.add_(torch.pow(gradient, 2, out=change).sub_(square).mul_(1 - beta2))
        lr = rate_of(group, rows.device)
        size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        scale = torch.sqrt(square, out=change).add_(group["eps"])
        rows.add_(torch.div(mean, scale, out=change).mul_(-size))
