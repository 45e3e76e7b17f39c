"""Operators of a recomputed region whose outputs are kept after all.

What PyTorch's selective checkpointing does for the operators that it saves, but a graph may be run backward
more than once, and what was changed in place since is computed again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from tierstore.modes import run_operator
from tierstore.torch_private import OpOverload, TorchDispatchMode
from tierstore.training.activations.recomputation.checkpointed_modules import Context
from tierstore.training.activations.recomputation.recorded_ops import RandomState, random_state_for
from tierstore.training.activations.runtime.forward_conditions import refuse_forward_mode
from tierstore.training.activations.runtime.operators import (
    Arguments,
    Named,
    alias_of,
    is_changing,
    is_plain,
    mapped,
    tensors_in,
    written,
)

Asked = Callable[[OpOverload], bool]
"""Says whether the output of an operator that runs now is kept."""

_CAST = torch.ops.aten._to_copy.default  # noqa: SLF001 - autocast's: how often it runs depends on its cache


class _Output(NamedTuple):
    """What an operator returned, with the versions of its tensors, and what it left of a generator."""

    result: Any
    versions: list[int]
    random: RandomState | None

    @property
    def is_unchanged(self) -> bool:
        """Whether it is still what the operator returned."""
        return self.versions == [tensor._version for tensor in tensors_in(self.result)]  # noqa: SLF001


Run = Callable[[OpOverload, Arguments, Named, bool], Any]
"""Runs an operator whose output is kept, or not."""


def keeping(is_kept: Asked) -> tuple[Context, Context]:
    """Return what a region's forward runs in, and what its repetitions run in.

    Args:
        is_kept: asked for each operator, in repetitions again.
    """
    outputs = _Outputs()
    return _Mode(is_kept, outputs.keep), _Mode(is_kept, outputs.reuse, outputs.begin_again)


class _Outputs:
    """What is kept of one forward of a region: of each operator, run by run."""

    def __init__(self) -> None:
        self._kept: dict[OpOverload, list[_Output | None]] = defaultdict(list)
        self._runs: dict[OpOverload, int] = defaultdict(int)

    def keep(self, func: OpOverload, args: Arguments, kwargs: Named, is_kept: bool) -> Any:  # noqa: ANN401
        """Run an operator, and keep what it returns if that is asked for."""
        refuse_forward_mode()
        result = run_operator(func, args, kwargs)
        if is_kept:
            self._kept[func].append(_output(func, args, kwargs, result))
        elif isinstance(func, OpOverload):
            self._forget(written(func, args, kwargs))
        return result

    def _forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep nothing of what an operator changes.

        Versions do not tell: collectives leave them as they were, and the pieces that ``unsafe_chunk``
        returns share a storage, and each has a counter of its own.
        """
        changed = {id(tensor.untyped_storage()) for tensor in tensors if is_plain(tensor)}
        for runs in self._kept.values() if changed else ():
            for index, output in enumerate(runs):
                kept = () if output is None else tensors_in(output.result)
                if any(id(tensor.untyped_storage()) in changed for tensor in kept):
                    runs[index] = None

    def begin_again(self) -> None:
        """The forward is run again, from its first operator on."""
        self._runs.clear()

    def reuse(self, func: OpOverload, args: Arguments, kwargs: Named, is_kept: bool) -> Any:  # noqa: ANN401
        """Return what was kept, or run the operator."""
        if is_kept:
            run = self._runs[func]
            self._runs[func] += 1
            kept = self._kept[func][run] if run < len(self._kept[func]) else None
            if kept is not None and kept.is_unchanged:
                if kept.random is not None:
                    kept.random.set()  # as if the operator had drawn its numbers
                return mapped(kept.result, torch.Tensor, alias_of)
        return run_operator(func, args, kwargs)


class _Mode(TorchDispatchMode):
    """Has every operator run by somebody.

    Args:
        is_kept: asked for each of them.
        run: runs it.
        begin: called when the mode comes into force.
    """

    def __init__(self, is_kept: Asked, run: Run, begin: Callable[[], None] = lambda: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_kept = is_kept
        self._run = run
        self._begin = begin

    def __enter__(self) -> Any:  # noqa: ANN401 - torch's own
        self._begin()
        return super().__enter__()  # type: ignore[no-untyped-call]

    # torch's signature: the types of arguments and result are those of the operation.
    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Named | None = None,
    ) -> Any:  # noqa: ANN401
        """Ask whether the operator's output is kept, and have it run."""
        return self._run(func, args, kwargs or {}, _is_asked(self._is_kept, func))


def _is_asked(is_kept: Asked, func: object) -> bool:
    if not isinstance(func, OpOverload) or func is _CAST or is_changing(func):
        return False
    return is_kept(func)


def _output(func: OpOverload, args: Arguments, kwargs: Named, result: object) -> _Output | None:
    """Return what is kept of a result; ``None``: it is not the operator's own."""
    if not _is_own(result, (args, kwargs)):
        return None
    aliases = mapped(result, torch.Tensor, alias_of)
    versions = [each._version for each in tensors_in(aliases)]  # noqa: SLF001
    return _Output(aliases, versions, random_state_for(func, args, kwargs))


def _is_own(result: object, given: object) -> bool:
    """Whether everything that an operator returned is new."""
    made = list(tensors_in(result))
    if not all(map(is_plain, made)):
        return False
    storages = {id(tensor.untyped_storage()) for tensor in tensors_in(given) if is_plain(tensor)}
    return bool(made) and not any(id(tensor.untyped_storage()) in storages for tensor in made)
