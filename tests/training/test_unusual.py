"""Models and calls that few write and that have to work all the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.training.twins import (
    WIDTH,
    Optimizer,
    Trial,
    adam,
    assert_equal_lists,
    assert_equal_models,
    assert_same,
    batch,
    blocks,
    build_blocks,
    config_of,
    every_layout,
    loss_of,
    step,
    steps,
    with_copies,
    with_device,
)
from tierstore.errors import CapacityError, UsageError
from tierstore.training import offload

# --- gradients ----------------------------------------------------------------------------------


@every_layout
def test_a_gradient_that_is_put_on_a_frozen_parameter(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        model[0].requires_grad_(requires_grad=False)
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    def loop(trial: Trial) -> None:
        for _ in range(2):
            loss_of(trial.model, *batch()).backward()
            for parameter in trial.model[0].parameters():  # type: ignore[index]
                assert parameter.grad is None
                parameter.grad = torch.full_like(parameter, 0.5)
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build, loop, layout, tmp_path)


@every_layout
def test_a_gradient_that_is_deleted(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss_of(trial.model, *batch()).backward()
            for parameter in list(trial.model.parameters())[::2]:
                del parameter.grad
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, layout, tmp_path)


@every_layout
def test_a_loss_made_of_gradients_keeps_their_values(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(2):
            loss_of(trial.model, *batch()).backward()
            factor = torch.ones((), requires_grad=True)
            weighted = [(p.grad * factor).sum() for p in trial.model.parameters() if p.grad is not None]
            trial.optimizer.step()
            trial.optimizer.zero_grad()
            sum(weighted, torch.zeros(())).backward()
            trial.log(factor.grad)

    # Its graph keeps copies of all gradients, on the device.
    assert_same(build_blocks, loop, layout, tmp_path, with_copies(layout, "224KB"))


def test_a_gradient_that_is_kept_while_its_bytes_are_in_use_outlives_zero_grad(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, (optimizer,) = build_blocks()
    with offload(model, optimizer, config_of("device", tmp_path)):
        loss_of(model, *batch()).backward()
        weight = model[0].up.weight  # type: ignore[index]
        kept, alias = weight.grad, weight.grad.data
        values = alias.clone()
        optimizer.zero_grad()
        loss_of(model, *batch()).backward()
        assert torch.equal(kept, values)
        assert torch.equal(alias, values)


@every_layout
def test_an_optimizer_that_forgets_the_gradients_in_its_step(layout: str, tmp_path: Path) -> None:
    class Forgetting(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:  # noqa: ANN401 - torch's own signature
            loss = super().step(closure)
            self.zero_grad()
            return loss

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [Forgetting(model.parameters(), lr=1e-2)]

    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss_of(trial.model, *batch()).backward()
            kept = [parameter.grad for parameter in trial.model.parameters()]
            trial.optimizer.step()
            trial.log_gradients()
            for gradient in kept:
                trial.log(gradient)

    assert_same(build, loop, layout, tmp_path, with_copies(layout))


# --- parameters ---------------------------------------------------------------------------------

FP8 = [dtype for name in dir(torch) if name.startswith("float8") for dtype in [getattr(torch, name)]]


def test_a_trained_parameter_of_an_integer_one_raises_what_pytorch_raises(tmp_path: Path) -> None:
    model = nn.Linear(WIDTH, 5)
    model.count = nn.Parameter(torch.arange(5), requires_grad=False)
    with pytest.raises(RuntimeError) as expected:
        nn.Parameter(model.count)
    with offload(model, None, config_of("disk", tmp_path)):
        with pytest.raises(RuntimeError) as found:
            nn.Parameter(model.count)
        assert torch.equal(nn.Parameter(model.count, requires_grad=False), torch.arange(5))
        assert nn.Parameter(model.weight).requires_grad
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("dtype", [*FP8, torch.int8, torch.bool, torch.complex64], ids=str)
def test_a_frozen_parameter_of_any_kind_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            raw = torch.arange(256).remainder(2 if dtype is torch.bool else 256).to(torch.uint8)
            self.table = nn.Parameter(raw.view(dtype), requires_grad=False)
            self.linear = nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Tensor:
            scale = self.table.view(torch.uint8)[3].float()
            return self.linear(x) * scale  # type: ignore[no-any-return]

    plain, ours = Table(), Table()
    ours.load_state_dict(plain.state_dict())
    inputs = torch.randn(2, WIDTH)
    expected = plain(inputs)
    with offload(ours, adam(ours.linear), config_of("disk", tmp_path)):
        assert torch.equal(ours(inputs), expected)
    assert torch.equal(ours.table.view(torch.uint8), plain.table.view(torch.uint8))


def test_pointing_a_parameter_at_its_own_memory_changes_nothing(tmp_path: Path) -> None:
    model, (optimizer,) = build_blocks()
    plain = copy.deepcopy(model)
    with offload(model, optimizer, config_of("device", tmp_path)):
        for parameter in model.parameters():
            parameter.data = parameter.data
            parameter.data = parameter
        loss_of(model, *batch())
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, found)


@every_layout
def test_an_encoder_in_its_fast_path(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2)
        return model, adam(model)

    def loop(trial: Trial) -> None:
        for _ in range(2):
            trial.model(torch.randn(2, 3, WIDTH)).square().mean().backward()
            trial.optimizer.step()
            trial.optimizer.zero_grad()
            trial.model.eval()
            with torch.no_grad():
                trial.log(trial.model(torch.randn(2, 3, WIDTH)))
            trial.model.train()

    is_on_device = layout in ("device", "three")
    small = {"max_device_memory": "384KB"} if is_on_device else {"offload_cpu_size": "512KB"}
    assert_same(build, loop, layout, tmp_path, small)


def test_a_module_that_needs_more_together_than_there_is_says_so(tmp_path: Path) -> None:
    width = 160  # 307 KB of weights that go in, 102 KB that go out, both read by one forward
    model = nn.Sequential(nn.Linear(WIDTH, width), nn.MultiheadAttention(width, 4))
    before = [p.detach().clone() for p in model.parameters()]
    config = config_of("disk", tmp_path, {"offload_cpu_size": "400KB"})
    text = r"'1' cannot be run in host memory: .* '1.in_proj_weight', '1.out_proj.weight', .* 408.0 KiB"
    with pytest.raises(CapacityError, match=text):
        offload(model, None, config)
    assert_equal_lists(before, list(model.parameters()))


# --- optimizers ---------------------------------------------------------------------------------


@every_layout
def test_state_that_is_thrown_away_begins_anew(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        steps(2)(trial)
        trial.optimizer.state.clear()
        steps(2)(trial)

    assert_same(build_blocks, loop, layout, tmp_path)


@every_layout
def test_loading_state_of_which_some_is_missing(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        steps(2)(trial)
        saved = trial.optimizer.state_dict()
        for number in (0, 3, 5):
            del saved["state"][number]
        trial.optimizer.load_state_dict(saved)
        steps(2)(trial)

    assert_same(build_blocks, loop, layout, tmp_path)


@every_layout
def test_an_optimizer_that_also_trains_what_is_no_parameter_of_the_model(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        scale = nn.Parameter(torch.ones(5))
        return model, [torch.optim.Adam([*model.parameters(), scale], lr=1e-2)]

    def loop(trial: Trial) -> None:
        scale = trial.optimizer.param_groups[0]["params"][-1]
        for turn in range(4):
            inputs, classes = batch()
            nn.functional.cross_entropy(trial.model(inputs) * scale, classes).backward()
            trial.optimizer.step()
            trial.optimizer.zero_grad()
            trial.log(scale)
            if turn == 1:
                trial.optimizer.load_state_dict(copy.deepcopy(trial.optimizer.state_dict()))

    assert_same(build, loop, layout, tmp_path)


class Counting(torch.optim.Optimizer):
    """An optimizer whose state is a number and a list beside its tensor."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 - torch's own signature
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(count=0, norms=[], sum=torch.zeros_like(parameter))
                state["count"] += 1
                state["norms"].append(parameter.grad.norm().item())
                state["sum"].add_(parameter.grad)
                parameter.sub_(state["sum"] * group["lr"] / state["count"])


