"""The meter of device memory, against sums made by hand."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import tierstore as ts
from tierstore import sides
from tierstore.errors import CapacityError, ConfigError, UsageError
from tierstore.sides import Side
from tierstore.spi import AddressableSlot, device_storage_listeners
from tierstore.testing.memory import DeviceBudget, MixedDevices, OutOfDeviceMemory
from tierstore_backends.device import EmulatedDevice
from tierstore_backends.memory import MemoryBackend
from tierstore_backends.pinned import PinnedPool

KIB = 1024
MIB = 1024**2


def test_a_tensor_counts_while_it_lives() -> None:
    with DeviceBudget("1MiB") as budget:
        tensor = torch.empty(1000, dtype=torch.float32)
        assert budget.live_bytes == 4000
        del tensor
        assert budget.live_bytes == 0
    assert budget.peak_bytes == 4000


def test_views_and_slices_are_not_new() -> None:
    with DeviceBudget("1MiB") as budget:
        tensor = torch.zeros(10, 100)
        views = [
            tensor.t(),
            tensor[3:],
            tensor.view(-1),
            tensor.unsqueeze(0).expand(5, 10, 100),
            tensor.detach(),
        ]
        assert budget.live_bytes == 4000
        del tensor
        assert budget.live_bytes == 4000
        views.clear()
        assert budget.live_bytes == 0


def test_results_in_place_are_not_new() -> None:
    with DeviceBudget("1MiB") as budget:
        tensor = torch.zeros(1000)
        tensor.add_(1).mul_(2).clamp_(max=1)
        torch.add(tensor, 1, out=tensor)
        tensor[:10].fill_(3)
        assert budget.live_bytes == 4000
        assert budget.peak_bytes == 4000


def test_a_storage_reached_in_two_ways_counts_once() -> None:
    with DeviceBudget("1MiB") as budget:
        first, second = torch.ones(1000).chunk(2)
        assert budget.live_bytes == 4000
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_an_address_used_again_is_a_new_tensor() -> None:
    with DeviceBudget("1MiB") as budget:
        for _ in range(100):
            tensor = torch.empty(1000)
            assert budget.live_bytes == 4000
            del tensor
    assert budget.peak_bytes == 4000


def test_a_linear_layer_forward_and_backward_is_exact() -> None:
    with DeviceBudget("1MiB") as budget:
        layer = nn.Linear(64, 32)  # weight 8192 B, bias 128 B
        parameters = 64 * 32 * 4 + 32 * 4
        assert budget.live_bytes == parameters
        x = torch.ones(16, 64)  # 4096 B
        y = layer(x)  # 2048 B
        assert budget.live_bytes == parameters + 4096 + 2048
        loss = y.sum()  # 4 B
        loss.backward()
        assert budget.live_bytes == 2 * parameters + 4096 + 2048 + 4
        del x, y, loss
        assert budget.live_bytes == 2 * parameters
        layer.zero_grad()
        assert budget.live_bytes == parameters


def test_what_autograd_saves_counts_until_backward() -> None:
    with DeviceBudget("1MiB") as budget:
        x = torch.ones(1000, requires_grad=True)  # 4000 B, kept
        y = x.exp().sin().sum()  # exp(x) is saved, sin() of it is not; 4 B of result
        assert budget.live_bytes == 2 * 4000 + 4
        y.backward()
        del y
        assert budget.live_bytes == 2 * 4000  # x and its gradient


def test_tensors_made_from_data_count() -> None:
    with DeviceBudget("1MiB") as budget:
        tensor = torch.tensor([1.0, 2.0, 3.0])
        assert budget.live_bytes == 12
        assert tensor.sum() == 6


def test_memory_that_is_not_torchs_does_not_count() -> None:
    array = np.zeros(1000)
    with DeviceBudget("1MiB") as budget:
        views = torch.from_numpy(array), torch.frombuffer(bytearray(1000), dtype=torch.uint8)
        assert budget.live_bytes == 0
        copy = views[0].clone()
        assert budget.live_bytes == copy.nbytes


def test_tensors_older_than_the_meter_do_not_count() -> None:
    tensor = torch.zeros(1000)
    with DeviceBudget("1MiB") as budget:
        view = tensor[10:]
        view.add_(1)
        assert budget.live_bytes == 0


def test_meta_and_fake_tensors_do_not_count() -> None:
    with DeviceBudget("1MiB") as budget:
        tensors = [torch.empty(10**9, device="meta")]
        with FakeTensorMode():
            tensors.append(torch.empty(10**9))
        assert budget.live_bytes == 0


def test_the_parts_of_a_sparse_tensor_count() -> None:
    with DeviceBudget("1MiB") as budget:
        layer = nn.Embedding(100, 8, sparse=True)  # 3200 B
        rows = torch.tensor([3, 5, 5])  # 24 B
        layer(rows).sum().backward()
        before = budget.live_bytes
        # the gradient is sparse: two dimensions of indices at most, and three rows of values
        assert 3200 + 24 + 3 * 8 * 4 <= before <= 3200 + 24 + 2 * (3 * 8 * 4) + 2 * 24
        layer.zero_grad()
        assert budget.live_bytes == 3200 + 24


def test_a_subclass_of_tensor_counts() -> None:
    class Named(torch.Tensor):
        pass

    named = torch.zeros(1000).as_subclass(Named)
    with DeviceBudget("1MiB") as budget:
        doubled = named * 2
        assert isinstance(doubled, Named)
        assert budget.live_bytes == 4000


def test_a_wrapper_counts_as_its_parts() -> None:
    wrapper = TwoTensor(torch.zeros(1000), torch.zeros(1000))
    with DeviceBudget("1MiB") as budget:
        doubled = wrapper * 2
        assert budget.live_bytes == 8000
        del doubled
        assert budget.live_bytes == 0


def test_a_storage_that_changes_size_is_counted_anew() -> None:
    with DeviceBudget("1MiB") as budget:
        tensor = torch.zeros(1000)
        tensor.untyped_storage().resize_(0)
        assert budget.live_bytes == 0
        tensor.untyped_storage().resize_(4000)
        assert budget.live_bytes == 4000
        tensor.resize_(2000)
        assert budget.live_bytes == 8000


def test_a_storage_released_behind_the_meters_back_does_not_raise_the_peak() -> None:
    with DeviceBudget("1MiB") as budget:
        first = torch.zeros(1000)
        first.untyped_storage().resize_(0)
        second = torch.zeros(1000)
        assert budget.peak_bytes == 4000
        assert second.nbytes == 4000


def test_growth_behind_the_meters_back_is_seen_at_the_next_use() -> None:
    with DeviceBudget("1MiB") as budget:
        tensor = torch.zeros(1000)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(16_000)
        tensor.zero_()
        assert budget.peak_bytes == 16_000


def test_an_allocation_beyond_the_budget_is_refused_and_given_up() -> None:
    with DeviceBudget(10_000) as budget:
        kept = torch.zeros(1000)
        with pytest.raises(OutOfDeviceMemory) as refusal:
            torch.zeros(1501)
        assert (refusal.value.needed_bytes, refusal.value.live_bytes) == (6004, 4000)
        assert refusal.value.capacity_bytes == 10_000
        assert "5.9 KiB asked for, 3.9 KiB in use of a budget of 9.8 KiB" in str(refusal.value)
        assert budget.live_bytes == 4000
        more = torch.zeros(1500)
        assert budget.live_bytes == 10_000
        assert budget.peak_bytes == 10_000
        assert kept.nbytes + more.nbytes == 10_000


def test_the_refusal_holds_no_memory() -> None:
    born: list[weakref.ref[torch.UntypedStorage]] = []

    def remember(storage: torch.UntypedStorage) -> None:
        born.append(weakref.ref(storage))

    device_storage_listeners.append(remember)
    try:
        with DeviceBudget(100_000), pytest.raises(CapacityError) as refusal:
            EmulatedDevice(MIB).reserve(200_000)
    finally:
        device_storage_listeners.remove(remember)
    assert [reference() for reference in born] == [None]
    assert isinstance(refusal.value.__cause__, OutOfDeviceMemory)


def test_the_refusal_holds_nothing_that_the_operation_made() -> None:
    with DeviceBudget("1MiB") as outside, DeviceBudget(100):
        with pytest.raises(OutOfDeviceMemory) as refusal:
            torch.zeros(1000)
        assert refusal.value.needed_bytes == 4000
        assert outside.live_bytes == 0


def test_generic_handlers_of_out_of_memory_errors_work() -> None:
    with DeviceBudget(100), pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1000)


def test_a_refusal_in_backward_reaches_the_caller() -> None:
    with DeviceBudget(3 * 4000 + 100) as budget:
        x = torch.ones(1000, requires_grad=True)
        y = x.exp().sin().sum()
        with pytest.raises(OutOfDeviceMemory):
            y.backward()
        del y
        gc.collect()  # the error's traceback held what backward was given
        assert budget.live_bytes == 4000


def test_growing_in_place_beyond_the_budget_is_refused() -> None:
    with DeviceBudget(10_000):
        tensor = torch.zeros(1000)
        with pytest.raises(OutOfDeviceMemory):
            tensor.resize_(3000)
        assert tensor.view(-1).zero_().numel() == 3000  # what does not grow further may go on


def test_nested_meters_each_count_for_themselves() -> None:
    with DeviceBudget("1MiB") as outer:
        first = torch.zeros(1000)
        with DeviceBudget("1MiB") as inner:
            second = torch.zeros(500)
            assert (outer.live_bytes, inner.live_bytes) == (6000, 2000)
        del first, second
        assert outer.live_bytes == 0
    assert (outer.peak_bytes, inner.peak_bytes) == (6000, 2000)


def test_the_smaller_of_two_nested_budgets_holds() -> None:
    with DeviceBudget(1000) as outer, DeviceBudget("1MiB") as inner:
        with pytest.raises(OutOfDeviceMemory):
            torch.zeros(1000)
        assert (outer.live_bytes, inner.live_bytes) == (0, 0)


def test_a_meter_begins_anew_at_each_entry() -> None:
    budget = DeviceBudget(10_000)
    with budget:
        kept = torch.zeros(1000)
    assert (budget.live_bytes, budget.peak_bytes) == (0, 4000)
    with budget:
        assert (budget.live_bytes, budget.peak_bytes) == (0, 0)
    del kept
    assert budget.live_bytes == 0


def test_a_meter_cannot_be_entered_twice_at_once() -> None:
    with DeviceBudget(1000) as budget, pytest.raises(UsageError):
        budget.__enter__()


def test_nothing_is_left_behind() -> None:
    listeners = list(device_storage_listeners)
    with DeviceBudget(1000), pytest.raises(OutOfDeviceMemory):
        torch.zeros(1000)
    assert device_storage_listeners == listeners
    assert _get_current_dispatch_mode_stack() == []
    assert _get_current_function_mode_stack() == []
    assert torch.zeros(1000).nbytes == 4000


@pytest.mark.parametrize("capacity", ["much", -1, True, "1XB"])
def test_a_capacity_that_is_no_size_is_refused(capacity: int | str) -> None:
    with pytest.raises(ConfigError):
        DeviceBudget(capacity)


def test_slots_of_an_emulated_device_count_once() -> None:
    device = EmulatedDevice(MIB)
    with DeviceBudget("1MiB") as budget:
        slots = [device.reserve(1000), device.reserve(100_000)]
        assert budget.live_bytes == 101_000
        for slot in slots:
            assert isinstance(slot, AddressableSlot)
            assert slot.memory[10:].numel() == slot.nbytes - 10
            device.free(slot)
        assert budget.live_bytes == 0
    assert budget.peak_bytes == 101_000


def test_a_slot_that_is_recycled_counts_again() -> None:
    device = EmulatedDevice(MIB)
    with DeviceBudget("1MiB") as budget:
        for _ in range(3):
            slot = device.reserve(100_000)
            assert budget.live_bytes == 100_000
            device.free(slot)
            assert budget.live_bytes == 0


def test_a_view_that_outlives_its_slot_keeps_counting() -> None:
    device = EmulatedDevice(MIB)
    with DeviceBudget("1MiB") as budget:
        slot = device.reserve(100_000)
        assert isinstance(slot, AddressableSlot)
        view = slot.memory[5:]
        device.free(slot)
        assert budget.live_bytes == 100_000
        del view
        assert budget.live_bytes == 0


def test_slots_count_whichever_thread_reserves_them() -> None:
    device = EmulatedDevice(MIB)
    with DeviceBudget("1MiB") as budget:
        slots: list[object] = []
        threads = [threading.Thread(target=lambda: slots.append(device.reserve(50_000))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(slots) == 8
        assert budget.live_bytes == budget.peak_bytes == 400_000


def test_a_slot_beyond_the_budget_is_refused_and_not_held() -> None:
    device = EmulatedDevice(MIB)
    with DeviceBudget(100_000) as budget:
        with pytest.raises(CapacityError) as refusal:
            device.reserve(100_001)
        assert isinstance(refusal.value.__cause__, OutOfDeviceMemory)
        assert budget.live_bytes == device.used_bytes == 0
        device.reserve(100_000)


@pytest.mark.parametrize("make", [PinnedPool, MemoryBackend])
def test_host_slots_do_not_count(make: Callable[[int], PinnedPool | MemoryBackend]) -> None:
    backend = make(MIB)
    with DeviceBudget(100) as budget:
        slot = backend.reserve(100_000)
        assert isinstance(slot, AddressableSlot)
        slot.memory.fill_(1)
        assert slot.memory[7:].view(-1).numel() == 99_993
        assert budget.peak_bytes == 0


def test_deaths_in_other_threads_and_in_collections_are_counted() -> None:
    with DeviceBudget("1MiB") as budget:
        cycle: list[object] = [torch.zeros(1000)]
        cycle.append(cycle)
        held = [torch.zeros(1000)]
        del cycle
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        gc.collect()
        assert budget.live_bytes == 0


def test_what_a_store_copies_past_host_memory_is_not_the_devices(tmp_path: Path) -> None:
    config = ts.StoreConfig.default("emulated", 512 * KIB, 64 * KIB, "4MB", str(tmp_path / "files"))
    tensor = torch.ones(256 * KIB, dtype=torch.uint8)
    with DeviceBudget("1MB") as budget, ts.Store(config) as store:
        store.put("k", tensor, tier="device")
        store.evict("k", to="disk").result(30)
        store.fetch("k", tier="device").result(30)
        assert torch.equal(store.get("k"), tensor)
        peak_bytes = budget.peak_bytes
    assert peak_bytes == 256 * KIB


# ---------------------------------------------------------------------- the two sides


def _on(side: Side, *shape: int) -> Tensor:
    made = torch.ones(shape)
    sides.note(made.untyped_storage(), side)
    return made


def test_what_is_made_of_the_host_s_does_not_count() -> None:
    with DeviceBudget("1MiB") as budget:
        host, fresh = _on(Side.HOST, 256), torch.ones(256)
        before = budget.live_bytes
        made = (host * fresh) @ host
        kept = host.relu() + 1
        assert budget.live_bytes == before
        assert {sides.side_of(each.untyped_storage()) for each in (made, kept)} == {Side.HOST}


def test_operators_of_both_sides_raise_on_request() -> None:
    host, device = _on(Side.HOST, 4), _on(Side.DEVICE, 4)
    with DeviceBudget("1MiB"):
        assert sides.side_of((host + device).untyped_storage()) is Side.DEVICE
    with DeviceBudget("1MiB", mixing="raise"):
        with pytest.raises(
            MixedDevices, match=r"aten.add.Tensor: expected all tensors to be on the same device"
        ):
            host + device
        with pytest.raises(MixedDevices):
            torch.cat([device, host])
        host + torch.ones(4)  # of which nothing is known
        host + _on(Side.DEVICE)  # a number
        host.copy_(device)
        torch._foreach_add_([host, device], 1.0)  # by itself each


def test_mixing_is_raised_or_allowed() -> None:
    with pytest.raises(UsageError, match="mixing='maybe'"):
        DeviceBudget("1MiB", mixing="maybe")


def test_what_is_allocated_out_of_sight_counts_where_it_is_told() -> None:
    with DeviceBudget("1MiB") as budget:
        before = budget.live_bytes
        storages = [torch.UntypedStorage(512), torch.UntypedStorage(512)]
        sides.note_allocation(storages[0], Side.DEVICE)
        sides.note_allocation(storages[1], Side.HOST)
        assert budget.live_bytes == before + 512
