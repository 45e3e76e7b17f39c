"""A roofline: the slower of arithmetic and traffic, and what starting operators costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hostile_machines import MACHINE as MACHINE_YAML
from tests.hostile_programs import PROGRAM
from tests.planning_data import WORK
from tierstore.errors import ConfigError
from tierstore.planning import ComputeFigures, Moment, OperatorWork, Phase, Program
from tierstore.planning.machine_text import machine_from_yaml
from tierstore.planning.roofline import operator_s, roofline

_FIGURES = ComputeFigures({"bfloat16": 100.0, "float32": 10.0}, 1000.0, 0.5, {"matmul": 0.8})
_MACHINE = replace(machine_from_yaml(MACHINE_YAML), device=_FIGURES, host=ComputeFigures({}, 100.0, 0.25))


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (OperatorWork("matmul", "bfloat16", 160.0, 1000, 1), 2.0 + 0.5),  # arithmetic at 0.8 of 100
        (OperatorWork("matmul", "bfloat16", 160.0, 5000, 1), 5.0 + 0.5),  # traffic
        (OperatorWork("attention", "bfloat16", 100.0, 0, 3), 2.0 + 1.5),  # a sort that is not named: a half
        (OperatorWork("other", "float64", 10.0, 0, 0), 2.0),  # a dtype that is not named: float32's
        (OperatorWork("other", "int64", 0.0, 2000, 1), 2.0 + 0.5),  # nothing but traffic
    ],
)
def test_the_slower_one_decides(work: OperatorWork, seconds: float) -> None:
    assert operator_s(work, _FIGURES) == seconds


def _of(*work: OperatorWork, compute_s: float = 0.0) -> Program:
    moment = Moment(Phase.FORWARD, "layers.0", compute_s=compute_s, work=work)
    return Program("x", "model", {}, (moment,))


def test_a_moment_takes_as_long_as_its_operators_together() -> None:
    two = _of(OperatorWork("matmul", "bfloat16", 80.0, 0), OperatorWork("other", "float32", 0.0, 3000))
    assert roofline(two, _MACHINE).compute_s == (1.0 + 0.5) + (3.0 + 0.5)


def test_what_was_measured_stays() -> None:
    measured = _of(OperatorWork("matmul", "bfloat16", 80.0, 0), compute_s=7.0)
    assert roofline(measured, _MACHINE) == measured


def test_a_moment_without_work_takes_no_time() -> None:
    assert roofline(_of(), _MACHINE) == _of()


def test_a_unit_s_step_takes_what_its_bytes_take() -> None:
    (unit,) = PROGRAM.units
    (device, host) = (
        roofline(
            replace(PROGRAM, units=(replace(unit, device_step_s=0.0, host_step_s=each),)), _MACHINE
        ).units[0]
        for each in (None, 0.0)
    )
    moved_bytes = 2 * 4096 + 4096 + 2 * 8192  # parameters and state are read and written, gradients read
    assert (device.device_step_s, device.host_step_s) == (moved_bytes / 1000 + 0.5, None)
    assert host.host_step_s == moved_bytes / 100 + 0.25
    assert roofline(PROGRAM, _MACHINE).units == PROGRAM.units


def test_a_dtype_that_the_machine_says_nothing_of_is_named() -> None:
    machine = replace(_MACHINE, device=ComputeFigures({"bfloat16": 1.0}, 1.0))
    with pytest.raises(ConfigError, match="computes with 'bfloat16'; the program computes with 'float16'"):
        roofline(_of(OperatorWork("matmul", "float16", 1.0, 0)), machine)


@given(st.lists(WORK, max_size=3), st.floats(1, 16), st.floats(1, 16))
def test_what_is_faster_is_never_slower(work: list[OperatorWork], flops: float, memory: float) -> None:
    faster = replace(
        _FIGURES,
        flops_per_s={dtype: rate * flops for dtype, rate in _FIGURES.flops_per_s.items()},
        memory_bytes_per_s=_FIGURES.memory_bytes_per_s * memory,
    )
    program = _of(*work)
    least = roofline(program, replace(_MACHINE, device=faster)).compute_s
    assert least <= roofline(program, _MACHINE).compute_s
