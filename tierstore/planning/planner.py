"""From a trace to a plan, and where in the plan a running step is.

A plan is advice.  A step that does something else than the plan says costs bandwidth and nothing
more: `PlanPosition` finds its way back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tierstore.core.model import Plan
from tierstore.planning.trace import Trace

LOOK_AHEAD = 64
"""How far past the expected access a key is searched before the access counts as a surprise."""


def plan_from(
    trace: Trace | Sequence[str],
    aliases: Mapping[str, str] | None = None,
    residents: Collection[str] = frozenset(),
    coming: Sequence[int] = (),
) -> Plan:
    """Return the plan that expects every step to be as the one recorded.

    Args:
        trace: of one step.
        aliases: other keys that will be used when the ones they stand for are.
        residents: keys that stay where they are as long as anything else can go.
        coming: by position, how many bytes are put into the first tier soon after it.
    """
    accesses = trace.accesses if isinstance(trace, Trace) else tuple(trace)
    return Plan(accesses, aliases or {}, residents, coming)


class PlanPosition:
    """Follows a step along a plan.

    Attributes:
        turn: how many accesses of the plan have been passed since the start, over all cycles.
        surprises: how many accesses were not found near where they were expected.
    """

    __slots__ = ("_accesses", "surprises", "turn")

    def __init__(self, plan: Plan) -> None:
        self._accesses = plan.accesses
        self.turn = 0
        self.surprises = 0

    def pass_by(self, key: str) -> int | None:
        """Take in that ``key`` is used; return its position in the plan, or ``None`` for a surprise."""
        accesses, length = self._accesses, len(self._accesses)
        for skipped in range(min(LOOK_AHEAD, length)):
            position = (self.turn + skipped) % length
            if accesses[position] == key:
                self.turn += skipped + 1
                return position
        self.surprises += 1
        return None

    def begin_cycle(self) -> None:
        """Go to the beginning of the plan: a new step starts."""
        remainder = self.turn % max(1, len(self._accesses))
        if remainder:
            self.turn += len(self._accesses) - remainder

    def key_at(self, turn: int) -> str:
        """Return the key that is expected at ``turn``."""
        return self._accesses[turn % len(self._accesses)]

    @property
    def position(self) -> int:
        """Where in the cycle it is."""
        return self.turn % len(self._accesses)

    @property
    def length(self) -> int:
        """The accesses of one cycle."""
        return len(self._accesses)
