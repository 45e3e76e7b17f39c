"""An independent meter of live device bytes on the emulated device, and a budget for them.

Where there is no accelerator, every tensor of the program is taken for device memory.  The meter
watches the program from outside and asks the store nothing:

1. A storage counts from the operation that first returns it, or from the moment it is announced, by an
   emulated device (`tierstore.spi.device_storage_listeners`) or by what brings values there
   (`tierstore.sides.allocation_listeners`), until it dies.
2. A storage is told from others by the object, never by its address.  Views and results in place
   are not new, and what an operation was given is not new.
3. Host blocks do not count: no operation ever returned them.  Nor do meta, fake and other tensors
   without bytes in host memory, nor tensors older than the meter.
4. An allocation beyond the capacity is given up and raises `OutOfDeviceMemory`.
5. What is on the host does not count, though the program computes with it: what a store has lent there, what
   has crossed to there, and what operators make of that (`tierstore.sides`).  On request an operator that is
   given something of both sides raises `MixedDevices`, as hardware does: a value has not crossed.

Operations are seen in the thread that entered the meter, backward included; announcements in any.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from tierstore import sides
from tierstore.errors import UsageError
from tierstore.modes import run_operator
from tierstore.sides import Side
from tierstore.spi import device_storage_listeners
from tierstore.torch_private import TorchDispatchMode
from tierstore.units import format_bytes, parse_bytes

__all__ = ["DeviceBudget", "MixedDevices", "OutOfDeviceMemory"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_COMPONENTS: Mapping[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
# What copies from one device to the other, or takes indices of either.
_MIX = (
    torch.ops.aten.copy_.default,
    torch.ops.aten._to_copy.default,  # noqa: SLF001
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
)
_LISTWISE = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")
# What torch.tensor() and torch.from_numpy() pass their new tensor through: its input is what is new.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)


class OutOfDeviceMemory(torch.OutOfMemoryError):
    """An allocation would exceed the budget; it was given up.

    Attributes:
        needed_bytes: what was asked for.
        live_bytes: what was in use.
        capacity_bytes: the budget.
    """

    def __init__(self, needed_bytes: int, live_bytes: int, capacity_bytes: int) -> None:
        super().__init__(
            f"out of device memory: {format_bytes(needed_bytes)} asked for, "
            f"{format_bytes(live_bytes)} in use of a budget of {format_bytes(capacity_bytes)}"
        )
        self.needed_bytes = needed_bytes
        self.live_bytes = live_bytes
        self.capacity_bytes = capacity_bytes


class MixedDevices(RuntimeError):  # noqa: N818 - it says what hardware says
    """An operator was given tensors of the device and of the host."""


class DeviceBudget:
    """Meters live device bytes inside a ``with`` block and refuses more than a capacity.

    Each entry starts from nothing.  Meters may be nested; each counts for itself.

    Args:
        capacity: bytes, or a size such as ``"64MiB"``.
        mixing: ``"raise"``: what is given tensors of both sides raises `MixedDevices`; ``"allow"``: it runs.

    Raises:
        ConfigError: it is not a size.
        UsageError: ``mixing`` is something else.
    """

    def __init__(self, capacity: int | str, *, mixing: str = "allow") -> None:
        if mixing not in ("allow", "raise"):
            raise UsageError(f"DeviceBudget(mixing={mixing!r}): accepted: 'allow', 'raise'.")
        self._refuses_mixing = mixing == "raise"
        self._capacity_bytes = parse_bytes(capacity)
        self._books = _LiveBytes(self._capacity_bytes)
        self._metering: contextlib.ExitStack | None = None

    @property
    def capacity_bytes(self) -> int:
        """The budget."""
        return self._capacity_bytes

    @property
    def live_bytes(self) -> int:
        """The bytes of all storages that count now; 0 outside the ``with`` block."""
        return self._books.live_bytes()

    @property
    def peak_bytes(self) -> int:
        """The most that were live at once, in this ``with`` block or the last."""
        return self._books.peak_bytes

    def __enter__(self) -> Self:
        """Begin to meter what this thread allocates.

        Raises:
            UsageError: this meter is in use.
        """
        if self._metering is not None:
            raise UsageError("this DeviceBudget is in use: make another")
        self._books = _LiveBytes(self._capacity_bytes)
        self._metering = contextlib.ExitStack()
        self._metering.callback(self._books.close)
        device_storage_listeners.append(self._books.announce)
        self._metering.callback(device_storage_listeners.remove, self._books.announce)
        sides.allocation_listeners.append(self._books.announce)
        self._metering.callback(sides.allocation_listeners.remove, self._books.announce)
        self._metering.enter_context(_AllocationWatch(self._books, refuses_mixing=self._refuses_mixing))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop metering and forget what was counted, except for the peak."""
        metering, self._metering = self._metering, None
        if metering is not None:
            metering.close()


