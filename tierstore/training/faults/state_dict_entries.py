"""What state dicts of an offloaded model and its optimizers hold: copies that stay one with the originals.

In plain PyTorch the entries of ``model.state_dict()`` are aliases of the parameters, and those of
``optimizer.state_dict()`` are the tensors of its state.  Here, with "parameter" for both:

1. An entry has bytes of its own, in host memory: whoever reads it where nobody sees that (a file's writer, an
   extension) finds what the parameter was when the entry was made, or used last.
2. What is written to an entry, or to a view of it, is written to the parameter.
3. Whoever uses an entry finds what the parameter is now.
4. An array made of an entry cannot be written to: nobody would see that.
5. Copying one of them to itself, entry or parameter, copies nothing: where elements share memory, PyTorch
   would refuse it between two memories.
6. When the parameter is pointed at other memory, they are tensors of their own: they keep what it was.
7. What is made of an entry, or pointed at one, shares memory with the parameter, where that is.
8. After the run they are aliases of the parameter, where both are in one memory, and else of their own.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from tierstore.training.bundles.bindings import Binding, natively, set_data
from tierstore.training.bundles.layout import fill, place_of
from tierstore.training.bundles.tensor_uses import (
    ESCAPES,
    EXPORTS,
    LAYOUT,
    PASSING,
    Function,
    get_data,
    may_write_unseen,
)
from tierstore.training.faults import guard
from tierstore.training.pytorch.calling_functions import is_for_a_parameter

_LOOKS = PASSING | LAYOUT


class _ValueState(NamedTuple):
    """What is known of a parameter's values: they are the same while this is."""

    writes: int
    versions: tuple[int, ...]


