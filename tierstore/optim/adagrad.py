"""PyTorch's Adagrad, which steps tables as well."""

from __future__ import annotations

from typing import Final

import torch

from tierstore.nn.table_weight import TableWeight
from tierstore.optim.beside_tables import BesideTables
from tierstore.optim.row_optimizer import Parameters
from tierstore.optim.table_optimizer import Cells, Options, change_rows, rate_of
from tierstore.optim.touched_rows import TouchedRows
from tierstore.tables import ROWS

_WHOLE_WIDTH: Final = 64
"""Elements of which vectorised routines leave no remainder."""
_ROWS_AT_ONCE: Final = 16


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
            squares = values.pow(2)
            cells["sum"].add_(squares)
            scaled = torch.sqrt(cells["sum"], out=squares).add_(group["eps"])
            torch.div(values, scaled, out=scaled)
            _add_as_sparse(cells[ROWS], scaled, size)

        touched = TouchedRows.of(gradient, weight.known_repeats)
        values = touched.gradient
        change_rows(weight, touched.numbers, [ROWS, "sum"], change_some if gradient.is_sparse else change)
        state["step"] += 1


def _add_as_sparse(rows: torch.Tensor, values: torch.Tensor, factor: float) -> None:
    """Add a factor times values to rows, by the routine that adds PyTorch's sparse ones.

    It may round a product before it adds it or not, as no other routine has to.  It is called for each row;
    several that leave no remainder of a vector are as one to it.
    """
    at_once = _ROWS_AT_ONCE if rows.is_cpu and rows.shape[1] % _WHOLE_WIDTH == 0 else 1
    until = len(rows) // at_once * at_once
    for part, each in ((slice(0, until), at_once), (slice(until, len(rows)), 1)):
        into, some = (tensor[part].view(-1, each * rows.shape[1]) for tensor in (rows, values))
        if len(into):
            everyone = torch.arange(len(into), device=rows.device)[None]
            into.add_(
                torch.sparse_coo_tensor(
                    everyone, some, some.shape, device=rows.device, check_invariants=False
                ),
                alpha=factor,
            )
