"""Every loop that PyTorch users write: the same bits with the state in tiers as without."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.twins import (
    WIDTH,
    Block,
    Optimizer,
    Trial,
    adam,
    assert_same,
    batch,
    blocks,
    build_blocks,
    every_layout,
    loss_of,
    step,
    steps,
    with_copies,
    with_device,
)

pytestmark = every_layout


def test_a_plain_loop(layout: str, tmp_path: Path) -> None:
    assert_same(build_blocks, steps(5), layout, tmp_path)


def test_zero_grad_without_a_step(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for turn in range(4):
            loss_of(trial.model, *batch()).backward()
            if turn % 2:
                trial.optimizer.zero_grad()
                trial.log_gradients()
            else:
                step(trial)

    assert_same(build_blocks, loop, layout, tmp_path)


def test_a_step_without_zero_grad(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(4):
            loss_of(trial.model, *batch()).backward()
            trial.log_gradients()
            trial.optimizer.step()
            trial.log_gradients()

    assert_same(build_blocks, loop, layout, tmp_path)


def test_two_steps_with_the_same_gradients(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        loss_of(trial.model, *batch()).backward()
        trial.optimizer.step()
        trial.optimizer.step()
        trial.log_gradients()

    assert_same(build_blocks, loop, layout, tmp_path)


def test_zero_grad_that_keeps_zeros(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss_of(trial.model, *batch()).backward()
            trial.optimizer.step()
            trial.optimizer.zero_grad(set_to_none=False)
            trial.log_gradients()

    assert_same(build_blocks, loop, layout, tmp_path)


def test_model_zero_grad(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for turn in range(3):
            loss_of(trial.model, *batch()).backward()
            trial.optimizer.step()
            trial.model.zero_grad(set_to_none=bool(turn % 2))
            trial.log_gradients()

    assert_same(build_blocks, loop, layout, tmp_path)


def test_gradient_accumulation(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            for _ in range(3):
                (loss_of(trial.model, *batch()) / 3).backward()
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, layout, tmp_path)


class Tied(nn.Module):
    """A model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Map token numbers to logits."""
        output: Tensor = self.head(self.block(self.embedding(x)))
        return output


def test_tied_weights(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Tied()
        return model, adam(model)

    def loop(trial: Trial) -> None:
        for _ in range(4):
            tokens = torch.randint(0, 40, (4, 7))
            loss = nn.functional.cross_entropy(trial.model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            trial.log(loss)
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build, loop, layout, tmp_path)


def test_frozen_parameters(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        model[0].requires_grad_(requires_grad=False)
        model.get_parameter("1.up.weight").requires_grad = False
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, [torch.optim.AdamW(trained, lr=1e-2)]

    assert_same(build, steps(), layout, tmp_path)


class Lora(nn.Module):
    """A frozen linear layer and a trained low-rank one beside it, which uses the frozen one's module."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Add the low-rank product."""
        output: Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
        return output


def test_lora(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks().requires_grad_(requires_grad=False)
        for block in list(model.children())[:3]:
            assert isinstance(block.up, nn.Linear)
            assert isinstance(block.down, nn.Linear)
            block.up, block.down = Lora(block.up), Lora(block.down)
        return model, [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)]

    assert_same(build, steps(), layout, tmp_path)


