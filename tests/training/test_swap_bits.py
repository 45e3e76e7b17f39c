"""Swapped or not: losses and gradients are the same bits, whatever a program does with its graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.training.swap_models import (
    DIM,
    Layer,
    Llama,
    assert_same_bits,
    config,
    every_store,
    inputs,
    operators,
    swapping,
    train,
    whole_layers,
)
from tierstore.errors import CapacityError
from tierstore.training import swap
from tierstore.training.activations.swapping.activation_store import ActivationStore, OffloadedTensor

MARKS: dict[str, Callable[[int], dict[str, object]]] = {
    "layers": whole_layers,
    "two layers": lambda k: {"layer_swap": [{"backward_prefetch": k, "layers": [0, 2]}]},
    "modules": lambda k: operators("attention", "feed_forward", prefetch=k),
    "the default": lambda k: {"default_prefetch": k},
    "an operator of a module": lambda k: operators(r"feed_forward\.mul", prefetch=k),
    "an ATen operator": lambda k: operators(r"aten\.silu", "aten.mul.Tensor", prefetch=k),
    "everything": lambda k: {**whole_layers(k), **operators(".*", r".*\..*", prefetch=k)},
}


@every_store
@pytest.mark.parametrize("prefetch", [1, pytest.param(3, marks=pytest.mark.long), 50])
@pytest.mark.parametrize("marks", MARKS)
def test_the_bits_are_the_same_for_every_mark(tmp_path: Path, store: str, marks: str, prefetch: int) -> None:
    assert_same_bits(Llama, train, config(tmp_path, MARKS[marks](prefetch), store), least=4)


def _accumulated(model: nn.Module) -> list[Tensor]:
    return train(model, batches=4)


def _under_autocast(model: nn.Module) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return train(model)


def _several_in_flight(model: nn.Module) -> list[Tensor]:
    losses = [model(inputs(number)).square().mean() for number in range(3)]
    for loss in (losses[1], losses[2], losses[0]):
        loss.backward()
    return losses


def _retained(model: nn.Module) -> list[Tensor]:
    loss = model(inputs()).square().mean()
    for _ in range(3):
        loss.backward(retain_graph=True)
    return [loss]


def _double(model: nn.Module) -> list[Tensor]:
    x = inputs().requires_grad_()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    slope.square().sum().backward()
    return [slope, x.grad] if x.grad is not None else []


def _in_parts(model: nn.Module) -> list[Tensor]:
    scores = model(inputs())
    first, second = scores[..., 0].sum(), scores[..., 1].square().sum()
    first.backward(retain_graph=True)
    second.backward()
    return [first, second]


def _with_evaluation(model: nn.Module) -> list[Tensor]:
    losses = train(model, 1)
    with torch.no_grad():
        losses.append(model(inputs(5)))
    with torch.inference_mode():
        losses.append(model(inputs(6)).clone())
    return losses + train(model, 1)


def _gradient_inside_forward(model: nn.Module) -> list[Tensor]:
    """A layer's forward runs a backward pass of its own."""
    assert isinstance(model, Llama)
    inner: list[Tensor] = []

    def add_slope(module: nn.Module, args: object, output: Tensor) -> None:
        (slope,) = torch.autograd.grad(output.square().sum(), output, retain_graph=True)
        inner.append(slope)

    handle = model.layers[1].register_forward_hook(add_slope)
    losses = train(model)
    handle.remove()
    return losses + inner


class Penalised(nn.Module):
    """A layer whose output has the slope of a loss of its own in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        hidden = self.inner(x).exp()
        loss = (self.outer(hidden).sigmoid() * hidden.exp()).sum()
        (slope,) = torch.autograd.grad(loss, hidden, create_graph=True)
        result: Tensor = (hidden * slope).tanh()
        return result


@pytest.mark.parametrize("prefetch", [1, 50])
def test_what_a_backward_pass_inside_forward_saves_stays(tmp_path: Path, prefetch: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(Penalised(), Penalised())

    keep = ActivationStore.keep

    def kept(self: ActivationStore, tensor: Tensor, name: str) -> OffloadedTensor:
        assert torch._C._current_graph_task_id() == -1
        return keep(self, tensor, name)

    with mock.patch.object(ActivationStore, "keep", kept):
        assert_same_bits(build, train, config(tmp_path, whole_layers(prefetch)), least=10)
        with swapping(build(), config(tmp_path, whole_layers(prefetch))) as active:
            model = build()
            with swap(model, {"swap": True, **whole_layers(prefetch)}, store=active.store) as own:
                model(inputs())
                # In each layer the exponential twice, the sigmoid and the tangent: not the slope.
                assert own.stats().activations.kept == 2 * 4


def _checkpointed_by_the_user(model: nn.Module) -> list[Tensor]:
    loss: Tensor = checkpoint(model, inputs(), use_reentrant=False).square().mean()
    loss.backward()
    return [loss]


def _saved_on_cpu(model: nn.Module) -> list[Tensor]:
    with torch.autograd.graph.save_on_cpu():
        return train(model)


def _with_a_hook_on_a_gradient(model: nn.Module) -> list[Tensor]:
    x = inputs().requires_grad_()
    seen: list[Tensor] = []
    hidden = model(x)
    hidden.register_hook(lambda gradient: seen.append(gradient.clone()))
    hidden.sum().backward()
    return seen


def _with_a_slope_in_forward_mode(model: nn.Module) -> list[Tensor]:
    """A layer's forward computes derivatives that go along with it: some are zeros without bytes."""
    assert isinstance(model, Llama)

    def add_slope(module: nn.Module, args: object, output: Tensor) -> Tensor:
        assert isinstance(module, Layer)
        slope: Tensor = torch.func.jvp(module.feed_forward, (output,), (output.sin(),))[1]
        return output + slope

    handle = model.layers[1].register_forward_hook(add_slope)
    losses = train(model)
    handle.remove()
    return losses


