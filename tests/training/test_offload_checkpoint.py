"""``offload_checkpoint``: what recomputed modules are given waits in a tier; the bits are the same."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.pairs import covering
from tests.training.one_budget import SWAPS, TIERS, Way, build, document, train
from tests.training.recompute_models import CONFIGS, MODELS
from tests.training.test_recompute_bits import ALL_STEPS
from tests.training.twins import (
    Trial,
    assert_equal_lists,
    assert_equal_models,
    assert_equal_states,
)
from tierstore.errors import ConfigError
from tierstore.testing.memory import DeviceBudget
from tierstore.training import Offload, offload, recompute
from tierstore.training.activations.swapping import forward_pass
from tierstore.training.activations.swapping.activation_stats import ActivationStats
from tierstore.training.activations.swapping.activation_store import (
    ActivationStore,
    WeakOffloadedTensor,
)
from tierstore.training.pytorch.saved_tensor_hooks import top_hooks

TARGETS = {"cpu": "host", "disk": "disk"}
ROOMY = {
    "device": "emulated",
    "max_device_memory": "64MB",
    "offload_cpu_size": "64MB",
    "offload_disk_size": "64MB",
}

# ---------------------------------------------------------------------- the same bits

# By what: whole layers, submodules of layers, and beside what is swapped, whose numbers are indexes.
RECOMPUTED: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "layers": ({"recompute": True}, {"recompute": [0, 2]}),
    "submodules": (
        {"select_recompute": {"feed_forward": True, "attention": True}},
        {"select_recompute": {"feed_forward": [0, 1], "attention": [1]}},
    ),
    "layers but": (
        {"recompute": True, "select_recompute_exclude": ["aten.mm"]},
        {"recompute": [1, 2], "select_recompute": {r"feed_forward\.mul": [0]}},
    ),
}
WAYS = {f"{batches}, {dtype}": Way(batches, dtype) for batches in (1, 3) for dtype in (None, torch.bfloat16)}


def _is_there(case: tuple[str, ...]) -> bool:
    return case[0] == "cpu" or TIERS[case[3]]["offload_disk_size"] != 0


COMBINED = (TARGETS, SWAPS, RECOMPUTED, TIERS, WAYS)
ALL = [each for each in itertools.product(*COMBINED) if _is_there(each)]


@functools.cache
def _plain(way: Way) -> Trial:
    trial = build()
    train(trial, way)
    return trial


def _keys(run: Offload) -> list[str]:
    """Return the keys of what was given to modules that are recomputed."""
    return sorted(key for key in run.store if key.startswith("activation/input/"))


@pytest.mark.parametrize(
    ("target", "swap", "recomputed", "tiers", "way"), covering(*COMBINED, is_there=_is_there)
)
def test_whatever_is_combined_the_bits_are_the_same(
    target: str, swap: str, recomputed: str, tiers: str, way: str, tmp_path: Path
) -> None:
    """Every pair of values is tried; the long profile tries all combinations."""
    _assert_same(target, swap, recomputed, tiers, WAYS[way], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("target", "swap", "recomputed", "tiers", "way"), ALL)
def test_every_combination_has_the_same_bits(
    target: str, swap: str, recomputed: str, tiers: str, way: str, tmp_path: Path
) -> None:
    _assert_same(target, swap, recomputed, tiers, WAYS[way], tmp_path)


def _assert_same(target: str, swap: str, recomputed: str, tiers: str, way: Way, path: Path) -> None:
    plain, ours = _plain(way), build()
    settings = document(path, swap=swap, tiers=tiers, offload_checkpoint=target)
    settings["recompute_config"] = RECOMPUTED[recomputed][swap != "no swap"]
    with offload(ours.model, list(ours.optimizers), settings) as run:
        train(ours, way)
        run.store.check()
        if TARGETS[target] != run.store.tier_names[0]:
            stats = _stats(run)
            assert 0 < stats.kept <= stats.brought + stats.handed_over
        assert [key for key in run.store if key.startswith("activation/")] == []
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)
    assert_equal_states(plain.optimizer, ours.optimizer)


@pytest.mark.parametrize(
    ("steps", "model", "config"), covering(ALL_STEPS, MODELS, ["whole", "submodules", "whole but"])
)
def test_any_model_and_loop_have_the_same_bits_however_small_what_leaves_is(
    model: str, config: str, steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pair of a loop, a model and what is recomputed; test_recompute_bits has all three together."""
    monkeypatch.setattr(forward_pass, "SMALLEST_BYTES", 1)
    torch.manual_seed(0)
    plain = MODELS[model]()
    torch.manual_seed(0)
    ours = MODELS[model]()
    torch.manual_seed(1)
    expected = [*ALL_STEPS[steps](plain), torch.rand(2)]
    with offload(ours, None, _document(tmp_path, CONFIGS[config]), layers="layers") as run:
        torch.manual_seed(1)
        found = [*ALL_STEPS[steps](ours), torch.rand(2)]
        stats = run.stats().recompute
        assert stats is not None
        assert (_stats(run).kept > 0) == (stats.forwards > 0)
        gc.collect()
        run.stats()
        assert _keys(run) == []
        run.store.check()
    assert_equal_lists(expected, found)
    assert_equal_models(plain, ours)


