"""One bundle's step on the host, made by a thread of its own while the device goes on with backward.

It is a step ahead as any (`tierstore.training.optimizers.speculative_steps`): new values are put beside the
old ones, and nobody sees them before ``step`` asks for them.  What is different:

1. The bytes come to host memory first, leased by nobody; only then is the step made.
2. Gradients, and what has no second replica that could become the new values, are leased to be read, by
   their keys: tensors of the program's show nothing of it, in no thread.
3. What has changed since the last gradient landed is seen before anything is leased: no step is made then.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

import torch

from tierstore.errors import KeyNotFound, TierStoreError
from tierstore.leases import Lease
from tierstore.planning.rules import HOST
from tierstore.store import Store
from tierstore.training.bundles.bindings import Binding, Bindings
from tierstore.training.optimizers.host_stepper import HostStepper, HostTask
from tierstore.training.optimizers.made_steps import MadeStep, StepBasis, made_from

log = logging.getLogger("tierstore")


class StepAside:
    """A step that is handed over.

    Args:
        basis: what it is made from.
        bindings: of the run.
        stepper: whose thread makes it.

    Attributes:
        made: what came of it; ``None``: nothing yet, or nothing at all.
        has_failed: whether the optimizer cannot be run ahead.
        seconds: that it took.
    """

    def __init__(self, basis: StepBasis, bindings: Bindings, stepper: HostStepper) -> None:
        self._basis = basis
        self._store: Store = bindings.store
        self._bindings = bindings
        self._stepper = stepper
        self._task = HostTask(self._run, sum(binding.nbytes for binding in basis.needed))
        self._leases: list[Lease] = []
        self.made: MadeStep | None = None
        self.has_failed = False
        self.seconds = 0.0

    def hand_over(self) -> None:
        """Let it be made; begin to bring what it needs.

        Raises:
            RuntimeError: no thread can be started.
        """
        with self._bindings.apart(), contextlib.suppress(KeyNotFound):
            self._store.prefetch(*self._keys, tier=HOST)
        self._stepper.hand_over(self._task)

    def take_back(self) -> MadeStep | None:
        """Return what came of it; nothing, if it has not begun, or was given up.  Waits for hardware only."""
        self._stepper.cancel(self._task)
        return self.made if self._stepper.withdraw(self) else None

    @property
    def _keys(self) -> list[str]:
        return [binding.key for binding in (*self._basis.needed, *self._basis.gradients)]

    # --- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            self._make()
        except TierStoreError:
            log.debug("a step on the host is made in its time", exc_info=True)
        except Exception:
            log.debug("no more steps of this optimizer are made ahead", exc_info=True)
            self.has_failed = True
        finally:
            self.seconds = time.perf_counter() - begin

    def _make(self) -> None:
        with self._bindings.apart():
            self._store.fetch(*self._keys, tier=HOST).result()
        with contextlib.ExitStack() as held:
            with self._bindings.alone():  # or others would open windows on what is leased for writing
                may_hold = held.enter_context(self._stepper.holding(self._task))
                if not may_hold or not self._is_as_it_was():
                    return
                held.enter_context(self._leased())
                new, old, gradients = self._lease()
            # From here on no lock of the run is taken: others may wait for the end of the leases.
            with self._bindings.apart():
                for key, lease in old.items():
                    new[key] = self._copied(key, lease)
            with self._stepper.turn:
                self.made = made_from(
                    self._basis, new.__getitem__, lambda each: each.places[0].view(gradients[each.key])
                )

    def _is_as_it_was(self) -> bool:
        """Whether nobody has touched, or uses, what the step is made from, or makes one of his own."""
        basis = self._basis
        return (
            all(_is_idle(binding) for binding in (*basis.needed, *basis.gradients))
            and all(binding.writes == writes for binding, writes in (*basis.written, *basis.read))
            and not any(name in self._store for name in basis.names.values())
        )

    @contextlib.contextmanager
    def _leased(self) -> Iterator[None]:
        """End all leases in the end; drop new values that came to nothing."""
        basis = self._basis
        try:
            yield
        finally:
            with self._bindings.apart():
                while self._leases:
                    self._leases.pop().release(written=self.made is not None)
                if self.made is None:
                    self._drop()
                else:
                    self._stepper.spare(self, self._drop)
                for binding in (*basis.needed, *basis.gradients):
                    if binding.after_use is not None:
                        binding.after_use(binding)

    def _drop(self) -> None:
        with self._bindings.apart():
            for name in self._basis.names.values():
                with contextlib.suppress(KeyNotFound):
                    self._store.drop(name)

    def _lease(self) -> tuple[dict[str, torch.Tensor], dict[str, Lease], dict[str, torch.Tensor]]:
        """Lease everything; return what has become new values, what is to be copied, and gradients."""
        new: dict[str, torch.Tensor] = {}
        old: dict[str, Lease] = {}
        for binding in self._basis.needed:
            key = binding.key
            lease = self._hold(self._store.lease(key, tier=HOST, write=True))
            flat = lease.tensor
            if lease.split({key: self._basis.names[key]}):
                new[key] = flat
            else:
                self._leases.remove(lease)
                lease.release(written=False)
                old[key] = self._hold(self._store.lease(key, tier=HOST))
        keys = [binding.key for binding in self._basis.gradients]
        gradients = self._hold(self._store.lease(*keys, tier=HOST))
        return new, old, {key: gradients[key] for key in keys}

    def _hold(self, lease: Lease) -> Lease:
        self._leases.append(lease)
        return lease

    def _copied(self, key: str, lease: Lease) -> torch.Tensor:
        """Put a copy of leased bytes under the key of the new values, and lease that."""
        name = self._basis.names[key]
        self._store.put(name, lease.tensor, tier=HOST)
        self._leases.remove(lease)
        lease.release()
        return self._hold(self._store.lease(name, tier=HOST, write=True)).tensor


def _is_idle(binding: Binding) -> bool:
    return binding.lease is None and binding.is_whole
