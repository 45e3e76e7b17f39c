"""Links, queues and deliveries of the emulated device: when a copy ends and who hears of it."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from tierstore.spi import Completion
from tierstore.testing.conformance import succeed
from tierstore.units import GIB, MIB
from tierstore_backends.device import EmulatedDevice
from tierstore_backends.device.completion_order import LateDelivery, PromptDelivery
from tierstore_backends.device.copy_queue import INLINE_BELOW_BYTES, EmulatedCopyQueue
from tierstore_backends.device.link import EmulatedLink

_TIMEOUT_S = 30.0


def _buffer(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def _told(tell: Callable[..., object], *arguments: object) -> Completion:
    """Return a completion that calls ``tell`` at its end."""

    def ended(_error: BaseException | None) -> None:
        tell(*arguments)

    completion = Completion()
    completion.add_done_callback(ended)
    return completion


# ---------------------------------------------------------------------------------------- links


def test_a_link_without_limits_takes_no_time() -> None:
    link = EmulatedLink()
    assert link.is_instant
    assert link.due_s(GIB, asked_s=5.0) == 5.0


def test_copies_follow_one_another_on_a_link() -> None:
    link = EmulatedLink(bandwidth=1000)
    assert link.due_s(500, asked_s=10.0) == 10.5
    assert link.due_s(500, asked_s=10.1) == 11.0
    assert link.due_s(500, asked_s=20.0) == 20.5


def test_latency_delays_each_copy_and_holds_up_none() -> None:
    link = EmulatedLink(bandwidth=1000, latency_s=2.0)
    assert not link.is_instant
    assert link.due_s(1000, asked_s=0.0) == 3.0
    assert link.due_s(1000, asked_s=0.0) == 4.0


class _Clock(threading.Event):
    """An event that is never set and notes how long it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return False


