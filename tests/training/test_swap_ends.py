"""Nothing is left behind: of graphs that never run backward, of failures, of programs that swap no more."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from tests.training.swap_models import (
    DIM,
    Llama,
    Steps,
    config,
    every_store,
    inputs,
    operators,
    swapping,
    train,
    whole_layers,
)
from tierstore.errors import CapacityError, ConfigError, StoreClosed, UsageError
from tierstore.store import Store
from tierstore.testing.memory import DeviceBudget
from tierstore.training import Swap, SwapConfig, swap
from tierstore.training.activations.swapping.activation_store import ActivationStore
from tierstore.training.pytorch.saved_tensor_hooks import top_hooks


@pytest.fixture(autouse=True)
def _nothing_is_in_force_afterwards() -> Iterator[None]:
    yield
    assert top_hooks() is None
    assert _get_current_dispatch_mode() is None


def assert_empty(active: Swap) -> None:
    """Check that the store has nothing, after what is left over was done."""
    assert active.stats().activations.offloaded == 0
    assert len(active.store) == 0
    for tier in active.store.stats().tiers.values():
        assert tier.ready_bytes == 0


# ---------------------------------------------------------------------- graphs


def _never_backward(model: nn.Module) -> list[Tensor]:
    for number in range(5):
        model(inputs(number))
    return []


def _half_backward(model: nn.Module) -> list[Tensor]:
    """A branch that runs backward beside one that never does."""
    for number in range(2):
        scores = model(inputs(number))
        unused = model(scores @ torch.ones(7, DIM))
        scores.sum().backward()
        del unused, scores
    return []


def _retained(model: nn.Module) -> list[Tensor]:
    model(inputs()).sum().backward(retain_graph=True)
    return []


def _up_to_a_layer(model: nn.Module) -> list[Tensor]:
    hidden: list[Tensor] = []
    assert isinstance(model, Llama)
    handle = model.layers[2].register_forward_hook(lambda *args: hidden.append(args[-1]))
    loss = model(inputs()).sum()
    torch.autograd.grad(loss, hidden)
    handle.remove()
    return []


@every_store
@pytest.mark.parametrize(
    "steps",
    [train, _never_backward, _half_backward, _retained, _up_to_a_layer],
    ids=lambda each: each.__name__,
)
def test_every_use_of_a_graph_leaves_an_empty_store(tmp_path: Path, store: str, steps: Steps) -> None:
    model = Llama()
    with swapping(model, config(tmp_path, whole_layers(1), store)) as active:
        for _ in range(3):
            steps(model)
        assert active.stats().activations.kept > 0
        assert_empty(active)


@pytest.mark.parametrize("prefetch", [1, 50])
def test_live_device_bytes_come_back_to_the_start_over_many_steps(tmp_path: Path, prefetch: int) -> None:
    model = Llama()
    train(model, 1)  # gradients are there from now on
    with swapping(model, config(tmp_path, whole_layers(prefetch))) as active, DeviceBudget("64MB") as budget:
        after: list[int] = []
        for number in range(10):
            loss = model(inputs(number)).sum()
            unused = model(inputs(number))
            loss.backward()
            del loss, unused
            active.stats()
            after.append(budget.live_bytes)
        assert after == [after[0]] * len(after)
        assert after[0] == 0
        assert_empty(active)


@pytest.mark.parametrize("prefetch", [1, 50])
def test_a_backward_pass_leaves_no_device_bytes_without_another_call(tmp_path: Path, prefetch: int) -> None:
    model = Llama()
    train(model, 1)
    with swapping(model, config(tmp_path, whole_layers(prefetch))), DeviceBudget("64MB") as budget:
        loss = model(inputs()).sum()
        loss.backward()
        del loss
        assert budget.live_bytes == 0


def test_a_retained_graph_holds_no_device_bytes(tmp_path: Path) -> None:
    model = Llama()
    with swapping(model, config(tmp_path, operators(".*", r".*\..*", prefetch=1))) as active:
        loss = model(inputs()).sum()
        loss.backward(retain_graph=True)
        active.stats()
        assert len(active.store) > 20
        active.store.evict(*active.store, to="host").result()  # waits for what is under way
        assert active.stats().activations.released >= len(active.store) + active.stats().activations.brought
        assert active.store.stats().tiers["device"].charged_bytes == 0
        loss.backward()


def test_the_peak_of_device_bytes_falls_by_what_is_marked(tmp_path: Path) -> None:
    model, x = Llama(8), inputs(batch=8)

    def peak(marks: dict[str, object] | None) -> int:
        model.zero_grad()
        with DeviceBudget("64MB") as budget:
            if marks is None:
                model(x).square().mean()
            else:
                with swapping(model, config(tmp_path, marks)):
                    model(x).square().mean()
            return budget.peak_bytes

    plain, swapped = peak(None), peak(whole_layers(1))
    assert swapped < 0.4 * plain


# ---------------------------------------------------------------------- changes in place


class Changed(nn.Module):
    """Its activation is changed after it was saved."""

    def __init__(self, is_kept: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.is_kept = is_kept
        self.activation: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        y = self.linear(x).exp()  # saves its output
        z: Tensor = y.tanh()
        with torch.no_grad():
            y.add_(1)
        if self.is_kept:
            self.activation = y
        return z


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "forgotten"])
@pytest.mark.parametrize("prefetch", [1, 20])
def test_a_change_in_place_raises_what_pytorch_raises(tmp_path: Path, is_kept: bool, prefetch: int) -> None:
    model = nn.Sequential(Changed(is_kept), Changed(is_kept))
    with pytest.raises(RuntimeError) as plain:
        model(inputs()).sum().backward()
    with swapping(model, config(tmp_path, whole_layers(prefetch))) as active:
        loss = model(inputs()).sum()
        assert active.stats().activations.kept > 0
        with pytest.raises(RuntimeError) as ours:
            loss.backward()
        begin = (
            "one of the variables needed for gradient computation has been modified by an inplace operation"
        )
        assert begin in str(plain.value)
        assert begin in str(ours.value)
        assert "is at version 1; expected version 0 instead" in str(ours.value)
        del loss, ours
        for each in model:
            assert isinstance(each, Changed)
            each.activation = None  # it refers to the graph
        gc.collect()
        assert_empty(active)


def test_two_versions_of_a_storage_are_two_keys(tmp_path: Path) -> None:
    class Both(nn.Module):
        """Saves a storage before and after a change; what is saved before is never needed."""

        def forward(self, x: Tensor) -> Tensor:
            """Transform."""
            y = x * 2
            unused = y * y
            del unused
            y.mul_(3)
            return y * y

    def slope(model: nn.Module) -> Tensor:
        x = inputs().requires_grad_()
        model(x).sum().backward()
        assert x.grad is not None
        return x.grad

    model = nn.Sequential(Both(), Both())
    expected = slope(model)
    with swapping(model, config(tmp_path, whole_layers(1))) as active:
        assert torch.equal(slope(model), expected)
        assert active.stats().activations.kept >= 4


def test_a_second_backward_raises_what_pytorch_raises(tmp_path: Path) -> None:
    model = Llama()
    with swapping(model, config(tmp_path, whole_layers(1))):
        loss = model(inputs()).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


# ---------------------------------------------------------------------- failures


class Failing(nn.Module):
    """Fails in the middle of its forward or its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.error: BaseException | None = None
        self.is_late = False

    def forward(self, x: Tensor) -> Tensor:
        """Transform, or fail."""
        y: Tensor = self.linear(x).tanh()
        if self.error is not None and not self.is_late:
            raise self.error
        if self.error is not None:
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient: Tensor) -> Tensor:
        assert self.error is not None
        raise self.error


