"""What a step takes by the estimate: as the simulator says, roughly, and in the same order."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planned import Layer, machine_of, machines, placements, program_of, programs
from tierstore.planning import Machine, Placement, Stashing, Treatment
from tierstore.planning.searching.estimate import Estimator, estimate
from tierstore.planning.searching.variants import with_marks, with_steps_on_host
from tierstore.planning.simulating import simulate

MIB = 1 << 20
LAYER = Layer(MIB, 2 * MIB, (MIB,), MIB // 4, 0, 0.005, 0.01, 0.002, 0.004)
PROGRAM = program_of([LAYER] * 8)
TODAY = Placement(stashing=Stashing.WITHOUT_ROOM, ahead={"device": 0.25, "host": 0.25})


def machine(device: int, host: int = 512, link: float = 1e8) -> Machine:
    return machine_of([device * MIB, host * MIB, 4096 * MIB], [link, link / 5], alignment_bytes=512)


@given(st.data())
def test_no_step_is_shorter_than_what_it_computes(data: st.DataObject) -> None:
    program, on = data.draw(programs()), data.draw(machines())
    found = estimate(program, on, placement := data.draw(placements(program, on)))
    assert found == estimate(program, on, placement)
    assert found.step_s >= found.compute_s * (1 - 1e-9)
    assert set(found.moved_bytes) <= {link.name for link in on.links}


@given(st.data())
def test_estimates_of_one_program_know_nothing_of_each_other(data: st.DataObject) -> None:
    program, on = data.draw(programs(most_layers=3)), data.draw(machines())
    estimator = Estimator(program, on)
    drawn = [data.draw(placements(program, on)) for _ in range(2)]
    drawn += [with_marks(each, [0], Treatment.RECOMPUTE) for each in drawn]
    for placement in (*drawn, *reversed(drawn)):
        assert estimator.estimate(placement) == estimate(program, on, placement)


def test_where_everything_fits_nothing_moves_and_nothing_is_waited_for() -> None:
    found = estimate(PROGRAM, machine(64), TODAY)
    assert found.moved_bytes == {}
    assert found.step_s == pytest.approx(PROGRAM.compute_s)


@pytest.mark.parametrize("device", [8, 12, 16])
def test_todays_rules_take_about_what_is_simulated(device: int) -> None:
    found, simulated = estimate(PROGRAM, machine(device), TODAY), simulate(PROGRAM, machine(device), TODAY)
    assert found.step_s == pytest.approx(simulated.step_s, rel=0.25)
    for name, nbytes in simulated.moved_bytes.items():
        assert found.moved_bytes.get(name, 0) == pytest.approx(nbytes, rel=0.4)


def test_less_room_and_slower_links_take_longer() -> None:
    assert estimate(PROGRAM, machine(8), TODAY).step_s > estimate(PROGRAM, machine(24), TODAY).step_s
    assert estimate(PROGRAM, machine(8, link=5e7), TODAY).step_s > estimate(PROGRAM, machine(8), TODAY).step_s
    assert estimate(PROGRAM, machine(8, 16), TODAY).moved_bytes["host->disk"] > 0


def test_what_cannot_be_there_at_once_takes_forever() -> None:
    assert not estimate(PROGRAM, machine(3), TODAY).fits
    assert math.isinf(estimate(PROGRAM, machine_of([8 * MIB]), TODAY).step_s)


def test_recomputed_and_swapped_activations_leave_room_and_the_host_steps_beside_the_device() -> None:
    wide = program_of([Layer(MIB, 0, (), 2 * MIB, 0, 0.005, 0.01)] * 8)
    kept = estimate(wide, machine(16), TODAY)
    assert not kept.fits
    again = estimate(wide, machine(16), with_marks(TODAY, range(6), Treatment.RECOMPUTE))
    assert again.fits
    assert again.compute_s == pytest.approx(wide.compute_s + 6 * 0.005)
    swapped = estimate(wide, machine(16), with_marks(TODAY, range(6), Treatment.SWAP))
    assert swapped.fits
    assert swapped.moved_bytes["device->host"] >= 6 * 2 * MIB
    bundles = [f"param/{number}" for number in range(8)]
    on_host = estimate(PROGRAM, machine(8), with_steps_on_host(TODAY, bundles))
    assert (
        on_host.moved_bytes["host->device"] < estimate(PROGRAM, machine(8), TODAY).moved_bytes["host->device"]
    )


def test_many_data_are_gone_through_in_one_pass() -> None:
    program = program_of([Layer(1000, 2000, (1000,), forward_s=1e-3, backward_s=1e-3)] * 5_000)
    found = estimate(program, machine_of([4_000_000, 10**9], [1e9], alignment_bytes=1), TODAY)
    assert found.fits
    assert found.moved_bytes["host->device"] > 0
