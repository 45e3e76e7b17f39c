"""What tiers hold in an estimate: keys' bytes, and what is leaving."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass(slots=True)
class KeyState:
    """One key's bytes.

    Attributes:
        nbytes: of it.
        opens: when it is needed, as moments of one step, in order.
        tier: the number of the fastest tier that holds it; ``None``: it is not made yet.
        below: the number of the tier that holds the same bytes below; ``None``: none does.
        ready_s: when its bytes in ``tier`` are all there.
        in_use: how many windows are open.
        is_ahead: whether it came before it was needed.
        returns: whether it leaves after every use.
        is_resident: whether everything else leaves before it.
    """

    nbytes: int
    opens: list[int]
    tier: int | None
    below: int | None = None
    ready_s: float = 0.0
    in_use: int = 0
    is_ahead: bool = False
    returns: bool = False
    is_resident: bool = False


@dataclass
class TierFill:
    """What one tier holds, and what may leave it.

    Attributes:
        quota_bytes: that it may hold.
        held_bytes: that it holds, without what is leaving.
        leaving: when bytes will have left, and how many, in order.
        leaving_bytes: of all of them.
        going: who may leave: by the latest next use first.
    """

    quota_bytes: int
    held_bytes: int = 0
    leaving: list[tuple[float, int]] = field(default_factory=list)
    leaving_bytes: int = 0
    going: list[tuple[int, str]] = field(default_factory=list)

    def room_at(self, nbytes: int, now_s: float) -> float:
        """Return when there is room for bytes for which it has been decided what leaves."""
        while self.leaving and self.held_bytes + self.leaving_bytes + nbytes > self.quota_bytes:
            left_s, freed = heapq.heappop(self.leaving)
            now_s = max(now_s, left_s)
            self.leaving_bytes -= freed
        return now_s

    def leave(self, left_s: float, nbytes: int) -> None:
        """Let bytes be on their way: they will have left at a time."""
        heapq.heappush(self.leaving, (left_s, nbytes))
        self.leaving_bytes += nbytes

    def settle(self, now_s: float) -> None:
        """Forget what has left."""
        while self.leaving and self.leaving[0][0] <= now_s:
            self.leaving_bytes -= heapq.heappop(self.leaving)[1]
