"""Recompute with swap and with offload, entered in any order: the same bits, and recompute wins over swap."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.training.recompute_models import hooks_of
from tests.training.swap_models import Llama, inputs
from tests.training.twins import LATE_AND_OVERWRITTEN, Trial, assert_equal_lists, assert_equal_models
from tierstore.testing.memory import DeviceBudget
from tierstore.training import Offload, Recompute, Swap, offload, recompute, swap

RECOMPUTED: dict[str, dict[str, object]] = {
    "whole": {"recompute": [0, 2]},
    "submodules": {"select_recompute": {"feed_forward": [0, 3], "attention": [3]}},
    "operators": {"select_recompute": {r"feed_forward\.mul": True, r"attention\.wq": [1], ".*_norm": True}},
    "aten": {"select_recompute": {"aten.mm": True, "aten.mul": [0, 1], "aten.silu": True}},
}
SWAPPED = {"swap": True, "layer_swap": [{"backward_prefetch": 2, "layers": True}]}
SIZES: dict[str, dict[str, object]] = {
    "roomy": {"max_device_memory": "8MB", "offload_cpu_size": "8MB"},
    "short": {"max_device_memory": "1MB", "offload_cpu_size": "256KB"},
    "no device": {"device": "cpu", "offload_cpu_size": "256KB"},
}


def _train(trial: Trial) -> None:
    for number in range(2):
        for part in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number == 1):
                loss = trial.model(inputs(2 * number + part)).float().square().mean()
            loss.backward()
            trial.log(loss)
        trial.log_gradients()
        trial.optimizer.step()
        trial.optimizer.zero_grad()
        with torch.no_grad():
            trial.log(trial.model(inputs(100)))


def _trial() -> Trial:
    torch.manual_seed(0)
    model = Llama()
    return Trial(model, [torch.optim.AdamW(model.parameters(), lr=1e-2)])


@functools.cache
def _plain() -> Trial:
    """Return what plain PyTorch comes to: the same in every case."""
    trial = _trial()
    torch.manual_seed(1)
    _train(trial)
    return trial


def _settings(path: Path, size: str) -> dict[str, object]:
    settings = {"device": "emulated", "offload_disk_size": "64MB", "offload_path": str(path), **SIZES[size]}
    late = {} if settings["device"] == "cpu" else {"device_options": LATE_AND_OVERWRITTEN}
    return settings | late


ORDERS = list(itertools.permutations(["recompute", "swap", "offload"]))
# Modules are recomputed by their hooks, and operators by modes: which of a kind does not matter to the order.
KINDS = [("whole", "submodules"), ("operators", "aten")]
CASES = [
    (kind[number % 2], size, order)
    for kind in KINDS
    for number, (order, size) in enumerate(zip(ORDERS, [*SIZES, *SIZES], strict=True))
]


@pytest.mark.parametrize(("what", "size", "order"), CASES)
def test_all_three_together_change_no_bit(
    tmp_path: Path, what: str, size: str, order: tuple[str, ...]
) -> None:
    """Every order with modules and with operators, everything that is recomputed in each of the sizes."""
    plain, ours = _plain(), _trial()
    torch.manual_seed(1)
    document = {"recompute_config": RECOMPUTED[what], "swap_config": SWAPPED}
    makers: Mapping[str, Callable[[], Recompute | Swap | Offload]] = {
        "recompute": lambda: recompute(ours.model, document, layers="layers"),
        "swap": lambda: swap(
            ours.model, {**document, "offload_config": _settings(tmp_path / "swap", size)}, layers="layers"
        ),
        "offload": lambda: offload(ours.model, ours.optimizers, _settings(tmp_path / "offload", size)),
    }
    with contextlib.ExitStack() as entered:
        made = {name: entered.enter_context(makers[name]()) for name in order}
        _train(ours)
        again, swapped, run = made["recompute"], made["swap"], made["offload"]
        assert isinstance(again, Recompute)
        assert isinstance(swapped, Swap)
        assert isinstance(run, Offload)
        stats = again.stats()
        assert stats.repetitions + stats.operators >= 8
        assert swapped.stats().activations.kept > 0
        swapped.store.check()
        run.store.check()
    assert hooks_of(ours.model) == 0
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)


@pytest.mark.parametrize("what", RECOMPUTED)
@pytest.mark.parametrize("size", ["short", "no device"])
def test_recompute_works_on_offloaded_parameters_whoever_was_first(
    tmp_path: Path, what: str, size: str
) -> None:
    plain = _plain()
    document = {"recompute_config": RECOMPUTED[what], "swap_config": {"swap": True, "op_swap": []}}
    for is_first in (True, False):
        ours = _trial()
        with contextlib.ExitStack() as entered:
            if is_first:
                entered.enter_context(recompute(ours.model, document, layers="layers"))
            settings = _settings(tmp_path / str(is_first), size)
            run = entered.enter_context(offload(ours.model, ours.optimizers, settings))
            if not is_first:
                entered.enter_context(recompute(ours.model, document, layers="layers"))
            torch.manual_seed(1)
            _train(ours)
            run.store.check()
        assert_equal_lists(plain.logged, ours.logged)
        assert_equal_models(plain.model, ours.model)


def _kept(tmp_path: Path, op_name: str, recompute_config: Mapping[str, object]) -> int:
    """Return how many storages one step swaps."""
    document = {
        "recompute_config": recompute_config,
        "swap_config": {
            "swap": True,
            "op_swap": [{"op_name": op_name, "backward_prefetch": 1, "layers": [1]}],
        },
        "offload_config": _settings(tmp_path, "roomy"),
    }
    model = Llama(dim=64)
    with recompute(model, document, layers="layers"), swap(model, document, layers="layers") as swapped:
        model(torch.randn(4, 16, 64)).sum().backward()
        return swapped.stats().activations.kept


@pytest.mark.parametrize(
    ("op_name", "chosen"),
    [
        ("feed_forward", "feed_forward"),
        (r"feed_forward\.mul", r"feed_forward\.mul"),
        (r"feed_forward\.w1", r"feed_forward\.w1"),
        (r"attention\.flash_attention", "attention"),
        (r"attention\.flash_attention", r"attention\.flash_attention"),
    ],
)
def test_what_is_recomputed_is_not_swapped(tmp_path: Path, op_name: str, chosen: str) -> None:
    assert _kept(tmp_path / "a", op_name, {}) > 0
    assert _kept(tmp_path / "b", op_name, {"select_recompute": {chosen: [1]}}) == 0
    assert _kept(tmp_path / "c", op_name, {"recompute": [1]}) == 0


def test_what_a_recomputed_part_was_given_is_not_swapped(tmp_path: Path) -> None:
    assert _kept(tmp_path / "a", "ffn_norm", {}) > 0
    before = _kept(tmp_path / "b", r"ffn_norm\.mul", {})
    whole, both, leaf = (
        {"feed_forward": [1]},
        {"feed_forward": [1], "aten.silu": [1]},
        {r"feed_forward\.w1": [1]},
    )
    for chosen in (whole, both, leaf):
        after = _kept(tmp_path / "c", r"ffn_norm\.mul", {"select_recompute": chosen})
        assert after < before


def test_recompute_lowers_the_peak_of_an_offloaded_model(tmp_path: Path) -> None:
    def peak_bytes(config: Mapping[str, object]) -> int:
        ours = _trial()
        settings = _settings(tmp_path / str(len(config)), "roomy") | {"max_device_memory": "5MB"}
        with (
            offload(ours.model, ours.optimizers, settings),
            recompute(ours.model, config, layers="layers"),
            DeviceBudget("1GB") as budget,
        ):
            for number in range(3):
                ours.model(inputs(number, batch=32)).square().mean().backward()
                ours.optimizer.step()
                ours.optimizer.zero_grad()
        return budget.peak_bytes

    without = peak_bytes({})
    assert peak_bytes({"recompute": True}) < 0.7 * without


def test_nobody_needs_a_model_of_one_class() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.second = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            for layer in self.second:
                y = layer(y)
            output: torch.Tensor = y
            return output

    model = Two()
    with recompute(model, {"recompute": [3]}, layers=["first", "second"]) as run:
        model(torch.randn(2, 8)).sum().backward()
    assert run.stats().repetitions == 3
