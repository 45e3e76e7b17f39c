"""Files as a `tierstore.spi.Backend`.

Reads are served before writes that wait at the same time; within a direction the first to come is
the first to go.  A read never waits for more than the fragments that are in the workers' hands.

Knows nothing of keys, tiers or policies.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Final

import torch

from tierstore.errors import StoreClosed, UsageError
from tierstore.spi import Buffer, Capabilities, Completion, Medium, Slot
from tierstore.units import GIB, MIB, align_up
from tierstore_backends.buffers import check_buffer, check_parts
from tierstore_backends.files.addressing.directory_locks import Right
from tierstore_backends.files.addressing.drives import SPAN_BYTES
from tierstore_backends.files.addressing.segments import Files
from tierstore_backends.files.addressing.space import Space
from tierstore_backends.files.engines.choice import Started, start
from tierstore_backends.files.engines.fan_out import StartedDrives, start_all
from tierstore_backends.files.io.io_request import (
    Direction,
    FileSlot,
    FileSlotState,
    IoRequest,
    RunCut,
    by_fragment,
    cut,
    cut_parts,
)
from tierstore_backends.files.io.io_stats import IoStats
from tierstore_backends.files.io.kernel import KERNEL
from tierstore_backends.files.io.syscalls import Syscalls
from tierstore_backends.files.options import EngineName, FilesOptions
from tierstore_backends.files.volume import Volume, scratch_volume
from tierstore_backends.lifetime import BackendLifetime

SEGMENT_BYTES: Final = 64 * GIB
STRIDE_BYTES: Final = 64 * MIB
QUIET_S: Final = 30.0  # longer than a training step leaves a disk alone: what is cut is slow to regrow


class FilesBackend:
    """Files in a directory that this object alone owns: scratch space, unless it is given another volume.

    Everything may be called from any thread.  ``reserve``, ``read``, ``write`` and ``free`` do not
    block on the disk, except with the engine ``plain``; ``resize`` to less and ``close`` do.

    Args:
        capacity_bytes: the most that the files may take on disk.
        options: see `FilesOptions`; several directories are one address space.
        syscalls: the way to the kernel; tests pass their own.
        segment_bytes: the length of a full file; a multiple of 64 KiB, and with several directories a
            power of two.
        stride_bytes: how far files grow at a time; a multiple of 64 KiB.
        quiet_s: after so long without a transfer, the free end of the files is cut off.
        volume: what it stands on, instead of scratch files; it is given up by ``close``, and kept where this
            fails.

    Raises:
        UsageError: another live backend owns the directory.
        BackendError: the directory cannot be made or used.
    """

    def __init__(
        self,
        capacity_bytes: int,
        options: FilesOptions,
        *,
        syscalls: Syscalls = KERNEL,
        segment_bytes: int = SEGMENT_BYTES,
        stride_bytes: int = STRIDE_BYTES,
        quiet_s: float = QUIET_S,
        volume: Volume | None = None,
    ) -> None:
        is_given = volume is not None
        volume = volume or scratch_volume(
            capacity_bytes, options, syscalls, segment_bytes=segment_bytes, stride_bytes=stride_bytes
        )
        mode, owner, self._segments, self._space = volume.mode, volume.owner, volume.segments, volume.space
        self._block_bytes = align_up(options.aio_block_size, mode.alignment_bytes)
        try:
            most_bytes = max(self._block_bytes, volume.block_bytes)
            self._started = _start(options, volume, syscalls, most_bytes, quiet_s)
        except BaseException:
            if not is_given:
                self._segments.close()
                owner.release()
            raise
        self._engine = self._started.engine
        self._capabilities = Capabilities(
            medium=Medium.STORAGE,
            is_durable=False,
            alignment_bytes=mode.alignment_bytes,
            depth=1 if self._started.name is EngineName.PLAIN else options.aio_queue_depth,
            has_batches=True,
            has_parts=True,
            has_direct_paths=True,
            has_shrinking_slots=True,
            has_io_stats=True,
        )
        self._run_cut = RunCut(self._capabilities.depth, SPAN_BYTES, self._block_bytes)
        disown = functools.partial(_disown, self._segments, owner)
        self._ending = BackendLifetime(self, disown, _shut, self._started, self._segments, owner)

    @property
    def capabilities(self) -> Capabilities:
        """See `tierstore.spi.Backend`."""
        return self._capabilities

    @property
    def physical_bytes(self) -> int:
        """What the files take on disk now, as the file system counts it.

        That is at most the capacity, and beside it what the file system needs to find the blocks:
        on ext4 nothing, or one block for some hundred fragments of a file.
        """
        return self._segments.physical_bytes

    @property
    def io_stats(self) -> IoStats:
        """What the engine has done so far.  From any thread, also after ``close``."""
        return self._started.stats()

    def reserve(self, nbytes: int) -> FileSlot:
        """Take addresses for ``nbytes``; touches no disk.

        Raises:
            CapacityError: fewer bytes are free, in however many fragments.
            UsageError: ``nbytes`` is negative.
            StoreClosed: after ``close``.
        """
        self._check_open()
        if nbytes < 0:
            raise UsageError(f"a slot cannot have {nbytes} bytes")
        return FileSlot(nbytes, self._space.reserve(nbytes), self, self._block_bytes)

    def read(self, slot: Slot, into: Buffer) -> Completion:
        """Fill ``into``; compare its checksums with those of the write.

        Completes with ``IntegrityError`` where bytes differ, ``BackendError`` where the disk fails.

        Raises:
            UsageError: not a slot of this backend, one without bytes, or a buffer that does not fit.
            StoreClosed: after ``close``.
        """
        return self.read_many([slot], [into])

    def write(self, slot: Slot, source: Buffer) -> Completion:
        """Write ``source``; keep its checksums.

        Completes with ``BackendError`` where the disk fails or is full; the slot then holds no
        bytes, and may be written again.

        Raises:
            UsageError: not a slot of this backend, or a buffer that does not fit.
            StoreClosed: after ``close``.
        """
        return self.write_many([slot], [source])

    def read_many(self, slots: Sequence[Slot], into: Sequence[Buffer]) -> Completion:
        """Fill each buffer; see `read` and `tierstore.spi.BatchBackend`."""
        own = [self._own(slot) for slot in slots]
        for slot, buffer in zip(own, into, strict=True):
            _check_written(slot)
            check_buffer(buffer, slot.nbytes, accepts=self.accepts)
        return self._move(Direction.READ, own, into)

    def read_parts(
        self, slots: Sequence[Slot], begins: Sequence[int], nbytes: int, into: Buffer
    ) -> Completion:
        """Fill ``into`` with parts; see `tierstore.spi.PartBackend`.

        All are handed to the engine in one call, and those that touch in a file move together.  No checksum
        is compared, as one is that of a fragment: such bytes count as ``unchecked_bytes``.

        Raises:
            UsageError: not slots of this backend, one without bytes, parts that are not aligned or not within
                their slots, or a buffer that does not fit or is not in host memory.
            StoreClosed: after ``close``.
        """
        self._check_open()
        own: list[FileSlot] = []
        for slot in slots:  # of thousands: nothing is called for one that is as it has to be
            is_right = (
                isinstance(slot, FileSlot) and slot.home is self and slot.state is FileSlotState.WRITTEN
            )
            own.append(slot if is_right else self._own(slot))  # type: ignore[arg-type]
        check_parts(own, begins, nbytes, into, self._capabilities.alignment_bytes)
        for slot in own:
            if slot.state is not FileSlotState.WRITTEN:
                _check_written(slot)
        transfer = IoRequest(Direction.READ, own, [into] * len(own), is_whole=False)
        cut_parts(transfer, begins, nbytes, segment_bytes=self._segments.segment_bytes, runs=self._run_cut)
        self._engine.submit(transfer.fragments)
        return transfer.completion

    def write_many(self, slots: Sequence[Slot], sources: Sequence[Buffer]) -> Completion:
        """Write each buffer; see `write` and `tierstore.spi.BatchBackend`."""
        own = [self._own(slot) for slot in slots]
        for slot, buffer in zip(own, sources, strict=True):
            check_buffer(buffer, slot.nbytes, accepts=self.accepts)
        for slot in own:
            # From here to the end of the write the old bytes are gone and the new ones not there.
            slot.state = FileSlotState.RESERVED
            slot.block_bytes = self._block_bytes
            slot.failed_syncs = self._segments.failed_syncs
        return self._move(Direction.WRITE, own, sources)

    def write_again(self, slot: FileSlot) -> None:
        """Write what a slot holds once more, fragment by fragment; it can be read meanwhile.  Blocks.

        Raises:
            BackendError: it cannot be read or written.
        """
        failed_syncs = self._segments.failed_syncs
        for part in by_fragment(slot, self._segments.segment_bytes):
            buffer = torch.empty(part.nbytes, dtype=torch.uint8)
            for direction in (Direction.READ, Direction.WRITE):
                moved = self._move(direction, [part], [buffer])
                moved.wait()
                if moved.error is not None:
                    raise moved.error
        slot.failed_syncs = failed_syncs

    def accepts(self, memory: torch.Tensor) -> bool:
        """Say whether ``memory`` of a GPU may be read into and written from; see `DirectBackend`.

        That is so with the engine ``threads``, without checksums, and where kvikio moves a page straight.
        """
        return self._started.accepts(memory)

    def free(self, slot: Slot) -> Completion:
        """Give the slot's addresses to others.  Done at once: their blocks are used again.

        Raises:
            UsageError: not a slot of this backend, or freed before.
            StoreClosed: after ``close``.
        """
        own = self._own(slot)
        own.state = FileSlotState.FREED
        if self._space.free(own.extents):
            self._engine.tidy_when_quiet()
        return Completion.done()

    def resize(self, capacity_bytes: int) -> None:
        """Hold at most ``capacity_bytes``; what the files hold above it is given back on return.

        Raises:
            CapacityError: more is reserved.
            BackendError: the file system failed to give bytes back.
            StoreClosed: after ``close``.
        """
        self._check_open()
        self._space.resize(capacity_bytes)

    def close(self) -> None:
        """Finish what is under way and remove every file.  Idempotent; from any thread.

        Raises:
            UsageError: called from a completion's callback, which would wait for itself.
            BackendError: a file could not be removed.
        """
        if self.is_worker():
            raise UsageError("scratch files cannot be closed from a completion's callback")
        self._ending.close()

    def is_worker(self) -> bool:
        """Whether the calling thread moves bytes, and so runs completions' callbacks."""
        return self._engine.is_worker()

    def _move(self, direction: Direction, slots: Sequence[FileSlot], buffers: Sequence[Buffer]) -> Completion:
        transfer = IoRequest(direction, slots, buffers)
        fragments = cut(transfer, segment_bytes=self._segments.segment_bytes)
        if not fragments:  # there are no bytes
            return Completion.done()
        if not buffers[0].is_cpu:
            transfer.ready = _after_current_work(buffers[0])
        self._engine.submit(fragments)
        return transfer.completion

    def _check_open(self) -> None:
        if self._ending.is_over:
            raise StoreClosed("the files were closed")

    def _own(self, slot: Slot) -> FileSlot:
        self._check_open()
        if not isinstance(slot, FileSlot) or slot.home is not self:
            raise UsageError(f"{slot!r} is not a slot of these scratch files")
        if slot.state is FileSlotState.FREED:
            raise UsageError(f"{slot!r} was freed before")
        return slot


