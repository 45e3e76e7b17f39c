"""What ``p.grad`` means while gradients wait in the store: every way to set, keep, join and lose one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.training.twins import (
    WIDTH,
    Block,
    Optimizer,
    Trial,
    assert_equal_lists,
    assert_same,
    batch,
    build_blocks,
    config_of,
    every_layout,
    is_on_accelerator,
    loss_of,
    with_copies,
    with_device,
)
from tierstore.engine.executor import Opening
from tierstore.errors import UsageError
from tierstore.tensor_io import TensorIo
from tierstore.tensors import TensorSpec
from tierstore.training import offload

# A graph of gradients keeps all parameters, as aliases that no hook sees.
ROOMY: dict[str, dict[str, object]] = {
    "device": {"max_device_memory": "512KB"},
    "three": {"max_device_memory": "512KB"},
}


def finish_step(trial: Trial) -> None:
    """Log the gradients, step, and forget them."""
    trial.log_gradients()
    trial.optimizer.step()
    trial.optimizer.zero_grad()


@every_layout
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_with_a_graph_joins_one_that_waits(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(2):
            loss_of(trial.model, *batch()).backward()
            loss_of(trial.model, *batch()).backward(create_graph=True)
            total = sum(p.grad.square().sum() for p in trial.model.parameters() if p.grad is not None)
            assert isinstance(total, Tensor)
            trial.log(total)
            trial.log_gradients()
            # The sum's graph leads back to the parameters, and the gradients keep it: both have to go.
            trial.log(torch.autograd.grad(total, list(trial.model.parameters()))[0])
            for parameter in trial.model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.detach()
            finish_step(trial)

    more = {**ROOMY.get(layout, {}), "offload_grad": "cpu"}
    assert_same(build_blocks, loop, "host" if layout == "disk" else layout, tmp_path, more)


@every_layout
def test_a_gradient_is_given_to_another_parameter(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        first, second = (trial.model[n].up.weight for n in (0, 1))  # type: ignore[index]
        for _ in range(3):
            loss_of(trial.model, *batch()).backward()
            second.grad = first.grad
            finish_step(trial)

    assert_same(build_blocks, loop, layout, tmp_path)


@every_layout
def test_a_gradient_is_given_to_its_own_parameter(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss_of(trial.model, *batch()).backward()
            for parameter in trial.model.parameters():
                gradient = parameter.grad
                parameter.grad = gradient
            finish_step(trial)

    assert_same(build_blocks, loop, layout, tmp_path)


class WithExtra(nn.Module):
    """Blocks and, once `grow` was called, a parameter that nobody told the offloading of."""

    extra: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(WIDTH, 5)

    def grow(self) -> None:
        self.extra = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(x) * self.extra)
        return logits


def train_with_extra(trial: Trial) -> None:
    assert isinstance(trial.model, WithExtra)
    trial.model.grow()
    torch.manual_seed(1)
    extra = trial.model.extra
    for _ in range(3):
        loss_of(trial.model, *batch()).backward()
        assert extra.grad is not None
        extra.grad = extra.grad * 2
        with torch.no_grad():
            extra.sub_(extra.grad)
        finish_step(trial)
        trial.log(extra)
        extra.grad = None


@every_layout
def test_a_parameter_added_later_has_a_gradient_like_any_other(layout: str, tmp_path: Path) -> None:
    trials = []
    for _ in range(2):
        torch.manual_seed(0)
        model = WithExtra()
        trials.append(Trial(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
    plain, ours = trials
    train_with_extra(plain)
    with offload(ours.model, ours.optimizer, config_of(layout, tmp_path)):
        train_with_extra(ours)
    assert_equal_lists(plain.logged, ours.logged)


class Rotating(nn.Module):
    """A layer with complex weights, whose gradients autograd gives as conjugates and views."""

    def __init__(self) -> None:
        super().__init__()
        self.rotation = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)
        self.mixing = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        turned = (x.to(torch.complex64) @ self.rotation.conj() + self.shift.conj()).abs()
        # The gradient of an expanded vector is one number with strides of zero.
        return (turned @ self.mixing.T).relu() + self.mixing.sum() + self.shift.real.sum()


@every_layout
def test_gradients_that_are_conjugates_views_and_expanded(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = nn.Sequential(Rotating(), Rotating(), nn.Linear(WIDTH, 5))
        return model, [torch.optim.SGD(model.parameters(), lr=0.01)]

    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss_of(trial.model, *batch()).backward()
            trial.log_gradients()
            loss_of(trial.model, *batch()).backward()
            finish_step(trial)

    assert_same(build, loop, layout, tmp_path)


@every_layout
@pytest.mark.parametrize("is_stepped", [True, False])
def test_sparse_gradients_that_are_added_up(is_stepped: bool, layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
        model = nn.Sequential(nn.Embedding(20, WIDTH, sparse=True), *layers)
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)] if is_stepped else []

    def loop(trial: Trial) -> None:
        for turn in range(3):
            for _ in range(3):
                trial.model(torch.tensor([1, 2, 2])).square().mean().backward()
            trial.log_gradients()
            for optimizer in trial.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=turn == 1)

    assert_same(build, loop, layout, tmp_path, with_device(layout, "64KB"))


def test_a_sparse_gradient_stays_where_autograd_put_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(100, WIDTH, sparse=True), nn.Linear(WIDTH, 5))
    embedding = model[0].weight
    with offload(model, torch.optim.SGD(model.parameters(), lr=0.1), config_of("device", tmp_path)):
        model(torch.tensor([1, 2, 2])).sum().backward()
        assert isinstance(embedding, Tensor)
        assert embedding.grad is not None
        assert embedding.grad.is_sparse


def test_a_view_of_a_gradient_that_was_zeroed_keeps_its_values(tmp_path: Path) -> None:
    model, (optimizer,) = build_blocks()
    with offload(model, optimizer, config_of("device", tmp_path)) as run:
        loss_of(model, *batch()).backward()
        weight = model[0].up.weight  # type: ignore[index]
        alias = weight.grad.data[0]
        values = alias.clone()
        optimizer.zero_grad()
        loss_of(model, *batch()).backward()
        assert torch.equal(alias, values)
        assert not torch.equal(weight.grad[0], values)
        del alias
        optimizer.zero_grad()
        loss_of(model, *batch()).backward()
        optimizer.zero_grad()
        assert not [key for key in run.store if key.startswith("grad/")], "nothing is left of them"


class Strided(nn.Module):
    """Parameters whose strides are dense, but not the usual ones."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())
        self.conv = nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.single = nn.Parameter(torch.randn(WIDTH).as_strided((1, WIDTH), (3, 1)))
        self.gaps = nn.Parameter(torch.randn(WIDTH, 6)[:, :5])
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, x.square()], 1) @ self.transposed
        x = x + self.conv(x.view(-1, 4, 4, 3)).flatten(1)[:, :WIDTH] + self.single.sinh()
        logits: Tensor = self.head(x) + x @ self.gaps + self.empty.sum()
        return logits


