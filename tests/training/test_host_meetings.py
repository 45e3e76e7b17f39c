"""Modules on the host, and what else a run does: swap, recompute, suspend, checkpoints, ends, faults."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

from tests.training.host_models import (
    CASES,
    WIDTH,
    Case,
    Moved,
    assert_confined,
    assert_nothing_crosses,
    assert_same_placed,
    place_plainly,
    trial_of,
)
from tests.training.one_budget import document
from tests.training.swap_models import Llama, inputs
from tests.training.twins import (
    Trial,
    assert_equal_lists,
    assert_equal_models,
    assert_equal_states,
    config_of,
)
from tierstore.errors import BackendError, CapacityError, UsageError
from tierstore.store import Store
from tierstore.testing.memory import DeviceBudget
from tierstore.training import Offload, offload

LAYER = CASES["layer"]
DENSE = CASES["dense"]
ROOM: Mapping[str, object] = {"max_device_memory": "256KB", "offload_disk_size": "64MB"}


def step(trial: Trial, count: int = 1) -> None:
    for _ in range(count):
        x, classes = torch.randn(6, WIDTH), torch.randint(0, 5, (6,))
        loss = nn.functional.cross_entropy(trial.model(x), classes)
        loss.backward()
        trial.log(loss)
        trial.log_gradients()
        for optimizer in trial.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def plain_of(case: Case, count: int) -> Trial:
    trial = trial_of(case)
    place_plainly(trial.model, case, Moved())
    torch.manual_seed(1)
    step(trial, count)
    return trial


def assert_same(plain: Trial, ours: Trial) -> None:
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)
    for expected, found in zip(plain.optimizers, ours.optimizers, strict=True):
        assert_equal_states(expected, found)


@contextlib.contextmanager
def begun(case: Case, path: Path, more: Mapping[str, object] = ROOM) -> Iterator[tuple[Trial, Offload]]:
    ours = trial_of(case)
    config = config_of("device", path, more)
    with offload(ours.model, list(ours.optimizers), config, placement=case.patterns) as run:
        ours.run = run
        torch.manual_seed(1)
        yield ours, run
        assert_confined(ours, case)
        run.store.check()


# ---------------------------------------------------------------------- activations


class _Moving:
    """A llama of which some is on the host, in both ways."""

    case = Case(
        lambda: Llama(3),
        {r"layers\.1": "cpu", r"layers\.2\.feed_forward": "cpu"},
        {"layers.1": "cpu", "layers.2.feed_forward": "cpu"},
        ["layers.1", "layers.2.feed_forward"],
    )

    @staticmethod
    def train(trial: Trial) -> None:
        for number in range(3):
            loss = trial.model(inputs(number)).square().mean()
            loss.backward()
            trial.log(loss)
            for optimizer in trial.optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("swap", ["no swap", "layers swapped", "operators swapped"])
@pytest.mark.parametrize("recompute", ["no recompute", "a layer recomputed", "operators recomputed"])
def test_swapped_and_recomputed_the_bits_are_the_same(
    swap: str, recompute: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = _Moving.case
    plain = trial_of(case)
    place_plainly(plain.model, case, Moved())
    torch.manual_seed(1)
    _Moving.train(plain)
    ours = trial_of(case)
    settings = document(tmp_path, swap=swap, recompute=recompute, tiers="device and host")
    with (
        caplog.at_level(logging.WARNING, "tierstore"),
        offload(ours.model, list(ours.optimizers), settings, placement=case.patterns) as run,
    ):
        ours.run = run
        torch.manual_seed(1)
        with DeviceBudget("1GiB", mixing="raise"):
            _Moving.train(ours)
        run.store.check()
        assert_confined(ours, case)
        assert_nothing_crosses(run)
        assert not [key for key in run.store if key.startswith("activation/")]
    assert_same(plain, ours)
    told = [each for each in caplog.messages if "compute on the host" in each]
    assert len(told) == (swap != "no swap")
    assert all("layers.1" in each and "layers.0" not in each for each in told)


def test_what_a_host_module_saves_is_not_swapped(tmp_path: Path) -> None:
    kept = {}
    for name, placement in (("device", {}), ("host", {r"layers\..": "cpu"})):
        trial = trial_of(Case(lambda: Llama(2), placement, {}))
        settings = document(tmp_path / name, swap="layers swapped", tiers="all fits")
        with offload(trial.model, list(trial.optimizers), settings, placement=placement) as run:
            trial.model(inputs()).square().mean().backward()
            found = run.stats().activations
            assert found is not None
            kept[name] = found.kept
    assert kept["device"] > 0
    assert kept["host"] == 0


def test_a_recomputed_host_module_is_given_its_input_once(tmp_path: Path) -> None:
    """What is kept of it is what has crossed: the way there is not gone again."""
    bytes_down = {}
    for again in ("no recompute", "a layer recomputed"):
        trial = trial_of(Case(lambda: Llama(1), {}, {}))
        settings = document(tmp_path / again, swap="no swap", recompute=again, tiers="all fits")
        ignored = {"ignored": [".*"]}  # no byte of a parameter moves
        settings["offload_config"] = {**settings["offload_config"], **ignored}  # type: ignore[dict-item]
        with offload(trial.model, None, settings, placement={r"layers\.0": "cpu"}) as run:
            x = inputs().requires_grad_()
            trial.model(x).square().mean().backward()
            traffic = run.stats().store
            assert traffic is not None
            bytes_down[again] = {way: moved.nbytes for way, moved in traffic.traffic.items()}
    assert bytes_down["no recompute"][("device", "host")] > 0
    assert bytes_down["no recompute"] == bytes_down["a layer recomputed"]


# ---------------------------------------------------------------------- there and back


@pytest.mark.parametrize("to", ["host", "disk"])
def test_a_suspended_run_goes_on(to: str, tmp_path: Path) -> None:
    plain = plain_of(DENSE, 4)
    with begun(DENSE, tmp_path) as (ours, run):
        for _ in range(4):
            step(ours)
            scores = ours.model(torch.zeros(1, WIDTH))  # which somebody keeps
            del scores
            run.suspend(to)
            tiers = run.stats().store
            assert tiers is not None
            assert tiers.tiers["device"].charged_bytes == 0
            with pytest.raises(UsageError, match="suspended"):
                ours.model(torch.zeros(1, WIDTH))
            run.resume()
    assert_same(plain, ours)


def test_a_graph_over_a_host_module_waits_in_host_memory(tmp_path: Path) -> None:
    with begun(LAYER, tmp_path) as (ours, run):
        loss = ours.model(torch.randn(6, WIDTH)).square().mean()
        run.suspend("host")
        run.resume()
        with pytest.raises(
            UsageError, match="values that modules on the host were given wait in host memory"
        ):
            run.suspend("disk")
        loss.backward()
        run.suspend("disk")
        run.resume()


@pytest.mark.parametrize("case", ["layer", "dense", "embedding", "buffers"])
def test_a_durable_run_goes_on_where_it_was(case: str, tmp_path: Path) -> None:
    placed = CASES[case]
    plain = plain_of(placed, 5)
    durable = {**ROOM, "durable": True}
    with begun(placed, tmp_path, durable) as (first, run):
        step(first, 3)
        run.checkpoint({"rng": torch.get_rng_state()})
        step(first)
    torch.manual_seed(5)
    again = trial_of(placed)
    config = config_of("device", tmp_path, durable)
    with offload(again.model, list(again.optimizers), config, placement=placed.patterns) as run:
        again.run = run
        assert run.resumed is not None
        torch.set_rng_state(run.resumed.extra["rng"])
        step(again, 2)
        assert_confined(again, placed)
    assert_equal_lists(plain.logged[-len(again.logged) :], again.logged)
    assert_equal_models(plain.model, again.model)


def test_a_checkpoint_goes_on_with_other_modules_on_the_host(tmp_path: Path) -> None:
    durable = {**ROOM, "durable": True}
    plain = plain_of(LAYER, 2)
    with begun(LAYER, tmp_path, durable) as (first, run):
        step(first, 2)
        run.checkpoint()
    for placement in ({"1": "cpu"}, {}, {"[12]": "cpu"}):
        again = trial_of(LAYER)
        config = config_of("device", tmp_path, durable)
        with offload(again.model, list(again.optimizers), config, placement=placement) as run:
            run.store.check()
            run.checkpoint()
        assert_equal_models(plain.model, again.model)


def test_saved_and_loaded_the_values_are_the_same(tmp_path: Path) -> None:
    plain = plain_of(DENSE, 3)
    with begun(DENSE, tmp_path) as (ours, run):
        step(ours, 3)
        run.save(tmp_path / "saved")
        entries = ours.model.state_dict()
        for optimizer in ours.optimizers:
            optimizer.load_state_dict(optimizer.state_dict())
        ours.model.load_state_dict(entries)
    assert_same(plain, ours)
    other = trial_of(DENSE)
    config = config_of("device", tmp_path / "other", ROOM)
    with offload(other.model, list(other.optimizers), config, placement=DENSE.patterns) as run:
        run.load(tmp_path / "saved")
    assert_equal_models(plain.model, other.model)


def test_what_a_run_has_returned_outlives_it(tmp_path: Path) -> None:
    plain = trial_of(LAYER)
    x = torch.randn(6, WIDTH)
    seen: list[Tensor] = []
    with begun(LAYER, tmp_path) as (ours, run):
        ours.model.get_submodule("2").register_forward_hook(lambda *given: seen.append(given[1][0]))
        scores = ours.model(x)
        copies = [scores.clone(), seen[0].clone()]
        del run
    assert torch.equal(scores, copies[0])
    assert torch.equal(seen[0], copies[1])
    assert torch.equal(scores, plain.model(x))


def _step_in_hook(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    def hook(p: Tensor) -> None:
        group = optimizer.param_groups[0]
        former, group["params"] = group["params"], [p]
        optimizer.step()
        group["params"] = former
        p.grad = None

    parameter.register_post_accumulate_grad_hook(hook)


def _stepped_in_backward(trial: Trial) -> None:
    if trial.run is None:
        for parameter in trial.model.parameters():
            _step_in_hook(trial.optimizer, parameter)
    for _ in range(3):
        loss = trial.model(torch.randn(6, WIDTH)).square().mean()
        loss.backward()
        trial.log(loss)


@pytest.mark.parametrize("case", ["layer", "dense"])
def test_steps_in_backward_are_made_on_the_host(case: str, tmp_path: Path) -> None:
    def optimize(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]

    more = {"optimizer_in_backward": True, "max_device_memory": "256KB"}
    assert_same_placed(CASES[case], _stepped_in_backward, "three", tmp_path, more, optimize)


def test_replicas_on_an_emulated_device_train_as_ever(tmp_path: Path) -> None:
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        plain = plain_of(DENSE, 3)
        with begun(DENSE, tmp_path) as (ours, _):
            wrapped = nn.parallel.DistributedDataParallel(ours.model, init_sync=False)
            inner, ours.model = ours.model, wrapped
            step(ours, 3)
            ours.model = inner
        assert_same(plain, ours)
    finally:
        distributed.destroy_process_group()


def test_an_optimizer_that_steps_all_at_once_steps_on_one_side(tmp_path: Path) -> None:
    class Whole(torch.optim.SGD):
        """Not known to treat each parameter by itself."""

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            super().step()

    trial = trial_of(LAYER, lambda model: [Whole(model.parameters(), lr=0.1)])
    with pytest.raises(Exception, match=r"steps all at once, and would step .* on 'cpu'"):
        offload(
            trial.model, list(trial.optimizers), config_of("device", tmp_path, ROOM), placement=LAYER.patterns
        )

    def optimize(model: nn.Module) -> list[torch.optim.Optimizer]:
        own = set(model[2].parameters())  # type: ignore[index]
        rest = [p for p in model.parameters() if p not in own]
        return [Whole(model[2].parameters(), lr=0.1), Whole(rest, lr=0.1)]  # type: ignore[index]

    assert_same_placed(LAYER, lambda each: step(each, 3), "device", tmp_path, ROOM, optimize)


def test_whoever_looks_at_what_is_on_the_host_finds_it_there(tmp_path: Path) -> None:
    with begun(DENSE, tmp_path) as (ours, run):
        step(ours)
        ours.model(torch.randn(6, WIDTH)).square().mean().backward()
        weight = ours.model.get_parameter("1.weight")
        assert weight.grad is not None
        assert "grad/1.weight" in run.store
        for tensor in (weight, weight.grad, ours.optimizer.state[weight]["exp_avg"]):
            assert tensor.device.type == "cpu"
            with torch.no_grad():
                tensor.mul_(2)
            assert_confined(ours, DENSE)
        weight.data = torch.zeros_like(weight)  # and comes home
        step(ours)


# ---------------------------------------------------------------------- faults


class _Failing:
    """Lets the n-th call of one of a store's verbs on a crossing's key fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, verb: str, error: type[Exception]) -> None:
        self.left = -1
        plainly = getattr(Store, verb)

        def call(store: Store, *keys: str, **named: object) -> object:
            if str(keys[0]).startswith("cross/"):
                self.left -= 1
                if self.left == 0:
                    raise error(f"{verb} fails on purpose")
            return plainly(store, *keys, **named)

        monkeypatch.setattr(Store, verb, call)


