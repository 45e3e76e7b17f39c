"""Hypothesis strategies for tensors, and the store's state machine.

Shipped because whoever writes a backend wants both: `StoreMachine` holds a store against a dict that
never runs out of memory, over any backends that a subclass gives it.  Needs the package hypothesis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierstore.config import StoreConfig, TierConfig
from tierstore.engine.transfer import Transfer
from tierstore.errors import (
    BackendError,
    CapacityError,
    KeyNotFound,
    LeaseError,
    TierStoreError,
    UsageError,
)
from tierstore.leases import Lease
from tierstore.spi import Backend
from tierstore.store import Store
from tierstore.tensors import bytes_of
from tierstore.testing.faults import Faulty, Gate

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
"""Every kind of element whose bytes a store copies."""

LAYOUTS = ("contiguous", "transposed", "strided", "expanded")
KEYS = ("a", "b", "c", "d", "e")
TIERS = ("top", "middle", "bottom")
PATIENCE_S = 20.0


def shapes(max_dims: int = 3, max_side: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """Return shapes, with 0-d and empty ones among them."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


@st.composite
def tensors(draw: st.DrawFn, max_side: int = 6) -> torch.Tensor:
    """Return a tensor of any dtype, shape and layout, with any bytes."""
    shape = draw(shapes(max_side=max_side))
    dtype = draw(st.sampled_from(DTYPES))
    layout = draw(st.sampled_from(LAYOUTS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def fill(sides: tuple[int, ...]) -> torch.Tensor:
        size = torch.empty(sides, dtype=dtype).nbytes
        raw = torch.randint(
            0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator
        )
        return raw.view(dtype).view(sides)

    match layout:
        case "transposed" if len(shape) > 1:
            return fill(shape[::-1]).permute(*range(len(shape) - 1, -1, -1))
        case "strided" if shape:
            return fill((shape[0] * 2, *shape[1:]))[::2]
        case "expanded" if shape:
            return fill((1, *shape[1:])).expand(shape)
        case _:
            return fill(shape)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are alike in shape, dtype and every bit, NaN payloads included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_flat_bytes(one), _flat_bytes(other))


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


class HeldLease(NamedTuple):
    """A lease, the key that it was asked for, and the one that its bytes are under now."""

    asked: str
    key: str
    lease: Lease
    is_writing: bool


@dataclass
class HeldParts:
    """A key of the machine's reader.

    Attributes:
        asked: the name under which the reader has it.
        key: the one that its bytes are under now; None: they were replaced.
        value: its bytes, in the order in which they are stored.
    """

    asked: str
    key: str | None
    value: torch.Tensor


class PartRead(NamedTuple):
    """A read of parts, and what it has to come to."""

    transfer: Transfer[None]
    into: torch.Tensor
    expected: torch.Tensor


class StoreMachine(RuleBasedStateMachine):
    """The store against a dict that never runs out of memory.

    Copies of the two lower tiers stand still until a rule lets one through, in any order, and any
    operation may be told to fail.  After every step the books are checked, and every key that
    nobody is writing reads as the dict says.
    """

    eviction = "lru"

    def make(self, capacities: Sequence[int]) -> Sequence[Backend]:
        """Return fresh backends, fastest first, for tiers of these capacities."""
        raise TypeError(f"a subclass says which backends have these capacities: {capacities}")

    def outermost(self, backend: Backend) -> Backend:
        """Return what the store is given: ``backend``, with its faults and its gate, or one around it."""
        return backend

    @initialize(
        capacities=st.tuples(st.integers(200, 2000), st.integers(400, 3000), st.integers(4000, 9000)),
        high=st.sampled_from([1.0, 0.6]),
    )
    def begin(self, capacities: tuple[int, int, int], high: float) -> None:
        """Open the store."""
        backends = self.make(capacities)
        self.faulty = [Faulty(backend) for backend in backends]
        self.gates = [Gate(backend) for backend in self.faulty]
        for gate in self.gates:
            gate.open()
        tiers = [
            TierConfig(name, self.outermost(gate), capacity, high)
            for name, gate, capacity in zip(TIERS, self.gates, capacities, strict=True)
        ]
        self.store = Store(StoreConfig(tiers, eviction=self.eviction))
        self.model: dict[str, torch.Tensor] = {}
        self.leases: list[HeldLease] = []
        self.transfers: list[Transfer[None]] = []
        self.reader = self.store.reader()
        self.parts: dict[str, HeldParts] = {}
        self.reads: list[PartRead] = []

    def is_held(self, key: str) -> bool:
        """Whether a lease or the reader holds what is under a key now."""
        leased = [held.key for held in self.leases]
        return key in leased or any(held.key == key for held in self.parts.values())

    # --- rules that block: the hardware runs freely -----------------------------------------

    def open_gates(self) -> None:
        """Let the hardware run, so that a blocking call can end."""
        for gate in self.gates:
            gate.open()

    @rule(key=st.sampled_from(KEYS), tensor=tensors(), tier=st.none() | st.sampled_from(TIERS))
    def put(self, key: str, tensor: torch.Tensor, tier: str | None) -> None:
        """Put or replace; a refusal changes nothing."""
        self.open_gates()
        try:
            self.store.put(key, tensor, tier=tier, replace=key in self.model)
        except (CapacityError, BackendError, LeaseError):
            return
        self.model[key] = tensor.clone()
        self.lose(key)

    @rule(key=st.sampled_from(KEYS), tier=st.sampled_from(TIERS[:2]), write=st.booleans())
    def lease(self, key: str, tier: str, write: bool) -> None:
        """Lease; the bytes are the dict's."""
        self.open_gates()
        try:
            lease = self.store.lease(key, tier=tier, write=write)
        except KeyNotFound:
            assert key not in self.model
            return
        except LeaseError:
            assert self.is_held(key)
            return
        except (CapacityError, BackendError):
            return
        assert same_bytes(lease.tensor, self.model[key])
        self.leases.append(HeldLease(key, key, lease, write))

    @rule(index=st.integers(0, 9), changes=st.booleans())
    def release(self, index: int, changes: bool) -> None:
        """Release; a writer may have changed the bytes."""
        if not self.leases:
            return
        _, key, lease, is_writing = self.leases.pop(index % len(self.leases))
        if is_writing and changes:
            lease.tensor.zero_()
            self.model[key] = torch.zeros_like(self.model[key])
        lease.release(written=changes)

    @rule(index=st.integers(0, 9), name=st.sampled_from(KEYS))
    def split(self, index: int, name: str) -> None:
        """Split what is leased for writing from its key, if another replica stays behind."""
        writing = [held for held in self.leases if held.is_writing]
        if not writing:
            return
        held = writing[index % len(writing)]
        try:
            is_split = held.lease.split({held.asked: name})
        except UsageError:
            assert name in self.model
            return
        if is_split:
            self.model[name] = self.model[held.key].clone()
            self.leases[self.leases.index(held)] = held._replace(key=name)

    @rule(key=st.sampled_from(KEYS), name=st.sampled_from(KEYS), replace=st.booleans())
    def rename(self, key: str, name: str, replace: bool) -> None:
        """Rename a key, leased or not; what it replaces must not be."""
        try:
            self.store.rename({key: name}, replace=replace)
        except KeyNotFound:
            assert key not in self.model
        except LeaseError:
            assert self.is_held(name)
        except UsageError:
            assert name == key or name in self.model
        else:
            self.model[name] = self.model.pop(key)
            for held in self.parts.values():
                held.key = name if held.key == key else held.key
            self.leases = [held._replace(key=name) if held.key == key else held for held in self.leases]

    @rule(tier=st.sampled_from(TIERS), capacity=st.integers(100, 9000))
    def resize(self, tier: str, capacity: int) -> None:
        """Resize; a refusal changes nothing."""
        self.open_gates()
        before = self.store.stats().tiers[tier].capacity_bytes
        try:
            self.store.resize(tier, capacity)
        except CapacityError:
            assert self.store.stats().tiers[tier].capacity_bytes == before
        else:
            assert self.store.stats().tiers[tier].capacity_bytes == capacity

    @rule(key=st.sampled_from(KEYS))
    def drop(self, key: str) -> None:
        """Drop, even while it moves."""
        try:
            self.store.drop(key)
        except KeyNotFound:
            assert key not in self.model
        except LeaseError:
            assert self.is_held(key)
        else:
            del self.model[key]

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3))
    def add_parts(self, keys: list[str]) -> None:
        """Let the reader hold keys: all or none."""
        self.open_gates()
        try:
            self.reader.add(*keys)
        except KeyNotFound:
            assert not self.model.keys() >= set(keys)
        except LeaseError:
            assert any(held.is_writing and held.key in keys for held in self.leases)
        except UsageError:
            assert self.parts.keys() & set(keys)
        except (CapacityError, BackendError):
            pass
        else:
            self.parts.update({key: HeldParts(key, key, self.stored(key)) for key in keys})
        assert set(self.reader.keys) == set(self.parts)

    def stored(self, key: str) -> torch.Tensor:
        """Return the bytes of a key in the order in which they are stored."""
        spec = self.store.spec(key)
        return bytes_of(torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype).copy_(self.model[key]))

    @rule(index=st.integers(0, 9))
    def remove_parts(self, index: int) -> None:
        """Let the reader hold a key no longer, whatever reads of it stand still."""
        if self.parts:
            asked = sorted(self.parts)[index % len(self.parts)]
            self.reader.remove(asked)
            del self.parts[asked]

    def lose(self, key: str) -> None:
        """Note that other bytes are under a key now."""
        for held in self.parts.values():
            held.key = None if held.key == key else held.key

    # --- rules that do not block: the hardware may stand still ------------------------------

    @rule(data=st.data(), units=st.integers(1, 3))
    def read_parts(self, data: st.DataObject, units: int) -> None:
        """Begin to read parts of what the reader has: the bytes of when it was added."""
        nbytes = units * self.reader.alignment_bytes
        whole = {asked: held.value for asked, held in self.parts.items()}
        possible = sorted(asked for asked, flat in whole.items() if flat.numel() >= nbytes)
        if not possible:
            return
        parts: list[tuple[str, int]] = []
        for asked in data.draw(st.lists(st.sampled_from(possible), min_size=1, max_size=6)):
            last = (whole[asked].numel() - nbytes) // self.reader.alignment_bytes
            parts.append((asked, data.draw(st.integers(0, last)) * self.reader.alignment_bytes))
        into = torch.zeros(len(parts), nbytes, dtype=torch.uint8)
        expected = torch.stack([whole[asked][begin : begin + nbytes] for asked, begin in parts])
        self.reads.append(PartRead(self.reader.read(parts, into), into, expected))

    @rule(tier=st.integers(0, 2))
    def shut(self, tier: int) -> None:
        """Copies of a tier stand still from now on."""
        self.gates[tier].shut()

    @rule(tier=st.integers(0, 2), index=st.integers(0, 5))
    def step(self, tier: int, index: int) -> None:
        """One held copy, any of them, goes through."""
        gate = self.gates[tier]
        if gate.held:
            gate.step(index % gate.held)

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4),
        tier=st.sampled_from(TIERS),
        way=st.sampled_from(["fetch", "prefetch", "evict"]),
    )
    def move(self, keys: list[str], tier: str, way: str) -> None:
        """Begin to move keys."""
        try:
            if way == "evict":
                transfer = self.store.evict(*keys, to=tier)
            else:
                transfer = (
                    self.store.fetch(*keys, tier=tier)
                    if way == "fetch"
                    else self.store.prefetch(*keys, tier=tier)
                )
        except KeyNotFound:
            assert not self.model.keys() >= set(keys)
        except LeaseError:
            assert any(held.key in keys for held in self.leases)
        else:
            self.transfers.append(transfer)

    @rule(tier=st.integers(0, 2), after=st.integers(1, 4))
    def break_soon(self, tier: int, after: int) -> None:
        """The operation of a tier that comes ``after`` those until now fails."""
        self.faulty[tier].fail_next(after)

    # --- what must hold ---------------------------------------------------------------------

    @invariant()
    def the_books_are_right(self) -> None:
        """The rules of the books, and no tier above its capacity."""
        if not hasattr(self, "store"):
            return
        self.store.check()
        for tier in self.store.stats().tiers.values():
            assert tier.charged_bytes <= tier.capacity_bytes

    def teardown(self) -> None:
        """When the hardware is done nobody waits, and every key reads as the dict says."""
        if not hasattr(self, "store"):
            return
        for faulty in self.faulty:
            faulty.heal()
        self.open_gates()
        for held in self.leases:
            held.lease.release(written=False)
        self.end_reads()
        for transfer in self.transfers:
            try:
                transfer.result(PATIENCE_S)
            except TierStoreError:
                continue  # a refusal or a failure is an end too; a hang is a TimeoutError
        assert set(self.store) == set(self.model)
        assert all(tier.leased_bytes == 0 for tier in self.store.stats().tiers.values())
        for key, tensor in self.model.items():
            assert same_bytes(self.store.get(key), tensor), key
            assert self.store.spec(key).shape == tensor.shape
        self.store.close()

    def end_reads(self) -> None:
        """Close the reader, and see what its reads came to."""
        self.reader.close()
        for read in self.reads:
            try:
                read.transfer.result(PATIENCE_S)
            except BackendError:
                continue  # it was told to fail
            assert torch.equal(read.into, read.expected)
