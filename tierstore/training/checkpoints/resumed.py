"""The checkpoint that a durable store holds, and how training goes on from it.

What is large lies in the store already: parameters and optimizer state are tied to the keys that hold
them, and nothing is read or written.  Where bundles are cut differently now, by another quota or another
optimizer, they are read one at a time and put anew.  The rest is in one document.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tierstore.config import OffloadConfig
from tierstore.errors import UsageError
from tierstore.formats.safetensors_files import unpack
from tierstore.nn.table_entry import TableEntry
from tierstore.nn.table_weight import TableWeight
from tierstore.store import Store
from tierstore.training.bundles.bindings import Binding
from tierstore.training.bundles.grouping import Content, Group, first_names
from tierstore.training.bundles.layout import lay_out
from tierstore.training.bundles.placeholders import has_no_values
from tierstore.training.bundles.poisons import poison_for
from tierstore.training.bundles.tensor_slots import memory_of, sharded_like
from tierstore.training.checkpoints.document import (
    DOCUMENT,
    FORMAT,
    KEPT,
    METADATA,
    PARTS,
    Bundles,
    HeldTensor,
    buffer_name,
    differences,
    group_differences,
    is_of_parameters,
    kind_of,
    look_of,
    looks,
    names_of,
    owner_of,
    parameter_name,
    parts_of,
    unfinished,
    with_parts,
)
from tierstore.training.formats import rng_state
from tierstore.training.formats.json_codec import decode, parameters_by_group
from tierstore.training.modules.tensor_names import persistent_buffers
from tierstore.training.optimizers.adapters import Taken
from tierstore.training.optimizers.state import OptimizerState, order_entries, state_key
from tierstore.training.tables.found_tables import tables_in
from tierstore.training.tables.kept_tables import (
    PREFIX,
    FormerTable,
    TableLook,
    map_key,
    snapshot_of,
    table_differences,
)

_ASIDE = "training/former/"
_OWN_KEYS = (*(f"{each.value}/" for each in Content), "state/", "grad/", "training/", PREFIX)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What training goes on from.

    Attributes:
        checkpoints: how many were made so far, in all runs together.
        extra: what the last `Offload.checkpoint` was given.
    """

    checkpoints: int
    extra: Mapping[str, Any]


def is_held(store: Store) -> bool:
    """Return whether a durable store holds training state, of a checkpoint or not.

    Raises:
        UsageError: it holds something else.
    """
    if DOCUMENT in store:
        return True
    if len(store) == 0:
        return False
    some = ", ".join(map(repr, store.keys()[:3]))
    raise UsageError(
        f"the directory holds {len(store)} keys ({some}{', ...' if len(store) > 3 else ''}) that are no "
        "checkpoint of training. Give training an offload_path of its own."
    )


def forget(store: Store) -> None:
    """Drop all training state: what is durable stays so until the next checkpoint."""
    store.drop(*(key for key in store if key.startswith(_OWN_KEYS)))


