"""Parts of values when the hardware does not do its part: a read fails, and later ones work."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tierstore as ts
from tests.files_disk import EVERY_ENGINE, PAGE, Nth, ScriptedKernel, failing, open_files
from tests.part_stores import Whole
from tests.stores import memory_backends, numbered
from tests.virtual_timer import VirtualTimer
from tierstore.config import StoreConfig, TierConfig
from tierstore.errors import BackendError, IntegrityError
from tierstore.spi import Backend
from tierstore.testing.backend_operations import pattern
from tierstore.testing.batching import Batching
from tierstore.testing.faults import Faulty, Gate, Slow
from tierstore.wrappers.retrying import Retrying

MIB = 2**20
PATIENCE_S = 20
KEYS = "abcd"
BYTES = 1000


def opened(disk: Backend, nbytes: int = 100_000) -> ts.Store:
    host = memory_backends((nbytes,))[0]
    return ts.Store(StoreConfig([TierConfig("host", host, nbytes), TierConfig("disk", disk, nbytes)]))


def memory_disk() -> Backend:
    return memory_backends((1, 100_000))[1]


def part(key: str, begin: int, nbytes: int = 10) -> torch.Tensor:
    return pattern(BYTES, KEYS.index(key))[begin : begin + nbytes]


def scenario(store: ts.Store) -> int:
    """Put, add, read, replace and remove; return how many rows were read, each of which was right."""
    rows = 0
    for seed, key in enumerate(KEYS):
        store.put(key, pattern(BYTES, seed), tier="disk" if seed % 2 else "host")
    with store.reader() as reader:
        reader.add("a", "b")
        reader.add("c", "d")
        for turn in range(3):
            parts = [(KEYS[n % 4], 7 * n + turn) for n in range(9)]
            into = torch.zeros(9, 10, dtype=torch.uint8)
            reader.read(parts, into).result(PATIENCE_S)
            assert into.equal(torch.stack([part(*each) for each in parts]))
            rows += 9
        store.put("a", numbered(1), tier="disk", replace=True)
        reader.remove("b")
    return rows


@pytest.mark.parametrize("wrap", [lambda b: b, Batching], ids=["together", "each"])
def test_a_failure_at_any_operation_of_the_disk_fails_that_call_and_holds_nothing(
    wrap: Callable[[Backend], Backend],
) -> None:
    """A failed read raises, a failed `add` adds nothing; then every key has its bytes and can go."""
    for fail_at in itertools.count(1):
        faulty = Faulty(memory_disk(), fail_at=fail_at)
        store = opened(wrap(faulty))
        rows = 0
        with contextlib.suppress(BackendError):
            rows = scenario(store)
        store.check()
        faulty.heal()
        assert [tier.leased_bytes for tier in store.stats().tiers.values()] == [0, 0], fail_at
        for seed, key in enumerate(KEYS):
            if key in store and not (key == "a" and store.spec("a").nbytes == 100):
                assert store.get(key).equal(pattern(BYTES, seed)), fail_at
        store.drop(*store.keys())
        store.close()
        if not faulty.failures:
            break
        assert rows in (0, 27)
    assert rows == 27
    assert fail_at > 8


def test_a_read_that_failed_says_what_and_the_next_one_works() -> None:
    faulty = Faulty(memory_disk(), on=["read"])
    with opened(Batching(faulty)) as store, store.reader() as reader:
        for seed, key in enumerate(KEYS):
            store.put(key, pattern(BYTES, seed), tier="disk")
        reader.add(*KEYS)
        parts = [(key, 10 * n) for n in range(3) for key in KEYS]
        into = torch.zeros(12, 10, dtype=torch.uint8)
        for n in range(1, 13):
            faulty.fail_next(n)
            transfer = reader.read(parts, into)
            with pytest.raises(BackendError) as caught:
                transfer.result(PATIENCE_S)
            key, begin = parts[n - 1]
            assert str(caught.value).startswith(
                f"reading 1 of 12 parts of 10 B in 'disk' failed, the first of them of {key!r} at {begin}: op"
            )
            assert (caught.value.key, caught.value.tier, caught.value.needed_bytes) == (key, "disk", 10)
            assert caught.value.__cause__ is not None
            assert not caught.value.transient
            reader.read(parts, into).result(PATIENCE_S)
            assert into.equal(torch.stack([part(*each) for each in parts]))


def test_a_failure_keeps_its_kind() -> None:
    """Corruption is said to be that, and what may pass that it may."""
    for error in (IntegrityError("other bytes"), BackendError("away", transient=True)):
        faulty = Faulty(memory_disk(), on=["read"], error=error)
        with opened(faulty) as store, store.reader() as reader:
            store.put("a", pattern(BYTES, 0), tier="disk")
            reader.add("a")
            faulty.fail_next()
            with pytest.raises(type(error)) as caught:
                reader.read([("a", 0)], torch.zeros(1, 10)).result(PATIENCE_S)
            assert caught.value.transient is error.transient
            assert caught.value.__cause__ is error


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_the_nth_call_of_the_kernel_fails_one_part(tmp_path: Path, engine: str) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, engine=engine)
    with opened(files, 8 * MIB) as store, store.reader() as reader:
        for seed in range(2):
            store.put(KEYS[seed], pattern(MIB, seed), tier="disk")
        reader.add("a", "b")
        parts = [("ab"[n % 2], 5 * n * PAGE) for n in range(6)]
        into = torch.zeros(6, PAGE, dtype=torch.uint8)
        for n in range(1, 7):
            kernel.twist = Nth(n, failing(errno.EIO), "read")
            with pytest.raises(BackendError, match="reading 1 of 6 parts of 4096 B in 'disk' failed"):
                reader.read(parts, into).result(PATIENCE_S)
            kernel.twist = None
            reader.read(parts, into).result(PATIENCE_S)
            expected = [pattern(MIB, "ab".index(key))[begin : begin + PAGE] for key, begin in parts]
            assert into.equal(torch.stack(expected))


def test_whole_values_fail_one_by_one() -> None:
    """Where there are no parts, what shares a value fails with it."""
    faulty = Faulty(memory_disk(), on=["read"])
    with opened(Whole(faulty)) as store, store.reader() as reader:
        for seed, key in enumerate("abc"):
            store.put(key, pattern(BYTES, seed), tier="disk")
        reader.add("a", "b", "c")
        parts = [("b", 1), ("a", 2), ("b", 3), ("c", 4)]
        into = torch.zeros(4, 10, dtype=torch.uint8)
        faulty.fail_next()
        with pytest.raises(BackendError, match=r"reading 2 of 4 parts .* the first of them of 'b' at 1"):
            reader.read(parts, into).result(PATIENCE_S)
        reader.read(parts, into).result(PATIENCE_S)
        assert into.equal(torch.stack([part(*each) for each in parts]))


def test_a_read_that_is_tried_again_is_one_read() -> None:
    timer = VirtualTimer()
    faulty = Faulty(memory_disk(), on=["read"], error=BackendError("away", transient=True))
    with opened(Retrying(Batching(faulty), 3, timer=timer)) as store, store.reader() as reader:
        store.put("a", pattern(BYTES, 0), tier="disk")
        reader.add("a")
        faulty.fail_next(2)
        into = torch.zeros(3, 10, dtype=torch.uint8)
        transfer = reader.read([("a", 0), ("a", 50), ("a", 7)], into)
        assert not transfer.done()
        timer.run_out()
        transfer.result(0)
        assert into.equal(torch.stack([part("a", 0), part("a", 50), part("a", 7)]))
        assert store.stats().traffic["disk", "caller"].nbytes == 30


def test_a_read_that_waits_to_be_tried_again_ends_with_the_store() -> None:
    timer = VirtualTimer()
    faulty = Faulty(memory_disk(), on=["read"], error=BackendError("away", transient=True))
    store = opened(Retrying(faulty, 3, timer=timer))
    store.put("a", pattern(BYTES, 0), tier="disk")
    reader = store.reader()
    reader.add("a")
    faulty.fail_next()
    transfer = reader.read([("a", 0)], torch.zeros(1, 10))
    store.close()
    with pytest.raises(BackendError, match="away"):
        transfer.result(0)


def test_reads_end_in_any_order() -> None:
    slow = Slow(memory_disk(), delays=[3, 1, 2, 0], on=["read"])
    with opened(slow) as store, store.reader() as reader:
        for seed, key in enumerate(KEYS):
            store.put(key, pattern(BYTES, seed), tier="disk")
        reader.add(*KEYS)
        rows = [torch.zeros(2, 10, dtype=torch.uint8) for _ in range(8)]
        parts = [[(KEYS[n % 4], n), (KEYS[(n + 1) % 4], n)] for n in range(8)]
        reads = [reader.read(own, into) for own, into in zip(parts, rows, strict=True)]
        reader.remove("a", "c")
        slow.drain()
        for read, own, into in zip(reads, parts, rows, strict=True):
            read.result(0)
            assert into.equal(torch.stack([part(*each) for each in own]))
        store.drop("a", "c")
        store.check()


def test_a_held_value_is_not_freed_under_a_read_whatever_becomes_of_its_key() -> None:
    """Replaced and removed while a read of it stands still: its slot is given back after the read."""
    gate = Gate(memory_disk())
    gate.open()
    with opened(gate) as store, store.reader() as reader:
        store.put("a", pattern(BYTES, 0), tier="disk")
        reader.add("a")
        gate.shut()
        into = torch.zeros(1, 10, dtype=torch.uint8)
        transfer = reader.read([("a", 5)], into)
        store.put("a", numbered(9, 10), tier="host", replace=True)
        reader.remove("a")
        store.check()
        assert gate.frees == 0
        gate.open()
        transfer.result(PATIENCE_S)
        assert into[0].equal(part("a", 5))
        assert gate.frees == 1
        store.check()
