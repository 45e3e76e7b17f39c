"""How good predictions and choices of the planner are: bytes, peaks, seconds, and what is chosen.

``python -m bench.planned --write`` measures and records all of it.  The grid is ten models
(`bench.planned_models`) under three quotas each (`bench.planned_cells`): every cell is trained for real on an
emulated device, with the losses of plain PyTorch.  Predictions of seconds are held against real steps only
while the machine keeps its pace.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from bench import planned_command
from bench.command import Question, Settings, UnmeasurableError, main
from bench.measure import Spread, objects_left_alone, ratios, take_turns
from bench.paced import computing_beside_copies, equal_losses
from bench.planned_cells import (
    CONDITIONS,
    LEARNING_STEPS,
    SHARES,
    UNLIMITED_BYTES,
    Cell,
    PlainRun,
    PlannedTrainee,
    Quotas,
    by_direction,
    moved_in_all,
    rules_of,
    worst_error,
)
from bench.planned_models import MODELS, SMALL_MODELS, PlannedModel
from bench.record import Better, Figure
from tierstore.planning import Placement, Program
from tierstore.planning.machine import ComputeFigures, Machine
from tierstore.planning.machine_text import machine_from_yaml
from tierstore.planning.roofline import roofline
from tierstore.planning.searching import Choice, Levers, search, todays
from tierstore.planning.searching.alternatives import AHEADS, HIGHS
from tierstore.planning.simulating import simulate
from tierstore.planning.timeline import StepTotals
from tierstore.testing.memory import DeviceBudget
from tierstore.training.tracing import Grouping, Inputs, trace_model

MIB = 1024**2
STEPS = 12
"""That bytes are compared over: most periods divide it."""

LEAST_SHARE = 0.01
"""Of all bytes that a direction has to carry to count."""

LEVERS = Levers.HIGH | Levers.AHEAD | Levers.HOST_STEPS | Levers.STASHING | Levers.SHARES
"""What a placement that is given to a run may say otherwise than the rules."""

DRIFT = 0.1
"""By how much plain steps may have become slower or quicker while a cell was measured."""

STEPS_A_TURN = 4
_TRIES = 3
_TIMED_STEPS = 8
_CHOICE_SHARE = 0.4


# ---------------------------------------------------------------------- the grid


def names_of(settings: Settings) -> list[str]:
    """Return the models that are measured: fewer at a small scale."""
    return list(MODELS)[: settings.scaled(len(MODELS))]


def _shares(settings: Settings) -> tuple[float, ...]:
    return SHARES if settings.scale >= 0.1 else SHARES[:2]


def _plain_losses(model: PlannedModel, steps: int) -> torch.Tensor:
    trainee = PlannedTrainee(model)
    for _ in range(steps):
        trainee.step()
    return torch.stack(trainee.losses)


def _machine_words(quotas: Quotas) -> str:
    disk = f", {quotas.disk_bytes_per_s / 1e6:.0f} MB/s disk" if quotas.disk_bytes else ""
    return (
        f"{quotas.device_bytes / MIB:.1f} MiB of device, {quotas.host_bytes / MIB:.1f} MiB of host memory, "
        f"{quotas.link_bytes_per_s / 1e6:.0f} MB/s link{disk}"
    )


@contextlib.contextmanager
def _trained(
    model: PlannedModel, quotas: Quotas, path: Path, placement: Placement | None = None
) -> Iterator[PlannedTrainee]:
    """Yield a run that has learned; it keeps the placement that is given, or else that of the rules."""
    pinned = rules_of(model, quotas, path) if placement is None else placement
    with PlannedTrainee(model, quotas.config(path, pinned)) as trainee:
        for _ in range(LEARNING_STEPS):
            trainee.step()
        trainee.settle()
        yield trainee


# ---------------------------------------------------------------------- bytes


def bytes_of_cell(cell: Cell, program: Program) -> tuple[float, str]:
    """Return the worst error of bytes by direction, a share, and what to say of it."""
    measured = by_direction(moved_in_all(cell.moved[LEARNING_STEPS:]))
    own, told = (_predicted_bytes(cell, each) for each in (cell.program, program))
    error = worst_error(told, measured, LEAST_SHARE)
    said = ", ".join(
        f"{direction} {nbytes / MIB:.1f} MiB ({told.get(direction, 0) / MIB:.1f} predicted)"
        for direction, nbytes in sorted(measured.items())
    )
    return error, f"{error:.2%} ({worst_error(own, measured, LEAST_SHARE):.2%} by its own trace): {said}"


def _predicted_bytes(cell: Cell, program: Program) -> dict[str, int]:
    steps: Sequence[StepTotals] = cell.predicted(program).steps[LEARNING_STEPS:]
    return by_direction(moved_in_all([each.moved_bytes for each in steps]))


@dataclass(frozen=True)
class PlannedBytesRun:
    """What a cell is trained with.

    Attributes:
        quotas: that it has.
        path: of its disk.
        losses: of plain training, as many as there are steps.
    """

    quotas: Quotas
    path: Path
    losses: torch.Tensor


def _cell(model: PlannedModel, name: str, share: float, run: PlannedBytesRun) -> Cell:
    """Train a cell, and compare its losses with those of plain training."""
    with _trained(model, run.quotas, run.path) as trainee:
        while len(trainee.losses) < len(run.losses):
            trainee.step()
        trainee.settle()
        equal_losses(torch.stack(trainee.losses), run.losses)
        return Cell.of(name, share, trainee)


def planned_bytes(settings: Settings) -> Figure:
    """Predict the bytes of all quotas from a trace at the largest one."""
    steps = settings.scaled(STEPS, least=4)
    errors: dict[str, float] = {}
    details = {"losses": "equal to plain PyTorch's, bit for bit, in each cell"}
    with computing_beside_copies():
        for name in names_of(settings):
            model = MODELS[name]
            plain = PlainRun.of(model)
            losses = _plain_losses(model, LEARNING_STEPS + steps)
            first: Program | None = None
            for share in _shares(settings):
                run = PlannedBytesRun(Quotas.of(plain, share), settings.scratch / "files", losses)
                cell = _cell(model, name, share, run)
                first = first or cell.program
                errors[str(cell)], said = bytes_of_cell(cell, first)
                if run.quotas.disk_bytes:  # what goes where is a matter of when the disk is done, too
                    again = _cell(model, name, share, run)
                    said += f"; another run moved {_differ(again, cell):.2%} more or less"
                details[str(cell)] = f"{said}; {_machine_words(run.quotas)}"
    details["median"] = f"{statistics.median(errors.values()):.2%} of {len(errors)} cells"
    what = (
        f"bytes by direction of {steps} steps on an emulated device filled to the brim, predicted from a "
        "trace at the largest quota, against measured ones: worst error of any direction that carries more "
        f"than {LEAST_SHARE:.0%}"
    )
    reached = 100 * max(errors.values())
    return Figure("planned-bytes", what, reached, "%", 2.0, 0.0, Better.LOWER, details)


def _differ(one: Cell, other: Cell) -> float:
    """Return by how much the bytes of two runs of a cell differ at most in any direction."""
    ours, theirs = (by_direction(moved_in_all(each.moved[LEARNING_STEPS:])) for each in (one, other))
    return worst_error(ours, theirs, LEAST_SHARE)


# ---------------------------------------------------------------------- peaks


def traced(model: PlannedModel, quota_bytes: int) -> Program:
    """Return the program of a model that is nowhere, with what would travel together under a quota."""

    def loss(module: nn.Module, inputs: Inputs) -> torch.Tensor:
        assert isinstance(inputs, tuple)
        return model.loss(module, inputs)

    grouping = Grouping(left_bytes=quota_bytes)
    return trace_model(model.build, loss=loss, grouping=grouping)


def predicted_peak(model: PlannedModel, machine: Machine) -> int:
    """Return the most that a run has on a machine's first tier, predicted without running."""
    first = machine.tiers[0]
    machine = replace(machine, device=measured_compute(), host=measured_compute())
    program = roofline(traced(model, first.capacity_bytes), machine)
    timeline = simulate(program, machine, todays(program, machine), conditions=CONDITIONS)
    return timeline.peak_bytes[first.name]


