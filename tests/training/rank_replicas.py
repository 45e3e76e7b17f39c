"""Replicas that are trained in several processes, wrapped by PyTorch or averaged by the run; scenarios."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.sampling import IS_CI
from tests.training.twins import WIDTH, Block, config_of, same
from tierstore.errors import CapacityError, TierStoreError
from tierstore.training import Offload, offload
from tierstore.training.pytorch.own_work import ordinary_mode
from tierstore.units import parse_bytes

Around = Callable[[nn.Module, torch.optim.Optimizer], contextlib.AbstractContextManager[Offload | None]]

SWAPPED = {
    "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [0, 2]}]},
    "recompute_config": {"recompute": [1]},
}


# Each bucket has one parameter, from the first pass on: with three processes and more the order in which
# elements are added up depends on where they lie in their bucket.
distributed._DEFAULT_FIRST_BUCKET_BYTES = 1  # type: ignore[attr-defined]


class Net(nn.Module):
    """Blocks, one of which may be left out, and a weight with strides of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t() / WIDTH)
        self.head = nn.Linear(WIDTH, 5)
        self.spare = nn.Linear(WIDTH, WIDTH)  # nobody uses it

    def forward(self, x: Tensor, left_out: int | None = None) -> Tensor:
        """Map ``(batch, WIDTH)`` to logits."""
        for number, block in enumerate(self.blocks):
            if number != left_out:
                x = block(x)
        logits: Tensor = self.head(torch.cat([x, x.sin()], 1) @ self.weight)
        return logits


def kept(tensor: Tensor | None) -> Tensor | None:
    """Return a copy that no meter takes for an emulated device's."""
    with ordinary_mode():
        return None if tensor is None else tensor.detach().clone()


def train(
    around: Around, *, wraps: bool, steps: int, looks: bool, uneven: bool = False, seed: int = 0
) -> list[Tensor | None]:
    """Train, every second step with accumulation; return losses, gradients, and what is left."""
    torch.manual_seed(seed)
    model = Net()
    if not uneven:
        model.spare.requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    rank = distributed.get_rank()
    generator = torch.Generator().manual_seed(100 + rank)
    found: list[Tensor | None] = []
    runner: nn.Module = model
    if wraps:
        runner = DistributedDataParallel(model, bucket_cap_mb=1e-6, find_unused_parameters=True)
    with around(runner, optimizer) as run:
        if not wraps and run is not None:
            run.average_gradients()
        for step in range(steps):
            for part in range(1 + step % 2):
                left_out = (step + part + rank) % 4 if uneven else None
                is_last = part == step % 2
                pause = runner.no_sync if wraps else run.no_sync if run is not None else None
                with contextlib.nullcontext() if is_last or pause is None else pause():  # type: ignore[operator]
                    x = torch.randn(6, WIDTH, generator=generator)
                    loss = runner(x, left_out).square().mean()
                    loss.backward()
                found.append(kept(loss))
            if looks:
                found += [kept(parameter.grad) for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 3 != 2)
    return [*found, *(each.detach().clone() for each in model.parameters())]


