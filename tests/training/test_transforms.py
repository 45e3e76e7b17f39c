"""``torch.func`` transforms, forward-mode derivatives and modes around an offloaded model: the same bits."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, func, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.training.leases import leased_bytes
from tests.training.twins import assert_equal_lists, config_of, every_layout, same, with_device
from tierstore.errors import UsageError
from tierstore.training import Offload, offload

WIDTH = 64
Apply = Callable[[nn.Module, Tensor], Any]


class Numbers(nn.Module):
    """Computes with numbers, which transforms wrap as they wrap tensors."""

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * 0.7 + 1).mul_(1.3)


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = (each for _ in range(4) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), Numbers()))
    return nn.Sequential(*layers)


class Scaled(nn.Module):
    """Computes with parameters as they are, its own and its child's: graphs save those."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sin(inputs * self.scale @ self.child.weight)


def build_scaled() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Scaled() for _ in range(4)))


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def ones_like(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.ones(value.shape) for name, value in values.items()}


def loss_of(model: nn.Module, inputs: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return func.functional_call(model, parameters, (inputs,)).sum()  # type: ignore[no-any-return]

    return loss


def total(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda inputs: model(inputs).sum()


def few(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda inputs: model(inputs)[..., :3]


def backward(model: nn.Module, inputs: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    loss = model(inputs).sum()
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def dual_inputs(model: nn.Module, inputs: Tensor) -> object:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(model(forward_ad.make_dual(inputs, inputs))))


def dual_parameters(model: nn.Module, inputs: Tensor) -> object:
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(value, torch.ones(value.shape))
            for name, value in model.named_parameters()
        }
        return tuple(forward_ad.unpack_dual(func.functional_call(model, duals, (inputs,))))


def without_hooks(model: nn.Module, inputs: Tensor) -> object:
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        return backward(model, inputs)


def each_sample(model: nn.Module, inputs: Tensor) -> object:
    def of_one(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return func.functional_call(model, parameters, (sample,)).sum()  # type: ignore[no-any-return]

    return func.vmap(func.grad(of_one), (None, 0))(parameters_of(model), inputs)


def two_models(model: nn.Module, inputs: Tensor) -> object:
    def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return func.functional_call(model, (parameters, buffers), (inputs,))  # type: ignore[no-any-return]

    return func.vmap(call)(*func.stack_module_state([model, model]))


TRANSFORMS: dict[str, Apply] = {
    "grad": lambda m, x: func.grad(loss_of(m, x))(parameters_of(m)),
    "grad of inputs": lambda m, x: func.grad(total(m))(x),
    "vjp": lambda m, x: func.vjp(m, x)[1](torch.ones(x.shape)),
    "jvp": lambda m, x: func.jvp(m, (x,), (x,)),
    "jvp of parameters": lambda m, x: func.jvp(
        loss_of(m, x), (parameters_of(m),), (ones_like(parameters_of(m)),)
    ),
    "jacrev": lambda m, x: func.jacrev(few(m))(x[0]),
    "jacfwd": lambda m, x: func.jacfwd(few(m))(x[0]),
    "hessian": lambda m, x: func.hessian(total(m))(x[0]),
    "vmap": lambda m, x: func.vmap(m)(x),
    "vmap of grad": each_sample,
    "vmap of grad of inputs": lambda m, x: func.vmap(func.grad(total(m)))(x),
    "vmap of parameters": two_models,
    "batched gradients": lambda m, x: torch.autograd.functional.jacobian(few(m), x[0], vectorize=True),
    "jvp of grad": lambda m, x: func.jvp(
        func.grad(loss_of(m, x)), (parameters_of(m),), (ones_like(parameters_of(m)),)
    ),
    "jacobian": lambda m, x: torch.autograd.functional.jacobian(few(m), x),
    "dual inputs": dual_inputs,
    "dual parameters": dual_parameters,
    "without hooks": without_hooks,
}


def reverse_over_forward(model: nn.Module, inputs: Tensor) -> object:
    model.zero_grad()
    with forward_ad.dual_level():
        made, slope = forward_ad.unpack_dual(model(forward_ad.make_dual(inputs, inputs.cos())))
        (made.sum() + slope.square().sum()).backward()
    return [slope, *(each.grad for each in model.parameters())]


def build_normed() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*layers)


ACTIVATIONS: dict[str, dict[str, object]] = {
    "swapped": {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": True}]}},
    "recomputed": {"recompute_config": {"recompute": True}},
    "operators recomputed": {"recompute_config": {"select_recompute": [r"aten\..*"]}},
}
FORWARDS: dict[str, Apply] = {
    **{name: apply for name, apply in TRANSFORMS.items() if name.startswith(("jvp", "jac", "hess", "dual"))},
    "reverse over forward": reverse_over_forward,
}


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.filterwarnings("ignore")
def test_derivatives_in_forward_mode_through_activations_that_leave_have_the_same_bits(
    name: str, activations: str, tmp_path: Path
) -> None:
    """Formulas of derivatives compute in another order where somebody's dispatch mode is on."""
    inputs = torch.rand(32, WIDTH)
    plain, ours = build_normed(), build_normed()
    expected = tensors_of(FORWARDS[name](plain, inputs))
    document = {"offload_config": config_of("host", tmp_path), **ACTIVATIONS[activations]}
    with offload(ours, None, document, layers="") as run:
        assert_equal_lists(expected, tensors_of(FORWARDS[name](ours, inputs)))
        assert_equal_lists(backward(plain, inputs), backward(ours, inputs))
        run.store.check()


class Slope(nn.Module):
    """A layer that computes a derivative in forward mode, by whatever means, in its own forward."""

    def __init__(self, apply: Apply) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())
        self.apply_inside = apply

    def forward(self, inputs: Tensor) -> Tensor:
        value, slope = cast("tuple[Tensor, Tensor]", self.apply_inside(self.inner, inputs))
        return value + slope


def build_sloped(apply: Apply) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Slope(apply), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.filterwarnings("ignore")
def test_forward_mode_inside_a_module_is_the_same_or_refused_by_name(
    activations: str, tmp_path: Path
) -> None:
    inputs = torch.rand(32, WIDTH)
    document = {"offload_config": config_of("host", tmp_path), **ACTIVATIONS[activations]}
    plain, ours = build_sloped(TRANSFORMS["jvp"]), build_sloped(TRANSFORMS["jvp"])
    expected = backward(plain, inputs)
    with offload(ours, None, document, layers=""):
        assert_equal_lists(expected, backward(ours, inputs))
    plain, ours = build_sloped(dual_inputs), build_sloped(dual_inputs)
    expected = backward(plain, inputs)
    with offload(ours, None, document, layers="") as run:
        if activations == "recomputed":  # no mode sees its operators
            assert_equal_lists(expected, backward(ours, inputs))
        else:
            with pytest.raises(UsageError, match=r"forward_ad\.dual_level"):
                backward(ours, inputs)
        run.store.check()


def tensors_of(result: object) -> list[Tensor | None]:
    return [each.detach().clone() for each in tree_leaves(result) if isinstance(each, Tensor)]


@every_layout
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.filterwarnings("ignore")
def test_a_transform_gives_the_same_bits_and_leaks_no_lease(name: str, layout: str, tmp_path: Path) -> None:
    inputs = torch.ones(3, WIDTH)
    plain, ours = build(), build()
    expected = tensors_of(TRANSFORMS[name](plain, inputs))
    with offload(ours, None, config_of(layout, tmp_path, with_device(layout, "2MB"))) as run:
        ours(inputs)
        found = tensors_of(TRANSFORMS[name](ours, inputs))
        assert_equal_lists(expected, found)
        assert_equal_lists(backward(plain, inputs), backward(ours, inputs))
        assert_nothing_is_leased(run, ours, inputs)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert same(a, b)


@every_layout
@pytest.mark.parametrize("name", ["grad of inputs", "vjp", "jacrev", "hessian", "without hooks"])
@pytest.mark.filterwarnings("ignore")
def test_a_parameter_that_a_graph_saves_itself_keeps_its_bytes(
    name: str, layout: str, tmp_path: Path
) -> None:
    inputs = torch.ones(3, WIDTH)
    plain, ours = build_scaled(), build_scaled()
    for model in (plain, ours):
        next(model.parameters()).requires_grad = False
    expected = tensors_of(TRANSFORMS[name](plain, inputs))
    with offload(ours, None, config_of(layout, tmp_path, with_device(layout, "2MB"))) as run:
        assert_equal_lists(expected, tensors_of(TRANSFORMS[name](ours, inputs)))
        assert_nothing_is_leased(run, ours, inputs)
        assert_equal_lists(expected, tensors_of(TRANSFORMS[name](ours, inputs)))
        assert_equal_lists(backward(plain, inputs), backward(ours, inputs))


@every_layout
def test_a_parameter_that_a_graph_saved_itself_is_written_and_read_meanwhile(
    layout: str, tmp_path: Path
) -> None:
    inputs = torch.ones(3, WIDTH)

    def passes(model: nn.Module) -> list[Tensor | None]:
        first, second = model.parameters(), model.parameters()
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            loss = model(inputs).sum()
        noted = [loss.detach(), *(each.detach().clone() for each in first)]
        loss.backward(retain_graph=True)
        with torch.no_grad():
            for each in second:
                each.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return [*noted, *backward(model, inputs)]

    plain, ours = build_scaled(), build_scaled()
    expected = passes(plain)
    with offload(ours, None, config_of(layout, tmp_path, with_device(layout, "2MB"))) as run:
        assert_equal_lists(expected, passes(ours))
        assert_nothing_is_leased(run, ours, inputs)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert same(a, b)


@every_layout
@pytest.mark.parametrize("is_before", [True, False])
def test_a_node_that_outlives_the_graphs_keeps_no_bytes(is_before: bool, layout: str, tmp_path: Path) -> None:
    inputs = torch.ones(3, WIDTH)
    ours = build_scaled()

    def kept() -> list[object]:
        return [torch.autograd.graph.get_gradient_edge(each) for each in ours.parameters()]

    nodes = kept() if is_before else []
    with offload(ours, None, config_of(layout, tmp_path, with_device(layout, "2MB"))) as run:
        nodes = nodes or kept()
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            loss = ours(inputs).sum()
        loss.backward()
        del loss
        assert_nothing_is_leased(run, ours, inputs)
    assert nodes


def trace(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(module, torch.ones(3, WIDTH))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.then = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.then.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sin(self.then(self.first(inputs)))


def frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)


# What refers to parameters in C++ as long as it lives: each makes one child of a model.
HOLDERS: dict[str, Callable[[], nn.Module]] = {
    "traced": lambda: trace(nn.Linear(WIDTH, WIDTH)),
    "traced, of one weight": lambda: trace(Tied()),
    "traced, frozen": lambda: trace(nn.Sequential(frozen(), nn.Linear(WIDTH, WIDTH))),
    "traced around traced": lambda: trace(nn.Sequential(trace(Scaled()), nn.Linear(WIDTH, WIDTH))),
}


@every_layout
@pytest.mark.parametrize("is_abandoned", [False, True])
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_refers_to_parameters_in_cpp_keeps_no_bytes(
    holder: str, is_abandoned: bool, layout: str, tmp_path: Path
) -> None:
    inputs = torch.ones(3, WIDTH)

    def passes(model: nn.Module, check: Callable[[], None]) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        model.zero_grad()
        for _ in range(3):
            with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
                loss = model(inputs).sum()
                if is_abandoned:  # the graph goes, and nothing was derived
                    del loss
                    check()
                    loss = model(inputs).sum()
                loss.backward()
            found.append(loss.detach())
            del loss
            check()
        return [*found, *(each.grad.clone() for each in model.parameters() if each.grad is not None)]

    torch.manual_seed(0)
    plain = nn.Sequential(*(HOLDERS[holder]() for _ in range(3)))
    torch.manual_seed(0)
    ours = nn.Sequential(*(HOLDERS[holder]() for _ in range(3)))
    expected = passes(plain, lambda: None)
    with offload(ours, None, config_of(layout, tmp_path, with_device(layout, "2MB"))) as run:
        assert_equal_lists(expected, passes(ours, lambda: assert_nothing_is_leased(run, ours, inputs)))


@every_layout
def test_parameters_that_a_graph_of_before_had_saved_and_a_new_one_saves(layout: str, tmp_path: Path) -> None:
    """``weight_norm`` makes the weight when it is called, in a graph that the first forward replaces."""
    inputs = torch.ones(3, WIDTH)

    def build_normed() -> nn.Module:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return nn.Sequential(*(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)))

    def passes(model: nn.Module) -> list[Tensor | None]:
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            return backward(model, inputs) + backward(model, inputs)

    plain, ours = build_normed(), build_normed()
    expected = passes(plain)
    with offload(ours, None, config_of(layout, tmp_path, with_device(layout, "2MB"))):
        assert_equal_lists(expected, passes(ours))


@every_layout
def test_a_graph_that_saved_parameters_themselves_outlives_the_run(layout: str, tmp_path: Path) -> None:
    inputs = torch.ones(3, WIDTH)
    plain, ours = build_scaled(), build_scaled()
    expected = backward(plain, inputs)
    run = offload(ours, None, config_of(layout, tmp_path, with_device(layout, "2MB")))
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        loss = ours(inputs).sum()
    run.close()
    loss.backward()
    assert_equal_lists(expected, [loss.detach(), *(p.grad for p in ours.parameters() if p.grad is not None)])


def assert_nothing_is_leased(run: Offload, model: nn.Module, inputs: Tensor) -> None:
    with torch.no_grad():
        model(inputs)  # sweeps
    assert leased_bytes(run) == 0
    run.store.check()


# --- modes --------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Notes every operation that a dispatch mode of the user's is shown."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        del types
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Notes every function that a function mode of the user's is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        del types
        self.names.append(getattr(fn, "__name__", str(fn)))
        return fn(*args, **(kwargs or {}))


CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "default device": lambda: torch.device("meta"),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "dispatch mode": Seen,
    "function mode": Called,
}


@every_layout
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_training_inside_a_context(name: str, layout: str, tmp_path: Path) -> None:
    inputs = torch.ones(3, WIDTH)
    plain, ours = build(), build()
    with CONTEXTS[name]():
        expected = backward(plain, inputs)
    with offload(ours, None, config_of(layout, tmp_path, with_device(layout, "2MB"))):
        with CONTEXTS[name]():
            found = backward(ours, inputs)
        assert_equal_lists(expected, found)


@every_layout
def test_an_evaluation_after_steps_that_no_optimizer_ends(layout: str, tmp_path: Path) -> None:
    inputs = torch.ones(3, WIDTH)
    plain, ours = build(), build()
    with offload(ours, None, config_of(layout, tmp_path, with_device(layout, "2MB"))):
        for _ in range(3):
            assert_equal_lists(backward(plain, inputs), backward(ours, inputs))
            with torch.inference_mode():
                found = ours(inputs)
            assert same(torch.zeros(1), -torch.zeros(1).neg())  # PyTorch looks for modes, and finds none
            assert same(plain(inputs), found)
