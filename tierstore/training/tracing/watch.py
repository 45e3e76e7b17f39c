"""Watches one step of a model that is nowhere: operators, modules, and what autograd saves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from tierstore.errors import TierStoreError
from tierstore.modes import run_operator
from tierstore.planning import Does, Phase
from tierstore.torch_private import OpOverload, TorchDispatchMode
from tierstore.training.activations.config.operator_names import own_name
from tierstore.training.tracing import grouped_products
from tierstore.training.tracing.assumed_values import AssumedValues, no_answer
from tierstore.training.tracing.bundles_of import Bundles
from tierstore.training.tracing.moment_log import MomentLog, OpenUse
from tierstore.training.tracing.operator_work import dtype_of, flops_of, moved_bytes_of, sort_of, tensors_in
from tierstore.training.tracing.storages import Sort

_SPARSE = "what sparse tensors take is not counted"


class WatchedModules:
    """The modules that run, with their windows.

    Args:
        model: whose.
        bundles: that its modules need.
        log: what is told of them.
    """

    def __init__(self, model: nn.Module, bundles: Bundles, log: MomentLog) -> None:
        self._bundles = bundles
        self._log = log
        self._paths = {module: path for path, module in model.named_modules()}
        self._root = type(model).__name__
        self._running: list[tuple[nn.Module, list[OpenUse], int | None]] = []
        self._open_keys: dict[str, int] = {}

    @property
    def path(self) -> str:
        """The name of the module that runs, in the model; of the model itself its class."""
        return (self._paths[self._running[-1][0]] or self._root) if self._running else self._root

    @property
    def path_in_layer(self) -> str:
        """As a mark names what runs: counted from its layer."""
        layer = next((each for each, _, _ in self._running if each in self._bundles.layers), None)
        path = self.path
        return path if layer is None else path.removeprefix(self._paths[layer]).lstrip(".")

    def is_open(self, key: str) -> bool:
        """Whether a window on a bundle is open."""
        return self._open_keys.get(key, 0) > 0

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Let modules tell when they run, inside the context."""
        handles: list[RemovableHandle] = []
        try:
            for module in self._paths:
                handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: object) -> None:
        del args
        former = self._log.layer
        number = self._bundles.layers.get(module)
        keys = self._bundles.needs.get(module, ())
        self._running.append((module, [], former))
        if number is not None:
            self._log.layer = number
        if keys or number is not None:
            self._log.begin(self.path)
        for key in keys:
            self._running[-1][1].append(self._log.use(key, Does.READ))
            self._open_keys[key] = self._open_keys.get(key, 0) + 1

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        del args, output
        if not self._running or self._running[-1][0] is not module:
            return
        _, uses, former = self._running.pop()
        for use in uses:
            self._log.close(use)
            self._open_keys[use.key] -= 1
        was_layer = module in self._bundles.layers
        self._log.layer = former
        if uses or was_layer:
            self._log.begin(self.path)


class Watch(TorchDispatchMode):
    """Sees every operator of a step.

    Args:
        bundles: of the model.
        modules: of it that run.
        log: that is told.
        assumed: what is answered where values are asked for.
    """

    def __init__(
        self, bundles: Bundles, modules: WatchedModules, log: MomentLog, assumed: AssumedValues
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bundles = bundles
        self._modules = modules
        self._log = log
        self._assumed = assumed
        self._last = ""
        self._used: set[int] = set()  # whose windows are open that are no module's

    # ------------------------------------------------------------------ operators

    # torch's signature: the types of arguments and result are those of the operation.
    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operator, and note what it does."""
        kwargs = kwargs or {}
        given: list[torch.Tensor] = []
        tensors_in(args, given)
        if kwargs:
            tensors_in(tuple(kwargs.values()), given)
        self._note_uses(func, given)
        result = self._run(func, args, kwargs)
        made: list[torch.Tensor] = []
        tensors_in((result,), made)
        self._log.storages.take_in(made, given)
        if any(each.layout is not torch.strided for each in made):
            self._assumed.note(_SPARSE)
        sort = sort_of(func)
        tensors = [each for each in (*given, *made) if each.is_meta]
        if sort is not None and tensors:
            self._last = own_name(func)
            flops = flops_of(func, args, kwargs, result, sort)
            self._log.count(sort, dtype_of(tensors), flops, moved_bytes_of(tensors))
        return result

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        module = self._modules.path
        is_noted = self._log.phase is Phase.FORWARD
        if func.name() == grouped_products.NAME and args[0].is_meta:
            return grouped_products.product_of(args)
        answer = self._assumed.answer(func, args, kwargs, module, is_noted=is_noted)
        if answer is not None:
            return answer[0]
        try:
            return run_operator(
                func, self._assumed.without_masks(func, args, module, is_noted=is_noted), kwargs
            )
        except TierStoreError:
            raise
        except Exception as error:
            found = no_answer(func, module, error)
            if found is error:
                raise
            raise found from error

    def _note_uses(self, func: OpOverload, given: Sequence[torch.Tensor]) -> None:
        """Open windows on bundles that are used outside those of their modules, backward's among them.

        Such a window is of one tensor, and ends when there is another.
        """
        if self._log.phase is Phase.OPTIMIZER or sort_of(func) is None:
            return
        fresh: dict[int, str] = {}
        for tensor in given:
            known = self._log.storages.find(tensor)
            if known is None or known.sort is not Sort.PARAMETERS or known.key is None:
                continue
            if not self._modules.is_open(known.key) and known.number not in self._used:
                fresh.setdefault(known.number, known.key)
        if not fresh:
            return
        first = next(iter(fresh.values()))
        if self._log.phase is Phase.BACKWARD:
            self._log.layer = self._bundles.data[first].layer
        self._log.begin(first.partition("/")[2])
        self._used = set(fresh)
        for key in fresh.values():
            self._log.use(key, Does.READ)

    def close_windows(self) -> None:
        """Let what is used next open a window again."""
        self._used = set()

    # ------------------------------------------------------------------ what autograd saves

    def saving(self) -> saved_tensors_hooks:
        """Return a context in which what autograd saves is noted."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._log.storages.find(tensor)
        if known is not None and known.sort is Sort.OWN:
            path = self._modules.path_in_layer
            operator = f"{path}.{self._last}" if path else self._last
            self._log.storages.call(known, Sort.ACTIVATION, self._log.make_activation(known.nbytes, operator))
        return tensor

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._log.storages.find(tensor)
        if known is not None and known.sort is Sort.ACTIVATION and known.key is not None:
            self._log.read_activation(known.key)
        elif known is not None:
            self._used.discard(known.number)  # each operator of the graph opens a window of its own
        return tensor
