"""Device bytes never exceed their budget, activations included, as an independent meter sees it."""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.sampling import IS_CI
from tests.training.ahead_loops import Taken, count_taken
from tests.training.one_budget import (
    BATCH,
    OPERATIONS,
    OPTIMIZERS,
    RECOMPUTES,
    SWAPS,
    Net,
    OwnAdamW,
    OwnSGD,
    Way,
    build,
    document,
    train,
)
from tests.training.swap_models import inputs, operators, whole_layers
from tests.training.twins import Trial, assert_equal_lists, assert_equal_models, assert_equal_states
from tierstore.errors import CapacityError
from tierstore.testing.memory import DeviceBudget, OutOfDeviceMemory
from tierstore.training import Offload, offload

__all__ = ["count_taken"]  # a fixture

KIB = 1024
QUIET = Way(is_logging=False)
_FEWEST = 2 if IS_CI else 5  # trainings: each takes seconds
STEPS = (BATCH,) * 5


@functools.cache
def _plain(sizes: tuple[int, ...] = STEPS, layers: int = 3) -> Trial:
    trial = build(layers)
    train(trial, QUIET, sizes)
    return trial


def _offload(trial: Trial, path: Path, budget_bytes: int, **how: object) -> Offload:
    texts = {key: str(how.pop(key)) for key in ("swap", "recompute", "tiers") if key in how}
    settings = document(path, **texts, **{"max_device_memory": budget_bytes, **how})  # type: ignore[arg-type]
    return offload(trial.model, list(trial.optimizers), settings)


def _assert_same(expected: Trial, found: Trial) -> None:
    assert_equal_lists(expected.logged, found.logged)
    assert_equal_models(expected.model, found.model)
    assert_equal_states(expected.optimizer, found.optimizer)


# What is made again in backward is there at once: a layer of 170 KiB, or a feed forward of 110 KiB.
LEAST_KIB = {"no recompute": 130, "a layer recomputed": 250, "operators recomputed": 200}


@pytest.mark.parametrize(
    ("kib", "recompute"), [(kib, each) for each, least in LEAST_KIB.items() for kib in (600, 300, least)]
)
def test_swap_trains_within_budgets_far_below_the_activations(
    tmp_path: Path, kib: int, recompute: str
) -> None:
    trial = build()
    budget = DeviceBudget(kib * KIB)
    with budget, _offload(trial, tmp_path, kib * KIB, recompute=recompute):
        train(trial, QUIET, STEPS)
    _assert_same(_plain(), trial)
    assert 0 < budget.peak_bytes <= kib * KIB


def test_the_activations_alone_are_more_than_that(tmp_path: Path) -> None:
    trial = build()
    with (
        DeviceBudget(450 * KIB),
        _offload(trial, tmp_path, 450 * KIB, swap="no swap", foresee=False),
        pytest.raises(OutOfDeviceMemory),
    ):
        train(trial, QUIET, STEPS)


def test_a_budget_that_one_bundle_does_not_fit_in_is_refused_with_numbers(tmp_path: Path) -> None:
    trial = build()
    with pytest.raises(CapacityError, match=r"cannot be trained on the device.*24\.0 KiB") as caught:
        _offload(trial, tmp_path, 24 * KIB)
    assert caught.value.free_bytes == 24 * KIB
    trial.model(inputs()).sum().backward()


def test_growing_inputs_find_room(tmp_path: Path) -> None:
    sizes = (1, 2, 2, 2, 3, 4, 5, 6, 6, 6)
    trial = build()
    budget = DeviceBudget(260 * KIB)
    with budget, _offload(trial, tmp_path, 260 * KIB):
        train(trial, QUIET, sizes)
    _assert_same(_plain(sizes), trial)


