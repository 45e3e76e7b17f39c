"""Parts of values, read past the books: what a reader holds, what it reads, and what it refuses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierstore as ts
from tests.part_stores import PATIENCE_S, Whole, filled, part, store_of
from tests.stores import make_store, memory_backends, numbered
from tierstore.config import StoreConfig, TierConfig
from tierstore.core.ledger import Ledger
from tierstore.engine import part_reads
from tierstore.spi import Backend
from tierstore.testing.backend_operations import pattern
from tierstore.testing.faults import Gate
from tierstore_backends.device import EmulatedDevice
from tierstore_backends.files import open_backend as open_files
from tierstore_backends.pinned import open_backend as open_pinned

PAGE = 4096


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda b: b, Whole], ids=["parts", "wholes"])
@given(data=st.data())
def test_parts_are_what_the_values_have_there(
    wrap: Callable[[Backend], Backend], data: st.DataObject
) -> None:
    nbytes = data.draw(st.integers(1, 1000))
    parts = data.draw(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1000 - nbytes)), max_size=20))
    into = torch.zeros(len(parts), nbytes, dtype=torch.uint8)
    with filled(wrap) as store, store.reader() as reader:
        reader.add("a", "b", "c")
        reader.read(parts, into).result(PATIENCE_S)
    assert all(row.equal(part(key, begin, nbytes)) for row, (key, begin) in zip(into, parts, strict=True))


@pytest.mark.parametrize(
    "begins",
    [
        [0, 4, 400],
        (0, 4, 400),
        range(0, 12, 4),
        np.array([0, 4, 400]),
        np.array([0, 4, 400], dtype=np.int32),
        torch.tensor([0, 4, 400]),
        torch.tensor([8]),
        [],
    ],
    ids=repr,
)
def test_begins_may_be_arrays_for_each_key(begins: object) -> None:
    own = [int(begin) for begin in begins]  # type: ignore[attr-defined]
    into = torch.zeros(len(own) + 2, 5, dtype=torch.int32)
    with filled() as store, store.reader() as reader:
        reader.add("a", "b")
        reader.read({"b": [12, 16], "a": begins}, into).result(PATIENCE_S)  # type: ignore[dict-item]
    expected = [part("b", 12, 20), part("b", 16, 20), *(part("a", begin, 20) for begin in own)]
    assert into.view(torch.uint8).equal(torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex64, torch.int64])
def test_rows_may_be_of_any_dtype_and_shape(dtype: torch.dtype) -> None:
    source = torch.randint(0, 2, (50, 16)).to(dtype)
    into = torch.zeros(2, 2, 16, dtype=dtype)
    with make_store(100_000, 100_000) as store, store.reader() as reader:
        store.put("k", source, tier="disk")
        reader.add("k")
        row_bytes = source[0].nbytes
        reader.read([("k", 48 * row_bytes), ("k", 3 * row_bytes)], into).result(PATIENCE_S)
    assert into.equal(torch.stack([source[48:50], source[3:5]]))


def test_a_row_of_one_element_needs_no_second_dimension() -> None:
    into = torch.zeros(3, dtype=torch.float64)
    with make_store(1000, 1000) as store, store.reader() as reader:
        store.put("k", torch.arange(10, dtype=torch.float64), tier="disk")
        reader.add("k")
        reader.read([("k", 72), ("k", 0), ("k", 32)], into).result(PATIENCE_S)
    assert into.tolist() == [9.0, 0.0, 4.0]


def test_no_part_is_a_read_of_nothing() -> None:
    with filled() as store, store.reader() as reader:
        for into in (torch.zeros(0, 7), torch.zeros(0)):
            transfer = reader.read([], into)
            assert transfer.done()
            assert reader.read({}, into).done()


def test_a_buffer_of_inference_mode_or_that_autograd_knows_can_be_filled() -> None:
    with torch.inference_mode():
        inferred = torch.zeros(1, 10, dtype=torch.uint8)
    leaf = torch.zeros(1, 10, requires_grad=True)
    with filled() as store, store.reader() as reader:
        reader.add("a")
        reader.read([("a", 7)], inferred).result(PATIENCE_S)
        reader.read([("a", 7)], leaf).result(PATIENCE_S)
    assert inferred[0].equal(part("a", 7, 10))
    assert leaf.detach().view(torch.uint8)[0].equal(part("a", 7, 40))


def test_values_above_are_brought_to_the_last_tier_when_they_are_added() -> None:
    with make_store(1000, 1000, 1000) as store, store.reader() as reader:
        store.put("k", numbered(1), tier="device")
        store.put("l", numbered(2), tier="host")
        reader.add("k", "l")
        assert (store.where("k"), store.where("l")) == (("device", "disk"), ("host", "disk"))
        into = torch.zeros(2, 10, dtype=torch.uint8)
        reader.read([("l", 0), ("k", 90)], into).result(PATIENCE_S)
    assert into.tolist() == [[2] * 10, [1] * 10]


@pytest.mark.parametrize("kind", ["memory", "pinned", "device"])
def test_the_last_tier_may_be_memory(kind: str) -> None:
    """Of a store of one tier, too; in a device's memory there are no parts."""
    openers: dict[str, Callable[[], Backend]] = {
        "memory": lambda: memory_backends((MIB,))[0],
        "pinned": lambda: open_pinned(capacity_bytes=MIB, options={"enable_pinned_mem": False}),
        "device": lambda: EmulatedDevice(MIB),
    }
    backend = openers[kind]()
    with store_of([backend], MIB) as store, store.reader() as reader:
        store.put("a", pattern(5000, 0))
        reader.add("a")
        into = torch.zeros(2, 512, dtype=torch.uint8)
        reader.read([("a", 512), ("a", 4096)], into).result(PATIENCE_S)
        assert into.equal(torch.stack([part("a", 512, 512, 5000), part("a", 4096, 512, 5000)]))


