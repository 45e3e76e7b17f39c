"""``run.save_file``: what `torch.save` would write, with the tensors of a run read when they are written."""

from __future__ import annotations

from pathlib import Path

import torch

from tierstore.formats.torch_files import write_torch_file
from tierstore.training.checkpoints.files import BundleAccess
from tierstore.training.faults import guard
from tierstore.training.faults.late_entries import original_of


def write_run_file(path: Path, value: object, access: BundleAccess) -> None:
    """Write a file.

    Args:
        path: of it.
        value: that may hold tensors of the run, and late entries of state dicts.
        access: to their bytes.

    Raises:
        UsageError, AttributeError, TypeError, PicklingError, OSError: see `write_torch_file`.
    """

    def is_later(tensor: torch.Tensor) -> bool:
        return original_of(tensor) is not None or guard.guarded_tensor_of(tensor) is not None

    def read(tensor: torch.Tensor) -> torch.Tensor:
        original = original_of(tensor)
        (values,) = access.read([tensor if original is None else original])
        return values

    write_torch_file(path, value, is_later, read)
