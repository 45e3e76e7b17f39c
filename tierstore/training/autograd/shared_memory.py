"""Whose memory it is: what refers to the parameters' bytes beside the parameters: before and after a run.

Offloading takes the parameters' memory away and gives them other memory, over and over.  So:

1. Parameters whose bytes overlap travel together, and share them in every tier and afterwards
   (`tierstore.training.bundles.grouping`); here that is no concern.
2. Anything else that refers to those bytes would go stale and nobody would know: a kept ``state_dict()``, a
   flat tensor that parameters are views of, a buffer, another process.  That is refused by name.
3. A graph of an earlier forward would read parameters that have no bytes.  That is refused, too; a graph
   that backward has gone through reads nothing any more.

4. A buffer whose memory anything else refers to stays an ordinary one (`tierstore.training.modules.buffers`).
5. At the end of a run, aliases of leased bytes become aliases of what the parameters become.

The use count of a storage says whether there is anything else.  Only then live objects are looked through.
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tierstore.errors import UsageError
from tierstore.torch_private import storage_use_count
from tierstore.training.autograd.saved_tensors import Reference
from tierstore.training.bundles.binding import Binding, Where, natively
from tierstore.training.bundles.layout import overlapping
from tierstore.training.bundles.placeholders import has_no_values
from tierstore.training.bundles.tensor_slots import memory_of

_SHOWN = 3

Named = Mapping[torch.Tensor, str]


def require_sole_reference(model: nn.Module, ignored: Container[torch.Tensor] = ()) -> None:
    """Make sure that nothing but the model's parameters refers to their bytes.

    Args:
        model: whose.
        ignored: parameters that keep theirs.

    Raises:
        UsageError: something does; it is named as far as it can be known.
    """
    there = {name: p for name, p in model.named_parameters() if not has_no_values(p)}
    names: Named = {memory_of(p): name for name, p in there.items() if p not in ignored}
    others: dict[str, torch.Tensor] = {
        f"the parameter {name!r}, which is ignored,": memory_of(p)
        for name, p in there.items()
        if p in ignored
    }
    others |= {f"the buffer {name!r}": b for name, b in model.named_buffers() if not has_no_values(b)}
    _refuse_shared_memory(names)
    _refuse_others(names, others)
    fleeting = _made_before_forward(model)
    known = [*names, *others.values(), *fleeting]
    if _unexplained(names, known) or _are_in_graphs(names):
        gc.collect()  # what only a cycle refers to
        _refuse_graphs(names, fleeting)
        _refuse_aliases(names, known)


def referred_to_by_none(tensors: Sequence[torch.Tensor], model: nn.Module) -> set[torch.Tensor]:
    """Return those tensors whose memory nothing refers to but the model's parameters and buffers.

    What they are views of (``torch.ones(n, n).view(1, 1, n, n)``) does not count, if nobody else has it.
    """
    named: Named = dict.fromkeys(tensors, "")
    known = [*model.parameters(), *model.buffers(), *_made_before_forward(model), *_bases_alone(tensors)]
    if _unexplained(named, known) or _are_in_graphs(named):
        gc.collect()  # what only a cycle refers to
    unexplained = _unexplained(named, known)
    return {
        tensor
        for tensor in tensors
        if storage_key(tensor) not in unexplained and not _are_in_graphs({tensor: ""})
    }


def _bases_alone(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what some tensors are views of, each the only one, and nobody else refers to."""
    bases: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        base: Any = tensor._base  # noqa: SLF001 - there is no other way to ask
        if base is not None:
            bases[id(base)] = base
        base = None
    return [bases[key] for key in bases if _counts(bases, key) == _ALONE]


def _counts(bases: Mapping[int, torch.Tensor], key: int) -> tuple[int, int]:
    """Return how many refer to a base: in Python, and in C++."""
    base: Any = bases[key]
    return sys.getrefcount(base), base._use_count()  # noqa: SLF001 - there is no other way to count


def _counts_of_a_base_alone() -> tuple[int, int]:
    view = torch.empty(1).view(1, 1)
    return _counts({0: cast("torch.Tensor", view._base)}, 0)  # noqa: SLF001


_ALONE = _counts_of_a_base_alone()


