"""Who moves the fragments of scratch transfers, and when they stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from tests.files_disk import PAGE, TIMEOUT_S, finish
from tierstore.errors import StoreClosed
from tierstore_backends.files.engines.base import IoEngine, Pace
from tierstore_backends.files.engines.fragment_queue import FragmentQueues
from tierstore_backends.files.engines.plain import PlainEngine
from tierstore_backends.files.engines.threads import ThreadEngine
from tierstore_backends.files.io.io_request import Direction, FileSlot, Fragment, IoRequest, cut


def transfer(pages: int = 1, start: int = 0) -> tuple[IoRequest, list[Fragment]]:
    """Return a read of ``pages`` pages, cut into pages, and its fragments."""
    slot = FileSlot(pages * PAGE, ((start * PAGE, (start + pages) * PAGE),), None, PAGE)
    whole = IoRequest(Direction.READ, [slot], [torch.zeros(pages * PAGE, dtype=torch.uint8)])
    return whole, cut(whole, segment_bytes=1 << 40)


def threads(
    *moves: Callable[[Sequence[Fragment]], None], depth: int = 100, tidy: Callable[[], None] = lambda: None
) -> ThreadEngine:
    return ThreadEngine(moves, FragmentQueues(PAGE, 1 << 40), Pace(depth=depth, tidy=tidy, quiet_s=0.0))


def do_nothing(batch: Sequence[Fragment]) -> None:
    del batch


@pytest.fixture(params=["threads", "plain"])
def engine(request: pytest.FixtureRequest) -> Iterator[IoEngine]:
    made = threads(do_nothing) if request.param == "threads" else PlainEngine([do_nothing])
    yield made
    made.close()


def test_a_closed_engine_takes_nothing(engine: IoEngine) -> None:
    engine.close()
    whole, fragments = transfer()
    for _ in range(2):
        with pytest.raises(StoreClosed):
            engine.submit(fragments)
    assert not whole.completion.is_done


def test_a_transfer_ends_when_its_last_fragment_has_moved(engine: IoEngine) -> None:
    whole, fragments = transfer(5)
    engine.submit(fragments)
    finish(whole.completion)
    assert whole.remaining == 0


def test_the_first_error_of_a_transfer_is_the_one_it_ends_with() -> None:
    first, second = OSError("first"), OSError("second")

    def fail(batch: Sequence[Fragment]) -> None:
        batch[0].error = {1: first, 3: second}.get(batch[0].index)

    engine = threads(fail)
    whole, fragments = transfer(5)
    engine.submit(fragments)
    with pytest.raises(OSError, match="first"):
        finish(whole.completion)
    engine.close()


def test_closing_wakes_a_worker_that_waits_for_the_depth() -> None:
    gate = threading.Event()
    waiters = 3

    def wait(batch: Sequence[Fragment]) -> None:
        del batch
        assert gate.wait(TIMEOUT_S)

    engine = threads(*[wait] * (waiters + 1), depth=1)
    transfers = [transfer(1, start=2 * i) for i in range(50)]
    for _, fragments in transfers:
        engine.submit(fragments)
    closer = threading.Thread(target=engine.close)
    closer.start()
    gate.set()
    closer.join(TIMEOUT_S)
    assert not closer.is_alive()
    assert all(whole.completion.is_done for whole, _ in transfers)


def test_what_comes_while_the_engine_tidies_moves_afterwards() -> None:
    gate, is_tidying = threading.Event(), threading.Event()
    order: list[str] = []

    def tidy() -> None:
        is_tidying.set()
        assert gate.wait(TIMEOUT_S)
        order.append("tidied")

    def move(batch: Sequence[Fragment]) -> None:
        del batch
        order.append("moved")

    engine = threads(move, move, tidy=tidy)
    engine.tidy_when_quiet()
    assert is_tidying.wait(TIMEOUT_S)
    whole, fragments = transfer()
    engine.submit(fragments)
    closer = threading.Thread(target=engine.close)
    closer.start()
    gate.set()
    closer.join(TIMEOUT_S)
    assert not closer.is_alive()
    assert whole.completion.is_done
    assert order == ["tidied", "moved"]


def test_an_interrupted_caller_leaves_room_for_the_next() -> None:
    interruptions: list[BaseException] = [KeyboardInterrupt()]

    def be_interrupted(batch: Sequence[Fragment]) -> None:
        del batch
        if interruptions:
            raise interruptions.pop()

    engine = PlainEngine([be_interrupted])
    with pytest.raises(KeyboardInterrupt):
        engine.submit(transfer()[1])
    whole, fragments = transfer()
    engine.submit(fragments)
    assert whole.completion.is_done
    engine.close()
