"""Weights for a model that was built without any: ``offload(model, ..., weights="model.safetensors")``.

A model built under ``torch.device("meta")`` has parameters without bytes.  They are read from the files
one bundle at a time, tables a few megabytes at a time, straight into the store; the parameters stay the
objects that they were, so that an optimizer made before still trains them.

1. Everything that does not fit is listed in one error, before anything is changed: names that are missing,
   not expected or in two files, other shapes, element types whose kind a cast would change.
2. A tensor that the model has under several names is read from any of them; all that are there must agree.
3. A persistent buffer is read like a parameter.  One that is not persistent is in no file: it keeps its
   values, and on the meta device, where it has none, it is refused.
4. Of a parameter that is spread over processes each reads the rows of its part, and keeps its columns.
"""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

import torch
from torch import nn

from tierstore.errors import UsageError
from tierstore.formats.safetensors_files import TensorSource, check_names
from tierstore.formats.sharded_weights import open_source
from tierstore.nn.table_weight import TableWeight
from tierstore.progress import ProgressBar
from tierstore.training.bundles.placeholders import has_no_values
from tierstore.training.bundles.tensor_slots import part_here
from tierstore.training.modules.adopter import give_values
from tierstore.training.modules.tensor_names import all_names, buffer_names
from tierstore.training.tables.streamed import load_rows


class Weights:
    """Files of weights that fit a model.  A context manager.

    Args:
        model: that gets its values from them.
        source: the path of a safetensors file, of the index of several, or of their directory; or tensors by
            name.

    Raises:
        UsageError: they cannot be read or do not fit; every fault is listed.
    """

    def __init__(self, model: nn.Module, source: str | Path | TensorSource) -> None:
        self._model = model
        self._source = _opened(source)
        try:
            self._found = self._check()
            self._parameters = {names[0]: each for each, names in all_names(model).items()}
        except BaseException:
            self._source.__exit__(None, None, None)
            raise
        nbytes = sum(map(self._nbytes, set(self._found.values())))
        self._bar = ProgressBar("loading weights", nbytes)

    def _check(self) -> dict[str, str]:
        """Return under which name each of the model's tensors is in the files, for every name of it."""
        buffers = buffer_names(self._model)
        names = list(all_names(self._model).items()) + list(buffers.items())
        wanted: dict[str, torch.Tensor] = {each[0]: tensor for tensor, each in names}
        found = check_names(self._source, wanted, {each[0]: each[1:] for _, each in names})
        empty = [
            name for name, each in self._model.named_buffers() if has_no_values(each) and each not in buffers
        ]
        if empty:
            raise UsageError(
                f"these buffers have no values (they are on the meta device, or were released) and no file "
                f"holds them: {', '.join(empty)}. Build the model under "
                f"tierstore.training.without_values(), not "
                "under torch.device('meta'): its own code computes them then. Or give them values before "
                "offload(...)."
            )
        return {name: found[each[0]] for _, each in names for name in each}

    def _nbytes(self, name: str) -> int:
        dtype = self._source.dtype(name)
        return 0 if dtype is None else torch.Size(self._source.shape(name)).numel() * dtype.itemsize

    def read(self, name: str) -> torch.Tensor:
        """Return the values of one parameter or buffer, by its first name."""
        parameter, found = self._parameters.get(name), self._found[name]
        part = None if parameter is None else part_here(parameter)
        if part is None:
            values = self._source.read(found)
        else:
            values = self._source.read_rows(found, *part[0])
            within = tuple(slice(begin, end) for begin, end in part[1:])
            values = values[(slice(None), *within)].contiguous()
        self._bar.add(values.nbytes)
        return values

    def load_table(self, weight: TableWeight, name: str) -> None:
        """Give a table its rows, a few megabytes at a time.

        Args:
            weight: its parameter.
            name: the first that this has.
        """
        load_rows(weight, self._source, self._found[name])
        self._bar.add(self._nbytes(self._found[name]))

    def load_buffers(self, travelling: Container[torch.Tensor] = ()) -> None:
        """Give the persistent buffers their values, but those that travel; a shared one stays one."""
        fresh: dict[torch.Tensor, torch.Tensor] = {}
        for path, module in self._model.named_modules(remove_duplicate=False):
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                full = f"{path}.{name}" if path else name
                if full not in self._found or buffer in travelling:
                    continue
                if not buffer.is_meta:
                    with torch.no_grad():
                        buffer.copy_(self.read(full))
                    continue
                if buffer not in fresh:
                    fresh[buffer] = self.read(full).to(buffer.dtype, copy=True)
                setattr(module, name, fresh[buffer])

    def load_ordinary(self) -> None:
        """Give the parameters of a model that is not offloaded their values."""
        for parameter, names in all_names(self._model).items():
            if isinstance(parameter, TableWeight):
                self.load_table(parameter, names[0])
                continue
            give_values(parameter, self.read(names[0]), torch.device("cpu"))

    def __enter__(self) -> Weights:
        """Open the files."""
        self._source.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Close them."""
        self._bar.close()
        self._source.__exit__(*exception)


def _opened(source: str | Path | TensorSource) -> TensorSource:
    """Return what weights are read from.

    Raises:
        UsageError: there is nothing that could be read.
    """
    if isinstance(source, str | os.PathLike):
        return open_source(Path(source))
    if not callable(getattr(source, "read_rows", None)):
        raise UsageError(
            f"weights is a {type(source).__name__}; accepted: a path of safetensors files, "
            f"InitialValues(model), or the "
            "weights of what tierstore.integrations.transformers_models returns."
        )
    return source
