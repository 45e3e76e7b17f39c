"""How host memory is page-locked: by a registrar, one for each kind of accelerator.

CUDA's is here.  Whoever brings another accelerator to torch adds its own (`add_registrar`) before a pool is
opened.  For an accelerator without one, host memory stays pageable: copies are correct and slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch

from tierstore.errors import BackendError

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


class Registrar(Protocol):
    """Page-locks memory, so that a device copies it at full speed and asynchronously."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock.

        Raises:
            BackendError: the system refuses, mostly for lack of *pinned* memory.
        """
        ...

    def unregister(self, address: int) -> None:
        """Undo `register` for the range that begins at ``address``.

        Raises:
            BackendError: the device refuses.
        """
        ...


class CudaRegistrar:
    """Registers memory with the CUDA runtime that torch uses."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock for every CUDA device.

        Raises:
            BackendError: CUDA refuses.
        """
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _REGISTER_PORTABLE))
        if code != 0:
            self._clear_error()
            raise BackendError(f"cudaHostRegister failed with CUDA error {code}")

    def unregister(self, address: int) -> None:
        """Undo `register`.

        Raises:
            BackendError: CUDA refuses.
        """
        code = int(torch.cuda.cudart().cudaHostUnregister(address))
        if code != 0:
            self._clear_error()
            raise BackendError(f"cudaHostUnregister failed with CUDA error {code}")

    @staticmethod
    def _clear_error() -> None:
        # CUDA keeps the error until somebody asks, torch asks after its next kernel and blames that
        # kernel, and torch offers no cudaGetLastError: so let a kernel of our own be blamed.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")


_makers: dict[str, Callable[[], Registrar]] = {"cuda": CudaRegistrar}


def add_registrar(device_type: str, make: Callable[[], Registrar]) -> None:
    """Let ``make`` give the registrar of each pool that is opened where ``device_type`` is the accelerator.

    Args:
        device_type: as torch names it, such as ``"xpu"``.
        make: returns a registrar.  Its methods are called from any thread, one at a time for each pool.
    """
    _makers[device_type] = make


def find_registrar() -> Registrar | None:
    """Return a registrar of the current accelerator; ``None``: there is none, or nobody knows how."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    make = None if accelerator is None else _makers.get(accelerator.type)
    return None if make is None else make()
