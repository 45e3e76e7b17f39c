"""A limit to bytes a second, as arithmetic: `TokenBucket`.

Exact, whole numbers only; knows no clock, thread or file.  What holds operations back asks it when they may
begin, and so does what predicts it.
"""

from __future__ import annotations

from typing import Final

_S: Final = 1_000_000_000  # nanoseconds


class TokenBucket:
    """How many bytes may pass, and when.  Pure: knows no clock; exact: whole numbers only.  Not thread-safe.

    It holds ``burst_bytes`` at most, is full at time 0, and fills by ``rate`` bytes each second.  More than
    it holds pass at once when it would have them, had it filled on since somebody began to wait.

    Args:
        rate: bytes a second.
        burst_bytes: what it holds.
    """

    def __init__(self, rate: int, burst_bytes: int) -> None:
        self.rate = rate
        self.burst_bytes = burst_bytes
        self._full = 0  # when it will be full; a unit is the time in nanoseconds times the rate, as below

    def due_ns(self, nbytes: int, since_ns: int) -> int:
        """Return from when on ``nbytes`` may pass that have been the next since a time."""
        missing = (nbytes - self.burst_bytes) * _S
        return -(-(max(self._full, since_ns * self.rate) + missing) // self.rate)

    def take(self, nbytes: int, now_ns: int) -> None:
        """Let ``nbytes`` pass: not before they are due, and time does not go back."""
        beyond = max(0, nbytes - self.burst_bytes) * _S
        self._full = max(self._full, now_ns * self.rate - beyond) + nbytes * _S
