"""Selective checkpointing through the store: what is PyTorch's own, and that ``CPU_OFFLOAD`` offloads."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy

import tierstore as ts
from tests.training.twins import LATE_AND_OVERWRITTEN, assert_equal_lists
from tierstore.errors import UsageError
from tierstore.testing.memory import DeviceBudget
from tierstore.training import ActivationStore, create_selective_checkpoint_contexts

Contexts = Callable[[], tuple[Any, Any]]

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
DIM, BATCH = 64, 128  # an output has 32 KiB

OFFLOAD: Any = getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", "MUST_CPU_OFFLOAD")
PREFER_OFFLOAD: Any = getattr(CheckpointPolicy, "PREFER_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
every_policy = pytest.mark.parametrize(
    "policy", [OFFLOAD, PREFER_OFFLOAD, "MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"], ids=str
)
has_policies = pytest.mark.skipif(isinstance(OFFLOAD, str), reason="this PyTorch has no such policies")

STORES: dict[str, dict[str, Any]] = {
    "roomy": {"device": "emulated", "max_device_memory": "8MB", "offload_cpu_size": "8MB"},
    "short of device memory": {"device": "emulated", "max_device_memory": "70KB", "offload_cpu_size": "8MB"},
    "short of host memory": {"device": "emulated", "max_device_memory": "8MB", "offload_cpu_size": "70KB"},
    "no device": {"device": "cpu", "offload_cpu_size": "100KB"},
}


@pytest.fixture(params=STORES)
def activation_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ActivationStore]:
    """A activation store in a store; at its end nothing may be left in it."""
    options = STORES[request.param]
    late: dict[str, Any] = {"device_options": LATE_AND_OVERWRITTEN} if options["device"] == "emulated" else {}
    config = ts.StoreConfig.default(
        **options, **late, offload_disk_size="8MB", offload_path=str(tmp_path / "files")
    )
    with ts.Store(config) as store:
        found = ActivationStore(store)
        yield found
        gc.collect()
        found.sweep()
        store.check()
        assert len(store) == 0


def products(policy: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
    """Return a policy for products; everything else is recomputed."""

    def choose(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return policy if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

    return choose


def model() -> nn.ModuleList:
    """Return layers with dropout."""
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Dropout(0.1), nn.Linear(DIM, DIM)) for _ in range(3)
    )


def forward(layers: nn.ModuleList, context_fn: Contexts | None) -> Tensor:
    """Return a loss."""
    x = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(1))
    for layer in layers:
        if context_fn is None:
            x = layer(x)
        else:
            x = checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=context_fn)
    return x.square().mean()


def gradients(context_fn: Contexts | None, steps: int = 2) -> list[Tensor | None]:
    """Train, and return what has to be the same."""
    layers = model()
    torch.manual_seed(2)
    for _ in range(steps):
        forward(layers, context_fn).backward()
    return [parameter.grad for parameter in layers.parameters()]


def contexts(activation_store: ActivationStore | None, policy: CheckpointPolicy) -> Contexts:
    """Return what is passed to PyTorch's checkpoint."""
    return functools.partial(
        create_selective_checkpoint_contexts, products(policy), activation_store=activation_store
    )


@every_policy
def test_offloaded_outputs_give_the_same_bits(
    activation_store: ActivationStore, policy: CheckpointPolicy
) -> None:
    expected = gradients(None)
    found = gradients(contexts(activation_store, policy))
    assert_equal_lists(expected, found)
    assert activation_store.stats.kept == 2 * 3 * 2
    assert activation_store.stats.kept_bytes == 2 * 3 * 2 * BATCH * DIM * 4


@has_policies
def test_pytorch_itself_computes_them_again_and_we_do_not() -> None:
    counted: list[object] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
            counted.append(func)
            return func(*args, **(kwargs or {}))

    def products_run(context_fn: Contexts) -> int:
        counted.clear()
        with Count():
            forward(model(), context_fn).backward()
        return counted.count(aten.addmm.default)

    policy = products(OFFLOAD)
    config = ts.StoreConfig.default(
        device="emulated", max_device_memory="8MB", offload_cpu_size="8MB", offload_disk_size=0
    )
    assert products_run(functools.partial(checkpoint.create_selective_checkpoint_contexts, policy)) == 3 * 3
    with ts.Store(config) as store:
        own = functools.partial(
            create_selective_checkpoint_contexts, policy, activation_store=ActivationStore(store)
        )
        assert products_run(own) == 3 * 2


def test_device_memory_is_given_up_between_forward_and_backward(tmp_path: Path) -> None:
    config = ts.StoreConfig.default(
        device="emulated", max_device_memory="8MB", offload_cpu_size="8MB", offload_disk_size=0
    )
    output_bytes = BATCH * DIM * 4

    def live_bytes(context_fn: Contexts) -> int:
        layers = model()
        with DeviceBudget("1GB") as budget:
            loss = forward(layers, context_fn)
            found = budget.live_bytes
            loss.backward()
        return int(found)

    policy = products(OFFLOAD)
    saved = live_bytes(
        functools.partial(
            checkpoint.create_selective_checkpoint_contexts, products(CheckpointPolicy.MUST_SAVE)
        )
    )
    with ts.Store(config) as store:
        activation_store = ActivationStore(store)
        offloaded = live_bytes(
            functools.partial(create_selective_checkpoint_contexts, policy, activation_store=activation_store)
        )
        assert activation_store.stats.released == activation_store.stats.kept == 6
    # The outputs of layers are inputs of the next ones: those stay.
    assert saved - offloaded == 3 * output_bytes


