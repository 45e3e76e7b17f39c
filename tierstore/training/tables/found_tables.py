"""Which parameters of a model are tables, and what cannot be one."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Mapping, Sequence

import torch
from torch import nn

from tierstore.errors import UsageError
from tierstore.nn import EmbeddingTable
from tierstore.nn.table_weight import TableWeight
from tierstore.planning.homes import CPU
from tierstore.tables import RowStore

Tables = Mapping[TableWeight, str]
"""The tables of a model, with the first name of each."""


def tables_in(model: nn.Module) -> Tables:
    """Return the tables of a model.

    Raises:
        UsageError: two parameters have the same rows.
    """
    found: dict[TableWeight, str] = {}
    owners: dict[RowStore, str] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, TableWeight):
            continue
        other = owners.setdefault(parameter.row_store, name)
        if other != name:
            raise UsageError(
                f"{other!r} and {name!r} are two parameters with the rows of one table.", key=name
            )
        found[parameter] = name
    return found


def refuse_pinned(tables: Tables, pinned: Container[torch.Tensor]) -> None:
    """Refuse tables that are to stay on the device.

    Raises:
        UsageError: it names the first, and says what to do instead.
    """
    for weight, name in tables.items():
        if weight in pinned:
            raise UsageError(
                f"{name!r} is a table, of which a batch's rows are brought, and cannot be pinned: "
                "its rows lie in host memory and on disk.",
                key=name,
            )


def refuse_dense_gradients(model: nn.Module) -> None:
    """Refuse tables whose gradients are dense where rows are spread over processes.

    Raises:
        UsageError: it names the first, and says what to do instead.
    """
    for name, module in model.named_modules():
        if isinstance(module, EmbeddingTable) and not module.sparse:
            raise UsageError(
                f"{name!r} has sparse=False: its rows are spread over the processes, and so is its gradient, "
                "which has to be sparse for that. Make it with sparse=True.",
                key=name,
            )


def refuse_norms_of_parts(model: nn.Module) -> None:
    """Refuse to take the norm of gradients where other processes have a part of a table's.

    Raises:
        UsageError: it names the first, and says what to do instead.
    """
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, TableWeight) or parameter.grad is None:
            continue
        if not parameter.access.are_all_here:
            raise UsageError(
                f"the gradient of the table {name!r} is spread over the processes, and none has the norm of "
                "all of it. Clip those of other parameters with torch.nn.utils.clip_grad_norm_, or give the "
                "table max_norm.",
                key=name,
            )


Matches = Callable[[Sequence[str]], bool]


def lookups_on_host(model: nn.Module) -> dict[str, tuple[Matches, str]]:
    """Return patterns that let tables compute on the host, where their rows are.

    Those that keep no rows on the device do, wherever they are to be computed with: what they have looked up
    is brought to the device.  They count before the program's own patterns.

    Args:
        model: whose tables.
    """
    found: dict[str, tuple[Matches, str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, EmbeddingTable) and not module.cache_rows:
            found[f"the table {name}"] = (functools.partial(operator.eq, tuple(name.split("."))), CPU)
    return found
