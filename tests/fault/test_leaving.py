"""A run that does not fit in memory is left without a loss, whatever fails, and whichever way is chosen."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tierstore as ts
from tests.fault.failing_memory import MemoryOut
from tests.fault.leaving_runs import (
    ERRORS,
    LAYOUTS,
    WIDTH,
    Training,
    assert_read,
    assert_released,
    assert_restored,
    begun,
    every_error,
    every_layout,
    limited,
)
from tests.fault.test_endings import copies, is_ordinary
from tests.training.twins import same
from tierstore.errors import BackendError, StoreClosed, UsageError
from tierstore.training import leaving, offload
from tierstore.training.budgets import host_room


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Tensor]]:
    """Return what there is after so many calls of `Training.step` with two, then one step each."""
    plain = Training()
    return [copies(plain.step(count).everything()) for count in (2, 1, 1)]


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """Leave nothing that dies in the midst of another test."""
    yield
    gc.collect()


# ---------------------------------------------------------------------- what is chosen


@every_layout
@pytest.mark.parametrize("has_raised", [False, True], ids=["", "raised"])
@pytest.mark.parametrize("choice", ["auto", "restore", "release"])
def test_what_is_chosen_at_opening_is_done_at_the_end_whether_the_block_raises_or_not(
    layout: str, choice: str, has_raised: bool, tmp_path: Path, expected: list[dict[str, Tensor]]
) -> None:
    training = Training()
    with (
        pytest.raises(ZeroDivisionError) if has_raised else contextlib.nullcontext(),
        training.offload(layout, tmp_path, choice),
    ):
        training.step(2)
        assert not has_raised or 1 / 0
    if choice == "release":
        assert_released(training, "was released when its run was closed, and its bytes are gone")
    else:
        assert_restored(training, expected[0])


@every_layout
@pytest.mark.parametrize("has_raised", [False, True], ids=["", "raised"])
def test_a_run_that_does_not_fit_is_released_and_a_warning_says_so_with_numbers(
    layout: str,
    has_raised: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = Training()
    limited(monkeypatch, 50_000)
    with (
        caplog.at_level(logging.WARNING, "tierstore"),
        pytest.raises(ZeroDivisionError) if has_raised else contextlib.nullcontext(),
        training.offload(layout, tmp_path) as run,
    ):
        training.step(2)
        if layout == "durable":
            run.checkpoint()
        assert not has_raised or 1 / 0
    (said,) = [each.getMessage() for each in caplog.records if "released" in each.getMessage()]
    assert "to spare, and the test's limit leaves 48.8 KiB" in said
    assert "run.save(path)" in said or str(tmp_path) in said
    assert_released(training, "released")


@every_layout
@pytest.mark.parametrize(("nbytes", "is_released"), [(50_000, True), (2**30, False)])
def test_whether_it_fits_is_what_the_machine_leaves_and_what_the_store_gives_up(
    layout: str, nbytes: int, is_released: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, run = begun(layout, tmp_path)
    limited(monkeypatch, nbytes, is_of_addresses=False)
    monkeypatch.setattr(host_room, "_freed_host_bytes", lambda _: 0)
    run.close()
    assert is_ordinary(training.model.first.weight) is not is_released


def test_what_the_store_gives_up_counts_where_memory_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, run = begun("host", tmp_path)
    monkeypatch.setattr(host_room, "_freed_host_bytes", lambda _: 2**20)
    limited(monkeypatch, 1000, is_of_addresses=False)
    run.close()
    assert is_ordinary(training.model.first.weight)


@every_layout
def test_close_is_told_otherwise_than_opening_was(
    layout: str, tmp_path: Path, expected: list[dict[str, Tensor]]
) -> None:
    training, run = begun(layout, tmp_path / "a", "release")
    run.close(restore=True)
    run.close(restore=False)  # it is closed
    assert_restored(training, expected[0])
    training, run = begun(layout, tmp_path / "b", "restore")
    run.close(restore=False)
    run.close(restore=True)
    assert_released(training, "gone")


@pytest.mark.parametrize("wrong", ["keep", None, True, 1])
def test_another_choice_is_refused_before_anything_is_done(wrong: object, tmp_path: Path) -> None:
    training = Training()
    with pytest.raises(UsageError, match="accepted is one of 'auto', 'restore', 'release'"):
        training.offload("host", tmp_path, wrong)  # type: ignore[arg-type]
    assert is_ordinary(training.model.first.weight)
    with training.offload("host", tmp_path) as run, pytest.raises(UsageError, match="restore='yes'"):
        run.close(restore="yes")  # type: ignore[arg-type]


def test_without_offloading_every_choice_leaves_ordinary_tensors() -> None:
    for choice, restore in itertools.product(("auto", "restore", "release"), (None, True, False)):
        training = Training()
        run = offload(training.model, training.optimizer, {"memory_offload": "OFF"}, on_close=choice)
        run.close(restore=restore)
        assert is_ordinary(training.model.first.weight)


# ---------------------------------------------------------------------- what fails


@every_layout
@every_error
def test_whichever_allocation_of_the_close_fails_the_run_goes_on_and_is_closed_later(
    layout: str, error: str, tmp_path: Path, expected: list[dict[str, Tensor]]
) -> None:
    for number in itertools.count(1, 17):
        path = tmp_path / str(number)
        training, run = begun(layout, path)
        with MemoryOut(number, 10**9, ERRORS[error]) as out, contextlib.suppress(BaseException):
            run.close(restore=True)
        if not out.failures:
            assert_restored(training, expected[0])
            break
        assert_read(training, expected[0])
        if number % 2:
            run.save(path / "saved")
            training.step()
            run.store.check()
        run.close(restore=True)
        assert_restored(training, expected[number % 2])
    assert number > 20


@every_layout
def test_one_failing_allocation_is_tried_again(
    layout: str, tmp_path: Path, expected: list[dict[str, Tensor]]
) -> None:
    training, run = begun(layout, tmp_path)
    with MemoryOut(5):
        run.close(restore=True)
    assert_restored(training, expected[0])


@pytest.mark.long
@every_layout
@every_error
@pytest.mark.parametrize("count", [1, 2, 3, 10**9])
def test_every_allocation_of_the_close_fails_in_turn(
    layout: str, error: str, count: int, tmp_path: Path, expected: list[dict[str, Tensor]]
) -> None:
    for number in itertools.count(1):
        training, run = begun(layout, tmp_path / str(number))
        with MemoryOut(number, count, ERRORS[error]) as out, contextlib.suppress(BaseException):
            run.close(restore=True)
        if not out.failures:
            break
        assert_read(training, expected[0])
        if not is_ordinary(training.model.last.bias):
            training.step()
            run.store.check()
            run.close(restore=True)
            assert_restored(training, expected[1])
        else:
            run.close(restore=True)
            assert_restored(training, expected[0])


@every_layout
@pytest.mark.parametrize("error", ["memory", "backend"])
def test_a_failed_close_raises_what_failed_and_says_that_the_run_stays_open(
    layout: str, error: str, tmp_path: Path
) -> None:
    _, run = begun(layout, tmp_path)
    with MemoryOut(4, 10**9, ERRORS[error]), pytest.raises((MemoryError, BackendError)) as raised:
        run.close(restore=True)
    (note,) = raised.value.__notes__
    assert "The run stays open" in note
    assert "run.close(restore=False)" in note
    run.close(restore=False)


@every_layout
def test_where_memory_is_short_what_was_restored_is_taken_back_at_once(layout: str, tmp_path: Path) -> None:
    training, run = begun(layout, tmp_path)
    keys = {key for key in run.store if not key.endswith("~next")}  # these are made again
    with MemoryOut(9, 2), pytest.raises(MemoryError):
        run.close(restore=True)
    assert set(run.store) == keys
    assert not any(is_ordinary(parameter) for parameter in training.model.parameters())
    run.close(restore=False)


@every_layout
def test_tiers_give_memory_back_while_bytes_leave_them_and_have_their_quotas_again_if_that_fails(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[dict[str, Tensor]]
) -> None:
    training, run = begun(layout, tmp_path)
    capacities = {name: tier.capacity_bytes for name, tier in run.store.stats().tiers.items()}
    monkeypatch.setattr(leaving, "_SHRINK_BYTES", 1)
    smallest = dict(capacities)
    resize = ts.Store.resize

    def note(store: ts.Store, tier: str, capacity: int, **shares: float | None) -> None:
        smallest[tier] = min(smallest[tier], capacity)
        resize(store, tier, capacity, **shares)

    monkeypatch.setattr(ts.Store, "resize", note)
    with MemoryOut(18, 10**9), pytest.raises(MemoryError):
        run.close(restore=True)
    assert smallest["host"] < capacities["host"]
    assert {name: tier.capacity_bytes for name, tier in run.store.stats().tiers.items()} == capacities
    training.step()
    run.store.check()
    run.close(restore=True)
    assert_restored(training, expected[1])


def test_what_was_pinned_is_pinned_again(tmp_path: Path, expected: list[dict[str, Tensor]]) -> None:
    training = Training()
    config = {**LAYOUTS["three"], "offload_path": str(tmp_path)}
    run = offload(training.model, training.optimizer, config, pinned=["first"])
    training.step(2)
    leased_bytes = run.store.leased_bytes("device")
    with MemoryOut(16, 2), pytest.raises(MemoryError):
        run.close(restore=True)
    assert run.store.leased_bytes("device") == leased_bytes > 0
    training.step()
    run.close(restore=True)
    assert_restored(training, expected[1])


@every_layout
def test_parts_of_one_memory_are_that_again_whatever_failed_before(
    layout: str, tmp_path: Path, expected: list[dict[str, Tensor]]
) -> None:
    training = Training()
    parameters = [training.model.first.weight, training.model.first.bias, training.model.again.bias]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters), parameters)
    run = training.offload(layout, tmp_path)
    training.step(2)
    for number in (3, 6, 9):
        with MemoryOut(number, 2), pytest.raises(MemoryError):
            run.close(restore=True)
    training.step()
    run.close(restore=True)
    assert_restored(training, expected[1])
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1


def test_a_suspended_run_that_cannot_be_left_stays_suspended(
    tmp_path: Path, expected: list[dict[str, Tensor]]
) -> None:
    training, run = begun("three", tmp_path)
    run.suspend()
    with MemoryOut(9, 2), pytest.raises(MemoryError):
        run.close(restore=True)
    assert run.store.stats().tiers["device"].charged_bytes == 0
    with pytest.raises(UsageError, match=r"run\.resume\(\)"):
        training.step()
    run.resume()
    training.step()
    run.close(restore=True)
    assert_restored(training, expected[1])


@every_layout
def test_an_alias_of_what_was_restored_and_taken_back_stays_one(
    layout: str, tmp_path: Path, expected: list[dict[str, Tensor]]
) -> None:
    training, run = begun(layout, tmp_path)
    alias = training.model.first.weight.data
    with MemoryOut(14, 2), pytest.raises(MemoryError):
        run.close(restore=True)
    assert same(alias, expected[0]["first.weight"])
    with torch.no_grad():
        training.model.first.weight.zero_()
    assert not alias.any()
    run.close(restore=True)
    assert not training.model.first.weight.any()
    alias.fill_(1)
    assert bool(training.model.first.weight.all())


@every_layout
def test_what_a_broken_medium_does_not_give_stays_in_the_run_and_the_rest_is_brought_back(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[dict[str, Tensor]]
) -> None:
    training, run = begun(layout, tmp_path)
    get = ts.Store.get
    broken = next(key for key in run.store if key.startswith("state/"))

    def fail(store: ts.Store, key: str, **options: object) -> Tensor:
        if key == broken:
            raise BackendError("a bad sector", key=key)
        return get(store, key, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(ts.Store, "get", fail)
        with pytest.raises(BackendError, match="a bad sector"):
            run.close()
        left = [key for key in run.store if not key.startswith("training/") and not key.endswith("~next")]
        assert left == [broken]
        assert all(map(is_ordinary, training.model.parameters()))
    training.step()  # takes the rest back
    run.store.check()
    run.close()
    assert_restored(training, expected[1])


@every_layout
def test_what_was_changed_after_a_failed_close_is_what_the_run_goes_on_with(
    layout: str, tmp_path: Path
) -> None:
    def change_and_step(training: Training) -> dict[str, Tensor]:
        gradient = training.model.first.weight.grad
        assert gradient is not None
        gradient.mul_(0.5)
        with torch.no_grad():
            training.model.turned.mul_(2)
        training.optimizer.state[training.model.turned]["exp_avg"].add_(1)
        training.optimizer.step()
        training.model.last.weight.data = torch.ones(3, 2 * WIDTH)
        training.backward()
        training.optimizer.step()
        return copies(training.everything())

    training, run = begun(layout, tmp_path)
    with MemoryOut(18, 10**9, ERRORS["backend"]), pytest.raises(BackendError):
        run.close(restore=True)
    assert is_ordinary(training.model.turned)
    change_and_step(training)
    assert not is_ordinary(training.model.turned)
    run.store.check()
    run.close()
    assert_restored(training, change_and_step(Training().step(2)))


@every_layout
def test_the_rest_of_a_broken_medium_is_released_alone(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, run = begun(layout, tmp_path)
    get = ts.Store.get

    def fail(store: ts.Store, key: str, **options: object) -> Tensor:
        if key.startswith("state/"):
            raise BackendError("a bad sector", key=key)
        return get(store, key, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ts.Store, "get", fail)
    with pytest.raises(BackendError, match="a bad sector"):
        run.close()
    run.close(restore=False)
    assert all(map(is_ordinary, training.model.parameters()))
    with pytest.raises(StoreClosed, match=r"'exp_avg' of 'first\.weight'"):
        training.optimizer.state[training.model.first.weight]["exp_avg"].sum()


@every_layout
def test_a_checkpoint_after_a_failed_close_is_whole(
    layout: str, tmp_path: Path, expected: list[dict[str, Tensor]]
) -> None:
    if layout != "durable":
        return
    training, run = begun(layout, tmp_path)
    with MemoryOut(9, 10**9, ERRORS["backend"]), pytest.raises(BackendError):
        run.close(restore=True)
    training.optimizer.zero_grad()
    run.checkpoint()
    run.close(restore=False)
    other = Training()
    with other.offload(layout, tmp_path) as resumed:
        assert resumed.resumed is not None
        other.backward()
        other.step()
    assert_restored(other, expected[1])


@pytest.mark.parametrize("layout", ["durable", "three"])
@every_error
def test_an_exception_of_the_block_is_never_masked_by_a_close_that_fails(
    layout: str, error: str, tmp_path: Path
) -> None:
    training, stack = Training(), contextlib.ExitStack()
    run = training.offload(layout, tmp_path, "restore")

    def fail_in_the_block() -> None:
        with run:
            training.step(2)
            stack.enter_context(MemoryOut(4, 10**9, ERRORS[error]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        fail_in_the_block()
    stack.close()
    notes = " ".join(raised.value.__notes__)
    assert "Closing the run has failed, too" in notes
    assert "The run stays open" in notes
    run.close(restore=True)
    assert is_ordinary(training.model.first.weight)


@every_layout
def test_two_interrupts_stop_it_half_way_and_one_does_not(
    layout: str, tmp_path: Path, expected: list[dict[str, Tensor]]
) -> None:
    training, run = begun(layout, tmp_path / "one")
    with MemoryOut(4, 1, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run.close(restore=True)
    assert_restored(training, expected[0])
    training, run = begun(layout, tmp_path / "two")
    with MemoryOut(4, 2, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run.close(restore=True)
    assert_read(training, expected[0])
    training.step()
    run.close(restore=True)
    assert_restored(training, expected[1])