def _made_before_forward(model: nn.Module) -> list[torch.Tensor]:
    """Return the plain attributes that modules' own hooks make anew before each forward.

    Such are ``weight`` under `torch.nn.utils.spectral_norm`, `weight_norm` and `prune`: these hooks name
    their attribute, and what they made last is used no more.
    """
    found = []
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():  # noqa: SLF001 - there is no other way to see them
            name = getattr(hook, "name", getattr(hook, "_tensor_name", None))
            made = vars(module).get(name) if isinstance(name, str) else None
            if isinstance(made, torch.Tensor):
                found.append(made)
    return found


def _refuse_shared_memory(names: Named) -> None:
    for parameter, name in names.items():
        if parameter.device.type == "cpu" and parameter.is_shared():
            raise UsageError(
                f"the parameter {name!r} is in memory shared with other processes or with a file: they would "
                "not see what becomes of it. Give it memory of its own first: p.data = p.data.clone().",
                key=name,
            )


def _refuse_others(names: Named, others: Mapping[str, torch.Tensor]) -> None:
    """Refuse what parameters share bytes with and what is not offloaded."""
    plain = {name: tensor for name, tensor in others.items() if has_bytes(tensor)}
    titles = [*names.values(), *plain]
    for part in overlapping([*names, *plain.values()]):
        owners = [number for number in part if number < len(names)]
        if owners and len(owners) < len(part):
            other = next(titles[number] for number in part if number >= len(names))
            raise UsageError(
                f"{other} shares memory with the parameter {titles[owners[0]]!r}, and is not offloaded: it "
                "would go stale. Make it an independent copy, or the same parameter.",
                key=titles[owners[0]],
            )


# ---------------------------------------------------------------------- aliases


def has_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of plain memory."""
    if is_lazy(tensor):
        return False
    try:
        with natively():  # of other models that are offloaded, too
            tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, fake, or a wrapper
        return False
    return True


def storage_key(tensor: torch.Tensor) -> int:
    """Return what a tensor's storage is known by while it lives."""
    with natively():
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - what a storage is known by


