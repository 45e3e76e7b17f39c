"""When a bundle's step is made: when the optimizer is asked, or ahead of it, in backward.

What is decided here is about bytes and counts.  What is about tensors (who else refers to them, what a step
writes to) is for `tierstore.training.optimizers.speculative_steps` to see.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol

MOST_STEPS_TO_WAIT = 1024


class StepTime(enum.Enum):
    """When, and where, a bundle's step is made."""

    IN_TIME = enum.auto()  # when the optimizer is asked
    AHEAD = enum.auto()  # in backward, where it computes
    ASIDE = enum.auto()  # on the host beside a device, while backward goes on


class TierRoom(Protocol):
    """What is known of a tier of the store."""

    @property
    def capacity_bytes(self) -> int:
        """Its quota."""
        ...

    @property
    def charged_bytes(self) -> int:
        """What keys take there."""
        ...

    @property
    def leased_bytes(self) -> int:
        """What of them is leased."""
        ...


def step_time(*, is_aside: bool, is_stepping: bool, is_kept: bool, is_allowed_in_backward: bool) -> StepTime:
    """Return when a bundle's step is made, if there is room for what it makes.

    Args:
        is_aside: whether a thread of its own makes the bundle's steps, on the host beside a device.
        is_stepping: whether an optimizer's step is under way.
        is_kept: whether the bundle has to stay where it is, so that a second version of it would push others
            out.
        is_allowed_in_backward: whether it is known that a step fits beside activations.
    """
    if is_aside:
        return StepTime.IN_TIME if is_stepping else StepTime.ASIDE
    return StepTime.AHEAD if is_allowed_in_backward and not is_kept else StepTime.IN_TIME


def has_room_ahead(
    when: StepTime,
    tiers: Mapping[str, TierRoom],
    step_tier: str,
    *,
    new_bytes: int,
    gradient_bytes: int,
    pending_bytes: int,
) -> bool:
    """Say whether the slowest tier could take all that is above it and the new values as well.

    So they never stand in the way of anything else.

    Args:
        when: the step is made.
        tiers: of the store, fastest first.
        step_tier: where the step computes.
        new_bytes: of the parameters and state that it makes.
        gradient_bytes: of what it reads beside them.
        pending_bytes: that steps aside will make, which are not there yet.
    """
    *faster, slowest = tiers.values()
    above_bytes = sum(tier.capacity_bytes for tier in faster) + pending_bytes
    if slowest.capacity_bytes - slowest.charged_bytes < above_bytes + new_bytes:
        return False
    where = tiers[step_tier]
    if when is not StepTime.ASIDE:
        return where.capacity_bytes >= new_bytes + gradient_bytes
    # Beside what others lease there, and the old values.
    return where.capacity_bytes - where.leased_bytes >= 2 * new_bytes + gradient_bytes


class Patience:
    """For how many steps nothing is made ahead: after one made in vain, twice as many as the last time."""

    def __init__(self) -> None:
        self._steps_to_wait = 0
        self._next_wait = 1
        self._was_wrong = False

    @property
    def is_waiting(self) -> bool:
        """Whether nothing is made ahead now."""
        return self._steps_to_wait > 0

    def begin_step(self) -> None:
        """A step begins."""
        self._steps_to_wait = max(0, self._steps_to_wait - 1)

    def note_wrong(self) -> None:
        """Something was made in vain."""
        self._was_wrong = True

    def note_right(self) -> None:
        """Something that was made ahead was right."""
        self._next_wait = 1

    def end_step(self) -> None:
        """A step has ended: wait if something was made in vain for it."""
        if self._was_wrong:
            self._steps_to_wait = self._next_wait
            self._next_wait = min(2 * self._next_wait, MOST_STEPS_TO_WAIT)
            self._was_wrong = False
