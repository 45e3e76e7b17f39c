"""Optimizers of PyTorch that step tables as well: what is no table is PyTorch's own work."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from tierstore.errors import ConfigError
from tierstore.nn.table_weight import TableWeight
from tierstore.optim.table_optimizer import Options, TableOptimizer, check_gradient, gradient_of, tables_of


class BesideTables(TableOptimizer):
    """Runs the ``step`` of PyTorch's class for all but tables, and its own for these.

    Attributes:
        theirs: PyTorch's class, which is a base, too.
        not_for_tables: options that a group with a table leaves off: they would change all rows, or are about
            kernels that step whole tensors.
    """

    theirs: ClassVar[type[torch.optim.Optimizer]]
    not_for_tables: ClassVar[tuple[str, ...]]
    _kept_back: list[tuple[Options, list[torch.Tensor]]] | None = None

    def add_param_group(self, param_group: Options) -> None:
        """See `TableOptimizer.add_param_group`."""
        super().add_param_group(param_group)
        if self._kept_back is not None:
            group = self.param_groups[-1]
            if any(
                weight is each
                for weight in tables_of(group)
                for _, params in self._kept_back
                for each in params
            ):
                raise ValueError("some parameters appear in more than one parameter group")
            self._kept_back.append((group, group["params"]))
            group["params"] = [each for each in group["params"] if not isinstance(each, TableWeight)]

    @contextlib.contextmanager
    def tables_kept_back(self) -> Iterator[None]:
        """Let groups that are added hold no tables for as long as this lasts."""
        self._kept_back = []
        try:
            yield
        finally:
            for group, params in self._kept_back:
                group["params"] = params
            self._kept_back = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # noqa: ANN401 - as PyTorch's
        """Change every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss, which is returned.

        Raises:
            ConfigError: an option was set that is not for tables; nothing was changed.
            UsageError: state of a table was put back that is gone; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        weights = [(weight, group) for group in self.param_groups for weight in tables_of(group)]
        gradients = [(w, gradient_of(w), group) for w, group in weights if w.grad is not None]
        for group in self.param_groups:
            self.check(group)
        for weight, gradient, _ in gradients:
            check_gradient(weight, gradient)
        self.require_state()
        with self.failed_step.step_of(weight for weight, _, _ in gradients):
            for weight, gradient, group in gradients:
                if not self.failed_step.has(weight):
                    self.step_table(weight, -gradient if group["maximize"] else gradient, group)
                    self.failed_step.note(weight)
            self._step_the_rest()
        return loss

    def _step_the_rest(self) -> None:
        """Let PyTorch's step be made of what is no table."""
        step = self.theirs.step
        with self._tables_aside():
            # Without what PyTorch puts around it to call hooks, which are called for this step already.
            getattr(step, "__wrapped__", step)(self) if getattr(step, "hooked", False) else step(self)

    def check(self, group: Options) -> None:
        """See `TableOptimizer.check`."""
        super().check(group)
        for weight in tables_of(group):
            for name in self.not_for_tables:
                if group[name]:
                    raise ConfigError(
                        f"{name}={group[name]!r} is not for the {weight.description}: put the "
                        "table into a group without that."
                    )

    @abc.abstractmethod
    def step_table(self, weight: TableWeight, gradient: torch.Tensor, group: Options) -> None:
        """Change the rows of a table that a gradient names."""

    @contextlib.contextmanager
    def _tables_aside(self) -> Iterator[None]:
        """Let groups hold no tables for as long as this lasts."""
        whole = [(group, group["params"]) for group in self.param_groups]
        try:
            for group, params in whole:
                group["params"] = [each for each in params if not isinstance(each, TableWeight)]
            yield
        finally:
            for group, params in whole:
                group["params"] = params