MIB = 2**20


def test_a_disk_of_files_reads_pages_and_nothing_else(tmp_path: Path) -> None:
    host = memory_backends((MIB,))[0]
    files = open_files(capacity_bytes=4 * MIB, options={"path": str(tmp_path)})
    with store_of([host, files], 4 * MIB) as store, store.reader() as reader:
        for seed in range(3):
            store.put("abc"[seed], pattern(MIB, seed), tier="disk")
        reader.add("a", "b", "c")
        before = store.stats().tiers["disk"].io["read_bytes"]
        parts = [("abc"[n % 3], (37 * n % 256) * PAGE) for n in range(100)]
        into = torch.zeros(100, PAGE, dtype=torch.uint8)
        reader.read(parts, into).result(PATIENCE_S)
        after = store.stats().tiers["disk"].io["read_bytes"]
        assert reader.alignment_bytes == files.capabilities.alignment_bytes
    assert all(row.equal(part(key, b, PAGE, MIB)) for row, (key, b) in zip(into, parts, strict=True))
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after - before == 100 * PAGE


# --- the books ----------------------------------------------------------------------------------


def test_reads_are_no_events_and_keys_are_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []
    apply = Ledger.apply

    def noted(self: Ledger, *own: object) -> object:
        events.extend(own)
        return apply(self, *own)  # type: ignore[arg-type]

    with filled() as store:
        monkeypatch.setattr(Ledger, "apply", noted)
        reader = store.reader()
        reader.add("a", "b", "c")
        assert len(events) == 3
        into = torch.zeros(50, 20, dtype=torch.uint8)
        for _ in range(10):
            reader.read([("abc"[n % 3], n) for n in range(50)], into).result(PATIENCE_S)
        assert len(events) == 3
        reader.remove("a")
        reader.close()
        assert len(events) == 6


