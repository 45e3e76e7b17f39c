"""The end of an operation is told once, to everybody."""

from __future__ import annotations

import logging
import threading

import pytest

from tierstore.spi import Completion, PartialError

TIMEOUT_S = 30.0


def test_a_callback_that_raises_does_not_lose_those_after_it(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    completion = Completion()

    def fail(_error: BaseException | None) -> None:
        raise ValueError("a callback's own fault")

    completion.add_done_callback(lambda _: told.append("before"))
    completion.add_done_callback(fail)
    completion.add_done_callback(lambda _: told.append("after"))
    with caplog.at_level(logging.ERROR, "tierstore"):
        completion.complete()
    assert told == ["before", "after"]
    assert "a callback's own fault" in caplog.text


def test_a_callback_is_told_the_error_in_time_or_late() -> None:
    told: list[BaseException | None] = []
    completion, error = Completion(), OSError("the medium")
    completion.add_done_callback(told.append)
    completion.complete(error)
    completion.add_done_callback(told.append)
    assert told == [error, error]


def test_whoever_waits_goes_on_when_it_has_ended_and_only_then() -> None:
    completion = Completion()
    assert not completion.wait(0)
    seen: list[bool] = []
    waiter = threading.Thread(target=lambda: seen.append(completion.wait(TIMEOUT_S) and completion.is_done))
    waiter.start()
    completion.complete(OSError("the medium"))
    waiter.join(TIMEOUT_S)
    assert seen == [True]
    assert completion.wait()
    assert Completion.done().wait(0)


def test_a_completion_completes_once() -> None:
    completion = Completion()
    completion.complete()
    with pytest.raises(RuntimeError, match="twice"):
        completion.complete()
    with pytest.raises(RuntimeError, match="twice"):
        Completion.done().complete()


def test_a_partial_error_says_how_many_failed_and_why_the_first() -> None:
    error = PartialError({3: OSError("bad block"), 7: OSError("worse block")})
    assert "2 slots" in str(error)
    assert "bad block" in str(error)
    assert sorted(error.errors) == [3, 7]


def test_an_interrupt_in_a_callback_costs_only_that_one_and_is_let_through() -> None:
    told: list[str] = []
    completion = Completion()

    def interrupt(_error: BaseException | None) -> None:
        told.append("interrupted")
        raise KeyboardInterrupt

    completion.add_done_callback(interrupt)
    completion.add_done_callback(interrupt)
    completion.add_done_callback(lambda _: told.append("after"))
    with pytest.raises(KeyboardInterrupt):
        completion.complete()
    assert told == ["interrupted", "interrupted", "after"]
