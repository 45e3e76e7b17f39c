"""PyTorch's SGD, which steps tables as well."""

from __future__ import annotations

import torch

from tierstore.nn.repeats import repeats_of
from tierstore.nn.table_weight import TableWeight
from tierstore.optim.beside_tables import BesideTables
from tierstore.optim.row_optimizer import Parameters
from tierstore.optim.table_optimizer import Cells, Options, change_rows
from tierstore.tables import ROWS


class SGD(BesideTables, torch.optim.SGD):
    """``torch.optim.SGD``, bit for bit, for tables and other parameters.

    Of a table the rows change that its gradient names, occurrence by occurrence, as PyTorch adds sparse ones.
    A table takes neither ``momentum`` nor ``weight_decay``, which would change all others, too.

    Args:
        params: as of any optimizer of PyTorch.
        lr: the learning rate.
        momentum: of parameters that are no tables, as PyTorch's; so are the options that follow.
        dampening: see there.
        weight_decay: see there.
        nesterov: see there.
        maximize: climb instead of descending.
        foreach: see there.
        differentiable: see there.
        fused: see there.
        target: ``"cpu"`` or ``"device"``: where it steps, in a run; ``None``: as the run says.

    Raises:
        ValueError: an option is out of its range, or is not for tables and there is one in its group.
        TypeError: ``target`` is no text.
        UsageError: another optimizer steps a table.
    """

    theirs = torch.optim.SGD
    not_for_tables = ("momentum", "weight_decay", "differentiable", "fused")

    def __init__(  # noqa: PLR0913 - PyTorch's
        self,
        params: Parameters,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        target: str | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        self.take_target(target)

    def initial_state(self, group: Options) -> dict[str, float]:
        """See `TableOptimizer.initial_state`."""
        del group
        return {}

    def step_table(self, weight: TableWeight, gradient: torch.Tensor, group: Options) -> None:
        """See `BesideTables.step_table`."""
        size = -float(group["lr"])
        if not gradient.is_sparse:

            def change(cells: Cells) -> None:
                cells[ROWS].add_(gradient, alpha=size)

            change_rows(weight, None, [ROWS], change)
            return
        repeats = repeats_of(gradient._indices()[0], weight.known_repeats)  # noqa: SLF001 - with repeats
        ids, inverse = repeats.ids, repeats.inverse
        compact = torch.sparse_coo_tensor(
            inverse[None], gradient._values(), (len(ids), weight.shape[1]),  # noqa: SLF001
            device=gradient.device, is_coalesced=gradient.is_coalesced(), check_invariants=False,
        )  # fmt: skip

        def add(cells: Cells) -> None:
            cells[ROWS].add_(compact, alpha=size)

        change_rows(weight, ids, [ROWS], add)
