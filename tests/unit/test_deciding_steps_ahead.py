"""When steps are made ahead, and when gradients are stashed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.planning import Home, Stashing
from tierstore.planning.deciding import (
    Patience,
    StepTime,
    has_room_ahead,
    is_stashed,
    must_stash,
    step_time,
)


@dataclass(frozen=True)
class Room:
    """A tier."""

    capacity_bytes: int
    charged_bytes: int = 0
    leased_bytes: int = 0


def _fits(when: StepTime, tiers: dict[str, Room], pending_bytes: int = 0) -> bool:
    return has_room_ahead(
        when, tiers, "device", new_bytes=300, gradient_bytes=100, pending_bytes=pending_bytes
    )


nbytes = st.integers(0, 2000)


@given(nbytes, nbytes, nbytes, nbytes, nbytes)
def test_the_slowest_tier_has_to_take_all_above_it_and_the_new_values(
    device_bytes: int, host_bytes: int, disk_bytes: int, on_disk_bytes: int, pending_bytes: int
) -> None:
    tiers = {
        "device": Room(400 + device_bytes, leased_bytes=400),
        "host": Room(host_bytes),
        "disk": Room(disk_bytes + on_disk_bytes, on_disk_bytes),
    }
    least_bytes = 400 + device_bytes + host_bytes + pending_bytes + 300
    assert _fits(StepTime.AHEAD, tiers, pending_bytes) == (disk_bytes >= least_bytes)


@pytest.mark.parametrize(("free_bytes", "fits"), [(0, True), (-1, False)])
@pytest.mark.parametrize("leased_bytes", [0, 50])
def test_where_it_computes_there_is_room_for_it(free_bytes: int, leased_bytes: int, *, fits: bool) -> None:
    disk = Room(1 << 40)
    in_turn = Room(400 + free_bytes, leased_bytes=leased_bytes)
    assert _fits(StepTime.AHEAD, {"device": in_turn, "disk": disk}) == fits
    # Aside: beside what others lease, and the old values.
    aside = Room(700 + leased_bytes + free_bytes, leased_bytes=leased_bytes)
    assert _fits(StepTime.ASIDE, {"device": aside, "disk": disk}) == fits


def test_what_may_take_room_is_that_of_the_tier_that_the_step_computes_in() -> None:
    tiers = {"device": Room(10), "host": Room(400), "disk": Room(1 << 40)}
    rooms = [
        has_room_ahead(StepTime.AHEAD, tiers, tier, new_bytes=300, gradient_bytes=100, pending_bytes=0)
        for tier in ("device", "host")
    ]
    assert rooms == [False, True]


@pytest.mark.parametrize(
    ("is_aside", "is_stepping", "is_kept", "is_allowed_in_backward"), list(product([False, True], repeat=4))
)
def test_when_a_step_is_made(
    *, is_aside: bool, is_stepping: bool, is_kept: bool, is_allowed_in_backward: bool
) -> None:
    when = step_time(
        is_aside=is_aside,
        is_stepping=is_stepping,
        is_kept=is_kept,
        is_allowed_in_backward=is_allowed_in_backward,
    )
    assert (when is StepTime.ASIDE) == (is_aside and not is_stepping)
    assert (when is StepTime.AHEAD) == (not is_aside and is_allowed_in_backward and not is_kept)


def _waits(patience: Patience) -> int:
    """Count the steps until something is made ahead again."""
    count = 0
    while True:
        patience.begin_step()
        if not patience.is_waiting:
            return count
        count += 1
        patience.end_step()


def test_after_steps_in_vain_one_waits_longer_every_time_up_to_a_bound_until_one_is_right() -> None:
    patience, waited = Patience(), []
    for number in range(14):
        if number == 12:
            patience.note_right()
        patience.note_wrong()
        patience.note_wrong()  # twice in one step is once
        patience.end_step()
        waited.append(_waits(patience))
    assert waited == [*(2**n - 1 for n in range(11)), 1023, 0, 1]


@pytest.mark.parametrize("has_room", [False, True])
@pytest.mark.parametrize("stashing", list(Stashing))
@pytest.mark.parametrize("device", ["cpu", "device"])
@pytest.mark.parametrize("first_tier", ["host", "device"])
def test_a_gradient_goes_to_the_store_if_it_has_to_or_the_host_steps_beside_a_device(
    stashing: Stashing, device: str, first_tier: str, *, has_room: bool
) -> None:
    must = must_stash(stashing, has_room=has_room)
    expected = {Stashing.ALWAYS: True, Stashing.NEVER: False, Stashing.WITHOUT_ROOM: not has_room}
    assert must == expected[stashing]
    home = replace(Home(), device=device)
    is_elsewhere = device == "cpu" and first_tier == "device"
    assert is_stashed(home, first_tier, must=must) == (must or is_elsewhere)
