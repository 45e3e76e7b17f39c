"""Commits: what a directory keeps from now on, on disk before anybody is told so.

Rule 1: data before names.  Files in which a newly named slot lies are synced, then the directory, and
only then the manifest names the slot, in one transaction.
Rule 2: a commit writes what differs from the one before: by slot, for a slot that a commit named is
never written again (rule 11 of `tierstore.spi`).  It looks at nothing that it does not speak of.
Rule 3: after an error the next commit begins with what the manifest really holds, read again.
Rule 4: what a failed sync covered is in doubt: the kernel drops what it could not write, and says so only
once.  So it is read back, compared with its checksums and written again before it is named; without
checksums nobody can tell what is there, and commits that name it fail.
Rule 5: a commit counts only while the directory is still the one that is owned.

Works in a thread of its own.  Knows where slots are and nothing of how their bytes got there.
"""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tierstore.errors import BackendError, InvariantError, StoreClosed, TierStoreError, UsageError
from tierstore.spi import Completion, Record, Slot
from tierstore_backends.files.addressing.directory_locks import Right
from tierstore_backends.files.addressing.segments import Files
from tierstore_backends.files.backend import FilesBackend
from tierstore_backends.files.directory.shared_lock import SharedLock
from tierstore_backends.files.durability.claims import LONGEST_NAME_BYTES
from tierstore_backends.files.durability.manifest import Manifest
from tierstore_backends.files.durability.meta import Meta
from tierstore_backends.files.durability.record_codec import (
    RecordLocation,
    Row,
    Sums,
    decode_note,
    decode_text,
    encode,
    encode_text,
    row_check,
)
from tierstore_backends.files.durability.recovery import RecoveredRecords
from tierstore_backends.files.io.io_request import FileSlot, FileSlotState

_log = logging.getLogger("tierstore.files")

_Entry = tuple[FileSlot | None, str, int, int, int]
"""What the manifest has under a name: the slot, if we know it; the note; the row's id, version and check."""


