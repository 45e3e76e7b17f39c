r"""Which operators of a layer are meant: by the module they run in, and by their names.

An operator is meant by ``feed_forward\.mul`` if it runs directly in the forward of ``feed_forward``, not in
a submodule's.  A pattern of ATen operators means them wherever they run in the layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn
from torch.utils.hooks import RemovableHandle

from tierstore.torch_private import OpOverload
from tierstore.training.activations.config.operator_names import means_aten, own_name
from tierstore.training.activations.config.patterns import Pattern
from tierstore.training.activations.runtime.module_calls import CallStack, hook_around

_COLLECTIVES = "_c10d_functional"


@dataclass(frozen=True, slots=True)
class OperatorScope:
    """What is meant of the operators that run directly in one module's forward.

    Attributes:
        is_whole: all of them.
        names: those of these names.
        excluded: not those of these names.
        without_collectives: no communication between processes.
        met: of the names, those of operators that ran.
    """

    is_whole: bool = False
    names: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    without_collectives: bool = False
    met: set[str] = field(default_factory=set, compare=False)

    def __or__(self, other: OperatorScope) -> OperatorScope:
        return OperatorScope(
            self.is_whole or other.is_whole,
            self.names | other.names,
            self.excluded | other.excluded,
            self.without_collectives or other.without_collectives,
        )


_NOTHING = OperatorScope()


def is_collective(operator: OpOverload) -> bool:
    """Whether an operator is communication between processes."""
    return bool(operator.namespace == _COLLECTIVES)


@dataclass
class OperatorSelection:
    """The operators of one layer that are meant, by name where a scope says so, and by pattern anywhere.

    Attributes:
        calls: of its model.
        chosen: patterns of ATen operators.
        excluded: patterns of ATen operators that are not.
        keeps_collectives: whether communication between processes is excluded everywhere.
    """

    calls: CallStack
    chosen: tuple[Pattern, ...] = ()
    excluded: tuple[Pattern, ...] = ()
    keeps_collectives: bool = False
    _anywhere: dict[OpOverload, tuple[bool, bool]] = field(default_factory=dict, init=False, repr=False)

    @property
    def scope(self) -> OperatorScope:
        """The scope of the module whose forward runs."""
        return self.calls.last(OperatorScope) or _NOTHING

    @property
    def met(self) -> Iterable[OpOverload]:
        """The operators that ran, of the layer and of its submodules."""
        return self._anywhere

    def means(self, operator: OpOverload) -> bool:
        """Say whether an operator that runs now is meant."""
        scope = self.scope
        is_chosen, is_excluded = self._by_pattern(operator)
        name = own_name(operator)
        if name in scope.names:
            scope.met.add(name)
        if is_excluded or name in scope.excluded:
            return False
        return is_chosen or scope.is_whole or name in scope.names

    def excludes(self, operator: OpOverload) -> bool:
        """Say whether an operator that runs now is excluded."""
        scope = self.scope
        if is_collective(operator) and (self.keeps_collectives or scope.without_collectives):
            return True
        return self._by_pattern(operator)[1] or own_name(operator) in scope.excluded

    def _by_pattern(self, operator: OpOverload) -> tuple[bool, bool]:
        found = self._anywhere.get(operator)
        if found is None:
            found = (
                any(means_aten(pattern, operator) for pattern in self.chosen),
                any(means_aten(pattern, operator) for pattern in self.excluded),
            )
            self._anywhere[operator] = found
        return found


class ScopeHooks:
    """The hooks that say that a module runs.

    Args:
        module: that does.
        calls: of its model.
        scope: its operators.
    """

    def __init__(self, module: nn.Module, calls: CallStack, scope: OperatorScope) -> None:
        self.module = module
        self.scope = scope
        self._calls = calls

    def register(self) -> list[RemovableHandle]:
        """Hook them to the module, around the hooks that it has."""
        return hook_around(self.module, self._enter, self._leave)

    def _enter(self, *_: object) -> None:
        """The module begins to run."""
        self._calls.discard_interrupted()
        self._calls.begin(self, self.scope)

    def _leave(self, *_: object) -> None:
        """The module has run, well or badly."""
        self._calls.end(self, OperatorScope)
