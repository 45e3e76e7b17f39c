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
from tierstore.training.activations.runtime.operator_mode import WatchedOperators
from tierstore.training.activations.runtime.operators import (
    has_no_bytes,
)
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
from tierstore.training.autograd.saved_tensors import Delegated, Kept, in_packed, keep, restore, sees_all
from tierstore.training.pytorch.function_modes import in_sight, out_of_sight
from tierstore.training.pytorch.saved_tensor_hooks import (
    Hook,
    InForce,
    Inside,
    bring_into_force,
    chain,
    is_for_repetition,
    take_out_of_force,
    whose,
)

RELEASE_FACTOR = 3
"""Device memory is given up after so many times ``backward_prefetch`` operators."""

SMALLEST_BYTES = 4096
"""Smaller storages stay on the device: a key would cost more than they do."""


class Swapped:
    """What a graph refers to instead of a saved tensor."""

    __slots__ = ("offloaded",)

    def __init__(self, offloaded: OffloadedTensor) -> None:
        self.offloaded = offloaded


class Unpacker:
    """Gives saved tensors back, long after their forward pass.

    Args:
        activation_store: where they are.
    """

    def __init__(self, activation_store: ActivationStore) -> None:
        self._activation_store = activation_store
        self._last_task = -1

    def unpack(self, packed: object) -> torch.Tensor:
        """Return the tensor that was packed.  Blocks until it is there."""
        with out_of_sight():
            return self._unpacked(packed)

    def _unpacked(self, packed: object) -> torch.Tensor:
        self._activation_store.host.before_unpacking()
        if isinstance(packed, Swapped):
            self._sweep_at_the_end()
            return packed.offloaded.take()
        if isinstance(packed, Delegated):
            self._sweep_at_the_end()
            brought = in_packed(Swapped, lambda each: each.offloaded.take(), packed.packed)
            packed = Delegated(brought, packed.unpack)
        assert isinstance(packed, Kept | Delegated)
        return restore(packed)

    def _sweep_at_the_end(self) -> None:
        """Let a backward pass give up what its last nodes used."""
        task = current_graph_task()
        if task not in (-1, self._last_task):
            self._last_task = task
            call_after_backward(self._activation_store.sweep)


class ForwardPass(Inside):
    """The hooks of one forward pass, in the thread that makes it.

    Args:
        activation_store: where activations go.
        unpacker: that gives them back.
        own: ids of the model's parameters and buffers.
        find: says by what an operator that runs now is marked.
        operators: of the thread.
        is_paused: says whether what is saved now stays, whatever marks it.
    """

    def __init__(
        self,
        activation_store: ActivationStore,
        unpacker: Unpacker,
        own: frozenset[int],
        find: Callable[[Operator], MarkScope | None],
        operators: WatchedOperators,
        is_paused: Callable[[], bool],
    ) -> None:
        self.triggers = Triggers()
        self.operators = 0
        self.watch = OperatorWatch(
            own, find, self._count_operator, self._is_asked, activation_store.note_change
        )
        self._operators = operators
        self._activation_store = activation_store
        self._unpacker = unpacker
        self._is_paused = is_paused
        self._hooks: InForce | None = None
        self._is_all_shown = False
        self._pack: Hook = self.pack
        self._names: Counter[int] = Counter()
        self._due: list[
            tuple[int, int, WeakOffloadedTensor]
        ] = []  # a heap: at which operator, which one, what
        self._issued: set[str] = set()
        self._tickets = itertools.count()

    # --- being in force -----------------------------------------------------------------------

    def begin(self) -> None:
        """Come into force in this thread, inside whatever hooks there are."""
        self._hooks = bring_into_force(self._pack, self._unpacker.unpack)
        self.outer = before = self._hooks.before
        are_on_host = self._activation_store.store.device.type == "cpu"
        self._is_all_shown = before is not None and sees_all(before[0], are_on_host=are_on_host)
        self._operators.begin(self.watch)

    def end(self) -> None:
        """Be in force no more."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            take_out_of_force(hooks)
        self._operators.end(self.watch)

    def _is_asked(self) -> bool:
        """Say whether what is saved now comes to `pack`."""
        return next((each for each in map(whose, chain()) if isinstance(each, ForwardPass)), None) is self

    # --- packing ------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what is kept instead of ``tensor``."""
        with self._operators.unwatched(), out_of_sight():
            kept = tensor if self._is_all_shown else self._swapped(tensor)
            if kept is not tensor:
                return kept
            if self.outer is None:
                return keep(tensor)
            pack, unpack = self.outer
            with in_sight():
                packed = pack(tensor)
            if self._is_all_shown:
                packed = in_packed(torch.Tensor, self._swapped, packed)
            return Delegated(packed, unpack)

    def _swapped(self, tensor: torch.Tensor) -> torch.Tensor | Swapped:
        """Return what is kept of a tensor that is marked, or the tensor."""
        scope = None if self._is_paused() or is_in_backward() else self._scope_of(tensor)
        return tensor if scope is None else self._swap(tensor, scope)

    def _scope_of(self, tensor: torch.Tensor) -> MarkScope | None:
        """Return what marks a saved tensor; ``None``: it stays."""
        if type(tensor) is not torch.Tensor or has_no_bytes(tensor):
            return None
        storage = storage_of(tensor)
        if (
            storage is None
            or storage.nbytes() < SMALLEST_BYTES
            or storage.device != self._activation_store.store.device
        ):
            return None
        scope = self.watch.scope_of(storage)
        if scope is not None and is_for_repetition(self):
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
        return Swapped(offloaded)

    # --- release ------------------------------------------------------------------------------

    def _count_operator(self) -> None:
        self.operators += 1
        if self._due and self._due[0][0] <= self.operators:
            with self._operators.unwatched():
                while self._due and self._due[0][0] <= self.operators:
                    heapq.heappop(self._due)[2].release()

    def walk(self, outputs: Iterable[torch.Tensor]) -> None:
        """A part of the model has made ``outputs``: see which nodes backward will run."""
        with self._operators.unwatched():
            self.triggers.walk(outputs)

    def finish(self, outputs: Sequence[torch.Tensor]) -> None:
        """The model has made ``outputs``: give up what is not wanted at once."""
        with self._operators.unwatched():
            near = self.triggers.end(outputs)
            for _, _, offloaded in sorted(self._due):
                if offloaded.key not in near:
                    offloaded.leave()  # what was kept last is wanted first: nobody waits for it to be gone