def plain(_model: nn.Module, _optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
    """Offload nothing."""
    return contextlib.nullcontext()


def differences(one: Iterable[Tensor | None], other: Iterable[Tensor | None]) -> list[int]:
    """Return where two lists differ in a bit."""
    return [
        number
        for number, (a, b) in enumerate(zip(one, other, strict=True))
        if (a is None) != (b is None) or (a is not None and b is not None and not same(a, b))
    ]


def shared(found: list[Tensor | None], count: int) -> bool:
    """Whether the last tensors are the same in all processes."""
    mine = torch.cat([each.flatten().view(torch.uint8) for each in found[-count:] if each is not None])
    theirs = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(theirs, mine)
    return all(torch.equal(each, mine) for each in theirs)


def config(layout: str, folder: Path, processes: int) -> dict[str, object]:
    """Return the configuration of a machine with so many processes."""
    one = config_of(layout, folder, {"buffer_min_size": 0})
    return {**one, "offload_cpu_size": processes * parse_bytes(str(one["offload_cpu_size"]))}


MANY_STEPS = 8 if IS_CI else 100
STEPS = 3 if IS_CI else 6


def many_steps(rank: int, processes: int, folder: Path) -> object:
    """Many steps: the same bits everywhere, and those without offloading; swapped and recomputed as well."""
    expected = train(plain, wraps=True, steps=MANY_STEPS, looks=False)
    found: dict[str, object] = {"plain": shared(expected, 10)}
    settings = config("three", folder / "files", processes)
    document = {"offload_config": {**settings, "max_device_memory": "512KB"}, **SWAPPED}
    ours = train(
        lambda model, optimizer: offload(model, optimizer, document, layers="module.blocks"),
        wraps=True,
        steps=MANY_STEPS,
        looks=False,
    )
    found["swapped"] = [differences(expected, ours), shared(ours, 10)]
    return found


def averaged(rank: int, processes: int, folder: Path) -> object:
    """Gradients averaged one at a time: as by DistributedDataParallel, with a device that it does not fit."""
    found: dict[str, object] = {}
    for uneven in (False, True):
        expected = train(plain, wraps=True, steps=STEPS, looks=True, uneven=uneven)
        for layout in ("three", "disk"):
            if processes > 2 and uneven != (layout == "three"):
                continue  # what more of them add up does not ask where it lies: each layout has one of both
            settings = config(layout, folder / "files", processes)

            def around(
                model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, object] = settings
            ) -> contextlib.AbstractContextManager[Offload]:
                if rank:
                    with torch.no_grad():
                        for each in model.parameters():
                            each.add_(rank)  # the first process's count
                return offload(model, optimizer, settings)

            ours = train(around, wraps=False, steps=STEPS, looks=True, uneven=uneven)
            found[f"{layout}, {uneven}"] = [differences(expected, ours), shared(ours, 10)]
    settings = config("three", folder / "files", processes)
    document = {"offload_config": {**settings, "max_device_memory": "256KB"}, **SWAPPED}
    expected = train(plain, wraps=True, steps=STEPS, looks=False)
    ours = train(
        lambda model, optimizer: offload(model, optimizer, document, layers="blocks"),
        wraps=False,
        steps=STEPS,
        looks=False,
    )
    found["swapped"] = [differences(expected, ours), shared(ours, 10)]
    if processes == 2:
        found["refused"] = refusals(rank, folder, processes)
    return found


def first_passes(rank: int, processes: int, folder: Path) -> object:
    """Whether the first pass after a start adds up as later ones do: of the same model and batch."""
    found: dict[str, object] = {}

    def passes(around: Around, keeps_buckets: bool | None) -> list[list[Tensor | None]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 1))
        batch = torch.randn(16, 24, generator=torch.Generator().manual_seed(rank))
        gradients = []
        with around(model, torch.optim.SGD(model.parameters())) as run:
            if run is not None:
                run.average_gradients()
            runner: nn.Module = model
            if keeps_buckets is not None:
                runner = DistributedDataParallel(model, find_unused_parameters=keeps_buckets)
            for _ in range(3):
                model.zero_grad()
                (runner(batch) - 1).square().mean().backward()
                gradients.append([kept(each.grad) for each in model.parameters()])
        return gradients

    with mock.patch.object(distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1 << 20):  # as it is in programs
        for keeps_buckets in (False, True):
            first, *later = passes(plain, keeps_buckets)
            name = "find_unused_parameters" if keeps_buckets else "as it is"
            found[name] = [not differences(first, each) for each in later]
    settings = config("disk", folder / "files", processes)
    first, *later = passes(lambda model, optimizer: offload(model, optimizer, settings), None)
    found["average_gradients"] = [not differences(first, each) for each in later]
    return found


def refusals(rank: int, folder: Path, processes: int) -> dict[str, str]:
    """What averaging says where it cannot work."""
    said: dict[str, str] = {}

    def note(name: str, act: Callable[[], object]) -> None:
        try:
            act()
            said[name] = "nothing"
        except (TierStoreError, CapacityError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    settings = config("three", folder / "files", processes)
    model: nn.Module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    with offload(model, None, settings) as run:
        note("wrapper", lambda: DistributedDataParallel(model, init_sync=False))
        run.average_gradients()
        note("twice", run.average_gradients)
    with offload(nn.Linear(4, 4 + rank), None, settings) as run:
        note("shapes", run.average_gradients)
    with offload(
        nn.Linear(4, 4), None, {**settings, "offload_path": str(folder / f"{rank}")}, alone=True
    ) as run:
        note("alone", run.average_gradients)
    model = nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4))
    with offload(model, None, settings) as run:
        run.average_gradients()
        note("sparse", lambda: model(torch.tensor([1])).sum().backward())
    wrapped = DistributedDataParallel(nn.Linear(4, 4))
    with offload(wrapped, None, settings) as run:
        note("wrapped", run.average_gradients)
    return said