@every_layout
def test_gradients_have_the_strides_that_autograd_gives_them(layout: str, tmp_path: Path) -> None:
    strides: list[list[object]] = []

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = nn.Sequential(Strided(), nn.Linear(5, 5))
        strides.append([])
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(note)
        return model, [torch.optim.SGD(model.parameters(), lr=0.01)]

    def note(parameter: Tensor) -> None:
        assert parameter.grad is not None
        strides[-1].append(parameter.grad.stride())

    def loop(trial: Trial) -> None:
        for _ in range(4):
            loss_of(trial.model, *batch()).backward()
            loss_of(trial.model, *batch()).backward()
            for parameter in trial.model.parameters():
                note(parameter)
                trial.log(None if parameter.grad is None else parameter.grad.sum())
            finish_step(trial)

    assert_same(build, loop, layout, tmp_path, {"offload_grad": "cpu"})
    assert strides[0] == strides[1]


@every_layout
def test_gradients_of_chosen_parameters(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        parameters = list(trial.model.parameters())
        for number in range(3):
            loss = loss_of(trial.model, *batch())
            loss.backward(retain_graph=True, inputs=parameters[number::2])
            trial.log_gradients()
            torch.autograd.backward([loss], retain_graph=True, inputs=parameters[0])
            trial.log_gradients()
            loss.backward(inputs=parameters)
            finish_step(trial)

    assert_same(build_blocks, loop, layout, tmp_path, {"offload_grad": "cpu"})


@every_layout
def test_gradients_detached_in_place(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(2):
            for _ in range(2):
                loss_of(trial.model, *batch()).backward()
                for parameter in trial.model.parameters():
                    assert parameter.grad is not None
                    assert parameter.grad.detach_() is parameter.grad
            finish_step(trial)

    assert_same(build_blocks, loop, layout, tmp_path, {"offload_grad": "cpu"})


@pytest.mark.usefixtures("compiler_at_work")
def test_gradients_wait_in_the_store_while_the_compiler_evaluates_frames(tmp_path: Path) -> None:
    """An argument of a function has one reference more then."""
    model, optimizers = build_blocks()
    with offload(model, optimizers, config_of("disk", tmp_path)) as run:
        loss_of(model, *batch()).backward()
        assert any(key.startswith("grad/") for key in run.store)


@every_layout
def test_a_parameter_is_no_gradient_of_its_own_and_no_others(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        first, second = list(trial.model.parameters())[:2]
        loss_of(trial.model, *batch()).backward()
        before = None if first.grad is None else first.grad.clone()
        with pytest.raises(RuntimeError, match="can't assign Variable as its own grad"):
            first.grad = first
        if trial.run is not None:
            with pytest.raises(UsageError, match=r"detach\(\)"):
                first.grad = second
        assert before is not None
        assert first.grad is not None
        assert torch.equal(first.grad, before)
        finish_step(trial)

    assert_same(build_blocks, loop, layout, tmp_path, {"offload_grad": "cpu"})


@every_layout
def test_gradients_of_what_needs_none_raise_what_pytorch_raises(layout: str, tmp_path: Path) -> None:
    texts: list[str] = []

    def loop(trial: Trial) -> None:
        first, second = list(trial.model.parameters())[:2]
        first.requires_grad_(False)  # noqa: FBT003 - its usual form
        loss = loss_of(trial.model, *batch())
        for outputs in (loss, torch.ones(1)):
            for inputs in (first, [second, first]):
                with pytest.raises(RuntimeError) as raised:
                    torch.autograd.grad(outputs, inputs)
                texts.append(str(raised.value))

    assert_same(build_blocks, loop, layout, tmp_path)
    assert texts[:4] == texts[4:]


@every_layout
def test_two_parameters_that_are_given_one_gradient_share_it(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        alike = [p for p in trial.model.parameters() if p.shape == trial.model[0].up.weight.shape][:2]  # type: ignore[index]
        for _ in range(2):
            loss_of(trial.model, *batch()).backward()
            alike[0].grad = alike[1].grad
            assert alike[0].grad is alike[1].grad
            assert alike[0].grad is not None
            alike[0].grad.mul_(2)
            loss_of(trial.model, *batch()).backward()  # adds to it twice
            assert alike[0].grad is alike[1].grad
            finish_step(trial)

    assert_same(build_blocks, loop, layout, tmp_path, {"offload_grad": "cpu"})


@every_layout
@pytest.mark.parametrize("is_stepped", [False, True])
def test_a_pass_that_makes_a_graph_saves_no_weights_that_do_not_fit(
    is_stepped: bool, layout: str, tmp_path: Path
) -> None:
    """A penalty on the gradient of the input, and one whose weights change before it is gone through."""

    def loop(trial: Trial) -> None:
        for turn in range(3):
            inputs = batch()[0].requires_grad_()
            (gradient,) = torch.autograd.grad(trial.model(inputs).square().sum(), inputs, create_graph=True)
            penalty = (gradient.square().sum() - 1).square()
            trial.log(penalty)
            if is_stepped and turn == 1:
                with torch.no_grad():
                    for parameter in trial.model.parameters():
                        parameter.mul_(0.9)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    penalty.backward()
                trial.optimizer.zero_grad()
                continue
            penalty.backward()
            finish_step(trial)

    assert_same(build_blocks, loop, layout, tmp_path, with_copies(layout, "160KB"))


def test_a_weight_that_a_pass_with_a_graph_has_saved_may_not_change(tmp_path: Path) -> None:
    """The graph of the forward is gone: what the graph of the backward has saved is all that can tell."""

    def loop(trial: Trial) -> None:
        model = trial.model
        weight = next(p for p in model.parameters() if p.dim() > 1)
        inputs, seed = batch()[0].requires_grad_(), torch.ones(5, requires_grad=True)
        output = model(inputs)
        (gradient,) = torch.autograd.grad(output.sum(0), inputs, seed, create_graph=True)
        del output
        with torch.no_grad():
            weight.mul_(0.9)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(gradient.square().sum(), seed)

    assert_same(build_blocks, loop, "host", tmp_path)


def _fills_on_the_device(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return what is copied to where a device's room was made for it, from now on."""
    filled: list[Tensor] = []
    fill = TensorIo.fill

    def counted(self: TensorIo, room: Opening, tensor: Tensor, spec: TensorSpec) -> None:
        if room.tier == 0:
            filled.append(tensor)
        fill(self, room, tensor, spec)

    monkeypatch.setattr(TensorIo, "fill", counted)
    return filled


def test_gradients_come_to_a_device_without_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (optimizer,) = build_blocks()
    with offload(model, optimizer, config_of("device", tmp_path)) as run:
        for _ in range(3):  # everything is measured
            loss_of(model, *batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
        filled = _fills_on_the_device(monkeypatch)
        loss_of(model, *batch()).backward()
        assert any("device" in run.store.where(key) for key in run.store if key.startswith("grad/"))
    assert not filled


class _InArray(torch.autograd.Function):
    """Has its gradients in an array of numpy's, the same one in every pass."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, array: np.ndarray) -> Tensor:
        """Return the sum."""
        ctx.array = array  # type: ignore[attr-defined]
        return x.sum()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        """Return what the array has afterwards."""
        array: np.ndarray = ctx.array  # type: ignore[attr-defined]
        array[...] = grads[0].item() * np.arange(array.size, dtype=np.float32)
        return torch.from_numpy(array), None


@every_layout
@pytest.mark.parametrize("is_there_before", [False, True])
def test_a_gradient_in_memory_of_somebody_else_stays_in_it(
    layout: str, is_there_before: bool, tmp_path: Path
) -> None:
    """An array of numpy's refers to it, which nobody can see."""
    if is_on_accelerator:
        pytest.skip("numpy's memory is the host's")
    memory = np.zeros(1024 + 16, dtype=np.float32)
    begin = -memory.ctypes.data % 64 // 4  # as PyTorch's own memory
    array = memory[begin : begin + 1024]

    def build() -> tuple[nn.Module, Sequence[torch.optim.Optimizer]]:
        model, (optimizer,) = build_blocks()
        array[...] = 1
        extra = nn.Parameter(torch.ones(1024))
        extra.grad = torch.from_numpy(array) if is_there_before else None
        model.register_parameter("extra", extra)
        optimizer.add_param_group({"params": [extra]})
        return model, [optimizer]

    def loop(trial: Trial) -> None:
        extra = trial.model.get_parameter("extra")
        for _ in range(4):
            made: Tensor = _InArray.apply(extra, array)  # type: ignore[no-untyped-call]
            (loss_of(trial.model, *batch()) + made).backward()
            array[::2] *= 0.5
            trial.log(extra.grad)
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build, loop, layout, tmp_path)
