"""What is going to happen, in order: a virtual clock.

Time is that of what happens next, and never runs back.  What happens at one time happens in the order in
which it was asked for, so the same questions always have the same answers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from tierstore.errors import InvariantError

Action = Callable[[], None]


class EventQueue:
    """Actions, each at a time.

    Attributes:
        now_s: the time: seconds since the run began.
        happened: how many actions were taken.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.happened = 0
        self._asked = 0
        self._heap: list[tuple[float, int, Action]] = []

    def at(self, at_s: float, action: Action) -> None:
        """Take an action at a time, not before now.

        Raises:
            InvariantError: that time is past.
        """
        if at_s < self.now_s:
            raise InvariantError(f"something is to happen at {at_s!r} s, and it is {self.now_s!r} s by now")
        self._asked += 1
        heapq.heappush(self._heap, (at_s, self._asked, action))

    @property
    def next_s(self) -> float | None:
        """When something happens next; ``None``: nothing is going to."""
        return self._heap[0][0] if self._heap else None

    def __len__(self) -> int:
        return len(self._heap)

    def run_next(self) -> None:
        """Let happen what is next."""
        self.now_s, _, action = heapq.heappop(self._heap)
        self.happened += 1
        action()

    def run_until(self, at_s: float) -> None:
        """Let happen what happens up to a time, and go on to it."""
        heap = self._heap
        while heap and heap[0][0] <= at_s:
            self.run_next()
        self.now_s = max(self.now_s, at_s)
