"""Where a step's time goes."""

from __future__ import annotations

import time


class Clock:
    """Where a step's time goes.  Backward is from its first sign to its last before the next phase."""

    def __init__(self) -> None:
        self.forward_s = 0.0
        self.backward_s = 0.0
        self._forward_began: float | None = None
        self._forward_ended: float | None = None
        self._backward_seen: float | None = None
        self._left_out_s = 0.0

    def begin_forward(self) -> None:
        """The model begins to run."""
        self.end_backward()
        self._forward_began = time.perf_counter()

    def end_forward(self) -> None:
        """The model has run."""
        now = time.perf_counter()
        if self._forward_began is not None:
            self.forward_s += now - self._forward_began
        self._forward_began = None
        self._forward_ended = now

    def note_backward(self) -> None:
        """A gradient was accumulated."""
        self._backward_seen = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """So long of the backward pass was something else."""
        self._left_out_s += seconds

    def end_backward(self) -> None:
        """Whatever comes now is no backward pass."""
        if self._backward_seen is not None and self._forward_ended is not None:
            # Only now, and never less than nothing: whoever watches sees it grow.
            self.backward_s += max(0.0, self._backward_seen - self._forward_ended - self._left_out_s)
        self._backward_seen = self._forward_ended = None
        self._left_out_s = 0.0
