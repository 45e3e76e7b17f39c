"""The vault: what is kept comes back as it was, once, and leaves nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.training.twins import LATE_AND_OVERWRITTEN
from tierstore.config import StoreConfig, TierConfig
from tierstore.errors import BackendError
from tierstore.store import Store
from tierstore.testing.faults import Faulty, Operation
from tierstore.training.activations.vault import Vault
from tierstore_backends.device import open_backend as open_device
from tierstore_backends.memory import open_backend as open_memory

MIB = 2**20
WRITES: tuple[Operation, ...] = ("write",)


@pytest.fixture
def store() -> Iterator[Store]:
    device = open_device(capacity_bytes=MIB, options={"device": "emulated", **LATE_AND_OVERWRITTEN})
    with Store(StoreConfig([TierConfig("device", device, MIB), _host(MIB)])) as opened:
        yield opened
        opened.check()


@pytest.fixture
def vault(store: Store) -> Vault:
    return Vault(store)


def _host(capacity_bytes: int) -> TierConfig:
    return TierConfig("host", open_memory(capacity_bytes=capacity_bytes, options={}), capacity_bytes)


def base(count: int = 4096) -> Tensor:
    return torch.arange(float(count))


KINDS: dict[str, Callable[[], Tensor]] = {
    "whole": base,
    "turned": lambda: base().view(64, 64).t(),
    "a large part": lambda: base()[1000:],
    "a small part": lambda: base()[1000:1100],
    "a column": lambda: base().view(64, 64)[:, 3],
    "a corner": lambda: base().view(64, 64)[60:, 60:],
    "repeated": lambda: base(64).expand(64, 64),
    "a repeated part": lambda: base()[7:8].expand(100),
    "overlapping": lambda: base().unfold(0, 8, 2),
    "of no dimension": lambda: base()[5],
    "empty": lambda: base()[:0],
    "bytes": lambda: torch.arange(255, dtype=torch.uint8)[3:],
    "bfloat": lambda: base().bfloat16()[1:],
    "bools": lambda: base() > 5,
    "complex": lambda: torch.complex(base(), base()),
    "conjugated": lambda: torch.complex(base(), base()).conj(),
    "negated": lambda: torch.complex(base(), base()).conj().imag,
    "with an odd number of bytes": lambda: torch.empty(0, dtype=torch.int16).set_(
        torch.arange(101, dtype=torch.uint8).untyped_storage(), 1, (20,), (2,)
    ),
}


@pytest.mark.parametrize("is_released", [False, True], ids=["here", "released"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_comes_back_as_it_was(vault: Vault, kind: str, is_released: bool) -> None:
    tensor = KINDS[kind]()
    expected, shape, stride = tensor.clone(), tensor.shape, tensor.stride()
    is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
    parked = vault.keep(tensor, "k")
    del tensor
    if is_released:
        parked.release()
        assert "device" not in vault.store.where(parked.key)
    found = parked.take()
    assert (found.shape, found.stride(), found.dtype) == (shape, stride, expected.dtype)
    assert (found.is_conj(), found.is_neg()) == (is_conj, is_neg)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [
        ("whole", 16384),
        ("turned", 16384),
        ("a large part", 16384),
        ("a small part", 400),
        ("a column", 16384),
        ("a corner", 4 * (3 * 64 + 4)),
        ("repeated", 256),
        ("a repeated part", 4),
        ("overlapping", 16384),
    ],
)
def test_a_storage_is_kept_whole_or_what_a_small_view_touches(vault: Vault, kind: str, nbytes: int) -> None:
    assert vault.keep(KINDS[kind](), "k").nbytes == nbytes


def test_one_storage_is_kept_once(vault: Vault) -> None:
    x = base()
    one, other, third = vault.keep(x, "k"), vault.keep(x.view(64, 64).t(), "k"), vault.keep(x[5:9], "k")
    assert one.key == other.key == third.key == "k"
    assert vault.stats.kept == 1
    assert torch.equal(third.take(), base()[5:9])


def test_a_new_storage_at_an_old_address_is_another(vault: Vault) -> None:
    x = base()
    address = x.data_ptr()
    one = vault.keep(x, "k")
    one.release()
    del x
    found = []
    for number in range(100):
        y = torch.full((4096,), float(number))
        parked = vault.keep(y, "k")
        assert torch.equal(parked.take(), y)
        found.append(y.data_ptr() == address)
        del y, parked
    assert torch.equal(one.take(), base())


def test_a_key_that_is_taken_gets_a_mark(vault: Vault) -> None:
    parked = [vault.keep(base(), "k") for _ in range(3)]
    assert [each.key for each in parked] == ["k", "k'", "k''"]
    parked.pop(0)
    vault.sweep()
    assert vault.keep(base(), "k").key == "k"


def test_storages_that_have_died_leave_no_trace(vault: Vault) -> None:
    x = base()
    parked = [vault.keep(x, "k"), vault.keep(base()[:9], "k"), vault.keep(torch.ones(5), "k")]
    assert vault._known
    del x
    for each in parked:
        each.release()
    del each
    parked.clear()
    vault.sweep()
    assert (vault._known, vault._lent, vault._parked) == ({}, {}, {})


def test_bytes_are_dropped_when_the_last_reference_goes(vault: Vault) -> None:
    x = base()
    one, other = vault.keep(x, "k"), vault.keep(x, "k")
    del one
    vault.sweep()
    assert "k" in vault.store
    del other
    vault.sweep()
    assert "k" not in vault.store
    assert (vault.stats.parked, vault.stats.parked_bytes) == (0, 0)


def test_bytes_stay_while_something_refers_to_them(vault: Vault) -> None:
    parked = vault.keep(base(), "k")
    parked.release()
    view = parked.take()[10:20]
    del parked
    vault.sweep()
    assert vault.store.where("k") == ("device", "host")
    assert torch.equal(view, base()[10:20])
    del view
    vault.sweep()
    assert "k" not in vault.store


def test_a_late_end_drops_no_other_bytes_of_the_same_name(vault: Vault) -> None:
    first = vault.keep(base(), "k")
    lent = first.take()
    del first
    vault.sweep()
    second = vault.keep(torch.ones(4096), "k")
    del lent
    vault.sweep()
    assert second.key == "k'"
    assert torch.equal(second.take(), torch.ones(4096))
    third = vault.keep(torch.zeros(4096), "k")
    gc.collect()
    vault.sweep()
    assert torch.equal(third.take(), torch.zeros(4096))


def test_an_end_that_is_noticed_twice_drops_no_other_bytes(vault: Vault) -> None:
    first = vault.keep(base(), "k")
    estate = first._bytes.estate
    vault._settle(estate, None)  # the garbage collector clears weak references before it calls finalisers
    second = vault.keep(torch.ones(4096), "k")
    del first
    vault.sweep()
    assert second.key == "k"
    assert torch.equal(second.take(), torch.ones(4096))


def test_what_every_use_has_taken_goes_down_again(vault: Vault) -> None:
    x = base()
    uses = [vault.keep(x, "k") for _ in range(3)]
    del x
    uses[0].release()
    for number, use in enumerate(uses):
        use.take()
        vault.sweep()
        if number < 2:
            assert "device" in vault.store.where("k")
    vault.store.evict("k", to="host").result()  # waits for what is under way
    assert vault.stats.released == 2


def test_a_release_of_what_is_in_use_does_nothing(vault: Vault) -> None:
    parked = vault.keep(base(), "k")
    lent = parked.take()
    parked.release()
    assert not parked.is_released
    assert torch.equal(lent, base())


def test_bring_begins_and_take_does_not_wait(vault: Vault) -> None:
    parked = vault.keep(base(), "k")
    parked.release()
    parked.bring()
    vault.store.fetch("k").result()
    stalls = vault.stats.stalls
    lent = parked.take()
    stats = vault.stats
    assert (stats.stalls, stats.brought, stats.handed_over) == (stalls, 1, 0)
    assert torch.equal(lent, base())


def test_what_is_still_here_is_handed_over(vault: Vault) -> None:
    parked = vault.keep(base(), "k")
    parked.bring()
    parked.take()
    stats = vault.stats
    assert (stats.brought, stats.handed_over, stats.handed_over_bytes) == (0, 1, 16384)
    assert vault.store.stats().traffic.get(("host", "device")) is None


def test_a_change_is_told_though_nobody_has_the_tensor_any_more(vault: Vault) -> None:
    x = base()
    parked = vault.keep(x.view(64, 64), "k")
    parked.release()
    x.add_(1)
    del x
    with pytest.raises(
        RuntimeError, match=r"\[torch.float32 \[64, 64\]\] is at version 1; expected version 0"
    ):
        parked.take()


def test_a_changed_storage_is_kept_anew(vault: Vault) -> None:
    x = base()
    first = vault.keep(x, "k")
    x.mul_(2)
    second = vault.keep(x, "k")
    assert second.key == "k'"
    assert vault.store.where("k") == ("host",)
    assert torch.equal(second.take(), base() * 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.take()


def test_a_weak_reference_keeps_nothing(vault: Vault) -> None:
    parked = vault.keep(base(), "k")
    weakly = parked.weakly()
    before = weakly.is_here
    weakly.release()
    after = weakly.is_here
    assert (before, after) == (True, False)
    del parked
    vault.sweep()
    weakly.release()
    weakly.bring()
    assert not weakly.is_here
    assert "k" not in vault.store


def test_a_device_that_is_full_of_leases_sends_new_bytes_down_at_once(vault: Vault) -> None:
    vault.store.put("parameters", torch.zeros(MIB - 24576, dtype=torch.uint8), tier="device")
    with vault.store.lease("parameters"):
        lent = vault.keep(base(), "first").take()
        parked = vault.keep(base() + 1, "k")
        assert vault.store.where("k") == ("host",)
        assert parked.is_released
        assert torch.equal(lent, base())
        del lent
        assert torch.equal(parked.take(), base() + 1)


def test_a_copy_that_fails_is_an_error_and_the_bytes_are_unharmed() -> None:
    device = open_device(capacity_bytes=MIB, options={"device": "emulated"})
    storage = open_memory(capacity_bytes=MIB, options={"storage": True})
    broken = Faulty(storage, fail_at=range(1, 3), on=WRITES)
    tiers = [TierConfig("device", device, MIB), TierConfig("disk", broken, MIB)]
    with Store(StoreConfig(tiers)) as store:
        vault = Vault(store)
        parked = vault.keep(base(), "k")
        with pytest.raises(BackendError):
            parked.release()
        assert torch.equal(parked.take(), base())
        parked.release()
        assert torch.equal(parked.take(), base())


def _narrow(host_bytes: int, disk_bytes: int) -> Store:
    device = open_device(capacity_bytes=MIB, options={"device": "emulated"})
    disk = open_memory(capacity_bytes=disk_bytes, options={"storage": True})
    tiers = [TierConfig("device", device, MIB), _host(host_bytes), TierConfig("disk", disk, disk_bytes)]
    return Store(StoreConfig(tiers))


def test_what_host_memory_cannot_hold_goes_to_disk() -> None:
    with _narrow(4096, MIB) as store:
        vault = Vault(store)
        parked = vault.keep(base(), "k")
        parked.release()
        assert store.where("k") == ("disk",)
        assert torch.equal(parked.take(), base())


@pytest.mark.parametrize(("host_bytes", "tier"), [(MIB, "host"), (4096, "disk")])
def test_what_the_device_cannot_hold_goes_at_once_to_the_next_tier_that_can(
    host_bytes: int, tier: str
) -> None:
    with _narrow(host_bytes, MIB) as store:
        vault = Vault(store)
        store.put("parameters", torch.zeros(MIB - 24576, dtype=torch.uint8), tier="device")
        with store.lease("parameters"):
            lent = vault.keep(base(), "first").take()
            parked = vault.keep(base() + 1, "k")
            assert store.where("k") == (tier,)
            del lent
            assert torch.equal(parked.take(), base() + 1)


def test_what_no_tier_below_can_hold_stays() -> None:
    with _narrow(4096, 4096) as store:
        vault = Vault(store)
        parked = vault.keep(base(), "k")
        parked.release()
        assert store.where("k") == ("device",)
        assert not parked.is_released
        assert vault.stats.refused == 1


def test_what_a_user_leases_stays(vault: Vault) -> None:
    parked = vault.keep(base(), "k")
    with vault.store.lease("k") as lease:
        parked.release()
        assert not parked.is_released
        assert torch.equal(lease.tensor.view(torch.float32), base())


def test_a_closed_store_is_no_trouble_for_what_ends_later(store: Store) -> None:
    vault = Vault(store)
    parked = vault.keep(base(), "k")
    store.close()
    del parked
    vault.sweep()


def test_host_memory_that_is_the_device_has_nothing_to_release() -> None:
    with Store(StoreConfig([_host(MIB)])) as store:
        vault = Vault(store)
        parked = vault.keep(base(), "k")
        parked.release()
        parked.bring()
        assert torch.equal(parked.take(), base())
        assert vault.stats.released == 0


def test_threads_share_a_vault(vault: Vault) -> None:
    errors: list[BaseException] = []
    begin = threading.Barrier(4)
    shared = base()

    def work(number: int) -> None:
        try:
            begin.wait()
            for count in range(50):
                own = torch.full((1024,), float(number * 1000 + count))
                parked = [vault.keep(own, "k"), vault.keep(shared, "s"), vault.keep(own[:100], "k")]
                for each in parked:
                    each.release()
                    each.bring()
                assert torch.equal(parked[0].take(), own)
                assert torch.equal(parked[1].take(), base())
                assert torch.equal(parked[2].take(), own[:100])
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    vault.sweep()
    assert vault.stats.parked == 0
    assert len(vault.store) == 0