class DirectoryCommits:
    """The commits of one directory.

    Args:
        owner: the right to the directory.
        manifest: open, and as the last commit left it.
        segments: the files.
        recovered: what the manifest has.
        files: what the slots belong to.
    """

    def __init__(
        self,
        owner: Right,
        manifest: Manifest,
        segments: Files,
        recovered: RecoveredRecords,
        files: FilesBackend,
    ) -> None:
        self._files = files
        self._owner = owner
        self._manifest = manifest
        self._segments = segments
        self._lost = recovered.lost
        self._thread: threading.Thread | None = None  # the last that began; one begins after the other
        self._committing = threading.Lock()  # held while a commit is under way; guards all below
        self._is_closed = False
        # What the manifest has, by name; and until it is first wanted, what that is made of.
        self._entries: dict[str, _Entry] | None = None
        self._found: tuple[Sequence[Row], Sequence[FileSlot] | None] = (recovered.rows, recovered.slots)

    def begin(self, records: Sequence[Record], gone: Collection[str] | None = None) -> Completion:
        """Change what the directory keeps.  See `tierstore.spi.DurableBackend`."""
        completion = Completion()
        thread = threading.Thread(
            target=self._run, args=(records, gone, completion), name="tierstore-files-commit", daemon=True
        )
        # Known before it runs: its callback may begin the next commit, or ask who commits.
        former, self._thread = self._thread, thread
        try:
            thread.start()
        except RuntimeError as error:
            if "interpreter shutdown" in str(
                error
            ):  # Python 3.12 and later: main has ended, this thread goes on
                self._thread = threading.current_thread()
                self._run(records, gone, completion)
                self._thread = former
                return completion
            self._thread = former  # the system has no more threads
            return Completion.done(BackendError(f"a commit could not begin: {error}", transient=True))
        return completion

    def is_committer(self) -> bool:
        """Whether the calling thread commits, and so runs completions' callbacks."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Let a commit that is under way come to its end; refuse others; close the manifest.  Idempotent."""
        with self._committing:
            self._is_closed = True
            self._manifest.close()
        if self._thread is not None and not self.is_committer():
            self._thread.join()

    def disown(self) -> None:
        """Forget everything in the child of a fork, where no thread commits."""
        self._committing = threading.Lock()
        self._is_closed = True
        self._manifest.disown()

    def _run(self, records: Sequence[Record], gone: Collection[str] | None, completion: Completion) -> None:
        error: TierStoreError | None = None
        try:
            with self._committing:
                self._commit(records, gone)
        except TierStoreError as known:
            error = known
        except Exception as unforeseen:  # noqa: BLE001 - handed to whoever waits, and logged
            _log.exception("a commit failed in an unforeseen way")
            error = InvariantError(f"a commit failed in an unforeseen way: {unforeseen!r}")
        completion.complete(error)

    def _commit(self, records: Sequence[Record], gone: Collection[str] | None) -> None:
        if self._is_closed:
            raise StoreClosed("the files were closed")
        is_read_only = isinstance(self._owner, SharedLock)
        if not self._manifest.is_open and not is_read_only:
            self._manifest, rows = self._manifest.reopen()
            self._entries, self._found = None, (rows, None)
        if self._entries is None:
            self._entries, self._found = _entries(*self._found), ((), None)
        change = _Change(self._entries, self._manifest.meta, self._files, self._lost)
        for record in records:
            change.keep(record)
        for name in change.others() if gone is None else gone:
            change.drop(name)
        self._check_names()  # also where nothing changes: what is promised must still be there
        if change.is_nothing:
            change.enter()  # slots whose rows were there
            self._note()
            return
        if is_read_only:
            raise BackendError(
                f"{self._owner.folder} was opened with read_only=True: "
                f"what was put, replaced or dropped since cannot be kept there"
            )
        self._remove_doubts(change.slots())
        self._sync(change.slots())
        self._manifest.commit(change.dropped, change.rows(), change.meta)
        change.enter()
        self._check_names()
        self._note()

    def _note(self) -> None:
        meta = self._manifest.meta
        self._owner.note_commit(meta.commit, meta.directory)

    def _check_names(self) -> None:
        """Look whether the directory and the files in it are still the ones that are owned."""
        self._owner.check()
        self._manifest.check()
        try:
            self._segments.check()
        except OSError as error:
            raise BackendError(
                f"a file of {self._owner.folder} is not there any more: {error}. "
                f"What is in faster tiers is unharmed: put it into another directory"
            ) from error

    def _remove_doubts(self, slots: Iterable[tuple[str, FileSlot]]) -> None:
        """Write again what a sync that failed may have lost."""
        if not self._segments.failed_syncs:
            return
        for name, slot in slots:
            if not self._segments.is_in_doubt(slot.extents, slot.failed_syncs):
                continue
            path = self._segments.path(slot.extents[0][0])
            if not slot.sums:
                raise BackendError(
                    f"{name!r} was in {path} when that could not be synced, and without checksums nobody "
                    f"can tell whether its bytes are still there: put it again",
                    key=name,
                )
            try:
                self._files.write_again(slot)
            except BackendError as error:
                raise BackendError(
                    f"{name!r} was in {path} when that could not be synced, "
                    f"and cannot be written again: {error}",
                    key=name,
                ) from error

    def _sync(self, slots: Iterable[tuple[str, FileSlot]]) -> None:
        """Return when the bytes of ``slots`` would survive a power loss."""
        segments = self._segments
        for index in sorted({index for _, slot in slots for index in segments.indices(slot.extents)}):
            try:
                segments.sync(index)
            except OSError as error:
                raise _explain(segments.path(index * segments.segment_bytes), error) from error
        try:
            segments.sync_names()
        except OSError as error:
            raise _explain(Path(error.filename), error) from error


