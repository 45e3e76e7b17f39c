"""How one batch moves: vectors, bounce memory, short transfers, checksums, errors with names.

A lane belongs to one thread at a time.  It brings memory that is aligned, once and for all: fresh
pages cost more than the copy.  The aligned body of a buffer goes straight between the caller's
memory and the file; what does not fill an alignment unit, and buffers at addresses the disk
cannot use, go through the lane's memory.

Rule 1: the result of every call is looked at.  A short transfer is continued from the last aligned byte;
``EINTR`` is tried again; the end of a file inside a slot is an error.
Rule 2: a batch that fails is tried again piece by piece, so that only the guilty piece fails.
Rule 3: where the disk is full, what is free in the files is given back before the write is tried again;
one that fails for good leaves no blocks behind.
Rule 4: an error's cause keeps no frame alive, since frames refer to the caller's buffer.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Sequence

import numpy
import xxhash

from tierstore.errors import BackendError, IntegrityError
from tierstore.units import KIB, MIB, align_up
from tierstore_backends.files.segments import Segments
from tierstore_backends.files.syscalls import Syscalls
from tierstore_backends.files.transfer import Direction, Piece

_TRANSIENT = frozenset({errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ETIMEDOUT})
_BOUNCE_MAY_HELP = frozenset({errno.EINVAL, errno.EFAULT})  # the disk cannot use the caller's memory
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_CALLS_WITHOUT_PROGRESS = 3
_COPIED_AT_LEISURE = 64 * KIB  # below, a copy is over before anybody could use the lock
_HASHED_AT_ONCE = MIB  # a hash holds the interpreter's lock: let others have it in between


class Lane:
    """What one thread needs to move batches.

    Args:
        segments: where addresses are.
        give_back: gives blocks that nobody uses back to the file system.
        syscalls: the way to the kernel.
        alignment_bytes: what offsets and lengths in files are multiples of.
        memory_alignment_bytes: what addresses in memory are.
        block_bytes: the most bytes of a batch.
        is_checked: whether bytes are summed and compared.
    """

    def __init__(
        self,
        segments: Segments,
        give_back: Callable[[], None],
        syscalls: Syscalls,
        *,
        alignment_bytes: int,
        memory_alignment_bytes: int,
        block_bytes: int,
        is_checked: bool,
    ) -> None:
        self._segments = segments
        self._give_back = give_back
        self._syscalls = syscalls
        self._alignment_bytes = alignment_bytes
        self._memory_alignment_bytes = memory_alignment_bytes
        self._is_checked = is_checked
        # Pages are real only once they are used: a lane that never bounces costs nothing.
        self._bounce = memoryview(mmap.mmap(-1, align_up(block_bytes, mmap.PAGESIZE)))

    def move(self, batch: Sequence[Piece]) -> None:
        """Move pieces that are neighbours in a file, all in one direction; note errors at them."""
        views = [piece.view() for piece in batch]
        is_write = batch[0].transfer.direction is Direction.WRITE
        if is_write and self._is_checked:
            for piece, view in zip(batch, views, strict=True):
                piece.sum = _digest(view)
        if len(batch) == 1 or self._attempt(batch, views, is_bounced=False) is not None:
            for piece, view in zip(batch, views, strict=True):
                self._move_alone(piece, view)
        if not is_write and self._is_checked:
            for piece, view in zip(batch, views, strict=True):
                if piece.error is None:
                    self._verify(piece, view)

    def _move_alone(self, piece: Piece, view: memoryview) -> None:
        error = self._attempt([piece], [view], is_bounced=False)
        if error is not None and error.errno in _BOUNCE_MAY_HELP:
            error = self._attempt([piece], [view], is_bounced=True)
        if error is not None and error.errno in _FULL:
            error = self._try_with_more_room(piece, view, error)
        if error is not None:
            piece.error = self._explain(piece, error)

    def _try_with_more_room(self, piece: Piece, view: memoryview, full: OSError) -> OSError | None:
        try:
            self._give_back()
            error = self._attempt([piece], [view], is_bounced=False)
            if error is not None:
                self._segments.punch(piece.address, piece.end)  # what was written of it
        except OSError:
            return full
        return error

    def _attempt(
        self, batch: Sequence[Piece], views: Sequence[memoryview], *, is_bounced: bool
    ) -> OSError | None:
        """Move the batch, all of it, or return why not."""
        try:
            self._transfer(batch, views, is_bounced=is_bounced)
        except OSError as error:
            return error.with_traceback(None)  # rule 4
        return None

    def _transfer(self, batch: Sequence[Piece], views: Sequence[memoryview], *, is_bounced: bool) -> None:
        is_write = batch[0].transfer.direction is Direction.WRITE
        vector, bounced = self._vector(batch, views, is_bounced=is_bounced)
        if is_write:
            for lent, own in bounced:
                _copy(lent, own[: len(lent)])
                own[len(lent) :] = bytes(len(own) - len(lent))
        start, end = batch[0].address, batch[-1].end
        fd, offset = self._segments.locate(start, end)
        call = self._syscalls.write if is_write else self._syscalls.read
        self._exhaust(call, fd, vector, offset, end - start)
        if not is_write:
            for lent, own in bounced:
                _copy(own[: len(lent)], lent)

    def _vector(
        self, batch: Sequence[Piece], views: Sequence[memoryview], *, is_bounced: bool
    ) -> tuple[list[memoryview], list[tuple[memoryview, memoryview]]]:
        """Return what the kernel is given, and the pairs (lent memory, own memory) that bounce."""
        vector: list[memoryview] = []
        bounced: list[tuple[memoryview, memoryview]] = []
        used = 0
        for piece, lent in zip(batch, views, strict=True):
            body = 0 if is_bounced or not self._is_usable(piece) else len(lent)
            body -= body % self._alignment_bytes
            if body:
                vector.append(lent if body == len(lent) else lent[:body])
            room = piece.end - piece.address - body
            if room:
                own = self._bounce[used : used + room]
                used += room
                vector.append(own)
                bounced.append((lent[body:], own))
        return vector, bounced

    def _is_usable(self, piece: Piece) -> bool:
        """Whether the disk can reach the caller's memory where it is."""
        return not (piece.buffer.data_ptr() + piece.start) % self._memory_alignment_bytes

    def _exhaust(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        fd: int,
        vector: list[memoryview],
        offset: int,
        nbytes: int,
    ) -> None:
        done = 0
        futile_calls = 0
        while done < nbytes:
            try:
                moved = call(fd, _after(vector, done) if done else vector, offset + done)
            except InterruptedError:
                continue
            if moved == nbytes - done:
                return
            # A call may end anywhere, but the next must begin aligned: some bytes move twice.
            progress = moved - moved % self._alignment_bytes
            futile_calls = 0 if progress else futile_calls + 1
            if futile_calls == _CALLS_WITHOUT_PROGRESS:
                raise OSError(errno.EIO, f"{done + moved} of {nbytes} bytes, and then no more")
            done += progress

    def _verify(self, piece: Piece, view: memoryview) -> None:
        expected = piece.transfer.slots[piece.part].sums[piece.index]
        found = _digest(view)
        if found != expected:
            piece.error = IntegrityError(
                f"{piece.stop - piece.start} bytes at {self._where(piece)} are not what was written: "
                f"xxh3_64 is {found:016x}, was {expected:016x}. The disk or its path corrupts data"
            )

    def _explain(self, piece: Piece, cause: OSError) -> BackendError:
        verb = "writing" if piece.transfer.direction is Direction.WRITE else "reading"
        code = cause.errno or 0
        error = BackendError(
            f"{verb} {piece.stop - piece.start} bytes at {self._where(piece)} failed: "
            f"{errno.errorcode.get(code, code)} ({cause.strerror or cause})",
            transient=code in _TRANSIENT,
        )
        error.__cause__ = cause
        return error

    def _where(self, piece: Piece) -> str:
        offset = piece.address % self._segments.segment_bytes
        return f"offset {offset} of {self._segments.path(piece.address)}"


def _digest(data: memoryview) -> int:
    if len(data) <= _HASHED_AT_ONCE:
        return xxhash.xxh3_64_intdigest(data)
    running = xxhash.xxh3_64()
    for start in range(0, len(data), _HASHED_AT_ONCE):
        running.update(data[start : start + _HASHED_AT_ONCE])
    return running.intdigest()


def _copy(source: memoryview, into: memoryview) -> None:
    if len(source) < _COPIED_AT_LEISURE:
        into[:] = source
    else:  # numpy lets go of the interpreter's lock
        numpy.copyto(numpy.frombuffer(into, numpy.uint8), numpy.frombuffer(source, numpy.uint8))


def _after(vector: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return ``vector`` without its first ``nbytes``."""
    rest: list[memoryview] = []
    for view in vector:
        if nbytes < len(view):
            rest.append(view[nbytes:])
        nbytes = max(0, nbytes - len(view))
    return rest
