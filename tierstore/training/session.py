"""One offloaded model: everything that hooks and guards ask for, in one place.

A `Session` adopts the model's parameters and the optimizers' state, registers the hooks, and undoes it
all at the end.  It is the guard's `FaultHandler`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tierstore.errors import CapacityError, KeyNotFound
from tierstore.planning.deciding import StepTime, step_time
from tierstore.planning.homes import CPU
from tierstore.planning.rules import HOST
from tierstore.training.activation_host import RunHost
from tierstore.training.activations import apply
from tierstore.training.activations.apply import Activations
from tierstore.training.activations.config.layers import Names
from tierstore.training.activations.config.sections import Sections
from tierstore.training.activations.swapping.run_store import RunStore
from tierstore.training.autograd.accumulation import Accumulation, PassEnd, is_in_backward
from tierstore.training.autograd.gradients import Gradients
from tierstore.training.autograd.saved_tensors import SavedTensors
from tierstore.training.budgets.clock import Clock
from tierstore.training.budgets.reclaimers import Reclaimers
from tierstore.training.bundles.bindings import Binding, Bindings
from tierstore.training.bundles.bundle_tiers import is_on_top
from tierstore.training.bundles.ending import RunEnding
from tierstore.training.bundles.grouping import Content, Group
from tierstore.training.bundles.pinning import pin
from tierstore.training.checkpoints.agreement import Agreement
from tierstore.training.checkpoints.bundle_access import access_to
from tierstore.training.checkpoints.files import BundleAccess
from tierstore.training.checkpoints.resumed import ResumedCheckpoint
from tierstore.training.checkpoints.weights import Weights
from tierstore.training.checkpoints.writer import CheckpointWriter
from tierstore.training.faults import guard
from tierstore.training.ignored_values import give_ignored
from tierstore.training.inventory import Inventory
from tierstore.training.leaving import Leaving
from tierstore.training.modules import hooks
from tierstore.training.modules.adopter import Adopter, part_from_base
from tierstore.training.modules.buffers import TravelingBuffers
from tierstore.training.modules.crossings import Crossings
from tierstore.training.modules.forward_needs import called_by_programs, needs_of
from tierstore.training.modules.link import Link
from tierstore.training.optimizers import registered
from tierstore.training.optimizers.host_stepper import HostStepper
from tierstore.training.optimizers.in_backward import Stepping, StepsInBackward
from tierstore.training.optimizers.speculative_steps import Expectations
from tierstore.training.optimizers.state import OptimizerState
from tierstore.training.optimizers.state_dicts import StateDicts
from tierstore.training.optimizers.step_hooks import StepHooks
from tierstore.training.optimizers.step_units import Steps
from tierstore.training.optimizers.steps_by_bundle import StepsByBundle
from tierstore.training.optimizers.steps_under_way import UnderWay
from tierstore.training.optimizers.whole_steps import WholeSteps
from tierstore.training.policies import Policies
from tierstore.training.pytorch import torchscript
from tierstore.training.pytorch.global_hooks import Removable
from tierstore.training.recording.marks import Sign
from tierstore.training.tables.run_tables import RunTables


class Session:
    """Looks after one model, from adoption to restoration.

    Args:
        model: whose parameters are offloaded.
        optimizers: that train them.
        store: where they go.
        policies: what decides for it.
        inventory: is filled with what it has.
        ignored: parameters that stay ordinary tensors, and tables, with their names.
        tables: of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        store: RunStore,
        policies: Policies,
        inventory: Inventory,
        ignored: Mapping[torch.Tensor, str],
        tables: RunTables,
    ) -> None:
        self.stepping = policies.stepping
        self.note_fault: Callable[[CapacityError], CapacityError] = lambda error: error
        self.model = model
        self.optimizers = tuple(optimizers)
        self.store = store
        self.prefetcher = policies.prefetcher
        self.placing = policies.placing
        self.ignored = ignored
        self.placed = policies.placed
        self.tables = tables
        self.budget = policies.quota
        self.meter = meter = policies.meter
        self._reclaimers = Reclaimers(policies.quota)
        self.recorder = policies.recorder
        self.bindings = Bindings(
            store,
            self._note,
            explain=self._explain,
            note_lent=None if meter is None else lambda *lent: self.link.note_lent(*lent),  # noqa: PLW0108
            reclaimer=self._reclaimers,
            recorder=self.recorder,
        )
        self._reclaimers.add(self.bindings)
        self.host_stepper = HostStepper()
        self._steps_aside = self.host_stepper.is_wanted and store.tier_names[0] != HOST
        self._expectations = Expectations(self.host_stepper)
        self.gradients = Gradients(
            store,
            self.bindings,
            self,
            inventory.gradients,
            must_stash=policies.must_stash,
            note_put=self._note_put,
            note_change=self._expectations.forget,
        )
        self._in_backward: StepsInBackward | None = None
        if self.stepping is Stepping.IN_BACKWARD:
            self._in_backward = StepsInBackward(self)
        keeper = self._in_backward or self.gradients
        self.accumulation = Accumulation(keeper, self.begin_accumulation, self.landed, self._end_pass)
        self.leaving = Leaving(self)
        self.saved = SavedTensors(self.bindings, self._settle_for_backward)
        self.windows = hooks.ModuleWindows(self.bindings, self.saved, self._discard_activations)
        self.adopter = Adopter(store, self.bindings, self, inventory.nbytes)
        self.state_dicts = StateDicts(self.adopter, self.bindings)
        self.clock = Clock()
        self.bundles = inventory.bundles
        self.buffers = TravelingBuffers(model, self.adopter, self.windows, store.device, self.placed)
        self.order: dict[Binding, int] = {}
        self.steps = inventory.steps
        self._under_way = UnderWay()
        self._stepped_in_backward: dict[Steps, None] = {}  # since the model ran last
        self.durable: CheckpointWriter | None = None
        self.activations = Activations()
        settle = self._settle_budget, self._settle_for_backward
        self._activation_host = RunHost(self._reclaimers, self.prefetcher, meter, *settle, self.recorder)
        store.begin_hosting(self._activation_host, self.host_stepper, self.bindings)
        self.link = Link(store, self._activation_host, self.bindings.leasing.require)
        tables.travel_over(self.link)
        self.crossings = Crossings(self.link, model, self.placed)
        self._reclaimers.add(self.link)
        self._handles: list[Removable] = []
        self._watched: set[torch.Tensor] = set()

    # --- the beginning ------------------------------------------------------------------------

    def adopt(self, groups: Sequence[Group], source: Weights | ResumedCheckpoint | None) -> None:
        """Take the parameters, gradients and optimizer state into the store.

        Args:
            groups: of parameters, then of buffers.
            source: where values come from, with a former checkpoint those of the optimizers too;
                ``None``: they are there.
        """
        # Pinned first, the largest of them first: nothing lies between them.
        staying = sorted((group for group in groups if group.is_pinned), key=lambda group: -group.nbytes)
        pinned = {group.key: self._adopt_pinned(group, source) for group in staying}
        for group in groups:
            bundle = pinned.get(group.key) or self._adopt_group(group, source)
            if group.content is Content.PARAMETERS:
                self._add_parameters(bundle, group)
            else:
                self.buffers.add(bundle, group)
        if source is not None:
            give_ignored(
                self.ignored, source, self.tables, self.placed.tensors_on_host(self.model), self.store
            )
        holders = torchscript.holders_in(self.model)
        for bundle in self.bundles:
            bundle.holders = [holders[tensor] for tensor in bundle.tensors]
        self._add_steps()
        for steps in self.steps:
            if isinstance(source, ResumedCheckpoint):
                source.give_optimizer(steps.state, self.adopter.origins(), self.ignored)
            steps.state.take_in_first()
        self.adopter.end_adoption()

    def _add_parameters(self, bundle: Binding, group: Group) -> None:
        self.order[bundle] = len(self.bundles)
        self.bundles.append(bundle)
        home = self.placing.homes(bundle).gradients
        for name, tensor in zip(group.names, group.tensors, strict=True):
            if isinstance(tensor, nn.Parameter):
                self.gradients.add(name, tensor, home)

    def _adopt_pinned(self, group: Group, source: Weights | ResumedCheckpoint | None) -> Binding:
        bundle = self._adopt_group(group, source)
        pin(self.bindings, bundle)
        return bundle

    def _adopt_group(self, group: Group, source: Weights | ResumedCheckpoint | None) -> Binding:
        named = list(zip(group.names, group.tensors, strict=True))
        home = self.placing.placement.bundles[group.key].parameters
        if isinstance(source, ResumedCheckpoint) and source.has_bundle(group.key):
            return self.adopter.adopt_held(group.key, named, home)
        for tensor in group.tensors if group.content is not Content.PARAMETERS else ():
            part_from_base(tensor)
        if source is None or group.content is Content.PASSING_BUFFERS:  # no source has those
            return self.adopter.adopt(group.key, named, home)
        values = [source.read(name).to(tensor.dtype) for name, tensor in named]
        return self.adopter.adopt(group.key, named, home, values)

    def make_durable(self, former: ResumedCheckpoint | None, agreement: Agreement) -> None:
        """Let checkpoints be made, after the one that the run goes on from."""
        self.durable = CheckpointWriter(
            self.model,
            self.store,
            self.bindings,
            self.windows,
            self.bundles,
            self.steps,
            self.ignored,
            self.buffers,
            tables=self.tables,
        )
        self.durable.agreement = agreement
        if former is not None:
            self.durable.checkpoints, self.durable.kept = former.checkpoints, former.kept

    def apply_to_activations(self, sections: Sections, layers: Names) -> None:
        """Swap and recompute what a document says, in this store and its quotas."""
        inputs = self.placing.placement.inputs
        is_on_host = self.placed.is_on_host
        self.activations = apply.apply(self.model, sections, layers, self.store, inputs, is_on_host)
        self._keep(self.crossings.register(lambda module: module is not self.model))  # around what came now

    def _discard_activations(self) -> None:
        self.activations.runtime.discard_interrupted()

    def _add_steps(self) -> None:
        for index, optimizer in enumerate(self.optimizers):
            is_known = registered.is_per_parameter(optimizer)
            state = OptimizerState(
                optimizer,
                index,
                self.order,
                self.adopter,
                lambda bundle: self.placing.homes(bundle).state,
                self.computes_on,
            )
            if is_known:
                steps = StepsByBundle(optimizer, state, self, self._expectations)
                self.steps.append(steps)
                if self._in_backward is not None:
                    self._in_backward.add(steps)
            else:
                self.steps.append(WholeSteps(optimizer, state, self))

    def computes_on(self, bundle: Binding) -> torch.device:
        """See `StepTrainer.computes_on`."""
        is_in_host = self.placing.homes(bundle).state.device == CPU
        return torch.device("cpu") if is_in_host else self.store.device

    def hold(self, handle: Removable) -> None:
        """Let a hook be removed with the others."""
        self._handles.append(handle)

    def watch(self, groups: Sequence[Group]) -> None:
        """Register every hook."""
        self._keep(self.crossings.register(lambda module: module is self.model))  # inside what comes now
        needs = needs_of(self.model, dict(zip([*self.bundles, *self.buffers], groups, strict=True)))
        called = called_by_programs(self.model, needs)
        for module in self.model.modules():
            own = hooks.ModuleHooks(self.windows, module, *needs.get(module, ((), ())))
            if module in called:
                own = hooks.CalledHooks(own, self._begin_forward, self._end_forward)
            elif not own.in_evaluation:
                continue
            self._keep(own.register())
        self._keep(self.state_dicts.watch_model(self.model))
        for gradient in self.gradients.table:
            self.watch_gradient(gradient.parameter)
        for weight in self.tables.attached():
            self._watch_gradient(weight, self._begin_table_gradient)
        step_hooks = StepHooks(
            lambda: self._require("an optimizer steps"), self._prepare_step, self._end_step, self.hold
        )
        for steps in self.steps:
            step_hooks.watch(steps)
            self._keep(self.state_dicts.watch_optimizer(steps.state))
        step_hooks.watch_all()

    def watch_gradient(self, parameter: torch.Tensor) -> None:
        """Lend gradients of a trained parameter to autograd, and take them again."""
        self._watch_gradient(parameter, self.accumulation.lend)

    def _watch_gradient(self, parameter: torch.Tensor, act: Callable[[torch.Tensor], None]) -> None:
        if parameter.requires_grad and parameter not in self._watched:
            self._watched.add(parameter)
            hook = hooks.GradientHook(parameter, act)
            self._handles.append(parameter.register_hook(hook))

    def _begin_table_gradient(self, weight: torch.Tensor) -> None:
        del weight
        self._require("a backward pass accumulates the gradient of a table")

    def _prepare_step(self) -> None:
        if not is_in_backward():  # whose thread may be another than that of a step around it
            self._under_way.end_interrupted()
            self.windows.discard_interrupted()
        self.accumulation.settle()
        self.bindings.forget_addresses()
        self.bindings.sweep()

    def _keep(self, handles: Iterator[RemovableHandle]) -> None:
        """Keep each handle as soon as its hook is there: the next one may fail."""
        for handle in handles:
            self._handles.append(handle)

    # --- what steps ask (StepTrainer) -------------------------------------------------------------

    def step_tier(self, *bundles: Binding) -> str:
        """See `step_units.StepTrainer.step_tier`."""
        are_in_host = any(self.placing.homes(each).state.device == CPU for each in bundles)
        return HOST if are_in_host else self.store.tier_names[0]

    def begin_step(self, steps: Steps) -> None:
        """An optimizer begins to step, by itself or in the midst of another one's step."""
        self.host_stepper.finish()  # two never step at once
        self._under_way.begin(steps)
        self.go_on_with_step()

    def go_on_with_step(self) -> None:
        """An optimizer goes on after the model ran in its step; in a hook no other phase begins."""
        if is_in_backward():
            return
        self.clock.end_backward()
        if self.budget is not None:
            self.budget.begin_optimizer()
        self.recorder.tell(Sign.OPTIMIZER)

    def _end_step(self, steps: Steps) -> None:
        self._under_way.end(steps)
        self._note_step(steps)
        if is_in_backward():
            self._stepped_in_backward[steps] = None
            return
        if self.budget is not None and not self._under_way.here:
            self.budget.end_step()
        self.recorder.tell(Sign.BETWEEN)

    def _note_step(self, steps: Steps) -> None:
        self.prefetcher.note_step(steps.state.index)
        self.recorder.note_step(steps.state.index)

    def steps_aside(self, bundle: Binding) -> bool:
        """See `step_units.StepTrainer.steps_aside`."""
        return self._steps_aside and self.placing.homes(bundle).state.device == CPU

    def allows_step_ahead(self, bundle: Binding) -> bool:
        """Whether a bundle may be stepped during backward: there is room, and nothing is pushed out."""
        residents = self.prefetcher.residents
        # What is confined has no second replica that could become the new values.
        when = step_time(
            is_aside=self.steps_aside(bundle),
            is_stepping=bool(self._under_way.here),
            is_kept=bundle.confined_to is not None or bundle.key in residents,
            is_allowed_in_backward=self.budget is None or self.budget.allows_step_in_backward(bundle.key),
        )
        return when is not StepTime.IN_TIME

    # --- while it runs ------------------------------------------------------------------------

    def _look(self) -> None:
        if self.budget is not None:
            self.budget.look()

    def _note_put(self, binding: Binding, storage: torch.UntypedStorage, room: int) -> None:
        self._activation_host.note_adopted(storage, functools.partial(is_on_top, self.store, binding.key))
        self._activation_host.note_gradient(binding.key, binding.nbytes, room)

    def _note(self, bindings: Sequence[Binding]) -> None:
        for binding in bindings if self.recorder.is_on else ():
            self.recorder.mark(Sign.USE, binding.key, binding.nbytes)
        if self.budget is not None:
            self.budget.note_uses({each.key: each.nbytes for each in bindings if each in self.order})
        self.link.sweep()
        self.prefetcher.note(*[each.key for each in bindings if each.confined_to is None])
        for binding in bindings:
            if binding.confined_to is not None:
                self.prefetcher.note_passing(binding.key, binding.nbytes)

    def _settle_budget(self) -> None:
        if self.budget is not None:
            self.budget.settle()

    def advise(self, keys: Sequence[str], tier: str) -> None:
        """Prefetch what the next turn needs, and where, while no plan does it."""
        if self.prefetcher.has_plan or self.store.tier_names[0] not in self.placing.placement.ahead:
            return
        for key in keys:
            with self.bindings.apart(), suppress(KeyNotFound):
                self.store.prefetch(key, tier=tier)

    def sweep_activations(self) -> None:
        """Drop swapped activations that nobody waits for."""
        self._reclaimers.sweep(but=self.bindings)

    def _begin_forward(self, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        self._require("the model is called")
        self.accumulation.settle()
        self.bindings.forget_addresses()
        self.bindings.sweep()
        self.crossings.begin_forward(module)
        if self.budget is not None and (not self.optimizers or self._stepped_in_backward):
            self.budget.end_step()
        self._stepped_in_backward.clear()
        if self.budget is not None:
            self.budget.begin_forward(module, args, kwargs)
        if torch.is_grad_enabled() or not self.optimizers:
            self.recorder.begin_forward((*args, *kwargs.values()))
        else:
            self.recorder.tell(Sign.EVALUATION)
        if self._in_backward is not None:
            self._in_backward.watch()
        self.state_dicts.reset()
        self.buffers.forget_replaced()
        self.clock.begin_forward()
        self._under_way.end_interrupted()
        for steps in self._under_way.here:
            steps.begin_model()
        for each in self.steps:
            each.state.freed.begin_forward()
        self.prefetcher.begin_use(module)

    def _end_forward(self, output: object) -> None:
        self.bindings.forget_addresses()
        self.clock.end_forward()
        if self.budget is not None:
            self.budget.end_evaluation(sys.exception(), output)
        self.recorder.tell(Sign.BACKWARD if torch.is_grad_enabled() else Sign.EVALUATED)
        if sys.exception() is not None:
            self.recorder.break_step("an exception came out of the model")

    def note_step_in_backward(self, steps: StepsByBundle, seconds: float) -> None:
        """See `in_backward.BackwardTrainer.note_step_in_backward`."""
        self._note_backward()
        self.clock.leave_out(seconds)
        self._stepped_in_backward[steps] = None

    def _end_pass(self, how: PassEnd) -> None:
        if how is PassEnd.INTERRUPTED:
            self.recorder.break_step("a backward pass was interrupted")
        if self._in_backward is None:
            return
        self._in_backward.go_on()
        is_whole = how is PassEnd.COMPLETE and not self.accumulation.is_under_way
        for steps in list(self._stepped_in_backward):
            self._note_step(steps)
            if is_whole and isinstance(steps, StepsByBundle):
                steps.end_pass()

    def begin_accumulation(self) -> None:
        """A backward pass is about to add to a gradient."""
        self._require("a backward pass accumulates a gradient")
        self.bindings.sweep()
        self._note_backward()

    def _note_backward(self) -> None:
        self.clock.note_backward()
        self._settle_budget()
        self._look()

    def landed(self, parameter: torch.Tensor) -> None:
        """A gradient waits for the optimizer: its bundle's step may be made."""
        self._note_backward()
        if self.recorder.is_on:
            self.recorder.mark(Sign.LANDED, *self.gradients.table.usual_datum_of(parameter))
        self.recorder.tell(Sign.AHEAD)
        self.clock.leave_out(self._expectations.offer(parameter))
        self.recorder.tell(Sign.TOLD)

    # --- what the guard asks (guard.FaultHandler) ---------------------------------------------------

    def watch_saved(self) -> AbstractContextManager[None]:
        """Turn saved aliases of bundles into references, inside the context."""
        return self.saved.watch()

    def gradient_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what ``tensor.grad`` is."""
        return self.gradients.get(tensor)

    def set_gradient(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Do what ``tensor.grad = gradient`` means."""
        self.gradients.assign(tensor, gradient)

    def entry_of_state_dict(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return an entry for it while a ``state_dict`` is being made, else ``None``."""
        return self.state_dicts.entry(tensor)

    def entry(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an entry for it, as of a state dict."""
        return self.state_dicts.entry_alone(tensor)

    def begin_use(self, bindings: Sequence[Binding]) -> None:
        """Tensors of ``bindings`` are about to be used."""
        if under_way := self._under_way.here:
            under_way[-1].begin_use(bindings)

    def note_write(self) -> None:
        """Tensors may have been written in a way that version counters do not tell."""
        for steps in self._under_way.here:
            steps.note_write()

    def _explain(self, error: CapacityError) -> CapacityError:
        under_way = self._under_way.here
        return self.note_fault(under_way[-1].explain(error) if under_way else error)

    def requires_grad_changed(self, tensor: torch.Tensor) -> None:
        """Take in that ``requires_grad`` was set."""
        if guard.guarded_tensor_of(tensor) is not None and tensor.is_leaf:
            self.watch_gradient(tensor)
            self.gradients.table.note_trained(tensor)

    # --- the end ------------------------------------------------------------------------------

    def _require(self, what: str) -> None:
        """Raise if it may not be done while the run is suspended; go on, if it could not be left."""
        self.bindings.leasing.require(what)
        self.leaving.go_on()

    def _settle_for_backward(self) -> None:
        self.leaving.go_on()
        self.accumulation.settle()

    def remove_hooks(self) -> None:
        """Leave nothing on the model and the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def come_to_rest(self, ending: RunEnding) -> None:
        """Let go of what an exception has interrupted.  The run may go on after it."""
        self.recorder.break_step("the run came to rest in its midst")
        ending.attempt(self.windows.discard_interrupted)
        ending.attempt(self.host_stepper.rest)
        for steps in self.steps:
            ending.attempt(steps.abandon)

    def forget_given(self) -> None:
        """What was brought back stays so."""
        self.adopter.forget_given()
        self.gradients.forget_given()

    def end(self, ending: RunEnding) -> None:
        """Leave nothing on the model and the optimizers, whose tensors are nobody's any more.

        Args:
            ending: that this is a part of.
        """
        ending.attempt(self.recorder.close)
        ending.attempt(self.windows.discard_interrupted)  # the inner hooks first
        ending.attempt(self.host_stepper.end)
        ending.attempt(self.activations.close)
        ending.attempt(self.link.close)
        for each in (self.budget, self.meter):
            if each is not None:
                ending.attempt(each.close)
        self.tables.end(ending)
        for steps in self.steps:
            steps.state.bindings.clear()
        self.bundles.clear()
        ending.attempt(self.remove_hooks)

    def undo(self) -> None:
        """End the session because it could not be opened.

        Raises:
            TierStoreError: something cannot be brought back.
        """
        ending = RunEnding()
        self.come_to_rest(ending)
        self.adopter.restore_all(self.bundles, ending)
        for weight in list(self.tables.attached()):
            ending.attempt(functools.partial(self.tables.undo, weight))
        self.gradients.restore(ending)
        self.buffers.end(ending)
        self.end(ending)
        ending.conclude()

    # --- checkpoints --------------------------------------------------------------------------

    def access(self) -> BundleAccess:
        """Return how a checkpoint gets at the bytes."""
        parts = [*(b.tensors for b in self.bundles), *([each] for each in self.ignored)]
        return access_to(parts, self.state_dicts, self.bindings, self.steps, self.tables)
