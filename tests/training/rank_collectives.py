"""What processes send each other when they train data parallel or fully sharded: counted as it happens.

PyTorch's functions are wrapped in the processes themselves; ``DistributedDataParallel`` is asked by a
communication hook, as its reducer calls none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tierstore.training import offload

BUCKET_BYTES = 2**12
STEPS = 2
_CALLED = {
    "all_gather_single": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
}
Sent = list[tuple[str, int]]
"""Collectives in order: the kind, and the bytes of the largest tensor that is given or returned."""


class Block(nn.Module):
    """A layer whose rows no number of processes divides."""

    def __init__(self, width: int, more: int = 3) -> None:
        super().__init__()
        self.wide = nn.Linear(width, width + more)
        self.back = nn.Linear(width + more, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.back(torch.tanh(self.wide(x)))
        return y


class Stack(nn.Module):
    """Layers between a projection and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(7, 18)
        self.layers = nn.ModuleList(Block(18) for _ in range(3))
        self.out = nn.Linear(18, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.out(x)
        return y


@contextmanager
def _noted(sent: Sent) -> Iterator[None]:
    """Note what is sent."""
    real = {name: vars(distributed)[name] for name in _CALLED if name in vars(distributed)}

    def wrapped(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def noting(*given: object, **named: object) -> object:
            tensors = [each for each in (*given, *named.values()) if isinstance(each, torch.Tensor)]
            sent.append((_CALLED[name], max(each.nbytes for each in tensors)))
            return call(*given, **named)

        return noting

    for name, call in real.items():
        setattr(distributed, name, wrapped(name, call))
    try:
        yield
    finally:
        for name, call in real.items():
            setattr(distributed, name, call)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, passes: int, sent: Sent) -> list[Sent]:
    """Return what each step sends."""
    found: list[Sent] = []
    for _ in range(STEPS):
        sent.clear()
        for _ in range(passes):
            model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(list(sent))
    return found


def fully_sharded(rank: int, processes: int, folder: Path) -> object:
    """FSDP2 of each layer and of the model, on the host, with one pass a step and with two."""
    del rank, folder
    found = {}
    for passes in (1, 2):
        sent: Sent = []
        model = Stack()
        mesh = init_device_mesh("cpu", (processes,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with _noted(sent):
            found[str(passes)] = _train(model, torch.optim.Adam(model.parameters()), passes, sent)
    return found


def in_buckets(rank: int, processes: int, folder: Path) -> object:
    """``DistributedDataParallel`` with small buckets."""
    del rank, processes, folder
    sent: Sent = []
    model = DistributedDataParallel(Stack(), bucket_cap_mb=BUCKET_BYTES / 2**20)

    def hook(
        group: distributed.ProcessGroup,
        bucket: distributed.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        sent.append(("all-reduce", bucket.buffer().nbytes))
        return allreduce_hook(group, bucket)

    hook.__annotations__ = {}  # texts are not what it accepts
    model.register_comm_hook(None, hook)
    return _train(model, torch.optim.Adam(model.parameters()), 1, sent)


def one_at_a_time(rank: int, processes: int, folder: Path) -> object:
    """``run.average_gradients()``."""
    del rank, processes
    sent: Sent = []
    model = Stack()
    optimizer = torch.optim.Adam(model.parameters())
    config = {"device": "cpu", "offload_cpu_size": "16MB", "offload_path": str(folder / "run")}
    with offload(model, optimizer, config) as run:
        run.average_gradients()
        with _noted(sent):
            return _train(model, optimizer, 1, sent)