@functools.cache
def measured_compute() -> ComputeFigures:
    """Return how fast this machine was measured to compute, without any model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.yaml"
        doctor = [sys.executable, "-m", "tierstore.cli", "doctor", folder, "--device", "emulated"]
        subprocess.run([*doctor, "--write", str(path)], check=True, capture_output=True)
        return machine_from_yaml(path.read_text(encoding="utf-8")).device


def _measured_peak(
    model: PlannedModel, quotas: Quotas, path: Path, steps: int
) -> tuple[int, Machine, torch.Tensor]:
    """Return the peak of a run by the meter from outside, the machine that it was opened on, and losses."""
    config = quotas.config(path, rules_of(model, quotas, path))
    with PlannedTrainee(model, config, meter=DeviceBudget(UNLIMITED_BYTES)) as trainee:
        for _ in range(steps):
            trainee.step()
        return trainee.peak_bytes, trainee.opened_machine, torch.stack(trainee.losses)


def planned_peak(settings: Settings) -> Figure:
    """Predict peaks of plain and of offloaded training from models that are nowhere."""
    steps = LEARNING_STEPS + settings.scaled(2)
    errors: list[float] = []
    details: dict[str, str] = {}

    def note(name: str, told: int, measured: int) -> None:
        errors.append(abs(told / measured - 1))
        details[name] = (
            f"{told / MIB:.2f} MiB predicted, {measured / MIB:.2f} measured: {told / measured - 1:+.2%}"
        )

    with computing_beside_copies():
        for name in names_of(settings):
            model = MODELS[name]
            plain = PlainRun.of(model)
            losses = _plain_losses(model, steps)
            for share in _shares(settings):
                quotas = Quotas.of(plain, share)
                found, machine, ours = _measured_peak(model, quotas, settings.scratch / "files", steps)
                details["losses"] = equal_losses(ours, losses)
                if share == SHARES[0]:
                    whole = machine.with_capacities({machine.tiers[0].name: UNLIMITED_BYTES})
                    note(f"{name}, plain", predicted_peak(model, whole), plain.peak_bytes)
                note(f"{name}, {share:g} of its peak", predicted_peak(model, machine), found)
    details["median"] = f"{statistics.median(errors):.2%} of {len(errors)} peaks"
    what = (
        "peak of device bytes, predicted from a model on the meta device, against that of a meter, plain and "
        "offloaded: worst error"
    )
    return Figure("planned-peak", what, 100 * max(errors), "%", 10.0, 3.0, Better.LOWER, details)


# ---------------------------------------------------------------------- seconds


def at_its_pace(
    model: PlannedModel, settings: Settings, measure: Callable[[PlainRun, PlannedTrainee], float]
) -> float:
    """Return what is measured of a model while plain steps take as long before and after it.

    Args:
        model: which.
        settings: below a scale of 1 the pace is not looked at.
        measure: measures; is given what plain training came to before, and a plain one to take turns with.

    Raises:
        UnmeasurableError: they did not, however often it was tried.
    """
    for _ in range(_TRIES):
        plain = PlainRun.of(model)
        beside = PlannedTrainee(model)
        found = measure(plain, beside)
        drift = min(beside.seconds[1:]) / plain.step_s - 1
        if abs(drift) <= DRIFT or settings.scale < 1:
            return found
    raise UnmeasurableError(
        f"a plain step had changed by {drift:.0%} after the last of {_TRIES} tries: something else runs on "
        "this machine"
    )


def _step_error(
    model: PlannedModel, share: float, settings: Settings, details: dict[str, str], name: str
) -> float:
    def measure(plain: PlainRun, beside: PlannedTrainee) -> float:
        quotas = Quotas.of(plain, share)
        with _trained(model, quotas, settings.scratch / "files") as ours:
            told_s = Cell.of(name, share, ours).predicted_step_s()
            taken: list[float] = []
            for _ in range(settings.repeats):
                for _ in range(1 + settings.scaled(_TIMED_STEPS, least=2)):
                    ours.step()
                taken += ours.seconds[-settings.scaled(_TIMED_STEPS, least=2) :]
                ours.settle()
                while len(beside.losses) < len(ours.losses):
                    beside.step()
            details["losses"] = equal_losses(torch.stack(ours.losses), torch.stack(beside.losses))
        measured_s = statistics.median(taken)
        details[f"{name}, {share:g} of its peak"] = (
            f"{told_s:.3f} s predicted, {Spread.of(taken)} s measured: {told_s / measured_s - 1:+.1%}; "
            f"plain {plain.step_s:.3f} s; {_machine_words(quotas)}"
        )
        return abs(told_s / measured_s - 1)

    return at_its_pace(model, settings, measure)


def planned_step(settings: Settings) -> Figure:
    """Predict what a step takes, after learning."""
    details: dict[str, str] = {}
    with computing_beside_copies():
        errors = [
            _step_error(MODELS[name], share, settings, details, name)
            for name in names_of(settings)
            for share in _shares(settings)
        ]
    details["errors"] = f"{Spread.of([100 * each for each in errors])} %"
    what = (
        "seconds of a step, predicted after learning, against the median of measured ones: median error over "
        "ten models under three quotas on an emulated device"
    )
    return Figure(
        "planned-step", what, 100 * statistics.median(errors), "%", 15.0, 7.0, Better.LOWER, details
    )


# ---------------------------------------------------------------------- choices


def _learned(model: PlannedModel, quotas: Quotas, path: Path) -> tuple[Program, Machine]:
    """Return what is learned of a run, which is over then."""
    with _trained(model, quotas, path) as trainee:
        return trainee.program, trainee.machine


def chosen(program: Program, machine: Machine, levers: Levers) -> Choice:
    """Return what the planner chooses, from today's rules on."""
    return search(program, machine, given=todays(program, machine), levers=levers, conditions=CONDITIONS)


