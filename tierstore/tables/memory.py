"""Where frames lie: memory that grows as a table is touched, or a tensor of fixed size that is given.

Either is one matrix of cells, ``[frames * cells_per_page, width]``.
"""

from __future__ import annotations

import torch

from tierstore.errors import CapacityError, UsageError
from tierstore.tables.layout import PageLayout
from tierstore.units import format_bytes

_FIRST_BYTES = 1 << 20


class GrowingMemory:
    """As much as is touched, of the process: it grows by doubling."""

    @staticmethod
    def begin(layout: PageLayout) -> torch.Tensor:
        """Return no cells: nothing was touched."""
        return _new_cells(layout, 0)

    @staticmethod
    def enlarge(cells: torch.Tensor, layout: PageLayout, frames: int, most: int) -> torch.Tensor:
        """Return cells of at least ``frames`` frames, which begin as ``cells`` do.

        Args:
            cells: those that there were.
            layout: of a page.
            frames: how many are needed.
            most: how many may be needed ever.
        """
        doubled = max(2 * len(cells) // layout.cells_per_page, _FIRST_BYTES // layout.page_bytes)
        larger = _new_cells(layout, max(frames, min(most, doubled)))
        larger[: len(cells)] = cells
        return larger


class FixedMemory:
    """A tensor that is given, for as long as the table lives: in a run, a lease of the host tier.

    Args:
        tensor: contiguous, in host memory, of any type whose bytes may be used.

    Raises:
        UsageError: it is not.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if not tensor.is_cpu or not tensor.is_contiguous():
            raise UsageError(
                f"frames need contiguous host memory, not {list(tensor.shape)} with strides "
                f"{list(tensor.stride())} on {tensor.device}"
            )
        self._bytes = tensor.detach().reshape(-1).view(torch.uint8)

    def begin(self, layout: PageLayout, name: str) -> torch.Tensor:
        """Return the cells of all frames; what is in them is whatever.

        Args:
            layout: of a page.
            name: of the table, for messages.

        Raises:
            CapacityError: there is no room for a single page.
        """
        there, page = self._bytes.numel(), layout.page_bytes
        frames = there // page
        if frames < 1:
            raise CapacityError(
                f"table {name!r}: a page of {layout.rows_per_page} rows with their state takes "
                f"{format_bytes(page)}, and its frames have {format_bytes(there)}",
                needed_bytes=page,
                free_bytes=there,
            )
        return self._bytes[: frames * page].view(layout.dtype).view(-1, layout.width)


FrameMemory = GrowingMemory | FixedMemory
"""See the module."""


def _new_cells(layout: PageLayout, frames: int) -> torch.Tensor:
    with torch.inference_mode(mode=False):  # else nobody could write to it later, out of that mode
        return torch.empty(frames * layout.cells_per_page, layout.width, dtype=layout.dtype, device="cpu")
