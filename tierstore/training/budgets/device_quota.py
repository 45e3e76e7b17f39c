"""Sets the quota of the store's device tier, as `tierstore.planning.deciding.DeviceShare` divides the budget.

It measures what the program takes, tells the share, and gives the store what the share says.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import nn

from tierstore.errors import CapacityError
from tierstore.planning.deciding import (
    CameBytes,
    DeviceShare,
    EvaluationEnd,
    PhasePeak,
    StepPhase,
    TrainedBytes,
)
from tierstore.planning.homes import CPU
from tierstore.store import Store
from tierstore.training import locks
from tierstore.training.autograd.gradient_table import GradientTable
from tierstore.training.budgets.called_ways import CalledWays
from tierstore.training.budgets.memory_meters import Meter
from tierstore.training.bundles.lease_room import let_frames_go
from tierstore.training.bundles.working_sets import TrainedSets, largest_needs, too_large
from tierstore.training.locks import Rank
from tierstore.training.pytorch.own_work import ordinary_mode
from tierstore.units import format_bytes


class DeviceQuota:
    """Sets the quota of the store's device tier.

    `prepare`, `grow` and `settle` are safe from any thread; the rest is for the one that trains.

    Args:
        store: with a device tier as its fastest, whose quota is all that the program may have on the device.
        trained: what has to be there of the model.
        meter: of what the program has outside the store.
        resized: told how much is the store's own.
        gradients: of the model.
        state_bytes: returns those of the optimizers' state that there is.
        said_high: as of `tierstore.planning.deciding.DeviceShare`.

    Raises:
        CapacityError: one bundle alone does not fit.
    """

    def __init__(
        self,
        store: Store,
        trained: TrainedSets,
        meter: Meter,
        resized: Callable[[int], None],
        gradients: GradientTable,
        state_bytes: Callable[[], int],
        said_high: float | None,
    ) -> None:
        self._store = store
        self._tier = store.tier_names[0]
        limit_bytes = self._limit_bytes = store.stats().tiers[self._tier].capacity_bytes
        self._meter = meter
        self._ways = CalledWays(store.device.type)
        self._resized = resized
        needed = trained_bytes(trained)
        if needed.largest_bytes > limit_bytes:
            raise too_large(self._tier, limit_bytes, trained.sets)
        below = [tier.capacity_bytes for name, tier in store.stats().tiers.items() if name != self._tier]
        # Guards what is given and leased; held while hardware makes room.
        self._lock = locks.new_lock(Rank.DEVICE_QUOTA)
        has_streams = store.device.type != CPU
        self._gradients = gradients
        self._share = DeviceShare(
            limit_bytes,
            needed,
            sum(below),
            gradients.staying_bytes,
            lambda: CameBytes(gradients.came_bytes(), state_bytes()),
            said_high,
            has_streams=has_streams,
        )
        self._high = 1.0 if said_high is None else said_high  # as the store has it
        self._give(self._share.own_bytes)

    # --- a step -------------------------------------------------------------------------------

    def begin_forward(self, called: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """A model, or a part, begins to run: in a step, or where gradients are not enabled for itself.

        Args:
            called: by the program.
            args: that it is given.
            kwargs: that it is given by name.
        """
        phase = StepPhase.MODEL if torch.is_grad_enabled() else StepPhase.EVALUATION
        self._share.begin_use(phase, self._ways.way_of(called, args, kwargs))
        self._enter(phase)
        inputs = (*args, *kwargs.values())
        elements = self._ways.elements_of(called, inputs)
        needed_bytes = self._share.too_much(phase, elements)
        if needed_bytes is not None:
            raise self._took_too_much(needed_bytes)
        if self._share.expect_more(phase, elements):
            self._enter(phase)
        if self._gradients.has_changed:
            self.note_uses({})
        if self._share.begin_learning(phase, elements):
            self._share.note_standing(self._meter.standing_bytes())
            self._meter.begin(inputs)
            if phase is StepPhase.MODEL and self._meet_trained():
                self._resized(self._share.own_bytes)
        if phase is StepPhase.EVALUATION and self._share.expect_held(self._meter.live_bytes()):
            self._enter(phase)

    def _took_too_much(self, needed_bytes: int) -> CapacityError:
        return CapacityError(
            f"the last use of the model took {format_bytes(needed_bytes)} on the device, with "
            f"inputs no larger than these and nothing there that was not in use; max_device_memory is "
            f"{format_bytes(self._limit_bytes)}. Raise it, take smaller batches, or swap or recompute more.",
            tier=self._tier,
            needed_bytes=needed_bytes,
            free_bytes=self._limit_bytes,
        )

    def begin_optimizer(self) -> None:
        """An optimizer begins to step."""
        self._enter(StepPhase.OPTIMIZER)
        if self._share.learns_from(StepPhase.MODEL):
            self._meter.begin_step()
            self._share.begin_step(self._meter.live_bytes())

    def end_evaluation(self, error: BaseException | None, output: object) -> None:
        """The model has run for itself, to its end or until an exception ended it.

        Args:
            error: the exception.
            output: what the model has returned.
        """
        if self._share.phase is not StepPhase.EVALUATION:  # it may have run in the midst of a step
            self._ways.forget_call()
            return
        self._ways.note_made(output)
        with self._lock:
            self._guess()
        if self._share.end_evaluation(self._phase_peak(), _end_by(error)):
            self._meter.end()
        self._enter(self._share.around_evaluation)

    def end_step(self) -> None:
        """An optimizer has stepped, unless another one steps, too; or a model without one was used."""
        self._enter(StepPhase.BETWEEN)
        if self._share.end_step():
            self._meter.end()

    def look(self) -> None:
        """Take a sample of what the program has."""
        if self._share.is_learning:
            self._meter.look()
            self._share.note_at_gradients(self._meter.live_bytes())

    def suspend(self) -> None:
        """Let the store have nothing of the device, and do not measure what others do there.

        Raises:
            CapacityError: the tiers below cannot take what is there: it has what it had.
        """
        with self._lock:
            self._share.note_peak(self._take_peak(0))
            self._meter.end()
            self._give(0)

    def resume(self) -> None:
        """Give the store its own again."""
        with self._lock:
            self._give(self._share.own_bytes)

    def close(self) -> None:
        """Stop measuring."""
        self._share.stop_learning()
        self._meter.end()

    def _enter(self, phase: StepPhase) -> None:
        if phase is not self._share.phase:
            self._share.enter(phase, self._phase_peak())
        self._resized(self._share.own_bytes)
        with self._lock:
            if self._share.quota_bytes < self._share.own_bytes or self._share.high != self._high:
                self._give(max(self._share.quota_bytes, self._share.own_bytes))
        self.settle()

    def _phase_peak(self) -> PhasePeak:
        return self._take_peak(self._meter.take_whole_peak() or 0)

    def _take_peak(self, whole_bytes: int) -> PhasePeak:
        if not self._share.is_measuring:
            return PhasePeak(whole_bytes=whole_bytes)
        program_bytes = self._meter.take_peak()
        return PhasePeak(program_bytes, self._meter.was_peak_hidden, whole_bytes)

    def note_uses(self, keys: Mapping[Hashable, int]) -> None:
        """Bundles are used, and perhaps other parameters trained; leases of others may have ended.

        Args:
            keys: of the bundles, with their bytes.

        Raises:
            CapacityError: see `settle`.
        """
        with self._lock:
            is_less = self._share.meet(keys)
            if self._gradients.has_changed and self._share.phase is StepPhase.MODEL:
                is_less |= self._meet_trained()
        if is_less:
            self._resized(self._share.own_bytes)
        self.settle()

    def _meet_trained(self) -> bool:
        return self._share.meet(self._gradients.trained(), are_parameters=True)

    # --- what is known ------------------------------------------------------------------------

    @property
    def has_room_for_gradients(self) -> bool:
        """See `tierstore.planning.deciding.DeviceShare.has_room_for_gradients`."""
        return self._share.has_room_for_gradients

    @property
    def staying_room_bytes(self) -> int:
        """See `tierstore.planning.deciding.DeviceShare.staying_room_bytes`."""
        return self._share.staying_room_bytes

    def allows_step_in_backward(self, key: str) -> bool:
        """See `tierstore.planning.deciding.DeviceShare.allows_step_in_backward`."""
        return self._share.allows_step_in_backward(key)

    # --- quotas -------------------------------------------------------------------------------

    def _give(self, quota_bytes: int) -> None:
        high = self._share.high
        if quota_bytes != self._share.quota_bytes or high != self._high:
            with ordinary_mode():  # what is allocated here is the store's
                self._store.resize(self._tier, quota_bytes, high=None if high == self._high else high)
            self._share.quota_bytes, self._high = quota_bytes, high

    def write_back_above(self, high: float | None) -> None:
        """Let the store write back what it has above a share of its own from now on; ``None``: as it needs.

        Raises:
            CapacityError: the tiers below cannot take it: nothing was changed.
        """
        with self._lock:
            former, self._share.said_high = self._share.said_high, high
            try:
                self._give(self._share.quota_bytes)
            except CapacityError:
                self._share.said_high = former
                raise

    def tell_own(self) -> None:
        """Tell again how much is the store's own: what is made of it has changed."""
        self._resized(self._share.own_bytes)

    def _leased_bytes(self) -> int:
        return self._store.leased_bytes(self._tier)

    def prepare(self, needed_bytes: int) -> None:
        """See to it that so many bytes can be leased, where they may be more than the store's own.

        Raises:
            CapacityError: see `grow`.
        """
        if self._share.is_to_prepare:
            self.grow(needed_bytes)

    def grow(self, needed_bytes: int) -> bool:
        """Give the store room for so much beside what is leased, until leases end.

        For what must be on the device together.  Returns whether it had less.

        Raises:
            CapacityError: the program uses what would be given.
        """
        with self._lock:
            self._guess()
            leased_bytes, live_bytes = self._leased_bytes(), self._meter.live_bytes()
            quota_bytes = self._share.grow(needed_bytes, leased_bytes, live_bytes)
            if quota_bytes is None:
                raise self._too_much(needed_bytes, leased_bytes, live_bytes)
            had_less = quota_bytes > self._share.quota_bytes
            self._give(quota_bytes)
            return had_less

    def _too_much(self, needed_bytes: int, leased_bytes: int, live_bytes: int) -> CapacityError:
        return CapacityError(
            f"no room for {format_bytes(needed_bytes)} in {self._tier!r}: {format_bytes(leased_bytes)} are "
            f"in use there, and the program has {format_bytes(live_bytes)} beside the store, such as "
            "activations and the workspace of operators. max_device_memory is "
            f"{format_bytes(self._limit_bytes)}. Raise it, take smaller batches, or swap or recompute more.",
            tier=self._tier,
            needed_bytes=needed_bytes,
            free_bytes=max(0, self._limit_bytes - leased_bytes - live_bytes),
        )

    def _guess(self) -> None:
        if self._share.is_guessing:
            whole_bytes = self._meter.take_whole_peak() or 0
            self._share.guess(self._meter.most_bytes(), whole_bytes, self._leased_bytes())

    def settle(self) -> None:
        """Take back what was given to the store for leases that have ended.

        Where the tiers below have no room for what has to leave, it stays as long as it is not in the way.

        Raises:
            CapacityError: it is.
        """
        with self._lock:
            self._guess()
            while self._share.has_more_than_own:
                leased_bytes = self._leased_bytes()
                try:
                    self._give(self._share.settled_bytes(leased_bytes))
                except CapacityError as error:
                    if self._leased_bytes() > leased_bytes:
                        continue
                    if self._share.is_in_the_way(self._meter.live_bytes()):
                        raise
                    let_frames_go(error)
                return


def _end_by(error: BaseException | None) -> EvaluationEnd:
    if error is None:
        return EvaluationEnd.WHOLE
    is_of_memory = isinstance(error, CapacityError | torch.OutOfMemoryError)
    return EvaluationEnd.OUT_OF_MEMORY if is_of_memory else EvaluationEnd.BROKEN


def trained_bytes(trained: TrainedSets) -> TrainedBytes:
    """Return what a store has to hold of all bundles; at least one."""
    sets = trained.sets
    all_bytes = sum(each.nbytes for each in sets)
    _, largest_bytes = largest_needs(sets)
    return TrainedBytes(
        all_bytes=all_bytes,
        gradient_bytes=all_bytes - sum(each.bundle_bytes + each.state_bytes for each in sets),
        pinned_bytes=sum(each.pinned_bytes for each in sets),
        largest_bytes=largest_bytes,
        largest_bundle_bytes=max(each.bundle_bytes for each in sets),
        widening=trained.widening,
        state_bytes=sum(each.state_bytes for each in sets),
    )