@every_layout
def test_state_that_is_not_all_tensors(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [Counting(model.parameters())]

    def loop(trial: Trial) -> None:
        steps(2)(trial)
        trial.optimizer.load_state_dict(copy.deepcopy(trial.optimizer.state_dict()))
        steps(2)(trial)

    assert_same(build, loop, layout, tmp_path, with_copies(layout))


def test_without_a_configuration_what_the_machine_has_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    model, (optimizer,) = build_blocks()
    with offload(model, optimizer, None) as run:
        step(Trial(model, [optimizer]))
        assert run.store.tier_names == ("host", "disk")
    assert list(tmp_path.iterdir()) == [], "nothing is left of the scratch files"


# --- checkpoints and weights --------------------------------------------------------------------


def test_a_checkpoint_cannot_name_what_is_no_parameter_of_the_model(tmp_path: Path) -> None:
    model = blocks()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(7))], lr=0.1)
    with (
        offload(model, optimizer, config_of("host", tmp_path)) as run,
        pytest.raises(UsageError, match=r"shape \[7\] that is not in the model"),
    ):
        run.save(tmp_path / "saved")


def test_a_checkpoint_of_other_groups_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model, optimizers = build_blocks()
    with offload(model, optimizers, config_of("host", tmp_path)) as run:
        run.save(tmp_path / "saved")
    optimizer = torch.optim.Adam([{"params": [p]} for p in model.parameters()])
    before = [p.detach().clone() for p in model.parameters()]
    with (
        offload(model, optimizer, config_of("host", tmp_path)) as run,
        pytest.raises(UsageError, match="do not train the same parameters in the same groups"),
    ):
        run.load(tmp_path / "saved")
    assert_equal_lists(before, list(model.parameters()))


