"""``run.save`` and ``run.load``: a training checkpoint that streams, one bundle at a time.

A checkpoint is a directory: ``model.safetensors`` with parameters and persistent buffers under the
names of ``model.state_dict()``, ``optimizer.safetensors`` with the optimizers' tensors, and
``optimizer.json`` with the rest of their state.  Save between steps: gradients are not part of it,
nor is the state of random number generators.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tierstore.errors import UsageError
from tierstore.formats.bounded_json import read_json
from tierstore.formats.safetensors_files import (
    HeaderEntry,
    InBlocks,
    TensorFile,
    check_names,
    write_file,
)
from tierstore.nn.table_entry import TableEntry
from tierstore.nn.table_weight import TableWeight
from tierstore.progress import progress
from tierstore.quoting import listed, named, quoted
from tierstore.signals import in_one_piece
from tierstore.training.bundles.grouping import first_names
from tierstore.training.bundles.layout import fill
from tierstore.training.formats.json_codec import (
    Sources,
    decode,
    describe_optimizer,
    encode,
    not_in_the_model,
    parameters_by_group,
    why_not_decodable,
)
from tierstore.training.modules.tensor_names import all_names, persistent_buffers
from tierstore.training.optimizers.state import order_entries
from tierstore.training.tables.streamed import begin_load, load_rows, load_states, table_rows

MODEL = "model.safetensors"
STATE = "optimizer.safetensors"
SCALARS = "optimizer.json"
_FORMAT = 1

Parameters = Sequence[torch.Tensor]


class BundleAccess(NamedTuple):
    """How a checkpoint gets at the bytes of what may be offloaded.

    Attributes:
        parts: the parameters, in parts that are read and written together.
        read: return independent copies, in host memory, of tensors of one part, or of a buffer.
        write: give the tensors of one part, or a buffer, new values.
        settle: take in the optimizer's state of one part, which was replaced.
        saving: return a context that says whether all rows of tables can be read here, or others write them.
    """

    parts: Sequence[Parameters]
    read: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    write: Callable[[Parameters, Sequence[torch.Tensor]], None]
    settle: Callable[[int, Parameters], None]
    saving: Callable[[], AbstractContextManager[bool]]


def ordinary_access(model: nn.Module) -> BundleAccess:
    """Return the access to a model that is not offloaded."""

    def write(part: Parameters, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(part, values, strict=True):
                fill(parameter, value)

    parts = [[p] for p in model.parameters()]
    return BundleAccess(parts, list, write, lambda *_: None, lambda: nullcontext(enter_result=True))


class Checkpoint:
    """Saves and loads one model with its optimizers.

    Args:
        model: whose parameters and buffers.
        optimizers: whose state.
        access: to bytes that may be offloaded.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], access: BundleAccess
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._access = access
        self._names = first_names(model)

    # --- saving -------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the checkpoint; ``path`` is the former one or this one, whole, never a mixture.

        Raises:
            UsageError: a value that cannot be saved; the message names it.
            OSError: the file system failed; a former checkpoint is unharmed.
            TierStoreError: another process could not read its rows, or the first could not write them.
        """
        with self._access.saving() as is_mine:
            if is_mine:
                self._save(path)

    def _save(self, path: Path) -> None:
        path = path.absolute()
        fresh = path.with_name(f".{path.name}.new-{os.getpid()}")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        try:
            self._write_model(fresh / MODEL)
            self._write_state(fresh)
            _publish(fresh, path)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise

    def _write_model(self, path: Path) -> None:
        buffers = persistent_buffers(self._model)
        entries = [HeaderEntry.of(self._names[p], p) for part in self._access.parts for p in part]  # type: ignore[index]
        entries += [HeaderEntry.of(name, buffer) for name, buffer in buffers.items()]

        def tensors() -> Iterator[torch.Tensor | InBlocks]:
            for part in self._access.parts:
                if isinstance(part[0], TableWeight):
                    yield table_rows(part[0])
                else:
                    yield from self._access.read(part)
            for buffer in buffers.values():
                yield from self._access.read([buffer])

        shown = progress(tensors(), [each.nbytes for each in entries], "saving weights")
        write_file(path, entries, shown, {"format": "pt"})

    def _write_state(self, directory: Path) -> None:
        sources: Sources = {}
        document = {
            "format": _FORMAT,
            "optimizers": [
                self._describe(i, optimizer, sources) for i, optimizer in enumerate(self._optimizers)
            ],
        }
        entries = [HeaderEntry.of(name, tensor) for name, tensor in sources.items()]
        shown = progress(self._read_runs(sources), [each.nbytes for each in entries], "saving state")
        write_file(directory / STATE, entries, shown, {})
        with (directory / SCALARS).open("w", encoding="utf-8") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())

    def _describe(self, index: int, optimizer: torch.optim.Optimizer, sources: Sources) -> dict[str, object]:
        """Return an optimizer's state as JSON; its tensors are added to ``sources``."""
        return describe_optimizer(
            index,
            optimizer,
            self._in_order(optimizer),
            self._name,
            lambda value, name: encode(value, name, sources),
        )

    def _in_order(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return the parameters that have state, part by part."""
        known = [p for part in self._access.parts for p in part if p in optimizer.state]
        return known + [p for p in optimizer.state if p not in self._names]

    def _name(self, parameter: torch.Tensor) -> str:
        try:
            return self._names[parameter]  # type: ignore[index]
        except KeyError:
            raise not_in_the_model(parameter) from None

    def _read_runs(self, sources: Sources) -> Iterator[torch.Tensor | InBlocks]:
        """Read tensors; those that lie together are read together."""
        for tensor in sources.values():
            if isinstance(tensor, TableEntry):
                yield table_rows(tensor.weight, tensor.column)
            else:
                yield from self._access.read([tensor])

    # --- loading ------------------------------------------------------------------------------

    def load(self, path: Path) -> None:
        """Take everything over from a checkpoint.

        Raises:
            UsageError: it cannot be read or does not fit; every fault is listed, and nothing was changed.
        """
        document = _read_document(path / SCALARS)
        with TensorFile(path / MODEL) as weights, TensorFile(path / STATE) as state:
            found = self._check(weights)
            self._check_optimizers(document)
            _require_decodable(document, path / SCALARS, {name for name in state.names if state.dtype(name)})
            begin_load(tensor for part in self._access.parts for tensor in part)
            self._load_model(weights, found)
            for index, optimizer in enumerate(self._optimizers):
                self._load_optimizer(index, optimizer, document["optimizers"][index], state)

    def _check(self, weights: TensorFile) -> dict[str, str]:
        names = all_names(self._model)
        wanted: dict[str, torch.Tensor] = {each[0]: parameter for parameter, each in names.items()}
        wanted |= persistent_buffers(self._model)
        return check_names(weights, wanted, {each[0]: each[1:] for each in names.values()})

    def _check_optimizers(self, document: dict[str, Any]) -> None:
        saved = [[group["params"] for group in each["groups"]] for each in document["optimizers"]]
        mine = [parameters_by_group(optimizer, self._name) for optimizer in self._optimizers]
        if saved != mine:
            raise UsageError(
                "the checkpoint's optimizers do not train the same parameters in the same groups: "
                f"saved {_sizes(saved)} parameters a group, here {_sizes(mine)}."
            )

    def _load_model(self, weights: TensorFile, found: dict[str, str]) -> None:
        sizes = [sum(map(_nbytes, part)) for part in self._access.parts]
        for part in progress(self._access.parts, sizes, "loading weights"):
            if isinstance(part[0], TableWeight):
                load_rows(part[0], weights, found[self._names[part[0]]])
                continue
            values = [weights.read(found[self._names[p]]) for p in part]  # type: ignore[index]
            self._access.write(part, values)
        for name, buffer in persistent_buffers(self._model).items():
            self._access.write([buffer], [weights.read(found[name])])

    def _load_optimizer(
        self, index: int, optimizer: torch.optim.Optimizer, saved: dict[str, Any], file: TensorFile
    ) -> None:
        for group, entry in zip(optimizer.param_groups, saved["groups"], strict=True):
            for name, value in entry["options"].items():
                group[name] = decode(value, file.read)
        for part in self._access.parts:
            for parameter in part:
                name = self._names[parameter]  # type: ignore[index]
                if name in saved["state"]:
                    entries = saved["state"][name]
                    in_table = load_states(parameter, optimizer, file, entries)
                    optimizer.state[parameter] = {
                        key: in_table[key] if key in in_table else decode(value, file.read)
                        for key, value in entries.items()
                    }
                else:
                    optimizer.state.pop(parameter, None)
            self._access.settle(index, part)
        # The file's parts are in another order.
        order_entries(optimizer, [each for group in optimizer.param_groups for each in group["params"]])


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of what may have none here."""
    return tensor.shape.numel() * tensor.dtype.itemsize


def _read_document(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{str(path.parent)!r} is not a checkpoint: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(
            f"{str(path.parent)!r} is not a checkpoint: {path.name} is {quoted(document)}, no mapping."
        )
    if document.get("format") != _FORMAT:
        raise UsageError(
            f"{str(path)!r} has format {quoted(document.get('format'))}; this version reads {_FORMAT}."
        )
    if not _is_of_optimizers(document.get("optimizers")):
        raise UsageError(f"{str(path)!r} does not say of each optimizer what its groups and its state are.")
    return document


def _is_of_optimizers(value: object) -> bool:
    """Say whether a document's optimizers have the form that `describe_optimizer` gives them."""
    return isinstance(value, list) and all(
        isinstance(each, dict)
        and each.keys() == {"groups", "state"}
        and isinstance(each["groups"], list)
        and all(map(_is_group, each["groups"]))
        and isinstance(each["state"], dict)
        and all(isinstance(entries, dict) for entries in each["state"].values())
        for each in value
    )


def _is_group(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"params", "options"}
        and isinstance(value["params"], list)
        and all(isinstance(name, str) for name in value["params"])
        and isinstance(value["options"], dict)
    )


def _require_decodable(document: Mapping[str, Any], path: Path, tensors: Container[str]) -> None:
    """See to it that all of a document can be read, before any of it is.

    Raises:
        UsageError: not; what cannot is listed.
    """
    values = [
        (f"optimizer {index}, {where}, {named(name)}", value)
        for index, each in enumerate(document["optimizers"])
        for where, entries in (
            *((f"group {number}", group["options"]) for number, group in enumerate(each["groups"])),
            *((named(parameter), entries) for parameter, entries in each["state"].items()),
        )
        for name, value in entries.items()
    ]
    faults = [f"{what}: {why}" for what, value in values if (why := why_not_decodable(value, tensors))]
    if faults:
        raise UsageError(f"{str(path)!r} cannot be read: {listed(faults, show=str, separator='; ')}")


def _sizes(optimizers: Sequence[Sequence[Sequence[str]]]) -> list[list[int]]:
    return [[len(group) for group in groups] for groups in optimizers]


@in_one_piece
def _publish(fresh: Path, path: Path) -> None:
    """Put a finished directory in the place of a former one."""
    _sync(fresh)
    former = path.with_name(f".{path.name}.old-{os.getpid()}")
    shutil.rmtree(former, ignore_errors=True)  # of a save that was stopped here
    if path.exists():
        path.rename(former)
    fresh.rename(path)
    _sync(path.parent)
    shutil.rmtree(former, ignore_errors=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
