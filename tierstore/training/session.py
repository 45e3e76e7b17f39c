"""One offloaded model: everything that hooks and guards ask for, in one place.

A `Session` adopts the model's parameters and the optimizers' state, registers the hooks, and undoes it
all at the end.  It is the guard's `Warden`.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tierstore.errors import KeyNotFound
from tierstore.planning import Trained, choose_residents
from tierstore.store import Store
from tierstore.training import guard, hooks
from tierstore.training.activations import both
from tierstore.training.activations.both import Activations
from tierstore.training.activations.layers import Names
from tierstore.training.activations.sections import Sections
from tierstore.training.activations.swap import vaults
from tierstore.training.activations.vault import Vault
from tierstore.training.binding import Binding, Bindings, ordinary_mode
from tierstore.training.budget import DeviceBudget, Phase
from tierstore.training.bundles import Adopter
from tierstore.training.checkpoint import Access
from tierstore.training.durable import DurableState
from tierstore.training.follow import Follower
from tierstore.training.footprint import Meter
from tierstore.training.former import Former
from tierstore.training.grads import Gradients
from tierstore.training.groups import ParameterGroup
from tierstore.training.optimizer import OptimizerSteps
from tierstore.training.saved import SavedTensors
from tierstore.training.statedicts import StateDicts
from tierstore.training.tiers import HOST, Placements
from tierstore.training.weights import Weights


class Session:
    """Looks after one model, from adoption to restoration.

    Args:
        model: whose parameters are offloaded.
        optimizers: that train them.
        store: where they go.
        placements: where each kind of bytes goes.
        follower: learns and follows the plan.
        meter: of what the program has on the device; ``None``: there is no device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        store: Store,
        placements: Placements,
        follower: Follower,
        meter: Meter | None,
    ) -> None:
        self.model = model
        self.optimizers = tuple(optimizers)
        self.store = store
        self.follower = follower
        self.placements = placements
        self._meter = meter
        self.budget: DeviceBudget | None = None
        self.bindings = Bindings(store, self._note, ordinary_mode if meter is None else self._apart)
        self.saved = SavedTensors(self.bindings)
        self.windows = hooks.ModuleWindows(self.bindings, self.saved)
        self.gradients = Gradients(store, self.bindings, self, placements.gradients)
        self.gradients.note_put = lambda binding: follower.note_gradient(binding.key)
        follower.choose_residents = self._choose_residents
        self.gradients.note_change = self._forget_steps_ahead
        self.adopter = Adopter(store, self.bindings, self)
        self.state_dicts = StateDicts(self.adopter)
        self.clock = Clock()
        self.bundles: list[Binding] = []
        self.steps: list[OptimizerSteps] = []
        self.durable: DurableState | None = None
        self.activations = Activations()
        vaults[store] = weakref.WeakMethod(self._new_vault)
        self._handles: list[RemovableHandle] = []
        self._step_hooks: list[tuple[OrderedDict[int, Any], int]] = []
        self._moved: list[tuple[torch.Tensor, torch.device]] = []
        self._watched: set[torch.Tensor] = set()

    # --- the beginning ------------------------------------------------------------------------

    def adopt(self, groups: Sequence[ParameterGroup], source: Weights | Former | None) -> None:
        """Take the parameters, gradients and optimizer state into the store.

        Args:
            groups: of parameters.
            source: where values come from, with a former checkpoint those of the optimizers too;
                ``None``: they are there.
        """
        for group in groups:
            self.bundles.append(self._adopt_group(group, source))
            for name, parameter in zip(group.names, group.parameters, strict=True):
                self.gradients.add(name, parameter)
        self._add_steps()
        for steps in self.steps:
            if isinstance(source, Former):
                source.give_optimizer(steps, self.adopter.origins())
            steps.adopt_existing()
        self.adopter.end_adoption()

    def _adopt_group(self, group: ParameterGroup, source: Weights | Former | None) -> Binding:
        named = list(zip(group.names, group.parameters, strict=True))
        placement = self.placements.parameters
        if isinstance(source, Former) and source.has_bundle(group.key):
            return self.adopter.adopt_held(group.key, named, placement)
        values = None if source is None else [source.read(name).to(p.dtype) for name, p in named]
        return self.adopter.adopt(group.key, named, placement, values)

    def make_durable(self, checkpoints: int) -> None:
        """Let checkpoints be made, after so many in earlier runs."""
        self.durable = DurableState(
            self.model, self.store, self.bindings, self.windows, self.bundles, self.steps, checkpoints
        )

    def apply_to_activations(self, sections: Sections, layers: Names) -> None:
        """Swap and recompute what a document says, in this store and its quotas; else end the session."""
        try:
            self.activations = both.apply(self.model, sections, layers, self.store, self._new_vault)
            self.windows.discard_inner = self._discard_swap
        except BaseException:
            self.remove_hooks()
            self.restore()
            raise

    def _discard_swap(self, is_beginning: bool) -> None:
        if self.activations.swap is not None:
            self.activations.swap.discard_interrupted(int(is_beginning))

    def _new_vault(self, store: Store) -> Vault:
        ask_budget = self.bindings.ask_for_more

        def make_room(needed_bytes: int) -> bool:
            self.bindings.sweep()
            return ask_budget(needed_bytes)

        vault = Vault(
            store,
            self.bindings.apart,
            note_use=self._note_activation,
            make_room=make_room,
            note_adopted=_unheard if self._meter is None else self._meter.hand_over,
        )

        def ask_all(needed_bytes: int) -> bool:
            vault.sweep()
            return ask_budget(needed_bytes)

        self.bindings.ask_for_more = ask_all
        return vault

    def move_buffers(self) -> None:
        """Bring buffers to where the model computes; `restore` brings them back."""
        for buffer in self.model.buffers():
            if buffer.device != self.store.device:
                self._moved.append((buffer, buffer.device))
                buffer.data = buffer.data.to(self.store.device)

    def _add_steps(self) -> None:
        for index, optimizer in enumerate(self.optimizers):
            steps = OptimizerSteps(
                optimizer,
                index,
                self.bundles,
                self.bindings,
                self.gradients,
                self.adopter,
                self.placements.state,
                self._advise,
            )
            steps.ahead.tier = self.placements.optimizer_tier
            steps.ahead.is_affordable = self._can_afford_a_step
            steps.ahead.is_resident = lambda binding: binding.key in self.follower.residents
            self.steps.append(steps)

    def watch(self, groups: Sequence[ParameterGroup]) -> None:
        """Register every hook."""
        needs = _needs(self.model, dict(zip(self.bundles, groups, strict=True)))
        for module in self.model.modules():
            own = hooks.ModuleHooks(self.windows, module, *needs.get(module, ((), ())))
            if module is self.model:
                own = hooks.RootHooks(own, self._begin_forward, self._end_forward)
            elif not own.in_evaluation:
                continue
            self._handles += own.register()
        self._handles += self.state_dicts.watch_model(self.model)
        for gradient in self.gradients:
            self.watch_gradient(gradient.parameter)
        for steps in self.steps:
            self._watch_optimizer(steps)

    def watch_gradient(self, parameter: torch.Tensor) -> None:
        """Take gradients of a trained parameter as soon as they are accumulated."""
        if parameter.requires_grad and parameter not in self._watched:
            self._watched.add(parameter)
            hook = hooks.TensorHook(self._accumulated)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _watch_optimizer(self, steps: OptimizerSteps) -> None:
        optimizer = steps.optimizer

        def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
            self.windows.discard_interrupted()
            self.clock.end_backward()
            self.bindings.sweep()
            steps.on_begin = None if self.budget is None else self.budget.begin_optimizer
            return steps.before(args, kwargs)

        def after(*_: object) -> None:
            if steps.after():
                self.follower.note_step(steps.index)
                if self.budget is not None:
                    self.budget.end_step()

        self._handles.append(optimizer.register_step_pre_hook(before))  # type: ignore[arg-type]
        pre_hooks: Any = optimizer._optimizer_step_pre_hooks  # noqa: SLF001
        self._step_hooks.append((pre_hooks, self._handles[-1].id))
        self._handles.append(optimizer.register_step_post_hook(after))
        # Gradients are shown again before users' own hooks look at them.
        post_hooks: Any = optimizer._optimizer_step_post_hooks  # noqa: SLF001
        post_hooks.move_to_end(self._handles[-1].id, last=False)
        self._handles += self.state_dicts.watch_optimizer(steps)

    # --- while it runs ------------------------------------------------------------------------

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """What is allocated inside the context is the store's, and outlives inference mode."""
        assert self._meter is not None
        with self._meter.apart(), ordinary_mode():
            yield

    def _look(self) -> None:
        if self.budget is not None:
            self.budget.look()

    def _note(self, binding: Binding) -> None:
        self._settle_budget()
        self.follower.note(binding.key)

    def _note_activation(self, key: str, nbytes: int) -> None:
        self._settle_budget()
        self.follower.note_passing(key, nbytes)

    def _settle_budget(self) -> None:
        if self.budget is not None:
            self.budget.settle()

    def _choose_residents(self, accesses: Sequence[str], gradients: Sequence[str]) -> frozenset[str]:
        """Choose what stays in host memory, where that is where computing happens.

        Args:
            accesses: the keys that a step used, first use first.
            gradients: those of them that came to be in it.
        """
        fastest = self.store.tier_names[0]
        if fastest != HOST:
            return frozenset()
        bundles = {binding.key: binding for binding in self.bundles}
        order = [bundles[key] for key in dict.fromkeys(accesses) if key in bundles]
        trained = [self._trained(bundle, frozenset(gradients)) for bundle in order]
        return choose_residents(
            [each for each in trained if each.gradients], self.store.stats().tiers[fastest].capacity_bytes
        )

    def _trained(self, bundle: Binding, gradients: frozenset[str]) -> Trained:
        """Return what is trained together with a bundle."""
        parts = [bundle, *(state for steps in self.steps if (state := steps.states.get(bundle)) is not None)]
        found = {
            gradient.usual_key: place.nbytes
            for parameter, place in zip(bundle.tensors, bundle.places, strict=True)
            if (gradient := self.gradients.find(parameter)) is not None and gradient.usual_key in gradients
        }
        return Trained(
            keys=tuple(part.key for part in parts),
            gradients=tuple(found),
            kept_bytes=sum(part.nbytes for part in parts),
            gradient_bytes=sum(found.values()),
        )

    def _advise(self, keys: Sequence[str]) -> None:
        """Prefetch what the next turn needs, while no plan does it."""
        if not self.follower.is_needed or self.follower.has_plan:
            return
        for key in keys:
            self._prefetch(key)

    def _prefetch(self, key: str) -> None:
        with self.bindings.apart(), suppress(KeyNotFound):
            self.store.prefetch(key)

    def _begin_forward(self, inputs: Sequence[object]) -> None:
        self.bindings.sweep()
        if self.budget is not None:
            if not self.optimizers:
                self.budget.end_step()
            self.budget.begin_forward(inputs, Phase.MODEL if torch.is_grad_enabled() else Phase.EVALUATION)
        self.state_dicts.reset()
        self.clock.begin_forward()
        for steps in self.steps:
            steps.after()  # of a step that an exception has ended
        for step_hooks, own in self._step_hooks:
            if next(reversed(step_hooks)) != own:
                step_hooks.move_to_end(own)  # users' own hooks may change gradients, or refuse
        if self.optimizers:
            self.follower.begin_forward()
        else:
            self.follower.begin_inference()

    def _end_forward(self) -> None:
        self.clock.end_forward()
        if self.budget is not None:
            self.budget.end_evaluation()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self.clock.note_backward()
        self.bindings.sweep()
        self.gradients.stash(parameter)
        self._settle_budget()
        self._look()
        for steps in self.steps:
            before_s = steps.ahead.seconds
            steps.ahead.offer(parameter)
            self.clock.leave_out(steps.ahead.seconds - before_s)

    def _can_afford_a_step(self) -> bool:
        return self.budget is None or self.budget.allows_steps_in_backward

    def _forget_steps_ahead(self, parameter: torch.Tensor) -> None:
        for steps in self.steps:
            steps.ahead.forget(parameter)

    # --- what the guard asks (guard.Warden) ---------------------------------------------------

    def watch_saved(self) -> AbstractContextManager[None]:
        """Turn saved aliases of bundles into references, inside the context."""
        return self.saved.watch()

    def gradient_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what ``tensor.grad`` is."""
        return self.gradients.get(tensor)

    def set_gradient(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Do what ``tensor.grad = gradient`` means."""
        self.gradients.assign(tensor, gradient)

    def copy_for_state_dict(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return an independent copy while a ``state_dict`` is being made, else ``None``."""
        return self.state_dicts.copy(tensor)

    def requires_grad_changed(self, tensor: torch.Tensor) -> None:
        """Take in that ``requires_grad`` was set."""
        if guard.tenant_of(tensor) is not None and tensor.is_leaf:
            self.watch_gradient(tensor)

    # --- the end ------------------------------------------------------------------------------

    def remove_hooks(self) -> None:
        """Leave nothing on the model and the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def restore(self) -> None:
        """Make everything ordinary tensors again."""
        self.windows.discard_interrupted()  # the inner hooks first
        self.activations.close()
        if self.budget is not None:
            self.budget.close()
        if self._meter is not None:
            self._meter.close()
        self.gradients.restore()
        for steps in self.steps:
            for binding in steps.states.values():
                self.adopter.restore(binding)
            steps.states.clear()
        for binding in self.bundles:
            self.adopter.restore(binding)
        self.bundles.clear()
        for buffer, device in self._moved:
            buffer.data = buffer.data.to(device)
        self._moved.clear()

    # --- checkpoints --------------------------------------------------------------------------

    def access(self) -> Access:
        """Return how a checkpoint gets at the bytes."""
        return Access([b.tensors for b in self.bundles], self._read, self._write, self._settle)

    def _read(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self.state_dicts.read(tensor) for tensor in tensors]

    def _write(self, part: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        tenant = guard.tenant_of(part[0])
        assert tenant is not None
        with self.bindings.window([tenant.binding]), torch.no_grad():
            tenant.binding.is_dirty = True
            for parameter, value in zip(part, values, strict=True):
                parameter.copy_(value)

    def _settle(self, index: int, part: Sequence[torch.Tensor]) -> None:
        tenant = guard.tenant_of(part[0])
        assert tenant is not None
        self.steps[index].take_in_state(tenant.binding)


def _unheard(storage: torch.UntypedStorage, is_held: Callable[[], bool]) -> None:
    """Nobody counts what the program has."""
    del storage, is_held


Needs = dict[nn.Module, tuple[list[Binding], list[Binding]]]


def _needs(model: nn.Module, groups: dict[Binding, ParameterGroup]) -> Needs:
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


class Clock:
    """Where a step's time goes.  Backward is from its first sign to its last before the next phase."""

    def __init__(self) -> None:
        self.forward_s = 0.0
        self.backward_s = 0.0
        self._forward_began: float | None = None
        self._forward_ended: float | None = None
        self._backward_seen: float | None = None

    def begin_forward(self) -> None:
        """The model begins to run."""
        self.end_backward()
        self._forward_began = time.perf_counter()

    def end_forward(self) -> None:
        """The model has run."""
        now = time.perf_counter()
        if self._forward_began is not None:
            self.forward_s += now - self._forward_began
        self._forward_began = None
        self._forward_ended = now

    def note_backward(self) -> None:
        """A gradient was accumulated."""
        self._backward_seen = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """So long of the backward pass was something else."""
        self.backward_s -= seconds

    def end_backward(self) -> None:
        """Whatever comes now is no backward pass."""
        if self._backward_seen is not None and self._forward_ended is not None:
            self.backward_s += self._backward_seen - self._forward_ended
        self._backward_seen = self._forward_ended = None
