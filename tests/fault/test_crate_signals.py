"""Signals at many lines of what crates do: whatever the handlers do, nobody waits, and nothing is lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from tests.crate_stores import CRATE_BYTES, CrateDisk, check_index, small
from tests.fault.test_signals import AlarmError, AtLine, handled, let_come, raising, send
from tierstore.crates import Crates

_EVERY = 101  # lines, from one signal to the next


def filled() -> Crates:
    """Return crates of which some are to be joined soon."""
    crates = Crates(CrateDisk().open(), crate_bytes=CRATE_BYTES)
    crates.put_all({f"k{number}": small(number) for number in range(6)})
    for number in range(13):
        crates.put(f"s{number}", small(number, 10))
    return crates


def put(crates: Crates) -> None:
    """Put enough to join what there is."""
    for number in range(3):
        crates.put(f"new {number}", small(0))


def drop(crates: Crates) -> None:
    """Drop enough to write a crate anew."""
    crates.drop("k1", "k2", "k3", "k4")


def lease(crates: Crates) -> None:
    """Write one tensor, and read its neighbour, which is copied first."""
    with crates.lease("k1", tier="host", write=True) as written, crates.lease("k2", tier="host") as read:
        written.tensor.copy_(read.tensor * 0 + 1)


def move(crates: Crates) -> None:
    """Send crates down, flush them, and get one back."""
    crates.evict("k1", "s1", to="disk").result(10)
    crates.flush()
    crates.get("k1")


@pytest.mark.slow
@pytest.mark.parametrize("step", [put, drop, lease, move])
def test_a_handler_that_raises_leaves_crates_whole_and_nobody_waiting(step: Callable[[Crates], None]) -> None:
    with handled(raising(AlarmError)):
        for count in itertools.count():
            crates = filled()
            met = AtLine(1 + count * _EVERY, send)
            try:
                with met:
                    step(crates)
                let_come()
            except AlarmError:
                pass
            check(crates)
            if met.line is None:
                break
    assert count > 4


@pytest.mark.slow
@pytest.mark.parametrize("step", [put, drop, lease, move])
def test_a_handler_may_use_the_crates(step: Callable[[Crates], None]) -> None:
    for count in itertools.count():
        crates = filled()
        met = AtLine(1 + count * 5 * _EVERY, send)
        with handled(lambda *_, crates=crates: crates.put("handled", small(1), replace=True)):
            with met:
                step(crates)
            let_come()
        assert met.line is None or torch.equal(crates.get("handled"), small(1))
        check(crates)
        if met.line is None:
            break
    assert count > 2


def check(crates: Crates) -> None:
    """Fail if a tensor is lost, or if something cannot be done any more."""
    check_index(crates)
    assert all(crate.is_idle for crate in crates._sharing.index.crates.values())
    for number in (0, 5):
        assert torch.equal(crates.get(f"k{number}"), small(number))
    for key in crates:
        crates.get(key)
    crates.put("afterwards", small(7))
    crates.drop("k0")
    crates.flush()
    crates.store.check()
    crates.close()
    crates.store.close()
