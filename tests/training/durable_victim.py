"""Trains in a child process that is killed again and again, until it comes to its end.

``python -m tests.training.durable_victim JOBS``, of each job of a JSON list the subject, the folder, a seed,
how many kills, and the layouts: one life after another goes on from the last checkpoint, each under one of
the layouts; a life ends by SIGKILL at some operation of the store or of the disk (a write may be torn then;
each phase has its turn), or with the training's end, whose outcome is written to the folder.  The next
training begins in a directory of its own.  ``kills.txt`` tells what each life was at.

Lives are forked from one process that has imported everything and started no thread.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierstore as ts
from tests.imported_ahead import import_ahead
from tests.training.table_models import Clicks, HotClicks, loss_of_clicks, table_config
from tests.training.twins import WIDTH, Block, batch, config_of, loss_of, with_device
from tierstore.optim import LazyAdam
from tierstore.training import offload
from tierstore_backends.files.durability.manifest import Manifest
from tierstore_backends.files.io.kernel import KERNEL

STEPS = 8
STEPS_A_CHECKPOINT = 2
OUTCOME = "outcome.pt"


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Attributes:
        build: returns the model and its optimizer, at their beginning.
        loss: of one batch.
        config: of a layout, with files at a path.
    """

    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
    loss: Callable[[nn.Module], torch.Tensor]
    config: Callable[[str, Path, Mapping[str, object]], Mapping[str, object]]


def _build_dense() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), Block(), nn.Linear(WIDTH, 5))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def _build_tables(model_of: Callable[[], Clicks] = Clicks) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = model_of()
    return model, LazyAdam(model.parameters(), lr=1e-2)


def _with_room_for_hot_rows(layout: str, path: Path, more: Mapping[str, object]) -> Mapping[str, object]:
    return table_config(layout, path, {**with_device(layout, "512KB"), **more})


def _config_on_host(layout: str, path: Path, more: Mapping[str, object]) -> Mapping[str, object]:
    return config_of(layout, path, {"optimizer_target": "cpu", "offload_cpu_size": "512KB", **more})


SUBJECTS = {
    "stepped on the host": Subject(_build_dense, lambda model: loss_of(model, *batch()), _config_on_host),
    "dense": Subject(_build_dense, lambda model: loss_of(model, *batch()), config_of),
    "tables": Subject(_build_tables, loss_of_clicks, table_config),
    "hot tables": Subject(partial(_build_tables, HotClicks), loss_of_clicks, _with_room_for_hot_rows),
}


class Moment:
    """Counts operations in each phase, in whatever thread, and kills the process at one of them.

    Args:
        fatal: the phase to die in.
        number: of the operation in that phase to die at; 0: at none.
        note: told what the program was at.
    """

    def __init__(self, fatal: str, number: int, note: Callable[[str], None]) -> None:
        self.fatal = fatal
        self.number = number
        self.counts: Counter[str] = Counter()
        self.phase = "opening"
        self._note = note
        self._lock = threading.Lock()

    def is_now(self) -> bool:
        """Count one more; return whether it is the one."""
        with self._lock:
            self.counts[self.phase] += 1
            return self.phase == self.fatal and self.counts[self.phase] == self.number

    def die(self, at: str) -> None:
        """End the process as it is."""
        self._note(f"{self.phase} {at}\n")
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    def pass_by(self, at: str) -> None:
        """Count an operation; die if it is the one."""
        if self.is_now():
            self.die(at)


def watch(moment: Moment) -> None:
    """Let every operation of the store and the disk in this process pass by the moment, before and after."""
    kernel: Any = type(KERNEL)
    for owner, names in (
        (ts.Store, ("put", "lease", "evict", "rename", "flush", "drop")),
        (kernel, ("read", "allocate", "punch", "truncate", "sync", "sync_folder")),
        (Manifest, ("commit",)),
    ):
        for name in names:
            setattr(owner, name, _watched(getattr(owner, name), name, moment))
    write = kernel.write

    def torn_write(self: object, fd: int, vector: Sequence[memoryview], offset: int) -> int:
        if moment.is_now():
            half = memoryview(vector[0])[: len(vector[0]) // 2 // 4096 * 4096]
            if len(half):
                write(self, fd, [half], offset)
            moment.die("write")
        return int(write(self, fd, vector, offset))

    kernel.write = torn_write


def _watched(function: Callable[..., Any], name: str, moment: Moment) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever it is
        moment.pass_by(name)
        result = function(*args, **kwargs)
        moment.pass_by(f"{name}'s end")
        return result

    return watched


def train(subject: Subject, config: Mapping[str, object] | None, moment: Moment) -> dict[str, Any]:
    """Train to the end, from the beginning or from a checkpoint; ``None``: without offloading."""
    model, optimizer = subject.build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    torch.manual_seed(1)
    losses: list[torch.Tensor] = []
    with offload(model, optimizer, config or {"memory_offload": "OFF"}) as run:
        if run.resumed is not None:
            losses += run.resumed.extra["losses"]
            scheduler.load_state_dict(run.resumed.extra["scheduler"])
        while len(losses) < STEPS:
            moment.phase = "forward"
            loss = subject.loss(model)
            moment.phase = "backward"
            loss.backward()
            moment.phase = "step"
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.detach())
            if config is not None:
                _end_step(run, moment, losses, scheduler)
        moment.phase = "closing"
    return {
        "losses": losses,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }


