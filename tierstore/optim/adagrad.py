"""PyTorch's Adagrad, which steps tables as well."""

from __future__ import annotations

import torch

from tierstore.nn.table_weight import TableWeight
from tierstore.optim.beside_tables import BesideTables
from tierstore.optim.row_optimizer import Parameters
from tierstore.optim.table_optimizer import Cells, Options, change_rows, rate_of
from tierstore.optim.touched_rows import TouchedRows
from tierstore.tables import ROWS


class Adagrad(BesideTables, torch.optim.Adagrad):
    """``torch.optim.Adagrad``, bit for bit, for tables and other parameters.

    Args:
        params: as of any optimizer of PyTorch.
        lr: the learning rate, at least 0.
        lr_decay: at least 0.
        weight_decay: of parameters that are no tables; PyTorch's refuses it for sparse gradients.
        initial_accumulator_value: what the sum of squares begins with, at least 0.
        eps: at least 0.
        foreach: of parameters that are no tables, as PyTorch's.
        maximize: climb instead of descending.
        differentiable: as ``foreach``.
        fused: as ``foreach``.
        target: ``"cpu"`` or ``"device"``: where it steps, in a run; ``None``: as the run says.

    Raises:
        ValueError: an option is out of its range, or is not for tables and there is one in its group.
        TypeError: ``target`` is no text.
        UsageError: another optimizer steps a table.
    """

    theirs = torch.optim.Adagrad
    not_for_tables = ("weight_decay", "differentiable", "fused")

    def __init__(  # noqa: PLR0913 - PyTorch's
        self,
        params: Parameters,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        target: str | None = None,
    ) -> None:
        with self.tables_kept_back():  # PyTorch's makes dense state of all parameters
            super().__init__(
                params,
                lr,
                lr_decay,
                weight_decay,
                initial_accumulator_value,
                eps,
                foreach,
                maximize=maximize,
                differentiable=differentiable,
                fused=fused,
            )
        self.take_target(target)

    def initial_state(self, group: Options) -> dict[str, float]:
        """See `TableOptimizer.initial_state`: PyTorch's does not ask a group what it begins with."""
        del group
        return {"sum": float(self.defaults["initial_accumulator_value"])}

    def step_table(self, weight: TableWeight, gradient: torch.Tensor, group: Options) -> None:
        """See `BesideTables.step_table`."""
        state = self.state_of_table(weight, group)
        size = float(-(rate_of(group) / (1 + float(state["step"]) * group["lr_decay"])))

        def change(cells: Cells) -> None:
            cells["sum"].addcmul_(gradient, gradient)
            cells[ROWS].addcdiv_(gradient, cells["sum"].sqrt().add_(group["eps"]), value=size)

        def change_some(cells: Cells) -> None:
            cells["sum"].add_(values.pow(2))
            scaled = values / cells["sum"].sqrt().add_(group["eps"])
            everyone = torch.arange(len(values), device=values.device)[None]
            # A factor goes through the same routine as PyTorch's: it may round once or twice.
            cells[ROWS].add_(
                torch.sparse_coo_tensor(
                    everyone, scaled, scaled.shape, device=values.device, check_invariants=False
                ),
                alpha=size,
            )

        touched = TouchedRows.of(gradient, weight.known_repeats)
        values = touched.gradient
        change_rows(weight, touched.numbers, [ROWS, "sum"], change_some if gradient.is_sparse else change)
        state["step"] += 1