def test_a_copy_takes_as_long_as_its_link_says(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = EmulatedCopyQueue("h2d", EmulatedLink(bandwidth=MIB), PromptDelivery())
    clock = _Clock()
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    with monkeypatch.context() as patch:
        patch.setattr("tierstore_backends.device.copy_queue.time.monotonic", lambda: 100.0)
        patch.setattr(copies, "_is_closing", clock)
        for number in range(2):
            copies.copy(_buffer(MIB), _buffer(MIB), _told(ended.put, number))
        assert [ended.get(timeout=_TIMEOUT_S) for _ in range(2)] == [0, 1]
    copies.close()
    assert clock.waits == [1.0, 2.0]


# ---------------------------------------------------------------------------------------- queues


def test_small_copies_are_done_before_the_call_returns() -> None:
    copies = EmulatedCopyQueue("h2d", EmulatedLink(), PromptDelivery())
    completion = Completion()
    copies.copy(_buffer(INLINE_BELOW_BYTES - 1), _buffer(INLINE_BELOW_BYTES - 1), completion)
    assert completion.is_done


@pytest.mark.parametrize(
    ("link", "nbytes"),
    [
        (EmulatedLink(), INLINE_BELOW_BYTES),
        (EmulatedLink(bandwidth=GIB), 1),
        (EmulatedLink(latency_s=1e-6), 1),
    ],
)
def test_other_copies_end_in_the_thread_of_their_direction(link: EmulatedLink, nbytes: int) -> None:
    copies = EmulatedCopyQueue("h2d", link, PromptDelivery())
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    copies.copy(_buffer(nbytes), _buffer(nbytes), _told(lambda: names.put(threading.current_thread().name)))
    assert names.get(timeout=_TIMEOUT_S) == "tierstore-h2d"
    copies.close()


def test_a_small_copy_does_not_overtake_a_large_one() -> None:
    copies = EmulatedCopyQueue("h2d", EmulatedLink(), PromptDelivery())
    may_begin = threading.Event()
    order: queue.SimpleQueue[str] = queue.SimpleQueue()
    copies.copy(_buffer(MIB), _buffer(MIB), _told(order.put, "large"), after=may_begin)
    copies.copy(_buffer(1), _buffer(1), _told(order.put, "small"))
    assert order.empty()
    may_begin.set()
    assert [order.get(timeout=_TIMEOUT_S) for _ in range(2)] == ["large", "small"]
    copies.close()


def test_small_copies_are_done_at_once_again_when_the_large_one_has_ended() -> None:
    copies = EmulatedCopyQueue("h2d", EmulatedLink(), PromptDelivery())
    large, small = Completion(), Completion()
    copies.copy(_buffer(MIB), _buffer(MIB), large)
    succeed(large)
    copies.copy(_buffer(1), _buffer(1), small)
    assert small.is_done
    copies.close()


def test_a_lane_lets_go_of_its_buffers_before_it_says_so() -> None:
    copies = EmulatedCopyQueue("h2d", EmulatedLink(), PromptDelivery())
    into, source = _buffer(MIB), _buffer(MIB)
    counts: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def count() -> None:
        counts.put((sys.getrefcount(into), sys.getrefcount(source)))

    count()
    may_begin = threading.Event()
    copies.copy(into, source, _told(count), after=may_begin)
    may_begin.set()
    assert counts.get(timeout=_TIMEOUT_S) == counts.get(timeout=_TIMEOUT_S)
    copies.close()


def test_a_callback_that_raises_does_not_stop_later_copies(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("a bug of the engine's")

    copies = EmulatedCopyQueue("h2d", EmulatedLink(), PromptDelivery())
    may_begin, later = threading.Event(), Completion()
    copies.copy(_buffer(MIB), _buffer(MIB), _told(fail), after=may_begin)
    copies.copy(_buffer(MIB), _buffer(MIB), later)
    may_begin.set()
    succeed(later)
    assert "a completion's callback failed" in caplog.text
    copies.close()


def test_closing_ends_what_was_asked_for_without_waiting_for_the_link() -> None:
    copies = EmulatedCopyQueue("h2d", EmulatedLink(bandwidth=1), PromptDelivery())  # twelve days
    source, into, completion = torch.ones(MIB, dtype=torch.uint8), _buffer(MIB), Completion()
    copies.copy(into, source, completion)
    copies.close()
    assert completion.is_done
    assert torch.equal(into, source)


# ---------------------------------------------------------------------------------------- late completions


def _late(seed: int, directions: str) -> list[str]:
    """Return the order in which a late delivery tells of operations that end in this order."""
    delivery, told = LateDelivery(seed), list[str]()
    delivery.begin()  # one more is under way all the time, so that the others may be late
    for number, direction in enumerate(directions):
        delivery.begin()
        delivery.end(direction, _told(told.append, f"{direction}{number}"))
    delivery.close()
    return told


def test_late_completions_keep_their_order_within_a_direction() -> None:
    told = _late(3, "iooioiioio" * 3)
    assert len(told) == 30
    for direction in "io":
        numbers = [int(name[1:]) for name in told if name[0] == direction]
        assert numbers == sorted(numbers)


def test_late_completions_overtake_those_of_the_other_direction() -> None:
    told = _late(3, "iooioiioio" * 3)
    assert [int(name[1:]) for name in told] != list(range(30))


def test_either_direction_may_overtake_the_other() -> None:
    overtaking = set[str]()
    for seed in range(20):
        told = [(name[0], int(name[1:])) for name in _late(seed, "io" * 10)]
        for position, (direction, number) in enumerate(told):
            if any(other < number for _, other in told[position + 1 :]):
                overtaking.add(direction)
    assert overtaking == {"i", "o"}


def test_what_has_ended_is_told_although_something_else_never_ends() -> None:
    delivery = LateDelivery(1)
    delivery.begin()
    completions = [Completion() for _ in range(4)]
    for completion in completions:
        delivery.begin()
        delivery.end("i", completion)
    succeed(completions[0])
    delivery.close()


def test_late_completions_are_told_in_a_thread_of_their_own() -> None:
    delivery = LateDelivery(1)
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    delivery.begin()
    delivery.end("i", _told(lambda: names.put(threading.current_thread().name)))
    assert names.get(timeout=_TIMEOUT_S) == "tierstore-late"
    delivery.close()


def test_the_last_completion_comes_without_any_other() -> None:
    for seed in range(20):
        device = EmulatedDevice(MIB, late_seed=seed)
        slot = device.reserve(10)
        succeed(device.write(slot, _buffer(10)))
        succeed(device.free(slot))
        device.close()


def test_what_is_still_to_be_told_is_told_at_the_end() -> None:
    delivery = LateDelivery(1)
    completion = Completion()
    delivery.begin()
    delivery.begin()
    delivery.end("i", completion)
    delivery.close()
    assert completion.is_done


def _interrupted_lane(monkeypatch: pytest.MonkeyPatch) -> EmulatedCopyQueue:
    """A copies whose first copy was interrupted before its thread had begun."""

    def interrupt(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    copies = EmulatedCopyQueue("h2d", EmulatedLink(), PromptDelivery())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            copies.copy(_buffer(INLINE_BELOW_BYTES), _buffer(INLINE_BELOW_BYTES), Completion())
    return copies


def test_a_lane_copies_after_an_interrupt_before_its_thread_had_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = _interrupted_lane(monkeypatch)
    second = Completion()
    copies.copy(_buffer(INLINE_BELOW_BYTES), _buffer(INLINE_BELOW_BYTES), second)
    assert second.wait(_TIMEOUT_S)
    copies.close()


def test_a_lane_closes_after_an_interrupt_before_its_thread_had_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _interrupted_lane(monkeypatch).close()
