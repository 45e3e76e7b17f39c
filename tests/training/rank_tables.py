"""Tables whose rows are spread over processes; scenarios of `tests.training.rank_lives`."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.sampling import tried
from tests.training.table_models import STEPPERS
from tests.training.twins import config_of, same
from tierstore.nn import EmbeddingTable, Normal
from tierstore.nn.table_weight import TableWeight
from tierstore.tables import RowStore
from tierstore.training import offload
from tierstore.units import parse_bytes

SPREADING = "tierstore.training.ranks"
COUNT, WIDTH, FIELDS = 4000, 12, 4

# Each bucket has one parameter: with three processes the order in which elements are added up depends on
# where they lie in their bucket.
distributed._DEFAULT_FIRST_BUCKET_BYTES = 1  # type: ignore[attr-defined]


class Net(nn.Module):
    """A table of each mode, one of which clips, and something dense."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = EmbeddingTable(COUNT, 1, mode="sum", init=0.5)
        self.deep = EmbeddingTable(COUNT, WIDTH, init=Normal(0.1), seed=7)
        self.bags = EmbeddingTable(COUNT, WIDTH, mode="mean", max_norm=2.0, seed=8, out_of_range="zeros")
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ``[batch, fields]`` ids to ``[batch]``."""
        together: Tensor = self.head(self.deep(ids).mean(1) + self.bags(ids * 2))
        wide: Tensor = self.wide(ids)
        return (together + wide).squeeze(1)

    @property
    def tables(self) -> list[EmbeddingTable]:
        """All tables."""
        return [self.wide, self.deep, self.bags]


class Dense(nn.Module):
    """The same of PyTorch's modules, without the table that clips otherwise."""

    def __init__(self, like: Net) -> None:
        super().__init__()
        every = torch.arange(COUNT)
        self.wide = nn.EmbeddingBag(COUNT, 1, mode="sum", sparse=True, _weight=like.wide.rows(every))
        self.deep = nn.Embedding(COUNT, WIDTH, sparse=True, _weight=like.deep.rows(every))
        self.head = nn.Linear(WIDTH, 1)
        self.head.load_state_dict(like.head.state_dict())

    def forward(self, ids: Tensor) -> Tensor:
        """See `Net`."""
        together: Tensor = self.head(self.deep(ids).mean(1))
        wide: Tensor = self.wide(ids)
        return (together + wide).squeeze(1)


class Plain(Net):
    """`Net` without the table that clips."""

    def forward(self, ids: Tensor) -> Tensor:
        """See `Net`."""
        together: Tensor = self.head(self.deep(ids).mean(1))
        wide: Tensor = self.wide(ids)
        return (together + wide).squeeze(1)


def batch_of(step: int, part: int, rank: int, processes: int, size: int = 12) -> Tensor:
    """Return the ids of a batch: spread ones, none, those of one process alone, or one many times."""
    chance = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    if step == 1 and rank == processes - 1:
        return torch.empty(0, FIELDS, dtype=torch.int64)
    if step == 2:
        return torch.arange(8).view(2, FIELDS) * (rank + 1) % 5
    if step == 3 and rank == 0:
        return torch.full((size * 10, FIELDS), 17)
    ids = torch.empty(size, FIELDS).exponential_(1 / 900.0, generator=chance)
    return ids.long().clamp_(max=COUNT - 1)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return a loss that an empty batch has, too."""
    loss: Tensor = (model(ids) - 1).square().sum() / 16
    return loss


def steppers(model: Net, kind: str) -> list[torch.optim.Optimizer]:
    """Return an optimizer of the tables, and one of the rest."""
    return [
        STEPPERS[kind]([each.weight for each in model.tables]),
        torch.optim.SGD(model.head.parameters(), lr=0.1),
    ]


def gathered(mine: object) -> list[Any]:
    """Return what each process gave."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, mine)
    return found


def averaged(weight: TableWeight) -> None:
    """Let a table's gradient be the average by its definition, which this says row by row.

    Each process divides and coalesces, and the sums are added in the order of ranks.  A row that is named
    several times stands there as often, with minus zeros, which change no sum.
    """
    gradient = weight.grad
    mine = None
    if gradient is not None:
        shares = torch.sparse_coo_tensor(
            gradient._indices(), gradient._values() / distributed.get_world_size(), weight.shape
        ).coalesce()
        mine = shares.indices()[0].tolist(), list(shares.values()), gradient._indices()[0].tolist()
    sums: dict[int, Tensor] = {}
    named: list[int] = []
    everyone = [each for each in gathered(mine) if each is not None]
    for ids, values, occurrences in everyone:
        named += occurrences
        for number, value in zip(ids, values, strict=True):
            sums[number] = sums[number] + value if number in sums else value
    if not everyone:
        weight.grad = None
        return
    rows, ids = [], []
    times = Counter(named)
    for number in sorted(sums):
        rows += [sums[number]] + [torch.full_like(sums[number], -0.0)] * (times[number] - 1)
        ids += [number] * times[number]
    values = torch.stack(rows) if rows else torch.empty(0, weight.shape[1])
    weight.grad = torch.sparse_coo_tensor(torch.tensor([ids], dtype=torch.int64), values, weight.shape)