class _Change:
    """What a commit writes: the difference between what is to be and what is.

    Rows are made while they are written: a hundred thousand at once would be most of what the process holds.

    Args:
        entries: what the manifest has, by name.
        meta: what it says of itself.
        home: what slots belong to.
        lost: slots whose bytes are not there any more.

    Attributes:
        dropped: the ids of rows that go.
    """

    def __init__(
        self, entries: dict[str, _Entry], meta: Meta, home: FilesBackend, lost: Container[FileSlot]
    ) -> None:
        self._entries = entries
        self._home = home
        self._lost = lost
        self._meta = meta
        self._version = meta.commit + 1
        self._next_id = meta.next_id
        self._digest = meta.digest
        self._records = len(entries)
        self._named: dict[str, _Entry | None] = {}  # None: its row is to be written
        self._written: list[Record] = []
        self._gone: dict[str, None] = {}
        self.dropped: list[int] = []

    @property
    def is_nothing(self) -> bool:
        """Whether the manifest has all of it already."""
        return not self._written and not self.dropped

    def keep(self, record: Record) -> None:
        """Let ``record`` be there afterwards.

        Raises:
            UsageError: another record has its name, or its slot holds no bytes.
        """
        name, note, slot = record.name, record.note, record.slot
        if name in self._named:
            raise UsageError(f"two records of a commit are named {name!r}")
        old = self._entries.get(name)
        if old is not None and old[0] is slot and old[1] == note:
            self._named[name] = old
            return
        place = self._place(name, slot)
        assert isinstance(slot, FileSlot)  # or it has no place
        texts = encode_text(name), encode_text(note)
        if len(texts[0]) > LONGEST_NAME_BYTES:
            raise UsageError(
                f"a name of {len(texts[0])} bytes cannot be kept, of at most {LONGEST_NAME_BYTES}: "
                f"drop or rename what is under {name[:60]!r}..."
            )
        if old is not None:
            _, _, id_, version, check = old
            if row_check(encode(id_, version, *texts, slot.nbytes, place)[5]) == check:
                self._named[name] = (slot, note, id_, version, check)
                return
        self._named[name] = None
        self._written.append(record)

    def others(self) -> list[str]:
        """Return the names that no record has."""
        return [name for name in self._entries if name not in self._named]

    def drop(self, name: str) -> None:
        """Let nothing be there afterwards under a name.

        Raises:
            UsageError: a record has it.
        """
        if name in self._named:
            raise UsageError(f"a commit both keeps {name!r} and says that it is gone")
        old = self._entries.get(name)
        if old is not None and name not in self._gone:
            _, _, id_, _, check = old
            self._gone[name] = None
            self._records -= 1
            self.dropped.append(id_)
            self._digest -= check

    def slots(self) -> Iterator[tuple[str, FileSlot]]:
        """Yield the names and slots of the rows that come, of those whose bytes are there."""
        for record in self._written:
            if record.slot not in self._lost:
                assert isinstance(record.slot, FileSlot)  # see `keep`
                yield record.name, record.slot

    def rows(self) -> Iterator[Row]:
        """Yield the rows that come, in place of others with their ids or beside them.  Once."""
        for record in self._written:
            name, note, slot = record.name, record.note, record.slot
            assert isinstance(slot, FileSlot)  # see `keep`
            old = self._entries.get(name)
            if old is None:
                id_, self._next_id = self._next_id, self._next_id + 1
                self._records += 1
            else:
                _, _, id_, _, check = old
                self._digest -= check
            texts = encode_text(name), encode_text(note)
            row = encode(id_, self._version, *texts, slot.nbytes, self._place(name, slot))
            check = row_check(row[5])
            self._digest += check
            self._named[name] = (slot, note, id_, self._version, check)
            yield row

    def meta(self) -> Meta:
        """Return what the manifest says of itself afterwards.  Once all rows were made."""
        return replace(
            self._meta,
            commit=self._version,
            records=self._records,
            digest=self._digest % 2**64,
            next_id=self._next_id,
        )

    def enter(self) -> None:
        """Take it in: the manifest has it now."""
        for name, entry in self._named.items():
            assert entry is not None, "its row was written"
            self._entries[name] = entry
        for name in self._gone:
            del self._entries[name]

    def _place(self, name: str, slot: Slot) -> RecordLocation:
        if not isinstance(slot, FileSlot) or slot.home is not self._home:
            raise UsageError(f"{slot!r} of {name!r} is no slot of these files")
        if slot in self._lost:
            return RecordLocation(tuple(slot.extents), slot.sums, Sums.LOST, slot.block_bytes)
        if slot.nbytes and slot.state is not FileSlotState.WRITTEN:
            raise UsageError(f"{slot!r} of {name!r} holds no bytes: no write to it succeeded")
        kind = Sums.KEPT if slot.sums else Sums.NONE
        return RecordLocation(tuple(slot.extents), slot.sums, kind, slot.block_bytes)


def _entries(rows: Sequence[Row], slots: Sequence[FileSlot] | None = None) -> dict[str, _Entry]:
    known: Iterable[FileSlot | None] = slots if slots is not None else itertools.repeat(None)
    return {
        decode_text(name): (slot, decode_note(note), id_, version, row_check(place))
        for (id_, version, name, note, _, place), slot in zip(rows, known, strict=False)
    }


def _explain(path: Path, cause: OSError) -> BackendError:
    code = cause.errno or 0
    return BackendError(
        f"what was written to {path} could not be made durable: "
        f"{errno.errorcode.get(code, code)} ({cause.strerror or cause})"
    )
