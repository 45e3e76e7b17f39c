"""A store whose lowest tier is durable: what a flush leaves, and what a later store finds."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tierstore as ts
from tests.stores import numbered
from tierstore.config import StoreConfig, TierConfig
from tierstore.spi import Backend
from tierstore.tensors import TensorSpec, describe, found_spec, from_text, to_text
from tierstore.testing.faults import Faulty, Gate, Operation
from tierstore_backends.memory import MemoryBackend

CAPACITY = 10_000
COMMITS: tuple[Operation] = ("commit",)


class Disk:
    """What outlives stores: the image that the last commit left."""

    def __init__(self) -> None:
        self.backend = MemoryBackend(CAPACITY, is_durable=True, is_storage=True)

    def open(self, wrap: Callable[[Backend], Backend] = lambda backend: backend) -> ts.Store:
        self.backend = MemoryBackend(
            CAPACITY, is_durable=True, is_storage=True, image=dict(self.backend.image)
        )
        host = TierConfig("host", MemoryBackend(CAPACITY), CAPACITY)
        return ts.Store(StoreConfig([host, TierConfig("disk", wrap(self.backend), CAPACITY)]))


@pytest.fixture
def disk() -> Disk:
    return Disk()


def crash(store: ts.Store) -> None:
    """End a store as a power loss would: nothing more is made durable."""
    store.close(flush=False)


def test_flush_leaves_every_key_for_the_next_store(disk: Disk) -> None:
    store = disk.open()
    tensors = {
        "matrix": torch.randn(3, 5).t(),
        "bf16": torch.randn(7).bfloat16(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
    }
    for key, tensor in tensors.items():
        store.put(key, tensor)
    store.flush()
    crash(store)
    with disk.open() as again:
        assert set(again) == set(tensors)
        for key, tensor in tensors.items():
            found = again.get(key)
            assert torch.equal(found, tensor)
            assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
            assert again.where(key) == ("disk",)
        assert again.stats().tiers["disk"].ready_bytes == sum(t.nbytes for t in tensors.values())


def test_what_was_changed_since_the_last_flush_is_as_it_was_then(disk: Disk) -> None:
    store = disk.open()
    for key in ("written", "replaced", "dropped", "renamed"):
        store.put(key, numbered(1))
    store.flush()
    with store.lease("written", tier="host", write=True) as lease:
        lease.tensor.fill_(2)
    store.put("replaced", numbered(2), replace=True)
    store.drop("dropped")
    store.rename({"renamed": "new name"})
    store.put("new", numbered(2))
    store.evict("written", "replaced", to="disk").result()
    crash(store)
    with disk.open() as again:
        assert set(again) == {"written", "replaced", "dropped", "renamed"}
        assert all(torch.equal(again.get(key), numbered(1)) for key in again)


def test_close_flushes(disk: Disk) -> None:
    with disk.open() as store:
        store.put("k", numbered(1))
    with disk.open() as again:
        assert torch.equal(again.get("k"), numbered(1))
        again.drop("k")
    with disk.open() as empty:
        assert not len(empty)


def test_a_flush_of_some_keys_leaves_the_others_as_they_were(disk: Disk) -> None:
    store = disk.open()
    store.put("a", numbered(1))
    store.put("b", numbered(1))
    store.flush("a")
    store.put("a", numbered(2), replace=True)
    store.put("b", numbered(2), replace=True)
    store.flush("b")
    crash(store)
    with disk.open() as again:
        assert torch.equal(again.get("a"), numbered(1))
        assert torch.equal(again.get("b"), numbered(2))
        with pytest.raises(ts.KeyNotFound):
            again.flush("c")


def test_a_flush_that_fails_says_so_and_leaves_what_was_durable(disk: Disk) -> None:
    store = disk.open(lambda backend: Faulty(backend, fail_at=2, on=COMMITS))
    store.put("k", numbered(1))
    store.flush()
    store.put("k", numbered(2), replace=True)
    with pytest.raises(ts.BackendError, match="making 1 keys durable in 'disk' failed") as caught:
        store.flush()
    assert caught.value.tier == "disk"
    assert torch.equal(store.get("k"), numbered(2))
    assert torch.equal(disk.backend.image["k"][1], numbered(1))
    store.flush()
    assert torch.equal(disk.backend.image["k"][1], numbered(2))
    store.close()


def test_a_store_that_cannot_be_flushed_when_it_is_closed_says_so_and_is_closed(disk: Disk) -> None:
    store = disk.open(lambda backend: Faulty(backend, fail_at=1, on=COMMITS))
    store.put("k", numbered(1))
    with pytest.raises(ts.BackendError, match="making 1 keys durable"):
        store.close()
    store.close()
    with pytest.raises(ts.StoreClosed):
        store.get("k")


def test_an_error_of_the_last_flush_does_not_hide_the_error_of_the_block(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    store = disk.open(lambda backend: Faulty(backend, fail_at=1, on=COMMITS))
    store.put("k", numbered(1))
    with caplog.at_level(logging.ERROR, "tierstore"), pytest.raises(ZeroDivisionError), store:
        raise ZeroDivisionError
    assert "could not be flushed" in caplog.text


def test_close_after_a_write_lease_that_nobody_ended_says_so(disk: Disk) -> None:
    store = disk.open()
    store.put("k", numbered(1))
    store.lease("k", tier="host", write=True)
    with pytest.raises(ts.LeaseError, match="cannot flush 'k'"):
        store.close()
    with pytest.raises(ts.StoreClosed):
        store.get("k")


def test_a_commit_that_takes_long_holds_up_nobody(disk: Disk) -> None:
    gates: list[Gate] = []

    def gate(backend: Backend) -> Backend:
        gates.append(Gate(backend, holds=COMMITS))
        return gates[0]

    store = disk.open(gate)
    store.put("k", numbered(1))
    flusher = threading.Thread(target=store.flush)
    flusher.start()
    gates[0].wait_until_held()
    store.put("k", numbered(2), replace=True)
    store.evict("k", to="disk").result()
    assert torch.equal(store.get("k"), numbered(2))
    store.check()
    gates[0].open()
    flusher.join()
    assert torch.equal(disk.backend.image["k"][1], numbered(1))
    store.close()
    assert torch.equal(disk.backend.image["k"][1], numbered(2))


def test_a_quota_below_what_is_found_is_refused_with_both_numbers(disk: Disk) -> None:
    with disk.open() as store:
        store.put("k", numbered(1, 600))
    host = TierConfig("host", MemoryBackend(100), 100)
    small = MemoryBackend(CAPACITY, is_durable=True, is_storage=True, image=disk.backend.image)
    with pytest.raises(
        ts.CapacityError, match="1 keys of 600 B were found in 'disk', whose capacity is 500 B"
    ):
        ts.Store(StoreConfig([host, TierConfig("disk", small, 500)]))


def test_two_durable_tiers_are_refused() -> None:
    tiers = [TierConfig(name, MemoryBackend(10, is_durable=True), 10) for name in ("fast", "slow")]
    with pytest.raises(ts.ConfigError, match="one tier of a store can be durable, not fast, slow"):
        ts.Store(StoreConfig(tiers))


def test_a_backend_that_only_says_that_it_is_durable_is_refused() -> None:
    class Boaster(MemoryBackend):
        commit = None  # type: ignore[assignment]

    with pytest.raises(ts.ConfigError, match=r"has no recovered\(\) and commit\(\)"):
        ts.Store(StoreConfig([TierConfig("disk", Boaster(10, is_durable=True), 10)]))


def misdescribe(disk: Disk, key: str, note: str) -> None:
    """Let the next store find another description of a key."""
    _, memory = disk.backend.image[key]
    disk.backend.image[key] = (note, memory)


def said(**fields: object) -> str:
    """Describe ten numbers of 4 bytes, but for ``fields``."""
    return json.dumps({"dtype": "float32", "shape": [10], "stride": [1], "device": "cpu", **fields})


MISDESCRIBED = {
    "gone": "",
    "gibberish": "gibberish",
    "of a later torch": '{"dtype":"float1","shape":[10],"stride":[1],"device":"cpu"}',
    "of more bytes": to_text(describe(torch.zeros(11))),
    "of fewer bytes": to_text(describe(torch.zeros(9))),
    "with a gap": '{"dtype":"float32","shape":[2,5],"stride":[10,1],"device":"cpu"}',
    "of overlaps": '{"dtype":"float32","shape":[2,5],"stride":[0,1],"device":"cpu"}',
    "with a stride less": '{"dtype":"float32","shape":[2,5],"stride":[1],"device":"cpu"}',
    "below nothing": '{"dtype":"float32","shape":[-2,-5],"stride":[1,2],"device":"cpu"}',
    "beyond all": '{"dtype":"float32","shape":[999999999999999999999],"stride":[1],"device":"cpu"}',
    "deep": "[" * 100_000,
    "of more digits than can be read": '{"shape":[' + "9" * 50_000 + "]}",
    "of lengths that come round to no bytes": said(shape=[2**33, 2**33, 1], stride=[2**33, 1, 1]),
    "of lengths that come round": said(shape=[2**62 + 10], dtype="float32"),
    "of a length in words": said(shape=["10"]),
    "of half a length": said(shape=[10.0]),
    "of a stride that has no end": said().replace("[1]", "[Infinity]"),
    "of a stride in words": said(stride=["1"]),
    "of a dtype that is a function": said(dtype="empty"),
    "of a dtype that is a module": said(dtype="nn"),
    "of a dtype that is imported when it is asked for": said(dtype="_inductor"),
    "of a dtype that is a list": said(dtype=["float32"]),
    "of a dtype without its scale": said(dtype="qint32"),
    "on a device that is a number": said(device=0),
    "on a device that is no name": said(device="cpu;import os"),
    "on a device of an endless name": said(device="c" * 10_000),
    "on a device of an endless number": said(device="cpu:" + "9" * 10_000),
    "no object": "[1]",
    "with an endless rest": said(rest="x" * 5_000_000),
}


@pytest.mark.parametrize("note", MISDESCRIBED.values(), ids=MISDESCRIBED)
def test_a_key_whose_description_is_damaged_is_named_when_it_is_read_and_blocks_no_other(
    disk: Disk, note: str
) -> None:
    with disk.open() as store:
        store.put("k", torch.arange(10, dtype=torch.float32))
        store.put("other", numbered(1))
        store.put("more", numbered(1))
    misdescribe(disk, "k", note)
    for _ in range(2):  # and again, after a flush has kept it as it is
        with disk.open() as store:
            assert set(store) == {"k", "other", "more"}
            assert torch.equal(store.get("other"), numbered(1))
            assert (store.spec("k").nbytes, store.spec("k").unread) == (40, note)
            with pytest.raises(ts.IntegrityError, match="bytes of 'k' are: their description") as refused:
                store.get("k")
            assert refused.value.key == "k"
            for write in (False, True):
                with pytest.raises(ts.IntegrityError, match="'k'"):
                    store.lease("other", "k", tier="host", write=write)
                assert store.where("other") == ("host", "disk")
            store.put("more", numbered(2), replace=True)
            store.check()
        assert disk.backend.image["k"][0] == note


def test_a_key_whose_description_is_damaged_can_be_moved_renamed_replaced_and_dropped(disk: Disk) -> None:
    with disk.open() as store:
        store.put("a", numbered(1))
        store.put("b", numbered(1))
    misdescribe(disk, "a", "")
    misdescribe(disk, "b", "")
    with disk.open() as store:
        store.fetch("a", tier="host").result()
        store.rename({"a": "c"})
        with pytest.raises(ts.IntegrityError, match="'c'"):
            store.lease("c", tier="host")
        store.put("c", numbered(2), replace=True)
        store.drop("b")
        store.check()
    with disk.open() as store:
        assert set(store) == {"c"}
        assert torch.equal(store.get("c"), numbered(2))
        assert store.spec("c").unread is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3).t(),
        torch.zeros(()),
        torch.zeros(0, 5),
        torch.zeros(3, 0, 2).permute(2, 0, 1),
        torch.zeros(12).as_strided((1, 5), (7, 1)),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}",
)
def test_what_describes_the_bytes_is_believed(tensor: torch.Tensor) -> None:
    spec = describe(tensor)
    assert found_spec(to_text(spec), spec.nbytes) == spec


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, 3).t(), torch.zeros(()), torch.zeros(0, 5), torch.zeros(3, dtype=torch.float8_e4m3fn)],
    ids=str,
)
def test_a_spec_comes_back_from_its_text(tensor: torch.Tensor) -> None:
    spec = describe(tensor)
    assert from_text(to_text(spec)) == spec


def test_a_device_that_is_gone_becomes_the_cpu() -> None:
    spec = replace(describe(torch.zeros(2)), device=torch.device("cuda:97"))
    assert from_text(to_text(spec)) == TensorSpec(spec.shape, spec.dtype, spec.nbytes, spec.stride)


@pytest.mark.parametrize(
    "device",
    [
        *("privateuseone", "privateuseone:0", "hpu", "meta", "meta:0", "xla", "lazy", "vulkan", "mkldnn"),
        *("opengl", "cuda:127", "cuda:999", "nothing", "nn", "os", "fx", "_dynamo"),
    ],
)
def test_a_device_that_a_note_names_is_the_cpu_if_it_is_not_there_and_nothing_is_imported(
    device: str,
) -> None:
    before = set(sys.modules)
    spec = found_spec(said(device=device), 40)
    assert (spec.device, spec.unread, spec.shape) == (torch.device("cpu"), None, (10,))
    assert set(sys.modules) == before


@pytest.mark.parametrize("dtype", ["_dynamo", "_inductor", "onnx", "compiler"])
def test_a_dtype_that_a_note_names_imports_nothing(dtype: str) -> None:
    before = set(sys.modules)
    assert found_spec(said(dtype=dtype), 40).unread is not None
    assert set(sys.modules) == before


def test_every_dtype_that_can_be_put_comes_back_from_its_text() -> None:
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        if not str(dtype).startswith(("torch.q", "torch.bits")):
            spec = TensorSpec(torch.Size([3]), dtype, 3 * dtype.itemsize, (1,))
            assert from_text(to_text(spec)) == spec


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"dtype":"nothing","shape":[],"stride":[],"device":"cpu"}', '{"dtype":"float32"}', "7"],
)
def test_text_that_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(ts.BackendError, match="not the description of a tensor"):
        from_text(text)


def test_a_flush_that_changes_nothing_still_looks_whether_the_store_is_there(tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "store"), "durable": True}
    store = ts.Store(StoreConfig([TierConfig("disk", "files", "1MiB", options=options)]))
    store.put("k", numbered(1))
    store.flush()
    for file in (tmp_path / "store").glob("*.bin"):
        file.unlink()
    with pytest.raises(ts.BackendError, match="not there any more"):
        store.flush()
    store.close(flush=False)


def test_a_backend_that_fails_to_close_does_not_keep_the_others_open() -> None:
    closed: list[str] = []

    class Willing(MemoryBackend):
        def close(self) -> None:
            closed.append("host")

    class Stubborn(MemoryBackend):
        def close(self) -> None:
            closed.append("disk")
            raise ts.BackendError("stuck")

    tiers = [TierConfig("host", Willing(10), 10), TierConfig("disk", Stubborn(10, is_storage=True), 10)]
    store = ts.Store(StoreConfig(tiers))
    with pytest.raises(ts.BackendError, match="stuck"):
        store.close()
    store.close()
    assert closed == ["disk", "host"], "host memory last, each once"


def test_a_flush_that_finds_no_room_is_not_told_to_flush(disk: Disk) -> None:
    store = disk.open()
    store.put("k", numbered(0, CAPACITY * 3 // 4))
    store.flush()
    store.put("k", numbered(1, CAPACITY * 3 // 4), replace=True)
    with pytest.raises(ts.CapacityError, match="only for the last flush") as failure:
        store.flush()
    advice = str(failure.value).partition("only for the last flush. ")[2]
    assert advice.startswith("A flush needs room beside them: flush some keys at a time. Drop keys, or raise")
    crash(store)


def test_where_a_durable_store_is_can_be_read_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ts.StoreConfig.default("cpu", None, "16MB", "16MB", durable=True)  # and no path
    with ts.Store(config) as store:
        store.put("k", torch.zeros(3))
    with caplog.at_level(logging.INFO, "tierstore"), ts.Store(config):
        pass
    assert f"a durable store is open in {tmp_path / 'offload'}: 1 keys were found there" in caplog.messages
