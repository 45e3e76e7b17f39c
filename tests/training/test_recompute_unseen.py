"""Changes that PyTorch does not count: by collectives, of running statistics, in memory that others fill."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tierstore.training import recompute

DIM = 8


@pytest.fixture(scope="module")
def _double_in_place() -> Iterator[None]:
    """A collective that changes its argument and does not say so, as all_reduce does."""
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("tierstore_double(Tensor x) -> ()")

    def double(x: Tensor) -> None:
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(x):
            x.mul_(2)

    library.impl("tierstore_double", double, "CPU")
    yield
    library._destroy()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        del ctx
        torch.ops.c10d.tierstore_double(x)
        return x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        del ctx
        return 2 * gradient


class _Reduced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w2 = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + torch.sin(_Doubled.apply(self.w2(x)))  # type: ignore[no-untyped-call]
        return output


class _Filled(nn.Module):
    """A leaf whose output is written by somebody whom PyTorch does not see."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.empty(x.shape)
        mask.numpy()[:] = 3.0
        return x * mask


class _Cell(nn.Module):
    """Recurrent cells change pieces of their gates in place."""

    def __init__(self, kind: type[nn.LSTMCell | nn.GRUCell]) -> None:
        super().__init__()
        self.w1, self.cell = nn.Linear(DIM, DIM), kind(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        first = self.cell(torch.tanh(self.w1(x)))
        state = self.cell(2 * x, first)
        output: Tensor = torch.sigmoid(state[0]) * state[1] if isinstance(state, tuple) else state
        return x + output


class _Pieces(nn.Module):
    """Changes pieces of one storage, or the whole of it, before, between and after it reads them."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, 2 * DIM)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        whole = self.w1(x)
        first, second = whole.unsafe_chunk(2, -1)
        early = torch.sigmoid(first if self.change != "before" else first.sigmoid_())
        if self.change == "between":
            first.mul_(2)
        elif self.change == "whole":
            with torch.no_grad():
                whole.mul_(2)
        output: Tensor = early * torch.sigmoid(first) * (second * 3).tanh_()
        if self.change == "after":
            second.mul_(2)
        return output


def _gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    model(x).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.usefixtures("_double_in_place")
@pytest.mark.parametrize(
    "config",
    [
        {"select_recompute": ["w2"]},
        {"recompute": True},
        {"recompute": True, "select_recompute_exclude": ["aten.mm"]},
    ],
)
def test_what_a_collective_changed_is_not_taken_for_what_was_there(config: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Reduced() for _ in range(3)))
    plain = _gradients(model)
    with recompute(model, config):
        assert all(map(torch.equal, plain, _gradients(model)))


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "before", "between", "whole", "after"])
@pytest.mark.parametrize(
    "config",
    [
        {"select_recompute": [r"aten\..*"]},
        {"select_recompute": ["w1", "cell", "aten.mul"]},
        {"select_recompute": ["aten.sigmoid", "aten.tanh", "aten.addmm"]},
        {"recompute": True},
        {"recompute": True, "select_recompute_exclude": [r"aten\..*"]},
        {"recompute": True, "select_recompute_exclude": ["aten.addmm", "aten.sigmoid"]},
    ],
    ids=str,
)
def test_pieces_of_one_storage_are_what_they_were(layer: str, config: dict[str, object]) -> None:
    cells: dict[str, type[nn.LSTMCell | nn.GRUCell]] = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell}
    torch.manual_seed(0)
    model = nn.Sequential(*(_Cell(cells[layer]) if layer in cells else _Pieces(layer) for _ in range(3)))
    plain = _gradients(model)
    with recompute(model, config) as run:
        assert all(map(torch.equal, plain, _gradients(model)))
    assert run.stats().replaced + run.stats().repetitions > 0


def test_statistics_are_those_of_the_forward_that_read_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)) for _ in range(3)))
    plain = copy.deepcopy(model)
    found = []
    for each in (plain, model):
        with recompute(each, {"select_recompute": [r"1"]} if each is model else {}):
            x = torch.randn(16, DIM, generator=torch.Generator().manual_seed(2))
            each.eval()
            evaluated = each(x)
            each.train()
            each(100 * x)
            evaluated.sum().backward()
        found.append([p.grad for p in each.parameters()])
    for a, b in zip(*found, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_memory_that_others_fill_is_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), _Filled()) for _ in range(3)))
    plain = _gradients(model)
    with recompute(model, {"select_recompute": [r"1"]}):
        assert all(map(torch.equal, plain, _gradients(model)))


class _Leaking(nn.Module):
    """Gives away what an operator returned, to be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.w1(x)
        return h, torch.sin(2 * h)


class _Changer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Leaking() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h, x = layer(x)
            h.add_(1)
        return x


def test_what_a_layer_kept_and_others_changed_is_made_again() -> None:
    torch.manual_seed(0)
    model = _Changer()
    plain = _gradients(model)
    with recompute(model, {"recompute": True, "select_recompute_exclude": ["aten.addmm"]}, layers="layers"):
        assert all(map(torch.equal, plain, _gradients(model)))


def test_what_a_retained_graph_keeps_is_not_made_again() -> None:
    ran: list[object] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
            ran.append(func)
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU()) for _ in range(2)))
    with recompute(model, {"recompute": True, "select_recompute_exclude": ["aten.addmm"]}) as run, Count():
        loss = model(torch.randn(4, DIM)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert run.stats().repetitions == 4
    assert ran.count(torch.ops.aten.addmm.default) == 2


@pytest.mark.parametrize("config", [{"recompute": True}, {"select_recompute": ["0"]}])
def test_an_interrupt_that_ends_the_context_leaves_nothing_in_force(config: dict[str, object]) -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), Interrupted()) for _ in range(2)))
    with pytest.raises(KeyboardInterrupt), recompute(model, config):
        model(torch.randn(2, DIM))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # noqa: FBT003
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_conflicts_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2)))
    document = {"recompute_config": {"recompute": [99]}, "swap_config": {"swap": True}}
    with caplog.at_level(logging.WARNING, "tierstore"), recompute(model, document):
        pass
    assert any("99" in record.getMessage() for record in caplog.records)
