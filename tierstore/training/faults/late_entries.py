"""Entries of state dicts that are read when they are used, each time anew, and take no memory until then.

For who makes a state dict to write one entry after another.  Whoever uses an entry before it is written, or
in its place, has what `tierstore.training.faults.state_dict_entries` gives: a copy that is one with the
original. What an entry looks like (shape, type, device) is said without reading it. Loaded where it came from
it is the original, which is not read for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tierstore.training.bundles.bindings import natively
from tierstore.training.bundles.tensor_uses import LAYOUT, PASSING, Function

_Tensor: Any = torch.Tensor  # its properties, seen as the descriptors that they are
_PLACES = {
    *(_Tensor.device.__get__, _Tensor.is_cpu.__get__, _Tensor.is_meta.__get__, _Tensor.is_cuda.__get__),
    *(_Tensor.is_xpu.__get__, _Tensor.get_device),
}
_LOOKS = (PASSING | LAYOUT) - _PLACES
_ORIGINAL = "_tierstore_late_original"  # the attribute that says whose entry it is
_PLACE = "_tierstore_place"  # that says which device it says it is on

Read = Callable[[torch.Tensor], torch.Tensor]


def late_entry(original: torch.Tensor, read: Read, place: str = "cpu") -> torch.Tensor:
    """Return an entry.

    Args:
        original: the parameter, buffer or state that it is of.
        read: returns an entry of it with bytes, in host memory.
        place: the device that it says it is on.
    """
    with natively():
        looks = torch.empty_strided(
            original.shape, original.stride(), dtype=original.dtype, device="meta", requires_grad=False
        )
        entry = looks.as_subclass(LateEntry)
    vars(entry)[_ORIGINAL] = original, read
    vars(entry)[_PLACE] = place
    return entry


def original_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what a tensor is a late entry of; ``None``: it is none."""
    if type(tensor) is not LateEntry:
        return None
    original: torch.Tensor = vars(tensor)[_ORIGINAL][0]
    return original


def _read(entry: torch.Tensor) -> torch.Tensor:
    original, read = vars(entry)[_ORIGINAL]
    found: torch.Tensor = read(original)
    return found


def _read_in(value: Any) -> Any:  # noqa: ANN401 - what functions of PyTorch are given
    """Return a value with what is read in the place of entries."""
    if type(value) is LateEntry:
        return _read(value)
    if type(value) in (list, tuple):
        return type(value)(_read_in(each) for each in value)
    return {key: _read_in(each) for key, each in value.items()} if type(value) is dict else value


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
    if func in _PLACES:
        return func(torch.empty(0, device=vars(args[0])[_PLACE]), *args[1:], **kwargs)
    if func in _LOOKS:
        with natively():
            return func(*args, **kwargs)
    return func(*_read_in(args), **_read_in(kwargs))


class LateEntry(torch.Tensor):
    """An entry of a state dict that is read when it is used."""

    __torch_function__: Any = classmethod(_torch_function)

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        """Copy what it is an entry of."""
        return copy.deepcopy(_read(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - what pickle takes
        """Pickle what it is an entry of."""
        return _read(self).__reduce_ex__(protocol)
