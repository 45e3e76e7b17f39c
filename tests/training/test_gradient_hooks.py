"""Hooks of every kind see the gradients that plain PyTorch shows them, whenever they were registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from tests.training.twins import (
    WIDTH,
    Optimizer,
    Trial,
    assert_same,
    batch,
    blocks,
    build_blocks,
    every_layout,
    loss_of,
    with_device,
)
from tierstore.training.autograd.gradient import native_gradient, set_native_gradient

Act = Callable[["Journal", nn.Parameter], None]
MICRO_BATCHES = 3


class Journal:
    """What hooks saw, in the order in which they were called.

    Attributes:
        entries: of it.
        kept: whatever hooks keep, by the parameter's name.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.entries: list[object] = []
        self.kept: dict[str, object] = {}
        self.nodes: list[object] = []
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.last: dict[nn.Parameter, Tensor | None] = {}
        self.micro_batch = 0

    def see(self, what: str, parameter: nn.Parameter, given: Tensor | None = None) -> None:
        """Take down what a hook sees of a gradient."""
        self.entries.append((what, self.names[parameter], _look(given), _look(parameter.grad)))
        if "after" in what and "module" not in what:
            self.entries.append(("what C++ sees", _look(native_gradient(parameter))))

    def see_whether_it_is_the_same(self, parameter: nn.Parameter) -> None:
        """Take down whether the gradient is the object that it was."""
        self.entries.append(("same", parameter.grad is self.last.get(parameter)))
        self.last[parameter] = parameter.grad

    def watch(self, label: str, act: Act) -> None:
        """Register hooks of every kind on every parameter; those after accumulation do something, too."""
        for parameter in self.model.parameters():
            self._watch_parameter(label, parameter, act)
        for module in self.model:  # type: ignore[attr-defined]
            self._watch_module(label, module)

    def _watch_parameter(self, label: str, parameter: nn.Parameter, act: Act) -> None:
        def after(parameter: nn.Parameter) -> None:
            self.see(f"{label} after", parameter)
            act(self, parameter)

        node = get_gradient_edge(parameter).node
        self.nodes.append(node)
        parameter.register_hook(lambda given: self.see(f"{label} tensor", parameter, given))
        parameter.register_post_accumulate_grad_hook(after)
        node.register_prehook(lambda given: self.see(f"{label} node before", parameter, given[0]))
        node.register_hook(lambda _, given: self.see(f"{label} node after", parameter, given[0]))

    def _watch_module(self, label: str, module: nn.Module) -> None:
        def see(what: str) -> None:
            for parameter in module.parameters():
                self.see(f"{label} {what}", parameter)

        module.register_full_backward_pre_hook(lambda *_: see("module before"))
        module.register_full_backward_hook(lambda *_: see("module after"))


