"""A whole run off the device and back: ``run.suspend()`` and ``run.resume()``.

While another model uses the device, nothing of a suspended run is there, and nothing comes there by accident.

1. Suspending empties tiers: their quota is 0 until the run is resumed, so that no byte of the store can be in
   them.  What is pinned goes, too, and so do gradients and buffers that are ordinary tensors, and rows of
   tables.
   Ignored parameters stay where they are, with their gradients and state; so do gradients that somebody else
   refers to, and graphs.  The log names them.
2. A suspended run can be looked at, saved, made durable, and closed; gradients can be zeroed.  Whatever
   needs bytes where computing happens raises: calling the model, a backward pass that needs a weight or
   accumulates, a step, an operation on a parameter, a use of a table's rows.  A graph that was there goes on
   after the run is resumed.
3. It is done between steps: not while a module, a backward pass or an optimizer runs, nor while swapped
   activations wait for backward, nor while something refers to the bytes of a bundle.
4. If it cannot be done, all is as it was: what is known beforehand is refused before anything moves, and
   after a failure the quotas are what they were, and every byte is somewhere.
5. Resuming gives the quotas back, brings what is pinned, and begins to bring what was there before.  Tables
   keep rows on the device again as batches look them up.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Iterator, Sequence

import torch

from tierstore.errors import CapacityError, KeyNotFound, TierStoreError, UsageError
from tierstore.planning.rules import DISK, HOST
from tierstore.training.autograd.accumulation import is_in_backward
from tierstore.training.autograd.gradient import native_gradient, nbytes_of
from tierstore.training.bundles.bindings import Binding, set_data
from tierstore.training.bundles.leasing import LeasingState
from tierstore.training.bundles.pinning import pin, unpin_all
from tierstore.training.modules.buffers import ordinary_buffers
from tierstore.training.optimizers.step_units import runs_of_step
from tierstore.training.session import Session
from tierstore.units import format_bytes

log = logging.getLogger("tierstore")

_ACTIVATIONS = "activation/"


class Suspension:
    """Takes one session off the device, and back.

    Args:
        session: whose.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._store = session.store
        self._bindings = session.bindings
        self._emptied: dict[str, int] = {}  # the capacities that tiers had, fastest first
        self._residents: dict[str, str] = {}  # the tier that each key was in
        self._pinned: list[Binding] = []
        self._buffers: list[tuple[weakref.ref[torch.Tensor], torch.device]] = []

    # --- away ---------------------------------------------------------------------------------

    def suspend(self, to: str) -> None:
        """Empty every tier above ``to``.  Blocks until that is done.  See `Offload.suspend`."""
        tiers = self._tiers_above(to)
        self._session.tables.division.begin_suspend()
        if self._bindings.leasing.state is LeasingState.ALLOWED:
            self._session.leaving.go_on()
        self._session.host_stepper.finish()
        with self._session.tables.held(), self._session.gradients.alone(), self._bindings.alone():
            fresh = [tier for tier in tiers if tier not in self._emptied]
            if self._bindings.leasing.state is LeasingState.SUSPENDED and not fresh:
                return
            self._require_between_steps()
            self._require_no_values_of_modules(tiers)
            with contextlib.ExitStack() as undo:
                self._let_go(undo)
                self._require_idle()
                self._require_room(to, tiers)
                self._leave(fresh, undo)
                undo.pop_all()
        self._session.recorder.break_step("the run was suspended in its midst")
        self._say_what_stays()

    def _tiers_above(self, to: str) -> Sequence[str]:
        names = self._store.tier_names
        accepted = [name for name in names if name in (HOST, DISK)]
        if to not in accepted:
            raise UsageError(
                f"run.suspend(to={to!r}): accepted is {' or '.join(map(repr, accepted))}; the tiers of this "
                f"run are {', '.join(names)}."
            )
        return names[: names.index(to)]

    def _let_go(self, undo: contextlib.ExitStack) -> None:
        """Let what is pinned travel, and nothing be leased any more."""
        if self._bindings.leasing.state is LeasingState.ALLOWED:
            undo.callback(self._session.tables.go_to_device)
            self._session.tables.leave_device()
            self._bindings.bring_home()
            self._residents.clear()
            self._pinned = unpin_all(self._bindings)
            undo.callback(self._pin_again)
            self._bindings.leasing.move(LeasingState.SUSPENDED)
            undo.callback(self._bindings.leasing.move, LeasingState.ALLOWED)

    def _leave(self, tiers: Sequence[str], undo: contextlib.ExitStack) -> None:
        if HOST in tiers:
            undo.callback(self._take_frames_back)  # last of all: host memory has room again then
            self._session.tables.give_up_frames()
        for key in self._store if tiers else ():
            with contextlib.suppress(KeyNotFound):
                where = self._store.where(key)
                if where and where[0] in tiers:
                    self._residents.setdefault(key, where[0])
        for tier in tiers:
            self._empty(tier)
            undo.callback(self._refill, tier)
        if tiers:
            self._session.gradients.stash_all()
            undo.callback(self.give_buffers_back)
            self._move_buffers()
        if self._store.device.type != "cpu":
            torch.accelerator.empty_cache()  # else what was freed is kept for this process

    def _take_frames_back(self) -> None:
        try:
            self._session.tables.take_frames()
        except TierStoreError as error:  # another is on its way
            log.warning(
                "tables have too little host memory for now, and are slow; run.resume() tries again: %s",
                error,
            )

    def _empty(self, tier: str) -> None:
        capacity_bytes = self._store.stats().tiers[tier].capacity_bytes
        budget = self._session.budget
        if budget is not None and tier == self._store.tier_names[0]:
            budget.suspend()
        else:
            self._store.resize(tier, 0)
        self._emptied[tier] = capacity_bytes

    def _move_buffers(self) -> None:
        """Bring buffers from an accelerator to host memory; elsewhere they are there."""
        device = self._store.device
        for _, buffer in ordinary_buffers(self._session.model) if device.type != "cpu" else ():
            if buffer.device == device:
                # Of accelerators outside PyTorch a tensor cannot be pointed at host memory: it stays.
                with contextlib.suppress(RuntimeError):
                    set_data(buffer, buffer.data.to("cpu"))
                    self._buffers.append((weakref.ref(buffer), device))

    # --- back ---------------------------------------------------------------------------------

    def resume(self) -> None:
        """Let the run go on.  Blocks for what is pinned; the rest is on its way.  See `Offload.resume`."""
        tables = self._session.tables
        tables.division.begin_resume()
        if self._bindings.leasing.state is LeasingState.ALLOWED:
            tables.take_frames()
            return
        with tables.held(), self._bindings.alone(), contextlib.ExitStack() as undo:
            for tier in reversed(list(self._emptied)):
                undo.callback(self._empty, tier)
                self._refill(tier)
            undo.callback(tables.give_up_frames)
            tables.take_frames()
            undo.callback(self._bindings.leasing.move, LeasingState.SUSPENDED)
            self._bindings.leasing.move(LeasingState.ALLOWED)
            undo.callback(unpin_all, self._bindings)
            self._pin_again()
            undo.callback(tables.leave_device)
            tables.go_to_device()
            self.give_buffers_back()
            undo.pop_all()
        residents, self._residents = self._residents, {}
        with self._bindings.apart():
            for key, tier in residents.items():
                with contextlib.suppress(KeyNotFound):
                    self._store.prefetch(key, tier=tier)

    def _refill(self, tier: str) -> None:
        capacity_bytes = self._emptied.pop(tier)
        budget = self._session.budget
        if budget is not None and tier == self._store.tier_names[0]:
            budget.resume()
        else:
            self._store.resize(tier, capacity_bytes)

    def _pin_again(self) -> None:
        for binding in self._pinned:
            pin(self._bindings, binding)
        self._pinned = []

    def give_buffers_back(self) -> None:
        """Bring the buffers that were moved back to where they were."""
        while self._buffers:
            reference, device = self._buffers[-1]
            buffer = reference()
            if buffer is not None:
                set_data(buffer, buffer.data.to(device))
            self._buffers.pop()

    # --- what has to be so --------------------------------------------------------------------

    def _require_between_steps(self) -> None:
        session = self._session
        session.windows.discard_interrupted()
        session.accumulation.settle()
        if not session.windows.is_outermost:
            raise UsageError("the model runs: suspend between steps.")
        if is_in_backward():
            raise UsageError("a backward pass runs: suspend between steps.")
        if any(runs_of_step(optimizer) for optimizer in session.optimizers):
            raise UsageError("an optimizer steps: suspend between steps.")
        if self._count_activations():
            gc.collect()  # what only a cycle refers to
        if waiting := self._count_activations():
            raise UsageError(
                f"{waiting} swapped activations wait for backward: run it, or let go of what the model "
                "returned, and suspend then."
            )

    def _require_no_values_of_modules(self, tiers: Sequence[str]) -> None:
        """Raise if a tier that is to be emptied lends values to modules on the host."""
        link = self._session.link
        if HOST in tiers and link.waiting:
            self._session.tables.keep_gradients()
        if HOST in tiers and link.waiting:
            gc.collect()  # what only a cycle refers to
        if HOST in tiers and (waiting := link.waiting):
            raise UsageError(
                f"{waiting} values that modules on the host were given wait in host memory for backward: run "
                "it, or let go of what the model returned, and suspend then."
            )

    def _count_activations(self) -> int:
        self._session.sweep_activations()
        return sum(key.startswith(_ACTIVATIONS) for key in self._store)

    def _require_idle(self) -> None:
        """Raise if anything but the store has a hand on the bytes."""
        if busy := self._bindings.busy(list(self._all())):
            names = ", ".join(repr(binding.places[0].name) for binding in busy[:3])
            raise UsageError(
                f"the bytes of {len(busy)} bundles are in use ({names}{', ...' if len(busy) > 3 else ''}): "
                "something refers to them, such as p.data, p.detach() or a pass of the model in another "
                "thread. Let go of such references, and suspend between steps.",
                key=busy[0].key,
            )

    def _all(self) -> Iterator[Binding]:
        session = self._session
        yield from session.bundles
        yield from session.buffers
        for steps in session.steps:
            yield from steps.state.bindings.values()
        yield from (each.binding for each in session.gradients.table if each.binding is not None)

    def _require_room(self, to: str, tiers_above: Sequence[str]) -> None:
        """Raise if the tiers from ``to`` on cannot hold everything that is in them and above."""
        names = self._store.tier_names
        tiers = self._store.stats().tiers
        below = names[names.index(to) :]
        room_bytes = sum(self._emptied.get(name, tiers[name].capacity_bytes) for name in below)
        kept_bytes = sum(self._store.spec(key).nbytes for key in self._store)
        if HOST in tiers_above:
            tables = self._session.tables
            kept_bytes += tables.unwritten_bytes() - tables.leased_bytes()
        if len(below) < len(names):
            kept_bytes += sum(
                nbytes_of(native)
                for each in self._session.gradients.table
                if (native := native_gradient(each.parameter)) is not None and native.layout is torch.strided
            )
        if kept_bytes > room_bytes:
            raise CapacityError(
                f"run.suspend(to={to!r}) has to put {format_bytes(kept_bytes)} into {', '.join(below)}, "
                f"which have {format_bytes(room_bytes)} together. Raise offload_cpu_size or "
                "offload_disk_size.",
                tier=to,
                needed_bytes=kept_bytes,
                free_bytes=room_bytes,
            )

    def _say_what_stays(self) -> None:
        gradients = [
            each for each in self._session.gradients.table if native_gradient(each.parameter) is not None
        ]
        tables = self._session.tables.attached()
        device = self._store.device
        is_elsewhere = device.type != "cpu"
        buffers = [name for name, each in ordinary_buffers(self._session.model) if each.device == device]
        names = [
            *(name for each, name in self._session.ignored.items() if each not in tables),
            *(f"the gradient of {each.name}" for each in gradients),
            *(f"the gradient of {name}" for each, name in tables.items() if each.grad is not None),
            *(buffers if is_elsewhere else ()),
        ]
        if names and self._emptied:
            log.warning(
                "suspended; %d tensors stay where they are: %s%s",
                len(names),
                ", ".join(names[:4]),
                ", ..." if len(names) > 4 else "",
            )
