"""Adam of which only touched rows change."""

from __future__ import annotations

import math

import torch

from tierstore.optim.row_optimizer import Parameters, RowOptimizer, State, options, refuse_unless
from tierstore.optim.table_optimizer import Options


class LazyAdam(RowOptimizer):
    r"""Adam whose sparse gradients change the rows that they name, and nothing else.

    Other rows keep their values and their moments, which do not decay.  The bias correction is that of the
    step's number, whenever a row was touched last.  With :math:`g` the sum of a row's gradients:

    .. math::

        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        w &\leftarrow w - \mathrm{lr} \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}
            \cdot \frac{m}{\sqrt v + \epsilon}

    with :math:`\beta_1 m + (1 - \beta_1) g` in the place of the last :math:`m` for ``nesterov``.  ``eps`` is
    not corrected, as in ``torch.optim.SparseAdam`` and in MindSpore's LazyAdam, of which these are the
    formulas; ``torch.optim.Adam`` corrects it.

    Args:
        params: as of any optimizer of PyTorch; dense and real.
        lr: the learning rate.
        betas: decay of the moments, each at least 0 and below 1.
        eps: more than 0.
        weight_decay: times the weights, added to the gradient; once for each time that a sparse one names a
            row.
        nesterov: see above.
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
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        maximize: bool = False,
        loss_scale: float = 1.0,
        target: str | None = None,
    ) -> None:
        defaults: Options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "loss_scale": loss_scale,
        }
        super().__init__(params, options(defaults, target))

    def check(self, group: Options) -> None:
        """See `RowOptimizer.check`."""
        super().check(group)
        for number, beta in enumerate(group["betas"]):
            refuse_unless(0 <= beta < 1, f"betas[{number}]", beta, "at least 0 and below 1")
        refuse_unless(group["eps"] > 0, "eps", group["eps"], "more than 0")

    def initial_state(self, group: Options) -> dict[str, float]:
        """See `TableOptimizer.initial_state`."""
        del group
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def update(
        self, rows: torch.Tensor, kept: State, gradient: torch.Tensor, group: Options, step: float
    ) -> None:
        """See `RowOptimizer.update`."""
        beta1, beta2 = group["betas"]
        mean, square = kept["exp_avg"], kept["exp_avg_sq"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["nesterov"]:
            mean = mean.lerp(gradient, 1 - beta1)
        size = float(group["lr"]) * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        rows.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-size)
