"""One process of those over which tables are spread ends, fails, or does something alone; scenarios."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests.training.rank_table_rules import small
from tests.training.rank_tables import said, settings
from tests.training.twins import same
from tierstore.nn import EmbeddingTable
from tierstore.optim import SGD
from tierstore.training import offload

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
        found["closed"] = alone(is_last, run.close, table)
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
        run.suspend()
        found["resume"] = said(run.resume if is_last else run.checkpoint)
        run.resume()
        run.checkpoint()
        table(IDS).sum().backward()
        optimizer.step()
        found["stepped"] = same(table.rows(IDS), before - 0.5)
        wrapper = DistributedDataParallel(model)
        with Join([wrapper]):
            found["join"] = said(lambda: wrapper(IDS))
    return found


def killed(rank: int, processes: int, folder: Path) -> object:
    """The last process ends without a word."""
    with small(folder, processes) as (table, _, _):
        table(IDS)
        found = {} if rank == processes - 1 else {"said": said(lambda: table(IDS))}
        folder.with_suffix(f".{rank}").write_text(json.dumps(found))
        os._exit(0)