# ---------------------------------------------------------------------- where the bytes are


COUNT, WIDTH, BATCH = 10, 64, 256
INPUT_BYTES = 4 * WIDTH * BATCH


def _document(
    path: Path, recompute_config: Mapping[str, object], target: str | None = "cpu", **more: object
) -> dict[str, object]:
    offload_config = {**ROOMY, "offload_path": str(path / "files"), "offload_checkpoint": target, **more}
    return {"offload_config": offload_config, "recompute_config": recompute_config}


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(COUNT)))


def _batch() -> Tensor:
    return torch.ones(BATCH, WIDTH)


@contextlib.contextmanager
def _run(model: nn.Module, path: Path, target: str | None = "cpu", **more: object) -> Iterator[Offload]:
    """Open a run that recomputes all layers, knows its device, and waits for what leaves."""
    leave = mock.patch.object(WeakOffloadedTensor, "leave", WeakOffloadedTensor.release)
    document = _document(path, {"recompute": True}, target, **more)
    with leave, offload(model, None, document, layers="") as run:
        for _ in range(3):
            model(_batch()).sum().backward()
            model.zero_grad()
        yield run
        run.store.check()


def _stats(run: Offload) -> ActivationStats:
    found = run.stats().activations
    assert found is not None
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_what_layers_are_given_waits_in_the_tier_and_nowhere_else(target: str, tmp_path: Path) -> None:
    model = _layers()
    with _run(model, tmp_path, target) as run:
        before = _stats(run)
        loss = model(_batch()).sum()
        keys = [f"activation/input/{number}/0" for number in range(1, COUNT)]  # the first is given the batch
        assert _keys(run) == keys
        assert {run.store.where(key) for key in keys[:-1]} == {(TARGETS[target],)}
        assert run.store.where(keys[-1])[0] == "device"  # it is wanted first, and there is room
        held = run.store.stats().tiers[TARGETS[target]].ready_bytes
        assert held >= (COUNT - 2) * INPUT_BYTES
        loss.backward()
        after = _stats(run)
        assert after.kept_bytes - before.kept_bytes == (COUNT - 1) * INPUT_BYTES
        assert after.released_bytes - before.released_bytes == (COUNT - 2) * INPUT_BYTES
        assert after.handed_over - before.handed_over == 1
        assert after.refused == 0
        assert _keys(run) == []


def test_on_the_host_the_disk_takes_what_layers_are_given(tmp_path: Path) -> None:
    model = _layers()
    expected = _slopes(_layers())
    with _run(model, tmp_path, "disk", device="cpu", max_device_memory=None) as run:
        loss = model(_batch()).square().sum()
        assert [run.store.where(key) for key in _keys(run)[:-1]] == [("disk",)] * (COUNT - 2)
        found = torch.autograd.grad(loss, list(model.parameters()))
        assert_equal_lists(expected, list(found))


@pytest.mark.parametrize("target", TARGETS)
def test_the_peak_on_the_device_falls_by_what_layers_are_given(target: str, tmp_path: Path) -> None:
    def peak_bytes(target: str | None) -> int:
        model = _layers()
        with _run(model, tmp_path / str(target), target), DeviceBudget("1GB") as budget:
            model(_batch().repeat(8, 1)).sum().backward()  # so that gradients are small beside it
        return budget.peak_bytes

    # The first layer is given the batch, which is the program's.  Where the peak is then, in the midst of
    # backward, there are what one layer was given, what is next, and two gradients of their size.
    assert peak_bytes(None) - peak_bytes(target) >= (COUNT - 1 - 4) * 8 * INPUT_BYTES