def _look(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    return tensor.stride(), tensor.requires_grad, tensor.detach().clone().numpy().tobytes()


def _nothing(journal: Journal, parameter: nn.Parameter) -> None:
    del journal, parameter


def _scale(_: Journal, parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _replace(_: Journal, parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 1.5


def _clear(_: Journal, parameter: nn.Parameter) -> None:
    parameter.grad = None


def _zero(_: Journal, parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.zero_()


def _detach(_: Journal, parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.detach_()


def _run_the_model(journal: Journal, parameter: nn.Parameter) -> None:
    if parameter.dim() == 1 and journal.micro_batch > 0:  # it has waited
        with torch.no_grad():
            journal.entries.append(("output", _look(journal.model(torch.ones(2, WIDTH)))))


def _keep_it(journal: Journal, parameter: nn.Parameter) -> None:
    name = journal.names[parameter]
    journal.see_whether_it_is_the_same(parameter)
    if isinstance(kept := journal.kept.get(name), Tensor):
        journal.entries.append(("kept", name, _look(kept)))
    journal.kept[name] = parameter.grad


def _keep_a_view(journal: Journal, parameter: nn.Parameter) -> None:
    name = journal.names[parameter]
    assert parameter.grad is not None
    if isinstance(kept := journal.kept.get(name), Tensor):
        kept.mul_(2)  # the gradient's, if it is the one that it was
    journal.kept[name] = parameter.grad.view(-1)


def _keep_an_array(journal: Journal, parameter: nn.Parameter) -> None:
    name = journal.names[parameter]
    assert parameter.grad is not None
    journal.entries.append(("array", None if (kept := journal.kept.get(name)) is None else kept.tolist()))  # type: ignore[attr-defined]
    journal.kept[name] = parameter.grad.numpy()


ACTS = {
    act.__name__: act
    for act in (
        _nothing,
        _scale,
        _replace,
        _clear,
        _zero,
        _detach,
        _run_the_model,
        _keep_it,
        _keep_a_view,
        _keep_an_array,
    )
}


KEEPS_ORDINARY = {"_replace", "_clear", "_keep_it", "_keep_a_view", "_keep_an_array"}
"""After these, gradients are what the user made them, or somebody else has hold of them."""


class _Pair:
    """The journals of a plain model and of the offloaded one."""

    def __init__(self, act: Act) -> None:
        self.journals: list[Journal] = []
        self._act = act
        self.has_stashed = False

    def build(self) -> tuple[nn.Module, Sequence[Optimizer]]:
        """Return a model with hooks that were registered before it is offloaded."""
        model = blocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.journals.append(Journal(model, optimizer))
        self.journals[-1].watch("before", self._act)
        return model, [optimizer]

    def loop(self, trial: Trial) -> None:
        """Register hooks once more and train with accumulation."""
        journal = self.journals[-1]
        journal.watch("since", self._act)
        for _ in range(2):
            for journal.micro_batch in range(MICRO_BATCHES):
                inputs, classes = batch()
                loss_of(trial.model, inputs.requires_grad_(), classes).backward()
                trial.log_gradients()
                for parameter in journal.names:
                    journal.see_whether_it_is_the_same(parameter)
            if trial.run is not None:
                self.has_stashed |= any(key.startswith("grad/") for key in trial.run.store)
            trial.optimizer.step()
            trial.optimizer.zero_grad()
            journal.last.clear()

    def compare(self) -> None:
        """The two saw the same."""
        plain, ours = self.journals
        assert len(plain.entries) > 100
        for number, (a, b) in enumerate(zip(plain.entries, ours.entries, strict=True)):
            assert a == b, f"entry {number} differs"


@every_layout
@pytest.mark.parametrize("act", ACTS)
def test_every_hook_sees_what_plain_pytorch_shows_it(layout: str, act: str, tmp_path: Path) -> None:
    pair = _Pair(ACTS[act])
    assert_same(pair.build, pair.loop, layout, tmp_path, with_device(layout, "256KB"))
    pair.compare()
    assert pair.has_stashed == (layout != "host" and act not in KEEPS_ORDINARY)


# ---------------------------------------------------------------------- gradients with graphs


def _steps(trial: Trial, number: int) -> None:
    trial.optimizers[number].step()


def _steps_and_clears(trial: Trial, number: int) -> None:
    trial.optimizers[number].step()
    trial.optimizers[number].zero_grad()


def _steps_and_zeroes(trial: Trial, number: int) -> None:
    trial.optimizers[number].step()
    trial.optimizers[number].zero_grad(set_to_none=False)


def _scales_and_steps(trial: Trial, number: int) -> None:
    (parameter,) = trial.optimizers[number].param_groups[0]["params"]
    trial.log(parameter.grad)
    parameter.grad = parameter.grad.detach() * 2
    trial.optimizers[number].step()


def _steps_all(trial: Trial, number: int) -> None:
    if number == 0:  # the pass needs no weight any more
        for optimizer in trial.optimizers:
            optimizer.step()


STEPS = {
    act.__name__: act for act in (_steps, _steps_and_clears, _steps_and_zeroes, _scales_and_steps, _steps_all)
}

PER_PARAMETER: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
}


def _one_for_each(kind: str) -> Callable[[], tuple[nn.Module, Sequence[Optimizer]]]:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        return model, [PER_PARAMETER[kind]([parameter]) for parameter in model.parameters()]

    return build


def _stepped_after_accumulation(trial: Trial, act: str) -> list[torch.utils.hooks.RemovableHandle]:
    return [
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: STEPS[act](trial, number))
        for number, parameter in enumerate(trial.model.parameters())
    ]


def _empty(trial: Trial, set_to_none: bool) -> None:
    for optimizer in trial.optimizers:
        optimizer.zero_grad(set_to_none)


def _pass(trial: Trial, **options: bool) -> None:
    trial.model(torch.randn(2, WIDTH)).square().mean().backward(**options)
    trial.log_gradients()
    for parameter in trial.model.parameters():
        trial.log(parameter)
        if parameter.grad is not None:
            parameter.grad.detach_()


@every_layout
@pytest.mark.parametrize("kind", PER_PARAMETER)
@pytest.mark.parametrize("act", STEPS)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_hook_steps_with_the_gradient_that_a_graph_is_made_of(
    act: str, kind: str, layout: str, tmp_path: Path
) -> None:
    """Autograd adds out of place then, to what was there before: a stash, zeros, nothing."""

    def loop(trial: Trial) -> None:
        for before in (None, False, True):
            _pass(trial)
            if before is not None:
                _empty(trial, set_to_none=before)
            handles = _stepped_after_accumulation(trial, act)
            _pass(trial, create_graph=True)
            _pass(trial)
            _pass(trial, create_graph=True)
            for handle in handles:
                handle.remove()
            _empty(trial, set_to_none=True)

    assert_same(_one_for_each(kind), loop, layout, tmp_path, with_device(layout, "512KB"))


def test_a_gradient_that_was_set_where_no_guard_sees_it_outlives_the_run(tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        loss_of(trial.model, *batch()).backward()
        for parameter in trial.model.parameters():
            set_native_gradient(parameter, torch.ones_like(parameter))

    assert_same(build_blocks, loop, "disk", tmp_path)
