"""Any program is read back exactly from JSON, any machine from YAML; damaged ones are refused or read."""

from __future__ import annotations

import json

import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.damaged import WRONG, damaged
from tests.fuzz import see_that_it_is_short
from tests.planning_data import machines, programs, timelines
from tierstore.errors import ConfigError
from tierstore.planning import Machine, Placement, Program, Timeline
from tierstore.planning.chrome import (
    TraceParts,
    program_from_chrome,
    program_to_chrome,
    trace_from_chrome,
    trace_to_chrome,
)
from tierstore.planning.machine_text import machine_from_yaml, machine_to_mapping, machine_to_yaml
from tierstore.planning.program_text import program_from_json, program_to_json, program_to_mapping


@given(programs())
def test_a_program_is_read_back_exactly(program: Program) -> None:
    assert program_from_json(program_to_json(program)) == program


@given(machines())
def test_a_machine_is_read_back_exactly(machine: Machine) -> None:
    assert machine_from_yaml(machine_to_yaml(machine)) == machine


@given(programs())
def test_a_program_is_read_back_from_a_trace(program: Program) -> None:
    assert program_from_chrome(program_to_chrome(program)) == program


@given(timelines(), programs(), machines(), st.none() | st.integers(0, 2**62))
def test_all_parts_of_a_trace_are_read_back(
    timeline: Timeline, program: Program, machine: Machine, base_time_ns: int | None
) -> None:
    parts = TraceParts(timeline, program, machine, Placement(ahead={"host": 0.5}), base_time_ns)
    assert trace_from_chrome(trace_to_chrome(parts)) == parts


@given(programs(), st.data())
def test_a_damaged_program_is_refused_with_a_short_message_or_read(
    program: Program, data: st.DataObject
) -> None:
    try:
        program_from_json(json.dumps(damaged(program_to_mapping(program), data)))
    except ConfigError as refused:
        see_that_it_is_short(refused)


@given(machines(), st.data())
def test_a_damaged_machine_is_refused_with_a_short_message_or_read(
    machine: Machine, data: st.DataObject
) -> None:
    text = yaml.safe_dump(damaged(machine_to_mapping(machine), data), sort_keys=False)
    try:
        found = machine_from_yaml(text)
    except ConfigError as refused:
        see_that_it_is_short(refused, 10_000)
    else:
        assert all(tier.capacity_bytes for tier in found.tiers)


def test_each_wrong_value_is_wrong_as_a_capacity_but_those_that_are_sizes() -> None:
    sizes = [value for value in WRONG if _is_read(value)]
    assert sizes == [0, 10**6]


def _is_read(capacity: object) -> bool:
    mapping = {
        "tierstore_machine": 1,
        "tiers": {"device": {"capacity": 1}, "host": {"capacity": capacity}},
        "links": [
            {"from": source, "to": target, "bandwidth": 1}
            for source, target in (("host", "device"), ("device", "host"))
        ],
        "compute": {"memory": 1},
        "host": {"memory": 1},
    }
    try:
        machine_from_yaml(yaml.safe_dump(mapping))
    except ConfigError:
        return False
    return True
