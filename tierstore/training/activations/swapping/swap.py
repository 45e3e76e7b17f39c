"""Saved activations that leave the device between forward and backward: ``swap(model, config)``.

PyTorch's own module hooks say when the model and its marked parts run; nothing is set on the user's modules,
and `Swap.close` removes every hook.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from tierstore import forks
from tierstore.config import OffloadConfig
from tierstore.errors import UsageError
from tierstore.stats import StoreStats, plain_values
from tierstore.store import Store
from tierstore.training.activations.config import config_log
from tierstore.training.activations.config.layers import Names, find_layers
from tierstore.training.activations.config.operator_names import NOT_RUN, why_idle
from tierstore.training.activations.config.plan import plan_layers
from tierstore.training.activations.config.sections import SECTIONS, Sections, read_sections, sections_of
from tierstore.training.activations.config.swap_config import SwapConfig
from tierstore.training.activations.runtime.activation_runtime import ActivationRuntime
from tierstore.training.activations.runtime.forward_conditions import is_saving
from tierstore.training.activations.runtime.module_calls import CallStack, hook_inside
from tierstore.training.activations.swapping.activation_stats import ActivationStats
from tierstore.training.activations.swapping.activation_store import ActivationStore
from tierstore.training.activations.swapping.forward_pass import ForwardPass, Unpacker
from tierstore.training.activations.swapping.marks import Marks, mark
from tierstore.training.activations.swapping.operator_watch import (
    UNMARKED,
    MarkedCall,
    MarkScope,
    Operator,
)
from tierstore.training.autograd.accumulation import is_in_backward
from tierstore.training.budgets.memory_meters import tensors_in
from tierstore.training.bundles.bundle_tiers import named_by_settings

log = logging.getLogger("tierstore")

Config = SwapConfig | Mapping[str, object] | str | Path


@dataclass(frozen=True, slots=True)
class SwapStats:
    """What was swapped so far.

    Attributes:
        activations: what was kept, released and brought back.
        store: the store's own counts.
        passes: forward passes that were watched.
        operators: that ran in them, views left out.
        triggers: nodes of backward graphs that begin to bring something back.
    """

    activations: ActivationStats
    store: StoreStats
    passes: int
    operators: int
    triggers: int

    def as_dict(self) -> dict[str, Any]:
        """Return what ``dataclasses.asdict`` does, in words that JSON has: see `StoreStats.as_dict`."""
        told: dict[str, Any] = plain_values(self)
        return told


class Swap:
    """A model whose marked activations are swapped.  A context manager; `close` does the same.

    Made by `swap`.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: ActivationRuntime,
        marks: Marks,
        activation_store: ActivationStore | None,
        *,
        owns_store: bool,
    ) -> None:
        self._activation_store = activation_store
        self._owns_store = owns_store
        self._is_closed = False
        self._process = forks.here()
        self._hooks = None if activation_store is None else SwapHooks(model, runtime, marks, activation_store)
        if self._hooks is not None:
            self._hooks.register()

    @property
    def store(self) -> Store:
        """The store that activations go to.

        Raises:
            UsageError: ``swap`` is false: there is none.
        """
        return self._kept().store

    def stats(self) -> SwapStats:
        """Return what was swapped so far.

        Raises:
            UsageError: ``swap`` is false: nothing is counted.
        """
        activation_store, hooks = self._kept(), self._hooks
        assert hooks is not None
        return SwapStats(
            activation_store.stats,
            activation_store.store.stats(),
            hooks.passes,
            hooks.operators,
            hooks.triggers,
        )

    def _kept(self) -> ActivationStore:
        if self._activation_store is None:
            raise UsageError("nothing is swapped: set swap to true in the configuration.")
        return self._activation_store

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Swap nothing of what this thread saves for backward inside the context: as plain PyTorch keeps it.

        It may be around passes of the model or inside one, around a part of its forward.  What was saved
        before stays swapped, and backward brings it back inside the context as outside.  Contexts nest; other
        threads go on swapping.  What is recomputed is recomputed.
        """
        with contextlib.nullcontext() if self._hooks is None else self._hooks.paused():
            yield

    def close(self) -> None:
        """Remove every hook, and close the store if it is the swap's own.  Idempotent.

        Graphs whose activations are in a store that is closed can run backward no more.  In the child of a
        fork it does nothing: the store is the parent's.
        """
        if (
            self._is_closed
            or self._hooks is None
            or self._activation_store is None
            or self._process is not forks.here()
        ):
            return
        self._is_closed = True
        self._hooks.remove()
        self._activation_store.sweep()
        if self._owns_store:
            self._activation_store.store.close()

    def __enter__(self) -> Self:
        """Return the swap itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def swap(model: nn.Module, config: Config, *, layers: Names = None, store: Store | None = None) -> Swap:
    r"""Let saved activations of ``model`` leave the device after forward and come back ahead of backward.

    What is saved for backward and is an output of a marked operator becomes a key of a store: it is copied
    down at once, its device memory is given up ``3 * backward_prefetch`` operators later (or when the
    model's forward ends, or when the device's quota demands it), and it begins to come back
    ``backward_prefetch`` nodes of the backward graph before its first use.  Inputs and parameters stay.
    Losses and gradients are bit for bit those without.

    Args:
        model: whose own forward begins each pass; layers that are called alone are not swapped.
        config: a `SwapConfig`; a mapping of its keys; or a mapping or the path of a YAML file with the
            section ``swap_config``, and ``offload_config`` and ``context`` for the store.  What
            ``recompute_config`` says is logged and looked at for conflicts; ``recompute`` applies it.
        layers: names of the containers of the model's layers, such as ``"model.layers"``; ``None``: the
            only ``nn.ModuleList`` or ``nn.Sequential`` of like modules.
        store: where activations go; ``None``: one of the swap's own, which `Swap.close` closes.

    Raises:
        ConfigError: the configuration is wrong, or does not fit the model or this machine.
        UsageError: the layers are not found, or the store has no tier below the device.
    """
    sections, offloading = _read(config)
    found = find_layers(model, layers)
    layout: Mapping[str, Any] = sections.layout
    plan = plan_layers(sections.recompute, sections.swap, num_layers=len(found), **layout)
    marks = mark(list(found.values()), plan)
    config_log.say(plan, marks.matches)
    warn_of_idle(marks)
    if not plan.swap.swap:
        return Swap(model, ActivationRuntime.new(), marks, None, owns_store=False)
    kept = Store(named_by_settings(offloading.store_config())) if store is None else store
    try:
        check_tiers(kept)
        return Swap(model, ActivationRuntime.new(), marks, ActivationStore(kept), owns_store=store is None)
    except BaseException:
        if store is None:
            kept.close()
        raise


