"""The memory of a copy of rows, for whoever reads bytes by their address: nobody can write by way of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from tierstore.errors import UsageError

_READS: Final = frozenset(
    {
        "_cdata", "cpu", "data_ptr", "device", "element_size", "filename", "get_device", "is_cuda", "is_hpu",
        "is_pinned", "is_shared", "nbytes", "size", "tolist",
    }
)  # fmt: skip
"""What is asked of a storage without a way to write to it."""


class RowsMemory:
    """What ``untyped_storage()`` gives of rows: it can be read as a storage can, and is none.

    So PyTorch lets no other tensor have it, as ``set_`` would, by way of which it could be written.  Nor is
    it a sequence of numbers, of which PyTorch would make tensors.

    Args:
        storage: the memory, which is a copy of the rows.
        what: they are, for messages.
    """

    def __init__(self, storage: torch.UntypedStorage, what: str) -> None:
        self._storage = storage
        self._what = what

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as a storage has it
        """Return what a storage has of that name.

        Raises:
            UsageError: it is there to write, or to let others write.
            AttributeError: it has nothing of that name.
        """
        found = getattr(self._storage, name)
        if name not in _READS:
            raise self._refusal(name)
        return found

    def __setitem__(self, place: object, value: object) -> None:
        """Refuse to be written to."""
        raise self._refusal("__setitem__")

    def __len__(self) -> int:
        """Return how many bytes there are."""
        return len(self._storage)

    def __iter__(self) -> Iterator[int]:
        """Yield the bytes."""
        return iter(self._storage)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same memory."""
        return isinstance(other, RowsMemory) and self.data_ptr() == other.data_ptr()

    def __hash__(self) -> int:
        """See `__eq__`."""
        return hash(self.data_ptr())

    def __repr__(self) -> str:
        """Say what it is."""
        return f"RowsMemory({self.nbytes()} bytes of {self._what})"

    def clone(self) -> torch.UntypedStorage:
        """Return a copy, which is a storage as any."""
        copy: torch.UntypedStorage = self._storage.clone()
        return copy

    def __copy__(self) -> torch.UntypedStorage:
        """Be copied as a storage."""
        return self.clone()

    def __deepcopy__(self, memo: dict[int, object]) -> torch.UntypedStorage:
        """Be copied as a storage."""
        del memo
        return self.clone()

    def __reduce_ex__(self, protocol: object) -> Any:  # noqa: ANN401 - whatever makes it again
        """Be pickled as a storage: as a tensor of its bytes, of which a storage is made."""
        del protocol
        return torch.Tensor.untyped_storage, (torch.tensor([], dtype=torch.uint8).set_(self.clone()),)

    def _refusal(self, name: str) -> UsageError:
        return UsageError(
            f"{name}: the memory of {self._what} cannot be written to. Take a copy: entry.clone(), or "
            "entry.untyped_storage().clone()."
        )
