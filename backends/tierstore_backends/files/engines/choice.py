"""Which engine moves the bytes, and what it needs to do so.

``auto`` is worker threads: measured against the others in `docs/reference/disk-engines.md`.  An engine that
was asked for by name and cannot run here is refused, never replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from tierstore_backends.files.bounce import Bounce
from tierstore_backends.files.engine import Engine, Move
from tierstore_backends.files.engines.plain import PlainEngine
from tierstore_backends.files.engines.threads import ThreadEngine
from tierstore_backends.files.lane import Lane, carry_out
from tierstore_backends.files.meter import IoStats, total
from tierstore_backends.files.options import Direct, EngineName, FilesOptions
from tierstore_backends.files.piece_queue import PieceQueue
from tierstore_backends.files.probe import IoMode
from tierstore_backends.files.segments import Segments
from tierstore_backends.files.space import Space
from tierstore_backends.files.syscalls import Syscalls
from tierstore_backends.files.transfer import Piece


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that runs."""

    engine: Engine
    name: EngineName
    is_direct: bool
    lanes: Sequence[Lane]

    def stats(self) -> IoStats:
        """Return what it has done so far."""
        return total(
            [lane.counts for lane in self.lanes],
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
    segments: Segments,
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

    def lane(bounce_bytes: int) -> Lane:
        return Lane(
            segments,
            space.give_back,
            Bounce(bounce_bytes),
            alignment_bytes=mode.alignment_bytes,
            memory_alignment_bytes=mode.memory_alignment_bytes,
            is_checked=options.checksum,
        )

    name = chosen(options)
    queues = [PieceQueue(block_bytes, segments.segment_bytes) for _ in range(2)]
    lanes = [lane(block_bytes) for _ in range(options.threads)]
    moves: list[Move] = [functools.partial(_move, each, syscalls) for each in lanes]
    engine: Engine
    if name is EngineName.PLAIN:
        engine = PlainEngine(moves)
    else:
        engine = ThreadEngine(moves, *queues, depth=options.aio_queue_depth, tidy=space.trim, quiet_s=quiet_s)
    return Started(engine, name, mode.is_direct, lanes)


def _move(lane: Lane, syscalls: Syscalls, batch: Sequence[Piece]) -> None:
    carry_out(lane.steps(batch), syscalls)
