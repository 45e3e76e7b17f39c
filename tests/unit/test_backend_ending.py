"""The end of a backend that owns files or objects: once, whoever comes first, and never in a fork's child."""

from __future__ import annotations

import threading
from types import TracebackType

import pytest

from tests.files_disk import TIMEOUT_S
from tierstore import forks
from tierstore_backends.lifetime import BackendLifetime


class Owner:
    """Something that owns something."""

    def __init__(self, told: list[str]) -> None:
        self.ending = BackendLifetime(self, lambda: told.append("disowned"), told.append, "shut")


def test_it_ends_once() -> None:
    told: list[str] = []
    owner = Owner(told)
    for _ in range(2):
        owner.ending.close()
    assert owner.ending.is_over
    assert told == ["shut"]


def test_what_nobody_refers_to_ends_by_itself() -> None:
    told: list[str] = []
    Owner(told)
    assert told == ["shut"]


def test_an_end_that_fails_is_told_once_and_is_over() -> None:
    def shut() -> None:
        raise OSError("the disk is gone")

    owner = Owner([])
    ending = BackendLifetime(owner, lambda: None, shut)
    with pytest.raises(OSError, match="the disk is gone"):
        ending.close()
    assert ending.is_over
    ending.close()


class Queue:
    """A lock that says when the second comes to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._came = 0  # guarded by _counting
        self.second_came = threading.Event()

    def __enter__(self) -> None:
        with self._counting:
            self._came += 1
            if self._came == 2:
                self.second_came.set()
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def test_who_closes_while_another_does_waits_until_that_is_done() -> None:
    told: list[str] = []
    has_begun = threading.Event()
    queue = Queue()

    def shut() -> None:
        has_begun.set()
        queue.second_came.wait(TIMEOUT_S)
        told.append("shut")

    def close() -> None:
        ending.close()
        told.append("returned")

    owner = Owner([])
    ending = BackendLifetime(owner, lambda: None, shut)
    ending._closing = queue  # type: ignore[assignment]
    closers = [threading.Thread(target=close) for _ in range(2)]
    closers[0].start()
    assert has_begun.wait(TIMEOUT_S)
    closers[1].start()
    assert queue.second_came.wait(TIMEOUT_S)
    for closer in closers:
        closer.join(TIMEOUT_S)
    assert told == ["shut", "returned", "returned"]


def test_a_disowned_end_is_over_though_a_thread_that_is_gone_was_closing() -> None:
    told: list[str] = []
    owner = Owner(told)
    owner.ending._closing.acquire()  # as by a thread that the child of a fork does not have
    owner.ending.disown()
    assert not owner.ending._closing.locked()
    owner.ending.close()
    assert owner.ending.is_over
    assert told == ["disowned"]


def test_what_was_closed_has_nothing_to_disown() -> None:
    owner = Owner([])
    assert owner.ending in forks._told
    owner.ending.close()
    assert owner.ending not in forks._told, "what it let go of may be another's by then"
