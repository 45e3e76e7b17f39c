"""Over which processes ``fully_shard`` spreads a model, and which part each has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def _line(model: nn.Module, processes: int) -> dict[str, Any]:
    """All processes have a part each."""
    del model
    return {"mesh": init_device_mesh("cpu", (processes,))}


def _by_columns_where_even(model: nn.Module, processes: int) -> dict[str, Any]:
    """The same, and parts are columns where these can be divided evenly."""

    def placed(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % processes == 0 else None

    return {**_line(model, processes), "shard_placement_fn": placed}


def _replicas(model: nn.Module, processes: int) -> dict[str, Any]:
    """Half of the processes have a part each, which the others have, too."""
    del model
    return {"mesh": init_device_mesh("cpu", (2, processes // 2), mesh_dim_names=("replica", "part"))}


def _tensor_parallel(model: nn.Module, processes: int) -> dict[str, Any]:
    """Two processes compute each layer together; of what each has of it, the others have parts."""
    mesh = init_device_mesh("cpu", (processes // 2, 2), mesh_dim_names=("data", "tensor"))
    plan: dict[str, Any] = {
        "into": ColwiseParallel(output_layouts=Replicate()),
        "out": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(len(model.get_submodule("layers")._modules)):
        plan |= {f"layers.{number}.wide": ColwiseParallel(), f"layers.{number}.back": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    return {"mesh": mesh["data"]}


MESHES: Mapping[str, Callable[[nn.Module, int], dict[str, Any]]] = {
    "line": _line,
    "columns": _by_columns_where_even,
    "replicas": _replicas,
    "tensor parallel": _tensor_parallel,
}
"""Prepares a model, and says what ``fully_shard`` is told of the mesh."""