def test_what_is_never_run_backward_leaves_nothing(activation_store: ActivationStore) -> None:
    context_fn = contexts(activation_store, OFFLOAD)
    layers = model()
    for _ in range(5):
        loss = forward(layers, context_fn)
        assert len(activation_store.store) > 0
        del loss
        gc.collect()
        activation_store.sweep()
        assert len(activation_store.store) == 0


def test_views_small_outputs_and_changed_inputs_stay(activation_store: ActivationStore) -> None:
    def run(x: Tensor) -> Tensor:
        y = x.t() * 1.0  # a view; then 32 KiB
        y.add_(1)
        return y.sum(0).sin().sum() + y.cos().sum()

    def everything(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return OFFLOAD if operator != aten.mul.Tensor else CheckpointPolicy.MUST_SAVE

    x = torch.randn(BATCH, DIM, requires_grad=True)
    context_fn = functools.partial(
        create_selective_checkpoint_contexts,
        everything,
        True,  # noqa: FBT003 - as PyTorch's own
        activation_store=activation_store,
    )
    checkpoint.checkpoint(run, x, use_reentrant=False, context_fn=context_fn).backward()
    assert activation_store.stats.kept == 1  # the cosine: all others are views, changed in place or small
    plain = x.detach().clone().requires_grad_()
    run(plain).backward()
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)


def test_an_output_that_is_changed_in_place_is_refused_as_pytorch_refuses_it(
    activation_store: ActivationStore,
) -> None:
    def run(x: Tensor) -> Tensor:
        y = x @ x.t()
        y.add_(1)
        return y.sin()

    x = torch.randn(BATCH, DIM, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        checkpoint.checkpoint(
            run, x, use_reentrant=False, context_fn=contexts(activation_store, OFFLOAD)
        ).sum().backward()


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_an_output_that_is_changed_by_its_pieces_is_refused_as_well(
    activation_store: ActivationStore, cell: type[nn.LSTMCell | nn.GRUCell]
) -> None:
    layer = cell(DIM, DIM)  # pieces of its gates are changed in place, and count versions for themselves
    x = torch.randn(BATCH // 4, DIM, requires_grad=True)
    state = checkpoint.checkpoint(
        layer, x, use_reentrant=False, context_fn=contexts(activation_store, OFFLOAD)
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (state[0] if isinstance(state, tuple) else state).sum().backward()


def test_outputs_on_another_device_stay(
    activation_store: ActivationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ts.Store, "device", torch.device("cpu", 1))
    assert_equal_lists(gradients(None), gradients(contexts(activation_store, OFFLOAD)))
    assert activation_store.stats.kept == 0


def test_a_policy_may_be_a_partial_function_and_wrappers_may_pass_it_on(
    activation_store: ActivationStore,
) -> None:
    def choose(
        policy: CheckpointPolicy, context: object, operator: object, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        return policy if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

    policy = functools.partial(choose, OFFLOAD)
    wrapped = nn.ModuleList(
        checkpoint_wrapper(
            layer,
            context_fn=functools.partial(
                create_selective_checkpoint_contexts, policy, activation_store=activation_store
            ),
        )
        for layer in model()
    )
    torch.manual_seed(2)
    for _ in range(2):
        forward(wrapped, None).backward()
    assert_equal_lists(gradients(None), [parameter.grad for parameter in wrapped.parameters()])
    assert activation_store.stats.kept == 2 * 3 * 2


def test_without_a_activation_store_offloading_is_refused_and_all_else_works() -> None:
    with pytest.raises(UsageError, match="activation_store=ActivationStore"):
        forward(model(), contexts(None, OFFLOAD))
    expected = gradients(None)
    for policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE):
        found = gradients(contexts(None, policy))
        assert all(
            a is not None and b is not None and torch.equal(a, b)
            for a, b in zip(expected, found, strict=True)
        )


def test_lists_and_bools_are_pytorchs_own() -> None:
    expected = gradients(None)
    for policy in (
        [aten.addmm.default],
        lambda context, operator, *args, **kwargs: operator == aten.addmm.default,
    ):
        found = gradients(functools.partial(create_selective_checkpoint_contexts, policy))
        assert all(
            a is not None and b is not None and torch.equal(a, b)
            for a, b in zip(expected, found, strict=True)
        )
    with pytest.raises(ValueError, match="OpOverload"):
        create_selective_checkpoint_contexts([aten.addmm])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        create_selective_checkpoint_contexts(7)  # type: ignore[arg-type]
