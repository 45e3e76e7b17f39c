"""Which bundles each module's forward needs, and which are there together when it runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from torch import nn

from tierstore.training.bundles.grouping import Group
from tierstore.training.bundles.working_sets import ForwardSet, bundle_bytes
from tierstore.training.modules import hooks

Bundle = TypeVar("Bundle", bound=Hashable)
Needs = dict[nn.Module, tuple[list[Bundle], list[Bundle]]]


def needs_of(model: nn.Module, groups: Mapping[Bundle, Group]) -> Needs[Bundle]:
    """Return the bundles that each module's forward needs: always, and beside them in evaluation."""
    direct: dict[nn.Module, list[Bundle]] = {}
    for bundle, group in groups.items():
        for module in group.modules:
            direct.setdefault(module, []).append(bundle)
    needs: Needs[Bundle] = {}
    for module in model.modules():
        always = _union(direct, [module, *hooks.modules_read_always(module)])
        evaluating = [b for b in _union(direct, hooks.modules_read_whole(module)) if b not in always]
        needs[module] = (always, evaluating)
    return needs


def called_by_programs(
    model: nn.Module, needs: Mapping[nn.Module, tuple[Sequence[object], Sequence[object]]]
) -> set[nn.Module]:
    """Return what a program may call: the whole model and its parts.

    A part is a child that needs bundles; of a list of modules, which nobody calls, and of a wrapper around
    one module the parts are theirs.  What needs none is left as it is: it may look at its own hooks.

    Args:
        model: the whole.
        needs: of each module, as of `needs_of`.
    """
    called, opened = {model}, [model]
    for module in opened:
        parts = [each for each in module.children() if any(any(needs[inner]) for inner in each.modules())]
        called.update(filter(has_forward, parts))
        parted = parts if len(parts) == 1 else [each for each in parts if not has_forward(each)]
        opened += [each for each in parted if each not in opened]
    return called


def _union(direct: Mapping[nn.Module, Sequence[Bundle]], modules: Sequence[nn.Module]) -> list[Bundle]:
    return list(dict.fromkeys(bundle for module in modules for bundle in direct.get(module, ())))


def forward_sets(model: nn.Module, groups: Sequence[Group]) -> list[ForwardSet]:
    """Return what is there together when a module of the model runs, in training and in evaluation.

    A module keeps what it needs until its forward is done: what runs inside it needs its own beside that.  A
    child is taken to run inside its parent's forward, if that has one.  What is pinned is left out.
    """
    travelling = {number: group for number, group in enumerate(groups) if not group.is_pinned}
    nbytes = {number: bundle_bytes(group) for number, group in travelling.items()}
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}
    needs = needs_of(model, travelling)

    def first_names(bundles: Sequence[int]) -> tuple[str, ...]:
        return tuple(travelling[number].names[0] for number in bundles)

    def set_of(module: nn.Module, own: Sequence[int], around: Sequence[int]) -> ForwardSet:
        own_bytes, around_bytes = (tuple(nbytes[each] for each in part) for part in (own, around))
        return ForwardSet(names[module], first_names(own), first_names(around), own_bytes, around_bytes)

    training = {module: always for module, (always, _) in needs.items()}
    evaluating = {module: [*always, *beside] for module, (always, beside) in needs.items()}
    ways = [training] if training == evaluating else [training, evaluating]
    return [set_of(*each) for way in ways for each in _together(model, way)]


def _together(
    model: nn.Module, needs: Mapping[nn.Module, Sequence[int]]
) -> Iterator[tuple[nn.Module, list[int], list[int]]]:
    """Yield each module that brings bundles, which, and what those around it hold already."""
    calls: list[tuple[nn.Module, frozenset[int]]] = [(model, frozenset())]
    seen = set(calls)
    while calls:
        module, around = calls.pop()
        own = [each for each in needs[module] if each not in around] if has_forward(module) else []
        if own:
            yield module, own, sorted(around)
            around = around.union(own)
        inner = [(child, around) for child in module.children() if (child, around) not in seen]
        seen.update(inner)
        calls += reversed(inner)


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called, or is only a list of others."""
    kinds = (kind for kind in type(module).__mro__ if kind is not nn.Module)
    return "forward" in vars(module) or any("forward" in vars(kind) for kind in kinds)