def test_a_checkpoint_of_another_version_is_refused_by_its_number(tmp_path: Path) -> None:
    model, optimizers = build_blocks()
    with offload(model, optimizers, config_of("host", tmp_path)) as run:
        run.save(tmp_path / "saved")
        path = tmp_path / "saved" / "optimizer.json"
        path.write_text(
            path.read_text().replace('"format":1', '"format":99').replace('"format": 1', '"format": 99')
        )
        with pytest.raises(UsageError, match="has format 99"):
            run.load(tmp_path / "saved")


def test_options_that_are_lists_or_tuples_come_back_as_such(tmp_path: Path) -> None:
    model, (optimizer,) = build_blocks()
    optimizer.param_groups[0].update(schedule=[1, (2.5, None)], betas=(0.5, 0.75))
    with offload(model, optimizer, config_of("host", tmp_path)) as run:
        step(Trial(model, [optimizer]))
        run.save(tmp_path / "saved")
        optimizer.param_groups[0].update(schedule=None, betas=(0.1, 0.2))
        run.load(tmp_path / "saved")
    assert optimizer.param_groups[0]["schedule"] == [1, (2.5, None)]
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)


def test_a_kind_that_no_file_holds_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 5))
    model.register_parameter("odd", nn.Parameter(torch.ones(3, dtype=torch.complex128)))
    with (
        offload(model, adam(model[0]), config_of("host", tmp_path)) as run,
        pytest.raises(UsageError, match=r"'odd' is torch\.complex128, which a safetensors file cannot hold"),
    ):
        run.save(tmp_path / "saved")


class WithTables(nn.Module):
    """A model with a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("table", torch.ones(3), persistent=False)


@pytest.mark.parametrize("mode", ["ON", "OFF"])
def test_weights_replace_values_that_are_there_and_leave_what_is_not_in_the_file(
    tmp_path: Path, mode: str
) -> None:
    plain, model = WithTables(), WithTables()
    nn.init.normal_(plain.norm.running_mean)  # type: ignore[arg-type]
    save_file(plain.state_dict(), tmp_path / "w.safetensors")
    identities = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    config = config_of("host", tmp_path, {"memory_offload": mode})
    with offload(model, None, config, weights=tmp_path / "w.safetensors"):
        pass
    assert_equal_models(plain, model)
    assert identities == [id(tensor) for tensor in (*model.parameters(), *model.buffers())]


def test_a_buffer_without_values_and_without_weights_is_refused_by_name(tmp_path: Path) -> None:
    model = blocks()
    model.register_buffer("table", torch.ones(3, device="meta"))
    with pytest.raises(UsageError, match="the buffer 'table' has no values: it is on the meta device"):
        offload(model, None, config_of("host", tmp_path))


# --- custom functions ---------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """``x @ w.t()``, which saves what it is given, as fused losses and kernels of users do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401 - PyTorch's own
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - as well
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class _ByTheParent(nn.Module):
    """Computes with its children's weights and never calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = torch.tanh(_Product.apply(x, layer.weight) + layer.bias)  # type: ignore[no-untyped-call]
        return self.head(x)  # type: ignore[no-any-return]


@every_layout
def test_a_custom_function_that_saves_weights_of_other_modules(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = _ByTheParent()
        return model, adam(model)

    assert_same(build, steps(), layout, tmp_path)


# --- what a module makes of its own parameters in forward ------------------------------------------

MADE: dict[str, Callable[[nn.Linear], object]] = {
    "a parameter": lambda module: nn.Parameter(module.weight),
    "a frozen parameter": lambda module: nn.Parameter(module.weight, requires_grad=False),
    "one of its type": lambda module: type(module.weight)(module.weight.data.clone()),
    "a deep copy": lambda module: copy.deepcopy(module.weight),
    "a copy": lambda module: copy.copy(module.weight),
    "a pickle": lambda module: pickle.loads(pickle.dumps(module.weight)),
    "a clone": lambda module: module.weight.clone(),
    "an alias": lambda module: module.weight.detach(),
    "data": lambda module: module.weight.data,
    "a buffer": lambda module: nn.Buffer(module.weight),
    "a deep copy of itself": lambda module: copy.deepcopy(module).weight,
}


class Making(nn.Linear):
    """Makes something of its weight in forward, and computes with it."""

    def __init__(self, make: Callable[[nn.Linear], object]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.make = make
        self.made: list[Any] = []

    def forward(self, inputs: Tensor) -> Tensor:
        made: Any = self.make(self)
        self.made = [type(made), made.requires_grad, made.is_leaf, made.detach().clone()]
        outputs: Tensor = super().forward(inputs) @ made
        return outputs


@every_layout
@pytest.mark.parametrize("name", MADE)
def test_what_a_module_makes_of_its_weight_in_forward(name: str, layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Making(MADE[name]) for _ in range(3)))
        return model, adam(model)

    seen: list[list[object]] = []

    def loop(trial: Trial) -> None:
        for _ in range(2):
            trial.model(torch.ones(2, WIDTH)).square().mean().backward()
            trial.log_gradients()
            trial.optimizer.step()
            for module in trial.model.children():
                assert isinstance(module, Making)
                trial.log(module.made.pop())
                seen.append(module.made)

    assert_same(build, loop, layout, tmp_path, with_device(layout, "640KB"))
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
