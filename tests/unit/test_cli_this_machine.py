"""This machine without measuring: sizes are asked for, and every figure says where it is from."""

from __future__ import annotations

import pytest
import torch

from tierstore.cli.this_machine import this_machine
from tierstore.config import machine as here
from tierstore.planning import ComputeFigures, LinkFigures, Machine, TierFigures, TierMedium
from tierstore.units import GIB


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sizes that are the same everywhere."""
    monkeypatch.setattr(here, "available_host_bytes", lambda: 6 * GIB)
    monkeypatch.setattr(here, "free_disk_bytes", lambda *paths: 9 * GIB)
    monkeypatch.setattr(here, "default_device", lambda: "cpu")


def _tiers(machine: Machine) -> dict[str, int]:
    return {tier.name: tier.capacity_bytes for tier in machine.tiers}


def test_without_an_accelerator_the_host_computes_and_waits_for_its_copies() -> None:
    machine = this_machine(["."])
    assert _tiers(machine) == {"host": 6 * GIB, "disk": 9 * GIB}
    assert machine.device == machine.host
    assert not machine.has_streams


def test_a_full_disk_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "free_disk_bytes", lambda *paths: 0)
    assert _tiers(this_machine(["."])) == {"host": 6 * GIB}


def test_every_tier_and_link_says_whether_it_is_assumed() -> None:
    machine = this_machine(["."])
    told = set(machine.sources)
    assert {f"tiers.{tier.name}" for tier in machine.tiers} <= told
    assert {f"links.{link.name}" for link in machine.links} <= told


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an accelerator, as far as it is asked for."""
    monkeypatch.setattr(here, "default_device", lambda: "cuda")
    monkeypatch.setattr(here, "free_device_bytes", lambda name: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some Accelerator")


@pytest.mark.usefixtures("accelerator")
def test_an_accelerator_is_the_first_tier_with_what_it_has_free() -> None:
    machine = this_machine(["."])
    assert _tiers(machine) == {"device": 3 * GIB, "host": 6 * GIB, "disk": 9 * GIB}
    assert machine.name == "this machine (Some Accelerator)"
    assert machine.has_streams


@pytest.mark.usefixtures("accelerator")
def test_what_the_sheet_says_of_the_accelerator_is_taken() -> None:
    figures = ComputeFigures({"float32": 7e12}, 8e11)
    links = (LinkFigures("device", "host", 3e10), LinkFigures("host", "device", 4e10))
    tiers = (TierFigures("device", 1, TierMedium.DEVICE), TierFigures("host", 1, TierMedium.HOST))
    known = Machine("sheet", tiers, links, figures, figures, sources={"device": "a data sheet"})
    machine = this_machine(["."], known)
    assert machine.device == figures
    assert machine.links[:2] == links
    assert machine.sources["device"] == "a data sheet"
    assert _tiers(machine)["device"] == 3 * GIB
