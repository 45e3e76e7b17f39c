"""A carrier of rows for tests: it copies, spoils what it was given, and fails when it is told to."""

from __future__ import annotations

import torch

from tests import target
from tierstore.errors import BackendError
from tierstore.tables import DeviceHome
from tierstore.tables.frames import Policy

DEVICE = torch.device(target.accelerator or "cpu")


class CopyingCarrier:
    """Copies between host memory and the device that the tests run on.

    Attributes:
        failures: how many calls failed.
        calls_to_host: how many went there.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.calls_to_host = 0
        self._fails_after: int | None = None

    def fail_next(self, calls: int) -> None:
        """Let the n-th call from now on fail, and no other one."""
        self._fails_after = calls

    def heal(self) -> None:
        """Fail no more."""
        self._fails_after = None

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `tierstore.tables.RowCarrier`."""
        assert tensor.is_cpu
        self._count(tensor)
        made = tensor.to(DEVICE, copy=True)
        tensor.view(torch.uint8).fill_(255)  # nobody reads it any more
        return made

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `tierstore.tables.RowCarrier`."""
        assert tensor.device.type == DEVICE.type
        self._count(tensor)
        self.calls_to_host += 1
        return tensor.to("cpu", copy=True)

    def _count(self, tensor: torch.Tensor) -> None:
        assert tensor.numel()
        assert tensor.is_contiguous()
        if self._fails_after is not None:
            self._fails_after -= 1
            if not self._fails_after:
                self._fails_after = None
                self.failures += 1
                raise BackendError("table 'deep': the link failed, as it was told to")


def device_home(
    rows: int, width: int, dtype: torch.dtype = torch.float32, policy: Policy = "lfu"
) -> tuple[DeviceHome, CopyingCarrier]:
    """Return memory for so many cells, which holds what is no number, and its carrier."""
    cells = torch.full((rows, width), float("nan"), dtype=dtype, device=DEVICE)
    carrier = CopyingCarrier()
    return DeviceHome(cells, carrier, policy), carrier