def test_unfreezing_in_the_middle(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        model[0].requires_grad_(requires_grad=False)
        return model, adam(model)

    def loop(trial: Trial) -> None:
        step(trial)
        trial.model.requires_grad_(requires_grad=True)
        step(trial)
        step(trial)

    assert_same(build, loop, layout, tmp_path)


def test_several_optimizers(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [
            torch.optim.SGD(model[:2].parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(model[2:].parameters(), lr=1e-2),
        ]

    assert_same(build, steps(), layout, tmp_path)


def test_two_optimizers_in_turns(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [
            torch.optim.SGD(model[0].parameters(), lr=0.1),
            torch.optim.Adam(model[1:].parameters(), lr=1e-2),
        ]

    def loop(trial: Trial) -> None:
        for turn in range(5):
            loss_of(trial.model, *batch()).backward()
            optimizer = trial.optimizers[turn % 2]
            optimizer.step()
            optimizer.zero_grad()
            trial.log_gradients()

    assert_same(build, loop, layout, tmp_path)


def test_evaluation_between_steps(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for turn in range(4):
            step(trial)
            trial.model.eval()
            with torch.no_grad() if turn % 2 else torch.inference_mode():
                trial.log(trial.model(batch()[0]))
            trial.model.train()

    assert_same(build_blocks, loop, layout, tmp_path)


class Winding(nn.Module):
    """Modules called twice, in turns, or not at all; a child's weight used by its parent; buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Block()
        self.even = Block()
        self.odd = Block()
        self.unused = Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Go one way or the other."""
        self.calls += 1
        x = self.shared(self.shared(x))
        x = self.even(x) if int(self.calls) % 2 else self.odd(x)
        x = self.batch_norm(x * self.scale)
        return nn.functional.linear(x, self.head.weight * 2, self.head.bias)


def build_winding() -> tuple[nn.Module, Sequence[Optimizer]]:
    model = Winding()
    return model, adam(model)


def test_modules_called_twice_conditionally_or_never(layout: str, tmp_path: Path) -> None:
    assert_same(build_winding, steps(6), layout, tmp_path)


def test_retained_graph_and_a_second_backward(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss = loss_of(trial.model, *batch())
            loss.backward(retain_graph=True)
            loss.backward()
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, layout, tmp_path)


def test_double_backward(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            inputs, classes = batch()
            inputs.requires_grad_()
            loss = loss_of(trial.model, inputs, classes)
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
            (loss + slope.square().sum()).backward()
            trial.log(slope)
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, "host" if layout == "disk" else layout, tmp_path, _ROOMY.get(layout))


# A graph of gradients keeps what it was made of: all parameters, as aliases that no hook sees.
_ROOMY: dict[str, dict[str, object]] = {
    "device": {"max_device_memory": "512KB"},
    "three": {"max_device_memory": "512KB"},
}


def test_gradients_with_a_graph_of_their_own(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(2):
            loss = loss_of(trial.model, *batch())
            loss.backward(retain_graph=True)
            slopes = torch.autograd.grad(loss, list(trial.model.parameters()), create_graph=True)
            sum(slope.square().sum() for slope in slopes).backward()  # type: ignore[union-attr]
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, "host" if layout == "disk" else layout, tmp_path, _ROOMY.get(layout))


def test_autograd_grad_for_parameters(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss = loss_of(trial.model, *batch())
            for slope in torch.autograd.grad(loss, list(trial.model.parameters())):
                trial.log(slope)
            step(trial)

    # The loop holds the gradients of all parameters at once.
    assert_same(build_blocks, loop, layout, tmp_path, with_device(layout, "192KB"))


class FailingError(RuntimeError):
    """Thrown inside a step."""


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_after_an_exception_the_next_step_is_right(layout: str, tmp_path: Path, where: str) -> None:
    def loop(trial: Trial) -> None:
        step(trial)
        with contextlib.suppress(FailingError):
            _fail(trial, where)
        trial.optimizer.zero_grad()
        step(trial)
        step(trial)

    assert_same(build_blocks, loop, layout, tmp_path)


def _fail(trial: Trial, where: str) -> None:
    def fail(*_: object) -> None:
        raise FailingError

    middle = trial.model[1].up  # type: ignore[index]
    inputs, classes = batch()
    if where == "forward":
        with middle.register_forward_hook(fail):
            loss_of(trial.model, inputs, classes)
    elif where == "backward":
        with middle.register_full_backward_hook(fail):
            loss_of(trial.model, inputs, classes).backward()
    else:
        with trial.optimizer.register_step_pre_hook(fail):
            loss_of(trial.model, inputs, classes).backward()
            trial.optimizer.step()


def test_after_an_interrupt_the_next_step_is_right(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        step(trial)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        handle = trial.model[1].up.register_forward_hook(interrupt)  # type: ignore[index]
        with contextlib.suppress(KeyboardInterrupt):
            trial.model(batch()[0])
        handle.remove()
        step(trial)
        step(trial)

    assert_same(build_blocks, loop, layout, tmp_path)


def test_a_step_between_forward_and_backward_raises_what_pytorch_raises(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        step(trial)
        loss = loss_of(trial.model, *batch())
        loss.backward(retain_graph=True)
        trial.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        trial.optimizer.zero_grad()
        step(trial)

    assert_same(build_blocks, loop, layout, tmp_path, with_copies(layout))


def test_a_step_over_lists_is_counted_while_the_first_steps_are_learned_from(
    layout: str, tmp_path: Path
) -> None:
    """A mode of ours sees them; what PyTorch writes in loops over lists is to be counted all the same."""

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)]

    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss = loss_of(trial.model, *batch())
            loss.backward(retain_graph=True)
            versions = [parameter._version for parameter in trial.model.parameters()]
            trial.optimizer.step()
            for then, parameter in zip(versions, trial.model.parameters(), strict=True):
                assert parameter._version > then
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            trial.optimizer.zero_grad()

    assert_same(build, loop, layout, tmp_path)


def test_a_saved_activation_that_was_changed_raises_what_pytorch_raises(layout: str, tmp_path: Path) -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.block(x).exp()
            y.add_(1)
            return y

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Careless()
        return model, adam(model)

    def loop(trial: Trial) -> None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            trial.model(batch()[0]).sum().backward()
        trial.optimizer.zero_grad()

    assert_same(build, loop, layout, tmp_path)