@pytest.mark.parametrize("is_late", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt("boom")], ids=["error", "interrupt"])
def test_after_an_error_the_next_step_is_as_ever(tmp_path: Path, error: BaseException, is_late: bool) -> None:
    model = nn.Sequential(*(Failing() for _ in range(4)))
    train(model)
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    failing = model[2]
    assert isinstance(failing, Failing)
    with swapping(model, config(tmp_path, whole_layers(1))) as active:
        failing.error, failing.is_late = error, is_late
        for _ in range(3):
            with pytest.raises(type(error), match="boom"):
                train(model)
            assert top_hooks() is None or isinstance(error, KeyboardInterrupt)
        error.__traceback__ = None  # it refers to the frames, and these to activations
        failing.error = None
        model.zero_grad()
        train(model)
        found = [parameter.grad for parameter in model.parameters()]
        gc.collect()
        assert_empty(active)
    assert all(a is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_an_interrupted_step_leaves_nothing_in_force_when_the_swap_ends(tmp_path: Path) -> None:
    model = nn.Sequential(*(Failing() for _ in range(2)))
    failing = model[1]
    assert isinstance(failing, Failing)
    failing.error = KeyboardInterrupt("boom")
    with swapping(model, config(tmp_path, whole_layers(1))), pytest.raises(KeyboardInterrupt):
        model(inputs())
    failing.error.__traceback__ = None


def test_a_tier_below_that_has_no_room_at_all_is_an_error_with_numbers(tmp_path: Path) -> None:
    model = Llama()
    settings = config(
        tmp_path, whole_layers(1), max_device_memory="8KB", offload_cpu_size="8KB", offload_disk_size=0
    )
    with swapping(model, settings), pytest.raises(CapacityError, match="KiB"):
        train(model)


# ---------------------------------------------------------------------- what is not swapped


def test_fake_tensors_pass(tmp_path: Path) -> None:
    model = Llama()
    with swapping(model, config(tmp_path, whole_layers(1))) as active:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            loss = model(mode.from_tensor(inputs())).sum()
            loss.backward()
        assert active.stats().activations.kept == 0
        for parameter in model.parameters():
            parameter.grad = None
        train(model)
        assert active.stats().activations.kept > 0


def test_tensors_on_another_device_pass(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Llama()
    with swapping(model, config(tmp_path, whole_layers(1))) as active:
        model(torch.empty(2, 16, DIM, device="meta")).sum().backward()
        assert active.stats().passes == 1
        assert active.stats().activations.kept == 0


class Tagged(torch.Tensor):
    """A tensor of a class of its own."""


def test_tensors_of_other_classes_pass(tmp_path: Path) -> None:
    class Tagging(nn.Module):
        """Saves a tensor of another class that it has made, and one of PyTorch's."""

        def forward(self, x: Tensor) -> Tensor:
            """Transform."""
            y = (x + 1).as_subclass(Tagged)
            return (y * y).as_subclass(torch.Tensor).exp()

    model = nn.Sequential(Tagging(), Tagging())
    with swapping(model, config(tmp_path, whole_layers(1))) as active:
        model(inputs().requires_grad_()).sum().backward()
        assert active.stats().activations.kept == 2


def test_hooks_outside_get_everything_and_what_they_keep_is_swapped(tmp_path: Path) -> None:
    seen: list[Tensor] = []
    model = Llama().eval()

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    def saved_outside() -> int:
        seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
            model(inputs())
        return len(seen)

    everything = saved_outside()
    with (
        swapping(model, config(tmp_path, whole_layers(1))),
        mock.patch.object(ActivationStore, "keep", autospec=True, side_effect=ActivationStore.keep) as keep,
    ):
        assert saved_outside() == everything
        assert keep.call_count > 0


def test_functional_transforms_pass(tmp_path: Path) -> None:
    model = Llama().eval()
    named: dict[str, Tensor] = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        scores: Tensor = torch.func.functional_call(model, parameters, (inputs(),))
        return scores.square().mean()

    expected = torch.func.grad(loss)(named)
    with swapping(model, config(tmp_path, whole_layers(1))):
        found = torch.func.grad(loss)(named)
    assert all(torch.equal(expected[name], found[name]) for name in named)


def test_parameters_from_elsewhere_are_parameters(tmp_path: Path) -> None:
    model = Llama().eval()
    others: dict[str, Tensor] = {
        name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()
    }
    with swapping(model, config(tmp_path, whole_layers(1))) as active:
        model(inputs()).sum().backward()
        own = active.stats().activations.kept
        torch.func.functional_call(model, others, (inputs(),)).sum().backward()
        assert active.stats().activations.kept == 2 * own > 0
        assert all(p.grad is not None for p in others.values())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_swapped_without_gradients(tmp_path: Path, mode: type[torch.no_grad]) -> None:
    model = Llama()
    with swapping(model, config(tmp_path, whole_layers(1))) as active, mode():
        model(inputs())
        assert active.stats().passes == 0


def test_layers_that_are_called_alone_are_not_swapped(tmp_path: Path) -> None:
    model = Llama()
    with swapping(model, config(tmp_path, whole_layers(1))) as active:
        model.layers[0](inputs()).sum().backward()
        assert active.stats().activations.kept == 0


def test_small_tensors_stay(tmp_path: Path) -> None:
    model = Llama()
    with swapping(model, config(tmp_path, whole_layers(1))) as active:
        loss = model(inputs(batch=1)).sum()  # 2 KiB, but for those of the wide products
        assert all(active.store.spec(key).nbytes >= 4096 for key in active.store)
        loss.backward()


@pytest.mark.parametrize("name", ["aten.silu", r"aten\.silu", r"feed_forward\.silu", r".*\.silu"])
def test_an_operator_is_swapped_by_its_name(tmp_path: Path, name: str) -> None:
    model = Llama(3)
    with swapping(model, config(tmp_path, operators(name))) as active:
        model(inputs())
        assert active.stats().activations.kept == 3


def test_what_layers_share_is_swapped_only_in_those_that_are_marked(tmp_path: Path) -> None:
    class Sharing(nn.Module):
        """A layer with a module that others have as well."""

        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared = shared

        def forward(self, x: Tensor) -> Tensor:
            """Transform."""
            result: Tensor = self.shared(x)
            return result

    shared = nn.Tanh()
    model = nn.Sequential(*(Sharing(shared) for _ in range(4)))
    marks: dict[str, object] = {"layer_swap": {"backward_prefetch": 1, "layers": [1, 2]}}
    with swapping(model, config(tmp_path, marks)) as active:
        scores = model(inputs().requires_grad_())
        assert set(active.store) == {"activation/1/0", "activation/2/0"}
        scores.sum().backward()


# ---------------------------------------------------------------------- configurations and the end


def test_swap_that_is_off_does_nothing() -> None:
    model = Llama()
    for settings in ({}, {"swap": False, **whole_layers()}, SwapConfig()):
        with swap(model, settings) as active:
            train(model)
            assert not model._forward_hooks
            with pytest.raises(UsageError, match="set swap to true"):
                _ = active.store
            with pytest.raises(UsageError, match="set swap to true"):
                active.stats()


def test_closing_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = Llama()
    active = swap(model, config(tmp_path, {**whole_layers(), **operators(r"feed_forward\.mul")}))
    assert any(module._forward_hooks for module in model.modules())
    active.close()
    active.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(StoreClosed):
        active.store.put("x", torch.zeros(1))


def test_a_store_that_was_given_stays_open(tmp_path: Path) -> None:
    model = Llama()
    with swapping(model, config(tmp_path, whole_layers())) as one:
        with swap(Llama(), {"swap": True, **whole_layers()}, store=one.store) as other:
            assert other.store is one.store
        one.store.put("x", torch.zeros(1))


def test_copies_of_the_model_are_ordinary(tmp_path: Path) -> None:
    model = Llama()
    with swapping(model, config(tmp_path, whole_layers())) as active:
        twin = copy.deepcopy(model)
        saved = io.BytesIO()
        torch.save(model, saved)
        train(twin)
        assert active.stats().passes == 0


def test_a_store_of_one_tier_is_refused(tmp_path: Path) -> None:
    settings = config(tmp_path, whole_layers())
    sizes = {"device": "emulated", "max_device_memory": "1MB"}
    from tierstore.config import StoreConfig

    tiers = StoreConfig.default(**sizes, offload_cpu_size="1MB", offload_disk_size=0).tiers  # type: ignore[arg-type]
    model = Llama()
    with Store(StoreConfig(tiers[:1])) as store, pytest.raises(UsageError, match="no tier below 'device'"):
        swap(model, settings, store=store)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_wrong_configuration_leaves_nothing(tmp_path: Path) -> None:
    model = Llama()
    settings = config(tmp_path, {"layer_swap": 3})
    with pytest.raises(ConfigError, match="layer_swap"):
        swap(model, settings)
    with pytest.raises(ConfigError, match="max_device_memory"):
        swap(model, config(tmp_path, whole_layers(), max_device_memory=None))
    assert not any(module._forward_hooks for module in model.modules())


class Outer(TorchDispatchMode):
    """A mode that the model's forward is inside of."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        return func(*args, **(kwargs or {}))


def test_a_mode_that_is_left_in_the_forward_does_not_hide_ours(tmp_path: Path) -> None:
    class Leaving(nn.Module):
        """Its forward enters a mode that somebody else leaves."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            """Transform."""
            y: Tensor = self.linear(x).tanh()
            return y

    model = nn.Sequential(Leaving(), Leaving())
    mode = Outer()  # type: ignore[no-untyped-call]
    handle = model[1].register_forward_hook(lambda *_: mode.__enter__() and None)  # type: ignore[no-untyped-call]
    with swapping(model, config(tmp_path, whole_layers(1))) as active:
        loss = model(inputs()).sum()
        handle.remove()
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        loss.backward()
        train(model)
        assert active.stats().passes == 3
        assert_empty(active)
