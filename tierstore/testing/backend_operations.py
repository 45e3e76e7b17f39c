"""Single operations of a backend that a test waits for, and what it compares: what the suites are written in.

A completion that does not come within `TIMEOUT_S` is a failure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from tierstore.errors import TierStoreError
from tierstore.spi import Backend, Buffer, Capabilities, Completion, Slot
from tierstore.units import MIB, align_up

CAPACITY_BYTES = 8 * MIB
TIMEOUT_S = 60.0

SIZES = (0, 1, 511, 512, 513, 4095, 4097, 65_536, 65_537, MIB + 3)
"""Nothing, around a sector, around a page, where small ends, and a piece of a large one."""


def finish(completion: Completion) -> BaseException | None:
    """Wait for the end of an operation and return its error.

    Raises:
        TimeoutError: it did not end: the backend broke rule 7.
    """
    ended = threading.Event()
    completion.add_done_callback(lambda _error: ended.set())
    if not ended.wait(TIMEOUT_S):
        raise TimeoutError(f"an operation did not complete within {TIMEOUT_S} s")
    return completion.error


def succeed(completion: Completion) -> None:
    """Wait for the end of an operation and raise its error."""
    error = finish(completion)
    if error is not None:
        raise error


def refusal(operate: Callable[[], Completion]) -> BaseException | None:
    """Return the error of a call that the engine must never make, raised or completed with."""
    try:
        return finish(operate())
    except TierStoreError as error:
        return error


def pattern(nbytes: int, seed: int) -> Buffer:
    """Return ``nbytes`` that differ from those of every other seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def stored(backend: Backend, source: Buffer) -> Slot:
    """Return a slot that holds ``source``."""
    slot = backend.reserve(source.numel())
    succeed(backend.write(slot, source))
    return slot


def contents(backend: Backend, slot: Slot) -> Buffer:
    """Return what a slot holds."""
    into = torch.full((slot.nbytes,), 0x5A, dtype=torch.uint8)
    succeed(backend.read(slot, into))
    return into


def charge(capabilities: Capabilities, nbytes: int) -> int:
    """Return what a slot of ``nbytes`` counts against the capacity (rule 1)."""
    return align_up(nbytes, capabilities.alignment_bytes)