def _check_written(slot: FileSlot) -> None:
    if slot.state is not FileSlotState.WRITTEN and slot.nbytes:
        raise UsageError(f"{slot} holds no bytes: nothing was written there, or writing failed")


def _after_current_work(memory: torch.Tensor) -> Callable[[], None]:
    """Return what waits until the calling thread's current stream has come as far as it is now."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(memory.device))
    return event.synchronize


def _start(
    options: FilesOptions, volume: Volume, syscalls: Syscalls, block_bytes: int, quiet_s: float
) -> Started | StartedDrives:
    if isinstance(volume.space, Space):
        return start(options, volume.mode, volume.segments, volume.space, syscalls, block_bytes, quiet_s)
    return start_all(options, volume.drives, volume.segments, volume.space, syscalls, block_bytes, quiet_s)


def _shut(started: Started | StartedDrives, segments: Files, owner: Right) -> None:
    """End everything: the engine first, so that nothing moves when files go."""
    if started.engine.is_worker():  # the garbage collector came by there, and the thread may have a lock
        threading.Thread(target=_shut, args=(started, segments, owner), name="tierstore-files-end").start()
        return
    try:
        started.close()
    finally:
        segments.close()
        owner.release()


def _disown(segments: Files, owner: Right) -> None:
    """In the child of a fork there are no workers, and the files are the parent's."""
    segments.disown()
    owner.disown()
