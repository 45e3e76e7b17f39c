"""How bytes come and go under tensors that stay.

1. A binding (`tierstore.training.bundles.binding`) holds at most one lease, for writing; what changed is told
   at its release.
2. Tensors have their bytes only while a *window* is open.  Outside they wear a guard's class, so that every
   use is seen (`tierstore.training.faults.guard`).  They wear it inside, too, while several threads use the
   model: a use that has no window of its own would lose its bytes as another thread closes one.  Threads that
   Python has not started do not count: autograd's own do what the one that waits for them has asked for.
3. Every device stream that opens a window or reaches for the bytes waits for them, and they go only when it
   has done what it was told until the lease's end.  A stream that uses them without either, inside a
   module that was called on another, has to wait for that one, and that one for it.
4. The lease is held while a window is open *or anything else refers to the storage*: an alias that a
   user keeps, a saved tensor that backward unpacked, a view that a module returned.  The storage's use
   count tells; `Bindings.sweep` releases what nobody refers to any more.  Where hooks of saved tensors are
   forbidden, a graph saves a tensor itself: then it keeps its bytes until no graph has it.
5. Where host memory is all that there is, a lease that nobody needs *stays*: see `Bindings.let_go`.
6. What somebody pointed at other memory is brought home as soon as it may
   (`tierstore.training.bundles.reclaimed_tensors`), and whenever another bundle is leased.

Knows nothing of modules and optimizers.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from tierstore.errors import CapacityError, KeyNotFound, LeaseError
from tierstore.leases import Lease
from tierstore.planning.rules import HOST
from tierstore.signals import in_one_piece
from tierstore.store import Store
from tierstore.training import locks
from tierstore.training.bundles.binding import (
    Access,
    Binding,
    Residency,
    dress,
    keep_bases,
    natively,
    undress,
    versions_of,
    wear,
)
from tierstore.training.bundles.lease_room import lease_with_room, let_frames_go
from tierstore.training.bundles.lease_storages import LeaseStorages
from tierstore.training.bundles.leasing import Leasing, LeasingState
from tierstore.training.bundles.python_threads import started_by_python
from tierstore.training.bundles.reclaimed_tensors import (
    copy_home,
    fit_as_they_are,
    laid_out_anew,
    lay,
    that_may_return,
)
from tierstore.training.bundles.reclaiming import NothingToReclaim, Reclaimer
from tierstore.training.bundles.tensor_slots import set_data
from tierstore.training.bundles.unseen_writes import note_changes, watch
from tierstore.training.locks import Rank
from tierstore.training.pytorch.function_modes import are_hooks_allowed
from tierstore.training.pytorch.own_work import has_hands_on_tensors, ordinary_mode
from tierstore.training.recording.marks import Sign
from tierstore.training.recording.recorder import StepRecorder

__all__ = ["Access", "Binding", "Bindings", "natively", "set_data"]

Apart = Callable[[], AbstractContextManager[object]]
Classes = Callable[[Binding], Sequence[type]]
Explain = Callable[[CapacityError], CapacityError]
"""Returns what to raise where bundles cannot be here together."""
NoteLent = Callable[[torch.UntypedStorage, str], None]

log = logging.getLogger("tierstore")


class _BindingThread(threading.local):
    is_known = False


class Bindings:
    """All bindings of one model: takes and gives back their leases.  Safe from any thread.

    Args:
        store: where the bytes are.
        note_uses: told of bindings that are used together, when their bytes are held.
        apart: what is allocated inside this context is the store's.
        explain: asked when bundles cannot be here together.
        note_lent: told of each storage that shows leased bytes, of which the store knows nothing, and of the
            tier that they are leased in.
        reclaimer: makes room where there is none for a bundle; ``None``: nobody does.
        recorder: told when bytes are about to be asked for; ``None``: nobody is.

    Attributes:
        lock: while it is held, no other thread opens a window.
        leasing: whether they may be leased.
        keeps_leases: whether leases stay: see the module's fifth rule.
        pinned: those that keep the lease that they have got.
        are_several: whether several threads use the model.
    """

    def __init__(
        self,
        store: Store,
        note_uses: Callable[[Sequence[Binding]], None],
        apart: Apart = ordinary_mode,
        explain: Explain = lambda error: error,
        note_lent: NoteLent | None = None,
        reclaimer: Reclaimer | None = None,
        recorder: StepRecorder | None = None,
    ) -> None:
        self.store = store
        self._recorder = recorder
        self._note_uses = note_uses
        self.apart = apart
        self._explain = explain
        self._note_lent = note_lent
        self._computing_tier: str | None = None
        self._reclaimer = reclaimer or NothingToReclaim()
        self.lock = locks.new_lock(Rank.BINDINGS)  # guards all bindings and the next five
        self.leasing = Leasing()
        self.keeps_leases = store.tier_names == (HOST,)
        self._kept: dict[str, Binding] = {}  # whose leases nobody needs
        self._by_storage: dict[int, Binding] = {}
        self._lingering: dict[Binding, None] = {}
        self.pinned: set[Binding] = set()
        self._abroad: dict[Binding, None] = {}
        self._addressed: dict[Binding, torch.Tensor] = {}  # with an alias that keeps the bytes where they are
        self._told_parts: set[str] = set()
        self._here = _BindingThread()
        self._threads: list[threading.Thread] = []  # that use the model and that Python has started
        self.are_several = False

    def note_uses(self, bindings: Sequence[Binding]) -> None:
        """Take in that bindings are used now, in this order."""
        for binding in bindings:
            binding.uses += 1
        if bindings:
            self._note_uses(bindings)

    def compute_in(self, tier: str | None) -> None:
        """Lease all bundles in ``tier`` from now on; ``None``: each where it says itself."""
        self._computing_tier = tier

    def _tier_of(self, binding: Binding) -> str:
        return binding.confined_to or self._computing_tier or binding.tier

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other thread open a window, inside the context."""
        with self.lock, self.apart():
            yield

    # --- threads ------------------------------------------------------------------------------

    def note_thread(self) -> None:
        """This thread begins to use the model: see the module's second rule."""
        if self._here.is_known and not self.are_several:
            return
        with self.lock:
            self._threads = [each for each in self._threads if each.is_alive()]
            if not self._here.is_known:
                self._here.is_known = True
                self._threads += started_by_python(threading.get_ident())
            were_several, self.are_several = self.are_several, len(self._threads) > 1
            if self.are_several and not were_several:
                for binding in self._by_storage.values():
                    if binding.residency is Residency.OPEN:
                        wear(binding, binding.guards)

    # --- windows ------------------------------------------------------------------------------

    @in_one_piece
    def open(self, binding: Binding, classes: Sequence[type] | None = None) -> None:
        """Open a window: the tensors have their bytes until `close`.  Blocks for hardware.

        Args:
            binding: whose.
            classes: what the tensors wear meanwhile; ``None``: what they wore before all this.

        Raises:
            CapacityError: there is no room for it beside what is in use.
            BackendError: its bytes could not be brought.
        """
        self.open_all([binding], None if classes is None else lambda _: classes)

    @in_one_piece
    def close(self, binding: Binding) -> None:
        """Close a window; after the last one the bytes may go."""
        self.close_all([binding])

    @in_one_piece
    def open_all(self, bindings: Sequence[Binding], classes: Classes | None = None) -> None:
        """Open windows on all ``bindings``, or on none.  Blocks for hardware.

        Args:
            bindings: whose.
            classes: what the tensors of one wear meanwhile; ``None``: what they wore before all this.

        Raises:
            CapacityError: they cannot be here together beside what is in use.
            BackendError: some bytes could not be brought.
        """
        self._ask()
        # Large pieces first: what is leased cannot be moved to make room in one piece.
        order = sorted(bindings, key=lambda binding: -binding.nbytes) if len(bindings) > 1 else bindings
        try:
            self._open_with_room(order, classes)
        except CapacityError as error:
            explained = self._explain(error)
            if explained is error:
                raise
            raise explained from error

    def _ask(self) -> None:
        if self._recorder is not None and self._recorder.is_on:
            self._recorder.mark(Sign.ASK)

    def _open_with_room(self, order: Sequence[Binding], classes: Classes | None) -> None:
        try:
            self._open_or_none(order, classes)
        except CapacityError as error:
            if len(order) == 1:
                raise
            let_frames_go(error)
            with self.lock:  # or what other threads bring would lie between them
                self._empty(self._tier_of(order[0]))
                self._open_or_none(order, classes)

    def _open_or_none(self, bindings: Sequence[Binding], classes: Classes | None) -> None:
        with self.lock:  # until it is known what is open: an interrupt may come at every call
            opened: list[Binding] = []
            try:
                with self.apart():
                    fresh = self._hold_all(bindings, opened)
                    # Held first, and all of them: what the plan has passed is what prefetches push out, and
                    # what they bring would lie between what is leased.
                    self.note_uses(bindings)
                    for binding in fresh:
                        dress(binding, self._worn_in_window(binding, classes))
            except BaseException:
                self.close_all(opened)
                raise

    def _worn_in_window(self, binding: Binding, classes: Classes | None) -> Sequence[type]:
        if self.are_several:
            return binding.guards
        return binding.plain if classes is None else classes(binding)

    def _hold_all(self, bindings: Sequence[Binding], opened: list[Binding]) -> list[Binding]:
        """Have the leases and count the windows, in ``opened``; return those that had no window before."""
        fresh: list[Binding] = []
        for binding in bindings:
            self._hold(binding)
            if binding.windows == 0:
                self._lingering[binding] = None  # until the window is counted: an interrupt may come
                fresh.append(binding)
            binding.windows += 1
            opened.append(binding)
            self._lingering.pop(binding, None)
        return fresh

    @in_one_piece
    def close_all(self, opened: list[Binding]) -> None:
        """Close windows, also where closing one of them fails.

        Args:
            opened: on which; each is taken out as its window closes, so that an interrupt leaves the others.
        """
        failure: BaseException | None = None
        with self.lock, self.apart():
            are_saved_as_they_are = not are_hooks_allowed()
            while opened:
                binding = opened.pop()
                binding.windows -= 1
                if are_saved_as_they_are:
                    binding.is_in_graphs = True
                if binding.windows == 0:
                    self._lingering[binding] = None  # what is interrupted here, the next sweep does
                    try:
                        self._settle(binding)
                    except BaseException as error:  # noqa: BLE001 - the others are to be closed, too
                        failure = error
            try:
                if failure is not None:
                    raise failure
            finally:
                failure = None  # or its traceback and this frame keep each other, and what it refers to

    @contextlib.contextmanager
    def window(self, bindings: Sequence[Binding]) -> Iterator[None]:
        """Keep windows on all ``bindings`` open, inside the context."""
        opened: list[Binding] = []
        try:
            self.open_all(bindings)
            opened += bindings
            yield
        finally:
            try:
                self.close_all(opened)
            finally:
                if opened:
                    self.close_all(opened)  # that was interrupted

    @in_one_piece
    def watch(self, bindings: Sequence[Binding]) -> None:
        """Other code than PyTorch's gets its hands on bundles that have windows: see if it writes."""
        with self.lock, self.apart():
            watch(bindings)

    @in_one_piece
    def reach(self, binding: Binding) -> torch.Tensor:
        """Return the bundle's flat bytes.  They stay while anything refers to their storage."""
        are_handed_on = has_hands_on_tensors()
        self._ask()
        with self.lock, self.apart():
            self._hold(binding)
            if are_handed_on:
                watch([binding])
            if binding.windows == 0:
                self._lingering[binding] = None
            self.note_uses([binding])
            assert binding.flat is not None
            return binding.flat.detach()  # which refers to them before another thread may release the lease

    @in_one_piece
    def leased(self, binding: Binding) -> torch.Tensor | None:
        """Return the bundle's flat bytes if they are leased; they stay while anything refers to them."""
        with self.lock, self.apart():
            return None if binding.flat is None else binding.flat.detach()

    def find(self, tensor: torch.Tensor) -> Binding | None:
        """Return the binding whose leased bytes ``tensor`` lies in."""
        if not self._by_storage:
            return None
        return self._by_storage.get(tensor.untyped_storage()._cdata)  # noqa: SLF001

    @in_one_piece
    def keep_addresses(self, bindings: Sequence[Binding]) -> None:
        """Keep bundles that have windows where they are: somebody knows addresses of theirs."""
        with self.lock, self.apart():
            for binding in bindings:
                assert binding.flat is not None
                self._addressed.setdefault(binding, binding.flat.detach())

    @in_one_piece
    def forget_addresses(self) -> None:
        """Nobody uses an address any more that was told before."""
        if self._addressed:
            with self.lock, self.apart():
                self._addressed.clear()
                self.sweep()

    @in_one_piece
    def sweep(self) -> None:
        """Release every lease that no window needs and nothing refers to."""
        if self._lingering:
            with self.lock, self.apart():
                for binding in list(self._lingering):
                    self._settle(binding)

    @in_one_piece
    def release_idle(self, binding: Binding) -> bool:
        """Release the lease if nothing needs it; return whether all bytes are the store's now."""
        if binding.lease is None and not self._abroad:  # of nearly all bundles, for each in every step
            return binding.is_whole
        with self.lock, self.apart():
            self.bring_home()
            if binding.windows == 0 and binding.lease is not None:
                self._settle(binding)
            self.let_go(binding.key)
            return binding.lease is None and binding.is_whole

    # --- what was pointed elsewhere ---------------------------------------------------------------

    @in_one_piece
    def bring_home(self) -> None:
        """Let tensors that were pointed elsewhere have their bytes in the store again, where that may be.

        Where there is no room they stay where they are.
        """
        if not self._abroad or self.leasing.state is LeasingState.SUSPENDED:
            return
        with self.lock, self.apart():
            travellers = that_may_return(self._abroad)
            for binding in travellers:
                self._abroad.pop(binding)  # first: what is leased brings others home
            for binding, numbers in travellers.items():
                try:
                    self._bring_home(binding, numbers)
                except CapacityError as error:
                    let_frames_go(error)
                finally:
                    if not binding.is_whole:
                        self._abroad[binding] = None
            self.say_if_parts(travellers)

    def note_return(self, binding: Binding) -> None:
        """A bundle whose tensors were ordinary ones for a while is the store's again."""
        binding.worn = binding.guards
        binding.idle_versions = versions_of(binding)
        binding.writes += 1
        if not binding.is_whole:
            self._abroad[binding] = None

    def say_if_parts(self, bindings: Iterable[Binding]) -> None:
        """Log which tensors began within a larger memory, each once: theirs begins with them now."""
        found = [
            binding.places[number].name
            for binding in bindings
            for number, part in sorted(binding.parts.items())
            if part.begin_bytes
        ]
        names = [name for name in found if name not in self._told_parts]
        if names:
            self._told_parts.update(names)
            log.warning(
                "%d tensors were parts of a larger memory and have their own until the run ends; their "
                "storage_offset() counts in that: %s",
                len(names),
                ", ".join(names[:4]),
            )

    def _bring_home(self, binding: Binding, numbers: Sequence[int]) -> None:
        self._hold(binding)
        if binding.is_referred_to:  # an alias shows what the parameter was before
            return
        if fit_as_they_are(binding, numbers):
            copy_home(binding, numbers)
            self._settle(binding)
        elif binding not in self.pinned:
            places, flat = laid_out_anew(binding, numbers)
            self._release(binding)
            self.store.put(binding.key, flat, tier=binding.confined_to, replace=True)
            lay(binding, places, flat.numel(), numbers)
            binding.writes += 1
            if binding.after_use is not None:
                binding.after_use(binding)

    def busy(self, bindings: Sequence[Binding]) -> list[Binding]:
        """Return those that somebody has a hand on, when all that nobody needs is released."""
        self.sweep()
        if not all(map(self.release_idle, bindings)):
            gc.collect()  # what only a cycle refers to
        return [binding for binding in bindings if not self.release_idle(binding)]

    # --- leases -------------------------------------------------------------------------------

    def _hold(self, binding: Binding) -> None:
        """Have a lease that the current stream uses."""
        if binding.flat is None or binding.key in self._kept:
            self.leasing.require(f"the bytes of {binding.places[0].name!r} are needed")
            self.sweep()
            self.bring_home()
        if binding.flat is None:  # else it may have come home, and something refers to its bytes
            self._acquire(binding)
        elif binding.lease is not None:
            binding.lease.use()

    def _acquire(self, binding: Binding) -> None:
        if binding.lease is not None:
            self._release(binding)  # that was interrupted
        binding.is_dirty = False
        try:
            self._prepare(binding)
            self._lingering[binding] = None  # whatever fails from here on, the next sweep ends the lease
            binding.lease = self.store.lease(binding.key, tier=self._tier_of(binding), write=True)
        except CapacityError as error:
            let_frames_go(error)
            lease = self._lease_after_making_room(binding)
            self._lingering[binding] = None
            binding.lease = lease
        flat = binding.lease.tensor
        binding.versions = versions_of(binding)
        binding.storages = shown = LeaseStorages(flat, binding.places, binding.pieces, binding.offsets)
        self._by_storage.update(dict.fromkeys(shown.keys, binding))
        if self._note_lent is not None:
            shown.tell_of_slices(self._note_lent, self._tier_of(binding))
        binding.baseline = binding.count_references()
        binding.flat = flat
        binding.become(Residency.LEASED)

    def _lease_after_making_room(self, binding: Binding) -> Lease:
        """Lease a bundle that there was no room for, with every means that there is."""
        # What an error's traceback or a cycle refers to holds its lease: let those go first.
        gc.collect()
        self.sweep()
        tier = self._tier_of(binding)
        self._empty(tier)
        self._prepare(binding)
        return lease_with_room(
            lambda: self.store.lease(binding.key, tier=tier, write=True),
            lambda needed_bytes: self._reclaimer.make_room(needed_bytes, self),
        )

    def _prepare(self, binding: Binding) -> None:
        if self._tier_of(binding) not in self.store.tier_names[1:]:
            self._reclaimer.prepare(binding.nbytes)

    def _empty(self, tier: str) -> None:
        """Push everything that is not leased out of a tier, so that its free bytes are in one piece.

        What is on its way into the tier is waited for, and pushed out as well.
        """
        names = self.store.tier_names
        index = names.index(tier) if tier in names else 0
        if index + 1 == len(names):
            return
        for key in self.store:
            try:
                there = self.store.where(key)
                if tier in there or not set(names[:index]).intersection(there):
                    self.store.evict(key, to=names[index + 1]).result()
            except (KeyNotFound, LeaseError, CapacityError) as error:
                let_frames_go(error)

    def _settle(self, binding: Binding) -> None:
        """A binding has no window: release its lease, or let it linger while it is referred to."""
        if binding.residency is Residency.OPEN or binding.is_in_graphs or binding.has_bases:
            undress(binding)
            if not binding.is_whole:
                self._abroad[binding] = None
            if binding.is_referred_to:
                keep_bases(binding)
        if binding in self.pinned:
            self._lingering.pop(binding, None)
            return
        if binding.is_referred_to:
            self._lingering[binding] = None
            return
        if self.keeps_leases and binding.flat is not None and binding.after_use is None:
            self._keep(binding)
        else:
            self._release(binding)
        self._lingering.pop(binding, None)

    def _keep(self, binding: Binding) -> None:
        """Take in what a window has changed, and let the lease stay."""
        note_changes(binding)
        if binding.is_dirty:
            binding.writes += 1
            binding.is_dirty = False  # nobody asks at its end: no other tier has a replica
            binding.versions = versions_of(binding)
        self._kept[binding.key] = binding

    @in_one_piece
    def let_go(self, key: str | None) -> bool:
        """End the leases that stay of a key that somebody asks the store for, or of all; say if some did.

        For all of them it does not wait: whoever finds no room may have locks that come after this one.
        """
        if not self._kept or not self.lock.acquire(blocking=key is not None):
            return False
        try:
            keys = [*self._kept] if key is None else [key] * (key in self._kept)
            idle = [b for b in map(self._kept.__getitem__, keys) if not (b.windows or b.is_referred_to)]
            with self.apart():
                for binding in idle:
                    self._release(binding)
            return bool(idle)
        finally:
            self.lock.release()

    def _release(self, binding: Binding) -> None:
        """End the lease; where that was interrupted, do the rest of it."""
        lease, shown = binding.lease, binding.storages
        if lease is None:
            return
        self._kept.pop(binding.key, None)
        note_changes(binding)
        binding.flat = None  # from here on nobody uses it
        for key in () if shown is None else shown.keys:
            self._by_storage.pop(key, None)
        binding.storages = shown = None
        lease.release(written=binding.is_dirty)
        binding.lease = None
        binding.become(Residency.AWAY)
        binding.writes += binding.is_dirty
        if binding.after_use is not None:
            binding.after_use(binding)

    @in_one_piece
    def forsake(self, binding: Binding) -> None:
        """End the binding's lease whoever refers to its bytes, and open no window again."""
        with self.lock, self.apart():
            self.pinned.discard(binding)
            binding.windows = 0
            if binding.residency is Residency.OPEN:
                if binding.flat is not None:
                    undress(binding)
                binding.become(Residency.LEASED)
            binding.worn = binding.guards
            self._lingering.pop(binding, None)
            self._abroad.pop(binding, None)
            self._release(binding)
