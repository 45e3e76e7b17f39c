"""What a backend is: the seam between the engine and the media that hold bytes.

A backend holds bytes in *slots* and moves them; it knows nothing of keys, tiers or policies.
Host memory is the common currency: ``read`` copies a slot into a host buffer and ``write`` copies
a host buffer into a slot.  A *buffer* is a one-dimensional, contiguous ``torch.uint8`` tensor in
host memory.

The engine guarantees:

1. ``reserve`` is never asked to hold more than the tier's capacity in *charged* bytes:
   ``align_up(nbytes, capabilities.alignment_bytes)`` summed over the slots not yet freed.
2. A slot is written by at most one ``write`` at a time, and not while it is read.
3. A slot is freed once, after every ``read`` and ``write`` on it has completed and every lease on it
   was released; and again only after a ``free`` that failed with a ``transient`` error.
4. ``close`` is called after every slot was freed or while nothing is in flight, and again where it was
   interrupted.
5. A buffer stays alive, and nobody else writes it, between the call and its completion.
   It has exactly ``slot.nbytes`` bytes.

A backend owes:

6. Every member may be called from any thread, and none but ``close`` and ``resize`` blocks on the medium.
   (A copy between two places in host memory may be done before the call returns.)
7. Every completion completes exactly once, with an error or without, whatever happens.
8. After a completion without error the bytes are there: a later ``read`` returns what ``write``
   was given, or completes with ``IntegrityError``.
9. A failed ``write`` or ``read`` leaves every other slot as it was.
10. Bytes of a slot are given back to the medium before its ``free`` completes, and not earlier.  One that
    fails with a ``transient`` error has given back nothing, and may be asked for again.

What a backend can do besides, its `Capabilities` say; nobody finds it out in another way.  For what they do
not say, it may have the members or not.

A backend to which one call with many small slots costs less than many calls may be a `BatchBackend`
(``has_batches``); all of the above then holds for each slot of a batch.

A backend whose medium survives the process may be a `DurableBackend` (``is_durable``).  For it the engine
guarantees besides:

11. A slot that the last commit named, or one after it that failed, is neither written nor freed
    until a later commit that does not name it has completed without error.
12. There is one commit at a time, and each slot that it names was written, whole, before.  After one that
    failed, the next one says again what is to be under every name that it spoke of.
13. What was recovered is charged ``held_bytes(slot)``, as if it had been reserved and written here.

and the backend owes:

14. After a commit completed without error, a power loss leaves exactly what it was to leave.  If it fails,
    or the process dies in it, what is found later is exactly that, or exactly what the one before
    left: nothing between, and nothing else.
15. ``close`` keeps what the last commit left, as it would be found after a power loss.
16. A commit that says what is gone costs what it speaks of, and not what there is.

A slot may take less of the medium than was asked for, once it is written (``has_shrinking_slots``): see
`held_bytes`.

A backend that reads parts of slots may be a `PartBackend` (``has_parts``).

A backend that reaches a device's memory may be a `DirectBackend` (``has_direct_paths``), one whose memory is
the program's own an `AdoptingBackend` (``adopts``), one that tells of itself a `CountingBackend`, and one in
which operations wait for more than the medium a `WaitingBackend` (``has_waits``).
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, cast, runtime_checkable

import torch

from tierstore import forks
from tierstore.errors import BackendError
from tierstore.units import align_up

_log = logging.getLogger("tierstore")

Buffer = torch.Tensor
"""A one-dimensional contiguous ``torch.uint8`` tensor in host memory."""

DoneCallback = Callable[[BaseException | None], None]


class Medium(enum.Enum):
    """What a backend's slots are made of, and so who can touch their bytes."""

    HOST = enum.auto()  # host memory: ``slot.memory`` is a buffer that every backend can move
    DEVICE = enum.auto()  # an accelerator's memory: ``slot.memory`` is a tensor that it computes on
    STORAGE = enum.auto()  # behind I/O: bytes are reached by ``read`` and ``write`` only


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do.  Constant for its lifetime.

    Attributes:
        medium: who can touch the bytes.
        is_durable: whether written bytes survive the process and a power loss.
        alignment_bytes: slots take a multiple of this many bytes of the medium.
        depth: how many reads and writes at a time keep the medium busy.
        device: where the ``memory`` of addressable slots lives.
        has_batches: whether it is a `BatchBackend`.
        has_parts: whether it is a `PartBackend`.
        has_direct_paths: whether it is a `DirectBackend`.
        adopts: whether it is an `AdoptingBackend`.
        has_shrinking_slots: whether its slots are `ShrinkingSlot`.
        has_reserved_bytes: whether it says what it keeps, as a `CountingBackend`.
        has_io_stats: whether it says what it did, as a `CountingBackend`.
        has_waits: whether it is a `WaitingBackend`.
    """

    medium: Medium
    is_durable: bool = False
    alignment_bytes: int = 1
    depth: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    has_batches: bool = False
    has_parts: bool = False
    has_direct_paths: bool = False
    adopts: bool = False
    has_shrinking_slots: bool = False
    has_reserved_bytes: bool = False
    has_io_stats: bool = False
    has_waits: bool = False


class Completion:
    """The end of one operation, now or later.  Thread-safe; completes once.

    ``is_stream_ordered`` marks an operation whose *destination* may be used at once by work that
    is queued on the device afterwards (``Slot.acquire`` orders it), although the operation has not
    yet been observed to end; its *source* is busy until the completion is done.
    """

    __slots__ = ("_callbacks", "_error", "_is_done", "_lock", "is_stream_ordered")

    def __init__(self, *, is_stream_ordered: bool = False) -> None:
        self._lock = threading.Lock()
        self._is_done = False  # guarded by _lock, as are the next two
        self._error: BaseException | None = None
        self._callbacks: list[DoneCallback] | None = None
        self.is_stream_ordered = is_stream_ordered

    @property
    def is_done(self) -> bool:
        """Whether the operation has ended."""
        return self._is_done

    @property
    def error(self) -> BaseException | None:
        """What went wrong, once done; ``None`` if nothing did."""
        return self._error

    def complete(self, error: BaseException | None = None) -> None:
        """End the operation and run the callbacks in this thread.  For backends.

        A callback that raises is logged: it must cost neither the callbacks after it nor the
        backend's thread.  If this is interrupted, as by ``KeyboardInterrupt``, it goes on to its end, and
        lets the interrupt through then; a callback in which it came is not called again.

        Raises:
            RuntimeError: it was completed before.
        """
        is_first = False
        interrupt: BaseException | None = None
        while True:
            try:
                if not is_first:
                    with self._lock:
                        if self._is_done:
                            raise RuntimeError("completed twice")  # noqa: TRY301 - under the lock
                        self._error = error
                        self._is_done = is_first = True
                self._call_back(error)
                break
            except Exception:
                raise
            except BaseException as caught:  # noqa: BLE001 - raised when the callbacks have run
                interrupt = caught
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt  # its traceback refers to this frame: no cycle

    def _call_back(self, error: BaseException | None) -> None:
        callbacks = self._callbacks  # nobody adds to them any more
        while callbacks:
            callback = callbacks[0]
            del callbacks[0]
            try:
                callback(error)
            except Exception:  # noqa: BLE001 - logged
                _log.exception("a completion's callback failed")

    def add_done_callback(self, callback: DoneCallback) -> None:
        """Call ``callback(error)`` when done: in the completing thread, or now if it is done."""
        with self._lock:
            if not self._is_done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback(self._error)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the operation has ended, at most so long; return whether it has.

        Not in a thread that it needs to end, such as one that runs the backend's callbacks.
        """
        if self._is_done:
            return True
        ended = threading.Event()
        self.add_done_callback(lambda _: ended.set())
        return forks.wait(ended, timeout_s)

    @classmethod
    def done(cls, error: BaseException | None = None) -> Completion:
        """Return a completion that has already ended."""
        completion = cls()
        completion._is_done = True
        completion._error = error
        return completion


