"""A simulated accelerator: importing this gives PyTorch the device ``openreg``, strict as a GPU.

Its kernels are the CPU's.  What it has of a GPU is what decides whether bytes are in order:

1. Kernels, copies and events are queued on streams, each run by a thread; the host goes on.  Streams may be
   late at random, from a seed (`late`), or be held (`held`).
2. Device memory cannot be touched by the host; who tries, dies.
3. Memory is overwritten with 0xFF, in stream order, when the allocator hands it out again, so that what was
   not waited for reads NaN.
4. Only pinned memory is copied asynchronously; page-locking goes through the pinned pool's registrar.
5. The allocator caches, counts, knows ``record_stream``, and can be given a limit (`memory_limit`).
6. It can be paced (`paced`): kernels and copies are slept through then, for as long as they would take.

The import is for the whole process and for ever: the current accelerator is ``openreg`` then.  So tests that
use it run in a process of their own (``make test-accelerator``).  What it does not simulate is in
docs/reference/testing.md.

Raises:
    NoCompilerError: at import, where there is no C++20 compiler.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from tests.accelerator import native
from tests.accelerator.build import NoCompilerError
from tests.accelerator.registrar import HostRegistrar
from tierstore_backends.pinned.registrars import add_registrar

__all__ = [
    "DEVICE",
    "Busy",
    "NoCompilerError",
    "Overwriting",
    "Pace",
    "busy",
    "counts",
    "held",
    "late",
    "memory_limit",
    "overwriting",
    "paced",
]

_NAME = "openreg"

rename_privateuse1_backend(_NAME)
torch._register_device_module(_NAME, importlib.import_module("tests.accelerator.device"))
generate_methods_for_privateuse1_backend()
add_registrar(_NAME, HostRegistrar)
# PyTorch takes no memory for pinned before it has brought the device up, which this does.
torch.empty(1, pin_memory=True)
# Streams must be idle before the libraries that their kernels are in end.
atexit.register(native.drain)

DEVICE = torch.device(_NAME, 0)


class Overwriting(enum.IntEnum):
    """When the allocator overwrites a block."""

    NEVER = 0
    HANDED_OUT = 1  # when it is handed out again; so it is at first
    FREED = 2  # as soon as its tensor is gone


@contextlib.contextmanager
def late(*, kernel_us: int = 0, copy_us: int = 0, seed: int = 0) -> Iterator[None]:
    """Let kernels and copies begin late inside the context: every other one by up to as much, by chance."""
    native.set_delays(kernel_us, copy_us, seed)
    try:
        yield
    finally:
        native.set_delays(0, 0, seed)


@dataclass(frozen=True)
class Pace:
    """How fast a device is.

    Attributes:
        operations: of products of matrices, a second.
        memory_bytes: that its kernels read and write, a second.
        link_bytes: to and from the host, a second each way.
    """

    operations: float
    memory_bytes: float
    link_bytes: float


@dataclass(frozen=True)
class Busy:
    """For how many seconds kernels and copies ran since the device was `paced`."""

    kernels_s: float
    copies_in_s: float
    copies_out_s: float


def busy() -> Busy:
    """Return how long what the streams have come to so far takes."""
    return Busy(*(native.busy_ms(engine) / 1000 for engine in range(3)))


@contextlib.contextmanager
def paced(pace: Pace) -> Iterator[None]:
    """Let kernels and copies take the time that ``pace`` says, sleeping: none is computed, no byte is moved.

    So Python, kernels and copies are beside each other as with a GPU, on a machine of two cores.  No value
    means anything that is computed or copied inside the context.
    """
    torch.accelerator.synchronize()
    native.set_overwriting(Overwriting.NEVER)
    native.set_pace(pace.operations, pace.memory_bytes, pace.link_bytes)
    try:
        yield
        torch.accelerator.synchronize()
    finally:
        native.drain()
        native.set_pace(0, 0, 0)
        native.set_overwriting(Overwriting.HANDED_OUT)


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Let ``stream`` stand still inside the context: what is queued there meanwhile runs afterwards."""
    hold = native.hold(stream.stream_id)
    try:
        yield
    finally:
        native.release(hold)


@contextlib.contextmanager
def memory_limit(nbytes: int) -> Iterator[None]:
    """Let tensors have at most ``nbytes`` together inside the context; the allocation too many raises."""
    native.set_memory_limit(nbytes)
    try:
        yield
    finally:
        native.set_memory_limit(0)


@contextlib.contextmanager
def overwriting(when: Overwriting) -> Iterator[None]:
    """Let the allocator overwrite blocks at another time, inside the context."""
    native.set_overwriting(when)
    try:
        yield
    finally:
        native.set_overwriting(Overwriting.HANDED_OUT)


def counts() -> dict[str, int]:
    """Return how often what happened since the process began, operators by name."""
    found: dict[str, int] = json.loads(native.counts())
    return found
