"""What the program has on the device never exceeds its budget, as an independent meter sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.twins import Optimizer, Trial, assert_equal_lists, config_of
from tierstore.errors import CapacityError
from tierstore.spi import device_storage_listeners
from tierstore.testing.memory import DeviceBudget, OutOfDeviceMemory
from tierstore.training import offload

DIM = 64
LAYER_BYTES = 4 * DIM * DIM
BUDGET_BYTES = 14 * LAYER_BYTES


class Layer(nn.Module):
    """A residual layer whose linear one travels alone."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, dim)``."""
        return x + 0.1 * torch.relu(self.linear(x))


def build(layers: int) -> tuple[nn.Module, Sequence[Optimizer]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    return model, [torch.optim.Adam(model.parameters(), lr=1e-3)]


def train(trial: Trial, batches: Sequence[int]) -> None:
    torch.manual_seed(1)
    for size in batches:
        x, y = torch.randn(size, DIM), torch.randn(size, DIM)
        loss = nn.functional.mse_loss(trial.model(x), y)
        loss.backward()
        trial.optimizer.step()
        trial.optimizer.zero_grad()
        trial.log(loss)


def _config(tmp_path: Path, budget_bytes: int = BUDGET_BYTES, **more: object) -> dict[str, object]:
    return config_of("device", tmp_path, {"max_device_memory": budget_bytes, **more})


@pytest.mark.parametrize("batches", [[4] * 5, [1, 2, 3, 4, 4, 4, 4]], ids=["same inputs", "growing inputs"])
def test_a_state_ten_times_the_budget_is_trained_within_it(tmp_path: Path, batches: list[int]) -> None:
    layers = 35  # four tensors of a layer's size each: ten times the budget
    plain = Trial(*build(layers))
    train(plain, batches)
    ours = Trial(*build(layers))
    with DeviceBudget(BUDGET_BYTES) as budget, offload(ours.model, ours.optimizer, _config(tmp_path)):
        train(ours, batches)
    assert_equal_lists(plain.logged, ours.logged)
    assert 0 < budget.peak_bytes <= BUDGET_BYTES


def test_the_same_budget_without_offloading_is_too_small(tmp_path: Path) -> None:
    trial = Trial(*build(35))
    off = {"memory_offload": "OFF"}
    with (
        DeviceBudget(BUDGET_BYTES),
        offload(trial.model, trial.optimizer, off),
        pytest.raises(OutOfDeviceMemory),
    ):
        train(trial, [4])


def test_what_activations_leave_is_used(tmp_path: Path) -> None:
    trial = Trial(*build(35))
    with offload(trial.model, trial.optimizer, _config(tmp_path)) as run:
        first_bytes = run.store.stats().tiers["device"].capacity_bytes
        train(trial, [4] * 4)
        learned_bytes = run.store.stats().tiers["device"].capacity_bytes
    assert first_bytes < learned_bytes < BUDGET_BYTES


def test_the_share_of_what_is_left_can_be_set(tmp_path: Path) -> None:
    trial = Trial(*build(35))
    with offload(trial.model, trial.optimizer, _config(tmp_path, hbm_ratio=0.8)) as run:
        train(trial, [4] * 4)
        tier = run.store.stats().tiers["device"]
        assert tier.charged_bytes <= 0.8 * tier.capacity_bytes + LAYER_BYTES


def test_one_module_that_cannot_fit_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model, (optimizer,) = build(3)
    listeners = list(device_storage_listeners)
    text = r"'0\.linear\.weight' cannot be trained.*64\.0 KiB.*60\.0 KiB"
    listeners = list(device_storage_listeners)
    with pytest.raises(CapacityError, match=text) as caught:
        offload(model, optimizer, _config(tmp_path, 60 * 1024))
    assert device_storage_listeners == listeners
    assert caught.value.needed_bytes == 4 * LAYER_BYTES
    assert caught.value.free_bytes == 60 * 1024
    assert device_storage_listeners == listeners
    assert all(type(p) is nn.Parameter for p in model.parameters())
    model(torch.randn(2, DIM)).sum().backward()


def test_a_model_without_parameters_is_measured_by_nobody_after_its_run(tmp_path: Path) -> None:
    listeners = list(device_storage_listeners)
    with offload(nn.Sequential(nn.ReLU()), None, _config(tmp_path)):
        pass
    assert device_storage_listeners == listeners


def test_tiers_that_are_too_small_together_leave_the_model_as_it_was(tmp_path: Path) -> None:
    model, (optimizer,) = build(35)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(CapacityError):
        offload(model, optimizer, _config(tmp_path, offload_cpu_size=4 * LAYER_BYTES))
    assert_equal_lists(before, list(model.parameters()))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    model(torch.randn(2, DIM)).sum().backward()


def test_what_the_program_leaves_no_room_for_is_refused_with_numbers_though_nobody_meters(
    tmp_path: Path,
) -> None:
    model, (optimizer,) = build(10)
    trial = Trial(model, [optimizer])
    with (
        offload(model, optimizer, _config(tmp_path, foresee=False)),
        pytest.raises(CapacityError, match=r"the program has 375\.0 KiB beside the store.*is 224\.0 KiB"),
    ):
        train(trial, [500])


def test_gradients_wait_in_the_store_until_everything_is_known_to_fit(tmp_path: Path) -> None:
    model, (optimizer,) = build(4)
    trial = Trial(model, [optimizer])
    found = []
    with offload(model, optimizer, _config(tmp_path, max_device_memory="8MB")) as run:
        for _ in range(4):
            model(torch.randn(4, DIM)).sum().backward()
            found.append(sum(key.startswith("grad/") for key in run.store))
            trial.optimizer.step()
            trial.optimizer.zero_grad()
    assert found == [4, 4, 0, 0]


@pytest.mark.parametrize("stepped", [0, 2], ids=["by hand", "two layers by an optimizer"])
@pytest.mark.parametrize("layers", [7, 8, 9, 10, 11, 12])
def test_gradients_that_no_optimizer_steps_count_where_everything_is_to_fit(
    layers: int, stepped: int, tmp_path: Path
) -> None:
    plain, ours = (build(layers)[0] for _ in range(2))
    expected = _step_by_hand(plain, stepped, None)
    with DeviceBudget(BUDGET_BYTES) as budget:
        found = _step_by_hand(ours, stepped, _config(tmp_path))
    assert_equal_lists(expected, found)
    assert_equal_lists(list(plain.parameters()), list(ours.parameters()))
    assert budget.peak_bytes <= BUDGET_BYTES


def _step_by_hand(model: nn.Module, stepped: int, config: dict[str, object] | None) -> list[Tensor | None]:
    """Train all of a model, its last layers by an optimizer; return the losses."""
    assert isinstance(model, nn.Sequential)
    cut = len(model) - stepped
    optimizer = torch.optim.SGD(model[cut:].parameters(), 0.1) if stepped else None
    with contextlib.nullcontext() if config is None else offload(model, optimizer, config):
        torch.manual_seed(1)
        losses: list[Tensor | None] = []
        for _ in range(5):
            loss = model(torch.randn(4, DIM)).square().mean()
            loss.backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for parameter in model[:cut].parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None
            losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("layers", [5, 7, 9, 11])
def test_two_models_of_one_run_that_are_used_in_turn_stay_within_it(layers: int, tmp_path: Path) -> None:
    plain, ours = _adversaries(layers), _adversaries(layers)
    _train_adversaries(plain)
    config = _config(tmp_path, 2 * BUDGET_BYTES, foresee=False)
    with DeviceBudget(2 * BUDGET_BYTES) as budget, offload(ours.model, ours.optimizers, config):
        _train_adversaries(ours)
    assert_equal_lists(plain.logged, ours.logged)
    assert budget.peak_bytes <= 2 * BUDGET_BYTES


def _adversaries(layers: int) -> Trial:
    model = nn.ModuleDict({name: build(layers)[0] for name in ("maker", "judge")})
    return Trial(model, [torch.optim.Adam(each.parameters(), lr=1e-3) for each in model.values()])


def _train_adversaries(trial: Trial) -> None:
    """Gradients of the judge, which judges twice, wait in autograd for each other; the maker has none."""
    assert isinstance(trial.model, nn.ModuleDict)
    maker, judge = trial.model["maker"], trial.model["judge"]
    makes, judges = trial.optimizers
    torch.manual_seed(1)
    for _ in range(4):
        made = maker(torch.randn(4, DIM)).detach()
        judgement = judge(made).mean() - judge(torch.randn(4, DIM)).mean()
        judges.zero_grad()
        judgement.backward()
        judges.step()
        trial.log(judgement)
        loss = -judge(maker(torch.randn(4, DIM))).mean()
        makes.zero_grad()
        loss.backward()
        makes.step()
        trial.log(loss)


def test_a_gradient_is_the_same_object_though_room_for_it_gets_short(tmp_path: Path) -> None:
    plain, ours = (Trial(*build(4)) for _ in range(2))
    with offload(ours.model, ours.optimizer, _config(tmp_path, max_device_memory="8MB")):
        for trial in (plain, ours):
            train(trial, [4] * 3)
            generator = torch.Generator().manual_seed(2)
            trial.model(torch.randn(4, DIM, generator=generator)).sum().backward()
            first = [parameter.grad for parameter in trial.model.parameters()]
            trial.model(torch.randn(64, DIM, generator=generator)).sum().backward()
            assert all(p.grad is grad for p, grad in zip(trial.model.parameters(), first, strict=True))
            trial.log_gradients()
    assert_equal_lists(plain.logged, ours.logged)


def test_host_memory_that_cannot_hold_one_bundle_is_refused_at_opening(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
    config = {"device": "cpu", "offload_disk_size": "64MB", "offload_path": str(tmp_path)}
    text = r"'0\.weight' cannot be trained in host memory.*256\.0 KiB.*offload_cpu_size is 192\.0 KiB"
    with pytest.raises(CapacityError, match=text):
        offload(model, torch.optim.Adam(model.parameters()), {**config, "offload_cpu_size": "192KB"})
    with offload(model, torch.optim.Adam(model.parameters()), {**config, "offload_cpu_size": "256KB"}):
        model(torch.ones(1, 128)).sum().backward()
