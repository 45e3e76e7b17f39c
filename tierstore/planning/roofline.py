"""How long a program takes on a machine, where nobody has measured it: by what its operators do.

An operator takes as long as the slower of two: its arithmetic, at the share of the nominal rate that those of
its sort reach, and its traffic, at the rate of the memory.  Starting it costs on top of that.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tierstore.errors import ConfigError
from tierstore.planning.machine import ComputeFigures, Machine
from tierstore.planning.program import Moment, OperatorWork, Program, Unit
from tierstore.quoting import listed, quoted

DEFAULT_EFFICIENCY = 0.5
"""Of sorts that a machine names no efficiency for."""

_OF_ANY = "float32"


def roofline(program: Program, machine: Machine) -> Program:
    """Return the program with the seconds that a machine needs for what has none.

    Moments that say how long they take keep that, and units likewise; the others get seconds from their work
    and from the bytes that their step reads and writes.

    Raises:
        ConfigError: the machine says neither how fast it computes with a dtype, nor with float32.
    """
    moments = tuple(_timed(moment, machine.device) for moment in program.moments)
    units = tuple(_timed_unit(unit, program, machine) for unit in program.units)
    return replace(program, moments=moments, units=units)


def operator_s(work: OperatorWork, figures: ComputeFigures) -> float:
    """Return how long operators of one sort take, one after another.

    Raises:
        ConfigError: as `roofline`.
    """
    arithmetic_s = 0.0
    if work.flops:
        efficiency = figures.efficiency.get(work.sort, DEFAULT_EFFICIENCY)
        arithmetic_s = work.flops / (_flops_per_s(work.dtype, figures) * efficiency)
    traffic_s = work.moved_bytes / figures.memory_bytes_per_s
    return max(arithmetic_s, traffic_s) + work.operators * figures.operator_s


def _timed(moment: Moment, figures: ComputeFigures) -> Moment:
    if moment.compute_s or not moment.work:
        return moment
    return replace(moment, compute_s=math.fsum(operator_s(work, figures) for work in moment.work))


def _timed_unit(unit: Unit, program: Program, machine: Machine) -> Unit:
    """Return a unit with seconds on the device; on the host, too, if it can be stepped there."""
    read = [unit.bundle, *unit.gradients, *([] if unit.state is None else [unit.state])]
    written = [unit.bundle, *([] if unit.state is None else [unit.state])]
    moved_bytes = sum(program.data[key].nbytes for key in (*read, *written))
    device_s = unit.device_step_s or _step_s(moved_bytes, machine.device)
    host_s = unit.host_step_s
    if host_s == 0:
        host_s = _step_s(moved_bytes, machine.host)
    return replace(unit, device_step_s=device_s, host_step_s=host_s)


def _step_s(moved_bytes: int, figures: ComputeFigures) -> float:
    return moved_bytes / figures.memory_bytes_per_s + figures.operator_s


def _flops_per_s(dtype: str, figures: ComputeFigures) -> float:
    found = figures.flops_per_s.get(dtype) or figures.flops_per_s.get(_OF_ANY)
    if found is None:
        raise ConfigError(
            f"the machine says how fast it computes with {listed(figures.flops_per_s) or 'nothing'}; the "
            f"program computes with {quoted(dtype)}: add it to the machine's 'compute', or add {_OF_ANY!r}, "
            "which stands for every dtype that is not named"
        )
    return found
