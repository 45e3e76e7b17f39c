"""Operators are seen where nothing can see that somebody looks: no kernel, no answer and no type changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.twins import same
from tierstore.training.pytorch import operator_observers
from tierstore.training.pytorch.own_work import ordinary_mode

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),  # what forward-mode derivatives import
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


class Seen:
    """Keeps how many bytes of results it was told of."""

    def __init__(self) -> None:
        self.is_over = False
        self.is_blind = False
        self.results: list[object] = []
        self.inner: list[object] = []

    def see(self, given: Sequence[object], result: object) -> None:
        del given
        self.results.append(result)

    def see_within(self, given: Sequence[object], result: object) -> None:
        del given
        self.inner.append(result)


class Counted:
    """Is told of operators, and keeps nothing."""

    is_over = False
    is_blind = False
    number = 0

    def see(self, given: Sequence[object], result: object) -> None:
        del given, result
        self.number += 1

    def see_within(self, given: Sequence[object], result: object) -> None:
        del given, result


@pytest.fixture
def seen() -> Iterator[Seen]:
    observer = Seen()
    operator_observers.observe(observer)
    yield observer
    operator_observers.ignore(observer)


class Made(Tensor):
    """A subclass that leaves it to PyTorch how one is made."""


class Doubled(torch.autograd.Function):
    """A function of the user's that transforms may go through."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ANN401
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        del ctx
        return gradient * 2


def trained(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    module.zero_grad()
    output = module(*inputs)
    output.square().sum().backward()
    return [output.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def encoder(*, is_fast: bool) -> Tensor:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with torch.inference_mode(is_fast), torch.no_grad():
        output: Tensor = layer(torch.randn(3, 5, 16))
        return output


def dual() -> list[Tensor]:
    model = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 5))
    with forward_ad.dual_level():
        return list(forward_ad.unpack_dual(model(forward_ad.make_dual(torch.randn(3, 5), torch.randn(3, 5)))))


def samples() -> Tensor:
    model = nn.Linear(5, 5)
    derivative = func.grad(lambda x: Doubled.apply(model(x)).square().sum())  # type: ignore[no-untyped-call]
    found: Tensor = func.vmap(derivative)(torch.randn(3, 5))
    return found


def linear() -> list[Tensor]:
    return trained(nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)), torch.randn(3, 5))


def convolution() -> list[Tensor]:
    return trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 3, 8, 8))


def branches() -> list[Tensor]:
    """Return gradients that flow together in several places."""
    x, y = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    h = x * y
    (h.sin() + h.cos() + h.exp() * y).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    return [x.grad, y.grad]


PROGRAMS: dict[str, Callable[[], object]] = {
    "training": linear,
    "convolution": convolution,
    "recurrent": lambda: nn.GRU(5, 5)(torch.randn(4, 2, 5)),
    "transformer in inference mode": lambda: encoder(is_fast=True),
    "transformer without gradients": lambda: encoder(is_fast=False),
    "forward-mode derivatives": dual,
    "each sample": samples,
    "hessian": lambda: func.hessian(lambda x: (x.sin() * x).sum())(torch.randn(4)),
    "gradients that flow together": branches,
    "a number in a tensor's place": lambda: [
        torch.take_along_dim(torch.randn(5, 5), torch.randint(5, (5, 5)), 1),
        torch.det(torch.randn(5, 5)),
        torch.ldexp(torch.randn(5), torch.arange(5)),
        torch.randn(5) * 0.5 + 1,
        torch.ones(3, dtype=torch.int32) * 2.5,
    ],
    "an object of a subclass": lambda: Made(2, 3).zero_() + 1,
    "an object of a subclass from numbers": lambda: Made([1.0, 2.0]) + 1,
    "a parameter": lambda: nn.Parameter(torch.ones(3)),
    "another class": lambda: torch.ones(3).as_subclass(Made),
    "numbers": lambda: torch.tensor([1.0, 2.0]) + 1,
    "sparse": lambda: torch.eye(4).to_sparse() @ torch.ones(4, 1),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).to_padded_tensor(0.0),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16)(nn.Linear(5, 5))(torch.randn(3, 5)),
}


def leaves(value: object) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(value) if isinstance(each, Tensor)]


