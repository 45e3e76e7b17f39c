r"""Which operators of a layer are meant: by the module they run in, and by their names.

An operator is meant by ``feed_forward\.mul`` if it runs directly in the forward of ``feed_forward``, not in
a submodule's.  A pattern of ATen operators means them wherever they run in the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tierstore.torch_private import OpOverload
from tierstore.training.activations.config.patterns import Pattern
from tierstore.training.activations.runtime.module_calls import CallStack, hook_around

_COLLECTIVES = "_c10d_functional"
_KNOWN_AS = {
    "batch_norm": ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
    "conv1d": ("convolution",),
    "conv2d": ("convolution",),
    "conv3d": ("convolution",),
    "dropout": ("native_dropout",),
    "flash_attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    "layer_norm": ("native_layer_norm",),
    "log_softmax": ("_log_softmax",),
    "matmul": ("mm", "bmm", "addmm", "baddbmm", "linear"),
    "rms_norm": ("_fused_rms_norm",),
    "softmax": ("_softmax",),
}
"""What operators are called where they run, by what the author of a model calls them."""


def is_operator(name: str) -> bool:
    """Whether an ATen operator is called so, or known so."""
    return name in _KNOWN_AS or hasattr(torch.ops.aten, name)


@dataclass(frozen=True, slots=True)
class OperatorScope:
    """What is meant of the operators that run directly in one module's forward.

    Attributes:
        is_whole: all of them.
        names: those of these names.
        excluded: not those of these names.
        without_collectives: no communication between processes.
    """

    is_whole: bool = False
    names: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    without_collectives: bool = False

    def __or__(self, other: OperatorScope) -> OperatorScope:
        return OperatorScope(
            self.is_whole or other.is_whole,
            self.names | other.names,
            self.excluded | other.excluded,
            self.without_collectives or other.without_collectives,
        )


_NOTHING = OperatorScope()


def names_of(operators: Sequence[str]) -> frozenset[str]:
    """Return what operators are called where they run."""
    return frozenset(each for name in operators for each in (name, *_KNOWN_AS.get(name, ())))


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
    _anywhere: dict[object, tuple[bool, bool]] = field(default_factory=dict, init=False, repr=False)

    @property
    def scope(self) -> OperatorScope:
        """The scope of the module whose forward runs."""
        return self.calls.last(OperatorScope) or _NOTHING

    def means(self, operator: OpOverload) -> bool:
        """Say whether an operator that runs now is meant."""
        scope = self.scope
        is_chosen, is_excluded = self._by_pattern(operator)
        if is_excluded or _name(operator) in scope.excluded:
            return False
        return is_chosen or scope.is_whole or _name(operator) in scope.names

    def excludes(self, operator: OpOverload) -> bool:
        """Say whether an operator that runs now is excluded."""
        scope = self.scope
        if is_collective(operator) and (self.keeps_collectives or scope.without_collectives):
            return True
        return self._by_pattern(operator)[1] or _name(operator) in scope.excluded

    def _by_pattern(self, operator: OpOverload) -> tuple[bool, bool]:
        found = self._anywhere.get(operator)
        if found is None:
            text = str(operator)
            found = (
                any(pattern.matches_aten(text) for pattern in self.chosen),
                any(pattern.matches_aten(text) for pattern in self.excluded),
            )
            self._anywhere[operator] = found
        return found


def _name(operator: OpOverload) -> str:
    return str(operator._schema.name).partition("::")[2]  # noqa: SLF001 - the one place that says it


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
