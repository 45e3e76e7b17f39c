"""Crates against a dict: leases in any order, evictions to a tiny quota, flushes, crashes and openings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import tierstore as ts
from tests.crate_stores import CRATE_BYTES, CrateDisk, check_index, check_waste
from tierstore.crates import CrateLease, Crates

KEYS = st.sampled_from([f"k{number}" for number in range(8)])
SETS = st.lists(KEYS, min_size=1, max_size=5, unique=True)
COUNTS = st.sampled_from([0, 1, 30, 100, 240])
DTYPES = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.uint8])
TIERS = st.sampled_from(["host", "disk"])


@dataclass(eq=False)
class HeldLease:
    """A lease, and what its tensors should be."""

    lease: CrateLease
    expected: dict[str, torch.Tensor]
    is_write: bool
    keys: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = set(self.expected)


class CratesMachine(RuleBasedStateMachine):
    """Puts, reads, writes, drops, moves, flushes, crashes and reopens; others use the store beside."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = CrateDisk(host_bytes=3 * CRATE_BYTES, disk_bytes=24 * CRATE_BYTES)
        self.there: dict[str, torch.Tensor] = {}
        self.durable: dict[str, torch.Tensor] = {}
        self.held: list[HeldLease] = []
        self.count = 0
        self.was_full = False
        self.open()

    def open(self) -> None:
        self.store = self.disk.open()
        self.crates = Crates(self.store, crate_bytes=CRATE_BYTES)

    def new(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self.count += 1
        return ((torch.arange(count) + self.count) % 7).to(dtype)

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """Let there be no room: whatever is done then has changed nothing."""
        try:
            yield
        except ts.CapacityError:
            self.was_full = True

    def held_by(self, key: str, *, write: bool = False) -> list[HeldLease]:
        return [
            each
            for each in self.held
            if key in each.keys and each.expected[key] is self.there.get(key) and each.is_write >= write
        ]

    # --- bytes --------------------------------------------------------------------------------

    @rule(keys=SETS, count=COUNTS, dtype=DTYPES, tier=st.none() | TIERS, replace=st.booleans())
    def put(self, keys: list[str], count: int, dtype: torch.dtype, tier: str | None, replace: bool) -> None:
        if count * dtype.itemsize > CRATE_BYTES:
            with pytest.raises(ts.UsageError, match="put it in the store itself"):
                self.crates.put(keys[0], self.new(count, dtype))
            return
        tensors = {key: self.new(count, dtype) for key in keys}
        if not replace and any(key in self.there for key in keys):
            with pytest.raises(ts.KeyExists):
                self.crates.put_all(tensors, tier=tier)
            return
        if any(self.held_by(key, write=True) for key in keys):
            with pytest.raises(ts.LeaseError):
                self.crates.put_all(tensors, tier=tier, replace=replace)
            return
        with self.room():
            self.crates.put_all(tensors, tier=tier, replace=replace)
            self.there |= tensors

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        if key not in self.there:
            with pytest.raises(ts.KeyNotFound):
                self.crates.get(key)
        elif self.held_by(key, write=True):
            with pytest.raises(ts.LeaseError):
                self.crates.get(key)
        else:
            assert torch.equal(self.crates.get(key), self.there[key])

    @rule(keys=SETS)
    def drop(self, keys: list[str]) -> None:
        if any(key not in self.there for key in keys):
            with pytest.raises(ts.KeyNotFound):
                self.crates.drop(*keys)
        elif any(self.held_by(key) for key in keys):
            with pytest.raises(ts.LeaseError):
                self.crates.drop(*keys)
        else:
            with self.room():
                self.crates.drop(*keys)
                for key in keys:
                    del self.there[key]

    # --- leases -------------------------------------------------------------------------------

    @rule(keys=SETS, write=st.booleans())
    def lease(self, keys: list[str], write: bool) -> None:
        if any(key not in self.there for key in keys):
            with pytest.raises(ts.KeyNotFound):
                self.crates.lease(*keys, tier="host", write=write)
        elif any(self.held_by(key, write=not write) for key in keys):
            with pytest.raises(ts.LeaseError):
                self.crates.lease(*keys, tier="host", write=write)
        else:
            with self.room():
                lease = self.crates.lease(*keys, tier="host", write=write)
                self.held.append(HeldLease(lease, {key: self.there[key] for key in keys}, write))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 20), is_written=st.booleans())
    def release(self, which: int, is_written: bool) -> None:
        held = self.held.pop(which % len(self.held))
        for key, expected in held.expected.items():
            assert torch.equal(held.lease[key], expected)
            if held.is_write and is_written:
                new = self.new(expected.numel(), expected.dtype)
                held.lease[key].copy_(new)
                self.there[key] = new
        held.lease.release(written=is_written)

    # --- moving -------------------------------------------------------------------------------

    @rule(keys=SETS, verb=st.sampled_from(["fetch", "prefetch", "evict"]))
    def move(self, keys: list[str], verb: str) -> None:
        ours = [key for key in keys if key in self.there]
        with self.room(), contextlib.suppress(*[ts.LeaseError] * bool(self.held)):
            if verb == "evict":
                self.crates.evict(*ours, to="disk").result(10)
            else:
                getattr(self.crates, verb)(*ours, tier="host").result(10)

    @rule(nbytes=st.sampled_from([CRATE_BYTES, 2 * CRATE_BYTES, 3 * CRATE_BYTES]))
    def resize(self, nbytes: int) -> None:
        with self.room():
            self.store.resize("host", nbytes)

    # --- what survives ------------------------------------------------------------------------

    @rule(is_own=st.booleans())
    def flush(self, is_own: bool) -> None:
        with self.room(), contextlib.suppress(*[ts.LeaseError] * any(each.is_write for each in self.held)):
            (self.crates if is_own else self.store).flush()
            self.durable = dict(self.there)

    @rule()
    def flush_another_key(self) -> None:
        """Which speaks of keys that are gone, too."""
        with self.room():
            self.store.put("other", self.new(3, torch.uint8), replace=True)
            self.store.flush("other")

    @rule()
    def crash(self) -> None:
        self.held.clear()
        self.store.close(flush=False)
        self.there = dict(self.durable)
        self.open()

    @precondition(lambda self: not self.held)
    @rule()
    def close(self) -> None:
        try:
            self.store.close()
        except ts.CapacityError:
            self.there = dict(self.durable)
        self.durable = dict(self.there)
        self.open()

    @rule()
    def open_them_anew(self) -> None:
        """Over the same store."""
        if self.held:
            with pytest.raises(ts.LeaseError):
                self.crates.close()
        else:
            self.crates.close()
            self.crates = Crates(self.store, crate_bytes=CRATE_BYTES)

    # --- always -------------------------------------------------------------------------------

    @invariant()
    def the_keys_are_those_of_the_dict(self) -> None:
        assert set(self.crates) == set(self.there)
        assert len(self.crates) == len(self.there)
        for key, tensor in self.there.items():
            assert self.crates.spec(key).shape == tensor.shape
            assert self.crates.spec(key).dtype == tensor.dtype

    @invariant()
    def the_books_are_right(self) -> None:
        self.store.check()
        check_index(self.crates)
        if not self.held and not self.was_full:
            self.crates._stock.tidy()
            check_waste(self.crates)

    def teardown(self) -> None:
        for held in self.held:
            held.lease.release(written=False)
        for key, tensor in self.there.items():
            assert torch.equal(self.crates.get(key), tensor)
        self.store.close(flush=False)


TestCrates = CratesMachine.TestCase
