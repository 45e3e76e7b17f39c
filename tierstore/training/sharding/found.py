"""Which modules ``fully_shard`` was applied to, and which parameters each group of FSDP gathers together.

Importing FSDP takes a second: nothing here does.  A model in which it is has imported it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from tierstore.errors import UsageError

_KIND = "FSDPModule"


class GatheredGroup(NamedTuple):
    """Parameters that FSDP gathers in one message.

    Attributes:
        name: of the first module that it is for.
        params: what FSDP knows of each parameter (``FSDPParam``), in its order.
    """

    name: str
    params: tuple[Any, ...]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Return the sharded parameters."""
        return [each.sharded_param for each in self.params]


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to a module of the model."""
    return next(sharded_modules(model), None) is not None


def sharded_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that ``fully_shard`` was applied to, with their names."""
    for name, module in model.named_modules():
        if any(kind.__name__ == _KIND for kind in type(module).__mro__):
            yield name, module


def groups_in(model: nn.Module) -> list[GatheredGroup]:
    """Return the groups of a model, in the order of its modules; several modules may have one together."""
    found: dict[int, GatheredGroup] = {}
    for name, module in sharded_modules(model):
        for group in param_groups_of(module._get_fsdp_state()):  # noqa: SLF001 - FSDP has no function for it
            found.setdefault(id(group), GatheredGroup(name or "the model", tuple(group.fsdp_params)))
    return list(found.values())


def param_groups_of(state: Any) -> list[Any]:  # noqa: ANN401 - FSDP's own
    """Return the groups of a module's state (``FSDPState``); up to PyTorch 2.11 it has one at most."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    group = state._fsdp_param_group  # noqa: SLF001 - FSDP has no function for it
    return [] if group is None else [group]


def come_to_rest(model: nn.Module) -> None:
    """Let the model have its shards, and not what was gathered of them: that is FSDP's alone.

    Raises:
        UsageError: the model runs just now.
    """
    for _, module in sharded_modules(model):
        module.reshard()
    own = set(model.parameters())
    if any(each not in own for group in groups_in(model) for each in group.parameters):
        raise UsageError(
            "the model runs: FSDP has gathered parameters of it. Call offload(model, ...) between passes."
        )
