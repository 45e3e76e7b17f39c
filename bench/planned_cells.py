"""One cell of the planner's grid: a model under quotas, trained for real and predicted, step by step.

The device is an emulated one behind a link on which moving takes about as long as computing; where a cell
spills, host memory is too small for the rest, which lies on a disk whose rate is limited.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

import tierstore as ts
from bench.planned_models import PlannedModel
from bench.workload import wait_for_copies
from tierstore.planning import Placement, Program
from tierstore.planning.machine import Machine
from tierstore.planning.rules import HOST
from tierstore.planning.simulating import Conditions, simulate
from tierstore.planning.timeline import Timeline
from tierstore.testing.memory import DeviceBudget
from tierstore.training import Offload, offload
from tierstore.training.run_machine import machine_of, with_seen_rates

UNLIMITED_BYTES = 1024**4
SHARES = (0.7, 0.4, 0.25)
"""Of all that plain training has at its peak: the device's quotas, the largest first."""

MOST_LINK_BYTES_PER_S = 200_000_000
"""Well below what this machine copies, and its disk writes: else its own noise is what is measured."""

SPILLING_SHARE = 0.4
"""Of the device's quotas the one with too little host memory."""

LEARNING_STEPS = 4
"""The first one makes state, two are recorded, and after one more nothing is learned any more."""

CONDITIONS = Conditions(is_enforced=False)
"""Nothing ends a run that has more than its quota of an emulated device."""

_HOST_SHARE = 0.45  # of all that is stored, where a cell spills
_DISK_OVER_LINK = 0.5


@dataclass(frozen=True)
class PlainRun:
    """What training a model without offloading came to.

    Attributes:
        peak_bytes: of the device, all of it: model, inputs, gradients, state, activations, workspace.
        stored_bytes: what a store would have: parameters, their gradients and their state.
        step_s: of the quickest step.
    """

    peak_bytes: int
    stored_bytes: int
    step_s: float

    @classmethod
    def of(cls, model: PlannedModel, steps: int = 4) -> PlainRun:
        """Train some steps under a meter, and as many without one."""
        torch.manual_seed(0)
        with DeviceBudget(UNLIMITED_BYTES) as meter:
            trainee = PlannedTrainee(model)
            for _ in range(2):
                trainee.step()
            peak_bytes = meter.peak_bytes
        for _ in range(steps):
            trainee.step()
        return cls(peak_bytes, trainee.stored_bytes, min(trainee.seconds[2:]))


