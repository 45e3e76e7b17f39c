"""What modes see of an offloaded loop, and what a loop sees of modes: what plain PyTorch shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.ahead_loops import Taken, count_taken, quiet_step
from tests.training.twins import (
    WIDTH,
    Trial,
    adam,
    assert_equal_models,
    assert_same,
    batch,
    blocks,
    build_blocks,
    config_of,
    every_layout,
    loss_of,
    step,
)
from tierstore.training import offload

__all__ = ["count_taken"]  # a fixture

Optimizer = torch.optim.Optimizer


class UnknownSgd(torch.optim.SGD):
    """Runs its own step once, as it is."""


class Asking(nn.Module):
    """Does what PyTorch does: takes another way where a mode is on, or where it is told of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = blocks(3)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, width)``."""
        return self.inner(x) + modes()  # type: ignore[no-any-return]


def modes() -> int:
    return torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()


def build() -> tuple[nn.Module, Sequence[Optimizer]]:
    model = Asking()
    return model, adam(model)


def training(trial: Trial) -> None:
    for _ in range(3):
        step(trial)
        trial.log(torch.tensor(modes()))


def in_hooks(trial: Trial) -> None:
    found: list[int] = []
    for parameter in trial.model.parameters():
        parameter.register_hook(lambda gradient: found.append(modes()))
    trial.optimizer.register_step_pre_hook(lambda *_: found.append(modes()))
    training(trial)
    trial.log(torch.tensor(found))


def evaluation(context: Callable[[], object]) -> Callable[[Trial], None]:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            trial.model.eval()
            with context():  # type: ignore[attr-defined]
                trial.log(trial.model(batch()[0]))
            trial.model.train()
            step(trial)

    return loop


def along(trial: Trial) -> None:
    for _ in range(3):
        x, _ = batch()
        with torch.no_grad(), forward_ad.dual_level():
            for each in forward_ad.unpack_dual(trial.model(forward_ad.make_dual(x, torch.ones_like(x)))):
                trial.log(each)
        step(trial)


LOOPS: dict[str, Callable[[Trial], None]] = {
    "training": training,
    "hooks": in_hooks,
    "no_grad": evaluation(torch.no_grad),
    "inference_mode": evaluation(torch.inference_mode),
    "forward-mode derivatives": along,
}


@every_layout
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("name", LOOPS)
def test_no_mode_of_the_librarys_is_on_while_the_program_runs(name: str, layout: str, tmp_path: Path) -> None:
    assert_same(build, LOOPS[name], layout, tmp_path)


# --- what a dispatch mode sees ------------------------------------------------------------------


class Listing(TorchDispatchMode):
    """Notes the operators that it sees; but ``detach``, see below."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        operator: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if operator is not torch.ops.aten.detach.default:
            # PyTorch detaches what is saved for backward itself, wherever somebody's hooks are in force.
            self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


def listed(trial: Trial, phases: Mapping[str, Callable[[], object]]) -> list[list[str]]:
    found: list[list[str]] = []
    for _ in range(4):
        for name, phase in phases.items():
            with Listing() as mode:
                phase()
            # A step goes in the order of the forward pass.
            found.append(sorted(mode.names) if name == "step" else mode.names)
    trial.logged.clear()
    return found