class PartialError(BackendError):
    """Some slots of a batch failed, and only those.

    Attributes:
        errors: what each of them failed with, by its position in the batch.
    """

    def __init__(self, errors: Mapping[int, BaseException]) -> None:
        first = next(iter(errors.values()))
        super().__init__(f"{len(errors)} slots of a batch failed, the first with: {first}")
        self.errors = dict(errors)


class Slot(Protocol):
    """Room for ``nbytes`` bytes in one backend."""

    @property
    def nbytes(self) -> int:
        """The bytes asked for, which ``read`` and ``write`` move."""
        ...


class ShrinkingSlot(Slot, Protocol):
    """A slot that may take less of the medium than was asked for, such as a compressed one.  Optional."""

    @property
    def held_bytes(self) -> int:
        """What it takes, at most ``nbytes``, rounded up to the alignment, and a multiple of that.

        Changes only where a ``write`` completes.
        """
        ...


def held_bytes(slot: Slot, capabilities: Capabilities) -> int:
    """Return what ``slot`` takes of its medium, which is what its tier is charged for it."""
    if capabilities.has_shrinking_slots:
        return cast("ShrinkingSlot", slot).held_bytes
    return align_up(slot.nbytes, capabilities.alignment_bytes)


@runtime_checkable  # for tests of what a medium says of its slots; nobody else asks a slot
class AddressableSlot(Slot, Protocol):
    """A slot of a ``HOST`` or ``DEVICE`` backend: its bytes can be used in place."""

    @property
    def memory(self) -> torch.Tensor:
        """The slot's bytes, as the same one-dimensional ``torch.uint8`` tensor at every call.

        Its storage belongs to this slot alone and begins at the slot's first byte, so that the
        storage's use count tells whether anything still refers to the slot.
        """
        ...

    def acquire(self) -> None:
        """Order the calling thread's current device stream after everything that wrote the slot."""
        ...

    def release(self) -> None:
        """Note where the calling thread's current device stream is: the slot is busy until then."""
        ...


