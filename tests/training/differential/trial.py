"""What the text of a program calls: one run of a loop, with its model, its batches and its log."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.differential.models import WIDTH, Called, Either, Keeping, Writing
from tests.training.differential.observing import (
    Log,
    note_error,
    note_objects,
    note_optimizers,
    note_parameters,
    note_sharing,
)
from tierstore.errors import CapacityError, TierStoreError

BATCH = 3
ON_PURPOSE = "on purpose"


_EVEN_IN_TRACING = True
_top_hooks: Callable[[bool], object] = torch._C._autograd._top_saved_tensors_default_hooks
_a_checkpoint = torch.utils.checkpoint._checkpoint_without_reentrant_generator.__code__


def are_hooks_left() -> bool:
    """Say whether hooks for saved tensors are in force."""
    return _top_hooks(_EVEN_IN_TRACING) is not None


def end_checkpoints() -> None:
    """End the checkpoints that hooks of a module have begun and an interrupt has kept from their end.

    Each is a generator in which PyTorch has pushed hooks.  What is saved meanwhile is theirs, so that
    backward raises; the collector would pop them, perhaps in another program.
    """
    if are_hooks_left():
        for each in gc.get_objects():
            # The type: isinstance asks a proxy for its class.
            if type(each) is types.GeneratorType and each.gi_code is _a_checkpoint:
                each.close()


class Trial:
    """One run.

    Attributes:
        model: what `build` made.
        opts: its optimizers.
        sched: their schedulers, stepped after them.
        keep: what a loop keeps over actions, by name.
        handles: of the hooks that were registered.
        record: everything that was noted.
        has_raised: whether an action did.
    """

    def __init__(self) -> None:
        self.model: Any = nn.Sequential()
        self.opts: list[torch.optim.Optimizer] = []
        self.sched: list[Any] = []
        self.keep: dict[str, Any] = {}
        self.handles: list[Any] = []
        self.record = Log()
        self.has_raised = False
        self.nothing = nn.Parameter(torch.zeros(1))
        self._global_handles: list[Any] = []

    # --- noting -------------------------------------------------------------------------------

    def log(self, name: str, value: object) -> None:
        """Note a value."""
        self.record.add(name, value)

    @contextlib.contextmanager
    def act(self, number: int, name: str) -> Iterator[None]:
        """Do an action: what it raises is noted, unless it is an error of the library."""
        self.record.where = f"{number} {name}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except TierStoreError:
            raise
        except Exception as error:
            if "no room for" in str(error):  # told by load_state_dict, with all others
                raise CapacityError(str(error)) from error
            self.has_raised = True
            self.record.add("raised", None)
            self.record.add_note(type(error).__name__, note_error(error))
        except KeyboardInterrupt as error:
            if str(error) != ON_PURPOSE:
                raise
            self.has_raised = True
            self.record.add("interrupted", None)
            end_checkpoints()

    def log_gradients(self) -> None:
        """Note all gradients."""
        self.log("gradients", {name: p.grad for name, p in self.model.named_parameters()})

    def log_parameters(self) -> None:
        """Note all parameters."""
        for name, p in self.model.named_parameters():
            self.log("parameter", (name, p.detach()))

    def log_state(self) -> None:
        """Note what optimizers keep."""
        self.record.add_note("optimizers", note_optimizers(self.opts))

    def log_end(self) -> None:
        """Note everything that there is."""
        self.log("random numbers", torch.get_rng_state())
        self.record.add_note("parameters", note_parameters(self.model))
        self.record.add_note("optimizers", note_optimizers(self.opts))
        self.log("modes", (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), self.model.training))

    def log_ordinary(self) -> None:
        """Note what shows that nothing is left of a run."""
        self.record.add_note("sharing", note_sharing(self.model))
        self.record.add_note("objects", note_objects(self.model, self.opts))
        for name in ("for ever", "kept", "flat"):
            self.log(f"kept {name}", self.keep.get(name))

    def end(self) -> None:
        """Remove hooks that are nobody's."""
        for handle in self._global_handles:
            handle.remove()

    # --- the model and its batches ------------------------------------------------------------

    def x(self) -> Tensor:
        """Return a random batch."""
        return torch.randn(BATCH, WIDTH)

    def loss(self) -> Tensor:
        """Return the loss of a fresh batch."""
        return cast("Tensor", self.model(self.x()).square().mean())

    def backward(self, loss: Tensor) -> Tensor:
        """Run backward and return the loss."""
        loss.backward()
        return loss

    def p(self, number: int) -> nn.Parameter:
        """Return a parameter by its number."""
        parameters = list(self.model.parameters())
        return cast("nn.Parameter", parameters[number % len(parameters)]) if parameters else self.nothing

    def buffer(self, number: int) -> Tensor:
        """Return a buffer by its number."""
        buffers = list(self.model.buffers())
        return cast("Tensor", buffers[number % len(buffers)]) if buffers else torch.zeros(1)

    def replace_buffer(self, number: int, make: Callable[[Tensor], Tensor]) -> None:
        """Put another one in the place of a buffer."""
        places = [(m, name) for m in self.model.modules() for name, b in m._buffers.items() if b is not None]
        if places:
            module, name = places[number % len(places)]
            with torch.no_grad():
                setattr(module, name, make(getattr(module, name)))

    def mod(self, number: int) -> nn.Module:
        """Return a module by its number."""
        modules = list(self.model.modules())
        return cast("nn.Module", modules[number % len(modules)])

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that require gradients."""
        return [p for p in self.model.parameters() if p.requires_grad]

    # --- optimizers ---------------------------------------------------------------------------

    def steps(self) -> None:
        """Step every optimizer, and its scheduler."""
        for optimizer in self.opts:
            self.log("returned", optimizer.step())
        for scheduler in self.sched:
            scheduler.step()

    def zero(self, set_to_none: bool) -> None:
        """Empty the gradients."""
        for each in self.opts or [self.model]:
            each.zero_grad(set_to_none=set_to_none)

    def closure(self, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
        """Return a closure for an optimizer's step."""

        def closure() -> Tensor:
            optimizer.zero_grad()
            return self.backward(self.loss())

        return closure

    def halve(self, array: Any) -> None:  # noqa: ANN401 - of numpy
        """Write to an array, and keep no name of it."""
        array *= 0.5

    def change(self, number: int, how: int) -> None:
        """Change something that a step is made from: a step made ahead is not right then."""
        p = self.p(number)
        groups = [group for optimizer in self.opts for group in optimizer.param_groups]
        changes: list[Callable[[], object]] = [
            lambda: p.mul_(0.5),
            lambda: p.grad.mul_(2) if p.grad is not None else None,
            lambda: setattr(p, "grad", None),
            self.halve_state,
            lambda: self.halve(p.detach().numpy()),
            lambda: p.requires_grad_(not p.requires_grad),
            lambda: [group.update(lr=group["lr"] * 0.5) for group in groups],
            lambda: [each.load_state_dict(copy.deepcopy(each.state_dict())) for each in self.opts],
        ]
        with torch.no_grad():
            changes[how]()

    def schedule(self, make: Callable[[torch.optim.Optimizer], Any]) -> None:
        """Give every optimizer a scheduler."""
        self.sched += [make(optimizer) for optimizer in self.opts]

    def halve_state(self) -> None:
        """Change what optimizers keep."""
        with torch.no_grad():
            for optimizer in self.opts:
                for entries in list(optimizer.state.values()):
                    for value in entries.values() if isinstance(entries, dict) else ():
                        if isinstance(value, Tensor) and value.is_floating_point():
                            value.mul_(0.5)

    def halve_dicts(self, dicts: list[dict[str, Any]]) -> None:
        """Change what optimizers' state dicts hold."""
        with torch.no_grad():
            for entries in [
                each for state in dicts for each in state["state"].values() if isinstance(each, dict)
            ]:
                for value in entries.values():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        value.mul_(0.5)

    # --- hooks --------------------------------------------------------------------------------

    def see(self, name: str) -> Callable[..., None]:
        """Return a hook that notes what it is given."""
        return lambda *seen: self.log(name, seen)

    def see_nothing(self, name: str) -> Callable[..., None]:
        """Return a hook that notes that it was called."""
        return lambda *_: self.log(name, None)

    def see_parameter(self, name: str) -> Callable[[Tensor], None]:
        """Return a hook that notes a parameter and its gradient."""
        return lambda p: self.log(name, (p, p.grad))

    def see_module(self, name: str) -> Callable[..., None]:
        """Return a hook that notes what a module has and is given."""

        def hook(module: nn.Module, *seen: object) -> None:
            self.log(name, (type(module).__name__, list(module._parameters.values()), seen))

        return hook

    def see_dict(self, name: str) -> Callable[..., None]:
        """Return a hook that notes a state dict."""
        return lambda _, entries, *__: self.log(name, entries)

    def see_step(self, name: str) -> Callable[..., None]:
        """Return a hook that notes what an optimizer's step meets."""

        def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
            parameters = [p for g in optimizer.param_groups for p in g["params"]]
            self.log(name, [(p, p.grad) for p in parameters])

        return hook

    def halve_gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Change gradients, as a hook before a step."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    def on_node(self, p: Tensor, how: str) -> None:
        """Hook a parameter's accumulation node."""
        if p.requires_grad:
            made = p.view_as(p).grad_fn
            assert made is not None
            node = made.next_functions[0][0]
            self.keep.setdefault("nodes", []).append(node)
            self.handles.append(getattr(node, how)(self.see(f"node {how}")))

    def on_optimizers(self, register: str, hook: Callable[..., None]) -> None:
        """Hook every optimizer."""
        self.handles += [getattr(optimizer, register)(hook) for optimizer in self.opts]

    def globally(self, handle: Any) -> None:  # noqa: ANN401 - whatever has remove()
        """Keep the handle of a hook that is nobody's."""
        self._global_handles.append(handle)

    def remove_hook(self, number: int) -> None:
        """Remove one of the hooks."""
        handles = [handle for handle in self.handles if handle is not None]
        if handles:
            handles[number % len(handles)].remove()

    # --- failures -----------------------------------------------------------------------------

    def fail(self, *_: object) -> None:
        """Raise."""
        raise RuntimeError(ON_PURPOSE)

    def failing_forward(self, number: int, kind: type[BaseException]) -> None:
        """Run a loss in which a module's forward fails."""

        def fail(*_: object) -> None:
            raise kind(ON_PURPOSE)

        handle = self.mod(number).register_forward_pre_hook(fail)
        try:
            self.loss().backward()
        finally:
            handle.remove()

    def failing_backward(self, number: int) -> None:
        """Run a loss whose backward fails in the midst."""

        def spoil(_: nn.Module, __: object, output: object) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self.fail)

        handle = self.mod(number).register_forward_hook(spoil)
        try:
            self.loss().backward()
        finally:
            handle.remove()

    def failing_step(self) -> None:
        """Step with a hook that fails."""
        handles = [o.register_step_pre_hook(self.fail) for o in self.opts]
        try:
            self.steps()
        finally:
            for handle in handles:
                handle.remove()

    # --- threads ------------------------------------------------------------------------------

    def threads(self, count: int) -> None:
        """Evaluate in several threads at once, if the model's calls do not depend on each other."""
        self.model.eval()
        if all(_is_calm(module) for module in self.model.modules()):
            batches = [self.x() for _ in range(count)]
            outputs: list[object] = [None] * count
            workers = [
                threading.Thread(target=self._evaluate, args=(n, batch, outputs))
                for n, batch in enumerate(batches)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            for each in outputs:
                if isinstance(each, TierStoreError):  # several calls at once may need more than one does
                    raise each
            self.log("outputs", outputs)
        self.model.train()

    def _evaluate(self, number: int, batch: Tensor, outputs: list[object]) -> None:
        me = threading.get_ident()
        self.record.quiet.add(me)
        try:
            with torch.no_grad():
                outputs[number] = self.model(batch)
        except TierStoreError as error:
            outputs[number] = error
        except Exception as error:  # noqa: BLE001 - it is noted
            outputs[number] = note_error(error)
        finally:
            self.record.quiet.discard(me)

    # --- changes and copies -------------------------------------------------------------------

    def _with_weight(self, number: int) -> nn.Module:
        modules = [m for m in self.model.modules() if isinstance(m._parameters.get("weight"), Tensor)]
        return cast("nn.Module", modules[number % len(modules)])

    def reset(self, number: int) -> None:
        """Let a module that can do so begin anew."""
        modules = [m for m in self.model.modules() if hasattr(m, "reset_parameters")]
        cast("Any", modules[number % len(modules)]).reset_parameters()

    def parametrize(self, number: int) -> None:
        """Parametrize a weight."""
        parametrize.register_parametrization(self._with_weight(number), "weight", Doubled())

    def unparametrize(self, leave: bool) -> None:
        """Remove the first parametrization."""
        for module in self.model.modules():
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight", leave_parametrized=leave)
                break

    def weight_norm(self, number: int) -> None:
        """Give a weight a norm."""
        parametrizations.weight_norm(self._with_weight(number))

    def use_copy(self, model: nn.Module) -> None:
        """Note what a copy of the model does, and that it is an ordinary one."""
        self.log("copy", [(type(p).__name__, p.requires_grad, p.grad, p) for p in model.parameters()])
        with torch.no_grad():
            self.log("copy's output", copy.copy(model)(self.x()))

    def saved(self, model: nn.Module) -> nn.Module:
        """Return what was saved and loaded."""
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return cast("nn.Module", torch.load(file, weights_only=False))

    def average(self) -> None:
        """Average the parameters over the steps."""
        if "average" not in self.keep:
            self.keep["average"] = torch.optim.swa_utils.AveragedModel(self.model)
        self.keep["average"].update_parameters(self.model)
        self.log("average", list(self.keep["average"].module.state_dict().values()))


def _is_calm(module: nn.Module) -> bool:
    """Say whether a module's calls in evaluation leave nothing for the next one."""
    return (
        not isinstance(module, Called | Either | Keeping | Writing)
        and getattr(module, "max_norm", None) is None
    )


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        """Double."""
        return x * 2

    def right_inverse(self, x: Tensor) -> Tensor:
        """Halve."""
        return x / 2


_UNCOUNTED = {
    "aten.detach.default",  # of what is saved for backward, wherever hooks of saved tensors are in force
    "aten.lift_fresh.default",  # of a number: once for each call of a step over lists
    "aten.new_empty_strided.default",  # see the next
}
_SAME = {"aten.copy_.default": "aten.clone.default"}
"""PyTorch copies a gradient in one of two ways: by strides of its parameter, which are not always there."""
_OF_LISTS = ("aten._foreach_", "aten._fused_")
"""Steps over lists are a bundle at a time: what counts is how much is in their lists."""


class Dispatched(TorchDispatchMode):
    """A user's mode that counts operators.

    Args:
        trial: that notes what it sees.
        is_around_step: whether a step is in it, which is a bundle at a time: PyTorch takes those lists apart
            that have a sparse gradient, and no others.
    """

    def __init__(self, trial: Trial, *, is_around_step: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trial = trial
        self.is_around_step = is_around_step
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Count."""
        name = str(func)
        if name not in _UNCOUNTED:
            is_of_lists = name.startswith(_OF_LISTS) and isinstance(args[0], list | tuple)
            name = _SAME.get(name, name)
            if self.is_around_step:
                name = name.replace("._foreach_", ".").rpartition(".")[0]
            self.seen[name] += len(args[0]) if is_of_lists else 1
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.trial.log("dispatched", sorted(self.seen.items()))


_ONCE_A_STEP = {"__get__", "_set_grad_enabled", "tensor", "is_complex", "dim"}


class Functions(TorchFunctionMode):
    """A user's mode that counts functions.

    Args:
        trial: that notes what it sees.
        is_around_step: whether a step is in it, which is a bundle at a time: what it asks once for all
            parameters is asked once for each bundle, and PyTorch takes those lists apart that have a sparse
            gradient, and no others.

    Where a part is compiled, attributes do not count: the compiler asks for sizes of each graph that it
    makes, under the mode, and makes more of them where there are hooks.
    """

    def __init__(self, trial: Trial, *, is_around_step: bool = False) -> None:
        super().__init__()
        self.trial = trial
        self.is_around_step = is_around_step
        self.uncounted = set(_ONCE_A_STEP) if is_around_step else set()
        if any(isinstance(module, OptimizedModule) for module in trial.model.modules()):
            self.uncounted.add("__get__")
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Count."""
        name = getattr(func, "__name__", str(func))
        if name not in self.uncounted:
            is_of_lists = name.startswith(("_foreach_", "_fused_"))
            if self.is_around_step:
                name = name.replace("_foreach_", "", 1)
            self.seen[name] += len(args[0]) if is_of_lists else 1
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.trial.log("functions", sorted(self.seen.items()))
