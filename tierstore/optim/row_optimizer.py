"""What optimizers over touched rows have in common: their options, and one step over all parameters."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tierstore.nn.table_weight import TableWeight
from tierstore.optim.table_optimizer import Options, TableOptimizer, change_rows, check_gradient, gradient_of
from tierstore.optim.touched_rows import TouchedRows
from tierstore.tables import ROWS

Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]
State = dict[str, Any]


class RowOptimizer(TableOptimizer):
    """Treats each parameter by itself, and of a sparse gradient changes only the rows that it names.

    ``state`` has a ``step`` for each parameter, as PyTorch's Adam has, and what a subclass keeps.
    """

    def check(self, group: Options) -> None:
        """See `TableOptimizer.check`."""
        super().check(group)
        refuse_unless(bool(group["lr"] >= 0), "lr", group["lr"], "at least 0")
        decay, scale = group.get("weight_decay", 0.0), group.get("loss_scale", 1.0)
        refuse_unless(decay >= 0, "weight_decay", decay, "at least 0")
        refuse_unless(scale > 0, "loss_scale", scale, "more than 0")
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

        Raises:
            UsageError: state of a table was put back that is gone; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.require_state()
        every = [(each, group) for group in self.param_groups for each in group["params"]]
        with self.failed_step.step_of(each for each, _ in every):
            for parameter, group in every:
                if parameter.grad is not None and not self.failed_step.has(parameter):
                    self._step(parameter, _prepared(gradient_of(parameter), group), group)
                    self.failed_step.note(parameter)
        return loss

    def _step(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Options) -> None:
        if isinstance(parameter, TableWeight):
            check_gradient(parameter, gradient)
            touched = TouchedRows.of(gradient, parameter.known_repeats)
            if touched.numbers is not None and group.get("weight_decay", 0.0):
                touched = touched._replace(named=parameter.access.named(touched.numbers, touched.named))
            self._step_table(parameter, touched, group)
            return
        touched = TouchedRows.of(gradient)
        state = self.state[parameter]
        if not state:
            state["step"] = self.first_step()
            for name, start in self.initial_state(group).items():
                state[name] = torch.full_like(parameter, start)
        state["step"] += 1
        names = [name for name in state if name != "step"]
        rows = touched.take(parameter)
        kept = {name: touched.take(state[name]) for name in names}
        gradient = touched.with_decay(rows, group.get("weight_decay", 0.0))
        self.update(rows, kept, gradient, group, float(state["step"]))
        for name in names:
            touched.put(state[name], kept[name])
        touched.put(parameter, rows)

    def _step_table(self, weight: TableWeight, touched: TouchedRows, group: Options) -> None:
        state = self.state_of_table(weight, group)
        number = float(state["step"]) + 1

        def change(cells: State) -> None:
            rows = cells[ROWS]
            kept = {name: cell for name, cell in cells.items() if name != ROWS}
            gradient = touched.with_decay(rows, group.get("weight_decay", 0.0))
            self.update(rows, kept, gradient, group, number)

        change_rows(weight, touched.numbers, [ROWS, *self.initial_state(group)], change)
        state["step"] += 1

    @abc.abstractmethod
    def update(
        self, rows: torch.Tensor, kept: State, gradient: torch.Tensor, group: Options, step: float
    ) -> None:
        """Change rows of a parameter, and what is kept of them, in place.

        Args:
            rows: of a parameter, or all of it.
            kept: rows of what `initial_state` names.
            gradient: of these rows.
            group: the options.
            step: which step of the parameter it is; the first is 1.
        """


def _prepared(gradient: torch.Tensor, group: Options) -> torch.Tensor:
    """Return a gradient as it counts: without the scale of the loss, and turned where the aim is to climb."""
    scale = group.get("loss_scale", 1.0)
    if scale != 1:
        gradient = gradient / scale
    return -gradient if group["maximize"] else gradient


def options(defaults: Options, target: str | None) -> Options:
    """Return the options of an optimizer: ``target`` is one if it is given."""
    return defaults if target is None else {**defaults, "target": target}


def refuse_unless(is_right: bool, name: str, value: object, what: str) -> None:
    """Raise ``ValueError`` with the name of an option and its value."""
    if not is_right:
        raise ValueError(f"{name} is {value!r}; it has to be {what}.")
