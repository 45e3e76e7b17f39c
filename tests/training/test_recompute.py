"""What recomputing keeps and runs again, what it leaves alone, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint

from tests.training.recompute_models import (
    DIM,
    LENGTH,
    ConvLayer,
    CountingLayer,
    LlamaLayer,
    Model,
    assert_same_bits,
    hooks_of,
    inputs,
    recomputing,
    train,
)
from tests.training.twins import assert_equal_models
from tierstore.testing.memory import DeviceBudget
from tierstore.training import recompute, swap
from tierstore.training.activations.recomputation.scopes import OperatorScope

WIDE = 64


def llama(count: int = 3) -> nn.Module:
    """Return a model whose layers run once each."""
    return nn.Sequential(*(LlamaLayer() for _ in range(count)))


def peak_bytes(model: nn.Module, batch: int = WIDE) -> int:
    """Return the most bytes that one step has on the device; gradients are there before."""
    for _ in range(2):
        with DeviceBudget("1GB") as budget:
            model(inputs(batch=batch)).square().mean().backward()
    return budget.peak_bytes


def saved_bytes(model: nn.Module) -> int:
    """Return the bytes that are live after forward, beyond the output."""
    with DeviceBudget("1GB") as budget:
        output = model(inputs(batch=WIDE))
        return budget.live_bytes - int(output.nbytes)


# ---------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    "chosen",
    [
        True,
        [r"feed_forward\.mul"],
        [r"feed_forward\.mul", r"feed_forward\.silu"],
        ["feed_forward"],
        ["attention"],
        [".*_norm"],
        [r"attention\.flash_attention"],
        [r"attention\.w."],
        ["aten.mul", "aten.silu"],
        [r"aten\..*"],
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_selection_keeps_no_more_than_nothing_selected(chosen: object, autocast: bool) -> None:
    model = llama()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        without, without_peak = saved_bytes(model), peak_bytes(model)
        with recompute(model, {"select_recompute": chosen}):
            assert saved_bytes(model) < without
            assert peak_bytes(model) <= without_peak


def test_an_operator_output_is_kept_nowhere() -> None:
    model = llama(1)
    without = saved_bytes(model)
    product_bytes = WIDE * LENGTH * 2 * DIM * 4
    with recompute(model, {"select_recompute": [r"feed_forward\.mul"]}, layers=""):
        assert without - saved_bytes(model) == product_bytes
    with recompute(model, {"select_recompute": [r"feed_forward\.mul", r"feed_forward\.silu"]}, layers=""):
        assert without - saved_bytes(model) == 2 * product_bytes


def test_of_whole_layers_only_inputs_are_kept() -> None:
    model = llama(4)
    layer_input_bytes = WIDE * LENGTH * DIM * 4
    with recompute(model, {"recompute": True}):
        assert saved_bytes(model) <= 4 * layer_input_bytes + 4096


def test_an_operator_means_the_own_forward_of_its_module_and_aten_the_whole_layer() -> None:
    model = llama(1)
    for pattern, least, most in ((r"feed_forward\.mul", 1, 1), ("mul", 0, 0), ("aten.mul", 2, 9)):
        with recompute(model, {"select_recompute": [pattern]}, layers="") as run:
            model(inputs()).sum().backward()
            assert least <= run.stats().replaced <= most, pattern


def test_what_was_made_again_is_gone_when_backward_is_through_with_it() -> None:
    model = llama(1)
    with (
        recompute(model, {"select_recompute": [r"aten\..*"]}, layers="") as run,
        DeviceBudget("1GB") as budget,
    ):
        loss = model(inputs()).sum()
        live_bytes = budget.live_bytes
        loss.backward(retain_graph=True)
        gradient_bytes = sum(p.nbytes for p in model.parameters())
        assert budget.live_bytes <= live_bytes + gradient_bytes
        assert run.stats().operators > 0


# ---------------------------------------------------------------------- what runs again


def test_an_operator_runs_again_once_in_each_backward_however_many_want_it() -> None:
    layer = nn.Sequential(nn.Linear(DIM, DIM), nn.Sigmoid(), nn.SiLU())  # both save the sigmoid
    model = nn.Sequential(layer, copy.deepcopy(layer))
    with recompute(model, {"select_recompute": ["1"]}, layers="") as run:
        loss = model(inputs()).sum()
        assert run.stats().operators == 0
        loss.backward(retain_graph=True)
        assert run.stats().operators == 2
        loss.backward()
        assert run.stats().operators == 4


def test_selected_operators_run_none_of_the_models_own_code_again() -> None:
    model = llama(2)
    calls: list[nn.Module] = []
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: calls.append(module))
    with recompute(model, {"select_recompute": [r"aten\..*"]}):
        loss = model(inputs()).sum()
        forwards = len(calls)
        loss.backward()
    assert len(calls) == forwards


def test_running_statistics_are_updated_once() -> None:
    for config in ({"recompute": True}, {"select_recompute": ["norm", "feed_forward"]}):
        model = Model(ConvLayer)
        with recomputing(model, config):
            train(model)
        norm = model.layers[1].norm
        assert isinstance(norm, nn.BatchNorm1d)
        assert norm.num_batches_tracked == 2


def test_buffers_are_the_same_objects_afterwards() -> None:
    model = Model(CountingLayer)
    with recomputing(model, {"recompute": True}):
        loss = model(inputs()).sum()
        before = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
        loss.backward()
        for name, buffer in model.named_buffers():
            assert buffer is before[name][0]
            assert buffer._version == before[name][1]


def test_a_copy_of_a_buffer_is_kept_only_if_the_buffer_changed() -> None:
    model = llama(2)
    for layer in model.children():
        layer.register_buffer("mask", torch.ones(1 << 18))
    with recompute(model, {"recompute": True}):
        assert saved_bytes(model) < 1 << 20


def test_a_buffer_that_fails_to_run_again_is_put_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(CountingLayer)
    with recomputing(model, {"recompute": True}):
        loss = model(inputs()).sum()
        before = [buffer.clone() for buffer in model.buffers()]
        with monkeypatch.context() as patch:
            patch.setattr(nn.Linear, "forward", None)
            with pytest.raises(TypeError):
                loss.backward()
        assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


def test_a_kept_random_operator_draws_its_numbers_from_nobody_else() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            noisy = self.linear(x) * torch.rand_like(x)
            return functional.dropout(noisy, 0.5).square()

    for config in (
        {"recompute": True, "select_recompute_exclude": ["aten.rand_like"]},
        {"select_recompute": ["aten.rand_like"]},
    ):
        run = assert_same_bits(lambda: Model(Noisy), train, config)
        assert run.stats().repetitions + run.stats().operators > 0


def test_what_is_excluded_runs_once() -> None:
    model = llama(1)
    config = {"recompute": True, "select_recompute_exclude": ["aten.mm", r"feed_forward\.silu"]}
    with recompute(model, config, layers="") as run, _Count() as count:
        model(inputs()).sum().backward()
    assert run.stats().repetitions == 1
    assert count.names.count("aten::silu") == 1
    assert count.names.count("aten::native_layer_norm") == 2


class _Count(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------- when nothing is recomputed


def test_nothing_is_recomputed_without_gradients() -> None:
    model = llama()
    with recompute(model, {"recompute": True}) as run, torch.no_grad():
        model(inputs())
    assert run.stats().forwards == 0
    with recompute(model, {"select_recompute": True}) as run, torch.inference_mode():
        model(inputs())
    assert run.stats().replaced == 0


def test_what_the_program_recomputes_is_left_to_it() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(LlamaLayer() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint.checkpoint(layer, x, use_reentrant=self.is_reentrant)
            return x

        is_reentrant = False

    for is_reentrant in (False, True):
        Own.is_reentrant = is_reentrant
        for config in (
            {"recompute": True},
            {"select_recompute": ["feed_forward", r"attention\.wq", "aten.mul"]},
        ):
            run = assert_same_bits(Own, _train_inputs, config)
            assert run.stats().forwards == run.stats().replaced == 0


_WHOLE_AND_SELECTED = (
    {"recompute": True},
    {"select_recompute": ["feed_forward", r"attention\.wq", "aten.mul"]},
)


def _train_inputs(model: nn.Module) -> list[Tensor | None]:
    x = inputs().requires_grad_()
    model(x).square().mean().backward()
    return [x.grad]


def test_the_program_may_recompute_inside_of_what_is_recomputed() -> None:
    class Own(LlamaLayer):
        def forward(self, x: Tensor) -> Tensor:
            x = x + checkpoint.checkpoint(self.attention, self.attention_norm(x), use_reentrant=False)
            output: Tensor = x + self.feed_forward(self.ffn_norm(x))
            return output

    for config in ({"recompute": True}, {"select_recompute": [".*_norm", "aten.mul"]}):
        run = assert_same_bits(lambda: Model(Own), train, config)
        assert run.stats().repetitions + run.stats().operators > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it
@pytest.mark.parametrize("part", ["feed_forward", ""])
def test_parts_of_a_layer_may_be_compiled(part: str) -> None:
    def build() -> nn.Module:
        model = Model(LlamaLayer)
        for layer in model.layers:
            layer.get_submodule(part).compile(backend="eager")
        return model

    for config in _WHOLE_AND_SELECTED:
        run = assert_same_bits(build, train, config)
        assert run.stats().repetitions + run.stats().operators > 0
        torch._dynamo.reset()


# ---------------------------------------------------------------------- changes in place


class _Changing(nn.Module):
    def __init__(self, change: str) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        kept = torch.relu(h)  # saves its output, not h
        product = kept.clone() + 1
        early = h * 2  # nobody has saved it when its input changes
        if self.change == "input":
            h += 3
        elif self.change == "output":
            product.mul_(2)
        elif self.change == "view":
            product[:, 0].add_(1)
        elif self.change == "data":
            with torch.no_grad():
                h.zero_()
        elif self.change == "unseen":
            product.data.mul_(2)
        output: Tensor = product.square() * torch.sigmoid(h.detach()) + early.square()
        return output


@pytest.mark.parametrize("change", ["input", "output", "view", "data", "unseen"])
@pytest.mark.parametrize("pattern", ["aten.relu", r"aten\..*", "relu"])
def test_what_changes_in_place_after_it_was_saved_is_made_before(change: str, pattern: str) -> None:
    run = assert_same_bits(lambda: Model(lambda: _Changing(change)), train, {"select_recompute": [pattern]})
    assert run.stats().replaced > 0


@pytest.mark.parametrize("wanted", ["never", "later", "no longer"])
def test_what_nobody_saved_is_not_made_when_its_input_changes(wanted: str) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            first = h + 1
            second = first + 2
            if wanted == "no longer":
                torch.sin(second)
            h += 3
            return torch.sigmoid(h) + (torch.sin(second) if wanted == "later" else second)

    run = assert_same_bits(lambda: Model(Chain), train, {"select_recompute": ["aten.add"]})
    assert run.stats().operators == 0


def test_a_chain_of_operators_may_be_longer_than_the_interpreters_stack() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            for number in range(2 * sys.getrecursionlimit()):
                x = x + number % 3
            return torch.sin(x)

    run = assert_same_bits(lambda: Model(Chain, 1), _train_inputs, {"select_recompute": ["aten.add"]})
    assert run.stats().operators > sys.getrecursionlimit()


def test_what_is_swapped_and_then_changed_is_made_before(tmp_path: Path) -> None:
    document = {
        "recompute_config": {"select_recompute": {"aten.relu": True}},
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": True}]},
        "offload_config": {
            "device": "emulated",
            "max_device_memory": "8MB",
            "offload_cpu_size": "8MB",
            "offload_disk_size": 0,
            "offload_path": str(tmp_path),
        },
    }

    def steps(model: nn.Module) -> list[Tensor | None]:
        model(inputs(batch=WIDE)).square().mean().backward()
        return []

    def swapped(model: nn.Module) -> list[Tensor | None]:
        with swap(model, document, layers="layers") as active:
            steps(model)
            assert active.stats().activations.kept > 0
        return []

    torch.manual_seed(0)
    plain = Model(lambda: _Changing("input"))
    model = copy.deepcopy(plain)
    steps(plain)
    with recompute(model, document, layers="layers") as run:
        swapped(model)
    assert run.stats().replaced > 0
    assert_equal_models(plain, model)


def test_a_change_outside_of_the_layer_is_refused_and_never_taken_for_what_was_there() -> None:
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = (x + 1) * 2
            return torch.sin(made)

    model = nn.Sequential(Chain(), Chain())
    with recompute(model, {"select_recompute": ["aten.add", "aten.mul"]}, layers=""):
        x = inputs().requires_grad_()
        start = x * 1
        loss = model(start).sum()
        with torch.no_grad():
            start.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_change_that_plain_autograd_refuses_is_refused() -> None:
    model = Model(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Sigmoid()))
    with recomputing(model, {"select_recompute": ["aten.sigmoid"]}):
        x = inputs()
        loss = model(x).sum()
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---------------------------------------------------------------------- exceptions, and what is left


class _Failing(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.error: type[BaseException] | None = error

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.tanh(self.linear(x))
        if self.error is not None:
            raise self.error
        return output


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("config", [{"recompute": True}, {"select_recompute": ["aten.tanh", "linear"]}])
def test_an_exception_in_forward_leaves_nothing_in_force(
    error: type[BaseException], config: dict[str, object]
) -> None:
    torch.manual_seed(0)
    model = Model(lambda: _Failing(error))
    plain = copy.deepcopy(model)
    layer = model.layers[1]
    assert isinstance(layer, _Failing)
    for each in (*plain.layers, model.layers[0], model.layers[2]):
        each.error = None
    with recomputing(model, config):
        with pytest.raises(error):
            model(inputs())
        layer.error = None
        losses = train(model)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # noqa: FBT003
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    for a, b in zip(losses, train(plain), strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


class _Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, error: type[BaseException] | None = None) -> Tensor:
        h = torch.tanh(self.inner(x))
        if error is not None:
            raise error
        return torch.sigmoid(self.linear(h))


class _Retrying(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.part = _Part()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(self.error):
            self.part(x, self.error)
        output: Tensor = x + self.part(2 * x)
        return output


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "config",
    [
        {"recompute": True},
        {"recompute": True, "select_recompute_exclude": ["aten.tanh", r"part\.sigmoid"]},
        {"select_recompute": ["part"]},
        {"select_recompute": [r"part\.inner", r"part\.sigmoid"]},
        {"select_recompute": ["part", r"part\.inner", "aten.add"]},
        {"select_recompute": [r"aten\..*"]},
    ],
    ids=str,
)
def test_a_call_that_failed_is_not_taken_for_the_next_one(
    error: type[BaseException], config: dict[str, object]
) -> None:
    run = assert_same_bits(lambda: Model(lambda: _Retrying(error)), train, config)
    assert run.stats().repetitions + run.stats().operators > 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # noqa: FBT003
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert run._runtime.calls.last(OperatorScope) is None


def test_the_model_is_as_it_was_when_it_is_closed() -> None:
    model = llama()
    attributes = {id(each): set(vars(each)) for each in model.modules()}
    run = recompute(model, {"recompute": [1], "select_recompute": ["feed_forward", "aten.mul"]})
    assert hooks_of(model) > 0
    train(model)
    run.close()
    run.close()
    assert hooks_of(model) == 0
    assert {id(each): set(vars(each)) for each in model.modules()} == attributes


def test_a_graph_outlives_what_made_it() -> None:
    for config in ({"recompute": True}, {"select_recompute": [r"aten\..*"]}):
        torch.manual_seed(0)
        model = llama()
        plain = copy.deepcopy(model)
        torch.manual_seed(1)
        with recompute(model, config):
            loss = model(inputs()).sum()
        loss.backward()
        torch.manual_seed(1)
        plain(inputs()).sum().backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(a.grad, b.grad)


def test_a_copy_of_the_model_recomputes_nothing() -> None:
    model = llama()
    with recompute(model, {"recompute": [2], "select_recompute": ["aten.mul"]}) as run:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(inputs()).sum().backward()
        assert run.stats().forwards == run.stats().replaced == 0


def test_graphs_that_never_run_backward_leave_nothing() -> None:
    config = {"recompute": [1], "select_recompute": ["feed_forward", r"attention\..*", "aten.add"]}
    model = llama(2)
    with recompute(model, config), DeviceBudget("1GB") as budget:
        live_bytes = []
        for step in range(30):
            loss = model(inputs(step)).sum()
            if step % 2:
                loss.backward()
            del loss
            live_bytes.append(budget.live_bytes)
    assert len(set(live_bytes[1:])) == 1


def test_nothing_waits_for_the_garbage_collector() -> None:
    model = llama()
    gc.collect()
    gc.disable()
    try:
        for config in ({"recompute": True}, {"select_recompute": [r"aten\..*", "feed_forward"]}):
            with recompute(model, config), DeviceBudget("1GB") as budget:
                loss = model(inputs()).sum()
                del loss
                assert budget.live_bytes == 0
    finally:
        gc.enable()
