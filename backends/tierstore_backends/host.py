"""What backends in host memory share: a slot and a copy.

Promises: a slot that was freed cannot be used again, a copy of the wrong number of bytes fails before
it touches any, and neither depends on the caller's ``torch.inference_mode()``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import torch

from tierstore.errors import BackendError, UsageError
from tierstore.spi import Buffer, Completion, Slot
from tierstore_backends.buffers import check_parts

PlaceT = TypeVar("PlaceT")


class HostSlot(Generic[PlaceT]):
    """Bytes in host memory.

    Args:
        memory: a one-dimensional ``torch.uint8`` tensor whose storage is the slot's alone.
        place: what the backend needs to know to give the bytes back.

    Attributes:
        written: set when the last write has moved its bytes, if that may come after the call;
            ``None`` otherwise.
    """

    __slots__ = ("_memory", "nbytes", "place", "written")

    def __init__(self, memory: torch.Tensor, place: PlaceT) -> None:
        self.nbytes = memory.numel()
        self.place = place
        self.written: threading.Event | None = None
        self._memory: torch.Tensor | None = memory

    @property
    def memory(self) -> torch.Tensor:
        """The slot's bytes.

        Raises:
            BackendError: the slot was freed.
        """
        if self._memory is None:
            raise BackendError(f"a slot of {self.nbytes} bytes is used after it was freed")
        return self._memory

    def acquire(self) -> None:
        """Wait for the last write's bytes: a host thread is its own stream of work."""
        if self.written is not None:
            self.written.wait()

    def release(self) -> None:
        """Do nothing: whoever used the bytes has used them."""

    def vacate(self) -> None:
        """Let go of the bytes.

        Raises:
            BackendError: the slot was freed before.
        """
        if self._memory is None:
            raise BackendError(f"a slot of {self.nbytes} bytes is freed twice")
        self._memory = None


def plain_tensors() -> AbstractContextManager[object]:
    """Make tensors that may be written later: those made in inference mode may not."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(mode=False)
    return contextlib.nullcontext()


def copy(into: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy, also into a buffer that was made in inference mode."""
    with torch.inference_mode() if into.is_inference() else contextlib.nullcontext():
        into.copy_(source, non_blocking=non_blocking)


def own(slot: Slot) -> HostSlot[object]:
    """Return ``slot`` as what it must be.

    Raises:
        BackendError: it is another backend's.
    """
    if not isinstance(slot, HostSlot):
        raise BackendError(f"not a slot of this backend: {slot!r}")
    return slot


def check_sizes(into: Buffer, source: Buffer) -> None:
    """Refuse a copy between different numbers of bytes.

    Raises:
        BackendError: the numbers differ.
    """
    if into.numel() != source.numel():
        raise BackendError(f"a copy of {source.numel()} bytes into {into.numel()}")


def check_whole(memory: torch.Tensor, device: torch.device) -> None:
    """Refuse to adopt what is not all the bytes of a storage on ``device``.

    Raises:
        BackendError: it says what is wrong.
    """
    is_flat = memory.dtype is torch.uint8 and memory.dim() == 1 and memory.is_contiguous()
    if not is_flat or memory.device != device or memory.untyped_storage().nbytes() != memory.numel():
        raise BackendError(
            f"cannot adopt {memory.dtype} {list(memory.shape)} on {str(memory.device)!r}: "
            f"a slot here is a whole storage on {str(device)!r}, as one-dimensional uint8"
        )


def read(slot: Slot, into: Buffer) -> Completion:
    """Copy a slot's bytes into a buffer before returning."""
    try:
        memory = own(slot).memory
        check_sizes(into, memory)
    except BackendError as error:
        return Completion.done(error)
    copy(into, memory)
    return Completion.done()


def read_parts(
    slots: Sequence[Slot], begins: Sequence[int], nbytes: int, into: Buffer, alignment_bytes: int
) -> Completion:
    """Copy parts of slots into a buffer before returning: see `tierstore.spi.PartBackend`."""
    try:
        memories = [own(slot).memory for slot in slots]
        check_parts(slots, begins, nbytes, into, alignment_bytes)
    except (BackendError, UsageError) as error:
        return Completion.done(error)
    # Views by Python's own means: a copy by torch takes some microseconds, and there may be thousands.
    views = {id(memory): memoryview(memory.numpy()) for memory in memories}  # type: ignore[arg-type]  # 3.11's stubs know no Buffer
    target = memoryview(into.numpy())  # type: ignore[arg-type]  # likewise
    at = 0
    for memory, begin in zip(memories, begins, strict=True):
        target[at : at + nbytes] = views[id(memory)][begin : begin + nbytes]
        at += nbytes
    return Completion.done()


def write(slot: Slot, source: Buffer) -> Completion:
    """Copy a buffer into a slot before returning."""
    try:
        memory = own(slot).memory
        check_sizes(memory, source)
    except BackendError as error:
        return Completion.done(error)
    copy(memory, source)
    return Completion.done()
