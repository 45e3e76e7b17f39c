"""What optimizers over touched rows have in common: their options, and one step over all parameters."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tierstore.optim.touched_rows import TouchedRows

Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]
Options = dict[str, Any]
State = dict[str, Any]


class RowOptimizer(torch.optim.Optimizer, metaclass=abc.ABCMeta):
    """Treats each parameter by itself, and of a sparse gradient changes only the rows that it names.

    ``state`` has a ``step`` for each parameter, as PyTorch's Adam has, and what a subclass keeps.
    """

    def add_param_group(self, param_group: Options) -> None:
        """See PyTorch.

        Raises:
            ValueError: an option is out of its range, or a parameter is complex or sparse itself.
        """
        super().add_param_group(param_group)
        try:
            self.check(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

    def check(self, group: Options) -> None:
        """Raise ``ValueError`` if an option of a group is out of its range, or a parameter is not for it."""
        for name in ("lr", "weight_decay"):
            refuse_unless(bool(group[name] >= 0), name, group[name], "at least 0")
        for parameter in group["params"]:
            if parameter.is_complex() or parameter.layout is not torch.strided:
                raise ValueError(
                    f"{type(self).__name__} takes dense real parameters, not one of {parameter.dtype} and "
                    f"{parameter.layout} with shape {list(parameter.shape)}."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # noqa: ANN401 - as PyTorch's
        """Change every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss, which is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Options) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state |= self.make_state(parameter, group)
        state["step"] += 1
        touched = TouchedRows.of(-gradient if group["maximize"] else gradient)
        names = [name for name in state if name != "step"]
        rows = touched.take(parameter)
        kept = {name: touched.take(state[name]) for name in names}
        gradient = touched.with_decay(rows, group["weight_decay"])
        self.update(rows, kept, gradient, group, state["step"].item())
        for name in names:
            touched.put(state[name], kept[name])
        touched.put(parameter, rows)

    @abc.abstractmethod
    def make_state(self, parameter: torch.Tensor, group: Options) -> State:
        """Return what is kept of a parameter before its first step: tensors of its shape."""

    @abc.abstractmethod
    def update(
        self, rows: torch.Tensor, kept: State, gradient: torch.Tensor, group: Options, step: float
    ) -> None:
        """Change rows of a parameter, and what is kept of them, in place.

        Args:
            rows: of a parameter, or all of it.
            kept: rows of what `make_state` has returned, by its names.
            gradient: of these rows.
            group: the options.
            step: which step of the parameter it is; the first is 1.
        """


def refuse_unless(is_right: bool, name: str, value: object, what: str) -> None:
    """Raise ``ValueError`` with the name of an option and its value."""
    if not is_right:
        raise ValueError(f"{name} is {value!r}; it has to be {what}.")
