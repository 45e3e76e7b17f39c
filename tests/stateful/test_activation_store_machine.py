"""The activation store against lists that never run out of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from torch import Tensor

import tierstore as ts
from tests.training.activation_stores import emulated, host
from tests.training.twins import LATE_AND_OVERWRITTEN
from tierstore.training.activations.swapping.activation_store import ActivationStore, OffloadedTensor
from tierstore.units import KIB, align_up

_DEVICE, _HOST, _DISK = 16 * KIB, 12 * KIB, 1024 * KIB
_ALIGNMENT = 512
COUNTS = st.sampled_from([8, 64, 400, 1000, 2000])
NAMES = st.sampled_from(["k", "l"])
TARGETS = st.sampled_from([None, "host", "disk"])


@dataclass(eq=False)
class Storage:
    """Memory of the program's."""

    tensor: Tensor
    changes: int = 0


@dataclass(eq=False)
class Kept:
    """Something that the activation store keeps, and what it should be."""

    offloaded: OffloadedTensor
    expected: Tensor
    storage: Storage
    changes: int


@dataclass(eq=False)
class Lent:
    """What the activation store gave back, and what it should stay."""

    view: Tensor
    kept: Kept
    key: str
    nbytes: int


View = Callable[[Tensor], Tensor]
VIEWS: list[View] = [
    lambda x: x,
    lambda x: x.view(-1, 4).t(),
    lambda x: x[x.numel() // 3 :],
    lambda x: x[:7],
    lambda x: x[5:9],
    lambda x: x[1:2].expand(40),
    lambda x: x.view(-1, 4)[:, 1],
]


class ActivationStoreMachine(RuleBasedStateMachine):
    """Keeps, takes, sends down and forgets, in any order; others use the store beside."""

    storages: Bundle[Storage] = Bundle("storages")
    kept: Bundle[Kept] = Bundle("kept")

    def __init__(self) -> None:
        super().__init__()
        disk = ts.TierConfig("disk", "memory", _DISK)
        tiers = [emulated(_DEVICE, **LATE_AND_OVERWRITTEN), host(_HOST), disk]
        self.store = ts.Store(ts.StoreConfig(tiers))
        self.activation_store = ActivationStore(self.store)
        self.count = 0
        self.all_kept: dict[Kept, None] = {}
        self.lent: dict[Lent, None] = {}
        self.others: dict[str, Tensor] = {}
        self.leases: dict[str, ts.Lease] = {}
        self.most_kept = 0

    def _new(self, count: int) -> Tensor:
        self.count += 1
        return torch.arange(float(count)) + 10_000 * self.count

    # --- the program's tensors ----------------------------------------------------------------

    @rule(target=storages, count=COUNTS)
    def make(self, count: int) -> Storage:
        return Storage(self._new(count))

    @rule(storage=storages)
    def change(self, storage: Storage) -> None:
        """Where nobody uses what was kept of it, as PyTorch would not be asked whether it may be."""
        if not any(lent.kept.storage is storage for lent in self.lent):
            storage.tensor.add_(1)
            storage.changes += 1

    @rule(storage=consumes(storages))
    def forget_storage(self, storage: Storage) -> None:
        del storage.tensor  # what was kept of it stays as it is

    # --- the activation store ----------------------------------------------------------------------------

    @rule(target=kept, storage=storages, view=st.sampled_from(VIEWS), name=NAMES, tier=TARGETS)
    def keep_some_of(self, storage: Storage, view: View, name: str, tier: str | None) -> Kept:
        return self.keep(storage, view, name, tier)

    def keep(self, storage: Storage, view: View, name: str, tier: str | None) -> Kept:
        tensor = view(storage.tensor)
        offloaded = self.activation_store.keep(tensor, name, tier)
        found = Kept(offloaded, tensor.clone(), storage, storage.changes)
        self.all_kept[found] = None
        return found

    @rule(target=kept, count=COUNTS, view=st.sampled_from(VIEWS), name=NAMES, tier=TARGETS)
    def keep_what_nobody_else_has(self, count: int, view: View, name: str, tier: str | None) -> Kept:
        storage = Storage(self._new(count))
        found = self.keep(storage, view, name, tier)
        del storage.tensor
        return found

    @rule(each=kept)
    def take(self, each: Kept) -> None:
        if each not in self.all_kept:
            return
        if each.changes != each.storage.changes:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                each.offloaded.take()
            return
        try:
            view = each.offloaded.take()
        except ts.CapacityError:
            needed = align_up(each.offloaded.nbytes, _ALIGNMENT)
            assert self._held_bytes(each.offloaded.key) + needed > _DEVICE
            return
        self.lent[Lent(view, each, each.offloaded.key, each.offloaded.nbytes)] = None

    def _held_bytes(self, without: str = "") -> int:
        held = {lent.key: lent.nbytes for lent in self.lent} | {
            key: self.others[key].nbytes for key in self.leases
        }
        held.pop(without, None)
        return sum(align_up(nbytes, _ALIGNMENT) for nbytes in held.values())

    @rule(each=kept, is_weak=st.booleans())
    def release(self, each: Kept, is_weak: bool) -> None:
        if each in self.all_kept:
            (each.offloaded.weakly() if is_weak else each.offloaded).release()
            is_used = any(lent.key == each.offloaded.key for lent in self.lent)
            assert each.offloaded.is_here == is_used

    @rule(each=kept)
    def leave(self, each: Kept) -> None:
        if each in self.all_kept:
            each.offloaded.weakly().leave()

    @rule(each=kept)
    def bring(self, each: Kept) -> None:
        if each in self.all_kept:
            each.offloaded.bring()

    @rule()
    def sweep(self) -> None:
        self.activation_store.sweep()

    @rule(each=consumes(kept))
    def forget(self, each: Kept) -> None:
        weakly = each.offloaded.weakly()
        self.all_kept.pop(each, None)
        del each.offloaded
        weakly.bring()
        weakly.leave()

    @precondition(lambda self: self.lent)
    @rule(number=st.integers(0, 20))
    def give_back(self, number: int) -> None:
        del self.lent[list(self.lent)[number % len(self.lent)]]

    # --- others who use the store -------------------------------------------------------------

    @rule(name=NAMES, count=st.sampled_from([10, 1500]))
    def put(self, name: str, count: int) -> None:
        tensor = self._new(count)
        with contextlib.suppress(ts.KeyExists, ts.CapacityError):
            self.store.put(name, tensor)
            self.others[name] = tensor

    @rule(key=NAMES)
    def lease(self, key: str) -> None:
        if key in self.others and key not in self.leases:
            with contextlib.suppress(ts.CapacityError):
                self.leases[key] = self.store.lease(key)

    @rule(key=NAMES)
    def drop(self, key: str) -> None:
        if key in self.leases:
            self.leases.pop(key).release()
        if self.others.pop(key, None) is not None:
            self.store.drop(key)

    # --- what always holds --------------------------------------------------------------------

    @invariant()
    def what_was_lent_is_right(self) -> None:
        for lent in self.lent:
            assert torch.equal(lent.view, lent.kept.expected)
        for key, lease in self.leases.items():
            assert torch.equal(lease.tensor, self.others[key])

    @invariant()
    def the_device_holds_no_more_than_it_may(self) -> None:
        tiers = self.store.stats().tiers
        assert self._held_bytes() <= tiers["device"].charged_bytes <= _DEVICE
        assert tiers["host"].charged_bytes <= _HOST

    @invariant()
    def keys_are_those_of_what_is_referred_to(self) -> None:
        kept = {each.offloaded.key: each.offloaded.nbytes for each in self.all_kept}
        kept |= {lent.key: lent.nbytes for lent in self.lent}
        stats = self.activation_store.stats
        assert set(self.store) == kept.keys() | self.others.keys()
        assert (stats.offloaded, stats.offloaded_bytes) == (len(kept), sum(kept.values()))
        assert stats.kept >= max(stats.offloaded, self.most_kept)
        assert stats.brought <= stats.released
        assert stats.refused == 0
        self.most_kept = stats.kept

    @invariant()
    def bytes_are_said_to_be_here_only_if_they_are(self) -> None:
        for each in self.all_kept:
            is_here = each.offloaded.is_here
            if any(lent.key == each.offloaded.key for lent in self.lent):
                assert is_here

    @invariant()
    def the_books_are_right(self) -> None:
        self.store.check()

    def teardown(self) -> None:
        for each in self.all_kept:
            del each.offloaded
        self.lent.clear()
        for lease in self.leases.values():
            lease.release()
        self.activation_store.sweep()
        stats = self.activation_store.stats
        assert set(self.store) == self.others.keys()
        assert stats.offloaded == 0
        self.store.check()
        self.store.close()


TestActivationStore = ActivationStoreMachine.TestCase
