"""The simulated accelerator itself: it is as strict as a GPU where bytes can come out of order."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import accelerator
from tests.accelerator import DEVICE, Overwriting, counts, held, late, memory_limit, overwriting
from tests.accelerator.registrar import HostRegistrar
from tierstore.errors import BackendError
from tierstore.units import MIB

_N = 4096


def _current() -> torch.Stream:
    return torch.accelerator.current_stream()


def _changes(before: dict[str, int]) -> dict[str, int]:
    return {
        name: number - before.get(name, 0)
        for name, number in counts().items()
        if number != before.get(name, 0)
    }


def _in_a_process(program: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", f"import torch, tests.accelerator\n{program}"],
        cwd=root,
        env={"PYTHONPATH": f"{root}:{root / 'backends'}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


# ---------------------------------------------------------------------- streams and events


def test_the_host_does_not_wait_for_kernels() -> None:
    x = torch.ones(_N, device=DEVICE)
    with held(_current()):
        y = x + 1
        y.mul_(3)
        assert not _current().query()
    assert y.cpu().eq(6).all()


def test_a_stream_that_does_not_wait_reads_what_is_not_there_yet() -> None:
    side = torch.Stream(DEVICE)
    with held(_current()):
        x = torch.full((_N,), 41.0, device=DEVICE)
        with side:
            y = x.clone()
        side.synchronize()
    with side:
        assert not y.cpu().eq(41).all()


def test_a_stream_that_waits_for_an_event_reads_what_was_written_before_it() -> None:
    side, event = torch.Stream(DEVICE), torch.Event(DEVICE)
    with held(_current()):
        x = torch.ones(_N, device=DEVICE)
        event.record()
        side.wait_event(event)
        with side:
            y = x.clone()
        assert not event.query()
    with side:
        assert y.cpu().eq(1).all()
    assert event.query()


def test_an_event_tells_the_time_between_two_points() -> None:
    begin, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    begin.record()
    torch.get_device_module(DEVICE)._sleep(20_000_000)  # 20 ms of the stream's time
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 20


def test_kernels_are_late_by_chance_from_a_seed() -> None:
    with late(kernel_us=20_000, copy_us=20_000, seed=3):
        x = torch.zeros(_N, device=DEVICE)
        for _ in range(8):
            x.add_(1)
        assert not _current().query()
        assert x.cpu().eq(8).all()


def test_a_failed_kernel_is_told_to_whoever_synchronises() -> None:
    x = torch.ones(4, 4, device=DEVICE)
    x.index_copy_(0, torch.tensor([9], device=DEVICE), torch.ones(1, 4, device=DEVICE))
    with pytest.raises(RuntimeError, match="asynchronous error"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()  # once


def test_a_forked_child_is_refused() -> None:
    done = _in_a_process(
        "import os\n"
        "torch.ones(3, device='openreg')\n"
        "if (child := os.fork()) == 0:\n"
        "    try: torch.ones(3, device='openreg')\n"
        "    except RuntimeError as error: os._exit(7 if 'forked' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert done.returncode == 7, done.stderr


# ---------------------------------------------------------------------- memory


def test_the_host_cannot_read_device_memory() -> None:
    done = _in_a_process(
        "import ctypes\nx = torch.ones(3, device='openreg')\nctypes.string_at(x.data_ptr(), 1)"
    )
    assert done.returncode == -signal.SIGSEGV


def test_memory_is_overwritten_when_it_is_handed_out_again() -> None:
    x = torch.ones(_N, device=DEVICE)
    address = x.data_ptr()
    del x
    y = torch.empty(_N, device=DEVICE)
    assert y.data_ptr() == address
    assert y.isnan().cpu().all()


def test_memory_may_be_overwritten_as_soon_as_it_is_free() -> None:
    with overwriting(Overwriting.FREED):
        x = torch.ones(_N, device=DEVICE)
        y = x.clone()
        with held(_current()):
            z = x + 1
            del x  # the stream's order protects what is queued already
        assert torch.equal(z.cpu(), (y + 1).cpu())


def test_another_streams_memory_is_handed_out_again_while_it_is_read() -> None:
    """Why ``record_stream`` is."""
    side = torch.Stream(DEVICE)
    x = torch.ones(_N, device=DEVICE)
    torch.accelerator.synchronize()
    with held(side):
        with side:
            y = x.clone()
        del x
        torch.zeros(_N, device=DEVICE)
        _current().synchronize()
    with side:
        assert not y.cpu().eq(1).all()


def test_recorded_memory_is_not_handed_out_before_its_streams_have_passed() -> None:
    side = torch.Stream(DEVICE)
    x = torch.ones(_N, device=DEVICE)
    torch.accelerator.synchronize()
    with held(side):
        with side:
            y = x.clone()
        x.record_stream(side)
        address = x.data_ptr()
        del x
        assert torch.zeros(_N, device=DEVICE).data_ptr() != address
        _current().synchronize()
    with side:
        assert y.cpu().eq(1).all()


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_gradient_of_two_streams_is_added_to_while_the_other_reads_it(is_kept: bool) -> None:
    """Why a gradient must not go to two streams: PyTorch waits for who made it, not for who reads it.

    The engine adds to a gradient in place when it holds the last reference.  Here the main stream has been
    told to read it, and its reference is gone; the side stream adds to it first.  While somebody keeps a
    reference, the sum is made elsewhere and all is well.  Should PyTorch wait some day, the case in which
    none is kept fails, and this test can go.
    """
    here, side = _current(), torch.Stream(DEVICE)
    kept: list[torch.Tensor] = []
    read = torch.zeros(_N, device=DEVICE, requires_grad=True)
    added = torch.ones(_N, device=DEVICE, requires_grad=True)
    side.wait_stream(here)
    with side:
        first = added * 1
        left = first + first * 2  # in backward: the gradient, and to it twice the gradient
    right = read.sin()
    here.wait_stream(side)
    total = left + right  # both get its gradient
    holding = contextlib.ExitStack()

    def hold(gradient: torch.Tensor) -> None:
        kept.extend([gradient] if is_kept else [])
        holding.enter_context(held(here))

    right.register_hook(hold)
    with holding:
        (total * torch.ones_like(total)).sum().backward()
        side.synchronize()
    assert added.grad is not None
    assert read.grad is not None
    assert added.grad.cpu().eq(3).all()
    assert read.grad.cpu().eq(1 if is_kept else 3).all()


def test_the_allocator_counts_with_peaks() -> None:
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    x = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    del x
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + MIB
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == before


def test_what_the_device_has_no_room_for_raises() -> None:
    total = torch.get_device_module(DEVICE).get_device_properties().total_memory
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(total + 1, dtype=torch.uint8, device=DEVICE)


def test_a_full_device_waits_for_what_streams_still_hold_and_takes_it_back() -> None:
    total = torch.get_device_module(DEVICE).get_device_properties().total_memory
    side = torch.Stream(DEVICE)
    torch.accelerator.empty_cache()
    with overwriting(Overwriting.NEVER):  # which would touch all of it
        x = torch.empty(total // 2, dtype=torch.uint8, device=DEVICE)
        x.record_stream(side)
        with side:
            torch.get_device_module(DEVICE)._sleep(20_000_000)
        del x
        with side:  # another stream's pool
            y = torch.empty(total // 4 * 3, dtype=torch.uint8, device=DEVICE)
    assert y.numel() == total // 4 * 3
    del y
    torch.accelerator.empty_cache()


def test_a_limit_refuses_the_allocation_that_would_exceed_it() -> None:
    before = torch.accelerator.memory_allocated()
    with memory_limit(before + MIB):
        x = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1, dtype=torch.uint8, device=DEVICE)
        del x
    torch.empty(2 * MIB, dtype=torch.uint8, device=DEVICE)


# ---------------------------------------------------------------------- copies and pinned memory


def test_a_copy_from_pinned_memory_is_asynchronous() -> None:
    source = torch.ones(_N).pin_memory()
    assert source.is_pinned()
    before = counts()
    with held(_current()):
        x = source.to(DEVICE, non_blocking=True)
        source.fill_(2)  # too early
    assert x.cpu().eq(2).all()
    assert _changes(before)["asynchronous_copies"] == 1


def test_a_copy_to_pinned_memory_is_asynchronous() -> None:
    x = torch.ones(_N, device=DEVICE)
    into = torch.zeros(_N, pin_memory=True)
    with held(_current()):
        into.copy_(x, non_blocking=True)
        assert into.eq(0).all()
    _current().synchronize()
    assert into.eq(1).all()


def test_pageable_memory_is_read_before_the_copy_returns() -> None:
    source = torch.ones(_N)
    before = counts()
    with held(_current()):
        x = source.to(DEVICE, non_blocking=True)
        source.fill_(2)
    assert x.cpu().eq(1).all()
    assert _changes(before)["staged_copies"] == 1


def test_pinned_memory_stays_until_its_copies_are_over() -> None:
    source = torch.ones(_N).pin_memory()
    with held(_current()):
        x = source.to(DEVICE, non_blocking=True)
        del source
    assert x.cpu().eq(1).all()


def test_registered_memory_is_pinned_until_it_is_unregistered() -> None:
    memory = torch.ones(_N)
    registrar = HostRegistrar()
    registrar.register(memory.data_ptr(), memory.nbytes)
    assert memory[1:].is_pinned()
    with pytest.raises(BackendError, match="registered already"):
        registrar.register(memory.data_ptr(), memory.nbytes)
    registrar.unregister(memory.data_ptr())
    assert not memory.is_pinned()
    with pytest.raises(BackendError, match="not registered"):
        registrar.unregister(memory.data_ptr())


def test_memory_that_is_not_mapped_cannot_be_registered() -> None:
    with pytest.raises(BackendError, match="not mapped"):
        HostRegistrar().register(4096, 4096)


# ---------------------------------------------------------------------- operators


def test_random_numbers_are_the_devices_own_and_can_be_set_back() -> None:
    module = torch.get_device_module(DEVICE)
    torch.manual_seed(3)
    host = torch.get_rng_state()
    first = torch.randn(5, device=DEVICE).cpu()
    assert torch.equal(torch.get_rng_state(), host)
    torch.manual_seed(3)
    state = module.get_rng_state()
    assert torch.equal(torch.randn(5, device=DEVICE).cpu(), first)
    module.set_rng_state(state)
    dropped = torch.nn.functional.dropout(torch.ones(1000, device=DEVICE), 0.5).cpu()
    module.set_rng_state(state)
    again = torch.nn.functional.dropout(torch.ones(1000, device=DEVICE), 0.5).cpu()
    assert torch.equal(dropped, again)
    assert 0 < int(dropped.eq(0).sum()) < 1000


def test_a_transformer_layer_computes_what_the_cpu_does() -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    ours = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    ours.to(DEVICE)
    x = torch.randn(2, 5, 32)
    expected, found = theirs(x), ours(x.to(DEVICE))
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(found.cpu(), expected)
    for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(other.grad.cpu(), one.grad)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adafactor"])
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_step_as_on_the_cpu(name: str, foreach: bool) -> None:
    torch.manual_seed(0)
    theirs = [nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(7))]
    ours = [nn.Parameter(each.detach().to(DEVICE)) for each in theirs]
    for parameters in (theirs, ours):
        optimizer = getattr(torch.optim, name)(parameters, lr=0.1, foreach=foreach)
        for _ in range(3):
            for each in parameters:
                each.grad = each.detach().clone()
            optimizer.step()
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(other.detach().cpu(), one.detach())


def test_convolutions_compute_what_the_cpu_does() -> None:
    torch.manual_seed(0)
    theirs, ours = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
    ours.load_state_dict(theirs.state_dict())
    ours.to(DEVICE)
    x = torch.randn(2, 3, 8, 8)
    expected, found = theirs(x), ours(x.to(DEVICE))
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(found.cpu(), expected)
    for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(other.grad.cpu(), one.grad)


def test_a_parameter_of_the_cpu_becomes_one_of_the_device_and_back() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.data = torch.full((3,), 2.0, device=DEVICE)
    parameter.square().sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.device == DEVICE
    assert parameter.grad.cpu().tolist() == [4, 4, 4]
    parameter.grad = None
    parameter.data = torch.zeros(3)
    assert parameter.tolist() == [0, 0, 0]


def test_results_whose_shape_depends_on_values_are_waited_for() -> None:
    x = torch.tensor([0, 3, 0, 5], device=DEVICE)
    assert x.nonzero().cpu().tolist() == [[1], [3]]
    assert x[x > 0].cpu().tolist() == [3, 5]
    assert torch.equal(x, x.clone())
    values, indices = x.sort(descending=True)
    assert values.tolist() == [5, 3, 0, 0]
    assert indices.tolist()[:2] == [3, 1]


def test_complex_tensors_and_their_views_are_themselves() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    on_device = x.to(DEVICE)
    assert torch.equal(on_device.conj().cpu(), x.conj())
    assert torch.equal(on_device.conj().imag.cpu(), x.conj().imag)
    assert torch.equal(torch.view_as_real(on_device).cpu(), torch.view_as_real(x))
    assert torch.equal((on_device.conj() * 2).cpu(), x.conj() * 2)
    assert torch.equal(on_device.mT.cpu(), x.mT)


def test_a_wrong_call_raises_where_it_is_made_and_spoils_nothing() -> None:
    x = torch.ones(3, 4, device=DEVICE)
    with pytest.raises(RuntimeError):
        x @ x
    before = counts()
    assert (x @ x.mT).cpu().eq(4).all()
    assert _changes(before)["queued_kernels"] >= 1


def test_the_device_is_what_torch_calls_the_current_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(DEVICE.type)
    assert accelerator.DEVICE.type == "openreg"
    assert torch.ones(1).to("openreg").device == DEVICE


def test_losses_whose_kernel_writes_another_shape_first_are_the_cpu_s() -> None:
    x, y = torch.randn(2, 8, 8)
    for loss in (nn.functional.mse_loss, nn.functional.smooth_l1_loss):
        assert torch.equal(loss(x.to(DEVICE), y.to(DEVICE)).cpu(), loss(x, y))


def test_attention_is_one_operator_with_the_cpu_s_bits() -> None:
    found = []
    for device in (torch.device("cpu"), DEVICE):
        torch.manual_seed(0)
        query, key, value = (each.to(device).requires_grad_() for each in torch.randn(3, 2, 2, 16, 8))
        before = counts()
        output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output.square().sum().backward()
        gradients = [each.grad.cpu() for each in (query, key, value) if each.grad is not None]
        found.append([output.detach().cpu(), *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert _changes(before)["queued_kernels aten::_scaled_dot_product_flash_attention_for_cpu"] == 1
