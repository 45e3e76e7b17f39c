"""Files that are found again: a `tierstore.spi.DurableBackend`.

Files as they are elsewhere in this room, a manifest that names what is kept in them, and commits that
change it.  What is written and not committed is gone when the directory is opened the next time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from tierstore.errors import BackendError, StoreClosed, UsageError
from tierstore.spi import Buffer, Capabilities, Completion, PartialError, Record, Slot
from tierstore_backends.buffers import check_parts
from tierstore_backends.files.backend import QUIET_S, SEGMENT_BYTES, STRIDE_BYTES, FilesBackend
from tierstore_backends.files.commits import DirectoryCommits
from tierstore_backends.files.durability.record_codec import decode_note, decode_text
from tierstore_backends.files.durability.recovery import RecoveredRecords
from tierstore_backends.files.io.io_request import FileSlot
from tierstore_backends.files.io.io_stats import IoStats
from tierstore_backends.files.io.kernel import KERNEL
from tierstore_backends.files.io.syscalls import Syscalls
from tierstore_backends.files.options import FilesOptions
from tierstore_backends.files.read_only import ReadOnly, reading_volume
from tierstore_backends.files.volume import durable_volume
from tierstore_backends.lifetime import BackendLifetime

_log = logging.getLogger("tierstore.files")


class DurableFiles:
    """Files in a directory that this object alone owns, kept by commits.

    Everything may be called from any thread.  See `tierstore.spi.DurableBackend` for what the caller
    owes; and `FilesBackend` for the arguments, for what blocks and for the errors of what both have.

    Raises:
        UsageError: another live backend owns the directory, or a later version of tierstore wrote it.
        CapacityError: what is kept there is more than the capacity.
        IntegrityError: the manifest is damaged; nothing was changed.
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
    ) -> None:
        if options.read_only:
            volume, manifest, recovered = reading_volume(
                capacity_bytes, options, syscalls, stride_bytes=stride_bytes
            )
            syscalls = ReadOnly(syscalls)
        else:
            volume, manifest, recovered = durable_volume(
                capacity_bytes, options, syscalls, segment_bytes=segment_bytes, stride_bytes=stride_bytes
            )
        try:
            files = FilesBackend(capacity_bytes, options, syscalls=syscalls, quiet_s=quiet_s, volume=volume)
        except BaseException:
            manifest.close()  # open only while the directory is owned
            volume.segments.close()
            volume.owner.release()
            raise
        for slot in recovered.slots:
            slot.home = files
        self._files = files
        self._capabilities = replace(files.capabilities, is_durable=True)
        self._lost = recovered.lost
        self._read_only_folder = volume.owner.folder if options.read_only else None
        self._commits = DirectoryCommits(volume.owner, manifest, volume.segments, recovered, files)
        self._recovered: RecoveredRecords | None = recovered
        # Above all for who gave no path, and keeps files in one that is relative to where the program began.
        _log.info(
            "a durable store is open in %s: %d keys were found there",
            ", ".join(map(str, options.folders)),
            len(recovered.rows),
        )
        self._ending = BackendLifetime(self, self._commits.disown, _shut, self._commits, files)

    @property
    def capabilities(self) -> Capabilities:
        """See `tierstore.spi.Backend`."""
        return self._capabilities

    @property
    def physical_bytes(self) -> int:
        """What the files take on disk now.  The manifest is not counted: it is no part of the capacity."""
        return self._files.physical_bytes

    @property
    def io_stats(self) -> IoStats:
        """What the engine has done so far.  From any thread, also after ``close``."""
        return self._files.io_stats

    def recovered(self) -> Sequence[Record]:
        """Return what was kept when the directory was opened.  Once.

        Reading a slot whose bytes are not there any more completes with ``IntegrityError``.

        Raises:
            UsageError: it was called before.
            StoreClosed: after ``close``.
        """
        self._check_open()
        recovered, self._recovered = self._recovered, None
        if recovered is None:
            raise UsageError("what was recovered was asked for before")
        return [
            Record(decode_text(name), decode_note(note), slot)
            for (_, _, name, note, _, _), slot in zip(recovered.rows, recovered.slots, strict=True)
        ]

    def commit(self, records: Sequence[Record], gone: Collection[str] | None = None) -> Completion:
        """Keep ``records``, and of what was kept before what has neither their names nor those in ``gone``.

        With ``gone=None`` nothing else is kept.  Completes when a power loss would leave them: with
        ``BackendError`` where a file or the manifest fails, ``UsageError`` where a name comes twice, or a
        slot holds no bytes or is not of these files.

        Raises:
            StoreClosed: after ``close``.
        """
        self._check_open()
        return self._commits.begin(records, gone)

    def reserve(self, nbytes: int) -> FileSlot:
        """Take addresses for ``nbytes``; touches no disk.  See `FilesBackend.reserve`.

        Raises:
            BackendError: besides, the directory was opened with ``read_only``.
        """
        self._check_open()
        if self._read_only_folder is not None:
            raise BackendError(
                f"{self._read_only_folder} was opened with read_only=True: nothing can be put there"
            )
        return self._files.reserve(nbytes)

    def read(self, slot: Slot, into: Buffer) -> Completion:
        """Fill ``into``.  See `FilesBackend.read`."""
        return self.read_many([slot], [into])

    def write(self, slot: Slot, source: Buffer) -> Completion:
        """Write ``source``.  See `FilesBackend.write`."""
        return self.write_many([slot], [source])

    def read_many(self, slots: Sequence[Slot], into: Sequence[Buffer]) -> Completion:
        """Fill each buffer.  See `FilesBackend.read_many`."""
        if self._lost and any(slot in self._lost for slot in slots):
            return self._read_what_is_there(slots, into)
        return self._files.read_many(slots, into)

    def read_parts(
        self, slots: Sequence[Slot], begins: Sequence[int], nbytes: int, into: Buffer
    ) -> Completion:
        """Fill ``into`` with parts.  See `FilesBackend.read_parts`.

        Completes, besides, with ``IntegrityError`` where bytes of a slot were lost: then no part was read.
        """
        lost = self._lost_of(slots)
        if not lost:
            return self._files.read_parts(slots, begins, nbytes, into)
        self._check_open()
        check_parts(slots, begins, nbytes, into, self._capabilities.alignment_bytes)
        return Completion.done(next(iter(lost.values())))

    def write_many(self, slots: Sequence[Slot], sources: Sequence[Buffer]) -> Completion:
        """Write each buffer.  See `FilesBackend.write_many`.

        Raises:
            UsageError: besides, the bytes of a slot were lost, and it may have no addresses.
        """
        for slot in slots if self._lost else ():
            if slot in self._lost:
                raise UsageError(f"{slot!r} was lost: free it, and write to another")
        return self._files.write_many(slots, sources)

    def accepts(self, memory: torch.Tensor) -> bool:
        """Say whether ``memory`` can be moved straight.  See `FilesBackend.accepts`."""
        # Whether it can is found out by writing.
        return self._read_only_folder is None and self._files.accepts(memory)

    def free(self, slot: Slot) -> Completion:
        """Give the slot's addresses to others.  See `FilesBackend.free`."""
        completion = self._files.free(slot)
        self._lost.pop(slot, None)  # type: ignore[call-overload]  # any slot is a key that may be there
        return completion

    def resize(self, capacity_bytes: int) -> None:
        """Hold at most ``capacity_bytes``.  See `FilesBackend.resize`."""
        self._files.resize(capacity_bytes)

    def close(self) -> None:
        """Finish what is under way and leave what was committed.  Idempotent; from any thread.

        Raises:
            UsageError: called from a completion's callback, which would wait for itself.
            BackendError: the directory could not be given up.
        """
        if self._commits.is_committer() or self._files.is_worker():
            raise UsageError("files cannot be closed from a completion's callback")
        self._ending.close()

    def _check_open(self) -> None:
        if self._ending.is_over:
            raise StoreClosed("the files were closed")

    def _lost_of(self, slots: Sequence[Slot]) -> dict[int, BaseException]:
        """Return why slots were lost, by their positions, for those that were."""
        if not self._lost:
            return {}
        return {
            i: self._lost[slot]
            for i, slot in enumerate(slots)
            if isinstance(slot, FileSlot) and slot in self._lost
        }

    def _read_what_is_there(self, slots: Sequence[Slot], into: Sequence[Buffer]) -> Completion:
        """Read a batch in which some slots are lost."""
        lost = self._lost_of(slots)
        if len(slots) == 1:
            return Completion.done(lost[0])
        there = [i for i in range(len(slots)) if i not in lost]
        if not there:
            return Completion.done(PartialError(lost))
        whole = Completion()
        part = self._files.read_many([slots[i] for i in there], [into[i] for i in there])
        part.add_done_callback(lambda error: whole.complete(_joined(lost, there, error)))
        return whole


def _joined(
    lost: Mapping[int, BaseException], there: Sequence[int], error: BaseException | None
) -> BaseException:
    """Return the error of a batch of which ``lost`` were not read and ``there`` ended with ``error``."""
    if error is None:
        return PartialError(lost)
    failed = error.errors if isinstance(error, PartialError) else dict.fromkeys(range(len(there)), error)
    return PartialError({**lost, **{there[i]: each for i, each in failed.items()}})


def _shut(commits: DirectoryCommits, files: FilesBackend) -> None:
    """End everything: commits first, for the manifest is open only while the directory is owned."""
    if commits.is_committer() or files.is_worker():  # the garbage collector came by there: it may have a lock
        threading.Thread(target=_shut, args=(commits, files), name="tierstore-files-end").start()
        return
    try:
        commits.close()
    finally:
        files.close()