class Original:
    """A parameter, with the copy of it that entries and their views look at.

    Args:
        guarded_tensor: the parameter.
        copy: of it, of the same layout.
    """

    def __init__(self, guarded_tensor: guard.GuardedTensor, copy: torch.Tensor) -> None:
        self._parameter = weakref.ref(guarded_tensor.tensor)  # entries do not keep state that was replaced
        self.binding = guarded_tensor.binding
        self.copy = copy
        self._number = guarded_tensor.number
        self._departures = guarded_tensor.binding.departures[guarded_tensor.number]
        self._state = self._now()
        self._version = copy._version  # noqa: SLF001

    @property
    def parameter(self) -> torch.Tensor | None:
        """The parameter, or the tensor of state; ``None``: nobody has it any more."""
        return self._parameter()

    @property
    def tied(self) -> torch.Tensor | None:
        """The parameter, if it has been where it was ever since."""
        parameter = self.parameter
        guarded_tensor = None if parameter is None else guard.guarded_tensor_of(parameter)
        is_tied = (
            guarded_tensor is not None
            and guarded_tensor.binding is self.binding
            and self.binding.departures[self._number] == self._departures
        )
        return parameter if is_tied else None

    def _now(self) -> _ValueState:
        with natively():
            return _ValueState(
                self.binding.writes,
                tuple(each._version for each in self.binding.tensors),  # noqa: SLF001
            )

    def refresh(self) -> None:
        """Bring to the copy what the parameter is now."""
        binding = self.binding
        is_in_use = binding.flat is not None and (binding.is_dirty or binding.is_watched)
        parameter = self.tied
        if parameter is None or not (is_in_use or self._now() != self._state):
            return
        with torch.no_grad():
            fill(get_data(self.copy), parameter)
        self._state = self._now()

    def note_write(self, *, is_sure: bool) -> None:
        """Bring to the parameter what was written to the copy.

        Args:
            is_sure: whether something was, whatever the copy's version says.
        """
        version = self.copy._version  # noqa: SLF001
        if version == self._version and not is_sure:
            return
        self._version = version
        parameter = self.tied
        if parameter is not None:
            with torch.no_grad():
                fill(parameter, self.copy)
            self._state = self._now()

    def is_seen_by(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of the copy.  Called natively."""
        return bool(tensor.untyped_storage()._cdata == self.copy.untyped_storage()._cdata)  # noqa: SLF001


class _KnownEntry(NamedTuple):
    """An entry, or a view of one."""

    tensor: weakref.ref[torch.Tensor]
    original: Original


_known: dict[int, _KnownEntry] = {}
"""By the tensor's id."""

_of_bindings: dict[Binding, dict[int, _KnownEntry]] = {}
"""The same by bundle, until it is given back."""


def entry_for(guarded_tensor: guard.GuardedTensor, copy: torch.Tensor) -> torch.Tensor:
    """Return an entry of a state dict.

    Args:
        guarded_tensor: the parameter.
        copy: of it, in host memory.
    """
    return _know(copy.detach(), Original(guarded_tensor, copy))


def whole_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what an entry is one with; ``None``: it is not any more, or is only a part, or no entry."""
    original = _original_of(tensor)
    if original is None:
        return None
    with natively():
        is_whole = tensor.dtype == original.copy.dtype and tensor.is_set_to(original.copy)
    return original.tied if is_whole else None


def _know(tensor: torch.Tensor, original: Original) -> torch.Tensor:
    number = id(tensor)
    same = _of_bindings.setdefault(original.binding, {})

    def forget(_: object) -> None:
        _known.pop(number, None)
        same.pop(number, None)

    same[number] = _known[number] = _KnownEntry(weakref.ref(tensor, forget), original)
    tensor.__class__ = StateDictEntry
    return tensor


def _original_of(tensor: object) -> Original | None:
    known = _known.get(id(tensor))
    return known.original if known is not None and known.tensor() is tensor else None


def _forget(tensor: torch.Tensor) -> None:
    known = _known.pop(id(tensor), None)
    if known is not None:
        _of_bindings.get(known.original.binding, {}).pop(id(tensor), None)
    is_parameter = vars(tensor).pop("_is_param", False)
    tensor.__class__ = torch.nn.Parameter if is_parameter else torch.Tensor


def _entries_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _entries_in(value)
        elif isinstance(value, dict):
            yield from _entries_in(value.values())
        elif type(value) is StateDictEntry:
            yield value


def _torch_function(
    cls: type,
    func: Function,
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> object:
    """See a use of entries.  The class's ``__torch_function__``."""
    del cls, types
    kwargs = kwargs or {}
    if func in _LOOKS:
        with natively():
            return func(*args, **kwargs)
    entries = list(_entries_in((*args, *kwargs.values())))
    originals = {id(each): each for each in map(_original_of, entries) if each is not None}
    if func is torch.Tensor.detach and is_for_a_parameter():
        return _for_a_parameter(args[0])
    for original in originals.values():
        original.refresh()
    if func is torch.Tensor.copy_ and _is_one(*args[:2]):
        args = (args[0], args[0], *args[2:])
    result = _run_plainly(entries, torch.Tensor.detach if func == get_data else func, args, kwargs)
    is_sure = func not in ESCAPES and may_write_unseen(func, kwargs) and func != get_data
    for original in originals.values():
        original.note_write(is_sure=is_sure and _is_written(original, args, kwargs))
    if func in EXPORTS and hasattr(result, "setflags"):
        result.setflags(write=False)
    _take_in((*entries, *_tensors_of(result)), list(originals.values()))
    return result


def _run_plainly(
    entries: Sequence[torch.Tensor], func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """Run ``func`` while entries are ordinary tensors."""
    try:
        for entry in entries:
            entry.__class__ = torch.Tensor
        return func(*args, **kwargs)
    finally:
        for entry in entries:
            entry.__class__ = StateDictEntry


def _is_one(destination: torch.Tensor, source: object = None) -> bool:
    """Whether two tensors are one, by themselves or as entries of the same parameter."""
    if not isinstance(source, torch.Tensor):
        return False
    one, other = _whole_or_itself(destination), _whole_or_itself(source)
    with natively():
        are_alike = one.layout is other.layout is torch.strided and one.dtype is other.dtype
        return one is other or (are_alike and one.is_set_to(other))


def _whole_or_itself(tensor: torch.Tensor) -> torch.Tensor:
    whole = whole_of(tensor)
    return tensor if whole is None else whole


def _is_written(original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function that writes would write to a copy: to its first argument, or its ``out``."""
    return any(_original_of(each) is original for each in _entries_in((*args[:1], kwargs.get("out"))))


def _tensors_of(result: object) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for each in result:
            yield from _tensors_of(each)


def _take_in(tensors: Iterable[torch.Tensor], originals: Sequence[Original]) -> None:
    """Know which tensors are views of copies by now, and which are no more."""
    with natively():
        for tensor in tensors:
            if type(tensor) not in (torch.Tensor, StateDictEntry) or tensor.layout is not torch.strided:
                continue
            seen = next((each for each in originals if each.is_seen_by(tensor)), None)
            if seen is None and type(tensor) is StateDictEntry:
                _forget(tensor)
            elif seen is not None and _original_of(tensor) is None:
                _know(tensor, seen)


def in_place_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what shows the elements of an entry in the parameter's own memory; any other tensor is itself.

    For what is made of, or pointed at, an entry: it shares memory with the parameter in plain PyTorch.
    """
    original = _original_of(tensor)
    parameter = None if original is None else original.tied
    if original is None or parameter is None:
        return tensor
    alias = parameter.detach()
    with natively():
        return _the_same_of(alias, tensor, original.copy)


def _for_a_parameter(entry: torch.Tensor) -> torch.Tensor:
    """Return what a new parameter is made of; it takes the class off when it is used."""
    shown = in_place_of(entry)
    if shown is entry:
        shown = cast("torch.Tensor", _run_plainly([entry], torch.Tensor.detach, (entry,), {}))
    shown.__class__ = StateDictEntry
    return shown


def _refresh(entry: torch.Tensor) -> None:
    original = _original_of(entry)
    if original is not None:
        original.refresh()


def _deepcopy(self: torch.Tensor, memo: dict[int, object]) -> object:
    _refresh(self)
    return _run_plainly([self], copy.deepcopy, (self, memo), {})


def _reduce_ex(self: torch.Tensor, protocol: int) -> object:
    _refresh(self)
    return _run_plainly([self], torch.Tensor.__reduce_ex__, (self, protocol), {})


class StateDictEntry(torch.Tensor):
    """An entry of a state dict: what is written to it is written to the parameter, or to the state."""

    __torch_function__: Any = classmethod(_torch_function)
    __deepcopy__ = _deepcopy
    __reduce_ex__ = _reduce_ex


def _taken_out(binding: Binding) -> list[_KnownEntry]:
    """Return what is known of a bundle's entries, and know of none any more."""
    same = _of_bindings.pop(binding, {})
    found = list(same.values())
    same.clear()  # the callbacks of weak references have it: they and it would keep each other
    return found


def part_with(binding: Binding) -> None:
    """Nobody has the tensors of a bundle any more but entries: these keep what it was."""
    for known in _taken_out(binding):
        entry = known.tensor()
        if entry is not None:
            known.original.refresh()
            _forget(entry)


def release(binding: Binding) -> None:
    """Make entries of a bundle whose tensors have their bytes again aliases of these, where that may be."""
    for known in _taken_out(binding):
        entry, original = known.tensor(), known.original
        if entry is None:
            continue
        _forget(entry)
        parameter = original.tied
        if parameter is None:
            continue
        with natively(), torch.no_grad():
            if parameter.device == entry.device:
                set_data(entry, _the_same_of(parameter, entry, original.copy))
            else:
                fill(get_data(original.copy), parameter)


class Links:
    """Entries of a bundle that is let go and laid out anew: they are tied to what its tensors are then.

    Args:
        binding: of the bundle, before it is let go; ``None``: there is none.
    """

    def __init__(self, binding: Binding | None) -> None:
        self._entries: dict[Original, list[torch.Tensor]] = {}
        self._copies: dict[Original, torch.Tensor] = {}
        for known in () if binding is None else _of_bindings.get(binding, {}).values():
            entry = known.tensor()
            if entry is not None and known.original.tied is not None:
                self._entries.setdefault(known.original, []).append(entry)

    def note_memory(self) -> None:
        """The bundle was let go: see `release`.  Know the memory that entries look at."""
        with natively():
            for original, entries in self._entries.items():
                parameter = original.parameter
                if parameter is None or parameter.device != entries[0].device:
                    self._copies[original] = original.copy
                else:
                    self._copies[original] = parameter.detach()

    def tie(self) -> None:
        """The bundle is in the store again: tie entries to those tensors that are."""
        for original, entries in self._entries.items():
            parameter = original.parameter
            guarded_tensor = None if parameter is None else guard.guarded_tensor_of(parameter)
            if guarded_tensor is not None:
                anew = Original(guarded_tensor, self._copies[original])
                for entry in entries:
                    _know(entry, anew)


def _the_same_of(parameter: torch.Tensor, view: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Return what is to a parameter what ``view`` is to a copy of it.  Called natively."""
    begin_bytes = _begin_bytes(parameter) + _begin_bytes(view) - _begin_bytes(copy)
    storage = parameter.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=parameter.device)
    flat.set_(storage, 0, (storage.nbytes(),), (1,))
    return place_of("", view, begin_bytes).view(flat)


def _begin_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()
