"""Weights for a model that was built without any: ``offload(model, ..., weights="model.safetensors")``.

A model built under ``torch.device("meta")`` has parameters without bytes.  They are read from the file
one bundle at a time, straight into the store; the parameters stay the objects that they were, so that
an optimizer made before still trains them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tierstore.errors import UsageError
from tierstore.training.bundles import materialise
from tierstore.training.checkpoint import all_names, persistent_buffers
from tierstore.training.tensorfile import TensorFile, check_names


class Weights:
    """A file of weights that fits a model.  A context manager.

    Args:
        model: that gets its values from the file.
        path: of a safetensors file.

    Raises:
        UsageError: the file cannot be read or does not fit; every fault is listed.
    """

    def __init__(self, model: nn.Module, path: Path) -> None:
        self._model = model
        self._file = TensorFile(path)
        names = all_names(model)
        wanted: dict[str, torch.Tensor] = {each[0]: parameter for parameter, each in names.items()}
        wanted |= persistent_buffers(model)
        self._found = check_names(self._file, wanted, {each[0]: each[1:] for each in names.values()})
        self._refuse_buffers_without_values()

    def _refuse_buffers_without_values(self) -> None:
        saved = persistent_buffers(self._model)
        empty = [name for name, buffer in self._model.named_buffers() if buffer.is_meta and name not in saved]
        if empty:
            raise UsageError(
                f"these buffers are on the meta device and no file holds them: {', '.join(empty)}. "
                "Give them values before offload(...)."
            )

    def read(self, name: str) -> torch.Tensor:
        """Return the values of one parameter, by its first name."""
        return self._file.read(self._found[name])

    def load_buffers(self) -> None:
        """Give the persistent buffers their values."""
        for path, module in self._model.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                full = f"{path}.{name}" if path else name
                if full not in self._found:
                    continue
                if buffer.is_meta:
                    setattr(module, name, self.read(full).to(buffer.dtype))
                else:
                    with torch.no_grad():
                        buffer.copy_(self.read(full))

    def load_ordinary(self) -> None:
        """Give the parameters of a model that is not offloaded their values."""
        for parameter, names in all_names(self._model).items():
            values = self.read(names[0]).to(parameter.dtype)
            if parameter.is_meta:
                materialise(parameter, values)
            else:
                with torch.no_grad():
                    parameter.copy_(values)

    def __enter__(self) -> Weights:
        """Open the file."""
        self._file.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self._file.__exit__(*exception)