class Backend(Protocol):
    """Holds and moves the bytes of one medium.  See the module for who owes what."""

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do."""
        ...

    def reserve(self, nbytes: int) -> Slot:
        """Take room for ``nbytes`` (0 is allowed).

        Raises:
            CapacityError: no room *in this shape* (fragmentation, or the medium itself is full);
                the engine then makes more room or fails the request.
            BackendError: the medium failed.
        """
        ...

    def read(self, slot: Slot, into: Buffer) -> Completion:
        """Copy the slot's bytes into ``into``."""
        ...

    def write(self, slot: Slot, source: Buffer) -> Completion:
        """Copy ``source`` into the slot."""
        ...

    def free(self, slot: Slot) -> Completion:
        """Give the slot's bytes back.  Done when the medium can hold others in their place."""
        ...

    def resize(self, capacity_bytes: int) -> None:
        """Hold at most ``capacity_bytes`` from now on.  Called when the slots already fit in it."""
        ...

    def close(self) -> None:
        """Give everything back.  Blocks until the medium is quiet.  Idempotent."""
        ...


class BatchBackend(Backend, Protocol):
    """A backend that moves many small slots in one call, under one completion.  Optional.

    The completion is done when every slot's operation has ended.  Its error is a `PartialError` that
    names the slots that failed; any other error, or a call that raises, failed all of them.  Slots of
    a batch are different ones, there is at least one, and the completion is not stream-ordered.
    """

    def read_many(self, slots: Sequence[Slot], into: Sequence[Buffer]) -> Completion:
        """Copy the bytes of each slot into the buffer at its position."""
        ...

    def write_many(self, slots: Sequence[Slot], sources: Sequence[Buffer]) -> Completion:
        """Copy each buffer into the slot at its position."""
        ...


class PartBackend(Backend, Protocol):
    """A backend that reads parts of slots without the rest of them.  Optional.

    What it returns is what was written, as of ``read``, but for one thing: a part cannot be compared with a
    checksum of a whole.  Where the medium keeps such, bytes that it corrupts are not noticed here, and
    whoever reads parts sums them himself.
    """

    def read_parts(
        self, slots: Sequence[Slot], begins: Sequence[int], nbytes: int, into: Buffer
    ) -> Completion:
        """Copy ``nbytes`` from ``begins[i]`` on of ``slots[i]`` to ``into``, one part after the other.

        The completion is done when every part's operation has ended; it is not stream-ordered.  Its error is
        a `PartialError` that names the positions of the parts that failed; any other error, or a call that
        raises, failed all of them, and left other slots as they were.

        Args:
            slots: that were written; as many as there are parts, at least one.  They may repeat.
            begins: where each part begins, in bytes of its slot: a multiple of ``alignment_bytes``.
            nbytes: how long each of them is, at least one byte: a multiple of ``alignment_bytes``.
            into: has ``len(begins) * nbytes`` bytes.

        A part that is not so, or not within its slot, is refused with an error: before any byte moves, or
        alone.
        """
        ...


class DirectBackend(Backend, Protocol):
    """A ``STORAGE`` backend that reaches memory of a device without a buffer between.  Optional.

    Whatever memory it accepts, the engine may give to ``read`` and ``write`` in a buffer's place: the
    ``memory`` of a slot of a ``DEVICE`` backend, of as many bytes.  The engine has then made the calling
    thread's current stream wait for everything that uses that slot; the backend moves no byte before
    that stream has come as far as it was when it was called, and the completion is not stream-ordered.
    """

    def accepts(self, memory: torch.Tensor) -> bool:
        """Say whether ``memory`` can be moved straight, now and here.  Blocks at most once, to find out."""
        ...


