"""What operators are given, and what they change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tierstore.torch_private import ExcludeDispatchKeys, OpOverload, is_functional_tensor
from tierstore.training.bundles.bindings import natively

Arguments = tuple[object, ...]
Named = Mapping[str, object]

_ADInplaceOrView = torch.DispatchKey.ADInplaceOrView


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - an operator's own
    """Return nested arguments with all of one kind changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([mapped(each, kind, change) for each in value])
    if isinstance(value, Mapping):
        return {name: mapped(each, kind, change) for name, each in value.items()}
    return value


def found(value: object, kind: type) -> Iterator[Any]:
    """Yield all of one kind in nested arguments."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from found(each, kind)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from found(each, kind)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested arguments."""
    return found(value, torch.Tensor)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its graph; it shares the counter of versions."""
    with natively(), versions_are_shared():
        return tensor.detach()


@contextlib.contextmanager
def versions_are_shared() -> Iterator[None]:
    """Let aliases that are made inside share the counter of versions, also where a mode sees an operator."""
    with ExcludeDispatchKeys(_ADInplaceOrView, False):  # noqa: FBT003 - torch's own signature
        yield


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has bytes of its own and a counter of versions."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    with natively():
        if tensor.layout is not torch.strided or tensor.is_inference() or has_no_bytes(tensor):
            return False
        try:
            tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # as inside of torch.func's transforms
            return False
        return True


def has_no_bytes(tensor: torch.Tensor) -> bool:
    """Whether it is functional, or the zeros of forward-mode differentiation."""
    return is_functional_tensor(tensor) or tensor._is_zerotensor()  # noqa: SLF001


def is_collective(func: OpOverload) -> bool:
    """Say whether processes communicate in an operator that may change what it is given, whatever it says."""
    return func.namespace == "c10d"


class OperatorFacts(NamedTuple):
    """What is known of an operator before it runs.

    Attributes:
        operator: itself.
        is_view: whether what it returns has the bytes of what it is given.
        is_changing: whether it changes what it is given; a collective may, whatever its schema says.
        returns_changed: whether it returns what it has changed.
    """

    operator: OpOverload
    is_view: bool
    is_changing: bool
    returns_changed: bool


_facts_by_id: dict[int, OperatorFacts] = {}
"""By an operator's id, which stays its own as it is kept.  Its hash would be a call of Python."""


def facts_of(func: OpOverload) -> OperatorFacts:
    """Return what is known of an operator."""
    facts = _facts_by_id.get(id(func))
    if facts is None:
        schema = func._schema  # noqa: SLF001 - the one place that says it
        returned = (each.alias_info for each in schema.returns)
        facts = OperatorFacts(
            operator=func,
            is_view=func.is_view,
            is_changing=schema.is_mutable or is_collective(func),
            returns_changed=any(alias is not None and alias.is_write for alias in returned),
        )
        _facts_by_id[id(func)] = facts
    return facts


def is_changing(func: OpOverload) -> bool:
    """Say whether an operator changes what it is given."""
    return facts_of(func).is_changing


def written(func: OpOverload, args: Arguments, kwargs: Named) -> Iterator[torch.Tensor]:
    """Yield what an operator changes."""
    if is_collective(func):
        yield from tensors_in((args, kwargs))
        return
    for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - the one place that says it
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
