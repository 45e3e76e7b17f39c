"""Steps on the host that a thread of their own makes during backward: nobody can tell but by the time."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierstore as ts
from tests import forked
from tests.training.ahead_loops import quiet_step
from tests.training.host_models import CASES, assert_same_placed
from tests.training.host_steps import (
    ON_HOST,
    PATIENCE_S,
    Asides,
    FailingThread,
    StepGate,
    count_asides,
    gate,
    waited,
)
from tests.training.test_ahead import BETWEEN, aliases
from tests.training.twins import (
    WIDTH,
    Trial,
    assert_equal_models,
    assert_equal_states,
    assert_same,
    batch,
    build_blocks,
    config_of,
    is_on_accelerator,
    loss_of,
    with_copies,
    with_device,
    with_rest,
)
from tierstore.leases import Lease
from tierstore.training import Offload, offload
from tierstore.training.optimizers import steps_aside
from tierstore.training.optimizers.host_stepper import THREAD_NAME, steps_in_their_time

__all__ = ["count_asides", "gate", "waited"]  # fixtures

some_layouts = pytest.mark.parametrize("layout", ["device", "three"])


def quiet_steps(trial: Trial, count: int = 4) -> None:
    for _ in range(count):
        quiet_step(trial)


def open_run(trial: Trial, layout: str, path: Path, more: Mapping[str, object] | None = None) -> Offload:
    roomy = with_device(layout, "4MB")  # for what a plain trial has there beside it
    host = {"offload_cpu_size": "512KB"} if layout == "three" else {}
    config = config_of(layout, path, {**ON_HOST, **roomy, **host, **(more or {})})
    return offload(trial.model, list(trial.optimizers), with_rest(config, trial.model))


def two_trials() -> tuple[Trial, Trial]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Trial(*build_blocks()))
    return made[0], made[1]


def train(trial: Trial, data: tuple[Tensor, Tensor]) -> Tensor:
    loss = loss_of(trial.model, *data)
    loss.backward()
    trial.optimizer.step()
    trial.optimizer.zero_grad()
    return loss.detach()


# ---------------------------------------------------------------------- where it happens


@some_layouts
def test_steps_are_made_aside_where_nothing_forbids_it(layout: str, tmp_path: Path, asides: Asides) -> None:
    assert_same(build_blocks, quiet_steps, layout, tmp_path, ON_HOST)
    assert asides.made > 20, "ten bundles, in three steps"
    assert asides.threads == {THREAD_NAME}


def test_so_are_those_of_modules_on_the_host(tmp_path: Path, asides: Asides) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(4):
            loss = trial.model(torch.randn(6, 16)).square().mean()
            loss.backward()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    case = CASES["layer"]
    assert_same_placed(case, loop, "device", tmp_path)
    assert asides.made
    assert asides.threads == {THREAD_NAME}


def test_without_a_device_there_is_nothing_beside_which_to_step(tmp_path: Path, asides: Asides) -> None:
    if is_on_accelerator:
        pytest.skip("there is a device")
    assert_same(build_blocks, quiet_steps, "disk", tmp_path)
    assert asides.handed == 0


def test_with_steps_in_their_time_bits_are_the_same(tmp_path: Path, asides: Asides) -> None:
    with steps_in_their_time():
        assert_same(build_blocks, quiet_steps, "device", tmp_path / "off", ON_HOST)
    assert asides.handed == 0
    assert_same(build_blocks, quiet_steps, "device", tmp_path / "on", ON_HOST)
    assert asides.handed


def test_where_new_values_find_no_room_beside_old_ones_steps_are_made_in_their_time(
    tmp_path: Path, asides: Asides
) -> None:
    handed = []
    for size in ("448KB", "512KB", "64MB"):  # in the second one what is free is in pieces
        before = asides.handed
        assert_same(
            build_blocks, quiet_steps, "device", tmp_path / size, {**ON_HOST, "offload_cpu_size": size}
        )
        handed.append(asides.handed - before)
    assert handed[0] < handed[2]
    assert handed == sorted(handed)


def test_steps_made_aside_are_given_up_where_room_is_short(tmp_path: Path, asides: Asides) -> None:
    plain, ours = two_trials()
    with open_run(ours, "device", tmp_path, {"offload_cpu_size": "5MB"}) as run:
        for _ in range(2):
            data = batch()
            assert torch.equal(train(plain, data), train(ours, data))
        data = batch()
        for trial in (plain, ours):
            loss_of(trial.model, *data).backward()
        assert run._session is not None
        run._session.host_stepper.finish()
        made = [key for key in run.store if key.endswith("~next")]
        host = run.store.stats().tiers["host"]
        free_bytes = host.capacity_bytes - host.charged_bytes
        run.store.put("large", torch.zeros(free_bytes + 1024, dtype=torch.uint8), tier="host")
        assert made
        assert not [key for key in run.store if key.endswith("~next")]
        run.store.drop("large")
        for _ in range(3):
            for trial in (plain, ours):
                trial.optimizer.step()
                trial.optimizer.zero_grad()
                loss_of(trial.model, *data).backward()
    assert_equal_models(plain.model, ours.model)
    assert_equal_states(plain.optimizer, ours.optimizer)


def test_whatever_comes_between(tmp_path: Path, asides: Asides) -> None:
    handed: dict[str, list[int]] = {}

    def loop(trial: Trial) -> None:
        for number, between in enumerate(BETWEEN):
            for _ in range(2):
                quiet_step(trial)
            before = asides.handed
            loss = loss_of(trial.model, *batch())
            loss.backward()
            handed.setdefault(between.__name__, []).append(asides.handed - before)
            between(trial, number % 3)
            for optimizer in trial.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            aliases.clear()

    assert_same(build_blocks, loop, "device", tmp_path, {**ON_HOST, **with_copies("device")})
    unused = [name for name, counts in handed.items() if not sum(counts)]
    assert len(unused) < len(BETWEEN) / 3, f"no step was handed over before {unused}"


def test_a_step_made_with_other_settings_of_a_thread_is_made_again(tmp_path: Path) -> None:
    """The worker's thread does not see what this one sets for itself."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor does not flush")

    def loop(trial: Trial) -> None:
        for parameter in trial.model.parameters():
            parameter.register_post_accumulate_grad_hook(_make_tiny)
        for turn in range(4):
            loss_of(trial.model, *batch()).backward()
            torch.set_flush_denormal(turn == 3)
            try:
                trial.optimizer.step()
            finally:
                torch.set_flush_denormal(False)
            trial.optimizer.zero_grad()

    def build() -> tuple[nn.Module, Sequence[torch.optim.Optimizer]]:
        model, _ = build_blocks()
        return model, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]

    assert_same(build, loop, "device", tmp_path, ON_HOST)


