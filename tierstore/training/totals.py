"""Whether the tiers together can hold what training makes: known before anything is moved.

Only what is certain is counted: every byte of parameters and buffers, once; state as it is, or as optimizers
of ``torch.optim`` make it in their first step; and no gradients, which may leave before others come.  Tiers
round up, and have to copy: what is not refused here may find no room all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tierstore.errors import CapacityError
from tierstore.store import Store
from tierstore.training.bundles.bundle_tiers import setting_of
from tierstore.training.bundles.grouping import Content, Group
from tierstore.training.bundles.layout import lay_out
from tierstore.training.optimizers.adapters import adapter_of
from tierstore.units import format_bytes


def require_together(
    groups: Sequence[Group],
    optimizers: Sequence[torch.optim.Optimizer],
    store: Store,
    *,
    has_state: bool,
) -> None:
    """Raise if parameters, buffers and state are more than all tiers.

    A tier that packs may hold more than its quota: then nothing is known.

    Args:
        groups: of parameters and buffers.
        optimizers: that train them.
        store: where to.
        has_state: whether state comes from elsewhere than what optimizers have or make.

    Raises:
        CapacityError: with a table of what is needed, and what there is.
    """
    tiers = store.stats().tiers
    if any(tier.codec is not None for tier in tiers.values()):
        return
    parameters = [group for group in groups if group.content is Content.PARAMETERS]
    needed = {
        "parameters": sum(map(_nbytes, parameters)),
        "buffers": sum(_nbytes(group) for group in groups if group.content is not Content.PARAMETERS),
        "optimizer state": 0 if has_state else _state_bytes(parameters, optimizers),
    }
    there = {f"{setting_of(name)} ({name})": tier.capacity_bytes for name, tier in tiers.items()}
    needed_bytes, room_bytes = sum(needed.values()), sum(there.values())
    if needed_bytes <= room_bytes:
        return
    raise CapacityError(
        f"training needs {format_bytes(needed_bytes)} beside gradients and activations "
        f"({_table(needed)}), and all tiers together are {format_bytes(room_bytes)} ({_table(there)}). Raise "
        f"one of them by {format_bytes(needed_bytes - room_bytes)} or more. State is counted for every "
        "parameter with requires_grad that an optimizer has.",
        needed_bytes=needed_bytes,
        free_bytes=room_bytes,
    )


def _nbytes(group: Group) -> int:
    _, nbytes = lay_out(zip(group.names, group.tensors, strict=True))
    return nbytes


def _state_bytes(groups: Sequence[Group], optimizers: Sequence[torch.optim.Optimizer]) -> int:
    nbytes = 0
    for index, optimizer in enumerate(optimizers):
        adapter = adapter_of(optimizer)
        options = {each: options for options in optimizer.param_groups for each in options["params"]}
        own = [each for group in groups if group.optimizer == index for each in group.tensors]
        trained = [each for each in own if each.requires_grad and each in options]
        nbytes += sum(adapter.certain_bytes(optimizer, each, options[each]) for each in trained)
    return nbytes


def _table(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes)
