"""The sheet of accelerators: every figure has its source, and a machine is made of a name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tierstore.errors import ConfigError
from tierstore.planning.accelerators import SHEET, accelerator, sheet_name
from tierstore.planning.machine_text import machine_from_yaml, machine_to_yaml


@pytest.mark.parametrize("name", SHEET)
def test_each_entry_makes_a_machine_that_can_be_written_and_read(name: str) -> None:
    machine = accelerator(name, hosts=2, ranks_per_host=8)
    assert machine_from_yaml(machine_to_yaml(machine)) == machine


@pytest.mark.parametrize("name", SHEET)
def test_every_figure_of_an_entry_says_where_it_comes_from(name: str) -> None:
    machine = accelerator(name, hosts=2, ranks_per_host=8)
    figures = [
        *(f"tiers.{tier.name}" for tier in machine.tiers),
        *(f"links.{link.name}" for link in machine.links),
        *(f"shares.{share}" for share in machine.shares),
        *(f"compute.{dtype}" for dtype in machine.device.flops_per_s),
        *(f"host.{dtype}" for dtype in machine.host.flops_per_s),
        *(f"network.{each.name}" for each in machine.network),
        *("compute.memory", "host.memory", "compute.operator_s", "compute.efficiency", "links.latency_s"),
    ]
    assert set(figures) == set(machine.sources)
    assert all(re.match(r"nominal: .+|assumed", said) for said in machine.sources.values())


@pytest.mark.parametrize("name", SHEET)
def test_figures_are_those_of_an_accelerator(name: str) -> None:
    entry = SHEET[name]
    assert str(entry.memory_bytes // 10**9) in entry.name  # the one that data sheets put into the name
    assert entry.flops_per_s["float16"] > entry.flops_per_s["float32"]
    operations_per_byte = entry.flops_per_s["float16"] / entry.memory_bytes_per_s
    assert 50 < operations_per_byte < 500  # of all that are sold; a slip of a power of ten is none of them
    assert 10e9 < entry.host_bytes_per_s < entry.memory_bytes_per_s


def test_figures_of_three_entries_as_their_data_sheets_print_them() -> None:
    printed = {
        name: (entry.memory_bytes / 1e9, entry.memory_bytes_per_s / 1e9, entry.flops_per_s["bfloat16"] / 1e12)
        for name, entry in SHEET.items()
        if name in ("a100-80gb", "h100-80gb", "mi300x")
    }
    assert printed == {
        "a100-80gb": (80, 2039, 312),
        "h100-80gb": (80, 3350, 989),
        "mi300x": (192, 5300, 1307),
    }


@pytest.mark.parametrize("name", ["A100-80GB", " a100_80gb ", "A100 80GB"])
def test_a_name_is_taken_as_people_write_it(name: str) -> None:
    assert accelerator(name) == accelerator("a100-80gb")


@pytest.mark.parametrize(
    ("name", "near"),
    [("h100", "h100-pcie"), ("a100", "a100-40gb"), ("H-200", "h200"), ("rtx4090", "rtx-4090")],
)
def test_near_names_are_told(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"perhaps .*'{near}'.*all of them: v100"):
        accelerator(name)


@pytest.mark.parametrize("name", ["", "x" * 10_000_000, None, 5])
def test_what_is_no_name_is_refused_with_all_of_them(name: str) -> None:
    with pytest.raises(ConfigError, match="accepted: v100-32gb, a100-40gb") as refused:
        accelerator(name)
    assert len(str(refused.value)) < 1000


def test_numbers_that_cannot_be_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)hosts=0.*ranks_per_host=-1.*host_bytes=-5.*disk_bytes=0\.5"):
        accelerator("l4", hosts=0, ranks_per_host=-1, host_bytes=-5, disk_bytes=0.5)  # type: ignore[arg-type]


def test_what_is_given_is_no_assumption() -> None:
    machine = accelerator("l4", host_bytes=2**36)
    assert machine.tier("host").capacity_bytes == 2**36
    assert machine.sources["tiers.host"] == "given"


def test_no_disk_is_no_disk() -> None:
    assert [tier.name for tier in accelerator("l4", disk_bytes=0).tiers] == ["device", "host"]


def test_ranks_share_the_memory_and_the_drives_of_their_host() -> None:
    one, eight = accelerator("h200"), accelerator("h200", ranks_per_host=8)
    assert eight.tier("device") == one.tier("device")
    assert eight.tier("host").capacity_bytes == 8 * one.tier("host").capacity_bytes
    assert eight.shares == one.shares
    assert [each.name for each in one.network] == []
    assert [each.name for each in eight.network] == ["peer"]
    assert [each.name for each in accelerator("h200", hosts=2).network] == ["fabric"]


def test_accelerators_without_links_of_their_own_meet_over_the_host() -> None:
    (peer,) = accelerator("l4", ranks_per_host=2).network
    assert (peer.bytes_per_s, peer.shares) == (32e9, ("host memory",))


def test_the_page_shows_the_sheet() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/accelerators.md").read_text(encoding="utf-8")
    rows = [
        [each.strip() for each in line.strip("| ").split("|")] for line in page.splitlines() if "| `" in line
    ]
    shown = {name.strip("`"): [_number(each) for each in figures] for name, *figures in rows}
    assert shown == {
        name: [
            entry.memory_bytes / 1e9,
            entry.memory_bytes_per_s / 1e9,
            entry.flops_per_s.get("bfloat16", 0.0) / 1e12,
            entry.flops_per_s["float32"] / 1e12,
            entry.host_bytes_per_s / 1e9,
            (entry.peer_bytes_per_s or 0.0) / 1e9,
        ]
        for name, entry in SHEET.items()
    }


def _number(text: str) -> float:
    return 0.0 if text == "-" else float(text)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 NVL", None),
        ("Tesla K80", None),
    ],
)
def test_the_sheet_is_asked_for_what_torch_calls_an_accelerator(device: str, name: str | None) -> None:
    assert sheet_name(device) == name