def _make_tiny(parameter: Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.grad.mul_(1e-38)  # what a step makes of it is subnormal


# ---------------------------------------------------------------------- order, with gates


@some_layouts
def test_a_step_on_the_host_ends_before_backward_does(layout: str, tmp_path: Path, gate: StepGate) -> None:
    plain, ours = two_trials()
    with open_run(ours, layout, tmp_path):
        for _ in range(2):
            data = batch()
            assert torch.equal(train(plain, data), train(ours, data))
        ended: list[bool] = []
        gate.passed.clear()
        data = batch()
        for trial in (plain, ours):
            x, classes = data
            middle = trial.model[:1](x)  # type: ignore[index]
            if trial is ours:
                middle.register_hook(lambda _: ended.append(gate.passed.wait(PATIENCE_S)))
            loss = nn.functional.cross_entropy(trial.model[1:](middle), classes)  # type: ignore[index]
            loss.backward()
            trial.optimizer.step()
            trial.optimizer.zero_grad()
        assert ended == [True]
    assert_equal_models(plain.model, ours.model)
    assert_equal_states(plain.optimizer, ours.optimizer)


@some_layouts
def test_backward_goes_on_while_a_step_on_the_host_stands_still(
    layout: str, tmp_path: Path, gate: StepGate
) -> None:
    plain, ours = two_trials()
    with open_run(ours, layout, tmp_path):
        for _ in range(2):
            data = batch()
            assert torch.equal(train(plain, data), train(ours, data))
        data = batch()
        loss_of(plain.model, *data).backward()
        with gate.closed():
            loss = loss_of(ours.model, *data)
            loss.backward()
            assert gate.reached.wait(PATIENCE_S)
            assert not gate.passed.is_set()
            if is_on_accelerator:
                torch.accelerator.synchronize()  # the device has done all that backward told it
            assert torch.isfinite(loss.detach().cpu())
        for trial in (plain, ours):
            trial.optimizer.step()
            trial.optimizer.zero_grad()
    assert_equal_models(plain.model, ours.model)
    assert_equal_states(plain.optimizer, ours.optimizer)


@pytest.mark.parametrize("layout", ["device"])
def test_what_changes_before_anything_is_leased_is_stepped_in_its_time(
    layout: str, tmp_path: Path, asides: Asides, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, may_fetch = ts.Store.fetch, threading.Event()

    def wait_and_fetch(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as `Store.fetch`
        if threading.current_thread().name == THREAD_NAME:
            assert may_fetch.wait(PATIENCE_S)
        return fetch(*args, **kwargs)

    monkeypatch.setattr(ts.Store, "fetch", wait_and_fetch)
    plain, ours = two_trials()
    with open_run(ours, layout, tmp_path):
        for turn in range(3):
            data = batch()
            before = asides.made
            may_fetch.clear()
            for trial in (plain, ours):
                loss_of(trial.model, *data).backward()
                if turn == 2:
                    with torch.no_grad():
                        for parameter in trial.model.parameters():
                            parameter.mul_(0.5)
            may_fetch.set()
            for trial in (plain, ours):
                trial.optimizer.step()
                trial.optimizer.zero_grad()
        assert asides.made == before
        assert asides.handed > before
    assert_equal_models(plain.model, ours.model)
    assert_equal_states(plain.optimizer, ours.optimizer)


# ---------------------------------------------------------------------- others, while it stands still


def _lease_everything(trial: Trial) -> None:
    if trial.run is None:
        return
    for key in trial.run.store:
        trial.run.store.lease(key, tier="host", write=True).release(written=False)


def _suspend(trial: Trial) -> None:
    if trial.run is not None:
        trial.run.suspend()
        trial.run.resume()


def _close(trial: Trial) -> None:
    if trial.run is not None:
        trial.run.close()


def _halve_gradients(trial: Trial) -> None:
    for parameter in trial.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def _zero_in_place(trial: Trial) -> None:
    trial.optimizer.zero_grad(set_to_none=False)


def _forget_gradients(trial: Trial) -> None:
    trial.optimizer.zero_grad()


def _add_another_backward(trial: Trial) -> None:
    device = next(trial.model.parameters()).device  # whatever this thread makes tensors on
    inputs, classes = torch.ones(8, WIDTH, device=device), torch.zeros(8, dtype=torch.int64, device=device)
    loss_of(trial.model, inputs, classes).backward()


def _step(trial: Trial) -> None:
    trial.optimizer.step()


WHILE: list[Callable[[Trial], None]] = [
    _halve_gradients,
    _zero_in_place,
    _forget_gradients,
    _add_another_backward,
    _step,
    _suspend,
    _lease_everything,
    _close,
]


@pytest.mark.parametrize("layout", ["device"])
@pytest.mark.parametrize("act", WHILE, ids=lambda act: act.__name__.strip("_"))
def test_who_needs_what_a_step_has_waits_for_it_and_is_refused_nothing(
    act: Callable[[Trial], None], layout: str, tmp_path: Path, gate: StepGate, waited: threading.Event
) -> None:
    plain, ours = two_trials()
    with open_run(ours, layout, tmp_path) as ours.run, ThreadPoolExecutor(1) as pool:
        for turn in range(5):
            data = batch()
            loss_of(plain.model, *data).backward()
            if turn == 2:
                act(plain)
                with gate.closed():
                    loss_of(ours.model, *data).backward()
                    assert gate.reached.wait(PATIENCE_S)
                    waited.clear()
                    asked = pool.submit(act, ours)
                    assert waited.wait(PATIENCE_S)
                    assert not asked.done()
                asked.result(PATIENCE_S)
            else:
                loss_of(ours.model, *data).backward()
            for trial in (plain, ours):
                trial.optimizer.step()
                trial.optimizer.zero_grad()
    assert_equal_models(plain.model, ours.model)
    assert_equal_states(plain.optimizer, ours.optimizer)


# ---------------------------------------------------------------------- faults

_OPERATIONS = [
    (ts.Store, "fetch"),
    (ts.Store, "lease"),
    (ts.Store, "put"),
    (Lease, "split"),
    (steps_aside, "made_from"),
]


@pytest.mark.parametrize("error", [ts.BackendError, MemoryError, ts.CapacityError])
@some_layouts
def test_whatever_fails_in_the_thread_the_step_is_made_in_its_time(
    layout: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = FailingThread()
    for owner, name in _OPERATIONS:
        monkeypatch.setattr(owner, name, thread.count(getattr(owner, name)))
    plain, ours = two_trials()
    with open_run(ours, layout, tmp_path) as run:
        for number in itertools.chain([0, 0], range(1, 24, 3)):
            failed = thread.failed
            thread.fail_next(number, error)
            data = batch()
            assert torch.equal(train(plain, data), train(ours, data))
            run.store.check()
            if number and thread.failed == failed:  # after a MemoryError no steps are made ahead
                break
        assert thread.failed
        assert not [key for key in run.store if key.endswith("~next")]
        assert not run.store.leased_bytes("host")
    assert_equal_models(plain.model, ours.model)
    assert_equal_states(plain.optimizer, ours.optimizer)


def test_where_no_thread_can_be_started_steps_are_made_in_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == THREAD_NAME:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert_same(build_blocks, quiet_steps, "device", tmp_path, ON_HOST)


@pytest.mark.parametrize("where", ["backward", "step"])
def test_an_interrupt_while_a_step_is_made_aside(where: str, tmp_path: Path, gate: StepGate) -> None:
    plain, ours = two_trials()
    with open_run(ours, "device", tmp_path) as run:
        for _ in range(2):
            data = batch()
            assert torch.equal(train(plain, data), train(ours, data))
        data = batch()
        with gate.closed():
            with pytest.raises(KeyboardInterrupt):
                _train_and_interrupt(ours, data, where, gate)
            gate.open()
        ours.optimizer.zero_grad()
        changed = not torch.equal(next(plain.model.parameters()).cpu(), next(ours.model.parameters()).cpu())
        if changed:  # the handler was called as the step had ended
            loss_of(plain.model, *data).backward()
            plain.optimizer.step()
            plain.optimizer.zero_grad()
        next(ours.model.parameters())._backward_hooks = None
        for _ in range(3):
            data = batch()
            assert torch.equal(train(plain, data), train(ours, data))
        run.store.check()
    assert_equal_models(plain.model, ours.model)
    assert_equal_states(plain.optimizer, ours.optimizer)


def _train_and_interrupt(trial: Trial, data: tuple[Tensor, Tensor], where: str, gate: StepGate) -> None:
    loss = loss_of(trial.model, *data)
    if where == "backward":
        next(trial.model.parameters()).register_hook(_interrupt)
    loss.backward()
    threading.Timer(0.05, _interrupt_and_open, [gate]).start()
    trial.optimizer.step()
    threading.Event().wait(PATIENCE_S)  # the handler may wait until the library is left


def _interrupt(_: Tensor) -> None:
    signal.raise_signal(signal.SIGINT)


def _interrupt_and_open(gate: StepGate) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    gate.open()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_child_of_a_fork_waits_for_no_thread(tmp_path: Path, gate: StepGate) -> None:
    if is_on_accelerator:
        pytest.skip("an accelerator is of no use in a child")
    _, ours = two_trials()
    with open_run(ours, "device", tmp_path) as run:
        for _ in range(2):
            train(ours, batch())
        with gate.closed():
            loss_of(ours.model, *batch()).backward()
            assert gate.reached.wait(PATIENCE_S)

            def child() -> None:
                with pytest.raises(ts.StoreForked):
                    ours.optimizer.step()
                run.close()

            forked.in_child(child)
        ours.optimizer.step()
        run.store.check()


def test_a_program_that_ends_while_a_step_is_made_ends_well() -> None:
    said = forked.run_python(_ENDS_AT_ONCE)
    assert "made" in said


_ENDS_AT_ONCE = """
import tempfile, torch
from torch import nn
from tests.training.twins import batch, build_blocks, config_of, loss_of
from pathlib import Path
from tierstore.training import offload
from tierstore.training.optimizers import steps_aside

made_from = steps_aside.made_from
def tell(*args):
    made = [made_from(*args) for _ in range(20)][-1]
    print("made", flush=True)
    return made
steps_aside.made_from = tell

model, (optimizer,) = build_blocks()
config = config_of("device", Path(tempfile.mkdtemp()), {"optimizer_target": "cpu"})
run = offload(model, optimizer, config)
for _ in range(3):
    loss_of(model, *batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
loss_of(model, *batch()).backward()
"""