class AdoptingBackend(Backend, Protocol):
    """A ``DEVICE`` backend that makes a slot of memory that the program has allocated.  Optional.

    From then on the memory is a slot's like any other, except that others may refer to its storage as well:
    freeing the slot only lets go of it.
    """

    def adopt(self, memory: torch.Tensor) -> Slot:
        """Make a slot of ``memory``, which is written: a whole storage, as one-dimensional ``torch.uint8``.

        What the calling thread's current stream has been told so far happens before anything else does to it.

        Raises:
            CapacityError: as ``reserve``.
            BackendError: it is no memory of this device, or the medium failed.
        """
        ...


class CountingBackend(Backend, Protocol):
    """A backend that tells of itself.  Each member is optional by itself."""

    @property
    def reserved_bytes(self) -> int:
        """What the medium holds at most, used by slots or not; otherwise that is what is charged."""
        ...

    @property
    def io_stats(self) -> object:
        """What it did, as a frozen dataclass of ints, floats and texts, and of tuples of other such ones.

        It appears in `tierstore.stats.TierStats.io`.
        """
        ...


class WaitingBackend(Backend, Protocol):
    """A backend in which operations may wait for time to pass, not only for the medium.  Optional."""

    def stop_waiting(self) -> None:
        """End, with an error, what has not begun and waits; let nothing wait from now on.  Does not block.

        Called before ``close``, when nobody wants what is under way any more.
        """
        ...


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a backend can do in a place, or why not.

    Attributes:
        name: what: a noun, such as ``"engine io_uring"``.
        fault: why it does not work there, and what to do about it; ``None``: it works.
    """

    name: str
    fault: str | None


class Examiner(Protocol):
    """What a backend's module may offer as ``examine``, for ``tierstore doctor``."""

    def __call__(self, folder: Path) -> Sequence[Finding]:
        """Find out, by doing it, what works in ``folder``; leave nothing there."""
        ...


@dataclass(frozen=True, slots=True)
class Record:
    """One slot that a commit names.

    Attributes:
        name: the key: any text, different for each record.
        note: text that comes back with it, whatever it says.
        slot: where the bytes are.
    """

    name: str
    note: str
    slot: Slot


class DurableBackend(Backend, Protocol):
    """A backend that finds its slots again after the process is gone.  See the module."""

    def recovered(self) -> Sequence[Record]:
        """Return what the last commit named when the backend was opened.

        Called once, before anything else.  The slots are written ones of this backend; everything
        else that an earlier process left was given back.
        """
        ...

    def commit(self, records: Sequence[Record], gone: Collection[str] | None = None) -> Completion:
        """Let ``records`` survive from now on, each in the place of what was under its name.

        Completes when a power loss would leave them, with ``BackendError`` where the medium fails.

        Args:
            records: of different names.
            gone: other names, under which nothing survives, whether anything was there or not; what else
                the last commit left stays.  ``None``: nothing survives but ``records``.
        """
        ...


class FullBackend(
    BatchBackend,
    PartBackend,
    DirectBackend,
    AdoptingBackend,
    DurableBackend,
    CountingBackend,
    WaitingBackend,
    Protocol,
):
    """What a backend may be, for those who ask its capabilities before they use it so."""


_PROMISES: Final[Mapping[str, Sequence[str]]] = {
    "is_durable": ("recovered", "commit"),
    "has_batches": ("read_many", "write_many"),
    "has_parts": ("read_parts",),
    "has_direct_paths": ("accepts",),
    "adopts": ("adopt",),
    "has_reserved_bytes": ("reserved_bytes",),
    "has_io_stats": ("io_stats",),
    "has_waits": ("stop_waiting",),
}


def broken_promise(backend: Backend) -> str | None:
    """Say which capability a backend claims without the members that it takes; ``None``: there is none."""
    for capability, members in _PROMISES.items():
        if getattr(backend.capabilities, capability) and any(
            getattr(backend, member, None) is None for member in members
        ):
            return f"says {capability}=True, but has no {' and '.join(f'{member}()' for member in members)}"
    return None


class BackendFactory(Protocol):
    """What an entry point of the group ``tierstore.backends`` names."""

    def __call__(self, *, capacity_bytes: int, options: Mapping[str, object]) -> Backend:
        """Open a backend that holds at most ``capacity_bytes``.

        Raises:
            ConfigError: an unknown option or a bad value; the message lists what is accepted.
            BackendError: the medium is not there or cannot be used.
        """
        ...


StorageListener = Callable[[torch.UntypedStorage], None]

device_storage_listeners: list[StorageListener] = []
"""Told of every storage that an *emulated* device allocates, in the allocating thread.

An emulated device has no allocator of its own to ask, so a meter of device memory
(`tierstore.testing.memory`) listens here.  A listener may raise to refuse the allocation.
"""
