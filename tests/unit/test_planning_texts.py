"""Programs in JSON and machines in YAML: how they look, and what is refused by which name."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.fuzz import see_that_it_is_short
from tests.hostile_machines import MACHINE, MACHINES
from tests.hostile_programs import PROGRAM, PROGRAMS
from tests.hostile_yaml import DOCUMENTS
from tierstore.errors import ConfigError
from tierstore.planning import LinkFigures, Moment, Phase, Program, TierMedium
from tierstore.planning.chrome import program_to_chrome
from tierstore.planning.machine_text import machine_from_yaml, machine_to_yaml
from tierstore.planning.program_text import program_from_json, program_to_json
from tierstore.units import GIB, TIB

# ------------------------------------------------------------------------------ programs


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_cannot_be_is_refused_by_the_name_of_what_is_wrong(name: str) -> None:
    text, said = PROGRAMS[name]
    if not said:
        assert program_from_json(text).data == PROGRAM.data
        return
    with pytest.raises(ConfigError) as refused:
        program_from_json(text)
    assert said in str(refused.value)
    see_that_it_is_short(refused.value)


def test_a_text_stands_in_a_program_once() -> None:
    text = program_to_json(PROGRAM)
    assert [text.count(f'"{each}"') for each in ("a.w", "layers.0", "matmul")] == [1, 1, 1]


def test_what_a_later_version_adds_to_a_program_is_left_alone() -> None:
    document = json.loads(program_to_json(PROGRAM))
    document["colour"] = document["data"]["colour"] = document["moments"]["colour"] = ["red"]
    assert program_from_json(json.dumps(document)) == PROGRAM


def test_many_moments_are_few_bytes_each() -> None:
    moments = tuple(Moment(Phase.FORWARD, f"layers.{n % 80}", compute_s=0.001 * n) for n in range(1000))
    assert len(program_to_json(Program("many", "model", {}, moments))) < 60 * len(moments)


def test_the_moments_of_a_program_are_slices_in_a_row_beside_what_exists() -> None:
    events = json.loads(program_to_chrome(PROGRAM))["traceEvents"]
    slices = [(each["name"], each["ts"], each["dur"]) for each in events if each["ph"] == "X"]
    assert slices == [
        ("layers.0", 0.0, 250_000.0),
        ("layers.0", 250_000.0, 125_000.0),
        ("layers.0", 375_000.0, 500_000.0),
        ("adamw: a.w", 875_000.0, 0.0),
    ]
    counted = [each["args"] for each in events if each["ph"] == "C"]
    assert [(each["parameters"], each["activation"], each["gradient"]) for each in counted] == [
        (4096, 0, 0),
        (4096, 1024, 0),
        (4096, 0, 4096),
    ]


# ------------------------------------------------------------------------------ machines


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_that_cannot_be_is_refused_by_the_name_of_what_is_wrong(name: str) -> None:
    text, said = MACHINES[name]
    with pytest.raises(ConfigError) as refused:
        machine_from_yaml(text)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 10_000


@pytest.mark.parametrize("name", DOCUMENTS)
def test_hostile_yaml_is_no_machine(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        machine_from_yaml(DOCUMENTS[name][0])
    assert len(str(refused.value)) < 10_000


def test_a_machine_is_read_as_people_write_it() -> None:
    machine = machine_from_yaml(MACHINE)
    assert [(tier.name, tier.capacity_bytes, tier.medium) for tier in machine.tiers] == [
        ("device", 80 * GIB, TierMedium.DEVICE),
        ("host", 256 * GIB, TierMedium.HOST),
        ("disk", 3 * TIB, TierMedium.STORAGE),
    ]
    assert machine.link("host", "device") == LinkFigures("host", "device", 25 * GIB, 10e-6, ("bus",))
    assert machine.link("device", "host") == LinkFigures("device", "host", 25e9, 10e-6, ("bus",))
    assert machine.link("host", "disk") == LinkFigures("host", "disk", math.inf, 0.0, ("drive",))
    assert machine.device.flops_per_s == {"bfloat16": 312e12, "float32": 19.5e12}
    assert (machine.ranks_per_host, machine.hosts) == (8, 128)


def test_every_fault_of_a_machine_is_told_at_once() -> None:
    text = (
        MACHINE.replace("256GiB", "-1")
        .replace("latency_s: 10e-6", "latency: 1")
        .replace("hosts: 128", "hosts: 0")
    )
    with pytest.raises(ConfigError, match=r"(?s)tiers\.host\.capacity=-1.*links\[0\]\.latency=1.*hosts=0"):
        machine_from_yaml(text)


def test_a_machine_without_a_disk_is_one() -> None:
    text = MACHINE.replace("  disk: {capacity: 3TiB}\n", "")
    kept = [line for line in text.splitlines() if "drive]" not in line]
    assert [tier.name for tier in machine_from_yaml("\n".join(kept)).tiers] == ["device", "host"]


def test_a_disk_of_0_bytes_is_none() -> None:
    machine = machine_from_yaml(MACHINE.replace("3TiB", "0"))
    assert [tier.name for tier in machine.tiers] == ["device", "host"]
    assert [link.name for link in machine.links] == ["host->device", "device->host"]


def test_a_host_of_0_bytes_leaves_the_slower_way_between_device_and_disk() -> None:
    machine = machine_from_yaml(MACHINE.replace("256GiB", "0GB"))
    assert [tier.name for tier in machine.tiers] == ["device", "disk"]
    link = machine.link("disk", "device")
    assert link is not None
    assert (link.bytes_per_s, link.shares) == (6e9, ("drive", "bus"))


def test_what_is_written_says_sizes_in_units_and_no_limit_as_such() -> None:
    text = machine_to_yaml(machine_from_yaml(MACHINE))
    assert "capacity: 80GiB" in text
    assert "bandwidth: unlimited" in text


def test_the_page_shows_a_machine_that_is_read() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/machine-file.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    machine = machine_from_yaml(shown)
    assert machine_from_yaml(machine_to_yaml(machine)) == machine
    assert machine.device.efficiency == {"matmul": 0.6, "attention": 0.5}