def _read(config: Config) -> tuple[Sections, OffloadConfig]:
    if isinstance(config, SwapConfig):
        return Sections(swap=config), OffloadConfig()
    if isinstance(config, str | Path):
        return read_sections(config), OffloadConfig.from_yaml(config)
    if any(key in config for key in SECTIONS):
        return sections_of(config), OffloadConfig.from_document(config)
    return Sections(swap=SwapConfig.from_mapping(config)), OffloadConfig()


def warn_of_idle(marks: Marks) -> None:
    """Log patterns that mean nothing."""
    for pattern in marks.idle:
        why = why_idle(pattern, in_place=True)
        if why is None:
            log.warning(
                "op_swap '%s' means nothing in any of its layers: nothing is swapped for it", pattern.text
            )
        else:
            log.warning("op_swap '%s' swaps nothing: %s", pattern.text, why)


def check_tiers(store: Store) -> None:
    """Raise ``UsageError`` if there is no tier that activations could go to."""
    if store.can_adopt and len(store.tier_names) < 2:
        raise UsageError(
            f"the store has no tier below {store.tier_names[0]!r} that activations could go to. Give it host "
            "memory: offload_cpu_size.",
            tier=store.tier_names[0],
        )


# ---------------------------------------------------------------------- hooks


class _SwapPauses(threading.local):
    """In how many contexts this thread is in which nothing is swapped, one inside another."""

    def __init__(self) -> None:
        self.count = 0