USES = [
    _accumulated,
    _under_autocast,
    _several_in_flight,
    _retained,
    _in_parts,
    _with_evaluation,
    _gradient_inside_forward,
    _with_a_slope_in_forward_mode,
    _saved_on_cpu,
    _with_a_hook_on_a_gradient,
]


@every_store
@pytest.mark.parametrize("steps", USES, ids=lambda steps: steps.__name__.strip("_"))
@pytest.mark.parametrize("prefetch", [1, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # which PyTorch's own formulas use
def test_the_bits_are_the_same_for_every_use(
    tmp_path: Path, store: str, steps: Callable[[nn.Module], list[Tensor]], prefetch: int
) -> None:
    assert_same_bits(Llama, steps, config(tmp_path, whole_layers(prefetch), store), least=20)


@pytest.mark.parametrize("store", ["roomy", "short of host memory"])
@pytest.mark.parametrize("prefetch", [1, 50])
def test_the_bits_of_a_double_backward_are_the_same(tmp_path: Path, store: str, prefetch: int) -> None:
    assert_same_bits(Llama, _double, config(tmp_path, whole_layers(prefetch), store), least=20)


def test_a_double_backward_that_needs_more_than_the_device_has_says_so(tmp_path: Path) -> None:
    model = Llama()  # the graph of the gradient refers to what came back for it: that stays
    with (
        swapping(model, config(tmp_path, whole_layers(), "short of device memory")),
        pytest.raises(CapacityError, match=r"Raise max_device_memory \(.* for the store\)"),
    ):
        _double(model)


def test_a_model_that_is_recomputed_as_a_whole_swaps_nothing(tmp_path: Path) -> None:
    settings = config(tmp_path, whole_layers())
    assert_same_bits(Llama, _checkpointed_by_the_user, settings, least=0)
    model = Llama()
    with swapping(model, settings) as active:
        _checkpointed_by_the_user(model)
        assert active.stats().activations.kept == 0


# ---------------------------------------------------------------------- what models do


class Unusual(nn.Module):
    """A layer whose operators save views, repeated values, and one thing several times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.weight = nn.Parameter(torch.ones(DIM))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, 16, dim)``."""
        y = self.linear(x)
        first, second = y.chunk(2, dim=-1)
        third = y[:1].exp()  # a view of half of it
        small = y[0, 0].exp()  # of far less
        repeated = y.sum(-1, keepdim=True).expand_as(y)
        together = (first * second).repeat(1, 1, 2) * repeated * repeated.cos() * third * small
        turned = y.transpose(1, 2).square().transpose(1, 2)
        changed = (turned + together).mul_(2).relu_()
        scaled = changed * self.weight.square()
        spectrum = torch.fft.fft(scaled).conj()
        normed: Tensor = self.norm((spectrum * spectrum.conj().resolve_conj()).real.float())
        return x + normed * torch.where(normed > 0, normed.sigmoid(), normed.detach())


def _unusual() -> nn.Module:
    return nn.Sequential(*(Unusual() for _ in range(3)))


@every_store
@pytest.mark.parametrize("prefetch", [1, 7])
def test_views_repeated_values_and_changes_in_place_are_the_same_bits(
    tmp_path: Path, store: str, prefetch: int
) -> None:
    assert_same_bits(_unusual, train, config(tmp_path, whole_layers(prefetch), store), least=10)


def test_buffers_are_the_same_bits(tmp_path: Path) -> None:
    def buffers(model: nn.Module) -> list[Tensor]:
        return [*train(model), *model.buffers()]

    assert_same_bits(_unusual, buffers, config(tmp_path, whole_layers()), least=10)


class Pair(nn.Module):
    """Returns a tensor, a number, and a dict with another tensor."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> tuple[Tensor, int, dict[str, Tensor]]:
        """Transform."""
        y: Tensor = self.block(x)
        return y, 3, {"extra": y.tanh()}


class Mixed(nn.Module):
    """Layers that return more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair(nn.Linear(DIM, DIM)) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, object]:
        """Return nested results."""
        extras = []
        for layer in self.layers:
            x, number, more = layer(x)
            extras.append(more["extra"] * number)
        return {"x": x, "extras": extras, "name": "result", "nothing": None}


def test_outputs_that_are_no_tensors_pass(tmp_path: Path) -> None:
    def steps(model: nn.Module) -> list[Tensor]:
        found = model(inputs())
        loss: Tensor = found["x"].square().sum() + sum(each.sum() for each in found["extras"])
        loss.backward()
        return [loss]

    assert_same_bits(Mixed, steps, config(tmp_path, whole_layers()), least=3)


class Recursive(nn.Module):
    """Its forward runs itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor, times: int = 3) -> Tensor:
        """Transform, several times."""
        if times > 1:
            x = self(x, times - 1)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_model_that_runs_itself_makes_one_pass(tmp_path: Path, prefetch: int) -> None:
    settings = config(tmp_path, whole_layers(prefetch))
    assert_same_bits(Recursive, train, settings, least=9)
    with swapping(Recursive(), settings) as active:
        active.store.check()
        model = Recursive()
        with swap(model, settings, store=active.store) as own:
            train(model)
            assert own.stats().passes == 2
            assert own.stats().activations.kept == 2 * 9


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks at it
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_whole", [False, True], ids=["layers", "model"])
def test_compiled_modules_run_and_are_swapped(tmp_path: Path, backend: str, is_whole: bool) -> None:
    def steps(model: nn.Module) -> list[Tensor]:
        assert isinstance(model, Llama)
        for each in (model,) if is_whole else model.layers:
            each.compile(backend=backend)
        losses = train(model.eval())
        with torch.no_grad():
            return [*losses, model(inputs())]

    assert_same_bits(lambda: Llama(2), steps, config(tmp_path, whole_layers()), least=20)


# ---------------------------------------------------------------------- several at a time


def test_two_models_share_a_store(tmp_path: Path) -> None:
    first, second = Llama(), Llama()
    second.load_state_dict(first.state_dict())
    plain = Llama()
    plain.load_state_dict(first.state_dict())
    for model in (first, second, plain):
        model.eval()
    settings = config(tmp_path, whole_layers())
    with swapping(first, settings) as active, swap(second, settings, store=active.store):
        scores = second(first(inputs()) @ torch.ones(7, DIM))
        scores.square().mean().backward()
        assert len(active.store) == 0
        assert active.stats().activations.kept > 0
    expected = plain(plain(inputs()) @ torch.ones(7, DIM))
    expected.square().mean().backward()
    assert torch.equal(expected, scores)
    for a, b, c in zip(plain.parameters(), first.parameters(), second.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert c.grad is not None
        assert torch.allclose(a.grad, b.grad + c.grad)


def test_two_threads_train_at_a_time(tmp_path: Path) -> None:
    plain = [Llama().eval(), Llama().eval()]
    ours = [Llama().eval(), Llama().eval()]
    for a, b in zip(plain, ours, strict=True):
        b.load_state_dict(a.state_dict())
    expected = [train(model, 4) for model in plain]
    found: list[list[Tensor]] = [[], []]
    begin = threading.Barrier(2)

    def work(index: int) -> None:
        begin.wait()
        found[index] = train(ours[index], 4)

    settings = config(tmp_path, whole_layers(), "short of both")
    with swapping(ours[0], settings) as active, swap(ours[1], settings, store=active.store):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        active.stats()
        assert len(active.store) == 0
    for losses, others, one, other in zip(expected, found, plain, ours, strict=True):
        assert all(map(torch.equal, losses, others))
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)


def test_one_model_in_two_threads(tmp_path: Path) -> None:
    model = Llama().eval()
    expected = model(inputs()).square().mean()
    slopes = torch.autograd.grad(expected, list(model.parameters()))
    found: dict[int, tuple[Tensor, ...]] = {}
    begin = threading.Barrier(2)

    def work(index: int) -> None:
        begin.wait()
        found[index] = torch.autograd.grad(model(inputs()).square().mean(), list(model.parameters()))

    with swapping(model, config(tmp_path, whole_layers(), "short of both")):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index in range(2):
        assert all(map(torch.equal, slopes, found[index]))
