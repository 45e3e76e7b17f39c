"""A device without a device: host memory behind a quota, a link and late completions of its own.

Everything that an accelerator's tier does shows here without one: bytes are copied by a thread for
each direction, at the speed of an optional link; completions may come late and overtake each other;
freed memory may be overwritten, so that a use after it shows.  Every allocation is told to
`tierstore.spi.device_storage_listeners`, so that device memory can be metered from outside.
"""

from __future__ import annotations

import threading
import weakref

import torch

from tierstore.errors import BackendError, CapacityError
from tierstore.spi import Buffer, Capabilities, Completion, Medium, Slot, device_storage_listeners
from tierstore.units import format_bytes
from tierstore_backends import host
from tierstore_backends.device.arena import Arena, ArenaBlock
from tierstore_backends.device.completion_order import Delivery, LateDelivery, PromptDelivery
from tierstore_backends.device.copy_queue import EmulatedCopyQueue
from tierstore_backends.device.link import EmulatedLink
from tierstore_backends.quota import Quota

ALIGNMENT_BYTES = 512  # as CUDA's caching allocator rounds
_FREED = 0xFF
_CLOSED = "the 'device' backend is closed"
_ADOPTED = object()
"""Where a slot's memory is from that the program allocated."""


class EmulatedDevice:
    """Host memory that behaves as a device's.

    Args:
        capacity_bytes: the most that all slots together hold.
        links: how long copies take, to the device and from it.
        late_seed: completions come late, by chance from this seed; ``None``: at once.
        is_overwriting: whether freed memory is filled with 0xFF.
        is_stream_ordered: whether a write's bytes may be used after `AddressableSlot.acquire`,
            before the write has completed.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        links: tuple[EmulatedLink, EmulatedLink] | None = None,
        late_seed: int | None = None,
        is_overwriting: bool = False,
        is_stream_ordered: bool = False,
    ) -> None:
        self.capabilities = Capabilities(
            medium=Medium.DEVICE, alignment_bytes=ALIGNMENT_BYTES, depth=2, adopts=True
        )
        self._quota = Quota("device", capacity_bytes, ALIGNMENT_BYTES)
        self._arena = Arena()
        self._delivery: Delivery = PromptDelivery() if late_seed is None else LateDelivery(late_seed)
        inward, outward = links or (EmulatedLink(), EmulatedLink())
        self._inward = EmulatedCopyQueue("h2d", inward, self._delivery)
        self._outward = EmulatedCopyQueue("d2h", outward, self._delivery)
        self._is_overwriting = is_overwriting
        self._is_stream_ordered = is_stream_ordered
        self._is_closed = False
        for queue in (self._inward, self._outward):
            weakref.finalize(self, queue.abandon).atexit = False

    @property
    def used_bytes(self) -> int:
        """The bytes of all slots."""
        return self._quota.held_bytes

    def reserve(self, nbytes: int) -> Slot:
        """Take room for ``nbytes`` and tell every listener of it.

        Raises:
            CapacityError: more than what is free, or a listener meters device memory and there is
                no more of it.
            BackendError: the device is closed.
        """
        if self._is_closed:
            raise BackendError(_CLOSED)
        self._quota.take(nbytes)
        try:
            return self._allocate(nbytes)
        except BaseException:
            self._quota.give(nbytes)
            raise

    def adopt(self, memory: torch.Tensor) -> Slot:
        """Make a slot of what the program has allocated; tell every listener, as it is the device's now.

        Raises:
            CapacityError: more than what is free, or a listener refuses it.
            BackendError: the device is closed, or it is not host memory.
        """
        if self._is_closed:
            raise BackendError(_CLOSED)
        host.check_whole(memory, torch.device("cpu"))
        self._quota.take(memory.numel())
        try:
            _announce(memory)
        except BaseException as error:
            self._quota.give(memory.numel())
            if isinstance(error, torch.OutOfMemoryError):
                raise _no_room(memory.numel(), error) from error
            raise
        return host.HostSlot(memory, place=_ADOPTED)

    def read(self, slot: Slot, into: Buffer) -> Completion:
        """Copy the slot's bytes into ``into``, in the thread of that direction."""
        try:
            owned = self._own(slot)
            host.check_sizes(into, owned.memory)
        except BackendError as error:
            return Completion.done(error)
        completion = Completion()
        self._outward.copy(into, owned.memory, completion, after=owned.written)
        return completion

    def write(self, slot: Slot, source: Buffer) -> Completion:
        """Copy ``source`` into the slot, in the thread of that direction."""
        try:
            owned = self._own(slot)
            host.check_sizes(owned.memory, source)
        except BackendError as error:
            return Completion.done(error)
        completion = Completion(is_stream_ordered=self._is_stream_ordered)
        if self._is_stream_ordered:
            owned.written = threading.Event()
        self._inward.copy(owned.memory, source, completion, moved=owned.written)
        return completion

    def free(self, slot: Slot) -> Completion:
        """Give the slot's bytes back before returning; say so when completions come."""
        try:
            owned = host.own(slot)
            if self._is_overwriting and owned.place is not _ADOPTED:  # others may use that still
                owned.memory.fill_(_FREED)
            owned.vacate()
        except BackendError as error:
            return Completion.done(error)
        self._take_back(owned.place)
        self._quota.give(owned.nbytes)
        completion = Completion()
        self._delivery.begin()
        self._delivery.end("free", completion)
        return completion

    def resize(self, capacity_bytes: int) -> None:
        """Hold at most ``capacity_bytes`` from now on."""
        self._quota.resize(capacity_bytes)
        self._arena.trim(capacity_bytes - self._quota.held_bytes)

    def close(self) -> None:
        """End the threads and give the memory back.  Idempotent."""
        self._is_closed = True
        self._inward.close()
        self._outward.close()
        self._delivery.close()
        self._arena.trim(0)

    def _own(self, slot: Slot) -> host.HostSlot[object]:
        if self._is_closed:
            raise BackendError(_CLOSED)
        return host.own(slot)

    def _allocate(self, nbytes: int) -> Slot:
        try:
            with host.plain_tensors():
                memory, piece = self._arena.take(nbytes)
            self._arena.trim(self._quota.capacity_bytes - self._quota.held_bytes)
            try:
                _announce(memory)
            except BaseException:
                del memory  # the error's traceback refers to this frame: let it not hold device memory
                self._take_back(piece)
                raise
        except (OSError, torch.OutOfMemoryError) as error:
            raise _no_room(nbytes, error) from error
        return host.HostSlot(memory, place=piece)

    def _take_back(self, piece: object) -> None:
        if isinstance(piece, ArenaBlock):
            self._arena.give(piece)


def _announce(memory: torch.Tensor) -> None:
    """Tell every listener that a storage is the device's."""
    try:
        for listener in tuple(device_storage_listeners):
            listener(memory.untyped_storage())
    finally:
        del memory  # a refusal's traceback refers to this frame: let it not hold device memory


def _no_room(nbytes: int, error: Exception) -> CapacityError:
    return CapacityError(f"the device has no room for {format_bytes(nbytes)}: {error}", needed_bytes=nbytes)