def test_evaluation_between_steps_finds_room(tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for number in range(4):
            train(trial, QUIET, (BATCH,))
            trial.model.eval()
            with torch.no_grad():
                trial.log(trial.model(inputs(number, 6)).mean())
            trial.model.train()

    plain, ours = build(), build()
    loop(plain)
    with DeviceBudget(200 * KIB), _offload(ours, tmp_path, 200 * KIB):
        loop(ours)
    _assert_same(plain, ours)


def test_optimizers_step_in_backward_while_activations_come_back(tmp_path: Path, taken: Taken) -> None:
    trial = build()
    with DeviceBudget(420 * KIB), _offload(trial, tmp_path, 420 * KIB):
        train(trial, QUIET, STEPS)
    _assert_same(_plain(), trial)
    assert taken.keys > 0, "no step was made ahead: nothing was tested"


def test_what_finds_no_room_on_the_device_goes_down_at_once(tmp_path: Path) -> None:
    trial = build()
    with DeviceBudget(150 * KIB), _offload(trial, tmp_path, 150 * KIB) as run:
        train(trial, QUIET, STEPS)
        at_once = run.stats().traffic["caller", "host"]
        assert at_once.nbytes > 0
    _assert_same(_plain(), trial)


# ---------------------------------------------------------------------- any model, any budget


@functools.cache
def _enough_bytes(layers: int, size: int) -> int:
    """Return what all activations and gradients need at once, and beside them the working set of a bundle."""
    trial = build(layers)
    with DeviceBudget("1GB") as meter:
        (trial.model(inputs(0, size)).square().mean()).backward()
        return meter.peak_bytes + 64 * KIB


@st.composite
def _trainings(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "layers": draw(st.integers(1, 4)),
        "sizes": tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=5))),
        "marks": draw(st.sampled_from([*SWAPS.values(), whole_layers(1), whole_layers(40)])),
        "recompute": draw(st.sampled_from([*RECOMPUTES])),
        "share": draw(st.sampled_from([0.15, 0.3, 0.45, 0.6, 0.8, 1.0, 1.2])),
        "host_kib": draw(st.sampled_from([128, 512, 65536])),
        "is_evaluated": draw(st.booleans()),
    }