class SwapHooks:
    """The hooks of one model, and the forward pass of each thread.

    Args:
        model: whose.
        runtime: of the model.
        marks: in it.
        activation_store: where activations go.

    Attributes:
        passes, operators, triggers: see `SwapStats`.
    """

    def __init__(
        self, model: nn.Module, runtime: ActivationRuntime, marks: Marks, activation_store: ActivationStore
    ) -> None:
        self.model = model
        self.passes = self.operators = self.triggers = 0
        self._runtime = runtime
        self._calls = runtime.calls
        self._marks = marks
        self._activation_store = activation_store
        self._unpacker = Unpacker(activation_store)
        self._pauses = _SwapPauses()
        self._has_looked_back = False
        self._handles: list[RemovableHandle] = []

    def register(self) -> None:
        """Hook them to the model; nothing if nothing is marked."""
        if not self._marks.layers:
            return
        # Inside every other hook that is there: what others put into force for the model stays around ours.
        self._handles += hook_inside(self.model, self._before, self._after)
        for module, scopes in self._marks.scopes.items():
            marked = _MarkedHooks(self._calls, scopes, is_layer=module in self._marks.layers)
            self._handles += hook_inside(module, marked.enter, marked.leave)

    def remove(self) -> None:
        """Leave nothing on the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._runtime.discard_interrupted()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let whatever this thread saves inside the context stay."""
        self._pauses.count += 1
        try:
            yield
        finally:
            self._pauses.count -= 1

    def _is_paused(self) -> bool:
        return self._pauses.count > 0

    def _before(self, *_: object) -> None:
        """The model begins to run, maybe inside itself: that is one pass."""
        self._runtime.discard_interrupted()
        self._activation_store.sweep()
        current = self._calls.last(ForwardPass)
        if current is not None:
            self._calls.begin(self, current)
        elif not self._is_paused() and is_saving():
            own = frozenset(map(id, (*self.model.parameters(), *self.model.buffers())))
            find = functools.partial(_scope_in, self._calls)
            current = ForwardPass(
                self._activation_store, self._unpacker, self._runtime, own, find, self._is_paused
            )
            current.begin()
            self._calls.begin(self, current, functools.partial(self._end, current))
            self.passes += 1

    def _after(self, module: nn.Module, args: object, output: object) -> None:
        """The model has run, well or badly."""
        del module, args
        current = self._calls.end(self, ForwardPass)
        if current is None or self._calls.last(ForwardPass) is current:
            return
        try:
            if output is not None:
                current.finish(list(tensors_in((output,))))
                self._look_back()
        finally:
            self._end(current)

    def _look_back(self) -> None:
        """Say after the first pass which of the operators that are to be swapped did not run in it."""
        if not self._has_looked_back:
            self._has_looked_back = True
            for pattern in self._marks.named:
                if pattern not in self._marks.met:
                    log.warning("op_swap '%s' swaps nothing: %s", pattern.text, NOT_RUN)

    def _end(self, current: ForwardPass) -> None:
        current.end()
        self.operators += current.operators
        self.triggers += current.triggers.made


def _scope_in(calls: CallStack, operator: Operator) -> MarkScope | None:
    """Return what an operator is marked by that runs now."""
    return (calls.last(MarkedCall) or UNMARKED).find(operator)


class _MarkedHooks:
    """What the hooks of a module of the model do that is marked, or has to be told apart from those that are.

    Args:
        calls: of the model.
        scopes: of the module.
        is_layer: whether what is swapped in it may come back before backward has reached what is behind it.
    """

    def __init__(self, calls: CallStack, scopes: Sequence[MarkScope], *, is_layer: bool) -> None:
        self._calls = calls
        self._scopes = tuple(scopes)
        self._is_layer = is_layer

    def enter(self, *_: object) -> None:
        """The module begins to run."""
        self._calls.discard_interrupted()
        if self._calls.last(ForwardPass) is not None and not is_in_backward():
            outer = self._calls.last(MarkedCall) or UNMARKED
            self._calls.begin(self, outer.within(self._scopes))

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        """The module has run, well or badly."""
        del module, args
        is_marked = self._calls.end(self, MarkedCall) is not None
        current = self._calls.last(ForwardPass)
        if is_marked and current is not None and self._is_layer and output is not None:
            current.walk(tensors_in((output,)))
