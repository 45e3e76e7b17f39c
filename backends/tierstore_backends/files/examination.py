"""What works in a directory: each engine with a slot of its own, and the way straight from a GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tierstore.errors import BackendError
from tierstore.spi import Completion, Finding
from tierstore.units import MIB
from tierstore_backends.files.addressing.direct_io_probe import probe
from tierstore_backends.files.backend import FilesBackend
from tierstore_backends.files.engines.gpu import gpu_fault
from tierstore_backends.files.io.kernel import KERNEL
from tierstore_backends.files.options import Direct, EngineName, parse_options

_SLOT_BYTES = MIB + 1  # with a tail that does not fill a sector
_PATIENCE_S = 30.0


def examine(folder: Path) -> list[Finding]:
    """See `tierstore.spi.Examiner`."""
    with tempfile.TemporaryDirectory(prefix="tierstore-doctor-", dir=folder) as room:
        place = Path(room)
        direct = "auto" if _is_direct(place) else False  # which of both is told once, elsewhere
        findings = [
            Finding(f"engine {name.value}", _engine_fault(place / name.value, name, direct))
            for name in EngineName
            if name is not EngineName.AUTO
        ]
        return [*findings, Finding("straight from a GPU", gpu_fault(place))]


def _is_direct(folder: Path) -> bool:
    try:
        return probe(folder, Direct.ALWAYS, KERNEL).is_direct
    except BackendError:
        return False


def _engine_fault(path: Path, name: EngineName, direct: object) -> str | None:
    files: FilesBackend | None = None
    try:
        options = parse_options({"path": path, "engine": name.value, "direct": direct})
        files = FilesBackend(2 * MIB, options)
        return _round_trip_fault(files)
    except BackendError as refusal:
        return str(refusal)
    finally:
        if files is not None:
            files.close()


def _round_trip_fault(files: FilesBackend) -> str | None:
    source = torch.randint(0, 256, (_SLOT_BYTES,), dtype=torch.uint8)
    into = torch.empty_like(source)
    slot = files.reserve(_SLOT_BYTES)
    fault = _outcome(files.write(slot, source)) or _outcome(files.read(slot, into))
    if fault is not None:
        return str(fault)
    return None if into.equal(source) else "other bytes came back than were written"


def _outcome(completion: Completion) -> BaseException | None:
    if not completion.wait(_PATIENCE_S):
        return TimeoutError(f"no answer for {_PATIENCE_S} s")
    return completion.error
