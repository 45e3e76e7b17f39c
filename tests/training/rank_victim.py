"""Training in several processes, one of which is killed at some operation of its checkpoints.

``python -m tests.training.rank_victim FOLDER STRIDE SUBJECT``: a process is killed at every ``STRIDE``-th
operation that it makes in a checkpoint, or in opening after it; another life of all of them goes on then to
the end.  ``SUBJECT`` is "dense", or "tables", whose rows are spread over the processes.
What each training came to is written to the folder, and ``kills.json`` tells what the kills hit.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.imported_ahead import import_ahead
from tests.training.durable_victim import Moment, void, watch
from tests.training.rank_lives import begin_group, lead
from tests.training.rank_tables import (
    COUNT,
    Net,
    average_all,
    batch_of,
    cells,
    loss_of,
    steppers,
    wrapped,
)
from tests.training.twins import WIDTH, Block, config_of
from tierstore.training import offload
from tierstore.units import parse_bytes

PROCESSES = 2
STEPS = 5
STEPS_A_CHECKPOINT = 2
OUTCOME = "outcome"


def config(folder: Path) -> dict[str, object]:
    """Return the configuration of a machine with these processes."""
    one = config_of("disk", folder, {"durable": True})
    return {**one, "offload_cpu_size": PROCESSES * parse_bytes(str(one["offload_cpu_size"]))}


def train(rank: int, given: Mapping[str, object] | None, moment: Moment) -> dict[str, Any]:
    """Train to the end, from the beginning or from a checkpoint; ``None``: without offloading."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Dropout(0.1), Block(), nn.Linear(WIDTH, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    runner = DistributedDataParallel(model)
    torch.manual_seed(1 + rank)
    losses: list[torch.Tensor] = []
    with offload(runner, optimizer, given or {"memory_offload": "OFF"}) as run:
        if run.resumed is not None:
            losses += run.resumed.extra["losses"]
        while len(losses) < STEPS:
            moment.phase = "step"
            loss = runner(torch.randn(6, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if given is not None and len(losses) % STEPS_A_CHECKPOINT == 0:
                moment.phase = f"checkpoint {len(losses) // STEPS_A_CHECKPOINT}"
                run.checkpoint({"losses": losses})
        moment.phase = "closing"
    return {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict()}


def train_tables(rank: int, given: Mapping[str, object] | None, moment: Moment) -> dict[str, Any]:
    """Train tables that are spread over the processes; ``None``: each has all rows and all occurrences."""
    torch.manual_seed(0)
    model = Net()
    optimizers = steppers(model, "LazyAdam")
    losses: list[torch.Tensor] = []
    larger = None if given is None else {**given, "offload_cpu_size": f"{PROCESSES * 208}KB"}
    with offload(model, optimizers, larger or {"memory_offload": "OFF"}) as run:
        runner = wrapped(model) if given is None else DistributedDataParallel(model)
        if run.resumed is not None:
            losses += run.resumed.extra["losses"]
        while len(losses) < STEPS:
            moment.phase = "step"
            loss = loss_of(runner, batch_of(len(losses), 0, rank, PROCESSES))
            loss.backward()
            if given is None:
                average_all(model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if given is not None and len(losses) % STEPS_A_CHECKPOINT == 0:
                moment.phase = f"checkpoint {len(losses) // STEPS_A_CHECKPOINT}"
                run.checkpoint({"losses": losses})
        moment.phase = "looking"
        every = torch.arange(COUNT)
        rows = [each.rows(every) for each in model.tables]
        states = [
            part
            for table, ids in zip(model.tables, own_parts(PROCESSES, rank, model), strict=True)
            for part in cells(table.weight.row_store, ids)
        ]
        moment.phase = "closing"
    return {"losses": losses, "rows": rows, "states": states, "head": model.head.state_dict()}


def own_parts(processes: int, rank: int, model: Net) -> list[torch.Tensor]:
    """Return which rows of each table a process has, whether they are spread or not."""
    every = torch.arange(COUNT)
    return [
        every[every // (4096 // (3 * 4 * each.embedding_dim)) % processes == rank] for each in model.tables
    ]


TRAININGS = {"dense": train, "tables": train_tables}


class Machine:
    """Lives of all processes, in a folder.

    Args:
        folder: where everything is.
        subject: what is trained.
    """

    def __init__(self, folder: Path, subject: str = "dense") -> None:
        self._folder = folder
        self._train = TRAININGS[subject]
        self._groups = itertools.count()

    def live(
        self,
        training: Path,
        fatal: Mapping[int, tuple[str, int]],
        *,
        is_plain: bool = False,
        ends_others: bool = True,
    ) -> list[Any]:
        """Lead one life; return what each process counted, or how it ended.

        Args:
            training: the folder of the training.
            fatal: by rank, the phase and the operation to die at.
            is_plain: whether nothing is offloaded.
            ends_others: see `lead`.
        """
        group = self._folder / f"group-{next(self._groups)}"

        def life(rank: int) -> object:
            begin_group(rank, PROCESSES, group)
            note = group.with_suffix(f".at{rank}")
            moment = Moment(*fatal.get(rank, ("", 0)), lambda text: void(note.write_text(text)))
            if not is_plain:
                watch(moment)
            outcome = self._train(rank, None if is_plain else config(training), moment)
            torch.save(outcome, training / f"{OUTCOME}-{rank}.pt")
            distributed.barrier()
            return moment.counts

        found = lead(life, PROCESSES, group.with_suffix(".out"), ends_others=ends_others)
        self.killed_at = {
            rank: at.read_text() for rank in fatal if (at := group.with_suffix(f".at{rank}")).exists()
        }
        return found


def main(folder: Path, stride: int, subject: str) -> None:
    """Kill at each of the operations."""
    machine = Machine(folder, subject)
    expected = folder / "expected"
    expected.mkdir()
    found = machine.live(expected, {}, is_plain=True)
    whole = folder / "whole"
    whole.mkdir()
    counts = machine.live(whole, {})[0]
    assert isinstance(counts, dict), (found, counts)
    points = [
        (phase, number)
        for phase, start in (("opening", 8), ("checkpoint 1", 13), ("checkpoint 2", 3))
        for number in range(1 + (start - 1) % stride, counts[phase] + 1, stride)
    ]
    kills = []
    for index, (phase, number) in enumerate(points):
        training = folder / f"training-{index}"
        training.mkdir()
        fatal = {index % PROCESSES: (phase, number)}
        first = machine.live(training, fatal, ends_others=phase != "checkpoint 2")
        kills.append({"at": machine.killed_at, "first": first})
        if index % 3 == 0:  # again, while all go on
            again = machine.live(
                training, {(index + 1) % PROCESSES: ("opening", 1 + number % counts["opening"])}
            )
            kills.append({"at": machine.killed_at, "first": again})
        kills.append({"at": {}, "first": machine.live(training, {})})
    (folder / "kills.json").write_text(json.dumps(kills))


if __name__ == "__main__":
    torch.set_num_threads(1)
    import_ahead()
    with contextlib.redirect_stderr(sys.stdout):
        main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
