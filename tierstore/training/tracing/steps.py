"""One step of training of a model that is nowhere: forward, backward, and each optimizer bundle by bundle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tierstore.errors import UsageError
from tierstore.planning import ByteKind, Datum, Does, Phase, Unit
from tierstore.training.bundles.layout import lay_out
from tierstore.training.optimizers import registered
from tierstore.training.optimizers.adapters import StateTensor, adapter_of
from tierstore.training.optimizers.state import state_key
from tierstore.training.optimizers.step_units import only
from tierstore.training.tracing.assumed_values import AssumedValues
from tierstore.training.tracing.built import Loss, ModelInTraining, called_with
from tierstore.training.tracing.bundles_of import Bundles
from tierstore.training.tracing.moment_log import MomentLog
from tierstore.training.tracing.places import named_errors
from tierstore.training.tracing.storages import Sort
from tierstore.training.tracing.twin import has_others
from tierstore.training.tracing.watch import Watch, WatchedModules

Turn = tuple[str, list[tuple[dict[str, object], list[torch.Tensor]]]]
"""A bundle, and the optimizer's groups with the bundle's parameters in each."""


class TracedStep:
    """Runs one step under a watch.

    Args:
        trained: the model, its inputs and its optimizers.
        bundles: of it.
        loss: of a batch; ``None``: what the model returns tells.
        assumed: is told what was assumed.

    Attributes:
        log: the moments.
        units: what optimizers stepped.
        state: by key.
        state_bytes: in memory, of all state.
    """

    def __init__(
        self, trained: ModelInTraining, bundles: Bundles, loss: Loss | None, assumed: AssumedValues
    ) -> None:
        self._trained = trained
        self._bundles = bundles
        self._loss = loss
        self._assumed = assumed
        self.log = MomentLog()
        self._modules = WatchedModules(trained.model, bundles, self.log)
        self._watch = Watch(bundles, self._modules, self.log, assumed)
        self._names = {tensor: name for group in bundles.groups.values() for tensor, name in _named(group)}
        self._made: set[str] = set()  # gradients
        self.units: list[Unit] = []
        self.state: dict[str, Datum] = {}
        self.standing_bytes = 0
        self.most_bytes = 0
        self._fresh: set[int] = set()  # optimizers, by their place, that had not stepped before

    def run(self, accumulations: int) -> None:
        """Run it.

        Args:
            accumulations: backward passes before optimizers step.
        """
        self._take_in_model()
        with self._watch:
            with self._modules.hooked(), self._gradients_noted():
                for _ in range(accumulations):
                    self._forward_and_backward()
            self.log.finish()
            storages = self.log.storages
            before_bytes = storages.total_bytes
            storages.begin_peak()
            with torch.device("cpu"):  # where optimizers keep numbers of their own, whatever they step
                self._make_state()  # all of it is made before anything is stepped
            most_bytes = self.log.most_bytes + storages.total_bytes - before_bytes
            self.most_bytes = max(most_bytes, storages.peak_bytes)
            with torch.device("cpu"):
                self._step_optimizers()
            self._zero_gradients()
            self.log.finish()

    # ------------------------------------------------------------------ what is there

    def _take_in_model(self) -> None:
        storages = self.log.storages
        for tensor, key in self._bundles.owners.items():
            storages.add(tensor, Sort.PARAMETERS, key)
        travelling_bytes = storages.total_bytes
        for tensor in (*self._trained.model.parameters(), *self._trained.model.buffers()):
            if tensor not in self._bundles.owners:
                storages.add(tensor, Sort.STANDING)
        for tensor in _tensors_of(self._trained.inputs):
            storages.add(tensor, Sort.STANDING)
        self.standing_bytes = storages.total_bytes - travelling_bytes

    # ------------------------------------------------------------------ forward and backward

    def _forward_and_backward(self) -> None:
        log = self.log
        log.phase, log.layer = Phase.FORWARD, None
        log.begin(self._modules.path)
        with self._watch.saving(), named_errors("the model's forward"):
            loss = self._loss_of()
        if not loss.requires_grad:
            kind = type(self._trained.model).__name__
            raise UsageError(
                f"no loss of {kind} depends on a parameter that is trained: there is no backward to trace."
            )
        log.phase, log.layer = Phase.BACKWARD, None
        self._watch.close_windows()
        log.begin("backward")
        with named_errors("the model's backward"):
            loss.backward()
        del loss
        log.finish()

    def _loss_of(self) -> torch.Tensor:
        model, inputs = self._trained.model, self._trained.inputs
        if self._loss is not None:
            return self._loss(model, inputs)
        output = called_with(model, inputs)
        return loss_in(output, self._assumed)

    @contextlib.contextmanager
    def _gradients_noted(self) -> Iterator[None]:
        handles = []
        for tensor, name in self._names.items():
            if tensor.requires_grad and tensor.is_leaf:
                handles.append(tensor.register_post_accumulate_grad_hook(self._note_gradient(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        key = _gradient_key(name)

        def note(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is None:
                return
            self.log.make_gradient(gradient, key, self._bundles.owners[parameter])
            self._made.add(key)

        return note

    # ------------------------------------------------------------------ optimizers

    def _make_state(self) -> None:
        """Let optimizers make what they keep, as a run's first step does."""
        self.log.phase = Phase.OPTIMIZER
        for index, optimizer in enumerate(self._trained.optimizers):
            if not optimizer.state:
                self._fresh.add(index)
            with named_errors(f"the step of {type(optimizer).__name__}"):
                optimizer.step()
            for key, unit in self._parameters_by_bundle(optimizer).items():
                kept = list(adapter_of(optimizer).state_tensors(optimizer, unit))
                self._take_in_state(state_key(index, key), key, kept)
            for tensor in _tensors_of(list(optimizer.state.values())):
                known = self.log.storages.find(tensor)
                if known is not None and known.sort is Sort.OWN:
                    self.log.storages.call(known, Sort.STANDING, None)
                    self.standing_bytes += known.nbytes

    def _take_in_state(self, key: str, owner: str, kept: Sequence[StateTensor]) -> None:
        if not kept:
            return
        nbytes = lay_out((each.name, each.tensor) for each in kept)[1]
        self.state[key] = Datum(
            key, nbytes, ByteKind.STATE, owner=owner, layer=self._bundles.data[owner].layer
        )
        for each in kept:
            self.log.storages.add(each.tensor, Sort.STATE, key)

    def _step_optimizers(self) -> None:
        self.log.phase, self.log.layer = Phase.OPTIMIZER, None
        for index, optimizer in enumerate(self._trained.optimizers):
            if registered.is_per_parameter(optimizer):
                self._step_bundles(index, optimizer)
            else:
                self._begin_turn(index, optimizer, [key for key, _ in self._turns_of(optimizer)])
                optimizer.step()
        self.log.finish()

    def _step_bundles(self, index: int, optimizer: torch.optim.Optimizer) -> None:
        """Step bundle by bundle; a turn with the forms of an earlier one does what that did."""
        may_repeat = index in self._fresh and registered.is_known(optimizer) and not _has_hooks(optimizer)
        earlier: dict[Hashable, int] = {}
        for key, groups in self._turns_of(optimizer):
            self._begin_turn(index, optimizer, [key])
            form = _form_of_turn(optimizer, groups) if may_repeat else None
            if form in earlier:
                self.log.repeat(earlier[form])
                continue
            before_bytes = self.log.storages.total_bytes
            with only(optimizer, groups):
                optimizer.step()
            if form is not None and self.log.storages.total_bytes == before_bytes:
                earlier[form] = self.log.number

    def _begin_turn(self, index: int, optimizer: torch.optim.Optimizer, keys: Sequence[str]) -> None:
        """Begin the moment in which an optimizer steps some bundles, with all that it needs of them."""
        name = type(optimizer).__name__
        is_alone = registered.is_per_parameter(optimizer)
        if len(keys) == 1:
            self.log.layer = self._bundles.data[keys[0]].layer
        self.log.begin(f"{name} {keys[0]}" if is_alone else name)
        for key in keys:
            state = state_key(index, key)
            unit = Unit(
                optimizer=name,
                bundle=key,
                state=state if state in self.state else None,
                gradients=self._gradients_of(self._bundles.groups[key].tensors),
                host_step_s=0.0 if is_alone else None,
                may_step_ahead=is_alone,
            )
            self.units.append(unit)
            uses = [(key, Does.WRITE), *((each, Does.READ) for each in unit.gradients)]
            uses += [] if unit.state is None else [(unit.state, Does.WRITE)]
            for each, does in sorted(uses, key=lambda use: -self._nbytes_of(use[0])):  # as a run opens them
                self.log.use(each, does)

    def _nbytes_of(self, key: str) -> int:
        tables = (self._bundles.data, self.state, self.log.data)
        return next(table[key].nbytes for table in tables if key in table)

    def _turns_of(self, optimizer: torch.optim.Optimizer) -> list[Turn]:
        """Return what an optimizer steps, in the order of the forward pass."""
        found: dict[str, list[tuple[dict[str, object], list[torch.Tensor]]]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                key = self._bundles.owners.get(parameter)
                if key is None or parameter.grad is None:
                    continue
                members = found.setdefault(key, [])
                if not members or members[-1][0] is not group:
                    members.append((group, []))
                members[-1][1].append(parameter)
        return [(key, found[key]) for key in self._bundles.groups if key in found]

    def _parameters_by_bundle(self, optimizer: torch.optim.Optimizer) -> Mapping[str, list[torch.Tensor]]:
        return {key: [p for _, part in groups for p in part] for key, groups in self._turns_of(optimizer)}

    def _zero_gradients(self) -> None:
        self.log.phase, self.log.layer = Phase.BETWEEN, None
        self.log.begin("zero_grad")
        for parameter in self._trained.model.parameters():
            parameter.grad = None
        for key in self._gradients_of(self._trained.model.parameters()):
            self.log.use(key, Does.END)

    def _gradients_of(self, parameters: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """Return the keys of the gradients that were made, in the order of their parameters."""
        keys = (_gradient_key(self._names[each]) for each in parameters if each in self._names)
        return tuple(key for key in keys if key in self._made)


def _gradient_key(name: str) -> str:
    return f"grad/{name}"


def _named(group: object) -> Iterator[tuple[torch.Tensor, str]]:
    yield from zip(group.tensors, group.names, strict=True)  # type: ignore[attr-defined]


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody asked to be called at its steps: nobody knows what that does."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks  # noqa: SLF001 - nobody else tells
    return bool(own) or any(
        has_others(register)
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    )


def _form_of_turn(
    optimizer: torch.optim.Optimizer, groups: Sequence[tuple[dict[str, object], list[torch.Tensor]]]
) -> Hashable:
    """Return all that a turn depends on, of an optimizer that takes each parameter by itself."""
    return tuple(
        (id(group), _form_of((each, each.grad)), _form_of(tuple(optimizer.state[each].items())))
        for group, parameters in groups
        for each in parameters
    )


def _form_of(value: object) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, tuple):
        return tuple(map(_form_of, value))
    return value if isinstance(value, str | int | float | None) else id(value)


def _tensors_of(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_of(each)


def loss_in(output: object, assumed: AssumedValues) -> torch.Tensor:
    """Return the loss that a model returned, or one of all that it returned."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        return output
    assumed.note("the loss was taken for the mean of squares of what the model returns")
    found = [each for each in _tensors_of(output) if each.requires_grad]
    losses = [each.float().square().mean() for each in found]
    return sum(losses, start=torch.zeros(())) if len(losses) != 1 else losses[0]
