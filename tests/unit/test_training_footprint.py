"""How the program's own device memory is measured: by watching on an emulated device, by asking on another.

The allocator that is asked is one of this file: the twin of what ``tests/gpu`` does on a real one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tierstore as ts
from tests.stores import make_store, numbered
from tierstore import sides
from tierstore.sides import Side
from tierstore.spi import device_storage_listeners
from tierstore.training.budgets.memory_meters import AllocatorMeter, EmulatedMeter, tensors_in
from tierstore.training.pytorch.own_work import ordinary_mode


@dataclass
class Output:
    """What a model may take or return."""

    scores: torch.Tensor
    states: tuple[torch.Tensor, ...] = ()
    name: str = ""


class Allocator:
    """What a device's allocator tells: the bytes that live, and the most that ever did."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    def set(self, live_bytes: int) -> None:
        self.live_bytes = live_bytes
        self.peak_bytes = max(self.peak_bytes, live_bytes)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator()
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: allocator.live_bytes)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: allocator.peak_bytes)
    return allocator


@pytest.fixture
def store() -> Iterator[ts.Store]:
    with make_store(1000, 1000, 5000) as store:
        yield store


@pytest.fixture
def asking(store: ts.Store, allocator: Allocator) -> AllocatorMeter:
    return AllocatorMeter(store, torch.device("cuda"))


def test_what_the_store_holds_is_not_the_programs(
    asking: AllocatorMeter, store: ts.Store, allocator: Allocator
) -> None:
    store.put("k", numbered(1), tier="device")
    allocator.set(700)
    assert asking.live_bytes() == 600


def test_a_new_peak_of_the_allocator_counts_beside_the_least_that_was_stored(
    asking: AllocatorMeter, store: ts.Store, allocator: Allocator
) -> None:
    store.put("k", numbered(1, 300), tier="device")
    allocator.set(400)
    asking.begin(())
    allocator.set(900)  # inside a module, where nobody looks
    allocator.set(400)
    store.drop("k")
    allocator.set(150)
    asking.look()
    assert asking.take_peak() == 900, "the store may have had nothing at that moment"
    assert not asking.was_peak_hidden


def test_a_peak_that_an_earlier_one_hides_is_what_was_seen_at_the_boundaries(
    asking: AllocatorMeter, allocator: Allocator
) -> None:
    allocator.set(5000)
    allocator.set(100)
    asking.begin(())
    allocator.set(600)
    asking.look()
    allocator.set(200)
    assert asking.take_peak() == 600
    assert asking.was_peak_hidden


def test_each_peak_is_taken_once(asking: AllocatorMeter, allocator: Allocator) -> None:
    asking.begin(())
    allocator.set(800)
    assert asking.take_peak() == 800
    allocator.set(300)
    asking.begin(())
    assert asking.take_peak() == 800, "the new period began with what was live at its beginning"
    assert asking.take_peak() == 300


def test_a_measurement_that_ended_is_forgotten(asking: AllocatorMeter, allocator: Allocator) -> None:
    asking.begin(())
    allocator.set(800)
    asking.look()
    asking.end()
    allocator.set(300)
    asking.begin(())
    assert asking.take_peak() == 300


def test_a_peak_that_the_user_resets_was_seen_before(asking: AllocatorMeter, allocator: Allocator) -> None:
    asking.begin(())
    allocator.set(800)  # and back
    allocator.set(100)
    asking.look()
    allocator.peak_bytes = 100
    assert asking.take_peak() == 800
    assert not asking.was_peak_hidden


def test_what_a_step_makes_is_counted_under_a_higher_peak(store: ts.Store, allocator: Allocator) -> None:
    asking = AllocatorMeter(store, torch.device("cpu"))  # any kind of device is counted alike
    allocator.set(5000)
    allocator.set(100)
    asking.begin(())
    asking.take_peak()
    asking.begin_step()
    torch.zeros(1000, dtype=torch.uint8).neg_()
    kept = torch.zeros(300, dtype=torch.uint8).neg()
    assert asking.take_peak() == 100 + 1024, "rounded as allocators round, and on top of what there was"
    assert not asking.was_peak_hidden
    del kept
    torch.empty(4000, dtype=torch.uint8)
    assert asking.take_peak() == 100, "the step is over"
    asking.close()


# --- an emulated device -------------------------------------------------------------------------


@pytest.fixture
def watching(store: ts.Store) -> Iterator[EmulatedMeter]:
    meter = EmulatedMeter(store)
    yield meter
    meter.close()


def test_what_comes_in_and_what_is_made_counts_once_while_it_lives(watching: EmulatedMeter) -> None:
    given = torch.ones(100)
    watching.begin(({"x": [given], "y": given.view(10, 10)},))
    made = given + 1
    alias = made[:10]
    assert watching.live_bytes() == 800
    del given, made
    assert watching.live_bytes() == 400, "a view keeps all of its storage"
    del alias
    assert (watching.live_bytes(), watching.take_peak()) == (0, 800)


def test_a_second_beginning_goes_on_with_the_first(watching: EmulatedMeter) -> None:
    watching.begin(())
    first = torch.ones(100)
    second = torch.ones(50)
    watching.begin((second,))
    assert watching.live_bytes() == 600
    del first


