"""Values for what a run's store does not have: tensors that stay ordinary, and tables."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch

from tierstore.nn.table_weight import TableWeight
from tierstore.planning.homes import CPU
from tierstore.store import Store
from tierstore.training.checkpoints.resumed import ResumedCheckpoint
from tierstore.training.checkpoints.weights import Weights
from tierstore.training.modules.adopter import give_values
from tierstore.training.tables.run_tables import RunTables


def give_ignored(
    ignored: Mapping[torch.Tensor, str],
    source: Weights | ResumedCheckpoint,
    tables: RunTables,
    on_host: Container[torch.Tensor],
    store: Store,
) -> None:
    """Give what is in no bundle its values; tables have those of a checkpoint already.

    Args:
        ignored: which, with their names.
        source: where values come from.
        tables: of the run.
        on_host: what is used on the host, beside a device.
        store: of the run, on whose device the rest is.
    """
    for each, name in ignored.items():
        if each not in tables:
            device = torch.device(CPU) if each in on_host else store.device
            give_values(each, source.read(name), device)
        elif isinstance(source, Weights) and isinstance(each, TableWeight):
            source.load_table(each, name)
