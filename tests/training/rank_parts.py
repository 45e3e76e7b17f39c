"""What processes do with models that tensor parallel alone divides: each twice, with tiers and without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from tests.training.rank_shards import WIDTH, Deep, Life, differences, raw
from tests.training.twins import LATE_AND_OVERWRITTEN
from tierstore.errors import UsageError
from tierstore.training import Offload, offload


@dataclass(frozen=True)
class Parts:
    """What is divided, and how it is trained.

    Attributes:
        optimizer: made of the model's parameters.
        tiers: of one process: "host", "disk" or "three".
        is_whole: whether the first and the last layer are divided as well, or ordinary.
        checkpoints: whether layers are computed again in backward; "reentrant" or "anew".
        passes: of a step.
        max_norm: to which gradients are clipped.
        dtype: of the parameters.
        is_frozen: whether the first of the layers is.
        sections: on activations.
    """

    optimizer: type[Any] = torch.optim.AdamW
    tiers: str = "three"
    is_whole: bool = False
    checkpoints: str = ""
    passes: int = 1
    max_norm: float | None = None
    dtype: torch.dtype = torch.float32
    is_frozen: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, object] = field(default_factory=dict)


OF_PARTS: Mapping[str, Parts] = {
    "host": Parts(tiers="host"),
    "disk": Parts(tiers="disk"),
    "three": Parts(),
    "all of it, clipped and accumulated": Parts(is_whole=True, passes=2, max_norm=0.1),
    "momentum": Parts(torch.optim.SGD, options={"lr": 0.1, "momentum": 0.9}),
    "bfloat16": Parts(dtype=torch.bfloat16, tiers="disk"),
    "frozen": Parts(is_frozen=True),
    "checkpoint": Parts(checkpoints="anew"),
    "reentrant checkpoint": Parts(checkpoints="reentrant"),
    "recomputed": Parts(sections={"recompute_config": {"recompute": True}}),
    "swapped": Parts(
        sections={"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [0, 2]}]}}
    ),
}

_TIERS: Mapping[str, Mapping[str, object]] = {
    "host": {"device": "cpu", "offload_cpu_size": "8MB", "offload_disk_size": 0},
    "disk": {"device": "cpu", "offload_cpu_size": "256KB", "offload_disk_size": "32MB"},
    "three": {
        "device": "emulated",
        "max_device_memory": "64KB",
        "offload_cpu_size": "256KB",
        "offload_disk_size": "32MB",
        "device_options": LATE_AND_OVERWRITTEN,
    },
}
"""Of both, but for the device: each one's parts, without state and gradients, are 90 KB."""


class Again(Deep):
    """Layers that are computed again in backward.

    Args:
        is_reentrant: by which kind of ``torch.utils.checkpoint``.
    """

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__(4)
        self._is_reentrant = is_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self._is_reentrant)
        y: torch.Tensor = self.out(x)
        return y


