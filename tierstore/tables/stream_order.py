"""Order among the streams of a device that use one memory after another."""

from __future__ import annotations

import torch


class StreamOrder:
    """Lets what is queued on a stream happen after what was queued before on others.

    A program that only looks rows up, or prefetches them, writes nothing that it knows of, and need not order
    its streams; a cache writes rows to its slots then.

    Args:
        device: whose streams; what was queued on the current one has happened before anything else.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._current()

    def take_up(self) -> bool:
        """Let the current stream go on from here; return whether another one was at it before."""
        stream = self._current()
        if stream is None or stream == self._last:
            return False
        assert self._last is not None  # the device has streams
        stream.wait_stream(self._last)
        self._last = stream
        return True

    def _current(self) -> torch.Stream | None:
        return None if self._device.type == "cpu" else torch.accelerator.current_stream(self._device)