def test_what_was_read_is_counted() -> None:
    with filled() as store, store.reader() as reader:
        reader.add("a", "b")
        before = store.stats().traffic.get(("disk", "caller"))
        reader.read([("a", 0), ("b", 30), ("a", 0)], torch.zeros(3, 20, dtype=torch.uint8)).result(PATIENCE_S)
        after = store.stats().traffic["disk", "caller"]
        leased_bytes = store.stats().tiers["disk"].leased_bytes
    assert before is None
    assert (after.copies, after.nbytes, leased_bytes) == (3, 60, 2000)


# --- what is held -------------------------------------------------------------------------------


def test_what_is_held_is_like_what_is_leased() -> None:
    """A drop, a write lease and a rename over it are refused, naming the reader; reading on is not."""
    with filled() as store, store.reader() as reader:
        reader.add("a")
        refused: list[Callable[[], object]] = [
            lambda: store.drop("a"),
            lambda: store.lease("a", tier="host", write=True),
            lambda: store.rename({"b": "a"}, replace=True),
        ]
        for act in refused:
            with pytest.raises(ts.LeaseError, match=r"MainThread \(a reader\)") as caught:
                act()
            assert len(caught.value.holders) == 1
        store.check()
        assert store.get("a").equal(pattern(1000, 0))
        with store.lease("a", tier="host") as lease:
            assert lease.tensor.equal(pattern(1000, 0))
        reader.remove("a")
        store.drop("a")
        store.check()
        assert "a" not in store


def test_a_key_that_is_leased_for_writing_cannot_be_added() -> None:
    with filled() as store, store.reader() as reader:
        with store.lease("b", tier="host", write=True), pytest.raises(ts.LeaseError, match="for writing"):
            reader.add("a", "b")
        assert reader.keys == ()
        store.drop("a")  # nothing of the refused call is held
        reader.add("b")


def test_what_is_held_stays_when_room_is_wanted() -> None:
    backends = memory_backends((1000, 1000))
    with store_of(backends, 1000) as store, store.reader() as reader:
        store.put("a", numbered(1, 600), tier="disk")
        reader.add("a")
        with pytest.raises(ts.CapacityError) as caught:
            store.put("b", numbered(2, 500), tier="disk")
        assert any("(a reader)" in holder for holder in caught.value.holders)
        reader.remove("a")
        store.drop("a")
        store.put("b", numbered(2, 500), tier="disk")


def test_a_key_that_is_replaced_is_read_as_it_was_until_it_is_added_again() -> None:
    into = torch.zeros(1, 10, dtype=torch.uint8)
    with filled() as store, store.reader() as reader:
        reader.add("a")
        store.put("a", numbered(9, 500), tier="disk", replace=True)
        reader.read([("a", 900)], into).result(PATIENCE_S)
        assert into[0].equal(part("a", 900, 10))
        assert store.get("a").equal(numbered(9, 500))
        reader.remove("a")
        reader.add("a")
        reader.read([("a", 0)], into).result(PATIENCE_S)
        assert into[0].tolist() == [9] * 10
        with pytest.raises(ts.UsageError, match="within the 500 B"):
            reader.read([("a", 900)], into)
        store.check()


def test_a_key_that_is_renamed_is_read_under_the_name_that_it_was_given() -> None:
    into = torch.zeros(1, 10, dtype=torch.uint8)
    with filled() as store, store.reader() as reader:
        reader.add("a")
        store.rename({"a": "new"})
        store.put("a", numbered(9), tier="disk")
        reader.read([("a", 20)], into).result(PATIENCE_S)
        assert into[0].equal(part("a", 20, 10))
        with pytest.raises(ts.LeaseError):
            store.drop("new")
        store.drop("a")


def test_several_readers_hold_one_key_each_for_itself() -> None:
    with filled() as store, store.reader() as first, store.reader() as second:
        first.add("a")
        second.add("a")
        first.remove("a")
        with pytest.raises(ts.LeaseError):
            store.drop("a")
        second.remove("a")
        store.drop("a")