def test_what_the_next_layer_in_backward_was_given_comes_ahead_of_it(tmp_path: Path) -> None:
    model = _layers()
    asked: list[str] = []

    def note(number: int, *_: object) -> None:
        asked.append(f"layer {number}")

    with _run(model, tmp_path) as run:
        loss = model(_batch()).sum()
        for number, layer in enumerate(model.children()):
            layer.register_forward_pre_hook(functools.partial(note, number))
        prefetch = run.store.prefetch

        def prefetched(*keys: str, tier: str = "device") -> object:
            asked.extend(key for key in keys if tier == "device" and key.startswith("activation/"))
            return prefetch(*keys, tier=tier)

        with mock.patch.object(run.store, "prefetch", prefetched):
            loss.backward()
    expected = []
    for number in reversed(range(COUNT)):
        expected += [f"activation/input/{number - 1}/0"] if number > 1 else []
        expected.append(f"layer {number}")
    assert asked == expected


# ---------------------------------------------------------------------- what stays


class Given(nn.Module):
    """A layer that is given many things."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Add all of it up."""
        for each in others:
            x = x + each
        return torch.tanh(self.linear(x))


class Giving(nn.Module):
    """A model that gives its layers what is not theirs to send away, and one thing that is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Given() for _ in range(3))
        self.table = nn.Parameter(torch.ones(2 * BATCH, WIDTH))
        self.turns: Tensor
        self.register_buffer("turns", torch.ones(2 * BATCH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Give every layer the same."""
        small, shared, table = x.sum() * 0, x.cos(), self.table
        for layer in self.layers:
            x = layer(x, table[:BATCH], table.view_as(table)[BATCH:], self.turns[:BATCH], small, shared)
        return x


@pytest.mark.parametrize("ignored", [[], ["table"]], ids=["taken in", "ignored"])
def test_parameters_batches_buffers_and_what_is_small_stay_and_what_is_shared_is_one_key(
    ignored: Sequence[str], tmp_path: Path
) -> None:
    plain, ours = Giving(), Giving()
    ours.load_state_dict(plain.state_dict())
    slopes = torch.autograd.grad(plain(_batch().requires_grad_()).square().sum(), list(plain.parameters()))
    document = _document(tmp_path, {"recompute": True}, ignored=ignored)
    with offload(ours, None, document, layers="layers") as run:
        x = _batch().requires_grad_()
        loss = ours(x).square().sum()
        # Of the first layer what is shared, of the others what the layer before returned.
        assert _keys(run) == [f"activation/input/{number}/0" for number in range(3)]
        assert _stats(run).offloaded_bytes == 3 * INPUT_BYTES
        assert_equal_lists(slopes, torch.autograd.grad(loss, list(ours.parameters())))


