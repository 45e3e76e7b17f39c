"""One process of a tensor-parallel model that is recomputed; `test_recompute_collectives` starts several.

``python -m tests.training.tensor_parallel_worker RANK PROCESSES FOLDER`` writes what it found to ``FOLDER``.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.training.twins import same
from tierstore.training import recompute
from tierstore.training.pytorch.saved_tensor_hooks import is_input_of_checkpoint

DIM, HIDDEN, BATCH, COUNT = 32, 48, 67, 3  # an input is 8,576 bytes: three processes cannot share it evenly


class Layer(nn.Module):
    """Two products, the weights of which are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        """Transform ``(batch, DIM)``."""
        output: Tensor = torch.tanh(x) + scale * self.w2(torch.sigmoid(self.w1(self.norm(x))))
        return output


class Model(nn.Module):
    """Layers, the inputs of which are alike in all processes, or not.

    Args:
        kind: how the layers get them: "alike"; "placed", as DTensors that say so; "transposed"; or
            "different" in each process, as with sequence parallelism.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(COUNT))

    def replicated(self) -> list[nn.Module]:
        """Return the modules whose parameters are alike in all processes."""
        return [self.first, *(layer.norm for layer in self.layers if isinstance(layer, Layer))]

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, DIM)`` to the same shape."""
        x = self.first(x)
        for layer in self.layers:
            if self.kind == "transposed":
                x = layer(x.t().contiguous().t(), scale=x.new_ones(1))
            else:
                x = layer(x, scale=x.new_ones(1))
        return x


def parallel(kind: str, mesh: DeviceMesh) -> Model:
    """Return a model whose layers' products are sharded over ``mesh``."""
    torch.manual_seed(0)
    model = Model(kind)
    is_placed = kind == "placed"
    plan = {
        "w1": ColwiseParallel(use_local_output=not is_placed),
        "w2": RowwiseParallel(use_local_output=not is_placed),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, dict(plan))
    for module in model.replicated() if is_placed else ():
        distribute_module(module, mesh)
    return model


class Found(NamedTuple):
    """What one step came to.

    Attributes:
        tensors: that have to be the same.
        kept_bytes: what the layers keep of what they were given.
        alive: how many of the layers' own inputs there are after forward.
    """

    tensors: list[Tensor]
    kept_bytes: int
    alive: int


def local(tensor: Tensor) -> Tensor:
    """Return this process's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run(kind: str, **config: object) -> Found:
    """Train a step."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = parallel(kind, mesh)
    seed = distributed.get_rank() if kind == "different" else 9
    x = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(seed))
    if kind == "placed":
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    given: list[weakref.ref[torch.UntypedStorage]] = []
    kept: list[int] = []

    def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        given.append(weakref.ref(local(args[0]).untyped_storage()))

    def pack(tensor: Tensor) -> Tensor:
        if is_input_of_checkpoint(sys._getframe(1)):
            kept.append(local(tensor).nbytes)
        return tensor

    for layer in model.layers:
        layer.register_forward_pre_hook(look)
    with recompute(model, config, layers="layers"):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            loss = model(x).square().mean()
        alive = sum(storage() is not None for storage in given)
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return Found([local(each) for each in (loss.detach(), *gradients) if each is not None], sum(kept), alive)


def main(rank: int, processes: int, folder: Path) -> None:
    """Run each kind plainly, recomputed, and recomputed with slices."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = distributed.FileStore(str(folder / "store"), processes)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    found: dict[str, object] = {}
    for kind in ("alike", "placed", "transposed", "different"):
        plain, whole = run(kind), run(kind, recompute=True)
        sliced = run(kind, recompute=True, recompute_slice_activation=True)
        found[kind] = {
            "is_same": all(
                len(plain.tensors) == len(each.tensors) == 1 + 2 + 6 * COUNT
                and all(map(same, plain.tensors, each.tensors))
                for each in (whole, sliced)
            ),
            "kept_bytes": [whole.kept_bytes, sliced.kept_bytes],
            "alive": [whole.alive, sliced.alive],
        }
    counted = run("alike", recompute=[COUNT], recompute_slice_activation=True)
    found["counted"] = counted.kept_bytes
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    os._exit(0)  # DTensor leaves works behind that nobody waits for, and an ordinary exit may abort over them


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