def test_what_is_done_apart_does_not_count(watching: EmulatedMeter) -> None:
    with ordinary_mode():
        before = torch.ones(10)
    watching.begin(())
    with ordinary_mode(), ordinary_mode():
        inside = torch.ones(10)
    after = torch.ones(10)
    assert watching.live_bytes() == 40
    del before, inside, after


def test_an_ended_measurement_sees_nothing_new_and_what_it_saw_until_it_dies(watching: EmulatedMeter) -> None:
    watching.begin(())
    kept = torch.ones(100)
    assert watching.take_peak() == 400
    watching.end()
    more = torch.ones(1000)
    assert watching.live_bytes() == 400
    watching.begin(())
    assert watching.take_peak() == 400, "what is there when it goes on is there still"
    del kept, more
    gc.collect()
    assert watching.live_bytes() == 0


def test_what_the_model_is_given_was_there_all_the_time(watching: EmulatedMeter) -> None:
    given, target = torch.ones(100), torch.ones(50)
    watching.begin((given,))
    (given * 2).sum()  # and gone
    assert watching.take_peak() == 800 + 4
    (given * 2).sum()
    loss = (target - 1).sum()
    assert watching.live_bytes() == 400 + 200 + 4
    assert watching.take_peak() == 800 + 4 + 200, "the targets were there beside the others"
    del loss


def test_what_is_given_to_a_part_on_the_host_is_not_the_devices(watching: EmulatedMeter) -> None:
    crossed = torch.zeros(100)
    sides.note(crossed.untyped_storage(), Side.HOST)
    watching.begin((crossed, torch.zeros(10)))
    assert watching.take_peak() == 40


def test_what_an_optimizer_is_given_may_be_in_host_memory(watching: EmulatedMeter) -> None:
    given, host = torch.ones(100), torch.ones(50)
    watching.begin((given,))
    watching.begin(())
    host.add_(1)
    assert watching.live_bytes() == 400


def test_what_a_device_has_allocated_for_a_store_is_not_the_programs(watching: EmulatedMeter) -> None:
    with ts.Store(ts.OffloadConfig(device="emulated", max_device_memory=4096).store_config()) as store:
        store.put("k", numbered(1, 1000), tier="device")
        watching.begin((torch.ones(1),))
        with store.lease("k") as lease:
            made = lease.tensor + 1
        assert watching.live_bytes() == 1000
        del made
    listeners = len(device_storage_listeners)
    watching.close()
    watching.close()
    assert len(device_storage_listeners) == listeners - 1


class OnTop(TorchDispatchMode):
    """A mode of the user's own, put on while a measurement runs."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's signature
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        return func(*args, **(kwargs or {}))


def test_a_measurement_that_ends_under_another_mode_counts_no_more(watching: EmulatedMeter) -> None:
    watching.begin(())
    with OnTop():  # type: ignore[no-untyped-call]
        watching.end()
        more = torch.ones(100)
    and_more = torch.ones(100)
    assert watching.live_bytes() == 0
    del more, and_more


def test_sparse_tensors_have_no_storage_to_count(watching: EmulatedMeter) -> None:
    watching.begin(())
    values = torch.eye(4).to_sparse()
    watching.live_bytes()
    assert values.is_sparse


def test_memory_that_the_store_adopted_is_the_programs_until_nobody_else_refers_to_it(
    watching: EmulatedMeter,
) -> None:
    meter = watching
    meter.begin(())
    mine = torch.zeros(1000, dtype=torch.uint8)
    stores = mine.detach()
    meter.hand_over(mine.untyped_storage(), lambda: True)
    assert meter.live_bytes() == 1000
    del mine
    assert meter.live_bytes() == 0
    again = stores.view(10, 100)  # by a lease
    assert meter.live_bytes() == 0
    del again, stores
    assert meter.live_bytes() == 0


def test_memory_that_the_store_has_let_go_of_stays_the_programs(watching: EmulatedMeter) -> None:
    meter = watching
    meter.begin(())
    mine = torch.zeros(1000, dtype=torch.uint8)
    meter.hand_over(mine.untyped_storage(), lambda: False)
    assert meter.live_bytes() == 1000
    assert meter.take_peak() == 1000


def test_a_peak_leaves_out_what_the_store_alone_refers_to(watching: EmulatedMeter) -> None:
    meter = watching
    meter.begin(())
    kept = []
    for _ in range(5):
        made = torch.zeros(1000, dtype=torch.uint8)
        kept.append(made.detach())
        meter.hand_over(made.untyped_storage(), lambda: True)
        del made
    assert meter.take_peak() == 1000
    assert len(kept) == 5
    meter.end()


def test_tensors_are_found_in_whatever_holds_them() -> None:
    a, b, c = (torch.zeros(number) for number in range(3))
    found = list(tensors_in([{"x": Output(a, (b,), "name"), "kind": Output}, ([c], 5)]))
    assert [tensor.numel() for tensor in found] == [0, 1, 2]


def test_inputs_that_come_in_a_dataclass_count(watching: EmulatedMeter) -> None:
    meter = watching
    meter.begin([Output(torch.zeros(10), (torch.zeros(5),))])
    assert meter.live_bytes() == 0  # they have died
    kept = Output(torch.zeros(10), (torch.zeros(5),))
    meter.begin([kept])
    assert meter.live_bytes() == 60
    meter.end()
