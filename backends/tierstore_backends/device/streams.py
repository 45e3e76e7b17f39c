"""Memory of a torch accelerator: copies on side streams, ordered by events.

1. A slot is allocated on the stream that copies inward.  The caching allocator hands a stream only memory
   that was freed on it, and slots are freed there when nothing uses them any more (rule 4): so what comes up
   never waits for kernels that the program has queued already, of which an accelerator has many at a time.
   On the stream that is current it would have to, as what the program freed there may still be read.
2. There is one side stream for each direction.  A copy waits for every event of its slot: the last
   write, and where each lease was released.
3. A write is stream-ordered: `StreamSlot.acquire` makes the consumer's stream wait, not the host.
4. Freed memory is kept until its events have passed and then dropped, so that the caching allocator
   never hands out bytes that a stream still uses.  ``record_stream`` is not used: it defers frees
   unpredictably.
5. One thread a queue waits for events and completes in order.  Nothing polls.

Copies from and to pageable host memory are correct and slower.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, cast

import torch

from tierstore.errors import BackendError, CapacityError
from tierstore.spi import Buffer, Capabilities, Completion, Medium, Slot
from tierstore.units import format_bytes
from tierstore_backends import host
from tierstore_backends.quota import Quota

ALIGNMENT_BYTES = 512  # what CUDA's caching allocator rounds to
_CLOSED = "the 'device' backend is closed"


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def record(self, stream: DeviceStream) -> None:
        """Be the point that ``stream`` has been told to reach so far."""
        ...

    def query(self) -> bool:
        """Return whether the point has been reached."""
        ...

    def synchronize(self) -> None:
        """Block until the point is reached."""
        ...


class DeviceStream(Protocol):
    """A queue of work on the device."""

    def wait_event(self, event: DeviceEvent) -> None:
        """Do nothing queued later before ``event`` is reached."""
        ...


class DeviceModule(Protocol):
    """The part of ``torch.cuda``, ``torch.xpu`` and their like that is used here."""

    def Stream(self, device: torch.device) -> DeviceStream:  # noqa: N802 - torch's name
        """Make a stream."""
        ...

    def Event(self, *, blocking: bool = ...) -> DeviceEvent:  # noqa: N802 - torch's name
        """Make an event; ``blocking``: waiting for it does not spin.  Not every module knows that."""
        ...

    def current_stream(self, device: torch.device) -> DeviceStream:
        """Return the calling thread's current stream."""
        ...

    def stream(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """Make ``stream`` current inside the context."""
        ...


def find_device(name: torch.device) -> tuple[torch.device, DeviceModule]:
    """Return the device with its index, and the module that drives it.

    Raises:
        BackendError: the device is not there, or has no streams.
    """
    try:
        module = torch.get_device_module(name)
    except RuntimeError as error:
        raise BackendError(f"torch has no module that drives {str(name)!r}") from error
    if name.type == "cpu" or not all(hasattr(module, part) for part in ("Stream", "Event", "stream")):
        raise BackendError(f"device {str(name)!r} has no streams. Use 'emulated' or an accelerator.")
    count = module.device_count() if module.is_available() else 0
    if (name.index or 0) >= count:
        raise BackendError(f"there is no device {str(name)!r}: torch sees {count} of its kind")
    # Without an index it would be the current device of whichever thread asks.
    index = name.index if ":" in str(name) else module.current_device()
    return torch.device(name.type, index), cast("DeviceModule", module)


class StreamSlot:
    """Device memory and the events that its users wait for.

    Args:
        memory: a one-dimensional ``torch.uint8`` tensor on the device.
        streams: what knows the current stream.
        reserved: where the stream was that the memory was allocated on: others wait for it before they write.
    """

    __slots__ = ("_events", "_lock", "_memory", "_streams", "nbytes")

    def __init__(self, memory: torch.Tensor, streams: _DeviceStreams, reserved: DeviceEvent) -> None:
        self.nbytes = memory.numel()
        self._streams = streams
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = memory  # guarded by _lock, as is the next
        self._events = [reserved]

    @property
    def memory(self) -> torch.Tensor:
        """The slot's bytes.

        Raises:
            BackendError: the slot was freed.
        """
        memory = self._memory
        if memory is None:
            raise BackendError(f"a slot of {self.nbytes} bytes is used after it was freed")
        return memory

    def acquire(self) -> None:
        """Make the current stream wait for what wrote the slot, and for what leases left on it."""
        self.order(self._streams.current())

    def release(self) -> None:
        """Note where the current stream is."""
        self.note(self._streams.mark(self._streams.current()))

    def order(self, stream: DeviceStream) -> None:
        """Make ``stream`` wait for every event that has not passed."""
        for event in self.pending():
            stream.wait_event(event)

    def note(self, event: DeviceEvent) -> None:
        """Add an event that later users must wait for."""
        with self._lock:
            self._events = [one for one in self._events if not one.query()]
            self._events.append(event)

    def pending(self) -> list[DeviceEvent]:
        """Return the events that have not passed."""
        with self._lock:
            self._events = [one for one in self._events if not one.query()]
            return list(self._events)

    def vacate(self) -> torch.Tensor:
        """Hand the memory over to whoever frees it.

        Raises:
            BackendError: the slot was freed before.
        """
        with self._lock:
            memory, self._memory = self._memory, None
        if memory is None:
            raise BackendError(f"a slot of {self.nbytes} bytes is freed twice")
        return memory


class _DeviceStreams:
    """The streams and events of one device."""

    def __init__(self, device: torch.device, module: DeviceModule) -> None:
        self.device = device
        self._module = module
        self._new_event: Callable[[], DeviceEvent] = module.Event
        with contextlib.suppress(TypeError):  # where events cannot block, waiting spins
            module.Event(blocking=True)
            self._new_event = functools.partial(module.Event, blocking=True)

    def make(self) -> DeviceStream:
        return self._module.Stream(self.device)

    def current(self) -> DeviceStream:
        return self._module.current_stream(self.device)

    def inside(self, stream: DeviceStream) -> AbstractContextManager[object]:
        return self._module.stream(stream)

    def mark(self, stream: DeviceStream) -> DeviceEvent:
        event = self._new_event()
        event.record(stream)
        return event


class _Watched(NamedTuple):
    """What waits for events: tensors are kept alive until then."""

    events: Sequence[DeviceEvent]
    kept: list[torch.Tensor]
    freed: Quota | None
    nbytes: int
    completion: Completion


class _StreamWatcher:
    """A thread that completes what it is given, in order, when the device has come that far."""

    def __init__(self, name: str) -> None:
        self._watched: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tierstore-{name}", daemon=True)
        self._thread.start()

    def watch(self, watched: _Watched) -> None:
        self._watched.put(watched)

    def close(self) -> None:
        self._watched.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (watched := self._watched.get()) is not None:
            error = _wait(watched.events)
            _finish(watched, error)
            del watched


def _wait(events: Sequence[DeviceEvent]) -> BackendError | None:
    try:
        for event in events:
            event.synchronize()
    except RuntimeError as error:
        return _as_backend_error(error)
    return None


def _finish(watched: _Watched, error: BackendError | None) -> None:
    watched.kept.clear()
    if watched.freed is not None:
        watched.freed.give(watched.nbytes)
    watched.completion.complete(error)


class _CopyStream:
    """One direction: a stream, and the thread that watches it.

    Attributes:
        stream: where copies are queued.
    """

    def __init__(self, direction: str, streams: _DeviceStreams) -> None:
        self._streams = streams
        self.stream = streams.make()
        self._watcher = _StreamWatcher(direction)
        self._lock = threading.Lock()  # so that the watcher's order is the stream's

    def copy(self, slot: StreamSlot, into: torch.Tensor, source: Buffer, completion: Completion) -> None:
        with self._lock:
            slot.order(self.stream)
            with self._streams.inside(self.stream):
                host.copy(into, source, non_blocking=True)
            ended = self._streams.mark(self.stream)
            if completion.is_stream_ordered:
                slot.note(ended)
            self._watcher.watch(_Watched([ended], [into, source], None, 0, completion))

    def close(self) -> None:
        self._watcher.close()


class StreamDevice:
    """The memory of one accelerator.  See the module for its rules.

    Args:
        capacity_bytes: the most that all slots together hold.
        device: which accelerator.
        module: what drives it; see `find_device`.
    """

    def __init__(self, capacity_bytes: int, device: torch.device, module: DeviceModule) -> None:
        self.capabilities = Capabilities(
            medium=Medium.DEVICE, alignment_bytes=ALIGNMENT_BYTES, depth=2, device=device, adopts=True
        )
        self._quota = Quota("device", capacity_bytes, ALIGNMENT_BYTES)
        self._streams = _DeviceStreams(device, module)
        self._inward = _CopyStream("h2d", self._streams)
        self._outward = _CopyStream("d2h", self._streams)
        self._freeing = _StreamWatcher("free")
        self._is_closed = False

    @property
    def used_bytes(self) -> int:
        """The bytes of all slots, those included whose events have not passed."""
        return self._quota.held_bytes

    def reserve(self, nbytes: int) -> Slot:
        """Take room for ``nbytes``.

        Raises:
            CapacityError: more than what is free, here or on the device.
            BackendError: the backend is closed.
        """
        if self._is_closed:
            raise BackendError(_CLOSED)
        self._quota.take(nbytes)
        try:
            with host.plain_tensors(), self._streams.inside(self._inward.stream):
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self._streams.device)
            reserved = self._streams.mark(self._inward.stream)
        except torch.OutOfMemoryError as error:
            self._quota.give(nbytes)
            raise CapacityError(
                f"{self._streams.device} has no room for {format_bytes(nbytes)}, although the store's "
                f"device budget of {format_bytes(self._quota.capacity_bytes)} has: something else holds "
                f"its memory, or it is in pieces. Lower max_device_memory. ({error})",
                needed_bytes=nbytes,
            ) from error
        except RuntimeError as error:
            self._quota.give(nbytes)
            raise BackendError(f"{self._streams.device} failed: {error}") from error
        return StreamSlot(memory, self._streams, reserved)

    def adopt(self, memory: torch.Tensor) -> Slot:
        """Make a slot of what the program has allocated and the current stream has written.

        Raises:
            CapacityError: more than what is free.
            BackendError: the backend is closed, or the memory is not this device's.
        """
        if self._is_closed:
            raise BackendError(_CLOSED)
        host.check_whole(memory, self._streams.device)
        self._quota.take(memory.numel())
        try:
            written = self._streams.mark(self._streams.current())
        except RuntimeError as error:
            self._quota.give(memory.numel())
            raise _as_backend_error(error) from error
        return StreamSlot(memory, self._streams, written)

    def read(self, slot: Slot, into: Buffer) -> Completion:
        """Queue a copy of the slot's bytes into ``into``, after everything that wrote them."""
        completion = Completion()
        try:
            owned = self._own(slot)
            host.check_sizes(into, owned.memory)
            self._outward.copy(owned, into, owned.memory, completion)
        except (BackendError, RuntimeError) as error:
            return Completion.done(_as_backend_error(error))
        return completion

    def write(self, slot: Slot, source: Buffer) -> Completion:
        """Queue a copy of ``source`` into the slot, after every use of it.  Stream-ordered."""
        completion = Completion(is_stream_ordered=True)
        try:
            owned = self._own(slot)
            host.check_sizes(owned.memory, source)
            self._inward.copy(owned, owned.memory, source, completion)
        except (BackendError, RuntimeError) as error:
            return Completion.done(_as_backend_error(error))
        return completion

    def free(self, slot: Slot) -> Completion:
        """Give the slot's bytes back once its events have passed; at once if they have."""
        try:
            owned = _stream_slot(slot)
            kept = [owned.vacate()]
        except BackendError as error:
            return Completion.done(error)
        completion = Completion()
        failure, pending = None, list[DeviceEvent]()
        try:
            pending = owned.pending()
        except RuntimeError as error:
            failure = _as_backend_error(error)
        freed = _Watched(pending, kept, self._quota, owned.nbytes, completion)
        if pending and not self._is_closed:
            self._freeing.watch(freed)
        else:
            _finish(freed, failure or _wait(pending))
        return completion

    def resize(self, capacity_bytes: int) -> None:
        """Hold at most ``capacity_bytes`` from now on."""
        self._quota.resize(capacity_bytes)

    def close(self) -> None:
        """Wait for what was queued and end the threads.  Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._inward.close()
        self._outward.close()
        self._freeing.close()

    def _own(self, slot: Slot) -> StreamSlot:
        if self._is_closed:
            raise BackendError(_CLOSED)
        return _stream_slot(slot)


def _stream_slot(slot: Slot) -> StreamSlot:
    if not isinstance(slot, StreamSlot):
        raise BackendError(f"not a slot of this backend: {slot!r}")
    return slot


def _as_backend_error(error: Exception) -> BackendError:
    if isinstance(error, BackendError):
        return error
    failure = BackendError(f"the device failed: {error}")
    failure.__cause__ = error
    return failure
