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

A double of the optimizer works on stand-ins, so that no version counter, group or state of the user's
changes early, in whatever thread somebody looks.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tierstore.errors import KeyNotFound, LeaseError, TierStoreError
from tierstore.leases import Lease
from tierstore.training.bundles.bindings import Binding, natively
from tierstore.training.bundles.grouping import next_version
from tierstore.training.faults import guard
from tierstore.training.optimizers.doubles import (
    Entries,
    UnsuitableError,
    copied_options,
    entries_in,
    is_alike,
    is_equal,
    is_large,
    is_scaled,
    is_special,
    put_small,
    settings,
    snapshot,
    stand_in_of,
    step_alone,
    ways_of,
    writes_to_gradients,
)
from tierstore.training.optimizers.registered import is_known
from tierstore.training.optimizers.step_units import (
    Group,
    StepTrainer,
    StepUnit,
    options_of,
    placed,
)
from tierstore.training.pytorch.own_work import are_modes_on, ordinary_mode

MOST_STEPS_TO_WAIT = 1024
_PLAIN = (torch.nn.Parameter, torch.Tensor)

log = logging.getLogger("tierstore")


@dataclass(slots=True)
class MadeStep:
    """A step that was made ahead of its time.

    Attributes:
        turn: whose.
        written: the bundles that have new values, with how often they had been written before.
        read: the gradients, likewise.
        options: of the turn's groups.
        settings: of PyTorch, that results may depend on.
        former: what state there was, by parameter: the large tensors themselves, copies of the small.
        later: what the small ones are to become.
    """

    turn: StepUnit
    written: list[tuple[Binding, int]]
    read: list[tuple[Binding, int]]
    options: list[Group]
    settings: tuple[object, ...]
    former: dict[torch.Tensor, Entries]
    later: dict[torch.Tensor, Entries]

    @property
    def names(self) -> dict[str, str]:
        """The keys of the new values, with those that they are to get."""
        return {next_version(binding.key): binding.key for binding, _ in self.written}


