"""How a checkpoint gets at the bytes of an offloaded model: a bundle at a time, in windows of the run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tierstore.errors import UsageError
from tierstore.training.bundles.bindings import Bindings
from tierstore.training.bundles.layout import fill
from tierstore.training.bundles.tensor_slots import memory_of
from tierstore.training.checkpoints.files import BundleAccess
from tierstore.training.faults import guard
from tierstore.training.optimizers.adapters import Taken
from tierstore.training.optimizers.state_dicts import StateDicts
from tierstore.training.optimizers.step_units import Steps
from tierstore.training.tables.run_tables import RunTables


def access_to(
    parts: Sequence[Sequence[torch.Tensor]],
    state_dicts: StateDicts,
    bindings: Bindings,
    steps: Sequence[Steps],
    tables: RunTables,
) -> BundleAccess:
    """Return how a checkpoint reads and writes.

    Args:
        parts: tensors that are read and written together.
        state_dicts: of the run, which read.
        bindings: of the model.
        steps: of its optimizers, by number.
        tables: of the run.

    Raises:
        UsageError: processes have parts of tensors: one would write its own alone.
    """
    if any(memory_of(tensor) is not tensor for part in parts for tensor in part):
        raise UsageError(
            "the model is sharded by fully_shard: run.save and run.load know the parts of one process alone. "
            "Use torch.distributed.checkpoint, or run.checkpoint() with durable=True."
        )

    def read(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [state_dicts.read(tensor) for tensor in tensors]

    def write(part: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        guarded_tensor = guard.guarded_tensor_of(part[0])
        needed = [] if guarded_tensor is None else [guarded_tensor.binding]
        with bindings.window(needed), torch.no_grad():
            for binding in needed:
                binding.is_dirty = True
            for parameter, value in zip(part, values, strict=True):
                fill(memory_of(parameter), value)

    def settle(index: int, part: Sequence[torch.Tensor]) -> None:
        guarded_tensor = guard.guarded_tensor_of(part[0])
        if guarded_tensor is not None:
            steps[index].state.take_in_loaded(guarded_tensor.binding, Taken.ALL)

    return BundleAccess(parts, read, write, settle, tables.saving)
