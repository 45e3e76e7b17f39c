"""Steps that the host makes beside the device while backward goes on, one after another.

Each brings what it needs to host memory, leases it, lets the old replicas be keys of their own beside the new
values, and computes; the optimizer's turn then only takes the new values over.  What stands in its way makes
it a step in its time.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tierstore.core import messages as m
from tierstore.errors import CapacityError, LeaseError, TierStoreError
from tierstore.planning.deciding import next_version
from tierstore.planning.simulating.ledger_store import LedgerStore, Waited
from tierstore.planning.timeline import HOST, Interval, StallCause


@dataclass
class StepTask:
    """One step that is to be made.

    Attributes:
        name: of what is stepped.
        needed: keys of parameters and state, which get new values.
        gradients: keys of what is read.
        seconds: that it computes.
        nbytes: that it adds to the tiers.
        is_made: whether the new values are there.
        leases: that it holds.
    """

    name: str
    needed: Sequence[str]
    gradients: Sequence[str]
    seconds: float
    nbytes: int
    is_made: bool = False
    leases: list[int] = field(default_factory=list)
    to_lease: deque[str] = field(default_factory=deque)


class HostLane:
    """Makes steps on the host, in the order in which they are handed over.

    Args:
        store: where the keys are.
        tier: index of host memory.
        go_home: told of each key when its step is made.

    Attributes:
        intervals: what was computed.
    """

    def __init__(self, store: LedgerStore, tier: int) -> None:
        self._store = store
        self._tier = tier
        self._tasks: deque[StepTask] = deque()
        self._used: list[str] = []
        self.intervals: list[Interval] = []

    @property
    def is_busy(self) -> bool:
        """Whether there is a step to be made."""
        return bool(self._tasks)

    @property
    def pending_bytes(self) -> int:
        """What steps that are not made will add to the tiers."""
        return sum(task.nbytes for task in self._tasks)

    def hand_over(self, task: StepTask) -> None:
        """Make a step after those that are to be made."""
        self._store.prefetch([*task.needed, *task.gradients], self._tier)
        self._tasks.append(task)
        if len(self._tasks) == 1:
            self._begin()

    def finish(self) -> None:
        """Let time go on until every step is made, or given up."""
        queue = self._store.queue
        while self._tasks:
            begin_s, name = queue.now_s, self._tasks[0].name
            queue.run_next()
            if queue.now_s > begin_s:
                self._store.waits.append(Waited(begin_s, queue.now_s, StallCause.HOST_STEP, name))

    def take_used(self) -> list[str]:
        """Return the keys that steps have used since the last call: they may go home."""
        used, self._used = self._used, []
        return used

    # --- a step, as far as it comes without waiting -------------------------------------------

    def _begin(self) -> None:
        task = self._tasks[0]
        self._try(task, lambda: self._store.fetch([*task.needed, *task.gradients], self._tier, self._fetched))

    def _fetched(self, error: BaseException | None) -> None:
        task = self._tasks[0]
        if error is not None:
            self._end(task)
            return
        task.to_lease.extend(task.needed)
        self._try(task, self._lease_next)

    def _lease_next(self) -> None:
        """Lease the next key for its new values; then the gradients."""
        task = self._tasks[0]
        keys = [task.to_lease[0]] if task.to_lease else list(task.gradients)
        self._store.lease_later(keys, self._tier, m.Access.WRITE, self._leased)

    def _leased(self, lease: int, error: BaseException | None) -> None:
        task = self._tasks[0]
        if error is not None:
            self._end(task)
            return
        if not task.to_lease:
            task.leases.append(lease)
            self._compute(task)
            return
        key = task.to_lease.popleft()
        if self._store.split(lease, {key: next_version(key)}):
            task.leases.append(lease)
            self._try(task, self._lease_next)
        else:
            self._store.release(lease, is_written=False)
            self._try(task, functools.partial(self._copy, key))

    def _copy(self, key: str) -> None:
        """There is no second replica: put a copy of the bytes beside, and lease that."""
        name = next_version(key)
        nbytes = self._store.nbytes_of(key)

        def put(error: BaseException | None) -> None:
            task = self._tasks[0]
            if error is not None:
                self._end(task)
            else:
                self._try(task, functools.partial(self._lease_copy, name))

        self._store.put_later(name, nbytes, self._tier, put)

    def _lease_copy(self, name: str) -> None:
        def leased(lease: int, error: BaseException | None) -> None:
            task = self._tasks[0]
            if error is not None:
                self._end(task)
            else:
                task.leases.append(lease)
                self._try(task, self._lease_next)

        self._store.lease_later([name], self._tier, m.Access.WRITE, leased)

    def _compute(self, task: StepTask) -> None:
        now_s = self._store.queue.now_s
        if task.seconds:
            self.intervals.append(Interval(now_s, now_s + task.seconds, HOST, task.name))
        self._store.queue.at(now_s + task.seconds, self._computed)

    def _computed(self) -> None:
        self._tasks[0].is_made = True
        self._end(self._tasks[0])

    def _try(self, task: StepTask, act: Callable[[], None]) -> None:
        """Go on with a step; what refuses it leaves it to its time."""
        try:
            act()
        except (CapacityError, LeaseError):
            self._end(task)

    def _end(self, task: StepTask) -> None:
        """End all leases; drop new values that came to nothing; go on with the next step."""
        for lease in reversed(task.leases):
            self._store.release(lease, is_written=task.is_made)
        task.leases.clear()
        if not task.is_made:
            for key in task.needed:
                self._drop(next_version(key))
        self._used += [*task.needed, *task.gradients]
        self._tasks.popleft()
        if self._tasks:
            self._begin()

    def _drop(self, key: str) -> None:
        if key in self._store:
            try:
                self._store.drop(key)
            except TierStoreError:
                return