def all_placements(program: Program, machine: Machine) -> dict[str, Placement]:
    """Return every combination of early write-back and distance ahead, by what it says."""
    base, first = todays(program, machine), machine.tiers[0].name
    return {
        f"high {high:g}, ahead {ahead:g}": replace(
            base,
            high={**base.high, first: high},
            ahead=dict.fromkeys(base.ahead, ahead),
        )
        for high, ahead in itertools.product((1.0, *HIGHS), AHEADS)
    }


def _in_turns(
    model: PlannedModel, quotas: Quotas, placements: Mapping[str, Placement], settings: Settings
) -> dict[str, list[float]]:
    """Train under several placements in turns; return seconds of a step, by name, round by round.

    Raises:
        AssertionError: losses differ from those of plain PyTorch.
    """
    with contextlib.ExitStack() as stack:
        trainees = {
            name: stack.enter_context(
                _trained(model, quotas, settings.scratch / f"files-{number}", placement)
            )
            for number, (name, placement) in enumerate(placements.items())
        }

        def turn(name: str, trainee: PlannedTrainee) -> Mapping[str, float]:
            for _ in range(1 + STEPS_A_TURN):
                trainee.step()
            trainee.settle()
            return {name: statistics.fmean(trainee.seconds[-STEPS_A_TURN:])}

        runs = [lambda name=name, each=each: turn(name, each) for name, each in trainees.items()]
        with objects_left_alone():
            taken = take_turns(runs, repeats=settings.repeats, warmups=settings.warmups)
        losses = [torch.stack(each.losses) for each in trainees.values()]
    plain = _plain_losses(model, len(losses[0]))
    for ours in losses:
        equal_losses(ours, plain)
    return taken