def divide(model: nn.Module, *, is_whole: bool = False) -> None:
    """Let two processes compute each layer together."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    plan: dict[str, Any] = {}
    if is_whole:
        plan |= {name: ColwiseParallel(output_layouts=Replicate()) for name in ("into", "out")}
    for number in range(5):
        plan |= {f"layers.{number}.wide": ColwiseParallel(), f"layers.{number}.back": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def build(case: Parts) -> Life:
    """Return a model that is divided, and its optimizer."""
    torch.manual_seed(0)
    kind = Again(is_reentrant=case.checkpoints == "reentrant") if case.checkpoints else Deep(4)
    model = kind.to(case.dtype)
    model.get_submodule("layers.0").requires_grad_(not case.is_frozen)
    divide(model, is_whole=case.is_whole)
    return Life(model, case.optimizer(model.parameters(), **case.options))


@contextlib.contextmanager
def tiered(life: Life, case: Parts, folder: Path) -> Iterator[Offload]:
    """Offload a life, inside the context."""
    config = {**_TIERS[case.tiers], "offload_path": str(folder / "run")}
    activations = {"layers": "layers"} if case.sections else {}
    document = {"offload_config": config, **case.sections}
    with offload(life.model, life.optimizer, document, **activations) as run:  # type: ignore[arg-type]
        yield run


def train(life: Life, case: Parts, steps: int, first: int = 0) -> None:
    """Make steps, with the same data in both processes."""
    for step in range(first, first + steps):
        for number in range(case.passes):
            generator = torch.Generator().manual_seed(100 * step + number)
            loss = life.model(torch.randn(6, 7, generator=generator).to(case.dtype)).square().mean()
            loss.backward()
            life.losses.append(float(loss.detach()))
        if case.max_norm is not None:
            norm: Any = nn.utils.clip_grad_norm_(life.model.parameters(), case.max_norm)
            life.losses.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        life.optimizer.step()
        life.optimizer.zero_grad()


def parts(rank: int, processes: int, folder: Path) -> object:
    """Every case: what differs from the model without tiers, in the run and in training after it."""
    del processes
    found: dict[str, list[str]] = {}
    for name, case in OF_PARTS.items():
        place = folder / f"{name} {rank}"
        place.mkdir()
        plain, ours = build(case), build(case)
        train(plain, case, 4)
        with tiered(ours, case, place):
            train(ours, case, 3)
            within = [raw(each) for each in ours.model.state_dict().values()]
            train(ours, case, 1, 3)
        found[name] = differences(plain, ours)
        train(plain, case, 1, 4)
        train(ours, case, 1, 4)
        found[name] += [f"after: {each}" for each in differences(plain, ours)]
        if len(within) != len(plain.model.state_dict()):
            found[name].append("state_dict()")
    return found


def parts_saved(rank: int, processes: int, folder: Path) -> object:
    """Save from a run with ``torch.distributed.checkpoint``; say what a model without tiers reads else."""
    del processes
    case = Parts(tiers="disk")
    (place := folder / f"saved {rank}").mkdir()
    life, other = build(case), build(case)
    with tiered(life, case, place) as run:
        train(life, case, 2)
        with run.late_state_dicts():
            state = {"model": life.model.state_dict()}
            save(state, storage_writer=FileSystemWriter(folder / "checkpoint"))
    read = {"model": other.model.state_dict()}
    load(read, checkpoint_id=str(folder / "checkpoint"))
    mine, theirs = life.model.state_dict(), other.model.state_dict()
    return [name for name, each in mine.items() if raw(each) != raw(theirs[name])]


def parts_of_files(rank: int, processes: int, folder: Path) -> object:
    """Let each process read its parts of files of the whole model; say what differs."""
    del processes
    path = folder / f"whole {rank}.safetensors"
    torch.manual_seed(1)
    whole = Deep(4)
    save_file(whole.state_dict(), path)
    divide(whole)
    life = build(Parts())
    config = {**_TIERS["disk"], "offload_path": str(folder / f"read {rank}")}
    with offload(life.model, life.optimizer, config, weights=path):
        pass
    expected = whole.state_dict()
    return [name for name, each in life.model.state_dict().items() if raw(each) != raw(expected[name])]


def parts_refused(rank: int, processes: int, folder: Path) -> object:
    """What cannot be is refused: what is said of each."""
    del processes
    config = {**_TIERS["disk"], "offload_path": str(folder / f"refused {rank}")}

    def opened(life: Life, act: Callable[[Offload], object] = Offload.close, **more: object) -> str:
        try:
            with offload(life.model, life.optimizer, config | more) as run:
                act(run)
        except UsageError as refused:
            return str(refused)
        return ""

    def of(tensor: torch.Tensor) -> Life:
        life = build(Parts())
        life.model.get_submodule("layers.1.wide").weight = nn.Parameter(tensor)
        return Life(life.model, torch.optim.AdamW(life.model.parameters()))

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    plain = torch.zeros(WIDTH + 4, WIDTH)
    summed = DTensor.from_local(plain, mesh, [Partial()], run_check=False)
    spread = distribute_tensor(plain, mesh, [Replicate()])
    return {
        "averaged": opened(build(Parts()), Offload.average_gradients),
        "saved": opened(build(Parts()), lambda run: run.save(folder / "refused")),
        "durable": opened(build(Parts()), durable=True),
        "summed": opened(of(summed)),
        "on meta": opened(of(spread.to("meta"))),
        "optimizer": opened(build(Parts(torch.optim.Adafactor))),
        "in backward": opened(build(Parts()), optimizer_in_backward=True),
    }
