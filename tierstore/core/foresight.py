"""What will be used when, and where in it the program is."""

from __future__ import annotations

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

    def advance(self, position: int) -> list[str]:
        """Go on to a position of the plan; return the keys whose next use is another one from there."""
        former, self._position = self._position, position
        if self.plan is None or not self.plan.accesses:
            return []
        accesses = self.plan.accesses
        steps = (position - former) % len(accesses)
        self.turn += steps
        passed = (accesses[(former + step) % len(accesses)] for step in range(1, steps + 1))
        return [key for each in passed for key in self.plan.known_as(each)]

    @property
    def coming_bytes(self) -> int:
        """What will be put into the first tier soon."""
        return self.plan.coming[self._position] if self.plan is not None and self.plan.coming else 0

    def distance(self, key: str) -> int | None:
        """Return the accesses until ``key`` is used next; ``None``: no plan knows it."""
        return None if self.plan is None else self.plan.distance(key, self._position)