def _end_step(
    run: Any,  # noqa: ANN401 - an `Offload`
    moment: Moment,
    losses: list[torch.Tensor],
    scheduler: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    if len(losses) % STEPS_A_CHECKPOINT == 0:
        moment.phase = "checkpoint"
        run.checkpoint({"losses": losses, "scheduler": scheduler.state_dict()})
    moment.phase = "evict"
    run.store.evict(*(key for key in run.store if key.startswith("state/"))).result()


def live(work: Callable[[], None]) -> int:
    """Do something in a child process; return how it ended: 0, or minus the signal."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # anew: the child's threads would ask for a pool that is its parent's
            work()
            status = 0
        finally:
            if status:
                sys.excepthook(*sys.exc_info())
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


class Trainings:
    """Trainings in a folder, each in a directory of its own, led by lives that may be killed.

    Args:
        folder: where everything is.
        subject: what is trained.
    """

    def __init__(self, folder: Path, subject: Subject) -> None:
        self._subject = subject
        self._folder = folder
        self._journal = os.open(folder / "kills.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self._count = folder / "count.txt"
        self._number = 0

    def expect(self) -> None:
        """Train without offloading, to have what every training has to come to."""
        torch.save(train(self._subject, None, Moment("", 0, void)), self._folder / "expected.pt")

    def lead(self, layout: str, fatal: str = "", number: int = 0) -> bool:
        """Lead the present training on until its end, or until a life dies at an operation of a phase.

        Returns:
            Whether the life was killed; if not, the next one begins another training.
        """
        directory = self._folder / f"training-{self._number}"
        directory.mkdir(exist_ok=True)

        def life() -> None:
            moment = Moment(
                fatal, number, lambda text: void(os.write(self._journal, f"{layout} {text}".encode()))
            )
            watch(moment)
            config = self._subject.config(layout, directory, {"durable": True})
            torch.save(train(self._subject, config, moment), directory / OUTCOME)
            self._count.write_text(json.dumps(moment.counts))

        end = live(life)
        if end not in (0, -signal.SIGKILL):
            raise RuntimeError(f"a life of {layout} in {directory} ended with {end}")
        self._number += end == 0
        return end != 0

    @property
    def operations(self) -> dict[str, int]:
        """How many operations the last whole life had, by phase."""
        counts: dict[str, int] = json.loads(self._count.read_text())
        return counts


def main(subject: Subject, folder: Path, seed: int, kills: int, layouts: Sequence[str]) -> None:
    """Let trainings be killed so many times, in one phase after the other, and then the last come to its end.

    Raises:
        RuntimeError: a life ended in another way.
    """
    chance = random.Random(seed)
    trainings = Trainings(folder, subject)
    live(trainings.expect)
    trainings.lead(layouts[0])
    phases = trainings.operations
    left: list[str] = []
    for _ in range(kills):
        left = left or chance.sample(sorted(phases), len(phases))
        fatal = left.pop()
        is_killed = False
        while not is_killed:
            # What is left of a training that goes on has fewer of them.
            number = chance.randint(1, max(1, phases[fatal] // 2))
            is_killed = trainings.lead(chance.choice(layouts), fatal, number)
    trainings.lead(layouts[-1])


def void(_: object) -> None:
    """Do nothing."""


if __name__ == "__main__":
    torch.set_num_threads(1)
    import_ahead()  # no life looks for referrers, or for tensors, among all of it
    for subject, folder, seed, kills, layouts in json.loads(sys.argv[1]):
        main(SUBJECTS[subject], Path(folder), seed, kills, layouts)
