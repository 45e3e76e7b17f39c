"""What a backend of files stands on before any byte moves: a directory that is owned, its files and its room.

Promises: who gets ground has to give it up (``segments.close``, then ``owner.release``); who gets an
error instead has nothing to give up.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore_backends.files.engines.choice import direct_for
from tierstore_backends.files.options import FilesOptions
from tierstore_backends.files.owner import DirectoryOwner
from tierstore_backends.files.probe import IoMode, probe
from tierstore_backends.files.segments import Segments
from tierstore_backends.files.space import Space
from tierstore_backends.files.syscalls import Syscalls


@dataclass(frozen=True, slots=True)
class Ground:
    """A directory made ready.

    Attributes:
        owner: the right to it.
        mode: how I/O is done there.
        segments: its files.
        space: the room in them.
        block_bytes: the most bytes of a piece of any slot that is there already.
    """

    owner: DirectoryOwner
    mode: IoMode
    segments: Segments
    space: Space
    block_bytes: int = 0


def scratch_ground(
    capacity_bytes: int,
    options: FilesOptions,
    syscalls: Syscalls,
    *,
    segment_bytes: int,
    stride_bytes: int,
) -> Ground:
    """Own a directory as scratch space.

    Raises:
        UsageError: another live backend owns the directory, or it holds a durable store.
        BackendError: the directory cannot be made or used.
    """
    owner = DirectoryOwner.claim(options.path)
    try:
        mode = probe(options.path, direct_for(options), syscalls)
        segments = Segments(
            options.path, mode.flags, syscalls, segment_bytes=segment_bytes, stride_bytes=stride_bytes
        )
        return Ground(owner, mode, segments, Space(capacity_bytes, mode.alignment_bytes, segments))
    except BaseException:
        owner.release()
        raise