def test_what_is_changed_in_place_is_refused_as_without(tmp_path: Path) -> None:
    class Writes(nn.Module):
        """A layer behind which somebody writes to what it was given."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            y = x.exp() + 1
            z: Tensor = self.layers[0](y)
            y += 1
            result: Tensor = self.layers[1](z + y)
            return result

    for target in (None, "cpu"):
        model = Writes()
        with offload(model, None, _document(tmp_path / str(target), {"recompute": True}, target)) as run:
            loss = model(_batch()).sum()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            del loss
            gc.collect()
            run.stats()
            assert _keys(run) == []


# ---------------------------------------------------------------------- how graphs end


def _slopes(model: nn.Module) -> list[Tensor | None]:
    loss = model(_batch()).square().sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("target", TARGETS)
def test_a_graph_that_is_retained_is_run_backward_twice_and_holds_no_device_memory(
    target: str, tmp_path: Path
) -> None:
    expected = _slopes(_layers())
    model = _layers()
    with _run(model, tmp_path, target) as run:
        loss = model(_batch()).square().sum()
        for _ in range(2):
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            assert_equal_lists(expected, list(found))
            del found
            gc.collect()
            run.stats()  # ends what nobody uses
            run.store.evict(*_keys(run), to=TARGETS[target]).result()  # only waits: nothing is leased
            assert {run.store.where(key) for key in _keys(run)} == {(TARGETS[target],)}
        del loss
        run.stats()
        assert _keys(run) == []


def test_a_graph_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    model = _layers()
    with _run(model, tmp_path) as run:
        loss = model(_batch()).sum()
        assert len(_keys(run)) == COUNT - 1
        del loss
        assert _stats(run).offloaded == 0
        assert _keys(run) == []
        before = _stats(run).released
        model(_batch()).sum().backward()
        assert _stats(run).released - before == COUNT - 2  # what was dropped does not leave any more


def _end(model: nn.Module, kind: type[BaseException]) -> None:
    """End a forward in its midst, inside of a layer, and keep nothing of the exception."""

    def end(*_: object) -> None:
        raise kind

    handle = model.get_submodule("4.0").register_forward_hook(end)
    with contextlib.suppress(kind):
        model(_batch())
    handle.remove()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_a_forward_that_was_ended_leaves_nothing_behind(
    kind: type[BaseException], target: str, tmp_path: Path
) -> None:
    expected = _slopes(_layers())
    model = _layers()
    with _run(model, tmp_path, target) as run:
        for _ in range(2):
            _end(model, kind)
            assert top_hooks() is None
            assert _stats(run).offloaded == 0
            assert _keys(run) == []
            assert_equal_lists(expected, _slopes(model))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_an_end_while_inputs_are_taken_leaves_nothing_behind(
    kind: type[BaseException], tmp_path: Path
) -> None:
    expected = _slopes(_layers())
    model = _layers()
    keep = ActivationStore.keep
    with _run(model, tmp_path) as run:
        for after in (True, False):
            calls = itertools.count()

            def kept(*args: object, calls: Iterator[int] = calls, after: bool = after) -> object:
                is_last = next(calls) == 3
                if is_last and not after:
                    raise kind
                found = keep(*args)  # type: ignore[arg-type]
                if is_last:
                    raise kind
                return found

            with mock.patch.object(ActivationStore, "keep", kept), contextlib.suppress(kind):
                model(_batch())
            assert next(calls) == 4
            assert top_hooks() is None
            assert _stats(run).offloaded == 0
            assert _keys(run) == []
            assert_equal_lists(expected, _slopes(model))


# ---------------------------------------------------------------------- what is said


def _nothing(model: nn.Module, path: Path) -> dict[str, object]:
    del model
    return _document(path, {})


def _operators(model: nn.Module, path: Path) -> dict[str, object]:
    del model
    return _document(path, {"select_recompute": [r"aten\.tanh"]})


def _off(model: nn.Module, path: Path) -> dict[str, object]:
    del model
    return _document(path, {"recompute": True}, memory_offload="OFF")


def _alone(model: nn.Module, path: Path) -> dict[str, object]:
    recompute(model, {"recompute": True}, layers="")
    return _document(path, {})


def _on_host(model: nn.Module, path: Path) -> dict[str, object]:
    del model
    config = {"device": "cpu", "offload_path": str(path), "offload_checkpoint": "cpu"}
    return {"offload_config": config, "recompute_config": {"recompute": True}}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (_nothing, "nothing is recomputed as a whole"),
        (_operators, "nothing is recomputed as a whole"),
        (_alone, "recompute(model, ...) keeps what its layers are given"),
        (_off, "memory_offload is OFF: offload_checkpoint has no effect"),
        (_on_host, "is in 'host' anyway"),
    ],
)
def test_where_it_has_no_effect_that_is_said(
    document: Callable[[nn.Module, Path], dict[str, object]],
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = _slopes(_layers())
    model = _layers()
    with caplog.at_level(logging.WARNING), offload(model, None, document(model, tmp_path), layers="") as run:
        assert_equal_lists(expected, _slopes(model))
        assert run.stats().activations is None or _stats(run).kept == 0
    assert [record.message for record in caplog.records if said in record.message] != []
    assert all("offload_checkpoint" in record.message for record in caplog.records)


def test_where_it_has_an_effect_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), _run(_layers(), tmp_path):
        pass
    assert caplog.records == []


@pytest.mark.parametrize("recompute_config", [{}, {"recompute": True}])
def test_a_tier_that_is_not_there_is_refused(recompute_config: dict[str, object], tmp_path: Path) -> None:
    document = _document(tmp_path, recompute_config, "disk", offload_disk_size=0)
    with pytest.raises(ConfigError, match="offload_checkpoint='disk' needs the tier 'disk'"):
        offload(_layers(), None, document, layers="")


def test_a_placement_says_where_it_goes_and_is_obeyed(tmp_path: Path) -> None:
    model = _layers()
    with _run(model, tmp_path, "cpu", placement={"inputs": "disk"}) as run:
        assert "what recomputed modules are given: in disk" in str(run.placement)
        loss = model(_batch()).sum()
        assert {run.store.where(key) for key in _keys(run)[:-1]} == {("disk",)}
        loss.backward()
    with pytest.raises(ConfigError, match="inputs='tape': this run has device, host, disk"):
        offload(model, None, _document(tmp_path, {}, None, placement={"inputs": "tape"}), layers="")
