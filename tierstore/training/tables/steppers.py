"""Who steps tables: a checkpoint has the state of the run's optimizers, and of no others."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from tierstore.errors import UsageError
from tierstore.nn.table_weight import TableWeight
from tierstore.optim.table_optimizer import TableOptimizer
from tierstore.training.tables.found_tables import Tables


def refuse_strangers(tables: Tables, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise if an optimizer that is none of the run's keeps state of a table.

    Whoever goes on from a checkpoint would find rows without it, and begin with new state, unseen.

    Args:
        tables: of the model.
        optimizers: the run's.

    Raises:
        UsageError: there is one; it names the first table, and what to do.
    """
    if any(_stranger_of(weight, optimizers) is not None for weight in tables):
        gc.collect()  # one that is in a circle of references stays until then
    for weight, name in tables.items():
        stranger = _stranger_of(weight, optimizers)
        if stranger is not None:
            kind = type(stranger).__name__
            raise UsageError(
                f"the table {name!r} is stepped by {kind}, which offload(...) was not given: a checkpoint "
                "would not have what it keeps of the rows, and training would not go on as it was. Give it "
                f"with the others, as in offload(model, [..., the {kind}], config), or let go of it.",
                key=name,
            )


def _stranger_of(weight: TableWeight, optimizers: Sequence[torch.optim.Optimizer]) -> TableOptimizer | None:
    """Return who keeps state of a table, if that is no optimizer of the run."""
    other = None if weight.stepped_by is None else weight.stepped_by()
    if not isinstance(other, TableOptimizer) or any(other is each for each in optimizers):
        return None
    groups = [group for group in other.param_groups if any(each is weight for each in group["params"])]
    return other if any(other.initial_state(group) for group in groups) else None
