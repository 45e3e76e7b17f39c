"""Gradients that wait for the optimizer in the store.

1. Where gradients are stashed, each parameter's gradient is one key.  ``p.grad`` is then a *handle*: a
   guarded tensor over that key, the same object until it is zeroed.  Nothing is brought before it is used.
2. A gradient is autograd's own from before its accumulation node runs until that node and every hook
   behind it are done: `Gradients.lend` gives the stash back as the gradient that autograd itself sees, and
   `Gradients.take` brings it to its key again.  In between nothing of ours is in the way: PyTorch
   itself adds, and whoever looks, from Python or not, sees what it would see without us.
3. What autograd itself sees wins over a stash: who sets, clears or replaces a gradient assigns it.
4. A gradient stays an ordinary tensor until it is zeroed if somebody assigned it, if it is sparse or has
   a graph of its own, if anything else refers to it or to its memory (an alias would not see what is added
   later), or if there was room for it where backward made it.
5. The handle is the tensor that autograd made: whoever kept it in a hook has what ``p.grad`` is later.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator

import torch

from tierstore.errors import UsageError
from tierstore.planning import Home
from tierstore.planning.deciding import is_stashed, room_bytes
from tierstore.store import Store
from tierstore.training.autograd.gradient import (
    Gradient,
    GradientState,
    GradientStay,
    is_alone,
    is_kept,
    native_gradient,
    seen_by_autograd,
    set_native_gradient,
    show_gradient,
)
from tierstore.training.autograd.gradient_table import GradientTable
from tierstore.training.bundles.binding import values_of
from tierstore.training.bundles.bindings import Binding, Bindings, natively
from tierstore.training.bundles.bundle_tiers import access_after_use
from tierstore.training.bundles.ending import RunEnding
from tierstore.training.bundles.layout import flat_bytes, lay_out
from tierstore.training.bundles.placeholders import Placeholder, looks_of
from tierstore.training.bundles.poisons import poison_for
from tierstore.training.bundles.tensor_slots import memory_of
from tierstore.training.faults import guard, guarded_classes
from tierstore.training.pytorch.own_work import ordinary_mode


class Gradients:
    """All gradients of one model.

    Args:
        store: where they are stashed.
        bindings: that handles belong to.
        fault_handler: who looks after handles.
        table: of what is known of them.
        must_stash: says whether those that autograd makes from now on are to be stashed.
        note_put: told of each that comes to be stashed, its storage, and the room it needs in the first tier.
        note_change: told of the parameter before a stash changes or goes.

    Attributes:
        table: of what is known of them.
        note_change: see above.
    """

    def __init__(
        self,
        store: Store,
        bindings: Bindings,
        fault_handler: guard.FaultHandler,
        table: GradientTable,
        *,
        must_stash: Callable[[], bool],
        note_put: Callable[[Binding, torch.UntypedStorage, int], None],
        note_change: Callable[[torch.Tensor], None],
    ) -> None:
        self._store = store
        self._bindings = bindings
        self._fault_handler = fault_handler
        self.table = table
        self._given: dict[Gradient, None] = {}  # what `bring_back` was called for, in that order
        self._kept: set[torch.Tensor] = set()  # by parameter: those that are always ordinary tensors
        self._must_stash = must_stash
        self._note_put = note_put
        self.note_change = note_change

    def add(self, name: str, parameter: torch.nn.Parameter, home: Home) -> None:
        """Look after one parameter's gradient; one that is there already becomes a stash, at ``home``."""
        gradient = self.table.add(name, parameter, home)
        if parameter in self._kept:
            gradient.stay = GradientStay.ALWAYS
        self._settle(gradient)

    def keep(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let gradients be ordinary tensors from now on, where autograd itself sees them."""
        for parameter in parameters:
            self._kept.add(parameter)
            gradient = self.table.find(parameter)
            if gradient is not None:
                with gradient.lock:
                    gradient.stay = GradientStay.ALWAYS
                    self._restore(gradient)

    # --- what p.grad means --------------------------------------------------------------------

    def get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return ``p.grad``."""
        native = native_gradient(parameter)
        if native is not None:
            return native
        gradient = self.table.find(parameter)
        return None if gradient is None else gradient.handle

    def assign(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        """Do what ``p.grad = value`` means.

        Raises:
            UsageError: it is a tensor that is offloaded itself, and no gradient.
            RuntimeError, TypeError: it cannot be the gradient of ``parameter``; the text is PyTorch's.
        """
        gradient = self.table.find(parameter)
        if gradient is None or value is parameter:  # which PyTorch refuses
            set_native_gradient(parameter, value)
            return
        if value is not None and value is not gradient.handle:
            self._let_go_of(value, gradient.name)
        with gradient.lock:
            if value is not None and value is gradient.handle:
                return
            set_native_gradient(parameter, value)
            if gradient.stay is not GradientStay.ALWAYS:
                gradient.stay = GradientStay.IN_STORE if value is None else GradientStay.UNTIL_ZEROED
            self._forget(gradient)

    def _let_go_of(self, value: torch.Tensor, name: str) -> None:
        """A tensor becomes the gradient of ``name``, too: if it is a stash, it is one no more."""
        guarded_tensor = guard.guarded_tensor_of(value)
        if guarded_tensor is None:
            return
        other = next((each for each in self.table if each.binding is guarded_tensor.binding), None)
        if other is None:
            raise UsageError(
                f"cannot make {guarded_tensor.place.name!r} the gradient of {name!r}: it is offloaded, "
                "and its bytes come and go. Use its .detach(), which keeps them, or its .detach().clone().",
                key=guarded_tensor.binding.key,
            )
        with other.lock:
            if other.stay is not GradientStay.ALWAYS:
                other.stay = GradientStay.UNTIL_ZEROED
            self._restore(other)

    # --- autograd's turn ----------------------------------------------------------------------

    counts_passes = False

    def begin_pass(self) -> None:
        """A backward pass begins: nothing needs to be known for it."""

    def go_on(self) -> None:
        """Autograd goes on to something else than the next accumulation: nothing was kept for that."""

    def lend(self, parameter: torch.Tensor) -> Gradient | None:
        """Autograd is about to add to a gradient: let it see what there is.  Blocks for hardware.

        Returns:
            The gradient that `take` is due for when its node and the hooks behind it are done; ``None``: for
            none.

        Raises:
            UsageError: another thread's optimizer steps with it.
            CapacityError: there is no room for it beside what is in use.
            BackendError: its bytes could not be brought.
        """
        gradient = self.table.find(parameter)
        if gradient is None:  # it is not one of the model's
            return None
        with gradient.lock:
            if gradient.stepper not in (None, threading.get_ident()):
                raise UsageError(
                    f"a backward pass adds to the gradient of {gradient.name!r} while another thread's "
                    "optimizer steps with it: let one wait for the other."
                )
            if gradient.state is GradientState.ORDINARY and not self._may_go(gradient):
                return None
            if gradient.state is GradientState.STASHED:
                self._show(gradient)
            gradient.flights += 1
        return gradient

    def _may_go(self, gradient: Gradient) -> bool:
        """Whether what autograd makes of an ordinary gradient, or of none, may become a stash."""
        if gradient.stay is GradientStay.UNTIL_ZEROED and native_gradient(gradient.parameter) is None:
            gradient.stay = GradientStay.IN_STORE
        if gradient.stay is GradientStay.IN_STORE and not gradient.flights and not self._is_to_go(gradient):
            gradient.stay = GradientStay.UNTIL_ZEROED
        return gradient.stay is GradientStay.IN_STORE

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other thread change a gradient, inside the context; to be entered before bindings' own."""
        with contextlib.ExitStack() as held:
            for gradient in list(self.table):
                held.enter_context(gradient.lock)
            yield

    def stash_all(self) -> None:
        """Bring every gradient that is an ordinary tensor of its own to a key.  Blocks.

        Raises:
            CapacityError: there is no room for one; it stays as it is.
        """
        for gradient in self.table:
            with gradient.lock:
                self._stash(gradient)

    def stash_if_needed(self, parameter: torch.Tensor) -> None:
        """Bring a gradient that was assigned, and that nobody else refers to, to a key if those are to wait.

        Raises:
            CapacityError: there is no room for it; it stays as it is.
        """
        gradient = self.table.find(parameter)
        if gradient is not None and self._must_stash():
            with gradient.lock:
                self._stash(gradient)

    def take_reduced(self, parameter: torch.Tensor) -> None:
        """A gradient of a part has all that other processes add: bring it to its key, if it is to wait.

        Those that were reduced in one message share memory, which nobody else has: it goes with the last one.

        Raises:
            CapacityError: there is no room for it; it stays as it is.
        """
        gradient = self.table.find(parameter)
        if gradient is None or gradient.stay is GradientStay.ALWAYS:
            return
        with gradient.lock:
            native = native_gradient(parameter)
            if native is not None and _has_plain_bytes(native) and self._is_to_go(gradient):
                gradient.stay = GradientStay.IN_STORE
                self._forget(gradient)
                self._put(gradient, native)
            if gradient.binding is not None:
                gradient.accumulations += 1
                gradient.know_uses()

    def _stash(self, gradient: Gradient) -> None:
        native = native_gradient(gradient.parameter)
        if gradient.state is not GradientState.ORDINARY or gradient.flights or native is None:
            return
        if (
            gradient.stay is not GradientStay.ALWAYS
            and _has_plain_bytes(native)
            and not gradient.may_be_shared(native)
            and is_alone(gradient.parameter)
        ):
            self._put(gradient, native)
            gradient.know_uses()

    def _show(self, gradient: Gradient) -> None:
        binding, parameter = gradient.binding, gradient.parameter
        assert binding is not None
        if native_gradient(parameter) is not None:  # set where no guard could see it
            self._forget(gradient)
            return
        self.note_change(parameter)
        self._bindings.open(binding)
        binding.is_dirty = True
        show_gradient(parameter, binding.tensors[0])
        gradient.note_holders()
        gradient.move(GradientState.LENT)

    def take(self, gradient: Gradient) -> None:
        """A pass that `lend` was for is done with a gradient: bring it to its key, if it is to wait there.

        Raises:
            CapacityError: there is no room for it; it stays autograd's.
        """
        with gradient.lock:
            gradient.flights -= 1
            if not gradient.flights:
                self._settle(gradient)

    def _settle(self, gradient: Gradient) -> None:
        """Nobody works on a gradient: stash what autograd itself sees."""
        native = native_gradient(gradient.parameter)
        if gradient.state is GradientState.LENT and native is gradient.handle:
            del native
            if gradient.has_new_holders:
                return  # autograd keeps it, in the store's bytes, until they are gone or it is zeroed
            self._take_back(gradient)
        elif native is not None:
            self._forget(gradient)
            is_own = self._is_stashable(gradient, native) and not gradient.may_be_shared(native)
            if not (is_own and is_alone(gradient.parameter)):
                gradient.stay = (
                    gradient.stay if gradient.stay is GradientStay.ALWAYS else GradientStay.UNTIL_ZEROED
                )
                return
            self._put(gradient, native)
        else:
            if gradient.state is GradientState.LENT:
                self._forget(gradient)
            return
        gradient.accumulations += 1
        gradient.know_uses()

    def _is_stashable(self, gradient: Gradient, native: torch.Tensor) -> bool:
        return (
            gradient.stay is GradientStay.IN_STORE and _has_plain_bytes(native) and self._is_to_go(gradient)
        )

    def _is_to_go(self, gradient: Gradient) -> bool:
        """Whether a gradient that autograd makes goes to the store."""
        return is_stashed(gradient.home, self._store.tier_names[0], must=self._must_stash())

    def _take_back(self, gradient: Gradient) -> None:
        assert gradient.binding is not None
        set_native_gradient(gradient.parameter, None)
        gradient.move(GradientState.STASHED)
        self._bindings.close(gradient.binding)

    def _put(self, gradient: Gradient, fresh: torch.Tensor) -> None:
        key = gradient.new_key(self._store)
        with self._bindings.apart():
            places, nbytes = lay_out([(f"the gradient of {gradient.name}", fresh)])
            poison = poison_for(places[0], fresh.device)
            binding = Binding(key, places, nbytes, [fresh], [guarded_classes.guard_of(type(fresh))], [poison])
            binding.is_saved_by_reference = False
            binding.after_use = access_after_use(gradient.home, self._store)
            binding.confined_to = _confined_to(gradient)
            flat = flat_bytes(fresh, places[0], nbytes)
            storage = flat.untyped_storage()
            self._note_put(binding, storage, room_bytes(gradient.home, self._store.tier_names[0], nbytes))
            # What other processes have reduced may lie in memory that PyTorch has not allocated.
            self._store.put(key, flat, tier=gradient.home.tier, adopt=storage.resizable())
        gradient.binding = binding
        gradient.given_address = 0  # that memory may be somebody else's next
        gradient.came_bytes = max(gradient.came_bytes, nbytes)
        gradient.move(GradientState.STASHED)
        set_native_gradient(gradient.parameter, None)
        guard.enrol(binding, self._fault_handler)
        binding.detach(0)
        fresh.__class__ = binding.guards[0]

    def _forget(self, gradient: Gradient) -> None:
        """Drop the stash, if there is one; a handle that somebody else has becomes an ordinary tensor."""
        if gradient.binding is None:
            return
        self.note_change(gradient.parameter)
        binding, gradient.binding = gradient.binding, None
        is_lent = gradient.state is GradientState.LENT
        gradient.move(GradientState.ORDINARY)
        has_keeper = is_kept(binding)
        if has_keeper:
            flat = self._copy(binding)  # which is the program's from now on
            with ordinary_mode():
                (kept,) = values_of(binding, flat)
        if is_lent:
            self._bindings.close(binding)
        guard.dismiss(binding)
        if has_keeper:
            # The end of a window would take the bytes from the handle again, and so would coming home.
            if binding.windows or not binding.is_whole:
                self._bindings.forsake(binding)
            binding.tensors[0].__class__ = binding.plain[0]
            binding.slots[0].attach(binding.tensors[0], kept)
        if not binding.is_whole:  # and nobody has it: it need not come home
            self._bindings.forsake(binding)
        elif not self._bindings.release_idle(binding):
            binding.after_use = self._drop  # an alias of it lives on: drop it when that is gone
            return
        self._drop(binding)

    def _copy(self, binding: Binding) -> torch.Tensor:
        flat = self._bindings.leased(binding)
        return self._store.get(binding.key) if flat is None else flat.clone()

    def _drop(self, binding: Binding) -> None:
        with self._bindings.apart():
            self._store.drop(binding.key)

    def restore(self, ending: RunEnding) -> None:
        """Make every stashed gradient an ordinary one; what cannot be is lost, and the rest goes on.

        Args:
            ending: that this is a part of; its parameters are ordinary by now.
        """
        for gradient in self.stashed():
            failure = ending.attempt(functools.partial(self._restore, gradient))
            if failure is not None:
                ending.attempt(functools.partial(self.lose, gradient, ending, failure))

    def stashed(self) -> list[Gradient]:
        """Return those whose bytes are in the store."""
        return [gradient for gradient in self.table if gradient.binding is not None]

    def bring_back(self, gradient: Gradient, values: torch.Tensor | None) -> None:
        """Make a stashed gradient an ordinary one, and remember it: see `take_back`.

        Args:
            gradient: if it is ordinary by now, nothing happens.
            values: what `fetch` has returned.
        """
        self._given[gradient] = None
        self._hand_over(gradient, values)

    def take_back(self) -> None:
        """Bring gradients that `bring_back` gave to their keys again, unless somebody else refers to them.

        Raises:
            CapacityError: no tier has room for one; it stays as it is.
            BackendError: a medium failed.
        """
        while self._given:
            gradient = next(reversed(self._given))
            with gradient.lock:
                self._stash(gradient)
            self._given.pop(gradient, None)

    def forget_given(self) -> None:
        """What was brought back stays so."""
        self._given.clear()

    def _restore(self, gradient: Gradient) -> None:
        self._hand_over(gradient, self.fetch(gradient, gradient.parameter.device))

    def fetch(self, gradient: Gradient, device: torch.device) -> torch.Tensor | None:
        """Return the values of a stashed gradient in memory of their own, and end what leases them.  Blocks.

        Args:
            gradient: whose.
            device: where they go.

        Returns:
            ``None``: it is ordinary, or autograd itself sees another one by now.

        Raises:
            BackendError: they could not be read.
        """
        binding = gradient.binding
        if binding is None:
            return None
        with natively():
            if _is_superseded(gradient):
                return None
        self._bindings.forsake(binding)
        with self._bindings.apart():
            (values,) = values_of(binding, self._store.get(binding.key, device=device))
        return values

    def _hand_over(self, gradient: Gradient, values: torch.Tensor | None) -> None:
        binding = gradient.binding
        if binding is None:
            return
        if values is None:
            self._forget(gradient)
            return
        self._give_back(gradient, binding, values)
        self._drop(binding)

    def _give_back(self, gradient: Gradient, binding: Binding, values: torch.Tensor) -> None:
        handle = binding.tensors[0]
        with natively():
            binding.slots[0].attach(handle, values)
            gradient.given_address = values.untyped_storage().data_ptr()
        handle.__class__ = binding.plain[0]
        guard.dismiss(binding)
        show_gradient(gradient.parameter, handle)
        self._is_given_back(gradient)

    def lose(self, gradient: Gradient, ending: RunEnding, reason: BaseException) -> None:
        """Let a stashed gradient that cannot be brought back say so when it is used.

        Args:
            gradient: if it is ordinary by now, nothing happens.
            ending: that this is a part of.
            reason: why it cannot.
        """
        self._leave_behind(
            gradient,
            lambda handle, kind, name, looks: ending.lose(handle, kind, name, looks, reason),
        )

    def release(self, gradient: Gradient, text_of: Callable[[str], str]) -> None:
        """Let a stashed gradient be a placeholder; no byte of it is read.

        Args:
            gradient: if it is ordinary by now, nothing happens.
            text_of: returns what a placeholder says, given its name.
        """
        if gradient.binding is not None:
            with natively():
                is_superseded = _is_superseded(gradient)
            if is_superseded:
                self._forget(gradient)
                return
            self._bindings.forsake(gradient.binding)
        self._leave_behind(
            gradient,
            lambda handle, kind, name, looks: Placeholder(
                kind, name, text_of(name), looks, handle.device
            ).put_on(handle),
        )

    def _leave_behind(
        self, gradient: Gradient, put_on: Callable[[torch.Tensor, type, str, torch.Tensor], None]
    ) -> None:
        binding = gradient.binding
        if binding is None:
            return
        guard.dismiss(binding)
        handle = binding.tensors[0]
        with natively():
            binding.detach(0)  # it may show bytes of a lease that has ended
        show_gradient(gradient.parameter, handle)
        put_on(handle, binding.plain[0], binding.places[0].name, looks_of(binding.places)[0])
        self._is_given_back(gradient)

    def _is_given_back(self, gradient: Gradient) -> None:
        if gradient.state is not GradientState.ORDINARY:
            gradient.move(GradientState.ORDINARY)
        gradient.binding = None

    # --- for the optimizer --------------------------------------------------------------------

    def bindings_of(self, parameters: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, Binding]]:
        """Return the stashes of those parameters whose gradient is one."""
        with natively():
            return [
                (parameter, gradient.binding)
                for parameter in parameters
                if (gradient := self.table.find(parameter)) is not None
                and gradient.binding is not None
                and not _is_superseded(gradient)
            ]

    def show(self, stashed: Iterable[tuple[torch.Tensor, Binding]]) -> None:
        """Let a step see stashes, whose windows are open, where autograd itself sees gradients."""
        for parameter, binding in stashed:
            with self.table[parameter].lock:
                self.table[parameter].stepper = threading.get_ident()
                show_gradient(parameter, binding.tensors[0])

    def hide(
        self, stashed: Iterable[tuple[torch.Tensor, Binding]]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """End what `show` began: return what is in the place of a stash where the step changed that.

        It has to be assigned when the windows are closed.  What autograd works on stays with it.
        """
        changed: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for parameter, binding in stashed:
            self.table[parameter].stepper = None
            native = native_gradient(parameter)
            if native is not binding.tensors[0]:
                changed.append((parameter, native))
            if self.table[parameter].state is not GradientState.LENT:
                set_native_gradient(parameter, None)
        return changed

    def look_at(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient, wherever its bytes are, for its looks; called natively."""
        seen, gradient = seen_by_autograd(parameter), self.table.find(parameter)
        return gradient.handle if seen is None and gradient is not None else seen

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter has a gradient, wherever it is."""
        gradient = self.table.find(parameter)
        return (gradient is not None and gradient.binding is not None) or native_gradient(
            parameter
        ) is not None


def _is_superseded(gradient: Gradient) -> bool:
    """Whether autograd itself sees another gradient than the stash, as it has added out of place.

    Called natively.
    """
    seen = seen_by_autograd(gradient.parameter)
    return seen is not None and seen is not gradient.handle


def _confined_to(gradient: Gradient) -> str | None:
    """Return the tier that a gradient is leased in, as its parameter is; ``None``: there is none."""
    owner = guard.guarded_tensor_of(gradient.parameter)
    return None if owner is None else owner.binding.confined_to


def _has_plain_bytes(native: torch.Tensor) -> bool:
    """Whether a gradient is a dense tensor without a graph of its own, or such a part of one."""
    memory = memory_of(native)
    return type(memory) is torch.Tensor and not native.requires_grad and memory.layout is torch.strided
