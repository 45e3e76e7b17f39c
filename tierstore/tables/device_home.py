"""Where hot rows of a table lie on the device, and how rows come there and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tierstore.tables.frames import Policy


class RowCarrier(Protocol):
    """Carries tensors of rows, and of their places, between host memory and the device.

    A table calls it with its lock held, in the order of the program, and never with an empty tensor.  On the
    device everything that a table does is queued on the current stream, behind what it did on others.
    """

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device that the current stream may read.

        Args:
            tensor: contiguous, in host memory.  It is the carrier's from now on: nobody writes to it.

        Raises:
            TierStoreError: it could not be carried; the call can be made again.
        """
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory, with its bytes in place.  Blocks.

        Args:
            tensor: contiguous, on the device, of what the current stream has written.

        Raises:
            TierStoreError: it could not be carried; the call can be made again.
        """
        ...


@dataclass(frozen=True)
class DeviceHome:
    """Memory for hot rows on a device.

    Attributes:
        cells: ``[n, width]`` of the table's dtype, contiguous.  With c columns there are n // c slots, each
            of a row with its states; with none, rows pass through only.  What is in them is whatever.
        carrier: see there.
        policy: which rows leave first: those used least often of late, or least recently.
    """

    cells: torch.Tensor
    carrier: RowCarrier
    policy: Policy = "lfu"
