"""Ranges with a name in the traces of profilers: what the store does, with keys and bytes.

1. While no profiler of PyTorch's runs, and nobody has asked for NVTX, who could make one asks `are_on`, and
   that is all.
2. A range is of the thread that it is made in: what it waits for there, or begins.  When bytes moved
   `tierstore.Store.recorded` and `tierstore.training.Offload.record` say.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from tierstore.errors import UsageError
from tierstore.torch_private import RecordedRange, is_profiling
from tierstore.units import format_bytes

PREFIX: Final = "tierstore::"
NO_RANGE: Final[contextlib.AbstractContextManager[None]] = contextlib.nullcontext()
"""What is in the place of a range where nobody would see it."""

_MOST_KEYS: Final = 3
_LONGEST_KEY: Final = 120

_lock = threading.Lock()  # guards the next
_nvtx_users = 0


def are_on() -> bool:
    """Whether anybody would see a range."""
    return bool(_nvtx_users) or is_profiling()


@contextlib.contextmanager
def named_range(verb: str, keys: Sequence[str], nbytes: int) -> Iterator[None]:
    """Make what is done inside the context a range.

    Args:
        verb: what is done.
        keys: with which; the first ones are named.
        nbytes: of all of them.
    """
    name = _name(verb, keys, nbytes)
    has_nvtx = bool(_nvtx_users)
    if has_nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with RecordedRange(name):
            yield
    finally:
        if has_nvtx:
            torch.cuda.nvtx.range_pop()


def _name(verb: str, keys: Sequence[str], nbytes: int) -> str:
    named = ", ".join(key[:_LONGEST_KEY] for key in keys[:_MOST_KEYS])
    more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    return f"{PREFIX}{verb} {named}{more} ({format_bytes(nbytes)})"


@contextlib.contextmanager
def with_nvtx() -> Iterator[None]:
    """Make ranges of NVTX inside the context, in all threads, which Nsight Systems shows.

    Raises:
        UsageError: this PyTorch has no NVTX.
    """
    global _nvtx_users  # noqa: PLW0603 - for all threads
    try:
        torch.cuda.nvtx.range_push(PREFIX)
        torch.cuda.nvtx.range_pop()
    except RuntimeError as error:
        raise UsageError(
            f"NVTX ranges need PyTorch for CUDA: {error}. Without it torch.profiler shows the same ranges."
        ) from error
    with _lock:
        _nvtx_users += 1
    try:
        yield
    finally:
        with _lock:
            _nvtx_users -= 1