@dataclass(frozen=True)
class Quotas:
    """What a run may have, and how fast it moves.

    Attributes:
        device_bytes: of the device, for program and store together.
        host_bytes: of host memory.
        disk_bytes: of the disk; 0: there is none.
        link_bytes_per_s: between device and host memory, each way.
        disk_bytes_per_s: of reads and writes together.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    link_bytes_per_s: int
    disk_bytes_per_s: int

    @classmethod
    def of(cls, plain: PlainRun, share: float) -> Quotas:
        """Return those of one cell.

        Args:
            plain: of the model.
            share: of the peak of plain training that the device has.
        """
        link = min(MOST_LINK_BYTES_PER_S, max(1, round(plain.stored_bytes / plain.step_s)))
        device_bytes = round(plain.peak_bytes * share)
        whole = cls(device_bytes, 4 * plain.stored_bytes, 0, link, round(link * _DISK_OVER_LINK))
        if share != SPILLING_SHARE:
            return whole
        host_bytes = round(_HOST_SHARE * plain.stored_bytes)
        return replace(whole, host_bytes=host_bytes, disk_bytes=4 * plain.stored_bytes)

    def config(self, path: Path, placement: Placement | None = None) -> ts.OffloadConfig:
        """Return the configuration of a run.

        Args:
            path: of its disk.
            placement: of everything; ``None``: as the run decides.
        """
        has_disk = self.disk_bytes > 0
        return ts.OffloadConfig(
            device="emulated",
            max_device_memory=self.device_bytes,
            offload_cpu_size=self.host_bytes,
            offload_disk_size=self.disk_bytes,
            offload_path=str(path),
            device_options={"link_bandwidth": self.link_bytes_per_s},
            disk_options={"max_bandwidth": self.disk_bytes_per_s} if has_disk else {},
            placement=None if placement is None else placement.to_mapping(),
        )


class PlannedTrainee:
    """A model in training, offloaded or not; use as a context manager.

    Args:
        model: which.
        config: how it is offloaded; ``None``: not at all.
        meter: of the device, which sees inputs, and all that comes after them; ``None``: nobody looks.

    Attributes:
        seconds: of each step so far.
        moved: bytes by link of each step so far.
        losses: of each step so far.
    """

    def __init__(
        self,
        model: PlannedModel,
        config: ts.OffloadConfig | None = None,
        meter: DeviceBudget | None = None,
    ) -> None:
        torch.manual_seed(0)
        self._trained = model
        self._model = model.make()
        self._meter = meter
        if meter is not None:  # what was made before is taken over by the store, and no tensor any more
            meter.__enter__()
        self._inputs, self._optimizer = model.inputs(), model.optimizer(self._model)
        self.seconds: list[float] = []
        self.moved: list[dict[str, int]] = []
        self.losses: list[torch.Tensor] = []
        self._config = config
        self._run: Offload | None = None
        self._machine: Machine | None = None
        if config is not None:
            self._run = offload(self._model, self._optimizer, config, on_close="release")
            opened = machine_of(self._run.store, config)
            assert config.max_device_bytes is not None
            self._machine = opened.with_capacities({opened.tiers[0].name: config.max_device_bytes})

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the run."""
        if self._run is not None:
            self._run.close()
        if self._meter is not None:
            self._meter.__exit__(None, None, None)

    @property
    def peak_bytes(self) -> int:
        """The most that was on the device so far, by the meter."""
        assert self._meter is not None
        return self._meter.peak_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of parameters, of gradients, and of state as it is now, that a store would have."""
        parameters = list(self._model.parameters())
        kept = [each for state in self._optimizer.state.values() for each in state.values()]
        return (
            sum(each.nbytes for each in parameters)
            + sum(each.nbytes for each in parameters if each.requires_grad)
            + sum(each.nbytes for each in kept if isinstance(each, torch.Tensor))
        )

    def step(self) -> None:
        """Train a step."""
        before = self._traffic()
        begun = time.perf_counter()
        loss = self._trained.loss(self._model, self._inputs)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - begun)
        self.moved.append(_more(before, self._traffic()))
        self.losses.append(loss.detach().clone())

    def _traffic(self) -> dict[str, int]:
        """Return the bytes between tiers so far, by link; what the program puts comes from the device."""
        if self._run is None:
            return {}
        device = self._run.store.tier_names[0]
        found: dict[str, int] = {}
        for pair, each in self._run.store.stats().traffic.items():
            source, target = (device if name == "caller" else name for name in pair)
            if source != target:
                link = f"{source}->{target}"
                found[link] = found.get(link, 0) + each.nbytes
        return found

    def settle(self) -> None:
        """Wait until no copy is under way; those that were count to the last step."""
        if self._run is None:
            return
        before = self._traffic()
        wait_for_copies(self._run.store)
        late = _more(before, self._traffic())
        if self.moved:
            last = self.moved[-1]
            self.moved[-1] = {link: last.get(link, 0) + late.get(link, 0) for link in {**last, **late}}

    # --- what the run tells -------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """Where the run has everything."""
        assert self._run is not None
        return self._run.placement

    @property
    def program(self) -> Program:
        """What one step does, as learned."""
        assert self._run is not None
        return self._run.program()

    @property
    def opened_machine(self) -> Machine:
        """The machine as it was known when the run was opened."""
        assert self._machine is not None
        return self._machine

    @property
    def machine(self) -> Machine:
        """The machine with links as fast as they were seen to be."""
        assert self._run is not None
        return with_seen_rates(self.opened_machine, self._run.recorded_copies())


def rules_of(model: PlannedModel, quotas: Quotas, path: Path) -> Placement:
    """Return the placement that a run is opened with; one that is given it as its own is not planned anew.

    Args:
        model: that is trained.
        quotas: that it has.
        path: of its disk.
    """
    with PlannedTrainee(model, quotas.config(path)) as opened:
        return opened.placement


@dataclass(frozen=True)
class Cell:
    """One model under quotas: what its run was, and what it came to.

    Attributes:
        name: of the model.
        share: of its peak that the device has.
        program: as learned.
        machine: with links as fast as they were seen to be.
        placement: of the run.
        moved: bytes by link of each step.
        seconds: of each step.
    """

    name: str
    share: float
    program: Program
    machine: Machine
    placement: Placement
    moved: Sequence[Mapping[str, int]]
    seconds: Sequence[float]

    @classmethod
    def of(cls, name: str, share: float, trainee: PlannedTrainee) -> Cell:
        """Return what a run has come to."""
        return cls(
            name,
            share,
            trainee.program,
            trainee.machine,
            trainee.placement,
            list(trainee.moved),
            list(trainee.seconds),
        )

    def predicted(self, program: Program | None = None) -> Timeline:
        """Simulate all of its steps.

        Args:
            program: learned elsewhere; ``None``: its own.
        """
        return simulate(
            program or self.program,
            self.machine,
            self.placement,
            conditions=CONDITIONS,
            steps=len(self.moved),
        )

    def predicted_step_s(self) -> float:
        """Simulate it to its steady state; return the seconds of a step there."""
        return simulate(self.program, self.machine, self.placement, conditions=CONDITIONS).step_s

    def __str__(self) -> str:
        """Name it."""
        return f"{self.name}, {self.share:g} of its peak"


def _more(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {link: nbytes - before.get(link, 0) for link, nbytes in now.items()}


def moved_in_all(steps: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the bytes of some steps together, by link, but for links on which nothing moved."""
    links = dict.fromkeys(link for step in steps for link in step)
    found = {link: sum(step.get(link, 0) for step in steps) for link in links}
    return {link: nbytes for link, nbytes in found.items() if nbytes}


def by_direction(moved: Mapping[str, int]) -> dict[str, int]:
    """Return what came to, and what left, each tier but the host, which all others are beside.

    Whether bytes go from the device to the disk in one copy or in two is a matter of when the disk is done
    with what came before; what passes each medium is the same.

    Args:
        moved: bytes by link.
    """
    found: dict[str, int] = {}
    for link, nbytes in moved.items():
        source, _, target = link.partition("->")
        for direction in (f"from {source}", f"to {target}"):
            if direction.partition(" ")[2] != HOST:
                found[direction] = found.get(direction, 0) + nbytes
    return found


def worst_error(predicted: Mapping[str, float], measured: Mapping[str, float], least_share: float) -> float:
    """Return the largest relative error among directions that carry something.

    Args:
        predicted: bytes by direction.
        measured: the same of a run.
        least_share: of all measured bytes that a direction has to carry, or was predicted to carry, to count;
            errors are over what it carries, or over this if that is more.
    """
    least = least_share * sum(measured.values())
    errors = [0.0]
    for direction in {*predicted, *measured}:
        real, told = measured.get(direction, 0.0), predicted.get(direction, 0.0)
        if real != told and max(real, told) > least:
            errors.append(abs(told - real) / max(real, least) if max(real, least) else math.inf)
    return max(errors)