def test_adding_is_all_or_nothing() -> None:
    with filled() as store, store.reader() as reader:
        reader.add("a")
        with pytest.raises(ts.KeyNotFound, match="no key 'x'"):
            reader.add("b", "x", "c")
        with pytest.raises(ts.UsageError, match="this reader has 'a' already"):
            reader.add("b", "a")
        with pytest.raises(ts.UsageError, match="a key is text"):
            reader.add("b", 7)  # type: ignore[arg-type]
        assert reader.keys == ("a",)
        store.drop("b", "c")


def test_adding_a_key_twice_in_one_call_is_adding_it_once() -> None:
    with filled() as store, store.reader() as reader:
        reader.add("a", "b", "a")
        assert reader.keys == ("a", "b")
        reader.remove("a", "b", "a")
        store.drop("a", "b")


def test_removing_is_all_or_nothing() -> None:
    with filled() as store, store.reader() as reader:
        reader.add("a", "b")
        with pytest.raises(ts.KeyNotFound, match="'c' is not held by this reader, which has 2 keys"):
            reader.remove("a", "c")
        assert reader.keys == ("a", "b")


def test_of_two_calls_that_add_one_key_at_a_time_one_is_refused() -> None:
    gate = Gate(memory_backends((1, 10_000))[1])
    with store_of([memory_backends((10_000,))[0], gate], 10_000) as store, store.reader() as reader:
        store.put("a", numbered(1), tier="host")
        outcomes: list[object] = []

        def add() -> None:
            try:
                reader.add("a")
            except ts.UsageError as error:
                outcomes.append(str(error))
            else:
                outcomes.append("added")

        threads = [threading.Thread(target=add) for _ in range(2)]
        for thread in threads:
            thread.start()
        gate.wait_until_held()
        gate.open()
        for thread in threads:
            thread.join(PATIENCE_S)
        added, refused = sorted(map(str, outcomes))
        assert added == "added"
        assert "already" in refused
        reader.remove("a")
        store.drop("a")


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "into", "message"),
    [
        ([("a", 991)], torch.zeros(1, 10, dtype=torch.uint8), "no part of 'a' begins at 991 and has 10 B"),
        ([("a", 0), ("b", -1)], torch.zeros(2, 10, dtype=torch.uint8), "no part of 'b' begins at -1"),
        ([("a", 2**70)], torch.zeros(1, 10, dtype=torch.uint8), "begins at 1180591620717411303424"),
        ([("a", 0)], torch.zeros(1, 0), "parts of 0 B"),
        ([("a", 0)], torch.zeros(2, 10), r"1 parts need a contiguous tensor in host memory with 1 rows"),
        ([("a", 0)], torch.zeros(10, 2).t()[:1], "contiguous"),
        ([("a", 0), ("a", 1)], torch.zeros(10, 2).t()[:2], "contiguous"),
        ([("a", 0)], torch.zeros(()), "with 1 rows, not "),
        ([("a", 0)], torch.empty(1, 10, device="meta"), "'meta'"),
        ([("a", 0)], torch.zeros(1, 4, dtype=torch.complex64).conj(), "contiguous"),
        ([("a", 0)], torch.zeros(1, 4).to_sparse(), "contiguous"),
        ([("x", 0)], torch.zeros(1, 4), "'x' is not held by this reader"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_and_nothing_moves(
    parts: list[tuple[str, int]], into: torch.Tensor, message: str
) -> None:
    with filled() as store, store.reader() as reader:
        reader.add("a", "b")
        with pytest.raises(ts.UsageError, match=message):
            reader.read(parts, into)
        reader.remove("a", "b")
        store.drop("a", "b")  # what was refused is not under way


def test_a_begin_is_a_whole_number() -> None:
    with filled() as store, store.reader() as reader:
        reader.add("a")
        with pytest.raises(TypeError):
            reader.read([("a", 1.0)], torch.zeros(1, 4))  # type: ignore[list-item]
        with pytest.raises(TypeError):
            reader.read({"a": np.array([1.0])}, torch.zeros(1, 4))


def test_a_part_that_the_medium_cannot_read_is_refused_with_what_it_can() -> None:
    pool = open_pinned(capacity_bytes=MIB, options={"enable_pinned_mem": False})
    with store_of([pool], MIB) as store, store.reader() as reader:
        store.put("a", pattern(5000, 0))
        reader.add("a")
        with pytest.raises(
            ts.UsageError, match="begins at 1 and has 512 B: it has to begin at a multiple of 512"
        ):
            reader.read([("a", 1)], torch.zeros(1, 512, dtype=torch.uint8))
        with pytest.raises(ts.UsageError, match="parts of 100 B: in 'disk' they have a multiple of 512 B"):
            reader.read([("a", 0)], torch.zeros(1, 100, dtype=torch.uint8))


# --- media without parts ------------------------------------------------------------------------


def test_without_parts_values_are_read_whole_once_each_and_a_warning_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole: list[Whole] = []

    def wrap(backend: Backend) -> Backend:
        whole.append(Whole(backend))
        return whole[0]

    with caplog.at_level(logging.WARNING, "tierstore"), filled(wrap) as store, store.reader() as reader:
        reader.add("a", "b", "c")
        into = torch.zeros(5, 10, dtype=torch.uint8)
        assert caplog.records == []
        for _ in range(2):
            reader.read([("b", 5), ("a", 0), ("b", 7), ("b", 990), ("a", 3)], into).result(PATIENCE_S)
    assert whole[0].read_bytes == [1000] * 4
    (record,) = caplog.records
    assert "tier 'disk' cannot read parts of values" in record.message
    assert "for each part of 10 B its whole value is read" in record.message


def test_a_codec_is_such_a_medium(caplog: pytest.LogCaptureFixture) -> None:
    config = StoreConfig(
        [
            TierConfig("host", memory_backends((MIB,))[0], MIB),
            TierConfig("disk", memory_backends((1, MIB))[1], MIB, codec="lz4"),
        ]
    )
    source = torch.arange(50_000, dtype=torch.int32)
    into = torch.zeros(2, 100, dtype=torch.int32)
    with caplog.at_level(logging.WARNING, "tierstore"), ts.Store(config) as store, store.reader() as reader:
        store.put("k", source, tier="disk")
        reader.add("k")
        reader.read([("k", 4 * 49_900), ("k", 4 * 7)], into).result(PATIENCE_S)
    assert into.equal(torch.stack([source[49_900:], source[7:107]]))
    assert len(caplog.records) == 1


def test_whole_values_are_in_memory_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit, or one that does not; in any order in which they come."""
    monkeypatch.setattr(part_reads, "WHOLE_BYTES", 2500)
    gates: list[Gate] = []

    def wrap(backend: Backend) -> Backend:
        gates.append(Gate(Whole(backend)))
        gates[0].open()
        return gates[0]

    with filled(wrap) as store, store.reader() as reader:
        store.put("large", numbered(7, 3000), tier="disk")
        reader.add("a", "b", "c", "large")
        gates[0].shut()
        into = torch.zeros(4, 10, dtype=torch.uint8)
        transfer = reader.read([("c", 1), ("b", 2), ("a", 3), ("large", 4)], into)
        held = []
        while not transfer.done():
            held.append(gates[0].held)
            gates[0].step(gates[0].held - 1)
        assert held == [2, 2, 1, 1]
        expected = [part("c", 1, 10), part("b", 2, 10), part("a", 3, 10), numbered(7, 10)]
        assert into.equal(torch.stack(expected))


def test_a_thousand_whole_values_that_come_at_once_do_not_nest() -> None:
    """A stack has room for some hundred calls."""
    with store_of([memory_backends((1, 10**6))[0], Whole(memory_backends((1, 10**6))[1])], 10**6) as store:
        keys = [str(number) for number in range(1500)]
        for number, key in enumerate(keys):
            store.put(key, numbered(number, 4), tier="disk")
        with store.reader() as reader:
            reader.add(*keys)
            into = torch.zeros(1500, 2, dtype=torch.uint8)
            reader.read([(key, 1) for key in keys], into).result(PATIENCE_S)
    assert into[:, 0].tolist() == [number % 251 for number in range(1500)]
