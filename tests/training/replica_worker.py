"""Replicas that are trained together, in processes forked from one that has imported everything.

``python -m tests.training.replica_worker PROCESSES FOLDER LAYOUT...`` writes what each process found, or how
it failed, to ``FOLDER/LAYOUT.json``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from tests.imported_ahead import import_ahead
from tests.sampling import IS_CI
from tests.training.rank_lives import begin_group, lead
from tests.training.twins import WIDTH, Block, config_of, same, with_device
from tierstore.training import offload
from tierstore.training.pytorch.own_work import ordinary_mode
from tierstore.units import parse_bytes

KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "unused views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
    "hook": {},
}
WRAPPED = ("before", "after", "held")
STEPS = 3

Around = Callable[[nn.Module, torch.optim.Optimizer], contextlib.AbstractContextManager[object]]


class Model(nn.Module):
    """Blocks, one of which some processes leave out in some steps, and a weight with strides of its own.

    Its buffer is another one in each process, until the first process sends its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t() / WIDTH)
        self.head = nn.Linear(WIDTH, 5)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.average: Tensor

    def forward(self, x: Tensor, *, leaves_out: bool) -> Tensor:
        """Map ``(batch, WIDTH)`` to logits."""
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.5)
        x = x - self.average.clone()
        for number, block in enumerate(self.blocks):
            if not (leaves_out and number == 1):
                x = block(x)
        logits: Tensor = self.head(torch.cat([x, x.sin()], 1) @ self.weight)
        return logits


class Holder(nn.Module):
    """Something that holds a model: what is between it and the wrapper."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, x: Tensor, *, leaves_out: bool) -> Tensor:
        """Do what the model does."""
        logits: Tensor = self.inner(x, leaves_out=leaves_out)
        return logits


def wrap(model: nn.Module, kind: str, *, init_sync: bool) -> DistributedDataParallel:
    """Return the model with its gradients averaged, in several buckets."""
    wrapper = DistributedDataParallel(model, bucket_cap_mb=0.02, init_sync=init_sync, **KINDS[kind])  # type: ignore[arg-type]
    if kind == "hook":
        wrapper.register_comm_hook(None, fp16_compress_hook)
    return wrapper


def train(kind: str, wrapped: str, around: Around) -> list[Tensor | None]:
    """Train some steps, with accumulation; return losses, gradients and, in the end, all values."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found: list[Tensor | None] = []
    held: nn.Module = Holder(model) if wrapped == "held" else model
    runner = wrap(held, kind, init_sync=True) if wrapped == "before" else held
    with around(runner, optimizer):
        if wrapped != "before":
            runner = wrap(runner, kind, init_sync=False)
        generator = torch.Generator().manual_seed(distributed.get_rank())
        for number in range(STEPS):
            found += step(runner, model, kind, number, generator)
            optimizer.step()
            optimizer.zero_grad(set_to_none=number != 1)
    return [*found, *(tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers()))]


def kept(tensor: Tensor | None) -> Tensor | None:
    """Return a copy that no meter takes for an emulated device's."""
    with ordinary_mode():
        return None if tensor is None else tensor.detach().clone()


def step(
    runner: nn.Module, model: Model, kind: str, number: int, generator: torch.Generator
) -> Iterator[Tensor | None]:
    """Accumulate two micro-batches, the first without an average where that is possible."""
    assert isinstance(runner, DistributedDataParallel)
    for part in range(2):
        x = torch.randn(6, WIDTH, generator=generator)
        target = torch.randint(0, 5, (6,), generator=generator)
        leaves_out = "unused" in kind and (number + part + distributed.get_rank()) % 2 == 0
        with runner.no_sync() if part == 0 and "static" not in kind else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(runner(x, leaves_out=leaves_out), target)
            loss.backward()
        yield kept(loss)
        for parameter in model.parameters():
            yield kept(parameter.grad)
            yield None if parameter.grad is None else torch.tensor(parameter.grad.stride())


Case = tuple[str, str]
"""Of `KINDS` and `WRAPPED`."""


def differences(
    cases: Sequence[Case], layout: str, processes: int, folder: Path, rank: int
) -> dict[str, list[str]]:
    """Train plain and offloaded; return what differs in each case."""
    begin_group(rank, processes, folder / "store")
    more = {**with_device(layout, "512KB"), "buffer_min_size": 0}
    one = config_of(layout, folder / "files", more)
    config = {**one, "offload_cpu_size": processes * parse_bytes(str(one["offload_cpu_size"]))}
    found: dict[str, list[str]] = {}
    for kind, group in itertools.groupby(cases, key=lambda case: case[0]):
        plain = train(kind, "after", lambda _model, _optimizer: contextlib.nullcontext())
        for _, wrapped in group:
            ours = train(kind, wrapped, lambda model, optimizer: offload(model, optimizer, config))
            found[f"{kind}, {wrapped}"] = [
                f"{number} of {len(plain)}"
                for number, (a, b) in enumerate(zip(plain, ours, strict=True))
                if (a is None) != (b is None) or (a is not None and b is not None and not same(a, b))
            ]
    distributed.barrier()
    distributed.destroy_process_group()
    return found


def main(processes: int, folder: Path, layouts: Sequence[str]) -> None:
    """Train each kind wrapped at each time, the cases by turns in the layouts; write what differs."""
    import_ahead()  # nobody looks for referrers, or for tensors, among all of it
    cases = [*itertools.product(KINDS, WRAPPED)][:: 2 if IS_CI else 1]
    for number, layout in enumerate(layouts):
        place = folder / layout
        place.mkdir()
        some = cases[number :: len(layouts)]
        found = lead(partial(differences, some, layout, processes, place), processes, place / "found")
        (folder / f"{layout}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
