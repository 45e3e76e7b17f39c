"""A paced device: kernels and copies take what its rates say, beside each other, and nothing is computed."""

from __future__ import annotations

import time
from dataclasses import asdict

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.accelerator import DEVICE, Busy, Pace, busy, paced

_KB = 1000
_FAST = 1e18


@pytest.fixture
def host() -> torch.Tensor:
    return torch.zeros(50 * _KB, dtype=torch.uint8, pin_memory=True)


def _kernels_s(pace: Pace, *shapes: tuple[int, ...], name: str) -> float:
    made = [torch.zeros(shape, device=DEVICE) for shape in shapes]
    with paced(pace):
        getattr(torch, name)(*made)
        torch.accelerator.synchronize()
        return busy().kernels_s


_COMPUTING = Pace(operations=1e6, memory_bytes=_FAST, link_bytes=_FAST)


@pytest.mark.parametrize(
    ("name", "shapes", "operations"),
    [
        ("mm", [(20, 30), (30, 10)], 2 * 20 * 30 * 10),
        ("addmm", [(10,), (20, 30), (30, 10)], 2 * 20 * 30 * 10),
        ("bmm", [(2, 20, 30), (2, 30, 10)], 2 * 2 * 20 * 30 * 10),
        ("add", [(20, 30), (20, 30)], 0),
    ],
)
def test_a_product_takes_its_operations(name: str, shapes: list[tuple[int, ...]], operations: int) -> None:
    assert _kernels_s(_COMPUTING, *shapes, name=name) == pytest.approx(operations / 1e6, abs=1e-9)


def test_attention_takes_twice_as_long_in_backward() -> None:
    query = torch.zeros(1, 2, 16, 8, device=DEVICE, requires_grad=True)
    with paced(_COMPUTING):
        output = scaled_dot_product_attention(query, query, query, is_causal=True)
        torch.accelerator.synchronize()
        forward_s = busy().kernels_s
        output.sum().backward()
        torch.accelerator.synchronize()
        backward_s = busy().kernels_s - forward_s
    assert forward_s == pytest.approx(2 * 2 * (2 * 16 * 16 * 8) / 1e6)
    assert backward_s == pytest.approx(2 * forward_s)


def test_other_kernels_take_the_bytes_that_they_read_and_write() -> None:
    slow_memory = Pace(operations=_FAST, memory_bytes=1e6, link_bytes=_FAST)
    assert _kernels_s(slow_memory, (_KB,), (_KB,), name="add") == pytest.approx(3 * 4 * _KB / 1e6)


def test_kernels_and_copies_each_way_are_beside_each_other(host: torch.Tensor) -> None:
    x, come, leave = (torch.zeros(len(host), dtype=torch.uint8, device=DEVICE) for _ in range(3))
    back = torch.empty_like(host).pin_memory()
    with paced(Pace(operations=1e6, memory_bytes=1e5 * 2, link_bytes=1e5)):
        begun = time.perf_counter()
        x.bitwise_not_()  # 0.5 s: read and written
        with torch.Stream(DEVICE):
            come.copy_(host, non_blocking=True)  # 0.5 s
        with torch.Stream(DEVICE):
            back.copy_(leave, non_blocking=True)  # 0.5 s
        assert time.perf_counter() - begun < 0.5  # the host goes on
        torch.accelerator.synchronize()
        taken_s = time.perf_counter() - begun
        found = busy()
    assert asdict(found) == pytest.approx(asdict(Busy(0.5, 0.5, 0.5)), abs=0.01)
    assert 0.49 < taken_s < 1.2


def test_kernels_of_two_streams_are_after_each_other_as_are_copies_one_way(host: torch.Tensor) -> None:
    x, y = (torch.zeros(len(host), dtype=torch.uint8, device=DEVICE) for _ in range(2))
    with paced(Pace(operations=1e6, memory_bytes=2e6, link_bytes=1e6)):
        begun = time.perf_counter()
        for stream in (torch.Stream(DEVICE), torch.Stream(DEVICE)):
            with stream:
                x.bitwise_not_()
        torch.accelerator.synchronize()
        assert time.perf_counter() - begun >= 2 * 0.05
        begun = time.perf_counter()
        for stream in (torch.Stream(DEVICE), torch.Stream(DEVICE)):
            with stream:
                y.copy_(host, non_blocking=True)
        torch.accelerator.synchronize()
        assert time.perf_counter() - begun >= 2 * 0.05


def test_a_stream_that_waits_for_another_begins_when_that_has_come_so_far() -> None:
    x = torch.zeros(50 * _KB, dtype=torch.uint8, device=DEVICE)
    side = torch.Stream(DEVICE)
    begin, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    with paced(Pace(operations=1e6, memory_bytes=1e6, link_bytes=1e6)):
        begin.record()
        x.bitwise_not_()  # 100 ms
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x[: 25 * _KB].bitwise_not_()  # 50 ms
            end.record()
        end.synchronize()
    assert begin.elapsed_time(end) >= 149


def test_nothing_is_computed_or_moved_but_what_the_host_waits_for(host: torch.Tensor) -> None:
    x = torch.zeros(4, device=DEVICE)
    moved = torch.ones(len(host), dtype=torch.uint8, device=DEVICE)
    with paced(Pace(_FAST, _FAST, _FAST)):
        x.add_(1)
        moved.copy_(host, non_blocking=True)
        assert x.tolist() == [0] * 4
    assert x.tolist() == [0] * 4
    assert moved.eq(1).all()
    x.add_(1)  # and is again afterwards
    assert x.tolist() == [1] * 4
