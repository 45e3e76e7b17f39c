"""What a table carries between its pages and the device, counted; and how rows are put into cells there."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tierstore.tables.device_home import RowCarrier
from tierstore.tables.pages import put_rows

Places = npt.NDArray[np.int64]

_ROWS: Final = 0  # the dimension
_SMALL: Final = 1 << 31
_SHORT: Final = 1 << 15


class DeviceLink:
    """Carries and counts.

    Args:
        carrier: that does it.
        device: where to.

    Attributes:
        rows_to_device: see `tierstore.tables.CacheStats`, as for the others.
        rows_to_host: see there.
        bytes_to_device: see there.
        bytes_to_host: see there.
    """

    def __init__(self, carrier: RowCarrier, device: torch.device) -> None:
        self._carrier = carrier
        self._device = device
        self.rows_to_device = 0
        self.rows_to_host = 0
        self.bytes_to_device = 0
        self.bytes_to_host = 0
        self._last: tuple[Places, torch.Tensor] | None = None

    def bring(self, cells: torch.Tensor, rows: int) -> torch.Tensor:
        """Return cells of so many rows on the device; nobody writes to ``cells`` any more."""
        brought = self._carrier.to_device(cells)
        self.rows_to_device += rows
        self.bytes_to_device += cells.nbytes
        return brought

    def take_back(self, cells: torch.Tensor, rows: int) -> torch.Tensor:
        """Return cells of so many rows in host memory.  Blocks."""
        taken = self._carrier.to_host(cells)
        self.rows_to_host += rows
        self.bytes_to_host += cells.nbytes
        return taken

    def bring_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers on the device.

        Args:
            numbers: int64 in host memory, at least 0; carried with two or four bytes each if these suffice.
        """
        if not numbers.numel():
            return numbers.to(self._device, copy=True)
        most = int(numbers.max())
        if most < 2 * _SHORT:
            brought = self._carry_numbers((numbers - _SHORT).to(torch.int16))
            return brought.to(torch.int64).add_(_SHORT)
        if most < _SMALL:
            return self._carry_numbers(numbers.to(torch.int32)).to(torch.int64)
        return self._carry_numbers(numbers.clone())  # nobody writes to what the carrier has

    def _carry_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        brought = self._carrier.to_device(numbers.contiguous())
        self.bytes_to_device += numbers.nbytes
        return brought

    def take_numbers_back(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers of the device in host memory.  Blocks."""
        if not numbers.numel():
            return numbers.to("cpu", copy=True)
        taken = self._carrier.to_host(numbers.contiguous())
        self.bytes_to_host += numbers.nbytes
        return taken

    def bring_places(self, *places: Places) -> tuple[torch.Tensor, ...]:
        """Return numbers of rows on the device, int64; all are carried at once."""
        if len(places) == 1 and self._last is not None and np.array_equal(places[0], self._last[0]):
            return (self._last[1],)  # a step comes after its lookup
        brought = self.bring_numbers(torch.from_numpy(np.concatenate(places)))
        if len(places) == 1:
            self._last = places[0].copy(), brought
        return torch.split(brought, [len(each) for each in places])

    def forget_places(self) -> None:
        """Carry the next places, whichever they are."""
        self._last = None


def put_cells(matrix: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Write rows of a contiguous matrix on any device.

    Args:
        matrix: ``[rows, width]``.
        rows: which, distinct.
        values: ``[n, width]``.
    """
    if matrix.is_cpu:
        put_rows(matrix, rows.numpy(), values)
    else:
        matrix.index_copy_(_ROWS, rows, values)


def take_cells(matrix: torch.Tensor, rows: torch.Tensor, into: torch.Tensor) -> None:
    """Copy rows of a contiguous matrix to another: ``[n, width]``, contiguous."""
    torch.index_select(matrix, _ROWS, rows, out=into)