def average_all(model: Net) -> None:
    """Let the gradients of all tables be averages."""
    for each in model.tables:
        averaged(each.weight)


def train(
    runner: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    average: Callable[[], None],
    steps: int,
    size: int = 12,
) -> list[Tensor]:
    """Train; the last step accumulates over two passes.  Return the losses."""
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    losses = []
    for step in range(steps):
        passes = 1 + (step == steps - 1)
        for part in range(passes):
            no_sync = getattr(runner, "no_sync", contextlib.nullcontext)
            with no_sync() if part < passes - 1 else contextlib.nullcontext():
                loss = loss_of(runner, batch_of(step, part, rank, processes, size))
                loss.backward()
            losses.append(loss.detach().clone())
        average()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses


def wrapped(model: Net) -> nn.Module:
    """Return a wrapper that leaves tables to us."""
    names = [name for name, each in model.named_parameters() if isinstance(each, TableWeight)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


def settings(layout: str, folder: Path, processes: int, **more: object) -> dict[str, object]:
    """Return the configuration of a machine with so many processes, in which tables do not fit."""
    small: dict[str, object] = {"offload_cpu_size": "208KB"} if layout in ("disk", "three") else {}
    one = config_of(
        layout, folder, {**small, **({"max_device_memory": "256KB"} if layout == "three" else {})}
    )
    return {**one, "offload_cpu_size": processes * parse_bytes(str(one["offload_cpu_size"])), **more}


def cells(store: RowStore, own: Tensor) -> list[Tensor]:
    """Return the cells of some rows, column by column."""
    found = []
    for column in store.columns:
        rows = torch.empty(len(own), store.width)
        for visit in store.visit(own):
            rows[visit.part] = visit.gather(column.name)
        found.append(rows)
    return found


def own_ids(table: EmbeddingTable) -> Tensor:
    """Return the ids of the rows that this process has."""
    every = torch.arange(COUNT)
    own = table.weight.row_store.own_rows
    return every if own is None else every[own.own(every)]


def differences(expected: Net, ours: Net) -> list[str]:
    """Return in what two models differ: rows as everybody sees them, and what each has of them."""
    found = []
    every = torch.arange(COUNT)
    for number, (mine, other) in enumerate(zip(expected.tables, ours.tables, strict=True)):
        if not same(mine.rows(every), other.rows(every)):
            found.append(f"rows of table {number}")
        own = own_ids(other)
        names = [[each.name for each in table.weight.row_store.columns] for table in (mine, other)]
        if names[0] != names[1]:
            found.append(f"columns {names}")
        for one, two in zip(
            cells(mine.weight.row_store, own), cells(other.weight.row_store, own), strict=True
        ):
            if not same(one, two):
                found.append(f"cells of table {number}")
    if not all(map(same, expected.head.parameters(), ours.head.parameters())):
        found.append("head")
    return found


def tried_steppers(processes: int) -> list[str]:
    """Return the optimizers that so many processes try."""
    return tried(STEPPERS if processes == 2 else ("LazyAdam", "Adagrad", "SGD"), always=1, of=8)


def spread(rank: int, processes: int, folder: Path) -> object:
    """Every optimizer: the bits of a process that has all tables and all occurrences.

    With three processes those that treat gradients in ways of their own: one takes occurrences, too.
    """
    found: dict[str, object] = {}
    for kind in tried_steppers(processes):
        torch.manual_seed(0)
        expected = Net()
        theirs = train(
            wrapped(expected),
            steppers(expected, kind),
            functools.partial(average_all, expected),
            5,
        )
        for layout in ("host", "disk", "three") if (kind, processes) == ("LazyAdam", 2) else ("disk",):
            torch.manual_seed(0)
            model = Net()
            optimizers = steppers(model, kind)
            with offload(model, optimizers, settings(layout, folder, processes)) as run:
                ours = train(DistributedDataParallel(model), optimizers, lambda: None, 5)
                wrong = differences(expected, model)
                wrong += [
                    f"loss {n}" for n, (a, b) in enumerate(zip(theirs, ours, strict=True)) if not same(a, b)
                ]
                stats = run.stats().tables["deep.weight"]
                shares = [len(own_ids(each)) for each in model.tables]
                everyone = gathered(shares)
                assert [sum(each) for each in zip(*everyone, strict=True)] == [COUNT] * 3
                assert (layout, processes) != ("disk", 2) or stats.page_bytes_written
            found[f"{kind}, {layout}"] = wrong
    return found


def as_pytorch(rank: int, processes: int, folder: Path) -> object:
    """The bits of ``DistributedDataParallel`` around PyTorch's own modules and optimizers."""
    found: dict[str, object] = {}
    for kind in ("SparseAdam", "Adagrad", "SGD") if processes == 2 else ("SparseAdam",):
        torch.manual_seed(0)
        model = Plain()
        dense = Dense(model)
        theirs = getattr(torch.optim, kind)([dense.wide.weight, dense.deep.weight], lr=0.05)
        rest = torch.optim.SGD(dense.head.parameters(), lr=0.1)
        # With three processes PyTorch's sort keeps the order of up to 16 rows.
        size = 12 if processes == 2 else 1
        expected = train(DistributedDataParallel(dense), [theirs, rest], lambda: None, 6, size)
        optimizers = [
            STEPPERS[kind]([model.wide.weight, model.deep.weight]),
            torch.optim.SGD(model.head.parameters(), lr=0.1),
        ]
        with offload(model, optimizers, settings("disk", folder, processes)):
            ours = train(DistributedDataParallel(model), optimizers, lambda: None, 6, size)
            every = torch.arange(COUNT)
            found[kind] = [
                same(model.wide.rows(every), dense.wide.weight),
                same(model.deep.rows(every), dense.deep.weight),
                all(map(same, model.head.parameters(), dense.head.parameters())),
                all(map(same, expected, ours)),
            ]
    return found


def one_process(rank: int, processes: int, folder: Path) -> object:
    """With one process nothing is spread, and nothing that spreads is imported."""
    torch.manual_seed(0)
    expected = Net()
    theirs = train(wrapped(expected), steppers(expected, "LazyAdam"), lambda: None, 6)
    torch.manual_seed(0)
    model = Net()
    optimizers = steppers(model, "LazyAdam")
    with offload(model, optimizers, settings("disk", folder, 1)):
        ours = train(DistributedDataParallel(model), optimizers, lambda: None, 6)
        wrong = differences(expected, model)
        wrong += [f"loss {n}" for n, (a, b) in enumerate(zip(theirs, ours, strict=True)) if not same(a, b)]
    return {"wrong": wrong, "imported": [each for each in sys.modules if each.startswith(SPREADING)]}


def said(act: Callable[[], object]) -> str:
    """Return what an error says that a call raises."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return f"{type(error).__name__}: {error}"
    return "nothing"


def around(rank: int, processes: int, folder: Path) -> object:
    """Wrapped before or after, or averaged by the run: the same bits; what sends rows is refused."""
    found: dict[str, object] = {}
    torch.manual_seed(0)
    expected = Net()
    theirs = train(
        wrapped(expected), steppers(expected, "Adagrad"), functools.partial(average_all, expected), 6
    )
    for name in ("before", "averaged", "views"):
        torch.manual_seed(0)
        model = Net()
        optimizers = steppers(model, "Adagrad")
        runner = wrapped(model) if name == "before" else model
        with offload(runner, optimizers, settings("disk", folder, processes)) as run:
            if name == "averaged":
                run.average_gradients()
                runner = Averaged(model, run)
            elif name == "views":
                runner = DistributedDataParallel(
                    model, gradient_as_bucket_view=True, find_unused_parameters=True
                )
            ours = train(runner, optimizers, lambda: None, 6)
            wrong = differences(expected, model)
            wrong += [
                f"loss {n}" for n, (a, b) in enumerate(zip(theirs, ours, strict=True)) if not same(a, b)
            ]
            found[name] = wrong
    model = Net()
    found["sends"] = said(lambda: DistributedDataParallel(model))
    with offload(model, None, settings("disk", folder, processes)):
        found["sends more"] = said(lambda: DistributedDataParallel(nn.Sequential(model, nn.Linear(1, 1))))
        said_to = getattr(model, "_ddp_params_and_buffers_to_ignore")  # noqa: B009
    found["ignored"] = [said_to, hasattr(model, "_ddp_params_and_buffers_to_ignore")]
    return found


class Averaged(nn.Module):
    """A model whose run averages, with ``no_sync`` as a wrapper has it."""

    def __init__(self, model: nn.Module, run: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.model, self.no_sync = model, run.no_sync

    def forward(self, ids: Tensor) -> Tensor:
        """Pass it on."""
        found: Tensor = self.model(ids)
        return found
