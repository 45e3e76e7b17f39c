"""What modules are given and return, nested as it may be: each tensor in it replaced, once.

1. Looked into are lists, tuples, dicts and what else is registered with PyTorch's pytrees, fields of
   dataclasses, and packed sequences.  Anything else stays as it is.
2. What holds nothing that was replaced is the same object afterwards: whoever writes to it is seen by all.

Knows nothing of runs, and of who replaces what.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from tierstore.planning.homes import CPU
from tierstore.torch_private import tree_map


def brought(values: Any, bring: Callable[[torch.Tensor], torch.Tensor]) -> Any:  # noqa: ANN401 - a module's own
    """Return nested values with each tensor brought, once; ``None``: they are as they are.

    Containers in which nothing had to be brought are the same objects.
    """
    crossed: dict[int, torch.Tensor] = {}  # by the id of what ``values`` keeps

    looked_into: set[int] = set()  # by their ids: one may refer to itself

    def once(each: Any) -> Any:  # noqa: ANN401
        if isinstance(each, torch.Tensor):
            if id(each) not in crossed:
                crossed[id(each)] = bring(each)
            return crossed[id(each)]
        if isinstance(each, PackedSequence):
            return _with_packed(each, once)
        if not has_fields(each) or id(each) in looked_into:
            return each
        looked_into.add(id(each))
        try:
            return _with_fields(each, map_all)
        finally:
            looked_into.discard(id(each))

    def map_all(nested: Any) -> Any:  # noqa: ANN401
        return _with_what_stayed(nested, tree_map(once, nested, is_leaf=_is_packed))

    found = map_all(values)
    return None if all(id(tensor) == number for number, tensor in crossed.items()) else found


def _is_packed(value: object) -> bool:
    return isinstance(value, PackedSequence)


def _with_packed(value: PackedSequence, act: Callable[[Any], Any]) -> PackedSequence:
    """Return packed sequences with values that are brought, as ``PackedSequence.to`` does.

    How many there are of each length stays on the CPU, where PyTorch wants it.  (An emulated device is one,
    and its numbers are brought as others are.)
    """
    data: torch.Tensor = act(value.data)
    counts = act(value.batch_sizes) if data.device.type == CPU else value.batch_sizes
    order = None if value.sorted_indices is None else act(value.sorted_indices)
    back = None if value.unsorted_indices is None else act(value.unsorted_indices)
    found = (data, counts, order, back)
    return value if all(a is b for a, b in zip(found, value, strict=True)) else type(value)(*found)


def has_fields(value: object) -> bool:
    """Whether it is of a dataclass, which PyTorch looks into only where somebody has registered that."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module)


def _with_fields(value: Any, act: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Return a dataclass's object with other values in its fields; itself, if they are the same."""
    names = [each.name for each in dataclasses.fields(value) if hasattr(value, each.name)]
    fields = {name: act(getattr(value, name)) for name in names}
    if all(fields[name] is getattr(value, name) for name in names):
        return value
    made = copy.copy(value)  # as it is, whatever its ``__init__`` does
    for name, field in fields.items():
        object.__setattr__(made, name, field)  # of a frozen one, too
    return made


def _with_what_stayed(before: Any, after: Any) -> Any:  # noqa: ANN401
    """Return nested values of which the parts that are as they were are the former objects.

    A module may write to a container that it was given.
    """
    if before is after or type(before) is not type(after):
        return after
    if type(before) is dict:
        parts = {key: _with_what_stayed(each, after[key]) for key, each in before.items()}
        return before if all(parts[key] is each for key, each in before.items()) else parts
    if type(before) in (list, tuple):
        found = [_with_what_stayed(a, b) for a, b in zip(before, after, strict=True)]
        if all(a is b for a, b in zip(before, found, strict=True)):
            return before
        return found if type(before) is list else tuple(found)
    return after


def made_anew(before: Any, after: Any) -> Iterator[Any]:  # noqa: ANN401
    """Yield the lists, dicts and dataclasses' objects among nested values that are not the former ones."""
    if before is after or type(before) is not type(after):
        return
    if type(after) in (list, dict) or has_fields(after):
        yield after
    for one, other in zip(_parts_of(before), _parts_of(after), strict=True):
        yield from made_anew(one, other)


def _parts_of(value: Any) -> Sequence[object]:  # noqa: ANN401
    """Return what is in a container, as far as something in it may have been brought."""
    if type(value) is dict:
        return list(value.values())
    if type(value) in (list, tuple):
        return list(value)
    return content_of(value) if has_fields(value) else ()


def content_of(container: Any) -> Sequence[object]:  # noqa: ANN401 - such as `made_anew` yields
    """Return what a list, a dict (keys, then values) or a dataclass's object holds."""
    if has_fields(container):
        return [getattr(container, each.name, None) for each in dataclasses.fields(container)]
    return [*container.keys(), *container.values()] if isinstance(container, dict) else list(container)


def are_same(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether two sequences hold the same objects, in the same order."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
