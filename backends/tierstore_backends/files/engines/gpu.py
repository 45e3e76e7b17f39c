"""Straight between a GPU's memory and files, through kvikio and cuFile: a favour, never a need.

It is used only where a page went that way and came back; everywhere else bytes go through host memory,
as always, and the reason is kept.  No checksum is made or compared, since those are made in host memory.

Which memory takes this way is tested; that the transfer itself works on a GPU is not proven, for want of one.
"""

from __future__ import annotations

import importlib
import os
import threading
from pathlib import Path
from types import ModuleType
from typing import Final, Protocol, cast

import torch

from tierstore.alone import fault_alone
from tierstore.errors import BackendError
from tierstore_backends.files.addressing.segments import Files
from tierstore_backends.files.directory.ownership import PROBE_NAME
from tierstore_backends.files.io.io_request import Direction, Fragment

_PAGE_BYTES = 4096
_TRIAL: Final = str(Path(__file__).with_name("gpu_trial.py"))


class Future(Protocol):
    """What kvikio returns."""

    def get(self) -> int:
        """Wait; return how many bytes moved."""
        ...


class CuFile(Protocol):
    """A file of kvikio's."""

    def pread(self, buf: torch.Tensor, size: int, file_offset: int) -> Future:
        """Begin to fill ``buf``."""
        ...

    def pwrite(self, buf: torch.Tensor, size: int, file_offset: int) -> Future:
        """Begin to write ``buf``."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class GpuFiles:
    """The files of one backend as a GPU reaches them.  From any thread.

    Args:
        folder: where the files are.
        segments: which they are.
    """

    def __init__(self, folder: Path, segments: Files) -> None:
        self._folder = folder
        self._segments = segments
        self._lock = threading.Lock()  # guards all below; held while the probe runs and while a file opens
        self._is_probed = False
        self._fault: str | None = None
        self._files: dict[Path, CuFile] = {}

    def accepts(self, memory: torch.Tensor) -> bool:
        """Say whether ``memory`` may be moved straight.  The first memory of a GPU is waited for: a probe."""
        if not memory.is_cuda:
            return False
        with self._lock:
            if not self._is_probed:
                self._is_probed = True
                self._fault = gpu_fault(self._folder)
            return self._fault is None

    def move(self, fragment: Fragment) -> None:
        """Move a fragment whose buffer is a GPU's memory; block until it has moved; note an error at it."""
        memory = fragment.buffer[fragment.start : fragment.stop]
        is_write = fragment.transfer.direction is Direction.WRITE
        path = self._segments.path(fragment.address)
        try:
            _, offset = self._segments.locate(fragment.address, fragment.end)
            file = self._file(path)
            begin = file.pwrite if is_write else file.pread
            count = begin(memory, size=len(memory), file_offset=offset).get()
        except (OSError, RuntimeError) as error:
            fragment.error = BackendError(
                f"{'writing' if is_write else 'reading'} {len(memory)} bytes of a GPU straight at offset "
                f"{fragment.address % self._segments.segment_bytes} of {path} failed: {error}"
            )
            fragment.error.__cause__ = error.with_traceback(None)
            return
        if count != len(memory):
            fragment.error = BackendError(f"{count} of {len(memory)} bytes of a GPU moved straight to {path}")

    def close(self) -> None:
        """Close the files.  Idempotent."""
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()

    def _file(self, path: Path) -> CuFile:
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = cast("CuFile", importlib.import_module("kvikio").CuFile(path, "r+"))
                self._files[path] = file
            return file


def gpu_fault(folder: Path) -> str | None:
    """Say why files in ``folder`` and a GPU's memory cannot be moved between straight; ``None``: they can.

    Writes a page from a GPU and reads it back, into one file that is gone afterwards.
    """
    fault = fault_alone("kvikio", "kvikio.cufile_driver", script=_TRIAL)
    if fault is not None:
        return f"kvikio cannot be used here: {fault}"
    try:
        kvikio = importlib.import_module("kvikio")
        driver = importlib.import_module("kvikio.cufile_driver")
    except ImportError as error:
        return f"kvikio cannot be imported ({error}): pip install 'tierstore[gds]'"
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    try:
        driver.driver_open()
        if not _has_gds(driver):
            return "cuFile works here only through host memory (no nvidia-fs driver for this file system)"
        return _page_fault(kvikio, folder / PROBE_NAME)
    except (OSError, RuntimeError) as error:  # which kvikio and torch raise
        return f"a page could not be moved between a GPU and a file: {error}"


def _has_gds(driver: ModuleType) -> bool:
    """Whether cuFile moves bytes itself.  kvikio has changed how it is asked."""
    if hasattr(driver, "get"):
        return bool(driver.get("is_gds_available"))
    return bool(driver.DriverProperties().is_gds_available)


def _page_fault(kvikio: ModuleType, path: Path) -> str | None:
    written = torch.randint(0, 256, (_PAGE_BYTES,), dtype=torch.uint8, device="cuda")
    found = torch.zeros_like(written)
    torch.cuda.synchronize()
    path.touch(mode=0o600)
    try:
        os.truncate(path, _PAGE_BYTES)
        file = kvikio.CuFile(path, "r+")
        try:
            count = min(file.pwrite(written).get(), file.pread(found).get())
        finally:
            file.close()
    finally:
        path.unlink(missing_ok=True)
    if count != _PAGE_BYTES:
        return f"{count} of {_PAGE_BYTES} bytes were moved between a GPU and a file"
    return None if found.equal(written) else "a page came back different from a file to a GPU"
