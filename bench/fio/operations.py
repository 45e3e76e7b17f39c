"""What one I/O does to a store, and how tensors are made ready for it.

Uses public names of tierstore only.  `begin` is for what the store does by itself and reports when done
(fetch, evict); `perform` for what blocks its caller (get, lease, put, flush, open).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import tierstore as ts
from bench.fio.content import Tensors, VerifyError
from bench.fio.job import Job, Step
from bench.fio.keys import ANYWHERE
from bench.fio.sequence import Io
from bench.fio.shelf import Held

_BYTELESS = frozenset({"open"})

Burst = tuple[Io, ...]
"""Operations of one direction that begin in one call."""


class Operations:
    """The operations of one job thread.  Different tensors may be worked on by different threads."""

    def __init__(self, job: Job, held: Held, tensors: Tensors) -> None:
        self._job = job
        self._held = held
        self._tensors = tensors
        self.verified_bytes = 0

    @property
    def store(self) -> ts.Store:
        """The store, as it is open now."""
        return self._held.store

    def nbytes(self, io: Io) -> int:
        """Return what the operation counts as."""
        return 0 if self._job.step(is_read=io.is_read).op in _BYTELESS else self._tensors.sizes[io.tensor]

    # --- making ready -------------------------------------------------------------------------

    def lay_out(self) -> None:
        """Put every tensor that is not there, for jobs that read; further down if they lie anywhere."""
        if not self._job.direction.has_reads:
            return
        step = self._job.steps.read
        tier = self.store.tier_names[-1] if step.origin == ANYWHERE else step.origin
        for index, key in enumerate(self._tensors.keys):
            if key not in self.store:
                self.store.put(key, self._tensors.expected(index), tier=tier)
        if step.op == "open":
            self.store.flush()
        if self._job.is_cache_dropped:
            self._held.drop_cache()

    def prepare(self, batch: Sequence[Io]) -> None:
        """Bring the tensors to where the operations of the batch want them."""
        reads = {io.tensor for io in batch if io.is_read}
        writes = {io.tensor for io in batch if not io.is_read} - reads
        self._prepare_reads([self._tensors.keys[index] for index in sorted(reads)])
        step = self._job.steps.write
        if writes and step.op in {"evict", "flush"}:
            for index in sorted(writes):
                self._put(index, step.origin)

    def _prepare_reads(self, keys: Sequence[str]) -> None:
        origin = self._job.steps.read.origin
        if not keys or origin == ANYWHERE:
            return
        self.store.evict(*keys, to=origin).result()
        if origin != self.store.tier_names[-1]:
            self.store.fetch(*keys, tier=origin).result()

    def _put(self, index: int, tier: str) -> None:
        key = self._tensors.keys[index]
        self.store.put(key, self._tensors.renew(index), tier=tier, replace=key in self.store)

    # --- the operations -----------------------------------------------------------------------

    def begin(self, burst: Burst) -> ts.Transfer[None]:
        """Begin fetches, or evicts, in one call."""
        is_read = burst[0].is_read
        tier = self._job.step(is_read=is_read).tier
        keys = [self._tensors.keys[io.tensor] for io in burst]
        return self.store.fetch(*keys, tier=tier) if is_read else self.store.evict(*keys, to=tier)

    def perform(self, io: Io) -> tuple[int, int]:
        """Do one operation; return when it began, and the nanoseconds that it took."""
        step = self._job.step(is_read=io.is_read)
        match step.op:
            case "get":
                return self._get(io)
            case "lease":
                return self._lease(io, step)
            case "open":
                return self._open()
            case "put":
                return self._timed_put(io, step)
            case "flush":
                begun = time.perf_counter_ns()
                self.store.flush()
                return begun, time.perf_counter_ns() - begun
        begun = time.perf_counter_ns()
        self.begin((io,)).result()
        return begun, time.perf_counter_ns() - begun

    def _get(self, io: Io) -> tuple[int, int]:
        begun = time.perf_counter_ns()
        tensor = self.store.get(self._tensors.keys[io.tensor])
        taken = time.perf_counter_ns() - begun
        if self._job.verify:
            self._tensors.check(io.tensor, tensor, self._job.verify)
            self.verified_bytes += tensor.nbytes
        return begun, taken

    def _lease(self, io: Io, step: Step) -> tuple[int, int]:
        begun = time.perf_counter_ns()
        lease = self.store.lease(self._tensors.keys[io.tensor], tier=step.tier)
        try:
            taken = time.perf_counter_ns() - begun
            if self._job.verify:
                self._tensors.check(io.tensor, lease.tensor, self._job.verify)
                self.verified_bytes += self._tensors.sizes[io.tensor]
        finally:
            again = time.perf_counter_ns()
            lease.release()
        return begun, taken + time.perf_counter_ns() - again

    def _timed_put(self, io: Io, step: Step) -> tuple[int, int]:
        key = self._tensors.keys[io.tensor]
        tensor = self._tensors.renew(io.tensor)
        is_there = key in self.store
        begun = time.perf_counter_ns()
        self.store.put(key, tensor, tier=step.tier, replace=is_there)
        return begun, time.perf_counter_ns() - begun

    def _open(self) -> tuple[int, int]:
        expected = len(self.store)
        self.store.close()
        begun = time.perf_counter_ns()
        self._held.reopen()
        taken = time.perf_counter_ns() - begun
        if len(self.store) != expected:
            raise VerifyError(f"op=open found {len(self.store)} keys again of {expected}")
        return begun, taken

    # --- afterwards ---------------------------------------------------------------------------

    def check(self, io: Io) -> None:
        """Compare what a fetch brought.

        Raises:
            VerifyError: it is not what was put.
        """
        if self._job.verify and io.is_read:
            self._check_all([io.tensor])

    def finish(self, written: Iterable[int]) -> None:
        """Compare everything that was written, if the job says so; drop the tensors, if it says so.

        Raises:
            VerifyError: something is not what was put.
        """
        if self._job.verify and self._job.is_verified_after:
            self._check_all(written)
        if self._job.is_dropped_after:
            self.store.drop(*(key for key in self._tensors.keys if key in self.store))

    def _check_all(self, indices: Iterable[int]) -> None:
        for index in indices:
            found = self.store.get(self._tensors.keys[index])
            self._tensors.check(index, found, self._job.verify)
            self.verified_bytes += found.nbytes
