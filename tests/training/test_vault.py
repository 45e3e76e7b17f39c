"""The vault: what is kept comes back as it was, once, and leaves nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.training.vaults import KINDS, base, host, late_store
from tierstore import Transfer
from tierstore.config import StoreConfig
from tierstore.errors import LeaseError
from tierstore.store import Store
from tierstore.training.activations.estate import Estate
from tierstore.training.activations.vault import Vault
from tierstore.units import MIB


@pytest.fixture
def store() -> Iterator[Store]:
    with late_store() as opened:
        yield opened
        opened.check()


@pytest.fixture
def vault(store: Store) -> Vault:
    return Vault(store)


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


def test_a_key_that_is_taken_gets_a_mark_and_then_a_number(vault: Vault) -> None:
    parked = [vault.keep(base(), "k") for _ in range(4)]
    assert [each.key for each in parked] == ["k", "k'", "k'2", "k'3"]
    parked.pop(2)
    vault.sweep()
    assert vault.keep(base(), "k").key == "k'2"


def test_a_key_of_somebody_else_is_taken_and_stays(vault: Vault) -> None:
    vault.store.put("k", torch.zeros(5))
    parked = vault.keep(base(), "k")
    assert parked.key == "k'"
    del parked
    vault.sweep()
    assert vault.store.keys() == ("k",)


def test_a_key_that_somebody_puts_meanwhile_is_his(vault: Vault) -> None:
    adopt = vault.store.adopt

    def adopt_later(key: str, tensor: Tensor) -> None:
        if key == "k":
            vault.store.put("k", torch.zeros(5))
        adopt(key, tensor)

    with mock.patch.object(vault.store, "adopt", adopt_later):
        parked = vault.keep(base(), "k")
    assert parked.key == "k'"
    assert torch.equal(parked.take(), base())
    del parked
    vault.sweep()
    assert torch.equal(vault.store.get("k"), torch.zeros(5))
    assert vault.stats.parked == 0


def test_many_of_one_name_have_short_keys(vault: Vault) -> None:
    parked = [vault.keep(torch.ones(3) * number, "k") for number in range(300)]
    assert max(len(each.key) for each in parked) == len("k'299")
    assert all(torch.equal(each.take(), torch.ones(3) * number) for number, each in enumerate(parked))


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
    assert (vault._known, vault._restless, vault._estates) == ({}, {}, {})


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


def test_a_view_of_handed_over_bytes_is_a_use_whoever_else_referred_to_them(vault: Vault) -> None:
    x = base()
    others = [x, x.view(64, 64), x.untyped_storage()]
    parked = vault.keep(x, "k")
    view = parked.take()[5:]
    del x
    others.clear()
    vault.sweep()
    with pytest.raises(LeaseError):
        vault.store.evict("k", to="host")
    assert vault.store.stats().tiers["device"].charged_bytes == 16384
    del view
    vault.sweep()
    vault.store.evict("k", to="host").result()
    assert not parked.is_here


def test_what_the_program_refers_to_beside_is_no_use(vault: Vault) -> None:
    x = base()
    parked = vault.keep(x, "k")
    parked.take()
    more = [x[number:] for number in range(5)]
    vault.sweep()
    vault.store.evict("k", to="host").result()
    assert all(torch.equal(part, base()[number:]) for number, part in enumerate(more))


def test_bytes_are_held_when_their_use_is_told(store: Store) -> None:
    told: list[tuple[str, int]] = []

    def note(key: str, nbytes: int) -> None:
        told.append((key, nbytes))
        assert store.where(key)[0] == "device"
        if len(told) > 1:
            with pytest.raises(LeaseError):
                store.evict(key, to="host")

    vault = Vault(store, note_use=note)
    parked = vault.keep(base(), "k")
    parked.release()
    parked.take()
    assert told == [("k", 16384)] * 2


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
    user = first._user
    del first
    vault.sweep()
    second = vault.keep(torch.ones(4096), "k")
    vault.note_end(user)
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
    assert not vault._restless


def test_bytes_stay_for_the_one_that_did_not_take_them(vault: Vault) -> None:
    x = base()
    one, other = vault.keep(x, "k"), vault.keep(x, "k")
    del x
    for _ in range(3):
        one.take()
        vault.sweep()
    assert other.is_here
    del other
    vault.sweep()  # those that are left have taken them
    vault.store.evict("k", to="host").result()
    assert vault.stats.released == 1
    assert torch.equal(one.take(), base())


def test_a_graph_that_is_retained_brings_its_bytes_once_in_each_backward(vault: Vault) -> None:
    x = base()
    uses = [vault.keep(x, "k") for _ in range(3)]
    del x
    for _ in range(4):
        uses[0].release()
        for use in uses:
            assert torch.equal(use.take(), base())
            vault.sweep()
    stats = vault.stats
    assert stats.brought == 4


def test_bytes_that_are_dropped_while_they_are_found_are_kept_anew(vault: Vault) -> None:
    x = base()
    parked = [vault.keep(x, "k")]
    look_up = vault._look_up

    def look_up_slowly(storage: torch.UntypedStorage, extent: tuple[int, int]) -> Estate | None:
        found = look_up(storage, extent)
        parked.clear()
        vault.sweep()
        return found

    with mock.patch.object(vault, "_look_up", look_up_slowly):
        second = vault.keep(x, "k")
    assert vault.stats.kept == 2
    assert torch.equal(second.take(), x)


def test_a_lease_for_which_room_was_made_by_a_sweep_is_ended_as_others_are(store: Store) -> None:
    def make_room(_: int) -> bool:
        vault.sweep()
        lease.release()
        store.drop("parameters")
        return True

    vault = Vault(store, make_room=make_room)
    parked = vault.keep(base(), "k")
    parked.release()
    store.put("parameters", torch.zeros(MIB, dtype=torch.uint8), tier="device")
    lease = store.lease("parameters")
    assert torch.equal(parked.take(), base())
    vault.sweep()
    store.evict("k", to="host").result()  # which a lease would forbid


class Held:
    """A transfer whose callback is called when the test says so."""

    def __init__(self, transfer: Transfer[None]) -> None:
        self.transfer = transfer
        self.result, self.done = transfer.result, transfer.done
        self.callbacks: list[Callable[[], object]] = []

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Keep it."""
        self.callbacks.append(callback)


