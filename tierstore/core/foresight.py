"""What will be used when, and where in it the program is."""

from __future__ import annotations

from collections.abc import Iterator

from tierstore.core.model import Plan


class Foresight:
    """A plan that is followed, if there is one.

    Attributes:
        turn: how many accesses were passed since the beginning, of this plan and those before.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.turn = 0
        self._position = 0

    def follow(self, plan: Plan | None) -> None:
        """Follow another plan, from its first access on."""
        self.plan = plan
        self._position = 0

    def advance(self, position: int) -> Iterator[str]:
        """Go on to a position of the plan; yield the keys whose next use is another one from there."""
        if self.plan is None or not self.plan.accesses:
            self._position = position
            return
        length = len(self.plan.accesses)
        passed = range(self._position + 1, self._position + 1 + (position - self._position) % length)
        self.turn += len(passed)
        self._position = position
        for each in passed:
            yield from self.plan.known_as(self.plan.accesses[each % length])

    def distance(self, key: str) -> int | None:
        """Return the accesses until ``key`` is used next; ``None``: no plan knows it."""
        return None if self.plan is None else self.plan.distance(key, self._position)