def found_in(
    settings: OffloadConfig, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Resumed | None:
    """Return what training would go on from in a durable directory, which is left as it was; or ``None``.

    Raises:
        UsageError: there is something else, or it does not fit.
    """
    store = Store(settings.store_config())
    try:
        return ResumedCheckpoint(store, model, optimizers).resumed if is_held(store) else None
    finally:
        store.close(flush=False)


class ResumedCheckpoint:
    """The checkpoint that a store holds.

    Args:
        store: that holds it.
        model, optimizers: that go on from it.

    Raises:
        UsageError: what it holds is not one checkpoint, or of another version of tierstore; or it is of
            another model or other optimizers: every difference is listed.
    """

    def __init__(self, store: Store, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._store = store
        self._model = model
        flat = store.get(DOCUMENT, device="cpu")
        if torch.equal(flat, unfinished()):
            raise UsageError(
                "the store was flushed or closed as a whole between checkpoints: its parameters and "
                "optimizer state are not those of one moment. Leave flushing to run.checkpoint(); "
                "offload(..., resume=False) starts over."
            )
        self._tensors, metadata = unpack(flat)
        self._document: dict[str, Any] = json.loads(metadata.get(METADATA, "{}"))
        if self._document.get("format") != FORMAT:
            raise UsageError(
                f"the checkpoint has format {self._document.get('format')!r}; this version reads {FORMAT}."
            )
        bundles: Bundles = {
            key: [HeldTensor.from_json(each) for each in held]
            for key, held in self._document["bundles"].items()
        }
        self._key_of = {
            (owner_of(key), held.parameter, held.entry): (key, held.place)
            for key, each in bundles.items()
            for held in each
        }
        self._state_bytes: Counter[tuple[int | None, str]] = Counter()
        for (owner, parameter, _), (_, place) in self._key_of.items():
            self._state_bytes[owner, parameter] += place.nbytes
        self._bundles = bundles
        self._ignored = {name: parameter_name(name) for name in self._document.get("ignored", ())}
        self._travelling: Mapping[str, str] = self._document.get("travelling", {})
        self._tables = {name: TableLook(**look) for name, look in self._document.get("tables", {}).items()}
        self._bound: set[str] = set()
        self._last: tuple[str, torch.Tensor] | None = None
        missing = [key for key in (*bundles, *map(map_key, self._tables)) if key not in store]
        if missing:
            raise UsageError(f"the checkpoint is not whole: the store lacks {', '.join(map(repr, missing))}.")
        self._check(model, optimizers)

    @property
    def checkpoints(self) -> int:
        """How many were made until this one, in all runs together."""
        count: int = self._document["checkpoints"]
        return count

    @property
    def kept(self) -> Mapping[str, str]:
        """See `CheckpointWriter.kept`."""
        return names_of(self._bundles) | {name: map_key(name) for name in self._tables}

    @property
    def resumed(self) -> Resumed:
        """What the caller is told."""
        extra = decode(self._document["extra"], self._read_small)
        assert isinstance(extra, dict)
        return Resumed(self.checkpoints, extra)

    def _read_small(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    # --- does it fit? -------------------------------------------------------------------------

    def _check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        parameters = dict(model.named_parameters())
        saved, mine = self._parameters(), looks({name: memory_of(each) for name, each in parameters.items()})
        if PARTS in self._document:  # not, if a former version has written it
            saved = with_parts(saved, self._document[PARTS])
            mine = with_parts(mine, parts_of(parameters))
        faults = [
            *differences("parameter", saved, mine),
            *table_differences(self._tables, tables_in(model)),
            *differences("buffer", self._buffers(), looks(persistent_buffers(model))),
            *self._buffers_without_values(model),
            *self._optimizer_faults(model, optimizers),
        ]
        if faults:
            raise UsageError(
                f"the checkpoint does not fit what is to be trained: {'; '.join(faults)}. Nothing was "
                "changed: build what was trained before, or start over with offload(..., resume=False)."
            )

    def _parameters(self) -> dict[str, str]:
        ignored = looks({name: self._tensors[entry] for name, entry in self._ignored.items()})
        tables = {name: look_of(each.shape, each.torch_dtype) for name, each in self._tables.items()}
        return (ignored | tables) | {
            held.parameter: look_of(held.place.shape, held.place.dtype)
            for key, each in self._bundles.items()
            for held in each
            if is_of_parameters(key)
        }

    def _buffers(self) -> dict[str, str]:
        held = {name: self._key_of[None, first, ""][1] for name, first in self._travelling.items()}
        ordinary = {name: self._tensors[buffer_name(name)] for name in self._document["buffers"]}
        return looks(ordinary) | {name: look_of(place.shape, place.dtype) for name, place in held.items()}

    def _buffers_without_values(self, model: nn.Module) -> Iterator[str]:
        known = {*self._document["buffers"], *self._travelling}
        for name, buffer in model.named_buffers():
            if has_no_values(buffer) and name not in known:
                yield f"the buffer {name} has no values, and the checkpoint has none for it"

    def _optimizer_faults(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Iterator[str]:
        saved = self._document["optimizers"]
        if len(saved) != len(optimizers):
            yield f"{len(saved)} optimizers were saved, there are {len(optimizers)}"
            return
        names: Mapping[Any, str] = first_names(model)
        for index, (entry, optimizer) in enumerate(zip(saved, optimizers, strict=True)):
            if entry["kind"] != kind_of(optimizer):
                yield f"optimizer {index} is {kind_of(optimizer)}, saved was {entry['kind']}"
            mine = parameters_by_group(optimizer, lambda p: names.get(p, "one that is not in the model"))
            former = [group["params"] for group in entry["groups"]]
            yield from group_differences(index, former, mine)

    # --- parameters ---------------------------------------------------------------------------

    def tables(self) -> dict[str, FormerTable]:
        """Return where the rows of tables are, by the tables' names."""
        return {
            name: FormerTable(
                snapshot_of(name, look, self._store.get(map_key(name), device="cpu")), look.seed
            )
            for name, look in self._tables.items()
        }

    def table_looks(self) -> Mapping[str, TableLook]:
        """Return what tables are, by their names."""
        return self._tables

    def state_bytes(self, index: int, parameters: Sequence[str]) -> int:
        """Return the bytes of state that an optimizer has for some parameters."""
        return sum(self._state_bytes[index, parameter] for parameter in parameters)

    def prepare(self, groups: Sequence[Group]) -> None:
        """Find out which bundles are cut as they were; put the others out of the way of new keys.

        Args:
            groups: how parameters travel now.
        """
        for group in groups:
            places, _ = lay_out(zip(group.names, group.tensors, strict=True))
            if [held.place for held in self._bundles.get(group.key, ())] == list(places):
                self._bound.add(group.key)
            for index in range(len(self._document["optimizers"])):
                key = state_key(index, group.key)
                expected = list(self._entries_in_store(index, group.names))
                is_new = any(name in self._ignored for name in group.names)
                held = [(each.parameter, each.entry) for each in self._bundles.get(key, ())]
                if expected and not is_new and expected == held:
                    self._bound.add(key)
        aside = {key: _ASIDE + key for key in self._bundles if key not in self._bound}
        if aside:
            self._store.rename(aside)
        self._key_of = {wanted: (aside.get(key, key), place) for wanted, (key, place) in self._key_of.items()}

    def _entries_in_store(self, index: int, parameters: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield which of an optimizer's entries for some parameters are in bundles, in their order."""
        state = self._document["optimizers"][index]["state"]
        for parameter in parameters:
            for entry in state.get(parameter, {}):
                if (index, parameter, entry) in self._key_of:
                    yield parameter, entry

    def has_bundle(self, key: str) -> bool:
        """Return whether the bytes of a bundle are under its key already."""
        return key in self._bound

    def read(self, parameter: str) -> torch.Tensor:
        """Return the values of a parameter or buffer whose bundle was cut differently.  Reads that bundle."""
        if parameter in self._ignored:
            return self._tensors[self._ignored[parameter]]
        if parameter in self._document["buffers"]:
            return self._tensors[buffer_name(parameter)]
        return self._read(None, self._travelling.get(parameter, parameter), "")

    def _read(self, owner: int | None, parameter: str, entry: str) -> torch.Tensor:
        key, place = self._key_of[owner, parameter, entry]
        if self._last is None or self._last[0] != key:
            self._last = (key, self._store.get(key, device="cpu"))
        return place.view(self._last[1])

    # --- the rest -----------------------------------------------------------------------------

    def load_buffers(self, travelling: Container[torch.Tensor]) -> None:
        """Give the persistent buffers their values, but those that travel."""
        for path, module in self._model.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                full = f"{path}.{name}" if path else name
                is_known = full in self._document["buffers"] or full in self._travelling
                if buffer in travelling or not is_known:
                    continue
                values = self.read(full)
                if buffer.is_meta:
                    setattr(module, name, values.clone())
                else:
                    with torch.no_grad():
                        buffer.copy_(values)

    def give_optimizer(
        self,
        kept: OptimizerState,
        origins: Mapping[torch.Tensor, torch.device],
        ignored: Mapping[torch.Tensor, str],
    ) -> None:
        """Give an optimizer its options and state.

        Args:
            kept: the state of the optimizer.
            origins: where each parameter goes in the end; its state goes there too.
            ignored: parameters that are in no bundle, with their names.
        """
        saved = self._document["optimizers"][kept.index]
        optimizer = kept.optimizer
        for group, entry in zip(optimizer.param_groups, saved["groups"], strict=True):
            for name, value in entry["options"].items():
                group[name] = self._decode(value)
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)
        for bundle in kept.bundles():
            self._give_state(kept, bundle, saved["state"], origins)
        for parameter, name in ignored.items():
            if name in saved["state"]:
                optimizer.state[parameter] = {
                    entry: self._own_value(kept.index, parameter, name, entry, value)
                    for entry, value in saved["state"][name].items()
                }
        parameter_of = {name: parameter for parameter, name in first_names(self._model).items()}
        order_entries(optimizer, [parameter_of[name] for name in saved["state"]])  # that it had
        self._last = None

    def _give_state(
        self,
        kept: OptimizerState,
        bundle: Binding,
        saved: Mapping[str, Mapping[str, object]],
        origins: Mapping[torch.Tensor, torch.device],
    ) -> None:
        key = state_key(kept.index, bundle.key)
        named = {place.name: p for p, place in zip(bundle.tensors, bundle.places, strict=True)}
        bound_on = bundle.device if key in self._bound else None
        for name, parameter in named.items():
            if name in saved:
                kept.optimizer.state[parameter] = {
                    entry: _as_part_of(parameter, self._state_value(kept.index, name, entry, value, bound_on))
                    for entry, value in saved[name].items()
                }
        self._last = None
        if key in self._bound:
            held = self._bundles[key]
            owners = [named[each.parameter] for each in held]
            tensors = [kept.optimizer.state[p][each.entry] for p, each in zip(owners, held, strict=True)]
            kept.bind(bundle, [each.place for each in held], tensors, [origins[owner] for owner in owners])
        else:
            kept.take_in_loaded(bundle, Taken.ALL)

    def _state_value(
        self, index: int, parameter: str, entry: str, value: object, bound_on: torch.device | None = None
    ) -> object:
        """Return an entry of a parameter's state; without bytes, if those are under the right key.

        Args:
            index: of the optimizer.
            parameter: whose.
            entry: its name.
            value: as it is in the document.
            bound_on: where it is while its bytes are away; ``None``: they are under another key.
        """
        found = self._key_of.get((index, parameter, entry))
        if found is None:
            return self._decode(value)
        if bound_on is None:
            return self._read(index, parameter, entry)
        poison = poison_for(found[1], bound_on)
        return poison.as_strided(poison.size(), poison.stride())

    def _own_value(self, index: int, parameter: torch.Tensor, name: str, entry: str, value: object) -> object:
        """Return an entry of the state of a parameter that is ignored now: a tensor of its own."""
        if isinstance(parameter, TableWeight) and isinstance(value, dict) and "column" in value:
            return TableEntry.of(parameter, value["column"])
        found = self._state_value(index, name, entry, value)
        if isinstance(found, torch.Tensor) and found.dim():
            return found.to(parameter.device, copy=True)
        return found

    def _decode(self, value: object) -> object:
        """Decode a value; what was on an accelerator goes to the one that there is, or to the CPU."""
        if isinstance(value, dict) and value.get("device", "cpu") != "cpu":
            value = {**value, "device": str(self._store.device)}
        return decode(value, self._read_small)

    def end(self) -> None:
        """Everything was taken over: forget what is of no more use, and go on with random numbers."""
        self._last = None
        kept = {*self._bound, DOCUMENT}
        former = {key for key, _ in self._key_of.values()}
        former |= {key for key in self._store if key.startswith(KEPT)}  # of a process among several
        self._store.drop(*(former - kept))
        rng_state.restore(self._document["rng"], self._tensors, self._store.device)


def _as_part_of(parameter: torch.Tensor, value: object) -> object:
    """Return an entry of state as an optimizer keeps it: for a sharded parameter, as a part as it is one."""
    memory = memory_of(parameter)
    is_part = memory is not parameter and isinstance(value, torch.Tensor) and value.dim() > 0
    return sharded_like(parameter, value) if is_part and isinstance(value, torch.Tensor) else value
