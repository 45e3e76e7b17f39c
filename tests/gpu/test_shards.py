"""Models that ``fully_shard`` has sharded over GPUs, here one alone (NCCL): bit for bit as without tiers."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from tests.gpu.accelerators import ACCELERATOR
from tierstore.training import offload
from tierstore.units import MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ACCELERATOR.type != "cuda", reason="collectives on the device need NCCL"),
]

WIDTH, LAYERS, STEPS = 256, 6, 4
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl"}
ROOM_BYTES = 12 * MIB  # with their state and gradients, shards are 25 MB
TIERS: dict[str, dict[str, object]] = {
    "all on the device": {"max_device_memory": 512 * MIB, "offload_cpu_size": "64MB", "offload_disk_size": 0},
    "host": {"max_device_memory": ROOM_BYTES, "offload_cpu_size": "64MB", "offload_disk_size": 0},
    "disk": {"max_device_memory": ROOM_BYTES, "offload_cpu_size": "4MB", "offload_disk_size": "256MB"},
}
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class _Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH + 3)
        self.back = nn.Linear(2 * WIDTH + 3, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.back(torch.tanh(self.wide(x)))
        return y


@dataclass(frozen=True)
class ShardedCase:
    """How a model is sharded and trained.

    Attributes:
        optimizer: of its parameters.
        how: more words for ``fully_shard``.
        passes: of which all but the last are not synchronised.
        max_norm: to which gradients are clipped; ``None``: they are not.
        halves: whether what is computed is in bfloat16.
        prefetches: whether each layer gathers the next one ahead.
    """

    optimizer: Optimizer = torch.optim.Adam
    how: dict[str, Any] = field(default_factory=dict)
    passes: int = 1
    max_norm: float | None = None
    halves: bool = False
    prefetches: bool = False


CASES = {
    "plain": ShardedCase(),
    "fused": ShardedCase(optimizer=lambda p: torch.optim.AdamW(p, fused=True)),
    "foreach": ShardedCase(optimizer=lambda p: torch.optim.AdamW(p, foreach=True)),
    "momentum": ShardedCase(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "kept after forward": ShardedCase(how={"reshard_after_forward": False}),
    "accumulated": ShardedCase(passes=3),
    "clipped": ShardedCase(max_norm=0.05),
    "mixed precision": ShardedCase(halves=True),
    "prefetched by FSDP": ShardedCase(prefetches=True),
}


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    """Be a group of one."""
    if ACCELERATOR.type == "cuda":
        torch.cuda.set_device(0)
    backend = BACKENDS.get(ACCELERATOR.type, "gloo")
    distributed.init_process_group(backend, store=vars(distributed)["HashStore"](), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def _sharded(case: ShardedCase, device: torch.device) -> Any:  # noqa: ANN401 - FSDP makes its class
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model: Any = nn.Sequential(*(_Layer() for _ in range(LAYERS))).to(device)
    how: dict[str, Any] = {"mesh": init_device_mesh(device.type, (1,)), **case.how}
    if case.halves:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model, model):
        fully_shard(part, **how)
    if case.prefetches:
        for layer, following in itertools.pairwise(model):
            layer.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([layer])
    return model


def _train(
    model: Any,  # noqa: ANN401 - FSDP makes its class
    optimizer: torch.optim.Optimizer,
    case: ShardedCase,
    device: torch.device,
) -> list[torch.Tensor]:
    found = []
    for step in range(STEPS):
        chance = torch.Generator().manual_seed(step)
        for number in range(case.passes):
            model.set_requires_gradient_sync(number == case.passes - 1)
            loss = model(torch.randn(8, WIDTH, generator=chance).to(device)).float().square().mean()
            loss.backward()
            found.append(loss.detach().cpu())
        if case.max_norm is not None:
            norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
            found.append(norm.full_tensor().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return found


def _left(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = []
    for parameter in model.parameters():
        for each in (parameter, *optimizer.state[parameter].values()):
            shard: Any = each.detach()
            found.append((shard.to_local() if hasattr(shard, "to_local") else shard).cpu().clone())
    return found


def _beside_the_rest(tiers: str) -> dict[str, object]:
    """Let the limit of the device's memory be what the run may have beside what stays, such as cuBLAS's."""
    room: Any = TIERS[tiers]["max_device_memory"]
    return {**TIERS[tiers], "max_device_memory": room + torch.accelerator.memory_allocated()}


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("name", CASES)
def test_shards_of_a_gpu_train_as_without_tiers(name: str, tiers: str, tmp_path: Path) -> None:
    case, device = CASES[name], ACCELERATOR
    plain = _sharded(case, device)
    optimizer = case.optimizer(plain.parameters())
    expected = _train(plain, optimizer, case, device), _left(plain, optimizer)
    del plain, optimizer
    gc.collect()
    config = {"device": device.type, "offload_path": str(tmp_path / "files"), **_beside_the_rest(tiers)}
    model = _sharded(case, device)
    optimizer = case.optimizer(model.parameters())
    with offload(model, optimizer, config) as run:
        losses = _train(model, optimizer, case, device)
        stats = run.stats().store
    for ours, theirs in zip((losses, _left(model, optimizer)), expected, strict=True):
        assert len(ours) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert stats is not None
    if tiers != "all on the device":
        assert sum(each.nbytes for (_, tier), each in stats.traffic.items() if tier == "device") > 0
