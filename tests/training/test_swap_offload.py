"""Swap inside and around offload, and checkpoint inside swap: the same bits, and each does its own."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.pairs import covering
from tests.training.swap_models import DIM, Llama, assert_same_bits, config, inputs, operators, whole_layers
from tests.training.twins import LATE_AND_OVERWRITTEN, Trial, assert_equal_lists, assert_equal_models
from tierstore.training import ActivationStore, Offload, offload, swap
from tierstore.training.pytorch.saved_tensor_hooks import top_hooks
from tierstore.units import MIB

MARKS: dict[str, dict[str, object]] = {
    "layers": whole_layers(2),
    "operators": operators("attention", r"feed_forward\.mul", prefetch=1),
    "far ahead": whole_layers(50),
}


def _train(trial: Trial) -> None:
    for number in range(4):
        for part in range(2):
            loss = trial.model(inputs(2 * number + part)).square().mean()
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
    trial = Trial(model, [torch.optim.AdamW(model.parameters(), lr=1e-2)])
    torch.manual_seed(1)
    return trial


@functools.cache
def _plain() -> Trial:
    """Return what plain PyTorch comes to: the same in every case."""
    trial = _trial()
    _train(trial)
    return trial


SIZES: dict[str, dict[str, object]] = {
    "roomy": {"max_device_memory": "8MB", "offload_cpu_size": "8MB"},
    "short": {"max_device_memory": "1MB", "offload_cpu_size": "256KB"},
    "no device": {"device": "cpu", "offload_cpu_size": "256KB"},
}


@pytest.mark.parametrize(("marks", "size", "first"), covering(MARKS, SIZES, ["offload", "swap"]))
def test_offload_and_swap_together_are_the_same_bits(
    tmp_path: Path, marks: str, size: str, first: str
) -> None:
    """Every pair of what is swapped, of the room that there is, and of who was first."""
    plain, ours = _plain(), _trial()
    settings = {
        "device": "emulated",
        "device_options": LATE_AND_OVERWRITTEN,
        "offload_disk_size": "64MB",
        "offload_path": str(tmp_path),
        **SIZES[size],
    }
    if settings["device"] == "cpu":
        del settings["device_options"]
    swap_config = {"swap": True, **MARKS[marks]}
    torch.manual_seed(1)
    if first == "swap":
        with swap(ours.model, config(tmp_path / "swap", MARKS[marks])) as active:
            with offload(ours.model, ours.optimizers, settings):
                _train(ours)
                assert top_hooks() is None
            _check(active.stats().activations.kept)
    else:
        with (
            offload(ours.model, ours.optimizers, settings) as run,
            swap(ours.model, swap_config, store=run.store) as active,
        ):
            _train(ours)
            assert top_hooks() is None
            _check(active.stats().activations.kept)
            assert not any(key.startswith("activation/") for key in run.store)
            run.store.check()
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)


def _check(kept: int) -> None:
    assert kept >= 4 * 8


def test_no_parameter_is_swapped_while_it_is_offloaded(tmp_path: Path) -> None:
    marks = operators(".*", r".*\..*", prefetch=1)
    alone, together = _trial(), _trial()
    with swap(alone.model, config(tmp_path / "alone", marks)) as active:
        alone.model(inputs()).square().mean().backward()
        expected = active.stats().activations
    settings = config(tmp_path, {})["offload_config"]
    assert isinstance(settings, dict)
    with (
        offload(together.model, together.optimizers, settings) as run,
        swap(together.model, {"swap": True, **marks}, store=run.store) as active,
    ):
        together.model(inputs()).square().mean().backward()
        found = active.stats().activations
    assert (found.kept, found.kept_bytes) == (expected.kept, expected.kept_bytes)


# ---------------------------------------------------------------------- recompute


class Recomputed(nn.Module):
    """Layers of which some are recomputed."""

    def __init__(self, which: tuple[int, ...], part: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Llama(1).layers[0] for _ in range(4))
        self._which = which
        self._part = part

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        for number, layer in enumerate(self.layers):
            x = self._run(layer, x, is_recomputed=number in self._which)
        return x

    def _run(self, layer: nn.Module, x: Tensor, *, is_recomputed: bool) -> Tensor:
        def run(name: str, value: Tensor) -> Tensor:
            part = layer.get_submodule(name)
            if is_recomputed and name == self._part:
                result: Tensor = checkpoint(part, value, use_reentrant=False)
            else:
                result = part(value)
            return result

        if not self._part:
            whole: Tensor = checkpoint(layer, x, use_reentrant=False) if is_recomputed else layer(x)
            return whole
        x = x + run("attention", run("attention_norm", x))
        return x + run("feed_forward", run("ffn_norm", x))


def _slopes(model: nn.Module) -> list[Tensor]:
    loss = model(inputs()).square().mean()
    loss.backward()
    return [loss]


@pytest.mark.parametrize(
    "part", ["", "attention", "feed_forward"], ids=["layers", "attention", "feed forward"]
)
@pytest.mark.parametrize("marks", MARKS)
def test_checkpoint_inside_swap_is_the_same_bits(tmp_path: Path, part: str, marks: str) -> None:
    def build() -> nn.Module:
        return Recomputed((0, 2), part)

    assert_same_bits(build, _slopes, config(tmp_path, MARKS[marks]), least=4)


def _keys(model: nn.Module, path: Path, marks: dict[str, object]) -> set[str]:
    with swap(model, config(path, marks)) as active:
        loss = model(inputs())
        keys = set(active.store)
        loss.sum().backward()
        active.stats()
        assert len(active.store) == 0
    return keys


def _layers(keys: set[str]) -> set[int]:
    return {int(key.split("/")[1]) for key in keys}


def test_what_is_recomputed_is_not_swapped(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert _layers(_keys(Recomputed((0, 2), ""), tmp_path / "a", whole_layers(1))) == {1, 3}
    assert _layers(_keys(Recomputed((0, 2), "attention"), tmp_path / "b", operators("attention"))) == {1, 3}


def test_an_operator_whose_consumer_is_recomputed_is_not_swapped(tmp_path: Path) -> None:
    norms = operators("ffn_norm", prefetch=1)  # their outputs are used by the feed forward alone
    plain = _keys(Recomputed((), "feed_forward"), tmp_path / "a", norms)
    found = _keys(Recomputed((0, 2), "feed_forward"), tmp_path / "b", norms)
    assert _layers(plain) == {0, 1, 2, 3}
    # A norm that keeps what it needs itself is a consumer of its own: that stays swapped.
    own = {key for key in found if key.split("/")[1] in "02"}
    assert len(own) < len({key for key in plain if key.split("/")[1] in "02"})


@pytest.mark.parametrize("is_offloaded", [False, True], ids=["", "offloaded"])
@pytest.mark.parametrize("is_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_the_input_of_a_layer_that_is_recomputed_stays(
    tmp_path: Path, is_reentrant: bool, is_offloaded: bool
) -> None:
    class Chain(nn.Module):
        """Layers of one operator each that saves its input alone."""

        def __init__(self, *, is_reentrant: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Sine() for _ in range(3))
            self.is_reentrant = is_reentrant
            self.scale = nn.Parameter(torch.ones(1))  # so that it is a bundle's module

        def forward(self, x: Tensor) -> Tensor:
            """Transform; the layer in the middle is recomputed, and its input is saved by others, too."""
            first: Tensor = self.layers[0](x)
            second = checkpoint(self.layers[1], first, use_reentrant=self.is_reentrant)
            third: Tensor = self.layers[2](second)
            return third + first * first

    class Sine(nn.Module):
        """Saves its input."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(DIM))

        def forward(self, x: Tensor) -> Tensor:
            """Transform."""
            return (x + self.weight).sin()

    class Outer(nn.Module):
        """What has no layers of its own."""

        def __init__(self, chain: nn.Module) -> None:
            super().__init__()
            self.chain = chain

        def forward(self, x: Tensor) -> Tensor:
            """Transform."""
            output: Tensor = self.chain(x)
            return output

    # Each layer's own sum is saved by its sine: that of the layer in the middle is recomputed.
    model = Outer(Chain(is_reentrant=is_reentrant))
    settings = {"device": "emulated", "max_device_memory": "2MB", "offload_cpu_size": "8MB"}
    with offload(model, None, settings) if is_offloaded else contextlib.nullcontext():
        keys = _keys(model, tmp_path, whole_layers(1))
    assert keys == {"activation/0/0", "activation/2/0"}


