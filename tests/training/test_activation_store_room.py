"""The activation store where room is short, copies fail, or somebody is interrupted."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tierstore
from tests.fault.test_interrupts import InterruptAt
from tests.training.activation_stores import KINDS, base, emulated, host, late_store, narrow_store
from tierstore.config import StoreConfig, TierConfig
from tierstore.errors import BackendError
from tierstore.store import Store
from tierstore.testing.faults import Faulty, Gate, Operation
from tierstore.testing.memory import DeviceBudget
from tierstore.training.activations.swapping.activation_store import ActivationStore
from tierstore.units import MIB
from tierstore_backends.memory import open_backend as open_memory

WRITES: tuple[Operation, ...] = ("write",)
ROOT = Path(tierstore.__file__).parent
OURS = tuple(
    str(ROOT / part)
    for part in (
        "training/activations/swapping/activation_store.py",
        "training/activations/swapping/offloaded_storage.py",
        "store.py",
        "leases.py",
    )
)


@pytest.fixture
def activation_store() -> Iterator[ActivationStore]:
    with late_store() as store:
        yield ActivationStore(store)
        store.check()


def test_a_device_that_is_full_of_leases_sends_new_bytes_down_at_once(
    activation_store: ActivationStore,
) -> None:
    activation_store.store.put("parameters", torch.zeros(MIB - 24576, dtype=torch.uint8), tier="device")
    with activation_store.store.lease("parameters"):
        lent = activation_store.keep(base(), "first").take()
        offloaded = activation_store.keep(base() + 1, "k")
        assert activation_store.store.where("k") == ("host",)
        assert not offloaded.is_here
        assert torch.equal(lent, base())
        del lent
        assert torch.equal(offloaded.take(), base() + 1)


def test_a_copy_that_fails_is_an_error_and_the_bytes_are_unharmed() -> None:
    storage = open_memory(capacity_bytes=MIB, options={"storage": True})
    broken = Faulty(storage, fail_at=range(1, 3), on=WRITES)
    tiers = [emulated(), TierConfig("disk", broken, MIB)]
    with Store(StoreConfig(tiers)) as store:
        activation_store = ActivationStore(store)
        offloaded = activation_store.keep(base(), "k")
        with pytest.raises(BackendError):
            offloaded.release()
        assert torch.equal(offloaded.take(), base())
        offloaded.release()
        assert torch.equal(offloaded.take(), base())


def test_what_host_memory_cannot_hold_goes_to_disk() -> None:
    with narrow_store(4096, MIB) as store:
        activation_store = ActivationStore(store)
        offloaded = activation_store.keep(base(), "k")
        offloaded.release()
        assert store.where("k") == ("disk",)
        assert torch.equal(offloaded.take(), base())


@pytest.mark.parametrize(("host_bytes", "tier"), [(MIB, "host"), (4096, "disk")])
def test_what_the_device_cannot_hold_goes_at_once_to_the_next_tier_that_can(
    host_bytes: int, tier: str
) -> None:
    with narrow_store(host_bytes, MIB) as store:
        activation_store = ActivationStore(store)
        store.put("parameters", torch.zeros(MIB - 24576, dtype=torch.uint8), tier="device")
        with store.lease("parameters"):
            lent = activation_store.keep(base(), "first").take()
            offloaded = activation_store.keep(base() + 1, "k")
            assert store.where("k") == (tier,)
            del lent
            assert torch.equal(offloaded.take(), base() + 1)


def test_what_no_tier_below_can_hold_stays() -> None:
    with narrow_store(4096, 4096) as store:
        activation_store = ActivationStore(store)
        offloaded = activation_store.keep(base(), "k")
        offloaded.release()
        assert store.where("k") == ("device",)
        assert offloaded.is_here
        assert activation_store.stats.refused == 1


@pytest.mark.parametrize("how", ["leave", "all taken"])
def test_bytes_that_no_tier_below_can_hold_are_not_said_to_have_left(how: str) -> None:
    with narrow_store(4096, 4096) as store:
        activation_store = ActivationStore(store)
        offloaded = activation_store.keep(base(), "k")
        if how == "leave":
            offloaded.weakly().leave()
        else:
            offloaded.take()
        activation_store.sweep()
        assert offloaded.is_here
        assert (activation_store.stats.released, activation_store.stats.refused) == (0, 1)
        assert torch.equal(offloaded.take(), base())


def test_bytes_whose_copy_fails_are_not_said_to_have_left() -> None:
    storage = open_memory(capacity_bytes=MIB, options={"storage": True})
    broken = Faulty(storage, fail_at=range(1, 10), on=WRITES)
    tiers = [emulated(), TierConfig("disk", broken, MIB)]
    with Store(StoreConfig(tiers)) as store:
        activation_store = ActivationStore(store)
        offloaded = activation_store.keep(base(), "k")
        offloaded.take()
        activation_store.sweep()
        offloaded.weakly().leave()
        assert offloaded.is_here
        assert activation_store.stats.released == 0
        assert torch.equal(offloaded.take(), base())


def test_bytes_are_not_said_to_have_left_before_they_have() -> None:
    disk = Gate(open_memory(capacity_bytes=MIB, options={"storage": True}))
    with Store(StoreConfig([emulated(), TierConfig("disk", disk, MIB)])) as store:
        activation_store = ActivationStore(store)
        offloaded = activation_store.keep(base(), "k")
        offloaded.take()
        activation_store.sweep()
        before = (offloaded.is_here, activation_store.stats.released)
        disk.open()
        store.evict("k", to="disk").result()
        assert (before, (offloaded.is_here, activation_store.stats.released)) == ((True, 0), (False, 1))


def test_what_leaves_without_a_wait_goes_to_the_tier_that_can_hold_it() -> None:
    with narrow_store(4096, MIB) as store:
        activation_store = ActivationStore(store)
        offloaded = activation_store.keep(base(), "k")
        offloaded.weakly().leave()
        store.evict("k", to="disk").result()
        assert store.where("k") == ("disk",)
        assert activation_store.stats.released == 1


def test_what_a_user_leases_stays_and_goes_when_he_is_done(activation_store: ActivationStore) -> None:
    offloaded = activation_store.keep(base(), "k")
    with activation_store.store.lease("k"):
        del offloaded
        activation_store.sweep()
        assert "k" in activation_store.store
        assert activation_store.keep(base(), "k").key == "k'"
    activation_store.sweep()
    assert len(activation_store.store) == 0


def test_what_a_user_leases_stays(activation_store: ActivationStore) -> None:
    offloaded = activation_store.keep(base(), "k")
    with activation_store.store.lease("k") as lease:
        offloaded.release()
        assert offloaded.is_here
        assert torch.equal(lease.tensor.view(torch.float32), base())


@pytest.mark.parametrize("kind", ["a small part", "a corner", "a repeated part"])
def test_a_part_gets_room_that_is_made_for_it(kind: str) -> None:
    """Where nothing more fits beside what the program and the store have."""
    part = KINDS[kind]()
    expected, capacity_bytes = part.clone(), 65536
    storages = [base() + number for number in range(4)]
    with Store(StoreConfig([emulated(capacity_bytes), host()])) as store:
        activation_store = ActivationStore(store)
        with DeviceBudget(capacity_bytes) as budget:
            offloaded = [activation_store.keep(storages.pop(0), f"k{number}") for number in range(4)]
            assert budget.live_bytes == capacity_bytes
            small = activation_store.keep(part, "part")
            assert budget.peak_bytes == capacity_bytes
            assert small.is_here
            assert sum(each.is_here for each in offloaded) == 3
        assert torch.equal(small.take(), expected)
        assert all(torch.equal(each.take(), base() + number) for number, each in enumerate(offloaded))


def test_a_part_goes_below_at_once_where_leases_leave_it_no_room(activation_store: ActivationStore) -> None:
    activation_store.store.put("parameters", torch.zeros(MIB, dtype=torch.uint8), tier="device")
    with activation_store.store.lease("parameters"):
        offloaded = activation_store.keep(base()[1000:1100], "part")
        assert activation_store.store.where("part") == ("host",)
        assert (activation_store.stats.released, activation_store.stats.stalls) == (1, 1)
    activation_store.store.drop("parameters")
    assert torch.equal(offloaded.take(), base()[1000:1100])


def _keep_and_take(activation_store: ActivationStore) -> None:
    x = torch.arange(8192.0)
    offloaded = [
        activation_store.keep(x, "k"),
        activation_store.keep(x[:10], "k"),
        activation_store.keep(base()[:9], "k"),
    ]
    offloaded[0].release()
    offloaded[0].weakly().bring()
    lent = [each.take() for each in offloaded]
    del lent
    activation_store.sweep()
    offloaded[0].weakly().leave()


def test_an_interrupt_leaves_no_key_no_lease_and_no_bytes() -> None:
    for number in itertools.count(1):
        with Store(StoreConfig([emulated(), host()])) as store:
            activation_store = ActivationStore(store)
            interrupted = InterruptAt(number, of=OURS)
            with contextlib.suppress(KeyboardInterrupt), interrupted:
                _keep_and_take(activation_store)
            if activation_store.stats.offloaded:
                gc.collect()  # the interrupt's frames may refer to it in a circle
                activation_store.sweep()
            assert (activation_store.stats.offloaded, len(store)) == (0, 0), interrupted.moment
            store.check()
        if interrupted.moment is None:
            break
    assert number > 200


def test_an_interrupted_take_leaves_no_lease() -> None:
    for number in itertools.count(1):
        with Store(StoreConfig([emulated(), host()])) as store:
            activation_store = ActivationStore(store)
            offloaded = activation_store.keep(base(), "k")
            offloaded.release()
            interrupted = InterruptAt(number, of=OURS)
            with contextlib.suppress(KeyboardInterrupt), interrupted:
                offloaded.take()
            activation_store.sweep()
            store.evict("k", to="host").result()
            assert torch.equal(offloaded.take(), base()), interrupted.moment
        if interrupted.moment is None:
            break
    assert number > 20
