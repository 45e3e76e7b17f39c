"""How one batch moves: vectors, bounce memory, short transfers, checksums, errors with names.

A BatchIo says, step by step, what the kernel is to be asked, and is told what came of it; who asks, and
what else is done meanwhile, is the engine's affair.  The aligned body of a buffer goes straight between
the caller's memory and the file; what does not fill an alignment unit, and buffers at addresses the disk
cannot use, go through bounce memory.  A BatchIo and its memory belong to one thread at a time.

Rule 1: the outcome of every call is looked at.  A short transfer is continued from the last aligned byte;
``EINTR`` is tried again, ``EAGAIN`` a few times; the end of a file inside a slot is an error.
Rule 2: a batch that fails is tried again fragment by fragment, so that only the guilty fragment fails.
Rule 3: where the disk is full, what is free in the files is given back before the write is tried again;
one that fails for good leaves no blocks behind, unless it was to write again what is there already.
Rule 4: an error's cause keeps no frame alive, since frames refer to the caller's buffer.
Rule 5: who waits for bounce memory holds none.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import numpy
import xxhash

from tierstore.errors import TRANSIENT_ERRNOS, BackendError, IntegrityError
from tierstore.units import KIB
from tierstore_backends.files.addressing.segments import Files
from tierstore_backends.files.engines.gpu import GpuFiles
from tierstore_backends.files.extents import Extent
from tierstore_backends.files.io.bounce import Bounce
from tierstore_backends.files.io.io_request import Direction, FileSlotState, Fragment, PartsRun, Piece
from tierstore_backends.files.io.io_stats import IoCounts
from tierstore_backends.files.io.syscalls import KernelCall, Syscalls

_AGAIN = frozenset({errno.EAGAIN, errno.EINTR})
_BOUNCE_MAY_HELP = frozenset({errno.EINVAL, errno.EFAULT})  # the disk cannot use the caller's memory
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_CALLS_WITHOUT_PROGRESS = 3
_COPIED_AT_LEISURE = 64 * KIB  # below, a copy is over before anybody could use the lock
# Above this, xxhash gives the interpreter's lock away while it sums, and beside a busy thread gets it back
# milliseconds later: 1 MiB at a time, writing fell from 1.5 to 0.5 GB/s.  A block is summed in 0.15 ms.
_HASHED_AT_ONCE = 64 * KIB

Outcome = int | OSError
"""What came of a call: how many bytes moved, or the error."""

Steps = Generator[KernelCall | None, Outcome, None]
"""A batch on its way: yields what the kernel is to be asked, and is sent what came of it.

