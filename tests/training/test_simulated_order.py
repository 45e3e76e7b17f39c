"""Copies of a real run go over an emulated link in the order in which they do in a simulation of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.recorded_machines import MODELS, Trained, machine_of, opened, step
from tierstore import Store
from tierstore.planning.simulating import Conditions, simulate
from tierstore.planning.timeline import Timeline
from tierstore.recorded import CALLER

BANDWIDTH = 20 * 1024 * 1024
BEFORE = 4  # steps: the first makes state, the next two are learned from
RECORDED = 3  # steps: while other programs take the processors, a step may go in another order
LANES = ("host->device", "device->host")


def orders_of(timeline: Timeline, number: int) -> Mapping[str, Sequence[str]]:
    """Return the keys that go over each direction of the link in a step, in their order."""
    begin_s, end_s = timeline.steps[number].begin_s, timeline.steps[number].end_s
    copies = [each for each in timeline.intervals if each.nbytes and begin_s <= each.begin_s < end_s]
    copies.sort(key=lambda each: each.end_s)
    return {lane: [str(each.key) for each in copies if each.lane == lane] for lane in LANES}


def orders_in(store: Store, trained: Trained) -> Mapping[str, Sequence[str]]:
    """Make a step; return the keys that went over each direction of the link, in their order."""
    with store.recorded() as recording:
        step(trained)
    copies = sorted((each for each in recording.copies if each.source != CALLER), key=lambda each: each.end_s)
    return {lane: [each.key for each in copies if f"{each.source}->{each.target}" == lane] for lane in LANES}


@pytest.mark.parametrize("quota", ["240KB", "400KB"])
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_copies_go_in_the_recorded_order(name: str, quota: str, tmp_path: Path) -> None:
    trained = MODELS[name]()
    with opened(trained, tmp_path, quota, device_options={"link_bandwidth": BANDWIDTH}) as run:
        for _ in range(BEFORE):
            step(trained)
        recorded = [orders_in(run.store, trained) for _ in range(RECORDED)]
        program, placement, machine = run.program(), run.placement, machine_of(run, quota)
    links = [
        replace(link, bytes_per_s=float(BANDWIDTH)) if link.name in LANES else link for link in machine.links
    ]
    timeline = simulate(
        program,
        replace(machine, links=tuple(links)),
        placement,
        conditions=Conditions(is_enforced=False),
        steps=BEFORE + 2,
        checked=True,
    )
    assert all(len(keys) > 10 for keys in recorded[0].values()), "too little moved to say anything"
    assert orders_of(timeline, BEFORE) in recorded
