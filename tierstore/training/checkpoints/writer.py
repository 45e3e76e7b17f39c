"""``run.checkpoint()``: the state of training becomes durable where it lies.

1. Parameters, large buffers and optimizer state are keys of the store: those bytes that the durable tier has
   already are not written again.  Everything else (options, scalars, small buffers, ignored parameters with
   their state, random number generators, what the caller adds) is one document under a key of its own.
2. All of it is one flush of exactly these keys: a crash leaves this checkpoint or the former one.
   Gradients, and steps that are made ahead, are no part of it.
3. Between checkpoints the document's key holds a mark in its place.  So a flush of the whole store, which
   would make parameters durable without what belongs to them, leaves nothing that could be taken for a
   checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from tierstore.errors import UsageError
from tierstore.formats.safetensors_files import HeaderEntry, pack
from tierstore.nn.table_entry import TableEntry
from tierstore.progress import polled
from tierstore.store import Store
from tierstore.training.bundles.bindings import Binding, Bindings
from tierstore.training.bundles.pinning import all_unpinned
from tierstore.training.checkpoints.agreement import Agreement, Attempt, OneProcess
from tierstore.training.checkpoints.document import (
    DOCUMENT,
    FORMAT,
    METADATA,
    PARTS,
    TABLE_KEYS,
    Bundles,
    HeldTensor,
    buffer_name,
    kind_of,
    names_of,
    parameter_name,
    parts_of,
    unfinished,
)
from tierstore.training.faults import guard
from tierstore.training.formats import rng_state
from tierstore.training.formats.json_codec import Sources, describe_optimizer, encode, not_in_the_model
from tierstore.training.modules.buffers import TravelingBuffers
from tierstore.training.modules.hooks import ModuleWindows
from tierstore.training.modules.tensor_names import persistent_buffers
from tierstore.training.optimizers.step_units import Steps
from tierstore.training.tables.run_tables import RunTables, TablesToKeep


class CheckpointWriter:
    """Makes the state of one model's training durable.

    Args:
        model: that is trained.
        store: durable.
        bindings: of the model.
        windows: of its modules.
        bundles: of its parameters.
        steps: of its optimizers.
        ignored: parameters that are none of the store's, and tables, with their names.
        buffers: of the model.
        tables: of the model.

    Attributes:
        agreement: with other processes.
        checkpoints: how many were made so far, in all runs.
        kept: what the last one has: the key of each tensor in bundles, by what messages call the tensor.
        seconds: how long those of this run took.
    """

    def __init__(  # noqa: PLR0913 - each is a part of a checkpoint
        self,
        model: nn.Module,
        store: Store,
        bindings: Bindings,
        windows: ModuleWindows,
        bundles: Sequence[Binding],
        steps: Sequence[Steps],
        ignored: Mapping[torch.Tensor, str],
        buffers: TravelingBuffers,
        *,
        tables: RunTables,
    ) -> None:
        self.agreement: Agreement = OneProcess()
        self._buffers = buffers
        self._model = model
        self._store = store
        self._bindings = bindings
        self._windows = windows
        self._bundles = bundles
        self._steps = steps
        self._ignored = ignored
        self._tables = tables
        self.kept: Mapping[str, str] = {}
        self.checkpoints = 0
        self.seconds = 0.0
        self.mark()

    @property
    def directory(self) -> str:
        """Where checkpoints are, as messages say it."""
        path = self._store.config.tiers[-1].options.get("path")
        paths = path if isinstance(path, list | tuple) else [path]
        return " and ".join(repr(str(Path(str(each)).absolute())) for each in paths)

    def mark(self) -> None:
        """Let the document's key say that the state changes."""
        with self._bindings.apart():
            self._store.put(DOCUMENT, unfinished(), replace=True)

    def commit(self, extra: Mapping[str, object]) -> None:
        """Make everything as it is now durable.  Blocks until it would survive a power loss.

        Args:
            extra: see `tierstore.training.Offload.checkpoint`.

        Raises:
            UsageError: a step or the model is under way, something refers to the bytes of a parameter, or
                ``extra`` is no mapping, or a value cannot be kept.
            TierStoreError: another process could not make it.
            CapacityError, BackendError: as from `Store.flush`; the former checkpoint is unharmed.
        """
        begin = time.perf_counter()
        shown = polled("making a checkpoint", self._written_bytes)
        with self.agreement.attempt(self.checkpoints) as attempt, shown:
            bundles = self._commit(extra, attempt)
        self.kept = names_of(bundles) | self._tables.kept()
        self.checkpoints += 1
        with self._bindings.apart():
            self.agreement.forget_former()
        self.seconds += time.perf_counter() - begin

    def _written_bytes(self) -> int:
        """Return what copies have brought to the tier that checkpoints are in."""
        last = self._store.tier_names[-1]
        traffic = self._store.stats().traffic
        return sum(moved.nbytes for (_, target), moved in traffic.items() if target == last)

    def _commit(self, extra: Mapping[str, object], attempt: Attempt) -> Bundles:
        _require_mapping(extra)
        self._windows.discard_interrupted()
        if not self._windows.is_outermost:
            raise UsageError("the model runs: make a checkpoint between steps.")
        for steps in self._steps:
            steps.require_whole()
        with self._tables.held(), self._bindings.alone(), all_unpinned(self._bindings):
            self._require_idle()
            for steps in self._steps:
                steps.state.take_in_all()
            bundles = self._held()
            tables = self._tables.begin_checkpoint([steps.optimizer for steps in self._steps])
            document = self._document(bundles, extra, attempt, tables)
            try:
                self._store.put(DOCUMENT, document, tier=self._store.tier_names[-1], replace=True)
                self._store.flush(
                    DOCUMENT, *bundles, *tables.keys, keep=attempt.keep, release=attempt.release
                )
                self._tables.end_checkpoint(tables)
            finally:
                self.mark()
        return bundles

    def _all(self) -> Iterator[Binding]:
        yield from self._bundles
        yield from self._buffers
        for steps in self._steps:
            yield from steps.state.bindings.values()

    def _require_idle(self) -> None:
        """Raise if anything but the store has a hand on the bytes: it may write, unseen, at any moment."""
        if busy := self._bindings.busy(list(self._all())):
            names = ", ".join(repr(binding.places[0].name) for binding in busy[:3])
            raise UsageError(
                f"the bytes of {len(busy)} bundles are in use ({names}{', ...' if len(busy) > 3 else ''}): "
                "something refers to them, such as p.data, p.detach() or a pass of the model in another "
                "thread. Make a checkpoint between steps, and let go of such references first.",
                key=busy[0].key,
            )

    # --- what there is ------------------------------------------------------------------------

    def _held(self) -> Bundles:
        """Return what is in which key."""
        held: Bundles = {
            bundle.key: [HeldTensor(place.name, "", place) for place in bundle.places]
            for bundle in (*self._bundles, *self._buffers.kept())
        }
        for steps in self._steps:
            for bundle, state in steps.state.bindings.items():
                entries = steps.state.of(bundle)
                held[state.key] = [
                    HeldTensor(self._name(parameter), entry, place)
                    for (parameter, entry), place in zip(entries, state.places, strict=True)
                ]
        return held

    def _document(
        self, bundles: Bundles, extra: Mapping[str, object], attempt: Attempt, tables: TablesToKeep
    ) -> torch.Tensor:
        for name, parameter in self._model.named_parameters():
            if guard.guarded_tensor_of(parameter) is None and parameter not in self._ignored:
                raise UsageError(f"the parameter {name!r} is new since offload(...): it is not in the store.")
        all_buffers = persistent_buffers(self._model)
        travelling = {
            name: guarded_tensor.place.name
            for name, buffer in all_buffers.items()
            if (guarded_tensor := guard.guarded_tensor_of(buffer)) is not None
        }
        buffers = {name: buffer for name, buffer in all_buffers.items() if name not in travelling}
        sources: Sources = {buffer_name(name): buffer for name, buffer in buffers.items()}
        ignored = {p: name for p, name in self._ignored.items() if p not in self._tables}
        sources |= {parameter_name(name): parameter for parameter, name in ignored.items()}
        document = {
            "format": FORMAT,
            "checkpoints": self.checkpoints + 1,
            PARTS: parts_of(dict(self._model.named_parameters())),
            "bundles": {key: [each.to_json() for each in held] for key, held in bundles.items()},
            "buffers": list(buffers),
            "travelling": travelling,
            "ignored": list(ignored.values()),
            "tables": self._tables.described(),
            TABLE_KEYS: list(tables.keys),
            "optimizers": [self._describe(steps, sources) for steps in self._steps],
            "rng": rng_state.save(self._store.device, sources),
            "extra": encode(dict(extra), "extra", sources),
        }
        document |= attempt.ready()
        entries = [HeaderEntry.of(name, tensor) for name, tensor in sources.items()]
        return pack(entries, sources.values(), {METADATA: json.dumps(document)})

    def _describe(self, steps: Steps, sources: Sources) -> dict[str, object]:
        optimizer, index = steps.optimizer, steps.state.index
        held = {
            f"{index}/{self._name(parameter)}/{entry}": state.key
            for bundle, state in steps.state.bindings.items()
            for parameter, entry in steps.state.of(bundle)
        }

        def encode_one(value: object, name: str) -> object:
            if name in held:
                return {"bundle": held[name]}
            if isinstance(value, TableEntry):
                return {"column": value.column}
            is_guarded = isinstance(value, torch.Tensor) and guard.guarded_tensor_of(value) is not None
            return encode(value.clone() if is_guarded else value, name, sources)  # type: ignore[attr-defined]

        described = describe_optimizer(index, optimizer, optimizer.state, self._name, encode_one)
        return {"kind": kind_of(optimizer), **described}

    def _name(self, parameter: torch.Tensor) -> str:
        guarded_tensor = guard.guarded_tensor_of(parameter)
        if guarded_tensor is not None:
            return guarded_tensor.place.name
        if parameter in self._ignored:
            return self._ignored[parameter]
        raise not_in_the_model(parameter)


def _require_mapping(extra: object) -> None:
    if not isinstance(extra, Mapping):
        raise UsageError(
            f"run.checkpoint({extra!r:.80}) is given a {type(extra).__name__}; accepted is a mapping of text "
            "to numbers, text, tensors, and lists, tuples and dicts of these, such as {'step': 100}."
        )
