"""What processes over which tables are spread have to do alike, and what they keep; scenarios."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.training.rank_tables import (
    COUNT,
    WIDTH,
    Net,
    batch_of,
    cells,
    gathered,
    loss_of,
    own_ids,
    said,
    settings,
    steppers,
    train,
)
from tests.training.twins import same
from tierstore.errors import BackendError
from tierstore.formats.safetensors_files import HeaderEntry, write_file
from tierstore.nn import EmbeddingTable, row_blocks
from tierstore.optim import SGD, LazyAdam
from tierstore.training import offload
from tierstore.training.checkpoints import files as files_of_run
from tierstore.training.session import Session


@contextlib.contextmanager
def small(folder: Path, processes: int, **more: object) -> Iterator[tuple[EmbeddingTable, Any, Any]]:
    """Offload one table with an optimizer."""
    table = EmbeddingTable(400, 4, seed=3)
    optimizer = SGD(table.parameters(), lr=0.5)
    with offload(table, optimizer, settings("disk" if more else "host", folder, processes, **more)) as run:
        yield table, optimizer, run


def rules(rank: int, processes: int, folder: Path) -> object:
    """What the processes have to do alike, and what a table in parts refuses."""
    found: dict[str, object] = {}
    ids = torch.arange(400)
    whole = EmbeddingTable(400, 4, seed=3).rows(ids)
    with small(folder, processes) as (table, optimizer, run):
        found["rows"] = same(table.rows(ids), whole)
        found["other lookups"] = said(lambda: table(ids) if rank else table.rows(ids))
        loss = table(ids[: 10 * rank]).sum()
        found["backward alone"] = said(lambda: loss.backward() if rank else table(ids))
        found["rows after"] = same(table.rows(ids), whole)
        optimizer.zero_grad()

        found["deepcopy"] = said(lambda: copy.deepcopy(table))
        found["pickle"] = said(lambda: pickle.dumps(table))
        found["state dict"] = said(table.state_dict()["weight"].clone)
        found["loads"] = said(lambda: table.load_state_dict({"weight": whole + 1}))
        found["loaded"] = same(table.rows(ids), whole + 1)
        table.load_state_dict({"weight": whole})

        with run.no_sync():
            table(ids[:200]).sum().backward()
        found["not averaged"] = said(optimizer.step)
        table(ids[:100] + rank).sum().backward()
        found["on average"] = said(lambda: paused_pass(run, table))
        first = table.weight.grad
        assert first is not None
        table(ids[200:300]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        # Twice 200, then 100 each from rank on, then 200 to 299, of a table that is stepped by 0.5.
        times = torch.zeros(400)
        times[:200] += 1
        for each in range(processes):
            times[each : 100 + each] += 1 / processes
        times[200:300] += 1
        found["accumulated"] = [
            same(table.rows(ids), whole - 0.5 * times[:, None]),
            len(first.coalesce().values()),
        ]

        table.load_state_dict({"weight": whole})
        table.set_rows(ids[:4], torch.full((4, 4), float(rank)))
        found["last writer"] = same(table.rows(ids[:4]), torch.full((4, 4), processes - 1.0))
        table(torch.full((1_000_000 if rank == 1 else 0,), 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found["a million times"] = same(table.rows(ids[5]), whole[5] - 0.5 * 1_000_000 / processes)
        found["grows"] = said(lambda: table.grow(500 + rank))
        with (
            mock.patch.object(table.weight.row_store, "grow", failing)
            if rank == 0
            else (contextlib.nullcontext())
        ):
            found["one grows"] = said(lambda: table.grow(501))
        found["then"] = said(lambda: table(ids))
        found["cannot return"] = said(run.close)
        found["grown"] = [said(lambda: table.grow(501)), len(table.rows(torch.arange(501)))]
        run.close(restore=False)
    found["released"] = said(lambda: table.rows(ids))
    return found


def paused_pass(run: Any, table: EmbeddingTable) -> None:  # noqa: ANN401
    """Go backward without an average."""
    with run.no_sync():
        table(torch.arange(3)).sum().backward()


def scaled(rank: int, processes: int, folder: Path) -> object:
    """A scaler leaves a step out everywhere if any process has a gradient that is not finite."""
    ids = torch.arange(400)
    whole = EmbeddingTable(400, 4, seed=3).rows(ids)
    found: dict[str, object] = {}
    with small(folder, processes) as (table, optimizer, _):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        for name, factor in (("infinite", torch.inf if rank else 1.0), ("finite", 1.0)):
            # Rank 1 alone names rows that are not finite, which rank 0 has.
            loss = (table(ids[rank * 40 : rank * 40 + 40]) * factor).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            changed = (table.rows(ids) != whole).any(1).nonzero().flatten().tolist()
            found[name] = [scaler.get_scale(), changed == list(range(40 * processes)) or changed]
        found["rows"] = same(table.rows(ids[:80]), whole[:80] - 0.5 / processes)
    return found


def broken(rank: int, processes: int, folder: Path) -> object:
    """A process that cannot read rows says so to those that have asked; they can ask again."""
    ids = torch.arange(400)
    found: dict[str, object] = {}
    with small(folder, processes) as (table, _, run):
        before = table.rows(ids)
        store = table.weight.row_store
        visit = store.visit
        if rank == 1:
            store.visit = failing  # type: ignore[method-assign]
        found["lookup"] = said(lambda: table(ids))
        store.visit = visit  # type: ignore[method-assign]
        found["again"] = same(table(ids), before)
        with run._ranks._tables._exchange.alone():
            found["in the midst"] = said(lambda: table.rows(ids))
    found["not the same"] = said(
        lambda: offload(EmbeddingTable(40, 4, seed=rank), None, settings("host", folder, 2))
    )
    found["not as large"] = said(
        lambda: offload(EmbeddingTable(40 + rank, 4), None, settings("host", folder, 2))
    )
    found["dense gradient"] = said(
        lambda: offload(
            EmbeddingTable(40, 4, target="device", sparse=False), None, settings("host", folder, 2)
        )
    )
    cached = EmbeddingTable(40, 4, target="device", cache_rows=8, seed=0)
    found["on the device"] = said(
        lambda: offload(cached, None, {**settings("device", folder, 2), "optimizer_target": "device"})
    )
    found["still whole"] = [
        cached.weight.access.are_all_here,
        same(cached.rows(ids[:40]), EmbeddingTable(40, 4, seed=0).rows(ids[:40])),
    ]
    # What was written before is there afterwards, and is there still where a run cannot be opened.
    table = EmbeddingTable(3000, 16)
    table.set_rows(ids, torch.ones(400, 16))
    found["no room"] = said(
        lambda: offload(table, None, {**settings("host", folder, 2), "offload_cpu_size": "8KB"})
    )
    model = nn.ModuleDict({"table": table, "dense": nn.Linear(4, 4)})
    take_in = Session.adopt
    Session.adopt = failing  # type: ignore[method-assign]
    found["undone"] = said(lambda: offload(model, None, settings("host", folder, 2)))
    Session.adopt = take_in  # type: ignore[method-assign]
    from tierstore.training.ranks.beginnings import FirstRows  # one process imports nothing of it

    bring = FirstRows.bring
    FirstRows.bring = failing  # type: ignore[method-assign]
    found["not copied"] = said(lambda: offload(model, None, settings("host", folder, 2)))
    FirstRows.bring = bring  # type: ignore[method-assign]
    found["whole"] = [same(table.rows(ids), torch.ones(400, 16)), table.weight.access.are_all_here]
    with offload(model, None, settings("host", folder, 2)):
        found["kept"] = same(table.rows(ids), torch.ones(400, 16))
        found["here"] = len(next(iter(table.weight.row_store.written_ids())))
    return found


def failing(*_: object, **__: object) -> Any:  # noqa: ANN401
    """Fail as a medium does."""
    raise BackendError("the medium is gone")


def parts_left(rank: int, processes: int, folder: Path) -> object:
    """A checkpoint of parts, gone on from by as many processes."""
    config = {"durable": True, "offload_path": str(folder.parent / "parts")}
    ids = torch.arange(400)
    found: dict[str, object] = {}
    with small(folder, processes, **config) as (table, optimizer, run):
        table(ids[rank : 200 + rank]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.checkpoint()
        rows = table.rows(ids)
        table.set_rows(ids, torch.zeros(400, 4))
        table.grow(500)
        run.close(restore=False)
    table = EmbeddingTable(400, 4, seed=3)
    with offload(table, None, {**settings("disk", folder, processes), **config}, resume=False):
        found["anew"] = same(table.rows(ids), EmbeddingTable(400, 4, seed=3).rows(ids))
    with small(folder, processes, **config) as (table, optimizer, run):
        found["resumed"] = run.resumed is not None and same(table.rows(ids), rows)
        found["own"] = int(table.weight.row_store.own_rows.own(ids).sum())  # type: ignore[union-attr]
        run.close(restore=False)
    with offload(table, optimizer, {**settings("disk", folder, processes), **config}) as run:
        found["same model"] = run.resumed is not None and same(table.rows(ids), rows)
        run.close(restore=False)
    found["other seed"] = said(
        lambda: offload(
            EmbeddingTable(400, 4, seed=0), None, {**settings("disk", folder, processes), **config}
        )
    )
    return found


def parts_taken(rank: int, processes: int, folder: Path) -> object:
    """One process, or three, do not go on with parts of two."""
    left = folder.parent / "parts"
    table = EmbeddingTable(400, 4, seed=3)
    optimizer = SGD(table.parameters(), lr=0.5)
    config = {**settings("disk", folder, processes), "durable": True, "offload_path": str(left)}
    found = {"beside": said(lambda: offload(table, optimizer, config))}
    if processes == 1:
        config["offload_path"] = str(left / "rank-1")
        found["within"] = said(lambda: offload(table, optimizer, config))
        ids = torch.arange(400)
        found["unchanged"] = str(same(table.rows(ids), EmbeddingTable(400, 4, seed=3).rows(ids)))
    return found


def files(rank: int, processes: int, folder: Path) -> object:
    """The first process writes all rows, with what the others send; each reads its own."""
    found: dict[str, object] = {}
    torch.manual_seed(0)
    model = Net()
    optimizers = steppers(model, "SparseAdam")
    every = torch.arange(COUNT)
    with offload(model, optimizers, settings("disk", folder, processes)) as run:
        train(DistributedDataParallel(model), optimizers, lambda: None, 3)
        # Blocks smaller than a table, so that there are several.
        row_blocks._AT_A_TIME = 1 << 12  # type: ignore[misc]
        model.deep.export(folder / "deep", state=True, shard_bytes="40KB")
        run.save(folder / "saved")
        rows = [each.rows(every) for each in model.tables]
        own = [cells(each.weight.row_store, own_ids(each)) for each in model.tables]
        found["there already"] = said(lambda: model.deep.export(folder / "deep"))
        found["one alone"] = said(
            lambda: run.save(folder / "one") if rank == 0 else model.deep.rows(every[:1])
        )
        visit = model.bags.weight.row_store.visit
        if rank == processes - 1:
            model.bags.weight.row_store.visit = failing  # type: ignore[method-assign]
        found["cannot read"] = said(lambda: run.save(folder / "not"))
        model.bags.weight.row_store.visit = visit  # type: ignore[method-assign]
        with mock.patch.object(files_of_run, "write_file", torn):
            found["cannot write"] = said(lambda: run.save(folder / "not"))
        loss_of(model, batch_of(0, 0, rank, processes)).backward()
        found["norm"] = said(lambda: run.clip_grad_norm_(1.0))
    found["left"] = sorted(each.name for each in folder.iterdir() if "group" not in each.name)
    torch.manual_seed(1)
    model = Net()
    optimizers = steppers(model, "SparseAdam")
    with offload(model, optimizers, settings("disk", folder, processes)) as run:
        run.load(folder / "saved")
        found["loaded"] = [
            all(same(each.rows(every), one) for each, one in zip(model.tables, rows, strict=True)),
            all(
                all(map(same, cells(each.weight.row_store, own_ids(each)), one))
                for each, one in zip(model.tables, own, strict=True)
            ),
        ]
        model.deep.set_rows(every, torch.zeros(COUNT, WIDTH))
        for load, name in ((model.deep.load, "deep"), (run.load, "saved")):
            # The last process finds no file: the others wait for it, and have not begun.
            path = folder / (name if rank < processes - 1 else "none")
            found[f"no {name}"] = said(functools.partial(load, path))
            if rank == processes - 1:
                found[f"after no {name}"] = said(lambda: model.deep.rows(every[:1]))
        found["not loaded"] = not model.deep.rows(every).any()
        model.deep.load(folder / "deep", state=True)
        found["imported"] = same(model.deep.rows(every), rows[1])
    if rank == 0:  # and a process that has all of them
        alone = Net()
        with offload(
            alone, steppers(alone, "SparseAdam"), settings("disk", folder / "alone", 1), alone=True
        ) as run:
            run.load(folder / "saved")
            found["by one"] = all(
                same(each.rows(every), one) for each, one in zip(alone.tables, rows, strict=True)
            )
    return found


def torn(path: Path, entries: Any, tensors: Any, metadata: Any) -> None:  # noqa: ANN401
    """Write some blocks, and fail then, as a full disk does."""
    del path, entries, metadata
    for each in tensors:
        if not isinstance(each, Tensor):
            next(each)
            raise BackendError("the disk is full")


def failed(rank: int, processes: int, folder: Path) -> object:
    """A pass that fails loses nothing of those before; clearing gradients clears what was averaged, too."""
    ids = torch.arange(400)
    found: dict[str, object] = {}
    whole = EmbeddingTable(400, 4, seed=3).rows(ids)
    with small(folder, processes) as (table, optimizer, _):
        for clears in (True, False, None):
            table.load_state_dict({"weight": whole})
            table(ids[:10]).sum().backward()
            before = torch.ones(1, requires_grad=True) * 1.0
            before.register_hook(failing)
            # The lookup is done with before the hook is called.
            found[f"said {clears}"] = said((table(ids[:20]).sum() + before.sum()).backward)
            times = torch.zeros(400)
            if clears is None:
                times[:10] += 1
                times[:20] += 1
            else:
                optimizer.zero_grad(set_to_none=clears)
            table(ids[:30]).sum().backward()
            times[:30] += 1
            optimizer.step()
            optimizer.zero_grad()
            found[str(clears)] = same(table.rows(ids), whole - 0.5 * times[:, None])
    return found


def suspended(rank: int, processes: int, folder: Path) -> object:
    """While a run is suspended its tables are refused before anything is sent; averages stay."""
    ids = torch.arange(400)
    found: dict[str, object] = {}
    whole = EmbeddingTable(400, 4, seed=3).rows(ids)
    refused: dict[str, str] = {}
    with small(folder, processes, offload_cpu_size=f"{processes * 64}KB") as (table, optimizer, run):
        values = {"weight": whole}
        (table(ids[: 10 + rank]) * processes).sum().backward()
        begun = table(ids[:5]).sum()
        run.suspend(to="disk")
        refused["lookup"] = said(lambda: table(ids))
        if rank == 0:  # what is refused is nobody else's business
            refused["rows"] = said(lambda: table.rows(ids))
            refused["set_rows"] = said(lambda: table.set_rows(ids[:1], whole[:1]))
            refused["copy_"] = said(lambda: table.load_state_dict(values))
            refused["prefetch"] = said(lambda: table.prefetch(ids))
            refused["load"] = said(lambda: table.load(folder))
            refused["step"] = said(optimizer.step)
        table.export(folder / "meanwhile")
        run.resume()
        exported = torch.from_numpy(numpy.load(next((folder / "meanwhile").glob("rows-*"))))
        found["exported"] = same(exported, whole)
        found["same"] = same(table.rows(ids), whole)
        (begun * processes).backward()
        optimizer.step()
        times = torch.zeros(400)
        for each in range(processes):
            times[: 10 + each] += 1
        times[:5] += processes
        found["stepped"] = same(table.rows(ids), whole - 0.5 * times[:, None])
        optimizer.zero_grad()
        run.suspend(to="disk")
        refused["grow"] = said(lambda: table.grow(500 + rank))
        run.resume()
    model = nn.Sequential(EmbeddingTable(400, 4, seed=3), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = SGD(model[0].parameters(), lr=0.5)
    # A graph has values in host memory that the last module was given.
    with offload(model, optimizer, settings("three", folder, processes), placement={"2": "cpu"}) as run:
        model(ids[:10]).sum().backward()
        waiting = model(ids[:10]).sum()
        refused["values wait"] = said(lambda: run.suspend(to="disk"))
        del waiting
        found["average stays"] = said(optimizer.step)
    found["refused"] = {what: "suspend" in text or text for what, text in refused.items()}
    return found


def gone_on_with(rank: int, processes: int, folder: Path) -> object:
    """What a first step keeps is there when a run is opened, and a step that fails is gone on with."""
    ids = torch.arange(400)
    found: dict[str, object] = {}
    model = nn.ModuleList([EmbeddingTable(400, 4, seed=3), EmbeddingTable(400, 4, seed=4)])
    tables = [each for each in model if isinstance(each, EmbeddingTable)]
    optimizer = LazyAdam(model.parameters(), lr=0.5)
    twin = copy.deepcopy(model)
    other = LazyAdam(twin.parameters(), lr=0.5)
    with offload(model, optimizer, settings("host", folder, processes)) as run:
        stores = [each.weight.row_store for each in tables]
        found["begun"] = [len(each.columns) for each in stores]
        begins = [each.weight.states_begun for each in tables]
        for each in (*tables, *twin):
            (each(ids[:50]) * torch.arange(4.0)).sum().backward()
        visit = stores[1].visit
        stores[1].visit = failing  # type: ignore[method-assign]
        found["failed"] = said(optimizer.step)
        stores[1].visit = visit  # type: ignore[method-assign]
        optimizer.step()
        other.step()
        found["once"] = all(
            same(each.rows(ids), one.rows(ids))
            for each, one in zip(tables, twin, strict=True)
            if isinstance(one, EmbeddingTable)
        )
        found["anew"] = [each.weight.states_begun for each in tables] != begins
        run.close(restore=False)
    # What was released begins with other weights, spread again.
    rows = torch.arange(1600.0).view(400, 4)
    made = {"0.weight": rows, "1.weight": rows + 1}
    path = folder / f"{rank}.safetensors"
    write_file(path, [HeaderEntry.of(*each) for each in made.items()], made.values(), {})
    del optimizer, run
    with offload(
        model,
        LazyAdam(model.parameters(), lr=0.5),
        settings("host", folder, processes),
        weights=path,
    ):
        found["weights"] = [same(each.rows(ids), rows + n) for n, each in enumerate(tables)]
        found["parts"] = [each.weight.row_store.own_rows is not None for each in tables]
    return found


class Story:
    """A table that is spread, beside a dense tensor of what its rows have to be; all processes choose alike.

    Numbers are whole and small, and there are two processes or four, so that sums are exact in any order.
    """

    def __init__(self, seed: int, folder: Path, processes: int) -> None:
        self._alike = random.Random(seed)
        self._own = torch.Generator().manual_seed(100 * seed + torch.distributed.get_rank())
        self._processes = processes
        self._folder = folder / str(seed)
        self._config = {
            **settings("disk", self._folder, processes),
            "offload_cpu_size": f"{processes * 80}KB",
            "durable": True,
        }
        self._exports = 0
        self._begin(2000)
        self._kept: tuple[int, Tensor] | None = None
        self.counts: Counter[str] = Counter()

    def _begin(self, rows: int) -> None:
        self._table = EmbeddingTable(rows, 40, init=1.0)
        self._optimizer = SGD(self._table.parameters(), lr=1.0)
        self._run = offload(self._table, self._optimizer, self._config)
        self._expected = torch.ones(rows, 40)

    def act(self) -> None:
        """Do one thing, and look at some rows."""
        act = self._alike.choices(
            [self._write, self._step, self._grow, self._prefetch, self._keep, self._go_back, self._export],
            [6, 8, 1, 2, 2, 1, 1],
        )[0]
        act()
        self.counts[act.__name__] += 1
        ids = self._ids(60)
        assert same(self._table.rows(ids), self._expected[ids]), act.__name__

    def _ids(self, most: int) -> Tensor:
        count = int(torch.randint(0, most, (), generator=self._own))
        return torch.randint(0, len(self._expected), (count,), generator=self._own)

    def _write(self) -> None:
        ids = self._ids(50)
        values = torch.randint(-64, 64, (len(ids), 40), generator=self._own).float()
        self._table.set_rows(ids, values)
        for their_ids, theirs in gathered((ids, values)):
            for number, value in zip(their_ids.tolist(), theirs, strict=True):
                self._expected[number] = value

    def _step(self) -> None:
        ids, factor = self._ids(200), self._alike.choice([2.0, -4.0, 6.0])
        (self._table(ids) * factor).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        for theirs in gathered(ids):
            times = torch.bincount(theirs, minlength=len(self._expected))
            self._expected -= times[:, None] * (factor / self._processes)

    def _grow(self) -> None:
        more = self._alike.randint(0, 300)
        self._table.grow(len(self._expected) + more)
        self._expected = torch.cat([self._expected, torch.ones(more, 40)])

    def _prefetch(self) -> None:
        self._table.prefetch(self._ids(100))

    def _keep(self) -> None:
        self._run.checkpoint()
        self._kept = len(self._expected), self._expected.clone()

    def _go_back(self) -> None:
        self._run.close(restore=False)
        rows, expected = self._kept or (2000, torch.ones(2000, 40))
        self._begin(rows)
        self._expected = expected.clone()
        assert (self._run.resumed is None) == (self._kept is None)

    def _export(self) -> None:
        self._exports += 1
        path = self._folder / f"export-{self._exports}"
        self._table.export(path, shard_bytes="30KB")
        self._write()
        before = self._expected.clone()
        self._table.load(path)
        files = sorted(path.glob("rows-*"))
        self._expected = torch.cat([torch.from_numpy(numpy.load(file)) for file in files])
        assert self._expected.shape == before.shape

    def end(self) -> None:
        """Look at all rows."""
        assert same(self._table.rows(torch.arange(len(self._expected))), self._expected)
        self.counts["written"] = self._run.stats().tables["weight"].page_bytes_written
        self._run.close(restore=False)


def stories(rank: int, processes: int, folder: Path) -> object:
    """Tables in parts beside a dense tensor, through everything that can be done with them."""
    counts: Counter[str] = Counter()
    for seed in range(int(os.environ.get("TIERSTORE_STORIES", "2"))):
        story = Story(seed, folder, processes)
        for _ in range(40):
            story.act()
        story.end()
        counts += story.counts
    return counts