``None`` asks for nothing: there is no bounce memory, and it goes on, sent 0, after another batch of the
same BatchIo has come to its end.  Never where a BatchIo moves one batch at a time.
"""

_Failed = Generator[KernelCall | None, Outcome, OSError | None]


class BatchIo:
    """What one thread needs to move batches.

    Args:
        segments: where addresses are.
        give_back: gives blocks that nobody uses back to the file system.
        bounce: at least as much memory as the longest batch.
        alignment_bytes: what offsets and lengths in files are multiples of.
        memory_alignment_bytes: what addresses in memory are.
        is_checked: whether bytes are summed and compared.
        is_joining: whether what moves together is joined in bounce memory, for an engine to which every
            part of a vector is a call.
        gpu: moves what is a GPU's, in the calling thread; only where no checksums are kept.
    """

    def __init__(
        self,
        segments: Files,
        give_back: Callable[[], None],
        bounce: Bounce,
        *,
        alignment_bytes: int,
        memory_alignment_bytes: int,
        is_checked: bool,
        is_joining: bool = False,
        gpu: GpuFiles | None = None,
    ) -> None:
        self._segments = segments
        self._give_back = give_back
        self._bounce = bounce
        self._alignment_bytes = alignment_bytes
        self._memory_alignment_bytes = memory_alignment_bytes
        self._is_checked = is_checked
        self._is_joining = is_joining
        self._gpu = gpu
        self.counts = IoCounts()

    def steps(self, batch: Sequence[Fragment]) -> Steps:
        """Move fragments that are neighbours in a file, all in one direction; note errors at them."""
        if isinstance(batch[0], PartsRun):  # always alone
            yield from self._move_run(batch[0])
            return
        yield from self._move_fragments(batch)

    def _move_fragments(self, batch: Sequence[Fragment]) -> Steps:
        counts = self.counts
        counts.fragments += len(batch)
        if self._gpu is not None and any(fragment.transfer.ready for fragment in batch):
            yield from self._move_mixed(batch, self._gpu)
            return
        views = [fragment.view() for fragment in batch]
        is_write = batch[0].transfer.direction is Direction.WRITE
        if is_write and self._is_checked:
            self._sum(batch, views)
        is_done = False
        if len(batch) > 1:
            counts.merged_batches += 1
            is_done = (yield from self._attempt(batch, views, is_bounced=self._is_joining)) is None
            counts.retries += not is_done
        if not is_done:
            for fragment, view in zip(batch, views, strict=True):
                yield from self._move_alone(fragment, view)
        if not is_write:
            self._verify(batch, views)

    def _move_run(self, run: PartsRun) -> Steps:
        """Read the parts of a run, a call for each piece; what is not simple goes the way of fragments."""
        buffer, nbytes = run.buffer, run.nbytes
        whole = memoryview(buffer.numpy())  # type: ignore[arg-type]  # 3.11's stubs know no Buffer
        is_straight = not (buffer.data_ptr() % self._memory_alignment_bytes or nbytes % self._alignment_bytes)
        is_straight = is_straight and not nbytes % self._memory_alignment_bytes
        done_bytes = calls = 0
        began_s = time.perf_counter()
        for piece in run.pieces:
            positions = piece.positions
            wanted = len(positions) * nbytes
            if not is_straight or (self._is_joining and len(positions) > 1):
                yield from self._move_piece(run, piece)
                continue
            vector = [whole[position * nbytes : position * nbytes + nbytes] for position in positions]
            try:
                fd, offset = self._segments.locate(piece.address, piece.address + wanted)
            except OSError as error:
                outcome: Outcome = error.with_traceback(None)  # rule 4
            else:
                outcome = yield KernelCall(Direction.READ, fd, piece.address, vector, offset)
            calls += 1
            if outcome == wanted:
                done_bytes += wanted
            else:
                self.counts.short_transfers += not isinstance(outcome, OSError)
                yield from self._go_on_with_piece(run, piece, outcome)
        counts = self.counts
        counts.call_seconds += time.perf_counter() - began_s
        counts.fragments += done_bytes // nbytes
        counts.merged_batches += sum(len(piece.positions) > 1 for piece in run.pieces)
        counts.read_calls += calls
        counts.read_bytes += done_bytes
        counts.unchecked_bytes += done_bytes

    def _go_on_with_piece(self, run: PartsRun, piece: Piece, outcome: Outcome) -> Steps:
        """Take in that a call has not read all of a piece."""
        hopeless = isinstance(outcome, OSError) and outcome.errno not in _AGAIN | _BOUNCE_MAY_HELP
        if hopeless and len(piece.positions) == 1:
            assert isinstance(outcome, OSError)
            (fragment,) = run.fragments_of(piece)
            run.failed[fragment.part] = self._explain(fragment, outcome)
            self.counts.fragments += 1
            return
        self.counts.retries += isinstance(outcome, OSError)
        yield from self._move_piece(run, piece)

    def _move_piece(self, run: PartsRun, piece: Piece) -> Steps:
        """Move a piece of a run as fragments."""
        fragments = run.fragments_of(piece)
        yield from self._move_fragments(fragments)
        for fragment in fragments:
            if fragment.error is not None:
                run.failed[fragment.part] = fragment.error

    def _move_mixed(self, batch: Sequence[Fragment], gpu: GpuFiles) -> Steps:
        """Move fragments of which some are a GPU's: each alone, without checksums."""
        for fragment in batch:
            if fragment.transfer.ready is None:
                yield from self._move_alone(fragment, fragment.view())
            else:
                fragment.transfer.ready()
                gpu.move(fragment)
            if fragment.transfer.direction is Direction.READ and fragment.error is None:
                self.counts.unchecked_bytes += fragment.stop - fragment.start

    def _move_alone(self, fragment: Fragment, view: memoryview) -> Steps:
        error = yield from self._attempt([fragment], [view], is_bounced=False)
        if error is not None and error.errno in _BOUNCE_MAY_HELP:
            self.counts.retries += 1
            error = yield from self._attempt([fragment], [view], is_bounced=True)
        if error is not None and error.errno in _FULL:
            self.counts.retries += 1
            error = yield from self._try_with_more_room(fragment, view, error)
        if error is not None:
            fragment.error = self._explain(fragment, error)

    def _try_with_more_room(self, fragment: Fragment, view: memoryview, full: OSError) -> _Failed:
        try:
            self._give_back()
            failure = yield from self._attempt([fragment], [view], is_bounced=False)
            slot = fragment.transfer.slots[fragment.part]
            if (
                failure is not None and slot.state is FileSlotState.RESERVED
            ):  # not one that is only written again
                self._segments.punch(fragment.address, fragment.end)  # what was written of it
        except OSError:
            return full
        return failure

    def _attempt(
        self, batch: Sequence[Fragment], views: Sequence[memoryview], *, is_bounced: bool
    ) -> _Failed:
        """Move the batch, all of it, or return why not."""
        bodies = [0 if is_bounced else self._straight_bytes(fragment) for fragment in batch]
        own_bytes = batch[-1].end - batch[0].address - sum(bodies)
        lent: Extent | None = None
        while own_bytes and (lent := self._bounce.take(own_bytes)) is None:
            yield None
        try:
            return (yield from self._transfer(batch, views, bodies, lent))
        finally:
            if lent is not None:
                self._bounce.give(lent)

    def _straight_bytes(self, fragment: Fragment) -> int:
        """Return how many bytes of a fragment the disk can move where they are."""
        if (fragment.buffer.data_ptr() + fragment.start) % self._memory_alignment_bytes:
            return 0
        nbytes = fragment.stop - fragment.start
        return nbytes - nbytes % self._alignment_bytes

    def _transfer(
        self,
        batch: Sequence[Fragment],
        views: Sequence[memoryview],
        bodies: Sequence[int],
        lent: Extent | None,
    ) -> _Failed:
        direction = batch[0].transfer.direction
        vector, bounced = self._vector(batch, views, bodies, lent)
        if direction is Direction.WRITE:
            for theirs, own in bounced:
                _copy(theirs, own[: len(theirs)])
                own[len(theirs) :] = bytes(len(own) - len(theirs))
        start, end = batch[0].address, batch[-1].end
        try:
            fd, offset = self._segments.locate(start, end)
        except OSError as error:
            return error.with_traceback(None)  # rule 4
        failure = yield from self._exhaust(KernelCall(direction, fd, start, vector, offset), end - start)
        if failure is None and direction is Direction.READ:
            for theirs, own in bounced:
                _copy(own[: len(theirs)], theirs)
        return failure

    def _vector(
        self,
        batch: Sequence[Fragment],
        views: Sequence[memoryview],
        bodies: Sequence[int],
        lent: Extent | None,
    ) -> tuple[list[memoryview], list[tuple[memoryview, memoryview]]]:
        """Return what the kernel is given, and the pairs (caller's memory, own memory) that bounce."""
        vector: list[memoryview] = []
        bounced: list[tuple[memoryview, memoryview]] = []
        used = 0 if lent is None else lent[0]
        for fragment, theirs, body in zip(batch, views, bodies, strict=True):
            if body:
                vector.append(theirs if body == len(theirs) else theirs[:body])
            room = fragment.end - fragment.address - body
            if room:
                own = self._bounce.view((used, used + room))
                used += room
                vector.append(own)
                bounced.append((theirs[body:], own))
                self.counts.bounced_bytes += len(theirs) - body
        return vector, bounced

    def _exhaust(self, whole: KernelCall, nbytes: int) -> _Failed:
        """Have all of a call's bytes moved, or return why not."""
        done = 0
        futile_calls = 0
        while True:
            rest = whole if not done else _after(whole, done)
            outcome = yield from self._ask(rest)
            if isinstance(outcome, OSError):
                futile_calls += outcome.errno != errno.EINTR
                if outcome.errno not in _AGAIN or futile_calls == _CALLS_WITHOUT_PROGRESS:
                    return outcome
                self.counts.retries += 1
                continue
            if outcome == nbytes - done:
                return None
            self.counts.short_transfers += 1
            # A call may end anywhere, but the next must begin aligned: some bytes move twice.
            progress = outcome - outcome % self._alignment_bytes
            futile_calls = 0 if progress else futile_calls + 1
            if futile_calls == _CALLS_WITHOUT_PROGRESS:
                return OSError(errno.EIO, f"{done + outcome} of {nbytes} bytes, and then no more")
            done += progress

    def _ask(self, call: KernelCall) -> Generator[KernelCall | None, Outcome, Outcome]:
        began_s = time.perf_counter()
        outcome = yield call
        counts = self.counts
        counts.call_seconds += time.perf_counter() - began_s
        nbytes = 0 if isinstance(outcome, OSError) else outcome
        if call.direction is Direction.WRITE:
            counts.write_calls += 1
            counts.written_bytes += nbytes
        else:
            counts.read_calls += 1
            counts.read_bytes += nbytes
        return outcome

    def _sum(self, batch: Sequence[Fragment], views: Sequence[memoryview]) -> None:
        began_s = time.perf_counter()
        for fragment, view in zip(batch, views, strict=True):
            fragment.sum = _digest(view)
        self.counts.checksum_seconds += time.perf_counter() - began_s

    def _verify(self, batch: Sequence[Fragment], views: Sequence[memoryview]) -> None:
        began_s = time.perf_counter()
        for fragment, view in zip(batch, views, strict=True):
            if fragment.error is not None:
                continue
            transfer = fragment.transfer
            sums = transfer.slots[fragment.part].sums if transfer.is_whole else ()
            if not sums or not self._is_checked:
                self.counts.unchecked_bytes += len(view)
            elif (found := _digest(view)) != sums[fragment.index]:
                fragment.error = self._other_bytes(fragment, found, sums[fragment.index])
        if self._is_checked:
            self.counts.checksum_seconds += time.perf_counter() - began_s

    def _other_bytes(self, fragment: Fragment, found: int, expected: int) -> IntegrityError:
        return IntegrityError(
            f"{fragment.stop - fragment.start} bytes at {self._where(fragment)} are not what was written: "
            f"xxh3_64 is {found:016x}, was {expected:016x}. The disk or its path corrupts data"
        )

    def _explain(self, fragment: Fragment, cause: OSError) -> BackendError:
        verb = "writing" if fragment.transfer.direction is Direction.WRITE else "reading"
        code = cause.errno or 0
        error = BackendError(
            f"{verb} {fragment.stop - fragment.start} bytes at {self._where(fragment)} failed: "
            f"{errno.errorcode.get(code, code)} ({cause.strerror or cause})",
            transient=code in TRANSIENT_ERRNOS,
        )
        error.__cause__ = cause
        return error

    def _where(self, fragment: Fragment) -> str:
        return self._segments.where(fragment.address)


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


def _after(call: KernelCall, nbytes: int) -> KernelCall:
    """Return ``call`` without its first ``nbytes``."""
    rest: list[memoryview] = []
    skipped = nbytes
    for view in call.vector:
        if skipped < len(view):
            rest.append(view[skipped:])
        skipped = max(0, skipped - len(view))
    return replace(call, vector=rest, offset=call.offset + nbytes)


def carry_out(steps: Steps, syscalls: Syscalls) -> None:
    """Ask the kernel for each step, in the calling thread."""
    outcome: Outcome | None = None
    while True:
        try:
            call = steps.send(outcome)  # type: ignore[arg-type]  # the first is None, as Python demands
        except StopIteration:
            return
        assert call is not None  # one batch at a time
        outcome = perform(call, syscalls)


def perform(call: KernelCall, syscalls: Syscalls) -> Outcome:
    """Ask the kernel once, in the calling thread."""
    ask = syscalls.write if call.direction is Direction.WRITE else syscalls.read
    try:
        return ask(call.fd, call.vector, call.offset)
    except OSError as error:
        return error.with_traceback(None)  # rule 4