def _unexplained(names: Named, known: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return how many refer to each storage of a parameter, beside the known tensors."""
    explained: defaultdict[int, int] = defaultdict(int)
    for tensor in {id(tensor): tensor for tensor in known if has_bytes(tensor)}.values():
        explained[storage_key(tensor)] += 1
    return {
        key: count - explained[key]
        for key, count in ((storage_key(p), _references(p)) for p in names)
        if count > explained[key]
    }


def _references(tensor: torch.Tensor) -> int:
    """Count who refers to a tensor's storage: tensors, and users of the storage object itself."""
    storage = tensor.untyped_storage()
    return storage_use_count(storage._cdata) + sys.getrefcount(storage) - _OWN_REFERENCES  # noqa: SLF001


def _count_own_references() -> int:
    """Return what `_references` counts without anybody's doing, beside the tensor itself."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return storage_use_count(storage._cdata) + sys.getrefcount(storage) - 1  # noqa: SLF001


_OWN_REFERENCES = _count_own_references()


def _refuse_aliases(names: Named, known: Sequence[torch.Tensor]) -> None:
    unexplained = _unexplained(names, known)
    if not unexplained:
        return
    aliases = _aliases(unexplained, known)
    for parameter, name in names.items():
        key = storage_key(parameter)
        if key not in unexplained:
            continue
        found = aliases.get(key, [])
        with natively():
            is_seen = len(overlapping([parameter, *found])) <= len(found)
        if is_seen:
            raise _alias_error(name, found)
        if len(found) < unexplained[key]:
            raise _alias_error(name, ())


def _aliases(storages: Mapping[int, int], known: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """Return the live tensors, beside those known, that are views of some storages."""
    known_ids = {id(tensor) for tensor in known}
    found: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in live_tensors():
        if id(tensor) not in known_ids and has_bytes(tensor) and storage_key(tensor) in storages:
            found[storage_key(tensor)].append(tensor)
    return found


def live_tensors() -> Iterator[torch.Tensor]:
    """Yield every tensor that Python knows of."""
    for thing in gc.get_objects():
        # The class, not isinstance: a proxy would be asked for its __class__, and may act on it.
        if issubclass(type(thing), torch.Tensor):
            yield thing


def _alias_error(name: str, aliases: Sequence[torch.Tensor]) -> UsageError:
    looks = ", ".join(f"a {type(each).__name__} of shape {list(each.shape)}" for each in aliases[:_SHOWN])
    return UsageError(
        f"something refers to the memory of the parameter {name!r} ({looks or 'not seen by Python'}): "
        "it would not see what becomes of the parameter. It may be a state_dict() that was kept, p.data, "
        "p.detach(), or a flat tensor that parameters are views of. Let it go (del) before "
        "offload(...), or make it independent with .clone().",
        key=name,
    )


# ---------------------------------------------------------------------- graphs

_DEPTH = 4  # an object, its attributes, a list among these, and what is in it
# What these refer to is not what hooks have packed.  A reference is of a run that has ended: it has no bytes.
_NOT_HELD = (torch.Tensor, nn.Module, Reference, FunctionType, ModuleType, type)


def _are_in_graphs(names: Named) -> bool:
    """Whether autograd, or something like it, refers to parameters."""
    return any(parameter._use_count() > 1 for parameter in names)  # type: ignore[attr-defined]  # noqa: SLF001


def _refuse_graphs(names: Named, fleeting: Sequence[torch.Tensor]) -> None:
    """Refuse graphs that a backward could still go through with what parameters hold.

    Args:
        names: of the parameters.
        fleeting: tensors whose graphs nobody needs.
    """
    if not _are_in_graphs(names):
        return
    owners = {storage_key(parameter): name for parameter, name in names.items()}
    ends = {id(tensor) for tensor in fleeting}
    seen: set[Any] = set()
    for tensor in live_tensors():
        if id(tensor) in ends:
            continue
        for saved in _saved_in(_root_of(tensor), seen):
            if has_bytes(saved) and (name := owners.get(storage_key(saved))) is not None:
                raise UsageError(
                    f"a graph of an earlier forward, that of a tensor of shape {list(tensor.shape)}, still "
                    f"needs the parameter {name!r}, whose memory goes. Let the tensor go (del), or run its "
                    "backward before offload(...).",
                    key=name,
                )


def _root_of(tensor: torch.Tensor) -> object:
    """Return the node of a graph that made a tensor; ``None``: it has none, or cannot be used any more."""
    try:
        with natively():
            return None if tensor.is_leaf else tensor.grad_fn
    except RuntimeError:  # a view that a custom function made, and whose base was written to since
        return None


def _saved_in(root: Any, seen: set[Any]) -> Iterator[torch.Tensor]:  # noqa: ANN401 - nodes have no type
    """Yield what the nodes of a graph have saved for backward and still have."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        for attribute in dir(type(node)):
            if attribute.startswith("_raw_saved_"):
                yield from _saved_by(node, attribute)


def _saved_by(node: Any, attribute: str) -> Iterator[torch.Tensor]:  # noqa: ANN401 - nodes have no type
    """Yield what a node holds under an attribute, or what hooks have made of that.

    Nothing is unpacked: the hooks are somebody's, and those of a checkpoint would run its forward again.
    """
    try:
        held = getattr(node, attribute)
    except RuntimeError:  # backward has been at this function of a user's
        return
    for each in held if isinstance(held, tuple | list) else (held,):
        yield from _tensors_in(each.data)


def _tensors_in(packed: object) -> Iterator[torch.Tensor]:
    """Yield tensors that an object is, or refers to at no great depth."""
    layer = [packed]
    for _ in range(_DEPTH):
        yield from (cast("torch.Tensor", each) for each in layer if issubclass(type(each), torch.Tensor))
        layer = gc.get_referents(*(each for each in layer if not issubclass(type(each), _NOT_HELD)))


# ---------------------------------------------------------------------- the end


def aliases_of(binding: Binding) -> list[torch.Tensor]:
    """Return what else is a view of a bundle's leased bytes, beside the bundle's own and the store's."""
    if not binding.is_referred_to or binding.storages is None:
        return []
    gc.collect()  # what only a cycle refers to
    shown = binding.storages
    own = {id(view) for view in shown.views} | {
        id(memory_of(tensor))
        for tensor, where in zip(binding.tensors, binding.where, strict=True)
        if where is Where.HOME
    }
    return [
        tensor
        for tensor in live_tensors()
        if id(tensor) not in own
        and has_bytes(tensor)
        and storage_key(tensor) in shown.keys[1:]  # in the first one are the store's own
    ]