def phases_of(trial: Trial, is_set_to_none: bool) -> dict[str, Callable[[], object]]:
    model, (inputs, classes) = trial.model, batch()
    losses: list[Tensor] = []

    def forward() -> None:
        losses.append(nn.functional.cross_entropy(model(inputs), classes))

    def backward() -> None:
        losses.pop().backward()

    def evaluate(context: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            model.eval()
            with context():
                model(inputs)
            model.train()

        return run

    def derive_along() -> None:
        with torch.no_grad(), forward_ad.dual_level():
            model(forward_ad.make_dual(inputs, torch.ones_like(inputs)))

    return {
        "forward": forward,
        "backward": backward,
        "a second forward": forward,
        "a second backward": backward,
        "no_grad": evaluate(torch.no_grad),
        "inference_mode": evaluate(torch.inference_mode),
        "forward-mode derivatives": derive_along,
        "step": trial.optimizer.step,
        "zero_grad": lambda: trial.optimizer.zero_grad(set_to_none=is_set_to_none),
    }


@every_layout
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("is_set_to_none", [True, False])
def test_a_dispatch_mode_sees_the_operators_that_plain_pytorch_shows_it(
    is_set_to_none: bool, layout: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = Trial(*build_blocks())
    expected = listed(plain, phases_of(plain, is_set_to_none))
    torch.manual_seed(0)
    ours = Trial(*build_blocks())
    with offload(ours.model, list(ours.optimizers), config_of(layout, tmp_path)):
        found = listed(ours, phases_of(ours, is_set_to_none))
    assert found == expected
    assert_equal_models(plain.model, ours.model)


@pytest.mark.parametrize("phase", ["backward", "step"])
def test_no_step_is_made_ahead_where_a_dispatch_mode_would_see_it_or_miss_it(
    phase: str, tmp_path: Path, taken: Taken
) -> None:
    def seen(trial: Trial) -> list[str]:
        inputs, classes = batch()
        for _ in range(3):
            quiet_step(trial)
        before = taken.since()
        mode = Listing()
        loss = nn.functional.cross_entropy(trial.model(inputs), classes)
        with mode if phase == "backward" else nullcontext():
            loss.backward()
        with mode if phase == "step" else nullcontext():
            trial.optimizer.step()
        trial.optimizer.zero_grad()
        under_the_mode = taken.since()
        for _ in range(2):
            quiet_step(trial)
        counts.append((before > 0, under_the_mode, taken.since() > 0))
        return sorted(mode.names)

    counts: list[tuple[bool, int, bool]] = []

    torch.manual_seed(0)
    plain = Trial(*build_blocks())
    expected = seen(plain)
    torch.manual_seed(0)
    ours = Trial(*build_blocks())
    with offload(ours.model, list(ours.optimizers), config_of("disk", tmp_path)):
        found = seen(ours)
    assert found == expected
    assert counts[1] == (True, 0, True), "steps are made ahead before and after the mode"
    assert_equal_models(plain.model, ours.model)


def test_an_ignored_encoder_layer_keeps_its_fast_path(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(16, 16)).eval()
    x = torch.randn(3, 5, 16)
    run = offload(model, None, config_of("device", tmp_path), ignored=["0.*"])
    with run, Listing() as mode, torch.inference_mode():
        model(x)
    assert "aten._transformer_encoder_layer_fwd.default" in mode.names


# --- what a function mode sees ------------------------------------------------------------------


class Calls(TorchFunctionMode):
    """Notes the functions that it sees, and halves what some return."""

    def __init__(self, halved: object = None) -> None:
        super().__init__()
        self.functions: list[Any] = []
        self._halved = halved

    def __torch_function__(
        self,
        function: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        self.functions.append(function)
        result = function(*args, **(kwargs or {}))
        return result * 0.5 if function == self._halved else result

    @property
    def names(self) -> list[str]:
        return [str(getattr(each, "__name__", each)) for each in self.functions]


def of_one_bundle(make: Callable[..., Optimizer]) -> Callable[[], tuple[nn.Module, Sequence[Optimizer]]]:
    """One bundle: a step that is made a bundle at a time asks as often as any other."""

    def build_one() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = nn.Sequential(nn.Linear(WIDTH, 5))
        return model, [make(model.parameters(), lr=0.01, foreach=False)]

    return build_one


def functions_seen(trial: Trial) -> list[list[str]]:
    found: list[list[str]] = []
    inputs, classes = batch()
    parameter = trial.model.get_parameter("0.weight")

    def forward() -> None:
        losses.append(nn.functional.cross_entropy(trial.model(inputs), classes))

    losses: list[Tensor] = []
    phases: list[Callable[[], object]] = [
        forward,
        lambda: torch.autograd.backward(losses.pop()),
        lambda: (parameter.grad, parameter.data),
        trial.optimizer.step,
        trial.optimizer.state_dict,
        trial.model.state_dict,
        trial.optimizer.zero_grad,
        lambda: setattr(parameter, "data", parameter.data),
        lambda: setattr(parameter, "grad", torch.ones_like(parameter)),
        lambda: delattr(parameter, "grad"),
    ]
    for _ in range(3):
        for phase in phases:
            with Calls() as outer, Calls() as inner:
                phase()
            assert inner.names == outer.names
            # A step that is made a bundle at a time begins more than once.
            found.append([name for name in inner.names if name != "_set_grad_enabled"])
    return found


@every_layout
@pytest.mark.parametrize("activations", ["kept", "swapped"])
@pytest.mark.parametrize(
    "make",
    [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, UnknownSgd],
    ids=lambda each: each.__name__,
)
def test_a_function_mode_sees_the_functions_that_plain_pytorch_shows_it(
    make: Callable[..., Optimizer], activations: str, layout: str, tmp_path: Path
) -> None:
    build_one = of_one_bundle(make)
    torch.manual_seed(0)
    plain = Trial(*build_one())
    expected = functions_seen(plain)
    torch.manual_seed(0)
    ours = Trial(*build_one())
    swapping = {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": True}]}}
    is_kept = activations == "kept"
    document = {"offload_config": config_of(layout, tmp_path), **({} if is_kept else swapping)}
    with offload(ours.model, list(ours.optimizers), document, layers=None if is_kept else ""):
        assert functions_seen(ours) == expected
    assert_equal_models(plain.model, ours.model)


@every_layout
def test_a_function_mode_may_change_what_attributes_of_parameters_are(layout: str, tmp_path: Path) -> None:
    tensor: Any = Tensor
    getters = [tensor.grad.__get__, tensor.data.__get__]

    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss_of(trial.model, *batch()).backward()
            for parameter in trial.model.parameters():
                for getter in getters:
                    with Calls(halved=getter) as mode:
                        trial.log(parameter.grad)
                        trial.log(parameter.data)
                    assert mode.functions[0] == getters[0], "it is found among functions"
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, layout, tmp_path)