def _choice_ratio(name: str, settings: Settings, details: dict[str, str]) -> float:
    model = SMALL_MODELS[name]
    quotas = replace(Quotas.of(PlainRun.of(model), _CHOICE_SHARE), disk_bytes=0)
    quotas = replace(quotas, host_bytes=4 * quotas.host_bytes)
    program, machine = _learned(model, quotas, settings.scratch / "files")
    choice = chosen(program, machine, Levers.HIGH | Levers.AHEAD)
    tried = all_placements(program, machine)
    taken = _in_turns(model, quotas, {**tried, "chosen": choice.placement}, settings)
    seconds = {each: statistics.median(those) for each, those in taken.items()}
    best = min(tried, key=seconds.__getitem__)
    times = seconds["chosen"] / seconds[best]
    details[name] = (
        f"chosen {seconds['chosen']:.4f} s a step, best of {len(tried)} {seconds[best]:.4f} s ({best}), "
        f"worst {max(seconds.values()):.4f} s: {times:.3f} times; {_machine_words(quotas)}; {choice.why}"
    )
    return times


def planned_choice(settings: Settings) -> Figure:
    """Hold the chosen placement against the best of all that were tried in the real system."""
    details = {"losses": "equal to plain PyTorch's, bit for bit, under each placement"}
    names = list(SMALL_MODELS)[: settings.scaled(len(SMALL_MODELS))]
    with computing_beside_copies():
        times = [_choice_ratio(name, settings, details) for name in names]
    what = (
        "step of small models on an emulated device under the placement that was chosen, over that under the "
        "best of all shares of early write-back and all distances ahead, each trained for real: the worst"
    )
    return Figure("planned-choice", what, max(times), "x its time", 1.1, 1.03, Better.LOWER, details)


def planned_rules(settings: Settings) -> Figure:
    """Hold the chosen placement against the rules without a planner."""
    details = {"losses": "equal to plain PyTorch's, bit for bit, in each cell"}
    times: dict[str, float] = {}
    with computing_beside_copies():
        for name, share in itertools.product(names_of(settings), _shares(settings)):
            model = MODELS[name]
            quotas = Quotas.of(PlainRun.of(model), share)
            program, machine = _learned(model, quotas, settings.scratch / "files")
            choice = chosen(program, machine, LEVERS)
            placements = {"rules": todays(program, machine), "chosen": choice.placement}
            taken = _in_turns(model, quotas, placements, settings)
            spread = ratios(taken["chosen"], taken["rules"])
            cell = f"{name}, {share:g} of its peak"
            times[cell] = spread.median
            details[cell] = (
                f"{spread} times; rules {Spread.of(taken['rules'])} s; {_machine_words(quotas)}; {choice.why}"
            )
    reached = math.exp(statistics.fmean(math.log(each) for each in times.values()))
    what = (
        "step under the placement that is chosen over that under the rules of default keys, on an emulated "
        "device under the same quotas: geometric mean of ten models under three quotas"
    )
    return Figure("planned-rules", what, reached, "x its time", 0.9, 0.75, Better.LOWER, details)


QUESTIONS: dict[str, Question] = {
    "planned-bytes": planned_bytes,
    "planned-peak": planned_peak,
    "planned-step": planned_step,
    "planned-choice": planned_choice,
    "planned-rules": planned_rules,
    **planned_command.QUESTIONS,
}

if __name__ == "__main__":
    sys.exit(main("bench.planned", QUESTIONS))
