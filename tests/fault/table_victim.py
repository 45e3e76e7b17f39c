"""A table on a durable disk, written to in one life after another, each killed in the midst of it.

``python -m tests.fault.table_victim FOLDER LIVES SEED``: each life goes on from the last checkpoint that was
flushed, compares every row with what it has to be, and is killed by SIGKILL at some operation of the log or
of a checkpoint.  The last one comes to its end.  Prints what the lives were killed at.

Lives are forked from one process that has imported everything and started no thread.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import tierstore as ts
from tierstore.tables import Column, LogPlace, NormalRows, RowStore, Snapshot, StoreBlocks, TableHome
from tierstore.tables.layout import Indices

ROWS, WIDTH, BATCH, STEPS_A_CHECKPOINT = 400, 300, 12, 4
COLUMNS = (Column("rows", 0.0), Column("sum", 0.1))
KINDS = "before put", "after put", "read", "before drop", "after drop", "before flush", "after flush"
PREFIX, MAP, STEP = "table/deep/log/", "table/deep/map", "step"


class Deadline:
    """Counts operations of a kind, and ends the process at one of them.

    Args:
        kind: of `KINDS`; None: never.
        number: of the operation.
        log: a file for what it was at.
    """

    def __init__(self, kind: str | None, number: int, log: Path) -> None:
        self._kind = kind
        self._left = number
        self._log = log

    def pass_by(self, what: str) -> None:
        """Count an operation."""
        self._left -= what == self._kind
        if what == self._kind and self._left == 0:
            with self._log.open("a") as file:
                file.write(f"{what}\n")
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()


class DeadlyBlocks(StoreBlocks):
    """Blocks of a store whose process may end before and after each operation."""

    deadline: Deadline

    def put(self, name: str, block: torch.Tensor) -> None:
        self.deadline.pass_by("before put")
        super().put(name, block)
        self.deadline.pass_by("after put")

    def read(self, parts: Mapping[str, Indices], into: torch.Tensor) -> None:
        self.deadline.pass_by("read")
        super().read(parts, into)

    def drop(self, names: Sequence[str]) -> None:
        self.deadline.pass_by("before drop")
        super().drop(names)
        self.deadline.pass_by("after drop")


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a step and what is written to them."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randperm(ROWS, generator=generator)[:BATCH].sort().values
    return ids, torch.randn(BATCH, WIDTH, generator=generator)


def expected(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and states after so many steps."""
    rows = NormalRows(WIDTH, torch.float32, 5)(torch.arange(ROWS))
    sums = torch.full((ROWS, WIDTH), 0.1)
    for step in range(steps):
        ids, values = batch(step)
        rows[ids], sums[ids] = values, sums[ids] + values
    return rows, sums


def life(folder: Path, deadline: Deadline, steps: int) -> None:
    """Go on from the last checkpoint for some steps, or to the deadline."""
    tier = ts.TierConfig("disk", "files", "4MiB", options={"path": str(folder / "disk"), "durable": True})
    store = ts.Store(ts.StoreConfig([ts.TierConfig("host", "memory", "1MiB"), tier]))
    blocks = DeadlyBlocks(store)
    blocks.deadline = deadline
    home = TableHome(torch.empty(8 * 4096, dtype=torch.uint8), LogPlace(blocks, PREFIX, 4 * 4096))
    initial = NormalRows(WIDTH, torch.float32, 5)
    if MAP in store:
        begin = int(store.get(STEP))
        snapshot = Snapshot.from_tensor(store.get(MAP), PREFIX, COLUMNS)
        table = RowStore.restored(snapshot, WIDTH, torch.float32, initial, home, name="deep")
    else:
        begin, table = 0, RowStore(ROWS, WIDTH, torch.float32, initial, name="deep")
        lost = [key for key in store if key.startswith(PREFIX)]
        if lost:
            store.drop(*lost)
        table.ensure_columns(COLUMNS)
        table.attach(home)
    compare(table, begin)
    for step in range(begin, begin + steps):
        ids, values = batch(step)
        table.prefetch(batch(step + 1)[0])
        for visit in table.visit(ids):
            visit.scatter("rows", values[visit.part])
            visit.scatter("sum", visit.gather("sum") + values[visit.part])
        if (step + 1) % STEPS_A_CHECKPOINT == 0:
            checkpoint(store, table, step + 1, deadline)
    table.close()
    store.close(flush=False)


def checkpoint(store: ts.Store, table: RowStore, step: int, deadline: Deadline) -> None:
    """Make what the table is now durable."""
    table.write_back()
    snapshot = table.snapshot()
    store.put(MAP, snapshot.as_tensor(), tier="disk", replace=True)
    store.put(STEP, torch.tensor(step), tier="disk", replace=True)
    deadline.pass_by("before flush")
    store.flush(MAP, STEP, *snapshot.blocks)
    deadline.pass_by("after flush")
    table.keep(snapshot)


def compare(table: RowStore, step: int) -> None:
    """Raise unless every row is what it has to be."""
    rows, sums = expected(step)
    for visit in table.visit(torch.arange(ROWS)):
        if not torch.equal(visit.gather(), rows[visit.part]) or not torch.equal(
            visit.gather("sum"), sums[visit.part]
        ):
            raise AssertionError(f"rows {visit.part} are not those of step {step}")


def main(folder: Path, lives: int, seed: int) -> None:
    """Let the lives follow each other."""
    chance = random.Random(seed)
    torch.set_num_threads(1)
    for number in range(lives + 1):
        is_last = number == lives
        kind, at = (None, 0) if is_last else (KINDS[number % len(KINDS)], chance.randint(1, 12))
        child = os.fork()
        if not child:
            torch.set_num_threads(1)  # anew: the child's threads would ask for a pool that is its parent's
            try:
                deadline = Deadline(kind, at, folder / "ends.txt")
                life(folder, deadline, 2 * STEPS_A_CHECKPOINT if is_last else 200)
            except BaseException:  # noqa: BLE001 - it is told, and the child ends here
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        wanted = 0 if is_last else -signal.SIGKILL
        if os.waitstatus_to_exitcode(status) != wanted:
            raise SystemExit(f"life {number}, to be killed at {at} of {kind!r}, ended with {status}")
    print(sorted(Counter((folder / "ends.txt").read_text().splitlines()).items()))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
