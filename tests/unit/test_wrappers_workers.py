"""The threads that pack: who goes first, and how much memory there is."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tierstore.codec.blocks import Bytes
from tierstore.codec.workers import CodecWorkers, PadUse
from tierstore.errors import StoreClosed


@pytest.fixture
def workers() -> Iterator[CodecWorkers]:
    made = CodecWorkers(threads=1, pad_bytes=8192, pads=1)
    made.begin(lambda: None)
    yield made
    made.end()
    made.close()


class Busy:
    """Keeps the one thread busy, so that what waits can be put in order."""

    def __init__(self, workers: CodecWorkers) -> None:
        self._gate = threading.Event()
        self._done = threading.Event()
        self.order: list[str] = []
        begun = threading.Event()
        workers.submit(lambda: self._hold(begun))
        assert begun.wait(30)
        self._workers = workers

    def _hold(self, begun: threading.Event) -> None:
        begun.set()
        self._gate.wait(30)

    def queue(self, lane: PadUse) -> None:
        def job(pad: Bytes) -> None:
            self.order.append(lane.name)
            self._workers.give_back(lane, pad)

        self._workers.submit_with_pad(lane, job)

    def go(self, count: int) -> list[str]:
        """Let everything be done; return the order."""
        self._gate.set()
        ends = threading.Semaphore(0)
        self._workers.submit_with_pad(PadUse.WRITE, lambda pad: ends.release())
        assert ends.acquire(timeout=30)
        assert len(self.order) == count
        return self.order


def test_jobs_without_a_pad_go_first_then_reads_then_writes(workers: CodecWorkers) -> None:
    busy = Busy(workers)
    busy.queue(PadUse.WRITE)
    busy.queue(PadUse.READ)
    workers.submit(lambda: busy.order.append("job"))
    busy.queue(PadUse.READ)
    assert busy.go(4) == ["job", "READ", "READ", "WRITE"]


def test_a_job_waits_for_a_pad_and_others_do_not_wait_for_it(workers: CodecWorkers) -> None:
    taken: list[Bytes] = []
    has_taken, second, job_done = threading.Event(), threading.Event(), threading.Event()

    def keep(pad: Bytes) -> None:
        taken.append(pad)
        has_taken.set()

    workers.submit_with_pad(PadUse.WRITE, keep)
    assert has_taken.wait(30)
    workers.submit_with_pad(PadUse.WRITE, lambda pad: second.set())
    workers.submit(job_done.set)
    assert job_done.wait(30)
    assert not second.is_set()
    workers.give_back(PadUse.WRITE, taken.pop())
    assert second.wait(30)


def test_a_pad_begins_at_a_page(workers: CodecWorkers) -> None:
    pads: list[Bytes] = []
    done = threading.Event()

    def job(pad: Bytes) -> None:
        pads.append(pad)
        done.set()

    workers.submit_with_pad(PadUse.READ, job)
    assert done.wait(30)
    assert pads[0].ctypes.data % 4096 == 0
    assert len(pads[0]) == 8192


def test_a_job_that_raises_costs_no_thread(workers: CodecWorkers, caplog: pytest.LogCaptureFixture) -> None:
    def job() -> None:
        raise RuntimeError("a bug")

    done = threading.Event()
    workers.submit(job)
    workers.submit(done.set)
    assert done.wait(30)
    assert "a bug in tierstore" in caplog.text


def test_no_thread_is_started_before_it_is_needed() -> None:
    before = threading.active_count()
    workers = CodecWorkers(threads=2, pad_bytes=8192)
    assert threading.active_count() == before
    workers.begin(lambda: None)
    assert threading.active_count() == before + 2
    workers.end()
    workers.close()
    assert threading.active_count() == before
    with pytest.raises(StoreClosed):
        workers.begin(lambda: None)
    workers.close()


def test_an_operation_whose_threads_could_not_all_be_started_is_none_and_the_next_one_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = CodecWorkers(threads=2, pad_bytes=8192)
    start = threading.Thread.start
    done = threading.Event()
    interrupted = iter([True, False, True])

    def start_some(thread: threading.Thread) -> None:
        if next(interrupted):
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    for _ in range(2):  # before the first thread, and before the second
        with pytest.raises(KeyboardInterrupt):
            workers.begin(done.set)
    monkeypatch.undo()
    assert not done.is_set()
    workers.begin(done.set)
    assert done.wait(30)
    workers.end()
    closing = threading.Thread(target=workers.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
