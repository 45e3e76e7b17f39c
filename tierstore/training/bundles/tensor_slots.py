"""How one tensor of a bundle is given its bytes, and how they are taken back.

A slot is a kind of tensor, not a tensor: it refers to none, so that references to tensors can be counted.
Another kind, such as a tensor that has its bytes in another one, is another class and a line in `slot_of`.

Everything is called natively (`tierstore.training.bundles.binding.natively`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

_Tensor: Any = torch.Tensor  # its properties, seen as the descriptors that they are
set_data: Callable[[torch.Tensor, torch.Tensor], None] = _Tensor.data.__set__
"""Points a tensor at the memory of another one; autograd's version counter stays."""


class TensorSlot(Protocol):
    """Where a kind of tensor has its bytes."""

    def attach(self, tensor: torch.Tensor, view: torch.Tensor) -> None:
        """Give a tensor its bytes."""
        ...

    def detach(self, tensor: torch.Tensor, poison: torch.Tensor) -> None:
        """Take them back: the tensor looks as before, and holds nothing."""
        ...

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor whose memory it is that `attach` and `detach` exchange."""
        ...


class PlainSlot:
    """A tensor that has its bytes itself."""

    def attach(self, tensor: torch.Tensor, view: torch.Tensor) -> None:
        """See `TensorSlot.attach`."""
        set_data(tensor, view)

    def detach(self, tensor: torch.Tensor, poison: torch.Tensor) -> None:
        """See `TensorSlot.detach`."""
        set_data(tensor, poison)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `TensorSlot.local`."""
        return tensor


_PLAIN = PlainSlot()


def slot_of(kind: type[torch.Tensor]) -> TensorSlot:
    """Return the slot of tensors of a class, as it is without a guard."""
    del kind  # there is one kind so far
    return _PLAIN
