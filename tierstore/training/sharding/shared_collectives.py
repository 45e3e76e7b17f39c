"""Lets FSDP gather shards and reduce gradients in memory that the processes of one machine share."""

from __future__ import annotations

from typing import Any

from torch import distributed, nn

from tierstore.planning.homes import CPU
from tierstore.torch_private import fsdp_own_gather, fsdp_own_reduction
from tierstore.training.sharding.found import param_groups_of, sharded_modules
from tierstore.training.sharding.shared_gathers import SharedGather
from tierstore.training.sharding.shared_reductions import SharedReduction, adds_as_gloo_does


class SharedCollectives:
    """Has FSDP use shared memory for a model's shards, where the CPU computes; to be removed in the end.

    Modules for which somebody has set another way keep that.  Those that are sharded otherwise after forward
    (``reshard_after_forward=2``) gather as FSDP does, as they do it in other groups then.

    Args:
        model: that ``fully_shard`` was applied to; all processes have it.
        machine: what tells this process's machine from others.
    """

    def __init__(self, model: nn.Module, machine: str) -> None:
        self._machine = machine
        self._gathers: dict[distributed.ProcessGroup, SharedGather] = {}
        self._reductions: dict[distributed.ProcessGroup, SharedReduction | None] = {}
        self._modules: list[tuple[Any, Any]] = []
        for _, module in sharded_modules(model):
            groups = param_groups_of(module._get_fsdp_state())  # noqa: SLF001 - FSDP has no function for it
            if len(groups) == 1:
                self._share(module, groups[0])

    def _share(self, module: Any, params: Any) -> None:  # noqa: ANN401 - ``FSDPModule``, ``FSDPParamGroup``
        mesh, after = params.mesh_info, params.post_forward_mesh_info
        group = getattr(mesh, "shard_process_group", None)
        if (
            params.device.type != CPU
            or group is None
            or group.size() == 1
            or "cpu:gloo" not in distributed.get_backend_config(group)
        ):
            return
        self._modules.append((module, params))
        # FSDP only sets its ways.  One that is not its own is somebody's, or ours for another module.
        if type(params._all_gather_comm) is fsdp_own_gather() and (after is None or after == mesh):  # noqa: SLF001
            if group not in self._gathers:
                self._gathers[group] = SharedGather(group, self._machine)
            module.set_custom_all_gather(self._gathers[group])
        if type(params._reduce_scatter_comm) is fsdp_own_reduction():  # noqa: SLF001
            if group not in self._reductions:
                adds = adds_as_gloo_does(group)
                self._reductions[group] = SharedReduction(group, self._machine) if adds else None
            if (reduction := self._reductions[group]) is not None:
                module.set_custom_reduce_scatter(reduction)

    def remove(self) -> None:
        """Let FSDP gather and reduce its own way again.  Idempotent."""
        for module, params in self._modules:  # somebody may have set another way since
            if isinstance(params._all_gather_comm, SharedGather):  # noqa: SLF001 - FSDP only sets it
                module.set_custom_all_gather(fsdp_own_gather()())
            if isinstance(params._reduce_scatter_comm, SharedReduction):  # noqa: SLF001 - FSDP only sets it
                module.set_custom_reduce_scatter(fsdp_own_reduction()())
        self._modules.clear()
        self._gathers.clear()
        self._reductions.clear()
