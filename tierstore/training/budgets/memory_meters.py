"""What the program has on the device outside the store: activations, workspace, fresh gradients.

Measured only in steps that are to be learned from.  On CUDA the allocator is asked; where a device is
emulated, every tensor of host memory that an operation makes is taken for the device's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Protocol

import torch

from tierstore import sides
from tierstore.sides import Side
from tierstore.store import Store
from tierstore.torch_private import (
    is_legacy_batched_tensor,
    is_traceable_wrapper_subclass,
    is_transformed_tensor,
    storage_use_count,
)
from tierstore.training.bundles.binding import natively
from tierstore.training.bundles.tensor_slots import memory_of
from tierstore.training.pytorch import operator_observers
from tierstore.units import align_up


class Meter(Protocol):
    """Measures the program's device bytes between `begin` and `end`.

    Attributes:
        was_peak_hidden: whether the last peak told may be too low, as an earlier one hid it.
    """

    was_peak_hidden: bool

    def begin(self, inputs: Iterable[object]) -> None:
        """Start, or go on.

        Args:
            inputs: of the model, which are there already, as is whatever else it is given.
        """
        ...

    def begin_step(self) -> None:
        """Start, or go on: an optimizer begins, whose operations may be given what is in host memory."""
        ...

    def look(self) -> None:
        """Take a sample, where one is needed."""
        ...

    def live_bytes(self) -> int:
        """Return what there is now of what was seen while it was measured."""
        ...

    def standing_bytes(self) -> int:
        """Return what the program has that no use of the model makes: that was there before it began."""
        ...

    def take_peak(self) -> int:
        """Return the most bytes at one moment since the last time this was asked."""
        ...

    def most_bytes(self) -> int:
        """Return the most since `take_peak` was asked, where what the store has changes no more meanwhile.

        So it is asked whenever that may change.  What `take_peak` returns is the same whether it is or not.
        """
        ...

    def take_moment(self) -> tuple[int | None, int | None]:
        """Return what there is now, and the most since this was asked last; ``None``: it is not known.

        What `take_peak` returns is the same whether this is asked or not.
        """
        ...

    def take_whole_peak(self) -> int | None:
        """Return the most that the whole device had since this was asked last; ``None``: it is not known."""
        ...

    def end(self) -> None:
        """Stop."""
        ...

    def close(self) -> None:
        """Stop for good, and leave nothing behind."""
        ...

    def hand_over(self, storage: torch.UntypedStorage, is_held: Callable[[], bool]) -> None:
        """Take in that the store has adopted a storage of the program's.

        It is the program's until nobody else refers to it, as the store may let go of it at any time.

        Args:
            storage: that is charged to the store.
            is_held: says whether the store has it still.
        """
        ...

    def leave_out(self, storage: torch.UntypedStorage) -> None:
        """Take in that a storage lies over memory that is charged to the store.  From any thread."""
        ...


def tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and dataclasses."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, Mapping):
            yield from tensors_in(value.values())
        elif is_dataclass(value) and not isinstance(value, type):
            yield from tensors_in(getattr(value, each.name) for each in fields(value))


_ALONE = 2  # one tensor refers to a storage, beside the storage's object in Python

# ---------------------------------------------------------------------- an emulated device


class EmulatedMeter:
    """Sees every operator of the thread and counts the storages that come out of it anew.

    What the model's operators are given that is not known is the program's, too, unless a store has
    allocated it: such as the targets of a loss.  It was there all the time.  What modules on the host compute
    is not the device's (`tierstore.sides`).

    Args:
        store: whose bytes are not the program's.
    """

    was_peak_hidden = False

    def __init__(self, store: Store) -> None:
        self._counting = _Counting()
        self._former_peak_bytes = 0  # that only `take_moment` has told
        self._leave_alone = store.watch_device(self._counting.leave_out)

    def begin(self, inputs: Iterable[object]) -> None:
        """See `Meter.begin`."""
        self._forget_former()
        given = list(storages_in(each for each in tensors_in(inputs) if type(each) is torch.Tensor))
        self._counting.begin(is_given=bool(given))
        self._counting.add([each for each in given if sides.side_of(each) is not Side.HOST])

    def begin_step(self) -> None:
        """See `Meter.begin_step`."""
        self._forget_former()
        self._counting.begin(is_given=False)

    def _forget_former(self) -> None:
        if self._counting.is_over:  # and nobody has taken what was before
            self._former_peak_bytes = 0

    def look(self) -> None:
        """See `Meter.look`."""

    def live_bytes(self) -> int:
        """See `Meter.live_bytes`."""
        self._counting.settle()
        return self._counting.live_bytes

    def standing_bytes(self) -> int:
        """See `Meter.standing_bytes`: what is seen here has been made in one."""
        return 0

    def take_peak(self) -> int:
        """See `Meter.take_peak`."""
        peak_bytes = max(self._former_peak_bytes, self._take_peak())
        self._former_peak_bytes = 0
        return peak_bytes

    def most_bytes(self) -> int:
        """See `Meter.most_bytes`."""
        self._counting.settle()
        return max(self._former_peak_bytes, self._counting.peak_bytes)

    def take_moment(self) -> tuple[int | None, int | None]:
        """See `Meter.take_moment`."""
        if self._counting.is_over:
            return None, None
        peak_bytes = self._take_peak()
        self._former_peak_bytes = max(self._former_peak_bytes, peak_bytes)
        return self._counting.live_bytes, peak_bytes

    def _take_peak(self) -> int:
        counting = self._counting
        counting.settle()
        peak_bytes, counting.peak_bytes = counting.peak_bytes, counting.live_bytes
        return peak_bytes

    def take_whole_peak(self) -> int | None:
        """See `Meter.take_whole_peak`: there is no allocator that knows."""
        return None

    def end(self) -> None:
        """See `Meter.end`."""
        self._counting.end()

    def close(self) -> None:
        """See `Meter.close`."""
        self.end()
        self._leave_alone()

    def hand_over(self, storage: torch.UntypedStorage, is_held: Callable[[], bool]) -> None:
        """See `Meter.hand_over`."""
        self._counting.hand_over(storage, is_held)

    def leave_out(self, storage: torch.UntypedStorage) -> None:
        """See `Meter.leave_out`."""
        self._counting.leave_out(storage)


class _Storage(weakref.ref[torch.UntypedStorage]):
    """A storage that counts, and for how much."""

    __slots__ = ("key", "nbytes")

    key: int
    nbytes: int


class _Counting:
    """What a meter counts of the operators that run while it is in force.

    What it has seen counts until it dies.

    Args:
        device_type: whose storages count.
        rounded_bytes: what each is rounded to.

    Attributes:
        live_bytes: of what counts now.
        peak_bytes: the most of these since somebody set it to them.
        is_over: whether it is not in force.
        is_blind: whether it can see nothing, as parts of the program are compiled.
    """

    def __init__(self, device_type: str = "cpu", rounded_bytes: int = 1) -> None:
        operator_observers.prepare()
        self._device_type = device_type
        self._rounded_bytes = rounded_bytes
        self._live: dict[int, _Storage] = {}
        self._adopted: dict[int, Callable[[], bool]] = {}  # by key: the store has them, and maybe others
        self._stored: dict[int, _Storage] = {}  # what stores have allocated
        self.live_bytes = 0
        self.peak_bytes = 0
        self.is_over = True
        self.is_blind = False
        self._is_given = False

    def begin(self, *, is_given: bool) -> None:
        """Be in force; say whether what operators are given is on the device."""
        self._is_given = is_given
        if self.is_over:
            self.peak_bytes = self.live_bytes
        self.is_over = False
        operator_observers.observe(self)

    def end(self) -> None:
        """Be in force no more, in any thread."""
        self.is_over = True
        operator_observers.ignore(self)

    def add(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Count storages that were not counted yet."""
        for storage in storages:
            if id(storage) not in self._live and storage.device.type == self._device_type:
                entry = _Storage(storage, self._forget)
                entry.key, entry.nbytes = id(storage), align_up(storage.nbytes(), self._rounded_bytes)
                self._live[entry.key] = entry
                self.live_bytes += entry.nbytes
        if self.live_bytes > self.peak_bytes:
            self.settle()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def add_former(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Count storages that have been there since before this was in force."""
        unknown = [
            each
            for each in storages
            if id(each) not in self._live
            and id(each) not in self._stored
            and sides.side_of(each) is not Side.HOST
        ]
        if unknown:
            before_bytes = self.live_bytes
            peak_bytes, self.peak_bytes = self.peak_bytes, 0
            self.add(unknown)
            self.peak_bytes = peak_bytes + max(0, self.live_bytes - before_bytes)

    def leave_out(self, storage: torch.UntypedStorage) -> None:
        """Never take for the program's what a store has allocated.  From any thread."""
        if id(storage) not in self._live:
            entry = _Storage(storage, self._forget_stored)
            entry.key, entry.nbytes = id(storage), 0
            self._stored[entry.key] = entry

    def _forget_stored(self, entry: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(entry, _Storage)
        self._stored.pop(entry.key, None)

    def hand_over(self, storage: torch.UntypedStorage, is_held: Callable[[], bool]) -> None:
        """Let a storage count no more as soon as the store alone refers to it."""
        if id(storage) in self._live:
            self._adopted[id(storage)] = is_held

    def settle(self) -> None:
        """Leave out what the store alone refers to."""
        for key, is_held in list(self._adopted.items()):
            entry = self._live.get(key)
            storage = None if entry is None else entry()
            if entry is None or storage is None:
                self._adopted.pop(key, None)
            elif storage_use_count(storage._cdata) <= _ALONE:  # noqa: SLF001
                del self._adopted[key]
                if is_held():  # from now on others get at it by the store's leases only
                    self._forget(entry)

    def _forget(self, entry: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(entry, _Storage)
        self._adopted.pop(entry.key, None)
        if self._live.pop(entry.key, None) is not None:
            self.live_bytes -= entry.nbytes

    def see(self, given: Sequence[object], result: object) -> None:
        """Count what an operator was given and has made: see `operations.Observer`."""
        if self._is_given and not self.is_over:
            self.add_former(storages_in(given))
        self.see_within(given, result)

    def see_within(self, given: Sequence[object], result: object) -> None:
        """Count what an operator has made: see `operations.Observer`."""
        if not self.is_over:
            known = {id(storage): storage for storage in storages_in(given)}
            made = [storage for storage in storages_in((result,)) if id(storage) not in known]
            if made and self._is_hosts(known.values()):
                for storage in made:
                    sides.note(storage, Side.HOST)
            else:
                self.add(made)

    def _is_hosts(self, given: Collection[torch.UntypedStorage]) -> bool:
        """Whether what is made of these storages is the host's, beside an emulated device."""
        if sides.side_of_result(given) is not Side.HOST:
            return False
        return not any(id(each) in self._live for each in given)


def storages_in(values: Iterable[object]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of the tensors in nested values, as far as they have one of their own."""
    with natively():  # parameters wear other classes inside their windows and outside
        for tensor in map(memory_of, tensors_in(values)):
            is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
            is_wrapped = is_wrapper or is_transformed_tensor(tensor) or is_legacy_batched_tensor(tensor)
            if tensor.layout is torch.strided and not is_wrapped:
                yield tensor.untyped_storage()


# ---------------------------------------------------------------------- accelerators

_ROUNDED_BYTES = 512
"""What accelerators' allocators round to."""


def beside_bytes(device: torch.device, taken_in: Iterable[torch.Tensor]) -> int:
    """Return what a program has on an accelerator, as far as its allocator knows, beside some tensors."""
    if device.type == "cpu":
        return 0
    own = {storage._cdata: storage for storage in storages_in(taken_in)}  # noqa: SLF001
    own_bytes = sum(
        align_up(each.nbytes(), _ROUNDED_BYTES) for each in own.values() if each.device.type == device.type
    )
    return max(0, torch.accelerator.memory_allocated(device) - own_bytes)


class AllocatorMeter:
    """Asks the device's allocator, and sees the operations of optimizers.

    1. The allocator's own peak is the user's: it is read and never reset.  It is read at every look, so that
       what it told is known when the user resets it.
    2. Where an earlier peak hides that of a forward and backward pass, `was_peak_hidden` says so: what was
       told earlier holds then, or if nothing was, samples that are taken as gradients come have to do.
    3. A pass's peak hides an optimizer's as a rule.  So what operations make in a step is counted, as on an
       emulated device, on top of what there is when it begins.

    Args:
        store: whose bytes are not the program's.
        device: that is asked.

    Attributes:
        was_peak_hidden: see `Meter`.
    """

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._most_bytes = 0
        self._former_peak_bytes = 0
        self._asked_peak_bytes = torch.accelerator.max_memory_allocated(device)
        self._least_stored_bytes: int | None = None
        self._standing_bytes: int | None = None
        self._has_told_peak = False  # the allocator, in this phase
        self._before_step_bytes: int | None = None  # None: no optimizer steps
        self._counting = _Counting(device.type, _ROUNDED_BYTES)
        self.was_peak_hidden = False

    def begin(self, inputs: Iterable[object]) -> None:
        """See `Meter.begin`."""
        del inputs
        if self._least_stored_bytes is None:
            self._restart()
        self.look()

    def begin_step(self) -> None:
        """See `Meter.begin_step`."""
        self.begin(())
        if self._before_step_bytes is None:
            self._before_step_bytes = self.live_bytes()
            self._counting.begin(is_given=False)

    def _restart(self) -> None:
        """Another phase begins."""
        self._most_bytes = 0
        self._least_stored_bytes = None
        self._has_told_peak = False
        self._former_peak_bytes = torch.accelerator.max_memory_allocated(self._device)
        self.look()

    def look(self) -> None:
        """See `Meter.look`."""
        stored_bytes = self._stored_bytes()
        live_bytes = torch.accelerator.memory_allocated(self._device) - stored_bytes
        self._most_bytes = max(self._most_bytes, live_bytes)
        least = self._least_stored_bytes
        self._least_stored_bytes = stored_bytes if least is None else min(least, stored_bytes)
        peak_bytes = torch.accelerator.max_memory_allocated(self._device)
        is_step = self._before_step_bytes is not None  # in which the store's bytes come and go as well
        if not is_step and peak_bytes != self._former_peak_bytes:  # of this phase: higher, or after a reset
            self._has_told_peak = True
            self._most_bytes = max(self._most_bytes, peak_bytes - self._least_stored_bytes)

    def _stored_bytes(self) -> int:
        return self._store.stats().tiers[self._store.tier_names[0]].charged_bytes

    def live_bytes(self) -> int:
        """See `Meter.live_bytes`."""
        return torch.accelerator.memory_allocated(self._device) - self._stored_bytes()

    def standing_bytes(self) -> int:
        """See `Meter.standing_bytes`: the least that there was when one began."""
        least, live_bytes = self._standing_bytes, self.live_bytes()
        self._standing_bytes = live_bytes if least is None else min(least, live_bytes)
        return self._standing_bytes

    def take_peak(self) -> int:
        """See `Meter.take_peak`."""
        self.look()
        most_bytes = self._most_bytes
        self.was_peak_hidden = not self._has_told_peak
        if self._before_step_bytes is not None:
            self._counting.settle()
            most_bytes = max(most_bytes, self._before_step_bytes + self._counting.peak_bytes)
            self.was_peak_hidden = False
        self._stop_counting()
        self._restart()
        return most_bytes

    def most_bytes(self) -> int:
        """See `Meter.most_bytes`: what the store has now counts for the peaks that follow."""
        self.look()
        self._former_peak_bytes = torch.accelerator.max_memory_allocated(self._device)
        self._least_stored_bytes = self._stored_bytes()
        return self._most_bytes

    def take_whole_peak(self) -> int | None:
        """See `Meter.take_whole_peak`: it is known if the allocator's is higher than before, or was reset."""
        peak_bytes = torch.accelerator.max_memory_allocated(self._device)
        is_fresh = peak_bytes != self._asked_peak_bytes
        self._asked_peak_bytes = peak_bytes
        return peak_bytes if is_fresh else None

    def take_moment(self) -> tuple[int | None, int | None]:
        """See `Meter.take_moment`: the allocator tells peaks of phases only."""
        return (None if self._least_stored_bytes is None else self.live_bytes()), None

    def _stop_counting(self) -> None:
        self._before_step_bytes = None
        self._counting.end()

    def end(self) -> None:
        """See `Meter.end`."""
        self._least_stored_bytes = None
        self._stop_counting()

    def close(self) -> None:
        """See `Meter.close`."""
        self.end()

    def hand_over(self, storage: torch.UntypedStorage, is_held: Callable[[], bool]) -> None:
        """See `Meter.hand_over`: the allocator counts it, and the store's charge is subtracted."""
        self._counting.hand_over(storage, is_held)

    def leave_out(self, storage: torch.UntypedStorage) -> None:
        """See `Meter.leave_out`: likewise."""
        self._counting.leave_out(storage)