class _LiveStorage(weakref.ref[torch.UntypedStorage]):
    """One storage that counts, and for how much."""

    __slots__ = ("key", "nbytes")

    key: int
    nbytes: int


class _LiveBytes:
    """What is live.  Thread-safe.

    A storage dies in any thread, also inside the lock (a garbage collection may run anywhere), so
    deaths are only noted and are subtracted by whoever holds the lock next.  A death is noted before
    its ``id()`` can belong to another storage, so an id among the entries means that very storage.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._dead: collections.deque[_LiveStorage] = collections.deque()
        self._lock = threading.Lock()
        self._entries: dict[int, _LiveStorage] = {}  # by id(); guarded by _lock, as is all below
        self._live_bytes = 0
        self.peak_bytes = 0

    def live_bytes(self) -> int:
        """Return what is live, with every size read again."""
        with self._lock:
            self._bury()
            self._read_again()
            return self._live_bytes

    def announce(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that an emulated device has allocated.

        Raises:
            OutOfDeviceMemory: it does not fit; it is not counted.
        """
        if sides.side_of(storage) is None:
            sides.note(storage, Side.DEVICE)
        refusal = self.admit((storage,), ())
        if refusal is not None:
            del storage  # the error's traceback refers to this frame: let it not hold device memory
            raise refusal

    def admit(
        self, fresh: Sequence[torch.UntypedStorage], used: Sequence[torch.UntypedStorage]
    ) -> OutOfDeviceMemory | None:
        """Count the new ones of ``fresh`` and look again at the sizes of ``used``.

        Returns what to raise if they do not fit: then none of them counts.
        """
        with self._lock:
            self._bury()
            before_bytes = self._live_bytes
            for storage in used:
                entry = self._entries.get(id(storage))
                if entry is not None:
                    self._update(entry, storage)
            unknown = {id(storage): storage for storage in fresh if id(storage) not in self._entries}
            added_bytes = sum(storage.nbytes() for storage in unknown.values())
            if self._live_bytes + added_bytes > self.peak_bytes:
                self._read_again()  # something may have shrunk behind our back
            is_growing = added_bytes > 0 or self._live_bytes > before_bytes
            if is_growing and self._live_bytes + added_bytes > self._capacity_bytes:
                return OutOfDeviceMemory(added_bytes, self._live_bytes, self._capacity_bytes)
            for storage in unknown.values():
                self._enter(storage)
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            return None

    def is_settled(self, used: Sequence[torch.UntypedStorage]) -> bool:
        """Whether none of these has changed its size.  Without the lock: it is asked at every operation."""
        entries = self._entries
        for storage in used:
            entry = entries.get(id(storage))
            if entry is not None and entry.nbytes != storage.nbytes():
                return False
        return True

    def close(self) -> None:
        """Forget every storage."""
        with self._lock:
            self._entries.clear()  # a weak reference that is gone calls nobody
            self._dead.clear()
            self._live_bytes = 0

    def _enter(self, storage: torch.UntypedStorage) -> None:
        entry = _LiveStorage(storage, self._dead.append)
        entry.key = id(storage)
        entry.nbytes = storage.nbytes()
        self._entries[entry.key] = entry
        self._live_bytes += entry.nbytes

    def _update(self, entry: _LiveStorage, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()
        self._live_bytes += nbytes - entry.nbytes
        entry.nbytes = nbytes

    def _read_again(self) -> None:
        for entry in tuple(self._entries.values()):
            storage = entry()
            if storage is not None:
                self._update(entry, storage)

    def _bury(self) -> None:
        while self._dead:
            entry = self._dead.popleft()
            self._live_bytes -= entry.nbytes
            del self._entries[entry.key]


class _AllocationWatch(TorchDispatchMode):
    """Sees every operation of its thread, and counts the storages that come out of it anew."""

    is_meter = True  # steps are made ahead under it, as they are without

    def __init__(self, books: _LiveBytes, *, refuses_mixing: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._books = books
        self._refuses_mixing = refuses_mixing

    # torch's signature: the types of arguments and result are those of the operation.
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the operation and count what is new."""
        used: list[torch.UntypedStorage] = []
        _collect(args, used)
        if kwargs:
            _collect(kwargs.values(), used)
        if self._refuses_mixing:
            _refuse_mixing(func, (*args, *(kwargs or {}).values()))
        result = run_operator(func, args, kwargs or {})
        if func in _LIFTS:
            fresh = [storage for storage in used if storage.resizable()]  # not memory of numpy's
        else:
            fresh = _made(result, used)
        fresh = _of_the_device(fresh, used)
        if fresh or not self._books.is_settled(used):
            refusal = self._books.admit(fresh, used)
            if refusal is not None:
                del result, fresh, used  # so that the traceback holds nothing
                raise refusal
        return result


def _of_the_device(
    fresh: list[torch.UntypedStorage], used: Sequence[torch.UntypedStorage]
) -> list[torch.UntypedStorage]:
    """Return those new storages that count; note where they are, if what they were made of tells."""
    side = sides.side_of_result(used) if fresh else None
    for storage in fresh if side is not None else ():
        sides.note(storage, side or Side.DEVICE)
    return [] if side is Side.HOST else fresh


def _refuse_mixing(func: Callable[..., Any], values: Sequence[object]) -> None:
    """Raise what hardware raises for tensors of both sides; what has no dimensions goes with both."""
    if func in _MIX:
        return
    name: str = func._schema.name  # type: ignore[attr-defined]  # noqa: SLF001 - of an operator
    parts: list[Iterable[object]] = [values]
    if name.startswith(
        _LISTWISE
    ):  # PyTorch hands over a list for each device; an emulated one it does not know
        lists = [value for value in values if isinstance(value, list | tuple)]
        parts = list(itertools.zip_longest(*lists))
    if any(map(_is_mixed, parts)):
        raise MixedDevices(
            f"{func}: expected all tensors to be on the same device, but found at least two: the device's "
            "and the host's. A value has not crossed."
        )


def _is_mixed(values: Iterable[object]) -> bool:
    found: list[torch.UntypedStorage] = []
    _collect(_with_dimensions(values), found)
    return {Side.HOST, Side.DEVICE} <= {sides.side_of(each) for each in found}


def _with_dimensions(values: Iterable[object]) -> Iterable[object]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _with_dimensions(value)
        elif not isinstance(value, torch.Tensor) or value.dim():
            yield value


def _made(result: object, used: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """Return the storages in host memory that an operation returned and was not given."""
    found: list[torch.UntypedStorage] = []
    _collect((result,), found)
    given = set(map(id, used))
    return [storage for storage in found if id(storage) not in given and storage.device.type == "cpu"]


def _collect(values: Iterable[object], into: list[torch.UntypedStorage]) -> None:
    """Append the storages in nested sequences of tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if type(value) in _PLAIN and value.layout is torch.strided:
                into.append(value.untyped_storage())
            else:
                _collect(_parts(value), into)
        elif isinstance(value, list | tuple):
            _collect(value, into)
        elif isinstance(value, torch.UntypedStorage):
            into.append(value)


def _parts(tensor: torch.Tensor) -> Iterable[object]:
    """Return what holds the bytes of a tensor that is not a plain one."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names]
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    return [getattr(tensor, part)() for part in _COMPONENTS.get(tensor.layout, ())]