def names_of_kernels(program: Callable[[], object]) -> tuple[list[str], list[Tensor]]:
    """Return the kernels that a program runs, in order, and what it returns."""
    torch.manual_seed(0)
    with torch.profiler.profile() as profile:
        found = leaves(program())
    return [event.name for event in profile.events() if event.name.startswith("aten::")], found


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_kernels_run_and_return_the_same_while_somebody_looks(name: str) -> None:
    names_of_kernels(PROGRAMS[name])  # what is made once is made
    expected_names, expected = names_of_kernels(PROGRAMS[name])
    observer = Counted()
    operator_observers.observe(observer)
    try:
        found_names, found = names_of_kernels(PROGRAMS[name])
    finally:
        operator_observers.ignore(observer)
    assert observer.number > 0
    assert found_names == expected_names
    assert [type(each) for each in found] == [type(each) for each in expected]
    assert all(map(same, expected, found))


class Listing(TorchDispatchMode):
    """A user's mode: notes what it sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        operator: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "object of a subclass" not in name])
def test_a_users_mode_sees_the_same_operators_while_somebody_looks(name: str) -> None:
    listed: list[list[str]] = []
    for observers in ([], [Counted()]):
        torch.manual_seed(0)
        for observer in observers:
            operator_observers.observe(observer)
        try:
            with Listing() as mode:
                PROGRAMS[name]()
        finally:
            for observer in observers:
                operator_observers.ignore(observer)
        listed.append(mode.names)
    assert listed[0] == listed[1]


def test_nothing_is_on_the_stacks_of_modes(seen: Seen) -> None:
    del seen
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    assert not torch.overrides.has_torch_function((torch.ones(1),))


def test_what_an_operator_makes_is_seen_also_in_backward_and_inside_of_others(seen: Seen) -> None:
    x = torch.ones(5, requires_grad=True)
    y = nn.functional.dropout(x.exp(), 0.5)
    before = len(seen.results)
    y.sum().backward()
    assert len(seen.results) > before
    seen.inner.clear()
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.ones(7), torch.ones(7)).exp()
    assert any(each.shape == (7,) for each in leaves(seen.inner)), "the derivative is made inside"


def test_own_work_is_not_seen(seen: Seen) -> None:
    with ordinary_mode(), ordinary_mode():
        torch.ones(5)
    assert not seen.results
    torch.ones(5)
    assert seen.results


def test_each_thread_is_seen_by_its_own(seen: Seen) -> None:
    thread = threading.Thread(target=lambda: torch.ones(5))
    thread.start()
    thread.join()
    assert not seen.results


def test_whoever_is_over_is_told_nothing_more_wherever_it_ended(seen: Seen) -> None:
    seen.is_over = True
    thread = threading.Thread(target=operator_observers.ignore, args=(seen,))
    thread.start()
    thread.join()
    torch.ones(5)
    torch.ones(5)
    assert not seen.results
    assert not operator_observers.begin_unseen(), "nothing of it is in this thread's dispatch"


def test_nothing_is_seen_as_soon_as_a_program_compiles_and_it_compiles_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch._dynamo.reset()
    graphs: list[object] = []

    def backend(graph: Callable[..., Any], inputs: object) -> Callable[..., Any]:
        graphs.append(inputs)
        return graph

    compiled = torch.compile(lambda x: (x.sin() + 1).sum(), backend=backend)
    x = torch.randn(5, requires_grad=True)
    seen = Seen()
    operator_observers.observe(seen)
    with caplog.at_level("WARNING", "tierstore"):
        compiled(x).backward()
    seen.results.clear()
    for _ in range(2):
        torch.ones(5)
        compiled(x).backward()
        operator_observers.observe(seen)
    operator_observers.ignore(seen)
    compiled(x).backward()
    assert not seen.results
    assert len(graphs) == 1
    assert "are compiled" in caplog.text
    assert x.grad is not None
    assert same(x.grad, 4 * x.detach().cos())


@pytest.mark.parametrize("number", [True, 3, 0.5, 1j])
def test_a_number_in_the_place_of_a_tensor_that_nothing_else_takes_is_a_tensor(
    number: complex, seen: Seen
) -> None:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    made = operator_observers._run(
        torch.ops.aten.clone.default, keys, number
    )  # as kernels of accelerators call it
    assert isinstance(made, Tensor)
    assert seen.results[0] is made
    assert made.dtype == {bool: torch.bool, int: torch.int64, float: torch.float64}.get(
        type(number), torch.complex128
    )
    assert made.item() == number
