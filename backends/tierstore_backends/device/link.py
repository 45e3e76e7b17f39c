"""How long a copy takes on an emulated link: a bandwidth, a latency, one copy after another.

Pure arithmetic over a time that is handed in, in seconds.
"""

from __future__ import annotations


class EmulatedLink:
    """One direction of a link.  Not thread-safe.

    Args:
        bandwidth: bytes a second; ``None``: no limit.
        latency_s: how much later than its last byte a copy ends; it does not hold up the next copy.
    """

    def __init__(self, bandwidth: int | None = None, latency_s: float = 0.0) -> None:
        self._bandwidth = bandwidth
        self._latency_s = latency_s
        self._busy_until_s = 0.0

    @property
    def is_instant(self) -> bool:
        """Whether a copy takes no time but that of moving the bytes."""
        return self._bandwidth is None and self._latency_s == 0.0

    def due_s(self, nbytes: int, asked_s: float) -> float:
        """Return when a copy of ``nbytes`` that was asked for at ``asked_s`` ends.

        It begins when the copies before it have left the link.
        """
        begins_s = max(asked_s, self._busy_until_s)
        self._busy_until_s = begins_s + (nbytes / self._bandwidth if self._bandwidth else 0.0)
        return self._busy_until_s + self._latency_s