@pytest.mark.parametrize("error", [BackendError, CapacityError, KeyboardInterrupt])
@pytest.mark.parametrize("verb", ["put", "adopt", "evict", "lease"])
def test_a_crossing_that_fails_leaves_nothing_and_the_next_step_is_right(
    verb: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = _Failing(monkeypatch, verb, error)
    plain = plain_of(DENSE, 2)
    outcomes = set()
    for n in itertools.count(1):
        with begun(DENSE, tmp_path / str(n)) as (ours, run):
            step(ours)
            random = torch.get_rng_state()
            failing.left = n
            try:
                x, classes = torch.randn(6, WIDTH), torch.randint(0, 5, (6,))
                nn.functional.cross_entropy(ours.model(x), classes).backward()
            except (error, CapacityError) as raised:
                outcomes.add(type(raised))
            is_over = failing.left > 0
            failing.left = -1
            for optimizer in ours.optimizers:
                optimizer.zero_grad()
            torch.set_rng_state(random)
            step(ours)
            run.stats()
        assert_same(plain, ours)
        if is_over:
            break
    assert n > 2
    assert outcomes or error is CapacityError


def test_a_full_host_is_told_with_numbers(tmp_path: Path) -> None:
    small = {"offload_cpu_size": "24KB", "max_device_memory": "1MB", "offload_disk_size": 0}
    case = Case(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), {"1": "cpu"}, {"1": "cpu"})
    trial = trial_of(case, lambda _: [])
    with offload(trial.model, None, config_of("device", tmp_path, small), placement=case.patterns) as run:
        with pytest.raises(CapacityError, match="offload_cpu_size"):
            trial.model(torch.zeros(1024, WIDTH))
        assert_nothing_crosses(run)
        trial.model(torch.zeros(2, WIDTH))
