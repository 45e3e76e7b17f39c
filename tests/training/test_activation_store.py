"""The activation store: what is kept comes back as it was, once, and leaves nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.training.activation_stores import KINDS, base, host, late_store
from tierstore import Transfer
from tierstore.config import StoreConfig
from tierstore.errors import LeaseError
from tierstore.store import Store
from tierstore.training.activations.swapping.activation_store import ActivationStore
from tierstore.training.activations.swapping.offloaded_storage import OffloadedStorage
from tierstore.training.activations.swapping.run_store import NoHost
from tierstore.training.bundles.reclaiming import NothingToReclaim
from tierstore.units import MIB


@pytest.fixture
def store() -> Iterator[Store]:
    with late_store() as opened:
        yield opened
        opened.check()


@pytest.fixture
def activation_store(store: Store) -> ActivationStore:
    return ActivationStore(store)


@pytest.mark.parametrize("is_released", [False, True], ids=["here", "released"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_comes_back_as_it_was(
    activation_store: ActivationStore, kind: str, is_released: bool
) -> None:
    tensor = KINDS[kind]()
    expected, shape, stride = tensor.clone(), tensor.shape, tensor.stride()
    is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
    offloaded = activation_store.keep(tensor, "k")
    del tensor
    if is_released:
        offloaded.release()
        assert "device" not in activation_store.store.where(offloaded.key)
    found = offloaded.take()
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
def test_a_storage_is_kept_whole_or_what_a_small_view_touches(
    activation_store: ActivationStore, kind: str, nbytes: int
) -> None:
    assert activation_store.keep(KINDS[kind](), "k").nbytes == nbytes


def test_one_storage_is_kept_once(activation_store: ActivationStore) -> None:
    x = base()
    one, other, third = (
        activation_store.keep(x, "k"),
        activation_store.keep(x.view(64, 64).t(), "k"),
        activation_store.keep(x[5:9], "k"),
    )
    assert one.key == other.key == third.key == "k"
    assert activation_store.stats.kept == 1
    assert torch.equal(third.take(), base()[5:9])


def test_a_new_storage_at_an_old_address_is_another(activation_store: ActivationStore) -> None:
    x = base()
    address = x.data_ptr()
    one = activation_store.keep(x, "k")
    one.release()
    del x
    found = []
    for number in range(100):
        y = torch.full((4096,), float(number))
        offloaded = activation_store.keep(y, "k")
        assert torch.equal(offloaded.take(), y)
        found.append(y.data_ptr() == address)
        del y, offloaded
    assert torch.equal(one.take(), base())


def test_a_key_that_is_taken_gets_a_mark_and_then_a_number(activation_store: ActivationStore) -> None:
    offloaded = [activation_store.keep(base(), "k") for _ in range(4)]
    assert [each.key for each in offloaded] == ["k", "k'", "k'2", "k'3"]
    offloaded.pop(2)
    activation_store.sweep()
    assert activation_store.keep(base(), "k").key == "k'2"


def test_a_key_of_somebody_else_is_taken_and_stays(activation_store: ActivationStore) -> None:
    activation_store.store.put("k", torch.zeros(5))
    offloaded = activation_store.keep(base(), "k")
    assert offloaded.key == "k'"
    del offloaded
    activation_store.sweep()
    assert activation_store.store.keys() == ("k",)


def test_a_key_that_somebody_puts_meanwhile_is_his(activation_store: ActivationStore) -> None:
    adopt = activation_store.store.adopt

    def adopt_later(key: str, tensor: Tensor) -> None:
        if key == "k":
            activation_store.store.put("k", torch.zeros(5))
        adopt(key, tensor)

    with mock.patch.object(activation_store.store, "adopt", adopt_later):
        offloaded = activation_store.keep(base(), "k")
    assert offloaded.key == "k'"
    assert torch.equal(offloaded.take(), base())
    del offloaded
    activation_store.sweep()
    assert torch.equal(activation_store.store.get("k"), torch.zeros(5))
    assert activation_store.stats.offloaded == 0


def test_many_of_one_name_have_short_keys(activation_store: ActivationStore) -> None:
    offloaded = [activation_store.keep(torch.ones(3) * number, "k") for number in range(300)]
    assert max(len(each.key) for each in offloaded) == len("k'299")
    assert all(torch.equal(each.take(), torch.ones(3) * number) for number, each in enumerate(offloaded))


def test_storages_that_have_died_leave_no_trace(activation_store: ActivationStore) -> None:
    x = base()
    offloaded = [
        activation_store.keep(x, "k"),
        activation_store.keep(base()[:9], "k"),
        activation_store.keep(torch.ones(5), "k"),
    ]
    assert activation_store._known
    del x
    for each in offloaded:
        each.release()
    del each
    offloaded.clear()
    activation_store.sweep()
    assert (activation_store._known, activation_store._restless, activation_store._offloaded_storages) == (
        {},
        {},
        {},
    )


def test_bytes_are_dropped_when_the_last_reference_goes(activation_store: ActivationStore) -> None:
    x = base()
    one, other = activation_store.keep(x, "k"), activation_store.keep(x, "k")
    del one
    activation_store.sweep()
    assert "k" in activation_store.store
    del other
    activation_store.sweep()
    assert "k" not in activation_store.store
    assert (activation_store.stats.offloaded, activation_store.stats.offloaded_bytes) == (0, 0)


def test_bytes_stay_while_something_refers_to_them(activation_store: ActivationStore) -> None:
    offloaded = activation_store.keep(base(), "k")
    offloaded.release()
    view = offloaded.take()[10:20]
    del offloaded
    activation_store.sweep()
    assert activation_store.store.where("k") == ("device", "host")
    assert torch.equal(view, base()[10:20])
    del view
    activation_store.sweep()
    assert "k" not in activation_store.store


def test_a_view_of_handed_over_bytes_is_a_use_whoever_else_referred_to_them(
    activation_store: ActivationStore,
) -> None:
    x = base()
    others = [x, x.view(64, 64), x.untyped_storage()]
    offloaded = activation_store.keep(x, "k")
    view = offloaded.take()[5:]
    del x
    others.clear()
    activation_store.sweep()
    with pytest.raises(LeaseError):
        activation_store.store.evict("k", to="host")
    assert activation_store.store.stats().tiers["device"].charged_bytes == 16384
    del view
    activation_store.sweep()
    activation_store.store.evict("k", to="host").result()
    assert not offloaded.is_here


def test_what_the_program_refers_to_beside_is_no_use(activation_store: ActivationStore) -> None:
    x = base()
    offloaded = activation_store.keep(x, "k")
    offloaded.take()
    more = [x[number:] for number in range(5)]
    activation_store.sweep()
    activation_store.store.evict("k", to="host").result()
    assert all(torch.equal(part, base()[number:]) for number, part in enumerate(more))


def test_bytes_are_held_when_their_use_is_told(store: Store) -> None:
    told: list[tuple[str, int]] = []

    class Listening(NoHost):
        def note_activation(self, key: str, nbytes: int) -> None:
            told.append((key, nbytes))
            assert store.where(key)[0] == "device"
            if len(told) > 1:
                with pytest.raises(LeaseError):
                    store.evict(key, to="host")

    activation_store = ActivationStore(store, Listening())
    offloaded = activation_store.keep(base(), "k")
    offloaded.release()
    offloaded.take()
    assert told == [("k", 16384)] * 2


def test_a_late_end_drops_no_other_bytes_of_the_same_name(activation_store: ActivationStore) -> None:
    first = activation_store.keep(base(), "k")
    lent = first.take()
    del first
    activation_store.sweep()
    second = activation_store.keep(torch.ones(4096), "k")
    del lent
    activation_store.sweep()
    assert second.key == "k'"
    assert torch.equal(second.take(), torch.ones(4096))
    third = activation_store.keep(torch.zeros(4096), "k")
    gc.collect()
    activation_store.sweep()
    assert torch.equal(third.take(), torch.zeros(4096))


def test_an_end_that_is_noticed_twice_drops_no_other_bytes(activation_store: ActivationStore) -> None:
    first = activation_store.keep(base(), "k")
    user = first._user
    del first
    activation_store.sweep()
    second = activation_store.keep(torch.ones(4096), "k")
    activation_store.note_end(user)
    activation_store.sweep()
    assert second.key == "k"
    assert torch.equal(second.take(), torch.ones(4096))


def test_what_every_use_has_taken_goes_down_again(activation_store: ActivationStore) -> None:
    x = base()
    uses = [activation_store.keep(x, "k") for _ in range(3)]
    del x
    uses[0].release()
    for number, use in enumerate(uses):
        use.take()
        activation_store.sweep()
        if number < 2:
            assert "device" in activation_store.store.where("k")
    activation_store.store.evict("k", to="host").result()  # waits for what is under way
    assert activation_store.stats.released == 2
    assert not activation_store._restless


def test_bytes_stay_for_the_one_that_did_not_take_them(activation_store: ActivationStore) -> None:
    x = base()
    one, other = activation_store.keep(x, "k"), activation_store.keep(x, "k")
    del x
    for _ in range(3):
        one.take()
        activation_store.sweep()
    assert other.is_here
    del other
    activation_store.sweep()  # those that are left have taken them
    activation_store.store.evict("k", to="host").result()
    assert activation_store.stats.released == 1
    assert torch.equal(one.take(), base())


def test_a_graph_that_is_retained_brings_its_bytes_once_in_each_backward(
    activation_store: ActivationStore,
) -> None:
    x = base()
    uses = [activation_store.keep(x, "k") for _ in range(3)]
    del x
    for _ in range(4):
        uses[0].release()
        for use in uses:
            assert torch.equal(use.take(), base())
            activation_store.sweep()
    stats = activation_store.stats
    assert stats.brought == 4


def test_bytes_that_are_dropped_while_they_are_found_are_kept_anew(activation_store: ActivationStore) -> None:
    x = base()
    offloaded = [activation_store.keep(x, "k")]
    look_up = activation_store._look_up

    def look_up_slowly(storage: torch.UntypedStorage, extent: tuple[int, int]) -> OffloadedStorage | None:
        found = look_up(storage, extent)
        offloaded.clear()
        activation_store.sweep()
        return found

    with mock.patch.object(activation_store, "_look_up", look_up_slowly):
        second = activation_store.keep(x, "k")
    assert activation_store.stats.kept == 2
    assert torch.equal(second.take(), x)


def test_a_lease_for_which_room_was_made_by_a_sweep_is_ended_as_others_are(store: Store) -> None:
    class Sweeping(NothingToReclaim):
        def make_room(self, needed_bytes: int, asking: object) -> bool:
            activation_store.sweep()
            lease.release()
            store.drop("parameters")
            return True

    class Host(NoHost):
        @property
        def reclaimer(self) -> Sweeping:
            return Sweeping()

    activation_store = ActivationStore(store, Host())
    offloaded = activation_store.keep(base(), "k")
    offloaded.release()
    store.put("parameters", torch.zeros(MIB, dtype=torch.uint8), tier="device")
    lease = store.lease("parameters")
    assert torch.equal(offloaded.take(), base())
    activation_store.sweep()
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


def test_a_departure_that_is_told_late_or_twice_is_counted_once(activation_store: ActivationStore) -> None:
    offloaded = activation_store.keep(base(), "k")
    evict, held = activation_store.store.evict, list[Held]()

    def evict_and_tell_later(*keys: str, to: str) -> Held:
        held.append(Held(evict(*keys, to=to)))
        return held[-1]

    with mock.patch.object(activation_store.store, "evict", evict_and_tell_later):
        offloaded.weakly().leave()
    held[0].result()
    offloaded.take()
    for _ in range(2):
        held[0].callbacks[0]()
    assert (activation_store.stats.released, activation_store.stats.brought) == (1, 1)


def test_a_departure_is_counted_once_however_it_came(activation_store: ActivationStore) -> None:
    offloaded = activation_store.keep(base(), "k")
    activation_store.store.evict("k", to="host").result()
    offloaded.release()
    assert activation_store.stats.released == 1
    offloaded.weakly().leave()
    offloaded.bring()
    offloaded.take()
    stats = activation_store.stats
    assert (stats.released, stats.brought, stats.handed_over) == (1, 1, 0)


def test_a_release_of_what_is_in_use_does_nothing(activation_store: ActivationStore) -> None:
    offloaded = activation_store.keep(base(), "k")
    lent = offloaded.take()
    offloaded.release()
    assert offloaded.is_here
    assert torch.equal(lent, base())


def test_bring_begins_and_take_does_not_wait(activation_store: ActivationStore) -> None:
    offloaded = activation_store.keep(base(), "k")
    offloaded.release()
    offloaded.bring()
    activation_store.store.fetch("k").result()
    stalls = activation_store.stats.stalls
    lent = offloaded.take()
    stats = activation_store.stats
    assert (stats.stalls, stats.brought, stats.handed_over) == (stalls, 1, 0)
    assert torch.equal(lent, base())


def test_bytes_that_a_quota_has_sent_down_are_brought(activation_store: ActivationStore) -> None:
    first, second = activation_store.keep(base(), "k"), activation_store.keep(base(), "l")
    activation_store.store.evict("k", "l", to="host").result()
    first.take()
    second.bring()
    activation_store.store.fetch("l").result()
    second.take()
    stats = activation_store.stats
    assert (stats.brought, stats.handed_over) == (2, 0)


def test_what_is_still_here_is_handed_over(activation_store: ActivationStore) -> None:
    offloaded = activation_store.keep(base(), "k")
    offloaded.bring()
    offloaded.take()
    stats = activation_store.stats
    assert (stats.brought, stats.handed_over, stats.handed_over_bytes) == (0, 1, 16384)
    assert activation_store.store.stats().traffic.get(("host", "device")) is None


def test_a_change_is_told_though_nobody_has_the_tensor_any_more(activation_store: ActivationStore) -> None:
    x = base()
    offloaded = activation_store.keep(x.view(64, 64), "k")
    offloaded.release()
    x.add_(1)
    del x
    with pytest.raises(
        RuntimeError, match=r"\[torch.float32 \[64, 64\]\] is at version 1; expected version 0"
    ):
        offloaded.take()


def test_a_changed_storage_is_kept_anew(activation_store: ActivationStore) -> None:
    x = base()
    first = activation_store.keep(x, "k")
    x.mul_(2)
    second = activation_store.keep(x, "k")
    assert second.key == "k'"
    assert activation_store.store.where("k") == ("host",)
    assert torch.equal(second.take(), base() * 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.take()


def test_a_weak_reference_keeps_nothing(activation_store: ActivationStore) -> None:
    offloaded = activation_store.keep(base(), "k")
    weakly = offloaded.weakly()
    before = weakly.is_here
    weakly.release()
    after = weakly.is_here
    assert (before, after) == (True, False)
    del offloaded
    activation_store.sweep()
    weakly.release()
    weakly.bring()
    assert not weakly.is_here
    assert "k" not in activation_store.store


def test_a_closed_store_is_no_trouble_for_what_ends_later(store: Store) -> None:
    activation_store = ActivationStore(store)
    offloaded = activation_store.keep(base(), "k")
    store.close()
    del offloaded
    activation_store.sweep()


def test_host_memory_that_is_the_device_has_nothing_to_release() -> None:
    with Store(StoreConfig([host()])) as store:
        activation_store = ActivationStore(store)
        offloaded = activation_store.keep(base(), "k")
        offloaded.release()
        offloaded.bring()
        assert torch.equal(offloaded.take(), base())
        assert activation_store.stats.released == 0


def test_threads_share_a_activation_store(activation_store: ActivationStore) -> None:
    errors: list[BaseException] = []
    begin = threading.Barrier(4)
    shared = base()

    def work(number: int) -> None:
        try:
            begin.wait()
            for count in range(50):
                own = torch.full((1024,), float(number * 1000 + count))
                offloaded = [
                    activation_store.keep(own, "k"),
                    activation_store.keep(shared, "s"),
                    activation_store.keep(own[:100], "k"),
                ]
                for each in offloaded:
                    each.release()
                    each.bring()
                assert torch.equal(offloaded[0].take(), own)
                assert torch.equal(offloaded[1].take(), base())
                assert torch.equal(offloaded[2].take(), own[:100])
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    activation_store.sweep()
    assert activation_store.stats.offloaded == 0
    assert len(activation_store.store) == 0