@given(_trainings())
@settings(max_examples=max(_FEWEST, settings().max_examples // 10))
def test_any_training_stays_in_its_budget_or_says_that_it_cannot(training: dict[str, Any]) -> None:
    layers, sizes, share = training["layers"], training["sizes"], training["share"]
    enough = int(1.1 * _enough_bytes(layers, max(sizes)))
    budget_bytes = int(share * enough)

    def loop(trial: Trial) -> None:
        for size in sizes:
            train(trial, QUIET, (size,))
            if training["is_evaluated"]:
                with torch.no_grad():
                    trial.log(trial.model(inputs(0, size)).mean())

    plain, ours = build(layers), build(layers)
    loop(plain)
    with tempfile.TemporaryDirectory() as folder:
        settings_ = document(
            Path(folder),
            tiers="device, host, disk",
            recompute=training["recompute"],
            marks=training["marks"],
            max_device_memory=budget_bytes,
            offload_cpu_size=training["host_kib"] * KIB,
        )
        try:
            with (
                DeviceBudget(budget_bytes) as budget,
                offload(ours.model, list(ours.optimizers), settings_) as run,
            ):
                loop(ours)
                run.store.check()
        except (CapacityError, OutOfDeviceMemory) as error:
            event(f"{share}: {type(error).__name__}")
            if share >= 1:
                raise
            return
    event(f"{share}: trained")
    _assert_same(plain, ours)
    assert budget.peak_bytes <= budget_bytes


# ---------------------------------------------------------------------- more room never hurts

TWELVE = Net(64, 192, (("tanh * sin",),) * 12, is_residual=False, optimizer="SGD")


def _train(net: Net, marks: dict[str, object], budget_bytes: int) -> Trial | None:
    """Return what was trained within a budget; ``None``: it is too small, which somebody has said."""
    trial = net.build()
    with tempfile.TemporaryDirectory() as folder:
        settings_ = document(Path(folder), marks=marks, max_device_memory=budget_bytes)
        try:
            with (
                DeviceBudget(budget_bytes) as budget,
                offload(trial.model, trial.optimizer, settings_) as run,
            ):
                net.train(trial)
                run.store.check()
        except (CapacityError, OutOfDeviceMemory):
            return None
    assert budget.peak_bytes <= budget_bytes
    return trial


DEEP = Net(64, 96, (("relu",),) * 30, is_residual=True, optimizer="momentum in the end", has_targets=True)


@pytest.mark.parametrize(
    ("net", "prefetch", "kib"),
    [
        *((TWELVE, 1, kib) for kib in (295, 350, 450, 700, 3000)),
        *((TWELVE, 40, kib) for kib in (600, 730, 800)),
        *((DEEP, 1, kib) for kib in (210, 300, 600)),
    ],
)
def test_more_room_is_never_too_little(net: Net, prefetch: int, kib: int) -> None:
    plain = net.build()
    net.train(plain)
    found = _train(net, whole_layers(prefetch), kib * KIB)
    assert found is not None
    _assert_same(plain, found)


@pytest.mark.parametrize("kib", [130, 150, 180, 210, 240, 300])
def test_every_optimizer_of_a_step_finds_room(tmp_path: Path, kib: int) -> None:
    def run(trial: Trial) -> None:
        for number in range(4):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
            loss = trial.model(x).square().mean()
            loss.backward()
            trial.log(loss)
            for optimizer in trial.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def made() -> Trial:
        torch.manual_seed(0)
        small, large = (nn.Sequential(*(nn.Linear(32, n), nn.Linear(n, 32))) for n in (32, 128))
        model = nn.Sequential(*(layer for _ in range(6) for layer in copy.deepcopy(small)), *large)
        first, second = model[:-2].parameters(), model[-2:].parameters()
        return Trial(model, [OwnSGD(first, lr=0.1), OwnAdamW(second, foreach=True)])

    plain, ours = made(), made()
    run(plain)
    settings_ = document(tmp_path, marks={}, max_device_memory=kib * KIB)["offload_config"]
    with DeviceBudget(kib * KIB), offload(ours.model, list(ours.optimizers), settings_):  # type: ignore[arg-type]
        run(ours)
    _assert_same(plain, ours)


@st.composite
def _nets(draw: st.DrawFn) -> Net:
    operations = st.lists(st.sampled_from([*OPERATIONS]), max_size=3).map(tuple)
    return Net(
        width=draw(st.sampled_from([16, 32, 64])),
        batch=draw(st.sampled_from([4, 32, 128])),
        layers=tuple(draw(st.lists(operations, min_size=1, max_size=10))),
        is_residual=draw(st.booleans()),
        optimizer=draw(st.sampled_from([*OPTIMIZERS])),
        batches=draw(st.integers(1, 2)),
        has_targets=draw(st.booleans()),
        keeps_output=draw(st.booleans()),
        is_evaluated=draw(st.booleans()),
    )


def _all_bytes(net: Net) -> int:
    """Return more than what everything needs that ever is on the device."""
    trial = net.build()
    with DeviceBudget("1GB") as meter:
        net.train(trial, steps=2)
    return int(1.3 * (meter.peak_bytes + 4 * sum(p.nbytes for p in trial.model.parameters())))


@given(
    net=_nets(),
    marks=st.sampled_from([{}, whole_layers(1), whole_layers(3), whole_layers(40), operators("linear")]),
    shares=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=3, unique=True).map(sorted),
)
@settings(max_examples=max(_FEWEST, settings().max_examples // 12))
def test_what_trains_within_a_budget_trains_within_every_larger_one(
    net: Net, marks: dict[str, object], shares: list[float]
) -> None:
    plain, enough = net.build(), _all_bytes(net)
    net.train(plain)
    least: int | None = None
    for budget_bytes in [*(int(share * enough) for share in shares), enough]:
        found = _train(net, marks, budget_bytes)
        if found is None:
            assert least is None, f"{least} bytes are enough, and {budget_bytes} are not"
        else:
            least = budget_bytes if least is None else least
            _assert_same(plain, found)
    assert least is not None
    event("the least of all" if least == int(shares[0] * enough) else "more than the least")


# ---------------------------------------------------------------------- what a step is like


@pytest.mark.parametrize("kib", [150, 200, 300])
@pytest.mark.parametrize("sizes", [(6, 2, 6), (6, 6, 6, 2, 6, 6)], ids=str)
def test_a_smaller_batch_teaches_nothing_about_the_larger_ones(
    tmp_path: Path, kib: int, sizes: tuple[int, ...]
) -> None:
    trial = build()
    with DeviceBudget(kib * KIB), _offload(trial, tmp_path, kib * KIB):
        train(trial, QUIET, sizes)
    _assert_same(_plain(sizes), trial)


@pytest.mark.parametrize("kib", [250, 300, 500])
def test_a_model_may_be_evaluated_between_forward_and_backward(tmp_path: Path, kib: int) -> None:
    def loop(trial: Trial) -> None:
        torch.manual_seed(1)
        for number in range(5):
            loss = trial.model(inputs(number, 4)).square().mean()
            with torch.no_grad():
                trial.log(trial.model(inputs(number, 1)).mean())
            loss.backward()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    plain, ours = build(), build()
    loop(plain)
    with DeviceBudget(kib * KIB), _offload(ours, tmp_path, kib * KIB, recompute="a layer recomputed"):
        loop(ours)
    _assert_same(plain, ours)


def _linears(count: int, optimizer: str) -> Trial:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(count))
    model = nn.Sequential(*layers)
    return Trial(model, [OPTIMIZERS[optimizer](model)])


@pytest.mark.parametrize("kib", [450, 500, 600, 700])
def test_inputs_may_grow_where_gradients_are_being_added_up(tmp_path: Path, kib: int) -> None:
    def loop(trial: Trial) -> None:
        for micro in [(16, 16)] * 4 + [(16, 64), (64, 64)]:
            for size in micro:
                x = torch.randn(size, 64, generator=torch.Generator().manual_seed(size))
                trial.model(x).square().mean().backward()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    plain, ours = _linears(12, "SGD"), _linears(12, "SGD")
    loop(plain)
    with DeviceBudget(kib * KIB), _offload(ours, tmp_path, kib * KIB, marks={}):
        loop(ours)
    _assert_same(plain, ours)


@pytest.mark.parametrize("host_kib", [128, 400, 520, 540, 800])
def test_what_host_memory_cannot_hold_stays_on_a_device_that_can(tmp_path: Path, host_kib: int) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(4):
            trial.model(torch.ones(4, 64)).square().mean().backward()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    plain, ours = _linears(8, "AdamW"), _linears(8, "AdamW")
    loop(plain)
    small = {"offload_cpu_size": host_kib * KIB, "offload_disk_size": 0}
    with DeviceBudget(2048 * KIB), _offload(ours, tmp_path, 2048 * KIB, marks={}, **small):
        loop(ours)
    _assert_same(plain, ours)


def test_a_lease_whose_window_could_not_be_opened_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = _linears(4, "SGD")
    with _offload(trial, tmp_path, 400 * KIB, marks={}) as run:
        session = run._session
        assert session is not None
        assert session.budget is not None
        calls = 0

        def fail() -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise CapacityError("full", tier="device")

        with monkeypatch.context() as patch:
            patch.setattr(session.budget, "settle", fail)
            with pytest.raises(CapacityError, match="full"):
                trial.model(torch.ones(4, 64)).sum().backward()
        session.bindings.sweep()
        assert run.store.stats().tiers["device"].leased_bytes == 0
