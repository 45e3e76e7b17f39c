"""Optimizer steps made during backward, and kept to themselves until ``step`` asks for them.

While a bundle is still here from backward, its step costs no transfer of its parameters, and its
gradient need not come back.  But the step was not asked for yet: it may never be, or what it depends on
may change first.  So it is made beside everything:

1. New values of parameters and state are keys of their own (`Lease.split`); parameters, gradients and
   state keep their bytes, and whoever looks at them sees those.
2. ``step`` lets the new values take the place of the old ones (`Store.rename`), if nothing that they
   were made from was touched since; else they are forgotten, and the step is made again.
3. Only optimizers of ``torch.optim`` (`tierstore.training.optimizers.registered`) are run ahead: they do
   nothing but what a step is about.  And only where the step before shows that it will be right: after as
   many backward passes, with gradients that nobody looked at (to clip them, say).  After a step that had to
   be made again this waits, longer every time.
4. Only where it leaves the gradients as they are: what it writes to them belongs to the step itself.
   Known from a double's step of one element.
5. Only where there is room for old and new values beside all else.
6. Where a mode of the program's is on, in backward or around ``step``, a step is made when it is asked for:
   the mode sees its operators then, and nowhere else.

7. What is stepped on the host beside a device is made by a thread of its own, if it can be
   (`tierstore.training.optimizers.steps_aside`): backward goes on.

A double of the optimizer works on stand-ins, so that no version counter, group or state of the user's
changes early, in whatever thread somebody looks.  For a ``DTensor`` its local tensor stands in: no message is
sent, as what steps shards treats each element by itself (`tierstore.training.sharding.refusals`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import torch

from tierstore import trace_ranges
from tierstore.errors import KeyNotFound, LeaseError, TierStoreError
from tierstore.leases import Lease
from tierstore.planning.deciding import Patience, StepTime, has_room_ahead
from tierstore.training.bundles.bindings import Binding, natively
from tierstore.training.bundles.tensor_slots import is_sharded_kind
from tierstore.training.faults import guard
from tierstore.training.optimizers.doubles import (
    is_equal,
    is_scaled,
    is_special,
    put_small,
    settings,
    ways_of,
    writes_to_gradients,
)
from tierstore.training.optimizers.host_stepper import HostStepper
from tierstore.training.optimizers.local_steps import is_of_shards, lie_alike
from tierstore.training.optimizers.made_steps import MadeStep, Stashed, StepBasis, basis_of, made_from
from tierstore.training.optimizers.registered import is_known
from tierstore.training.optimizers.step_units import StepTrainer, StepUnit, options_of
from tierstore.training.optimizers.steps_aside import StepAside
from tierstore.training.pytorch.own_work import are_modes_on

_PLAIN = (torch.nn.Parameter, torch.Tensor)

log = logging.getLogger("tierstore")


class Expectations:
    """Which optimizers wait for which gradients, so that each gradient asks only those.

    Args:
        stepper: makes steps on the host beside a device.

    Attributes:
        stepper: see above.
        of: by parameter, whose steps ahead need its gradient.
        made: by bundle, who has made its step, or has handed it over: no two can.
    """

    def __init__(self, stepper: HostStepper) -> None:
        self.stepper = stepper
        self.of: dict[torch.Tensor, dict[SpeculativeSteps, None]] = {}
        self.made: dict[Binding, SpeculativeSteps] = {}

    def offer(self, parameter: torch.Tensor) -> float:
        """A gradient has been accumulated: make steps of which it was the last; return how long that took."""
        begin = time.perf_counter()
        waiting = tuple(self.of.get(parameter, ()))
        for steps in waiting:
            steps.offer(parameter)
        return time.perf_counter() - begin if waiting else 0.0

    def forget(self, parameter: torch.Tensor) -> None:
        """A gradient changes or goes: what was made from it is worth nothing."""
        guarded_tensor = guard.guarded_tensor_of(parameter)
        if guarded_tensor is not None and (steps := self.made.get(guarded_tensor.binding)) is not None:
            steps.forget(guarded_tensor.binding)


class SpeculativeSteps:
    """Makes steps of one optimizer during backward.

    Args:
        optimizer: whose.
        trainer: the session.
        expectations: of all optimizers.
        turn_of: returns what a bundle's step would be about.
        state_of: returns the binding of a bundle's state.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trainer: StepTrainer,
        expectations: Expectations,
        turn_of: Callable[[Binding], StepUnit | None],
        state_of: Callable[[Binding], Binding | None],
    ) -> None:
        self.optimizer = optimizer
        self._store = trainer.bindings.store
        self._bindings = trainer.bindings
        self._gradients = trainer.gradients
        self._trainer = trainer
        self._expectations = expectations
        self._turn_of = turn_of
        self._state_of = state_of
        self._expected: dict[torch.Tensor, int] = {}
        self._made: dict[Binding, MadeStep] = {}
        self._aside: dict[Binding, StepAside] = {}  # what the host stepper makes, or has made
        self._patience = Patience()
        self._is_possible = is_known(optimizer) and len(self._store.tier_names) > 1
        self._without_others: set[Binding] = set()
        self._writers: dict[tuple[object, ...], bool] = {}
        self.seconds = 0.0

    # --- learning -----------------------------------------------------------------------------

    def learn(self) -> None:
        """A step begins: take in what led to it, for the next one."""
        self._patience.begin_step()
        for parameter in self._expected:
            self._expectations.of[parameter].pop(self, None)
        self._expected.clear()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                gradient = self._gradients.table.find(parameter)
                if gradient is None:
                    continue
                if gradient.is_untouched and self._are_idle([gradient.binding]):
                    self._expected[parameter] = gradient.accumulations
                    self._expectations.of.setdefault(parameter, {})[self] = None
                gradient.accumulations = 0

    def _are_idle(self, bindings: Sequence[Binding | None]) -> bool:
        """Whether nobody has an alias of their bytes, whose writes may come unseen."""
        return all(binding is None or self._bindings.release_idle(binding) for binding in bindings)

    def end_step(self) -> None:
        """A step has ended: wait if something was made in vain for it."""
        self._patience.end_step()

    # --- making -------------------------------------------------------------------------------

    def offer(self, parameter: torch.Tensor) -> None:
        """A gradient has been accumulated: make the bundle's step if that was the last one it needs."""
        if (
            not self._is_possible
            or self._patience.is_waiting
            or parameter not in self._expected
            or are_modes_on()
        ):
            return
        guarded_tensor = guard.guarded_tensor_of(parameter)
        assert guarded_tensor is not None
        is_complete = all(map(self._is_complete, guarded_tensor.binding.tensors))
        if not is_complete or not self._trainer.allows_step_ahead(guarded_tensor.binding):
            return
        turn = self._turn_of(guarded_tensor.binding)
        if turn is not None and self._may_make(turn):
            begin = time.perf_counter()
            if self._trainer.steps_aside(turn.bundle):
                self._hand_over(turn)
            else:
                with self._range(turn) if trace_ranges.are_on() else trace_ranges.NO_RANGE:
                    self._make_or_leave(turn)
            self.seconds += time.perf_counter() - begin

    def _range(self, turn: StepUnit) -> contextlib.AbstractContextManager[None]:
        """Return a range for who profiles."""
        return trace_ranges.named_range("step ahead", [turn.bundle.key], turn.bundle.nbytes)

    def _is_complete(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has the gradient that it had when the last step began, or none as then."""
        expected = self._expected.get(parameter)
        if expected is None:
            return not self._gradients.has(parameter)
        gradient = self._gradients.table.find(parameter)
        return gradient is not None and gradient.accumulations == expected

    def could_make(self, turn: StepUnit) -> bool:
        """Whether a step could be made during backward, if there were room and gradients were the store's."""
        if not self._is_possible or are_modes_on():  # which would see what is asked below
            return False
        return self._is_plain(turn) and not self._writes_to_gradients(turn)

    def _is_plain(self, turn: StepUnit) -> bool:
        is_plain = not any(is_special(group) for group, _ in turn.groups) and not is_scaled(self.optimizer)
        return is_plain and all(kind in _PLAIN or is_sharded_kind(kind) for kind in turn.bundle.plain)

    def _may_make(self, turn: StepUnit) -> bool:
        stashed = self._gradients.bindings_of(turn.parameters)
        needed = [turn.bundle, *self._states(turn)]
        return (
            self._is_plain(turn)
            and self._lie_alike(turn, stashed)
            and len(stashed) == len(turn.parameters)
            and self._has_room(needed, sum(binding.nbytes for _, binding in stashed))
            and self._are_idle([*needed, *(binding for _, binding in stashed)])
            and not self._writes_to_gradients(turn)
        )

    def _lie_alike(self, turn: StepUnit, stashed: Stashed) -> bool:
        gradients = {parameter: binding.tensors[0] for parameter, binding in stashed}
        return not is_of_shards(turn) or lie_alike(self.optimizer, turn, gradients.get)

    def _writes_to_gradients(self, turn: StepUnit) -> bool:
        """Say whether a step writes to gradients, as ``SGD``'s with ``nesterov`` and ``foreach`` does."""
        device = self._trainer.computes_on(turn.bundle)
        for group, members in turn.groups:
            ways = ways_of(group)
            for parameter in members:
                entries = self.optimizer.state.get(parameter, {})
                dims = len(parameter.shape)
                kind = (device, parameter.dtype, dims, *entries, *ways)
                if kind not in self._writers:
                    like = torch.ones([1] * dims, dtype=parameter.dtype, device=device)
                    self._writers[kind] = writes_to_gradients(self.optimizer, group, like, entries)
                if self._writers[kind]:
                    return True
        return False

    def _states(self, turn: StepUnit) -> list[Binding]:
        state = self._state_of(turn.bundle)
        return [] if state is None else [state]

    def _has_room(self, needed: Sequence[Binding], gradient_bytes: int) -> bool:
        """Whether new values never stand in the way of anything else."""
        bundle = needed[0]
        return has_room_ahead(
            StepTime.ASIDE if self._trainer.steps_aside(bundle) else StepTime.AHEAD,
            self._store.rooms(),
            self._trainer.step_tier(bundle),
            new_bytes=sum(binding.nbytes for binding in needed),
            gradient_bytes=gradient_bytes,
            pending_bytes=self._expectations.stepper.pending_bytes,
        )

    def _make_or_leave(self, turn: StepUnit) -> None:
        """Make a step; leave it to its own time if the store cannot help, and all of them if it fails."""
        try:
            self._make(turn)
        except TierStoreError:
            return
        except Exception:
            log.debug("steps of %s are not made ahead any more", type(self.optimizer).__name__, exc_info=True)
            self._is_possible = False

    def _basis_of(self, turn: StepUnit) -> StepBasis:
        needed = [turn.bundle, *self._states(turn)]
        stashed = self._gradients.bindings_of(turn.parameters)
        return basis_of(self.optimizer, turn, needed, stashed, self._trainer.computes_on(turn.bundle))

    def _make(self, turn: StepUnit) -> None:
        basis = self._basis_of(turn)
        made: MadeStep | None = None
        with self._bindings.lock:  # or others would open windows on gradients, whose tensors show no lease
            with self._bindings.apart():
                lease = self._lease_beside(basis)
            if lease is None:
                return
            try:
                with self._expectations.stepper.turn:
                    made = made_from(
                        basis,
                        lease.__getitem__,
                        lambda gradient: gradient.places[0].view(lease[gradient.key]),
                    )
            finally:
                with self._bindings.apart():
                    self._give_back(lease, basis)
                    if made is None:
                        self._store.drop(*basis.names.values())
        self._gradients.table.know_uses(turn.parameters)
        self._made[turn.bundle] = made
        self._expectations.made[turn.bundle] = self

    def _lease_beside(self, basis: StepBasis) -> Lease | None:
        """Lease gradients, and what is to become the new values beside the old; ``None``: it cannot be."""
        names = basis.names
        if any(name in self._store for name in names.values()):
            return None  # another optimizer of the same parameters was faster
        tier = self._trainer.step_tier(basis.turn.bundle)
        keys = [binding.key for binding in (*basis.needed, *basis.gradients)]
        lease = self._store.lease(*keys, tier=tier, write=True)
        is_split = is_kept = False
        try:
            is_split = lease.split(names)
            if is_split:
                # Split first: what the plan has passed is what prefetches push out, be it in the tier below:
                # without another replica of the old values there is no step beside them.
                self._bindings.note_uses([*basis.needed, *basis.gradients])
            is_kept = is_split
        finally:
            if not is_kept:
                self._give_back(lease, basis)
                if is_split:
                    self._store.drop(*names.values())
        if is_kept:
            return lease
        self._without_others.add(basis.turn.bundle)
        self._bindings.note_uses(basis.needed)
        for binding in sorted(basis.gradients, key=lambda binding: -binding.nbytes):
            self._trainer.prefetcher.note(binding.key)  # as in other steps: see `leave_out`
        return None

    def _give_back(self, lease: Lease, basis: StepBasis) -> None:
        """End the lease of a step: gradients are as before, and new values have no other replicas."""
        lease.release(written=False)
        for binding in basis.gradients:
            if binding.after_use is not None:
                binding.after_use(binding)

    def _hand_over(self, turn: StepUnit) -> None:
        """Let a step be made on the host while backward goes on; leave it to its time if that cannot be."""
        if turn.bundle in self._expectations.made:
            return  # another optimizer of the same parameters was faster
        basis = self._basis_of(turn)
        aside = StepAside(basis, self._bindings, self._expectations.stepper)
        with self._bindings.alone():  # the plan takes these uses for this thread's, in whose order they are
            self._bindings.note_uses([*basis.needed, *basis.gradients])
        self._gradients.table.know_uses(turn.parameters)
        self._aside[turn.bundle] = aside
        self._expectations.made[turn.bundle] = self
        try:
            aside.hand_over()
        except (RuntimeError, TierStoreError):
            log.debug("a step is made in its time: it could not be handed over", exc_info=True)
            self._pop(turn.bundle)

    # --- taking -------------------------------------------------------------------------------

    def take(self, turn: StepUnit) -> bool:
        """Let the new values of a bundle take the place of the old ones; return whether it was so."""
        made = self._pop(turn.bundle)
        if made is None:
            return False
        if are_modes_on():
            self._drop(made)
            return False
        with self._bindings.alone():
            if not self._put_in_place(made, turn):
                self._patience.note_wrong()
                return False
            for parameter, entries in made.later.items():
                put_small(self.optimizer.state[parameter], entries)
            with natively():
                torch.autograd.graph.increment_version(
                    [*turn.parameters, *(tensor for state in self._states(turn) for tensor in state.tensors)]
                )
            for binding in made.basis.needed:
                binding.writes += 1
                if binding.after_use is not None:
                    binding.after_use(binding)
        self._patience.note_right()
        return True

    def _put_in_place(self, made: MadeStep, turn: StepUnit) -> bool:
        """Rename new values to old keys if they are right; drop them if not, or if anything fails."""
        is_done = False
        try:
            if self._is_right(made, turn):
                self._store.rename(made.names, replace=True)
                is_done = True
        except Exception:
            # Foreign values may refuse to be compared, and somebody else may hold a lease.
            log.debug("a step that was made ahead is not taken", exc_info=True)
        finally:
            if not is_done:
                self._drop(made)
        return is_done

    def _is_right(self, made: MadeStep, turn: StepUnit) -> bool:
        """Whether nothing was touched that the new values were made from."""
        basis = made.basis
        given = [turn.bundle, *self._states(turn)]
        read = [binding for _, binding in self._gradients.bindings_of(turn.parameters)]
        return (
            turn.is_same(basis.turn)
            and self._are_idle([*given, *read])
            and [(binding, binding.writes) for binding in given] == basis.written
            and [(binding, binding.writes) for binding in read] == basis.read
            and self._gradients.table.are_untouched(turn.parameters)
            and not is_scaled(self.optimizer)
            and [options_of(group) for group, _ in turn.merged] == basis.options
            and settings(basis.device) == made.settings
            and all(is_equal(self.optimizer.state.get(p, {}), basis.former[p]) for p in turn.parameters)
        )

    def leave_out(self, turn: StepUnit, needed: Sequence[Binding]) -> None:
        """A bundle is about to be stepped in place: if its one copy is in the way, this time only.

        The next time there are two (`push_down`), and its step is made ahead.  So the plan is that of such a
        step: what backward would have used it has, and what the step in place uses it has not.
        """
        if turn.bundle in self._without_others:
            self._trainer.prefetcher.leave_out([binding.key for binding in needed])

    def push_down(self, turn: StepUnit) -> None:
        """A bundle was stepped in place: if only because its one copy is in the way, bring it down.

        Else it would be in the way of the next step ahead, too.
        """
        if turn.bundle in self._without_others:
            self._without_others.remove(turn.bundle)
            for binding in (turn.bundle, *self._states(turn)):
                # Dropped or leased meanwhile: then there is nothing to bring down.
                with contextlib.suppress(KeyNotFound, LeaseError), self._bindings.apart():
                    self._store.evict(binding.key)

    # --- forgetting ---------------------------------------------------------------------------

    def forget_all(self) -> None:
        """The step is made in another way."""
        for bundle in (*self._made, *self._aside):
            self.forget(bundle)

    def forget(self, bundle: Binding) -> None:
        """A gradient changes or goes: what was made from it is worth nothing.  Waits for hardware only."""
        if bundle in self._made or bundle in self._aside:
            self._patience.note_wrong()
        made = self._pop(bundle)
        if made is not None:
            self._drop(made)

    def _pop(self, bundle: Binding) -> MadeStep | None:
        """Return what was made of a bundle's step; what the host stepper has not begun it never will."""
        made, aside = self._made.pop(bundle, None), self._aside.pop(bundle, None)
        if aside is not None:
            made = aside.take_back()
            self.seconds += aside.seconds
            self._is_possible = self._is_possible and not aside.has_failed
        if self._expectations.made.get(bundle) is self:
            del self._expectations.made[bundle]
        return made

    def _drop(self, made: MadeStep) -> None:
        with self._bindings.apart():
            self._store.drop(*made.names)
