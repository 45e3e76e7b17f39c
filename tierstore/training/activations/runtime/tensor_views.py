"""How a tensor lies in a storage, without its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from tierstore.torch_private import negative_view


@dataclass(frozen=True, slots=True)
class TensorView:
    """How a tensor lies in a storage.

    Attributes:
        dtype: of its elements.
        shape: its sizes.
        stride: in elements.
        offset: of its first element, in elements.
        is_conj: whether its values are the conjugates of what the bytes say.
        is_neg: whether they are the negatives.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, begin_bytes: int = 0) -> Self:
        """Return how a tensor lies in what begins at a byte of its storage."""
        offset = int(tensor.storage_offset()) - begin_bytes // tensor.element_size()
        return cls(tensor.dtype, tensor.shape, tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    def over(self, storage: torch.UntypedStorage, begin_bytes: int = 0) -> torch.Tensor:
        """Return the tensor over what begins at a byte of a storage, without a graph."""
        offset = self.offset + begin_bytes // self.dtype.itemsize
        with torch.no_grad():
            view = torch.empty(0, dtype=self.dtype, device=storage.device)
            view.set_(storage, offset, self.shape, self.stride)
            if self.is_conj:
                view = torch.conj(view)  # sets the bit, as the tensor had it
            return negative_view(view) if self.is_neg else view
