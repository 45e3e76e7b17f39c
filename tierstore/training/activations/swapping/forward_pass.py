"""One forward pass whose marked activations are swapped.

What autograd saves of a marked storage becomes a `Swapped`: the store's from then on, on its way down.  Its
device memory is given up ``3 * backward_prefetch`` operators later, or when the pass ends, or sooner when the
device's quota demands it; what is wanted again before backward could tell stays.

Hooks of a user's around the pass see every tensor; of what they pack, what is marked is swapped.

What ``torch.utils.checkpoint`` recomputes is not swapped, nor is what that needs: a storage that it keeps
as an input is marked no more.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from tierstore.torch_private import call_after_backward, current_graph_task
from tierstore.training.activations.runtime.activation_runtime import ActivationRuntime
from tierstore.training.activations.runtime.operators import (
    has_no_bytes,
)
from tierstore.training.activations.runtime.saved_activations import Turn
from tierstore.training.activations.swapping.activation_store import (
    ActivationStore,
    OffloadedTensor,
    WeakOffloadedTensor,
)
from tierstore.training.activations.swapping.node_triggers import Triggers
from tierstore.training.activations.swapping.operator_watch import (
    MarkScope,
    Operator,
    OperatorWatch,
    storage_of,
)
from tierstore.training.autograd.accumulation import is_in_backward
from tierstore.training.autograd.saved_tensors import sees_all
from tierstore.training.modules.crossings import is_inside_host_module
from tierstore.training.pytorch.saved_tensor_hooks import (
    Hook,
)

RELEASE_FACTOR = 3
"""Device memory is given up after so many times ``backward_prefetch`` operators."""

SMALLEST_BYTES = 4096
"""Smaller storages stay on the device: a key would cost more than they do."""


def storage_worth_a_key(tensor: torch.Tensor, device: torch.device) -> torch.UntypedStorage | None:
    """Return the storage of a saved tensor; ``None``: it stays, whoever wants it to leave ``device``."""
    if is_inside_host_module():  # what it saves is in host memory already
        return None
    storage = storage_of(tensor) if type(tensor) is torch.Tensor else None
    if storage is None or storage.nbytes() < SMALLEST_BYTES or storage.device != device:
        return None
    return None if has_no_bytes(tensor) else storage


class Swapped:
    """What a graph refers to instead of a saved tensor: a `PackedTensor`."""

    __slots__ = ("_unpacker", "offloaded")

    def __init__(self, offloaded: OffloadedTensor, unpacker: Unpacker) -> None:
        self.offloaded = offloaded
        self._unpacker = unpacker

    def tensor(self) -> torch.Tensor:
        """See `PackedTensor`."""
        self._unpacker.begin()
        return self.offloaded.take()


class Unpacker:
    """Sees to what is due when saved tensors are given back, long after their forward pass.

    Args:
        activation_store: where they are.
    """

    def __init__(self, activation_store: ActivationStore) -> None:
        self._activation_store = activation_store
        self._last_task = -1

    def begin(self) -> None:
        """Backward comes for a tensor."""
        self._activation_store.host.before_unpacking()
        self._sweep_at_the_end()

    def _sweep_at_the_end(self) -> None:
        """Let a backward pass give up what its last nodes used."""
        task = current_graph_task()
        if task not in (-1, self._last_task):
            self._last_task = task
            call_after_backward(self._activation_store.sweep)


class ForwardPass:
    """One forward pass, in the thread that makes it: a `SavePolicy`.

    Args:
        activation_store: where activations go.
        unpacker: that gives them back.
        runtime: of the model.
        own: ids of its parameters and buffers.
        find: says by what an operator that runs now is marked.
        is_paused: says whether what is saved now stays, whatever marks it.
    """

    turn = Turn.SWAP
    is_for_repetition = False

    def __init__(
        self,
        activation_store: ActivationStore,
        unpacker: Unpacker,
        runtime: ActivationRuntime,
        own: frozenset[int],
        find: Callable[[Operator], MarkScope | None],
        is_paused: Callable[[], bool],
    ) -> None:
        self.triggers = Triggers()
        self.operators = 0
        self.watch = OperatorWatch(
            own, find, self._count_operator, self._is_asked, activation_store.note_change
        )
        self._runtime = runtime
        self._activation_store = activation_store
        self._unpacker = unpacker
        self._is_paused = is_paused
        self._names: Counter[int] = Counter()
        self._due: list[
            tuple[int, int, WeakOffloadedTensor]
        ] = []  # a heap: at which operator, which one, what
        self._issued: set[str] = set()
        self._tickets = itertools.count()

    # --- being in force -----------------------------------------------------------------------

    def begin(self) -> None:
        """Come into force in this thread, inside whatever hooks there are."""
        self._runtime.saved.begin(self)
        self._runtime.operators.begin(self.watch)

    def end(self) -> None:
        """Be in force no more."""
        self._runtime.saved.end(self)
        self._runtime.operators.end(self.watch)

    def _is_asked(self) -> bool:
        """Say whether what is saved now comes to `pack`."""
        return self._runtime.saved.asks(self)

    # --- packing ------------------------------------------------------------------------------

    def lets_see(self, hook: Hook) -> bool:
        """See `SavePolicy`: what is swapped is not there any more."""
        return sees_all(hook, are_on_host=self._activation_store.store.device.type == "cpu")

    def pack(self, tensor: torch.Tensor) -> Swapped | None:
        """See `SavePolicy`: take what is marked."""
        scope = None if self._is_paused() or is_in_backward() else self._scope_of(tensor)
        return None if scope is None else self._swap(tensor, scope)

    def _scope_of(self, tensor: torch.Tensor) -> MarkScope | None:
        """Return what marks a saved tensor; ``None``: it stays."""
        storage = storage_worth_a_key(tensor, self._activation_store.store.device)
        scope = None if storage is None else self.watch.scope_of(storage)
        if storage is not None and scope is not None and self._runtime.saved.is_for_repetition(self):
            self.watch.unmark(storage)
            return None
        return scope

    def _swap(self, tensor: torch.Tensor, scope: MarkScope) -> Swapped:
        number = self._names[scope.layer_id]
        offloaded = self._activation_store.keep(tensor, f"activation/{scope.layer_id}/{number}")
        weakly = offloaded.weakly()
        if offloaded.key not in self._issued:
            self._names[scope.layer_id] += 1
            self._issued.add(offloaded.key)
            at = self.operators + RELEASE_FACTOR * scope.prefetch
            heapq.heappush(self._due, (at, next(self._tickets), weakly))
        self.triggers.expect(weakly, scope.prefetch)
        return Swapped(offloaded, self._unpacker)

    # --- release ------------------------------------------------------------------------------

    def _count_operator(self) -> None:
        self.operators += 1
        if self._due and self._due[0][0] <= self.operators:
            with self._runtime.operators.unwatched():
                while self._due and self._due[0][0] <= self.operators:
                    heapq.heappop(self._due)[2].release()

    def walk(self, outputs: Iterable[torch.Tensor]) -> None:
        """A part of the model has made ``outputs``: see which nodes backward will run."""
        with self._runtime.operators.unwatched():
            self.triggers.walk(outputs)

    def finish(self, outputs: Sequence[torch.Tensor]) -> None:
        """The model has made ``outputs``: give up what is not wanted at once."""
        with self._runtime.operators.unwatched():
            near = self.triggers.end(outputs)
            for _, _, offloaded in sorted(self._due):
                if offloaded.key not in near:
                    offloaded.leave()  # what was kept last is wanted first: nobody waits for it to be gone
