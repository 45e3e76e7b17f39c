"""Which engine moves the bytes, and what it needs to do so.

``auto`` is worker threads: measured against the others in `docs/reference/disk-engines.md`.  An engine that
was asked for by name and cannot run here is refused, never replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import torch

from tierstore.errors import BackendError
from tierstore_backends.files.addressing.direct_io_probe import IoMode
from tierstore_backends.files.addressing.segments import Files
from tierstore_backends.files.addressing.space import Space
from tierstore_backends.files.engines.aio import AsyncEngine
from tierstore_backends.files.engines.base import IoEngine, Move, Pace
from tierstore_backends.files.engines.batch_io import BatchIo, carry_out
from tierstore_backends.files.engines.fragment_queue import FragmentQueues
from tierstore_backends.files.engines.gpu import GpuFiles
from tierstore_backends.files.engines.io_uring import RingEngine
from tierstore_backends.files.engines.io_uring_probe import ring_fault
from tierstore_backends.files.engines.plain import PlainEngine
from tierstore_backends.files.engines.threads import ThreadEngine
from tierstore_backends.files.io.bounce import Bounce
from tierstore_backends.files.io.io_request import Fragment
from tierstore_backends.files.io.io_stats import IoStats, total
from tierstore_backends.files.io.syscalls import MOST_ENTRIES, Ring, Syscalls
from tierstore_backends.files.options import Direct, EngineName, FilesOptions


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that runs."""

    engine: IoEngine
    name: EngineName
    is_direct: bool
    batch_ios: Sequence[BatchIo]
    gpu: GpuFiles | None  # moves what is a GPU's, where that can be

    def accepts(self, memory: torch.Tensor) -> bool:
        """Say whether ``memory`` of a GPU is moved straight."""
        return self.gpu is not None and self.gpu.accepts(memory)

    def close(self) -> None:
        """Let what is under way come to its end, and stop."""
        self.engine.close()
        if self.gpu is not None:
            self.gpu.close()

    def stats(self) -> IoStats:
        """Return what it has done so far."""
        return total(
            [batch_io.counts for batch_io in self.batch_ios],
            engine=self.name.value,
            is_direct=self.is_direct,
            most_in_flight=self.engine.most_in_flight,
        )


def chosen(options: FilesOptions) -> EngineName:
    """Return the engine that ``options`` mean."""
    if not options.enable_aio:
        return EngineName.PLAIN
    return EngineName.THREADS if options.engine is EngineName.AUTO else options.engine


def direct_for(options: FilesOptions) -> Direct:
    """Return whether the engine that ``options`` mean goes past the page cache."""
    return Direct.NEVER if chosen(options) is EngineName.AIOFILES else options.direct


def start(
    options: FilesOptions,
    mode: IoMode,
    segments: Files,
    space: Space,
    syscalls: Syscalls,
    block_bytes: int,
    quiet_s: float,
) -> Started:
    """Start the engine that ``options`` mean.

    Args:
        options: what the user wrote.
        mode: how files are opened in the directory.
        segments: where addresses are.
        space: gives unused blocks back.
        syscalls: the way to the kernel.
        block_bytes: the most bytes of a batch.
        quiet_s: how long nothing has moved before unused disk is given back.

    Raises:
        BackendError: the engine was asked for by name and cannot run here; the message says why.
    """
    name = chosen(options)
    # Only workers may wait for a GPU, and checksums are made in host memory.
    gpu = GpuFiles(options.path, segments) if name is EngineName.THREADS and not options.checksum else None
    batch_ios = _batch_ios(name, options, mode, segments, space, block_bytes, gpu)
    waiting = FragmentQueues(block_bytes, segments.segment_bytes)
    pace = Pace(depth=options.aio_queue_depth, tidy=space.trim, quiet_s=quiet_s)
    moves: list[Move] = [functools.partial(_move, batch_io, syscalls) for batch_io in batch_ios]
    engine: IoEngine
    match name:
        case EngineName.PLAIN:
            engine = PlainEngine(moves)
        case EngineName.IO_URING:
            ring = _open_ring(options.path, mode, syscalls, _entries(options))
            engine = RingEngine(batch_ios[0], ring, _entries(options), waiting, pace)
        case EngineName.AIOFILES:
            engine = AsyncEngine(batch_ios, syscalls, segments.path, waiting, pace)
        case EngineName.THREADS | EngineName.AUTO:
            engine = ThreadEngine(moves, waiting, pace)
        case _:
            assert_never(name)
    return Started(engine, name, mode.is_direct, batch_ios, gpu)


def _entries(options: FilesOptions) -> int:
    """Return how many calls a ring has in the kernel at a time."""
    return min(options.aio_queue_depth, MOST_ENTRIES)


def _batch_ios(
    name: EngineName,
    options: FilesOptions,
    mode: IoMode,
    segments: Files,
    space: Space,
    block_bytes: int,
    gpu: GpuFiles | None,
) -> list[BatchIo]:
    """Return a BatchIo for each worker; one for all that a ring has in flight."""
    return [
        BatchIo(
            segments,
            space.give_back,
            bounce,
            alignment_bytes=mode.alignment_bytes,
            memory_alignment_bytes=mode.memory_alignment_bytes,
            is_checked=options.checksum,
            is_joining=name is EngineName.AIOFILES,
            gpu=gpu,
        )
        for bounce in _bounces(name, options, mode, block_bytes)
    ]


def _bounces(name: EngineName, options: FilesOptions, mode: IoMode, block_bytes: int) -> list[Bounce]:
    """Return bounce memory for each BatchIo: a worker moves one batch at a time, a ring all at once."""
    if name is EngineName.IO_URING:
        # One BatchIo for all that is in flight: every batch may have a tail that bounces, some bounce whole.
        return [Bounce(2 * block_bytes + _entries(options) * mode.alignment_bytes)]
    return [Bounce(block_bytes) for _ in range(options.threads)]


def _open_ring(folder: Path, mode: IoMode, syscalls: Syscalls, entries: int) -> Ring:
    fault = ring_fault(folder, mode, syscalls)
    if fault is not None:
        raise BackendError(f"engine='io_uring' cannot be used in {folder}: {fault}. Leave engine out")
    try:
        return syscalls.open_ring(entries, is_direct=mode.is_direct)
    except OSError as error:
        raise BackendError(
            f"engine='io_uring' cannot have {entries} calls in flight: {error}. Lower aio_queue_depth"
        ) from error


def _move(batch_io: BatchIo, syscalls: Syscalls, batch: Sequence[Fragment]) -> None:
    carry_out(batch_io.steps(batch), syscalls)
