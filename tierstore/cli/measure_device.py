"""Short measurements of what a device computes and what its copies reach: what a machine file says of it.

The emulated device is host memory: for ``"cpu"`` the same is measured there.  As in `tierstore.cli.measure`,
figures say what to expect, not what is best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tierstore.units import MIB

CPU = "cpu"
DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Whose matrix products are measured; one that a device cannot multiply is left out."""

_COPY_BYTES = 64 * MIB  # larger than the last-level caches of most machines
_SECONDS = 0.3
_SMALL_BYTES = 4096
_LEAST_SIDE, _MOST_SIDE = 128, 8192
_LEAST_SECONDS = 0.02  # of one product, or a larger one is tried: starting it must not count
_PER_ELEMENT = 2  # a product and a sum
_READ_AND_WRITTEN = 2
_SMALL_TIMES = 50


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """What one device reaches.

    Attributes:
        to_device_bytes_per_s, from_device_bytes_per_s: of one direction alone.
        both_bytes_per_s: of both at once, together.
        to_device_latency_s, from_device_latency_s: of 4 KiB, there and known to be there.
    """

    to_device_bytes_per_s: float
    from_device_bytes_per_s: float
    both_bytes_per_s: float
    to_device_latency_s: float
    from_device_latency_s: float


@dataclass(frozen=True, slots=True)
class ComputeSpeed:
    """How fast something computes.

    Attributes:
        flops_per_s: of products of large matrices, by dtype.
        memory_bytes_per_s: that one copy in its memory reads and writes.
        operator_s: of one operator on one number.
    """

    flops_per_s: dict[str, float]
    memory_bytes_per_s: float
    operator_s: float


def device_speed(device: str) -> DeviceSpeed:
    """Measure copies between pinned host memory and a device.

    Raises:
        RuntimeError: host memory cannot be pinned there, or the device has no room.
    """
    up, down = _Copies(device, _COPY_BYTES), _Copies(device, _COPY_BYTES)
    small = _Copies(device, _SMALL_BYTES)
    nbytes = up.nbytes
    return DeviceSpeed(
        to_device_bytes_per_s=nbytes / best_s(up.there),
        from_device_bytes_per_s=nbytes / best_s(down.back),
        both_bytes_per_s=2 * nbytes / _both_s(up, down),
        to_device_latency_s=best_s(small.there),
        from_device_latency_s=best_s(small.back),
    )


def compute_speed(device: str) -> ComputeSpeed:
    """Measure what a device computes.

    Raises:
        RuntimeError: it has no room.
    """
    flops = {dtype: _matmul_flops_per_s(device, getattr(torch, dtype)) for dtype in DTYPES}
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    number = torch.zeros(1, device=device)

    def copied() -> None:
        target.copy_(source)
        _synchronize(device)

    def added() -> None:
        for _ in range(_SMALL_TIMES):
            number.add_(1)
        _synchronize(device)

    return ComputeSpeed(
        {dtype: rate for dtype, rate in flops.items() if rate is not None},
        _READ_AND_WRITTEN * source.nbytes / best_s(copied),
        best_s(added) / _SMALL_TIMES,
    )


def best_s(work: Callable[[], object]) -> float:
    """Return the shortest time that some work takes, done again and again for a moment."""
    work()  # the first one touches pages and wakes what sleeps
    best = float("inf")
    end = time.perf_counter() + _SECONDS
    while True:  # at least once, however busy the machine is
        begin = time.perf_counter()
        work()
        now = time.perf_counter()
        best = min(best, now - begin)
        if now >= end:
            return max(best, 1e-9)  # of a clock that has not moved


class _Copies:
    """Bytes of the host and of a device, and copies between them that are over when they return."""

    def __init__(self, device: str, nbytes: int) -> None:
        self.nbytes, self.device = nbytes, device
        self._host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device != CPU)
        self._there = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def start_there(self) -> None:
        self._there.copy_(self._host, non_blocking=True)

    def start_back(self) -> None:
        self._host.copy_(self._there, non_blocking=True)

    def there(self) -> None:
        self.start_there()
        _synchronize(self.device)

    def back(self) -> None:
        self.start_back()
        _synchronize(self.device)


def _both_s(up: _Copies, down: _Copies) -> float:
    """Return how long a copy in each direction takes, both at once."""
    device = up.device
    if device == CPU:
        with ThreadPoolExecutor(2) as lanes:

            def both() -> None:
                for future in [lanes.submit(up.there), lanes.submit(down.back)]:
                    future.result()

            return best_s(both)
    streams = torch.Stream(device=device), torch.Stream(device=device)

    def both_streams() -> None:
        with streams[0]:
            up.start_there()
        with streams[1]:
            down.start_back()
        _synchronize(device)

    return best_s(both_streams)


def _matmul_flops_per_s(device: str, dtype: torch.dtype) -> float | None:
    """Return what products of matrices reach; ``None``: there are none of this dtype."""
    side = _LEAST_SIDE
    while True:
        try:
            operand = torch.ones(side, side, dtype=dtype, device=device)
            product = torch.empty_like(operand)

            def multiplied(operand: torch.Tensor = operand, product: torch.Tensor = product) -> None:
                torch.mm(operand, operand, out=product)
                _synchronize(device)

            seconds = best_s(multiplied) if side == _MOST_SIDE else _once_s(multiplied)
        except RuntimeError as refusal:
            if isinstance(refusal, torch.OutOfMemoryError):
                raise
            return None
        if seconds >= min(_LEAST_SECONDS, _SECONDS) or side == _MOST_SIDE:
            return _PER_ELEMENT * side**3 / min(seconds, best_s(multiplied))
        side *= 2


def _once_s(work: Callable[[], object]) -> float:
    work()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _synchronize(device: str) -> None:
    if device != CPU:
        torch.accelerator.synchronize(device)
