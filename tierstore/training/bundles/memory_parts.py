"""Tensors that are parts of one larger memory, and are that again when their bytes are no longer the store's.

Parameters may be parts of one storage without overlapping: `torch.nn.utils.vector_to_parameters` makes them
so, as do flat buffers.  They travel apart, and the storage is let go.

1. A tensor whose bytes go to the store remembers of which storage it was a part, and of which bytes.
2. In the end it goes back to these bytes: in that storage while anything is left there, else in a new one of
   the same size, where all the others find it.  What no tensor showed is zero there.
3. One that is the only part left gets memory of its own.

Knows nothing of stores and bundles.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tierstore.output_buffers import host_memory
from tierstore.torch_private import storage_of_weak_pointer
from tierstore.training.bundles.layout import TensorLayout, span_of

_UNIT_BYTES = 16  # of the largest element: complex128


class Memory:
    """A storage that tensors are parts of, or were.

    Args:
        storage: as it is now.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.nbytes = storage.nbytes()
        self._parts: weakref.WeakSet[MemoryPart] = weakref.WeakSet()
        self._storages: dict[torch.device, StorageWeakRef] = {}
        self._know(storage)

    def _know(self, storage: torch.UntypedStorage) -> None:
        """Take in that this is the storage on its device; what it is known by is its own from now on."""
        former = self._storages.get(storage.device)
        if former is not None:
            _memories.pop(former.cdata, None)
        self._storages[storage.device] = StorageWeakRef(storage)
        _memories[storage._cdata] = self  # noqa: SLF001 - what a storage is known by

    def part(self, begin_bytes: int) -> MemoryPart:
        """Return a new part that begins at a byte."""
        part = MemoryPart(self, begin_bytes)
        self._parts.add(part)
        return part

    def on(self, device: torch.device) -> torch.Tensor | None:
        """Return a view of its storage on a device, as bytes; ``None``: it has one part, and is gone."""
        known = self._storages.get(device)
        storage = None if known is None else storage_of(known)
        if storage is None and len(self._parts) > 1:
            fresh = host_memory(self.nbytes) if device.type == "cpu" else _allocate(self.nbytes, device)
            storage = fresh.zero_().untyped_storage()
            self._know(storage)
        return None if storage is None else _bytes_of(storage)


class MemoryPart:
    """The bytes of one tensor in a larger memory.

    Args:
        memory: the whole of it.
        begin_bytes: where the tensor begins in it.
    """

    __slots__ = ("__weakref__", "begin_bytes", "memory")

    def __init__(self, memory: Memory, begin_bytes: int) -> None:
        self.memory = memory
        self.begin_bytes = begin_bytes


_memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
"""By what each storage is known by."""


def part_of(tensor: torch.Tensor, *, is_larger: bool = True) -> MemoryPart | None:
    """Return of which memory a tensor is a part; ``None``: of none that counts.

    Called natively, while the tensor has its bytes.

    Args:
        tensor: with a storage.
        is_larger: whether only memory counts that is larger than the tensor.
    """
    if tensor.is_meta or tensor.numel() == 0:
        return None
    storage = tensor.untyped_storage()
    nbytes = tensor.nbytes if tensor.is_contiguous() else span_of(tensor)  # the first is faster
    if is_larger and nbytes == storage.nbytes():
        return None
    memory = _memories.get(storage._cdata) or Memory(storage)  # noqa: SLF001 - what it is known by
    return memory.part(int(tensor.storage_offset()) * tensor.element_size())


def ground_of(
    places: Sequence[TensorLayout], parts: Mapping[int, MemoryPart | None], device: torch.device
) -> tuple[torch.Tensor, int] | None:
    """Return the larger memory that tensors which overlap are parts of.

    Args:
        places: of all that overlap, in their bundle.
        parts: of those that have their bytes from the bundle, by their numbers in ``places``.
        device: where it is to be.

    Returns:
        A view of its storage, as bytes, and the byte of the bundle that its first one is: it may be negative.
        ``None``: they are parts of none, or not of one, or are all that is left of it.
    """
    found = {
        None if part is None else (part.memory, places[number].begin_bytes - part.begin_bytes)
        for number, part in parts.items()
    }
    if len(found) != 1 or (only := found.pop()) is None:
        return None
    memory, begin_bytes = only
    are_in_it = all(
        begin_bytes <= place.begin_bytes
        and place.end_bytes <= begin_bytes + memory.nbytes
        and begin_bytes % place.dtype.itemsize == 0
        for place in places
    )
    flat = memory.on(device) if are_in_it else None
    return None if flat is None else (flat, begin_bytes)


def storage_of(known: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return a storage that is known weakly; ``None``: it is gone."""
    return storage_of_weak_pointer(known.cdata)


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return what can be viewed as any elements; a view of that may reach to the storage's end."""
    nbytes = storage.nbytes() // _UNIT_BYTES * _UNIT_BYTES
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))