def test_a_departure_that_is_told_late_or_twice_is_counted_once(vault: Vault) -> None:
    parked = vault.keep(base(), "k")
    evict, held = vault.store.evict, list[Held]()

    def evict_and_tell_later(*keys: str, to: str) -> Held:
        held.append(Held(evict(*keys, to=to)))
        return held[-1]

    with mock.patch.object(vault.store, "evict", evict_and_tell_later):
        parked.weakly().leave()
    held[0].result()
    parked.take()
    for _ in range(2):
        held[0].callbacks[0]()
    assert (vault.stats.released, vault.stats.brought) == (1, 1)


def test_a_departure_is_counted_once_however_it_came(vault: Vault) -> None:
    parked = vault.keep(base(), "k")
    vault.store.evict("k", to="host").result()
    parked.release()
    assert vault.stats.released == 1
    parked.weakly().leave()
    parked.bring()
    parked.take()
    stats = vault.stats
    assert (stats.released, stats.brought, stats.handed_over) == (1, 1, 0)


def test_a_release_of_what_is_in_use_does_nothing(vault: Vault) -> None:
    parked = vault.keep(base(), "k")
    lent = parked.take()
    parked.release()
    assert parked.is_here
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


def test_bytes_that_a_quota_has_sent_down_are_brought(vault: Vault) -> None:
    first, second = vault.keep(base(), "k"), vault.keep(base(), "l")
    vault.store.evict("k", "l", to="host").result()
    first.take()
    second.bring()
    vault.store.fetch("l").result()
    second.take()
    stats = vault.stats
    assert (stats.brought, stats.handed_over) == (2, 0)


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


def test_a_closed_store_is_no_trouble_for_what_ends_later(store: Store) -> None:
    vault = Vault(store)
    parked = vault.keep(base(), "k")
    store.close()
    del parked
    vault.sweep()


def test_host_memory_that_is_the_device_has_nothing_to_release() -> None:
    with Store(StoreConfig([host()])) as store:
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
