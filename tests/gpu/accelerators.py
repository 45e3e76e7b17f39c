"""The accelerator that these tests run on, and what depends on which it is."""

from __future__ import annotations

import torch

ACCELERATOR = torch.accelerator.current_accelerator() or torch.device("cpu")  # skipped without one
NAME = ACCELERATOR.type
IS_SIMULATED = NAME == "openreg"

_LONG_CYCLES = 200_000_000  # some tenths of a second


def stream() -> torch.Stream:
    """Make a stream."""
    return torch.Stream(ACCELERATOR)


def event() -> torch.Event:
    """Make an event."""
    return torch.Event(ACCELERATOR)


def keep_busy() -> None:
    """Keep the current stream busy for longer than any copy here takes."""
    torch.get_device_module(NAME)._sleep(_LONG_CYCLES)
