"""What a run does for what a program brings to its store: its quotas and its plan are theirs, too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from tierstore.training.budgets.memory_meters import Meter
from tierstore.training.budgets.prefetcher import Prefetcher
from tierstore.training.budgets.reclaimers import Reclaimers, Sweeper
from tierstore.training.pytorch.own_work import ordinary_mode
from tierstore.training.recording.marks import Sign
from tierstore.training.recording.recorder import StepRecorder


class RunHost:
    """A `tierstore.training.activations.swapping.run_store.ActivationHost`.

    Args:
        reclaimer: of the run.
        prefetcher: of the run.
        meter: of what the program has on the device; ``None``: there is no device.
        settle_budget: takes back what was given to the store for leases that have ended.
        before_unpacking: is called when backward comes for a tensor.
        recorder: of the run's steps.

    Attributes:
        reclaimer: see above.
    """

    def __init__(
        self,
        reclaimer: Reclaimers,
        prefetcher: Prefetcher,
        meter: Meter | None,
        settle_budget: Callable[[], None],
        before_unpacking: Callable[[], None],
        recorder: StepRecorder,
    ) -> None:
        self.reclaimer = reclaimer
        self._recorder = recorder
        self._prefetcher = prefetcher
        self._meter = meter
        self._settle_budget = settle_budget
        self._before_unpacking = before_unpacking

    def asking(self) -> AbstractContextManager[None]:
        """See `ActivationHost.asking`."""
        return self._recorder.asking

    def apart(self) -> AbstractContextManager[object]:
        """See `ActivationHost.apart`."""
        return ordinary_mode()

    def add_activation_store(self, activation_store: Sweeper) -> None:
        """See `ActivationHost.add_activation_store`."""
        self.reclaimer.add(activation_store)

    def note_activation(self, key: str, nbytes: int) -> None:
        """See `ActivationHost.note_activation`."""
        if self._recorder.is_on:
            self._recorder.mark(Sign.USE, key, nbytes)
        self._settle_budget()
        self._prefetcher.note_passing(key, nbytes)

    def note_gradient(self, key: str, nbytes: int, room_bytes: int) -> None:
        """Take in that a gradient is about to come, and what room it needs in the first tier."""
        if self._recorder.is_on:
            self._recorder.mark(Sign.PUT, key, nbytes)
        self._prefetcher.note_gradient(key, room_bytes)

    def note_adopted(self, storage: torch.UntypedStorage, is_held: Callable[[], bool]) -> None:
        """See `ActivationHost.note_adopted`."""
        if self._meter is not None:
            self._meter.hand_over(storage, is_held)

    def note_lent(self, storage: torch.UntypedStorage) -> None:
        """See `ActivationHost.note_lent`."""
        if self._meter is not None:
            self._meter.leave_out(storage)

    def before_unpacking(self) -> None:
        """See `ActivationHost.before_unpacking`."""
        self._before_unpacking()