def _small_run(tmp_path: Path) -> Offload:
    trial = _trial()
    settings = {
        "device": "emulated",
        "max_device_memory": "2MB",
        "offload_cpu_size": "8MB",
        "offload_path": str(tmp_path),
    }
    return offload(trial.model, trial.optimizers, settings)


def test_activations_that_a_program_keeps_in_a_run_s_store_are_counted_by_the_run(tmp_path: Path) -> None:
    with _small_run(tmp_path) as run:
        run.store.resize("device", 2 * MIB)
        activation_store = ActivationStore(run.store)
        offloaded = activation_store.keep(torch.arange(65536.0), "k")  # 256 KiB, and nothing else leases
        offloaded.release()
        run.store.resize("device", 0)  # as a run's own quota may be: it is raised for what is taken
        assert offloaded.take().equal(torch.arange(65536.0))
        assert run.store.stats().tiers["device"].capacity_bytes >= 262144


def test_an_activation_store_over_a_run_s_store_is_kept_no_longer_than_it_is_used(tmp_path: Path) -> None:
    model = Llama()
    with _small_run(tmp_path) as run:
        ended = []
        for _ in range(3):
            with swap(model, {"swap": True, **MARKS["layers"]}, store=run.store) as active:
                model(inputs(0)).sum().backward()
                ended.append(weakref.ref(active._activation_store))
            del active
            gc.collect()
        assert [each() for each in ended] == [None] * 3
