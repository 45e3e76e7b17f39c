"""FTRL-proximal, of which only touched rows change."""

from __future__ import annotations

import torch

from tierstore.optim.row_optimizer import Parameters, RowOptimizer, State, options, refuse_unless
from tierstore.optim.table_optimizer import Options


class FTRL(RowOptimizer):
    r"""Follow the regularised leader, with L1 and L2, for each coordinate: sparse weights of linear models.

    With :math:`g` the sum of a row's gradients, and :math:`p` the ``lr_power``:

    .. math::

        n' &= n + g^2 \\
        z &\leftarrow z + g - \frac{n'^{-p} - n^{-p}}{\mathrm{lr}} w \\
        w &\leftarrow \begin{cases}
            \dfrac{\operatorname{sign}(z)\, l_1 - z}{n'^{-p} / \mathrm{lr} + 2 l_2} & \text{if } |z| > l_1 \\
            0 & \text{otherwise}
        \end{cases}

    (McMahan et al., Ad Click Prediction: a View from the Trenches, 2013; MindSpore's FTRL computes the same.)
    A dense gradient changes every element: one that never had a gradient becomes 0.

    Args:
        params: as of any optimizer of PyTorch; dense and real.
        lr: the learning rate, more than 0.
        lr_power: at most 0; -0.5 is the square root of the paper.
        l1: at least 0.
        l2: at least 0.
        initial_accumulator_value: what :math:`n` begins with, at least 0.
        weight_decay: times the weights, added to the gradient; once for each time that a sparse one names a
            row.
        maximize: climb instead of descending.
        loss_scale: what the loss was multiplied by: gradients are divided by it first; more than 0.
        target: ``"cpu"`` or ``"device"``: where it steps, in a run; ``None``: as the run says.

    Raises:
        ValueError: an option is out of its range, or a parameter is complex or sparse.
        TypeError: ``target`` is no text.
        UsageError: another optimizer steps a table.
    """

    def __init__(  # noqa: PLR0913 - each by its name
        self,
        params: Parameters,
        lr: float = 1e-3,
        lr_power: float = -0.5,
        l1: float = 0.0,
        l2: float = 0.0,
        initial_accumulator_value: float = 0.1,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        loss_scale: float = 1.0,
        target: str | None = None,
    ) -> None:
        defaults: Options = {
            "lr": lr,
            "lr_power": lr_power,
            "l1": l1,
            "l2": l2,
            "initial_accumulator_value": initial_accumulator_value,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "loss_scale": loss_scale,
        }
        super().__init__(params, options(defaults, target))

    def check(self, group: Options) -> None:
        """See `RowOptimizer.check`."""
        super().check(group)
        refuse_unless(bool(group["lr"] > 0), "lr", group["lr"], "more than 0")
        refuse_unless(group["lr_power"] <= 0, "lr_power", group["lr_power"], "at most 0")
        for name in ("l1", "l2", "initial_accumulator_value"):
            refuse_unless(group[name] >= 0, name, group[name], "at least 0")

    def initial_state(self, group: Options) -> dict[str, float]:
        """See `TableOptimizer.initial_state`."""
        return {"accumulator": float(group["initial_accumulator_value"]), "linear": 0.0}

    def update(
        self, rows: torch.Tensor, kept: State, gradient: torch.Tensor, group: Options, step: float
    ) -> None:
        """See `RowOptimizer.update`."""
        del step
        power, lr, l1 = -group["lr_power"], float(group["lr"]), group["l1"]
        accumulator, linear = kept["accumulator"], kept["linear"]
        before = accumulator.pow(power)
        after = accumulator.addcmul_(gradient, gradient).pow(power)
        linear.add_(gradient).addcmul_(before.sub_(after), rows, value=1 / lr)
        shrunk = linear.sign().mul_(l1).sub_(linear).div_(after.div_(lr).add_(2 * group["l2"]))
        rows.copy_(shrunk.where(linear.abs() > l1, torch.zeros_like(shrunk)))
