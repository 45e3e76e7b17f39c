"""One process of those over which tables are spread ends, fails, or does something alone; scenarios."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, distributed
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests.training.rank_table_rules import failing, small
from tests.training.rank_tables import cells, gathered, said, settings
from tests.training.twins import same
from tierstore.nn import EmbeddingTable
from tierstore.optim import SGD, LazyAdam
from tierstore.tables import Column
from tierstore.training import leaving, offload
from tierstore.training.budgets.host_room import Shortage

IDS = torch.arange(400)


class Stopped(Exception):  # noqa: N818 - what a program calls its own
    """What a program raises."""


def alone(is_it: bool, act: Callable[[], object], table: EmbeddingTable) -> str:
    """Let one process do something, and the others look rows up; return what each was told."""
    return said(act if is_it else lambda: table(IDS))


def ends(rank: int, processes: int, folder: Path) -> object:
    """The last process ends before the others, by itself or by an error: they are told, and do not wait."""
    found: dict[str, object] = {}
    is_last = rank == processes - 1
    with small(folder, processes) as (table, _, run):
        table(IDS)
        found["closed"] = alone(is_last, lambda: run.close(restore=False), table)
        found["closed, again"] = said(lambda: table(IDS))
    for name in ("lookup", "backward"):

        def train(name: str = name) -> None:
            with small(folder, processes) as (table, _, _):
                loss = table(IDS).sum()
                if is_last:
                    raise Stopped("no more data " + 400 * ".")
                loss.backward() if name == "backward" else table(IDS)

        found[name] = said(train)
    with small(folder, processes) as (table, _, run):
        exchange = run._ranks._tables._exchange
        send = exchange.send
        if is_last:
            exchange.send = interrupted
        found["midway"] = said(lambda: table(IDS))
        exchange.send = send
        found["midway, again"] = said(lambda: table(IDS))
    return found


def interrupted(*_: object) -> None:
    """Fail as a process does in whose midst something happens."""
    raise Stopped("just now")


def acts(rank: int, processes: int, folder: Path) -> object:
    """What the last process does alone that the others have to do, too: all are told, and go on."""
    found: dict[str, object] = {}
    is_last = rank == processes - 1
    table = EmbeddingTable(400, 4, seed=3)
    model = torch.nn.Sequential(table, torch.nn.Linear(4, 4))
    optimizer = SGD(table.parameters(), lr=0.5)
    with offload(model, optimizer, {**settings("disk", folder, processes), "durable": True}) as run:
        before = table.rows(IDS)
        found["suspend"] = alone(is_last, run.suspend, table)
        found["checkpoint"] = alone(is_last, run.checkpoint, table)
        found["on"] = same(table.rows(IDS), before)
        found["close"] = alone(is_last, run.close, table)
        run.suspend()
        found["resume"] = said(run.resume if is_last else run.checkpoint)
        run.resume()
        run.checkpoint()
        calls: Counter[str] = Counter()
        with counted(calls):
            loss = table(IDS).sum()
            found["messages of a lookup"] = calls.total()
            loss.backward()
            found["messages of backward"] = calls.total() - 3
            optimizer.step()
            found["messages of a step"] = calls.total() - 7
        found["stepped"] = same(table.rows(IDS), before - 0.5)
        wrapper = DistributedDataParallel(model)
        with Join([wrapper]):
            found["join"] = said(lambda: wrapper(IDS))
    return found


@contextlib.contextmanager
def counted(calls: Counter[str]) -> Iterator[None]:
    """Count what is sent, inside the context."""
    with contextlib.ExitStack() as patches:
        for name in ("all_to_all_single", "all_gather", "broadcast", "all_reduce", "barrier"):
            call = getattr(distributed, name)

            def count(
                *given: object, call: Callable[..., object] = call, name: str = name, **more: object
            ) -> object:
                calls[name] += 1
                return call(*given, **more)

            patches.enter_context(mock.patch.object(distributed, name, count))
        yield


def killed(rank: int, processes: int, folder: Path) -> object:
    """The last process ends without a word."""
    with small(folder, processes) as (table, _, _):
        table(IDS)
        found = {} if rank == processes - 1 else {"said": said(lambda: table(IDS))}
        folder.with_suffix(f".{rank}").write_text(json.dumps(found))
        os._exit(0)


class Pair(torch.nn.Module):
    """Two tables, one of them of two columns of states, and something dense."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = EmbeddingTable(900, 1, mode="sum", seed=1)
        self.deep = EmbeddingTable(900, 24, seed=2)
        self.dense = torch.nn.Linear(24, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ``[batch, fields]`` ids to ``[batch]``."""
        found: Tensor = self.dense(self.deep(ids).mean(1)) + self.wide(ids)
        return found.squeeze(1)


def step(model: Pair, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Train one step, with batches that are the same everywhere: their average is each of them."""
    ids = torch.randint(0, 900, (16, 3), generator=torch.Generator().manual_seed(number))
    model(ids).square().sum().backward()
    for each in model.dense.parameters():
        each.grad = None
    optimizer.step()
    optimizer.zero_grad()


def returns(rank: int, processes: int, folder: Path) -> object:
    """Tables come back whole at the end of a run that all processes end, if they fit."""
    found: dict[str, object] = {}
    config = settings("disk", folder, processes)
    torch.manual_seed(0)
    model, twin = Pair(), Pair()
    twin.dense.load_state_dict(model.dense.state_dict())
    optimizer, other = (LazyAdam([each.wide.weight, each.deep.weight], lr=0.1) for each in (model, twin))
    for number in range(2):
        step(twin, other, number)
    with offload(model, optimizer, config) as run:
        for number in range(2):
            step(model, optimizer, number)
        for each in (model, twin):
            each.deep(IDS[:5]).sum().backward()
        run.suspend(to="disk")
    found["back"] = [
        *equal(model, twin),
        same(gradient_of(model), gradient_of(twin)),
        model.deep.weight.access.are_all_here,
    ]
    for number in range(2, 4):
        step(model, optimizer, number)
        step(twin, other, number)
    found["goes on"] = equal(model, twin)
    with offload(model, optimizer, config) as run:
        visit = model.deep.weight.row_store.visit
        if rank:
            model.deep.weight.row_store.visit = failing  # type: ignore[method-assign]
        found["cannot read"] = said(run.close)
        model.deep.weight.row_store.visit = visit  # type: ignore[method-assign]
        if rank:
            model.deep.weight.row_store.ensure_columns([Column("more", 0.0)])
        found["other states"] = said(run.close)
        if rank:
            model.deep.weight.row_store.drop_columns(["more"])
        found["stays"] = [
            model.wide.weight.access.are_all_here,
            same(model.deep.rows(IDS), twin.deep.rows(IDS)),
        ]
    found["then"] = equal(model, twin)
    found["interrupted"] = interrupted_at_the_end(rank, config)
    asked: list[int] = []
    run = offload(model, optimizer, config)
    assert run._session is not None
    tables = run._session.tables
    held = gathered(sum(tables.needed_bytes(each) for each in tables.attached()))
    with (
        mock.patch.object(
            leaving, "shortage", lambda _, needs: asked.append(sum(each.nbytes for each in needs))
        ),
        mock.patch.object(leaving, "_BLOCK_BYTES", 1),
    ):
        run.close()
    found["asked"] = asked[-1] - asked[0] == processes * sum(held) > 0
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tierstore").addHandler(handler)
    with mock.patch.object(leaving, "shortage", no_room if rank else enough):
        offload(model, optimizer, config).close()
    logging.getLogger("tierstore").removeHandler(handler)
    found["logged"] = [each for each in messages if "released" in each]
    found["released"] = said(lambda: model.deep(IDS))
    found["dense"] = all(map(same, model.dense.parameters(), twin.dense.parameters()))
    return found


def gradient_of(model: Pair) -> Tensor:
    """Return the gradient of the deep table."""
    gradient = model.deep.weight.grad
    assert gradient is not None
    return gradient.to_dense()


def interrupted_at_the_end(rank: int, config: Mapping[str, object]) -> list[str]:
    """Interrupt one process as rows come back; return what the others and it say of that, and of the rows."""
    table = EmbeddingTable(400, 4, seed=3)

    def leave() -> None:
        with offload(table, None, config) as run:
            table.set_rows(IDS, torch.ones(400, 4))
            if rank:
                run._ranks._tables._exchange.send = stopped  # type: ignore[union-attr, method-assign]

    try:
        ended = said(leave)
    except KeyboardInterrupt:
        ended = "interrupted"
    return [ended, said(lambda: table.rows(IDS))]


def stopped(*_: object) -> None:
    """Be interrupted."""
    raise KeyboardInterrupt


def equal(model: Pair, twin: Pair) -> list[bool]:
    """Return whether tables are the same, with what is kept beside them."""
    every = torch.arange(900)
    pairs = [(model.wide, twin.wide), (model.deep, twin.deep)]
    found = []
    for one, two in pairs:
        stores = one.weight.row_store, two.weight.row_store
        found.append(same(one.rows(every), two.rows(every)) and stores[0].columns == stores[1].columns)
        found[-1] &= all(map(same, cells(stores[0], every), cells(stores[1], every)))
    return found


def enough(*_: object) -> None:
    """Say that there is room."""


def no_room(store: object, needs: Iterable[object]) -> Shortage | None:
    """Say that there is none for more than two dozen kilobytes."""
    nbytes = sum(need.nbytes for need in needs)  # type: ignore[attr-defined]
    return Shortage(nbytes, 0, 0, 0, "nothing") if nbytes > 24 << 10 else None