class Expectations:
    """Which optimizers wait for which gradients, so that each gradient asks only those.

    Attributes:
        of: by parameter, whose steps ahead need its gradient.
        made: by bundle, who has made its step: no two can.
    """

    def __init__(self) -> None:
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
        self._steps_to_wait = 0
        self._next_wait = 1
        self._was_wrong = False
        self._is_possible = is_known(optimizer) and len(self._store.tier_names) > 1
        self._without_others: set[Binding] = set()
        self._writers: dict[tuple[object, ...], bool] = {}
        self.seconds = 0.0

    # --- learning -----------------------------------------------------------------------------

    def learn(self) -> None:
        """A step begins: take in what led to it, for the next one."""
        self._steps_to_wait = max(0, self._steps_to_wait - 1)
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
        if self._was_wrong:
            self._steps_to_wait = self._next_wait
            self._next_wait = min(2 * self._next_wait, MOST_STEPS_TO_WAIT)
            self._was_wrong = False

    # --- making -------------------------------------------------------------------------------

    def offer(self, parameter: torch.Tensor) -> None:
        """A gradient has been accumulated: make the bundle's step if that was the last one it needs."""
        if not self._is_possible or self._steps_to_wait or parameter not in self._expected or are_modes_on():
            return
        guarded_tensor = guard.guarded_tensor_of(parameter)
        assert guarded_tensor is not None
        is_complete = all(map(self._is_complete, guarded_tensor.binding.tensors))
        if not is_complete or not self._trainer.allows_step_ahead(guarded_tensor.binding):
            return
        turn = self._turn_of(guarded_tensor.binding)
        if turn is not None and self._may_make(turn):
            begin = time.perf_counter()
            self._make_or_leave(turn)
            self.seconds += time.perf_counter() - begin

    def _is_complete(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has the gradient that it had when the last step began, or none as then."""
        expected = self._expected.get(parameter)
        if expected is None:
            return not self._gradients.has(parameter)
        gradient = self._gradients.table.find(parameter)
        return gradient is not None and gradient.accumulations == expected

    def _may_make(self, turn: StepUnit) -> bool:
        is_plain = not any(is_special(group) for group, _ in turn.groups) and not is_scaled(self.optimizer)
        stashed = self._gradients.bindings_of(turn.parameters)
        needed = [turn.bundle, *self._states(turn)]
        return (
            is_plain
            and all(kind in _PLAIN for kind in turn.bundle.plain)
            and len(stashed) == len(turn.parameters)
            and self._has_room(needed, sum(binding.nbytes for _, binding in stashed))
            and self._are_idle([*needed, *(binding for _, binding in stashed)])
            and not self._writes_to_gradients(turn)
        )

    def _writes_to_gradients(self, turn: StepUnit) -> bool:
        """Say whether a step writes to gradients, as ``SGD``'s with ``nesterov`` and ``foreach`` does."""
        device = self._trainer.computes_on(turn.bundle)
        for group, members in turn.groups:
            for parameter in members:
                entries = self.optimizer.state.get(parameter, {})
                dims = len(parameter.shape)
                kind = (device, parameter.dtype, dims, *entries, *ways_of(group))
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
        """Whether the slowest tier could take all that is above it and the new values as well.

        So they never stand in the way of anything else.
        """
        new_bytes = sum(binding.nbytes for binding in needed)
        tiers = self._store.stats().tiers
        *faster, slowest = tiers.values()
        above_bytes = sum(tier.capacity_bytes for tier in faster)
        return (
            slowest.capacity_bytes - slowest.charged_bytes >= above_bytes + new_bytes
            and tiers[self._trainer.step_tier(needed[0])].capacity_bytes >= new_bytes + gradient_bytes
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

    def _make(self, turn: StepUnit) -> None:
        needed = [turn.bundle, *self._states(turn)]
        stashed = self._gradients.bindings_of(turn.parameters)
        lease = self._lease_beside(needed)
        if lease is None:
            self._without_others.add(turn.bundle)
            return
        made: MadeStep | None = None
        gradients = [binding for _, binding in stashed]
        try:
            with (
                placed(self._bindings, gradients, self._trainer.step_tier(turn.bundle)),
                self._bindings.window(gradients),
            ):
                made = self._run(turn, lease, {p: binding.tensors[0] for p, binding in stashed})
        finally:
            with self._bindings.apart():
                lease.release(written=made is not None)
                if made is None:
                    self._store.drop(*(next_version(binding.key) for binding in needed))
        self._gradients.table.know_uses(turn.parameters)
        self._made[turn.bundle] = made
        self._expectations.made[turn.bundle] = self

    def _lease_beside(self, needed: Sequence[Binding]) -> Lease | None:
        """Lease what is to become the new values, beside the old ones; ``None``: there are no others."""
        names = {binding.key: next_version(binding.key) for binding in needed}
        with self._bindings.alone():
            if any(name in self._store for name in names.values()):
                return None  # another optimizer of the same parameters was faster
            lease = self._store.lease(*names, tier=self._trainer.step_tier(needed[0]), write=True)
            is_split = False
            try:
                # Held first: what the plan has passed is what prefetches push out.
                for binding in needed:
                    self._bindings.note_access(binding)
                is_split = lease.split(names)
            finally:
                if not is_split:
                    lease.release(written=False)
            return lease if is_split else None

    def _run(self, turn: StepUnit, lease: Lease, gradients: Mapping[torch.Tensor, torch.Tensor]) -> MadeStep:
        """Let the optimizer step on stand-ins in leased bytes.

        Raises:
            UnsuitableError: it did something else to its state or options than change values.
        """
        optimizer = self.optimizer
        with ordinary_mode():
            stand_ins = {p: stand_in_of(p, lease.__getitem__, gradients[p]) for p in turn.parameters}
            former = {p: snapshot(optimizer.state.get(p, {})) for p in turn.parameters}
            given = {p: entries_in(entries, lease.__getitem__) for p, entries in former.items()}
        options = copied_options(turn)
        groups = [
            {**options_of(group), "params": [stand_ins[p] for p in members]} for group, members in turn.merged
        ]
        state = {stand_ins[p]: dict(entries) for p, entries in given.items() if entries}
        # Before: what another thread's backward adds meanwhile is to be noticed.
        written = [(binding, binding.writes) for binding in (turn.bundle, *self._states(turn))]
        read = [(binding, binding.writes) for _, binding in self._gradients.bindings_of(turn.parameters)]
        step_alone(optimizer, groups, state)
        left = {p: state[s] for p, s in stand_ins.items() if s in state}
        if options != [options_of(group) for group in groups] or not all(
            is_alike(given[p], left.get(p, {})) for p in turn.parameters
        ):
            raise UnsuitableError("it makes state or options anew in every step")
        later = {p: {n: x for n, x in entries.items() if not is_large(x)} for p, entries in left.items()}
        return MadeStep(turn, written, read, options, settings(), former, later)

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
                self._was_wrong = True
                return False
            for parameter, entries in made.later.items():
                put_small(self.optimizer.state[parameter], entries)
            with natively():
                torch.autograd.graph.increment_version(
                    [*turn.parameters, *(tensor for state in self._states(turn) for tensor in state.tensors)]
                )
            for binding, _ in made.written:
                binding.writes += 1
                if binding.after_use is not None:
                    binding.after_use(binding)
        self._next_wait = 1
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
        given = [turn.bundle, *self._states(turn)]
        read = [binding for _, binding in self._gradients.bindings_of(turn.parameters)]
        return (
            turn.is_same(made.turn)
            and self._are_idle([*given, *read])
            and [(binding, binding.writes) for binding in given] == made.written
            and [(binding, binding.writes) for binding in read] == made.read
            and self._gradients.table.are_untouched(turn.parameters)
            and not is_scaled(self.optimizer)
            and [options_of(group) for group, _ in turn.merged] == made.options
            and settings() == made.settings
            and all(is_equal(self.optimizer.state.get(p, {}), made.former[p]) for p in turn.parameters)
        )

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
        for bundle in list(self._made):
            self.forget(bundle)

    def forget(self, bundle: Binding) -> None:
        """A gradient changes or goes: what was made from it is worth nothing."""
        made = self._pop(bundle)
        if made is not None:
            self._was_wrong = True
            self._drop(made)

    def _pop(self, bundle: Binding) -> MadeStep | None:
        made = self._made.pop(bundle, None)
        if made is not None:
            self._expectations.made.pop(bundle, None)
        return made

    def _drop(self, made: MadeStep) -> None:
        with self._bindings.apart():
            self._store.drop(*made.names)
