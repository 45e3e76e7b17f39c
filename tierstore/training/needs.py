"""Which bundles each module's forward needs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tierstore.training import hooks
from tierstore.training.binding import Binding
from tierstore.training.groups import Group

Needs = dict[nn.Module, tuple[list[Binding], list[Binding]]]


def needs_of(model: nn.Module, groups: dict[Binding, Group]) -> Needs:
    """Return the bundles that each module's forward needs: always, and beside them in evaluation."""
    direct: dict[nn.Module, list[Binding]] = {}
    for binding, group in groups.items():
        for module in group.modules:
            direct.setdefault(module, []).append(binding)
    needs: Needs = {}
    for module in model.modules():
        always = _union(direct, [module, *hooks.modules_read_always(module)])
        evaluating = [b for b in _union(direct, hooks.modules_read_whole(module)) if b not in always]
        needs[module] = (always, evaluating)
    return needs


def _union(direct: dict[nn.Module, list[Binding]], modules: Sequence[nn.Module]) -> list[Binding]:
    return list(dict.fromkeys(binding for module in modules for binding in direct.get(module, ())))
