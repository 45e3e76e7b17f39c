"""What events of the simulated accelerator tell of times, and what they refuse: as CUDA's do."""

from __future__ import annotations

import pytest
import torch

from tests.accelerator import DEVICE, Pace, held, paced

_KB = 1000
_PACE = Pace(operations=1e12, memory_bytes=1e6, link_bytes=1e6)


def _event(*, timing: bool = True) -> torch.Event:
    return torch.Event(DEVICE, enable_timing=timing)


def _recorded(*, timing: bool = True) -> torch.Event:
    event = _event(timing=timing)
    event.record()
    event.synchronize()
    return event


@pytest.mark.parametrize("is_first", [True, False])
def test_an_event_that_was_not_recorded_tells_no_time(is_first: bool) -> None:
    with pytest.raises(ValueError, match="must be recorded"):
        _told(_recorded(), _event(), is_first=is_first)


@pytest.mark.parametrize("is_first", [True, False])
def test_an_event_without_timing_tells_no_time(is_first: bool) -> None:
    with pytest.raises(ValueError, match="enable_timing=True"):
        _told(_recorded(), _recorded(timing=False), is_first=is_first)


def _told(good: torch.Event, bad: torch.Event, *, is_first: bool) -> float:
    return bad.elapsed_time(good) if is_first else good.elapsed_time(bad)


def test_an_event_that_has_not_passed_tells_no_time_and_nobody_waits_for_it() -> None:
    begin, end = _recorded(), _event()
    with held(torch.accelerator.current_stream()):
        end.record()
        with pytest.raises(RuntimeError, match="must be completed"):
            begin.elapsed_time(end)
    end.synchronize()
    assert begin.elapsed_time(end) >= 0


@pytest.mark.parametrize("kernels", [1, 3, 20])
def test_events_of_a_paced_device_tell_what_kernels_between_them_take_and_no_thread_s_delay(
    kernels: int,
) -> None:
    x = torch.zeros(_KB, dtype=torch.uint8, device=DEVICE)  # 2 ms for what reads and writes it
    warm, begin, end = (_event() for _ in range(3))
    with paced(_PACE):
        for _ in range(20):  # so that the stream is behind: what is queued late would make it wait
            x.bitwise_not_()
        warm.record()
        begin.record()
        for _ in range(kernels):
            x.bitwise_not_()
        end.record()
        assert not warm.query()
        end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(2.0 * kernels, abs=1e-6)
    assert warm.elapsed_time(begin) == 0


def test_an_event_behind_a_wait_tells_when_what_was_waited_for_had_ended() -> None:
    come, x = (torch.zeros(10 * _KB, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    host = torch.zeros(10 * _KB, dtype=torch.uint8, pin_memory=True)
    side, arrived, before, behind, end = torch.Stream(DEVICE), *(_event() for _ in range(4))
    with paced(_PACE):
        with side:
            come.copy_(host, non_blocking=True)  # 10 ms
            arrived.record()
        before.record()
        torch.accelerator.current_stream().wait_event(arrived)
        behind.record()
        x.bitwise_not_()  # 20 ms
        end.record()
        end.synchronize()
    assert arrived.elapsed_time(behind) == 0
    assert 0 < before.elapsed_time(behind) <= 10
    assert behind.elapsed_time(end) >= 20
