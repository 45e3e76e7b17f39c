"""Bytes that need no buffer between a device and a disk: who is asked, and what is said no to.

The GPU's own transfer is proven nowhere here: there is no GPU.  Its decision is.
"""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tierstore as ts
from tests.files_disk import PAGE, buffer, finish, open_files, outcome
from tierstore.errors import BackendError, UsageError
from tierstore.spi import Buffer, Completion, Slot
from tierstore_backends import device, memory
from tierstore_backends.files.addressing.direct_io_probe import probe
from tierstore_backends.files.addressing.segments import Segments
from tierstore_backends.files.durable import DurableFiles
from tierstore_backends.files.engines.gpu import GpuFiles, gpu_fault
from tierstore_backends.files.io.io_request import Direction, FileSlot, IoRequest, cut
from tierstore_backends.files.io.kernel import KERNEL
from tierstore_backends.files.options import Direct
from tierstore_backends.host import HostSlot


class Reaching(memory.MemoryBackend):
    """A medium behind I/O that reaches a device's memory where ``is_near``; it notes what it is given."""

    def __init__(self, *, is_near: bool, is_durable: bool = False) -> None:
        super().__init__(10_000, is_storage=True, is_durable=is_durable)
        self.capabilities = replace(self.capabilities, has_direct_paths=True)
        self.is_near = is_near
        self.asked: list[int] = []
        self.given: list[tuple[str, int]] = []

    def accepts(self, memory: torch.Tensor) -> bool:
        self.asked.append(memory.data_ptr())
        return self.is_near

    def read(self, slot: Slot, into: Buffer) -> Completion:
        self.given.append(("read", into.data_ptr()))
        return super().read(slot, into)

    def write(self, slot: Slot, source: Buffer) -> Completion:
        self.given.append(("write", source.data_ptr()))
        return super().write(slot, source)


def store_over(disk: Reaching) -> ts.Store:
    emulated = device.open_backend(capacity_bytes=10_000, options={"device": "emulated"})
    tiers = [ts.TierConfig("device", emulated, 10_000), ts.TierConfig("disk", disk, 10_000)]
    return ts.Store(ts.StoreConfig(tiers))


def down_and_up(store: ts.Store) -> tuple[int, int]:
    """Put, push down, bring up; return where the device's memory was each time."""
    store.put("k", torch.arange(1000, dtype=torch.int32), tier="device")
    with store.lease("k") as lease:
        first = lease.tensor.data_ptr()
    store.evict("k").result(10)
    with store.lease("k") as lease:
        assert lease.tensor.equal(torch.arange(1000, dtype=torch.int32))
        return first, lease.tensor.data_ptr()


def test_a_medium_that_reaches_the_device_is_given_its_memory_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Reaching(is_near=True)
    acquire = HostSlot.acquire

    def note(slot: HostSlot[object]) -> None:
        disk.given.append(("acquire", slot.memory.data_ptr()))
        acquire(slot)

    with store_over(disk) as store:
        monkeypatch.setattr(HostSlot, "acquire", note)
        first, second = down_and_up(store)
    write, read = disk.given.index(("write", first)), disk.given.index(("read", second))
    assert disk.given[write - 1] == ("acquire", first)
    assert disk.given[read - 1] == ("acquire", second)


def test_a_medium_that_says_no_is_given_a_buffer() -> None:
    disk = Reaching(is_near=False)
    with store_over(disk) as store:
        first, second = down_and_up(store)
    assert disk.asked == [first, second]
    (write, source), (read, into) = disk.given
    assert (write, read) == ("write", "read")
    assert (source, into) != (first, second)


def test_what_comes_from_host_memory_asks_nobody() -> None:
    disk = Reaching(is_near=True)
    host = memory.open_backend(capacity_bytes=10_000, options={})
    tiers = [ts.TierConfig("host", host, 10_000), ts.TierConfig("disk", disk, 10_000)]
    with ts.Store(ts.StoreConfig(tiers)) as store:
        store.put("k", torch.zeros(10))
        store.evict("k").result(10)
    assert disk.asked == []


def fake_kvikio(monkeypatch: pytest.MonkeyPatch, driver: types.ModuleType) -> None:
    kvikio = types.ModuleType("kvikio")
    monkeypatch.setitem(sys.modules, "kvikio", kvikio)
    monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_without_kvikio_nothing_goes_straight_and_the_reason_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert "pip install 'tierstore[gds]'" in str(gpu_fault(tmp_path))


def test_without_a_gpu_nothing_goes_straight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kvikio(monkeypatch, types.ModuleType("kvikio.cufile_driver"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_fault(tmp_path) == "torch sees no NVIDIA GPU"


@pytest.mark.parametrize("is_new", [True, False])
def test_a_cufile_that_goes_through_host_memory_itself_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_new: bool
) -> None:
    driver = types.ModuleType("kvikio.cufile_driver")
    vars(driver)["driver_open"] = lambda: None
    if is_new:
        vars(driver)["get"] = lambda name: {"is_gds_available": False}[name]
    else:
        vars(driver)["DriverProperties"] = lambda: types.SimpleNamespace(is_gds_available=False)
    fake_kvikio(monkeypatch, driver)
    assert "only through host memory" in str(gpu_fault(tmp_path))


def test_a_driver_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("no cuFile here")

    driver = types.ModuleType("kvikio.cufile_driver")
    vars(driver)["driver_open"] = refuse
    fake_kvikio(monkeypatch, driver)
    assert "no cuFile here" in str(gpu_fault(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_no_gpus_is_never_taken_straight(tmp_path: Path) -> None:
    files = open_files(tmp_path, checksum=False)
    assert files.capabilities.has_direct_paths
    assert not files.accepts(torch.zeros(PAGE, dtype=torch.uint8))
    with pytest.raises(UsageError, match=r"in host memory is needed, not .* on meta"):
        files.write(files.reserve(PAGE), torch.empty(PAGE, dtype=torch.uint8, device="meta"))
    files.close()


class HostFile:
    """What kvikio's file does, in host memory; short by ``missing`` bytes."""

    missing = 0

    def __init__(self, path: Path, flags: str) -> None:
        assert flags == "r+"
        self._file = path.open("r+b", buffering=0)

    def pread(self, buf: torch.Tensor, size: int, file_offset: int) -> HostFile:
        self._file.seek(file_offset)
        self._count = self._file.readinto(memoryview(buf.numpy())[:size])  # type: ignore[arg-type]
        return self

    def pwrite(self, buf: torch.Tensor, size: int, file_offset: int) -> HostFile:
        self._file.seek(file_offset)
        self._count = self._file.write(memoryview(buf.numpy())[:size])  # type: ignore[arg-type]
        return self

    def get(self) -> int:
        return (self._count or 0) - self.missing

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def gpu_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuFiles:
    """Return a backend's files of 64 KiB each, with a kvikio that works in host memory."""
    kvikio = types.ModuleType("kvikio")
    vars(kvikio)["CuFile"] = HostFile
    monkeypatch.setitem(sys.modules, "kvikio", kvikio)
    flags = probe(tmp_path, Direct.NEVER, KERNEL).flags
    segments = Segments(tmp_path, flags, KERNEL, segment_bytes=16 * PAGE, stride_bytes=PAGE)
    segments.limit(64 * PAGE, is_dense=True)
    return GpuFiles(tmp_path, segments)


def moved(files: GpuFiles, direction: Direction, whole: Buffer) -> BaseException | None:
    """Move a slot that lies across two files, piece by piece; return how it ended."""
    slot = FileSlot(len(whole), ((14 * PAGE, 19 * PAGE),), None, 2 * PAGE)
    transfer = IoRequest(direction, [slot], [whole])
    for piece in cut(transfer, segment_bytes=16 * PAGE):
        files.move(piece)
    transfer.finish()
    return outcome(transfer.completion)


def test_each_piece_goes_to_its_place(gpu_files: GpuFiles) -> None:
    source, into = buffer(5 * PAGE - 7), torch.zeros(5 * PAGE - 7, dtype=torch.uint8)
    assert moved(gpu_files, Direction.WRITE, source) is None
    assert moved(gpu_files, Direction.READ, into) is None
    assert into.equal(source)
    gpu_files.close()


def test_a_short_transfer_is_an_error_with_numbers(
    gpu_files: GpuFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostFile, "missing", 1)
    error = moved(gpu_files, Direction.WRITE, buffer(5 * PAGE))
    assert isinstance(error, BackendError)
    assert "8191 of 8192 bytes of a GPU" in str(error)
    gpu_files.close()


def test_a_failure_names_the_file_and_the_offset(
    gpu_files: GpuFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("cuFile says no")

    monkeypatch.setattr(HostFile, "get", fail)
    error = moved(gpu_files, Direction.READ, buffer(5 * PAGE))
    assert isinstance(error, BackendError)
    assert f"offset {14 * PAGE} of " in str(error)
    assert "cuFile says no" in str(error)
    gpu_files.close()


def test_with_checksums_nothing_goes_past_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuFiles, "accepts", lambda *_: True)
    summed, plain = open_files(tmp_path / "a"), open_files(tmp_path / "b", engine="plain", checksum=False)
    trusting = open_files(tmp_path / "c", checksum=False)
    memory = torch.zeros(1, dtype=torch.uint8)
    assert [files.accepts(memory) for files in (summed, plain, trusting)] == [False, False, True]
    for files in (summed, plain, trusting):
        finish(files.write(files.reserve(PAGE), buffer(PAGE)))
        files.close()


@pytest.mark.parametrize("codec", [None, "lz4"])
def test_a_durable_medium_is_reached_straight_where_nothing_is_packed(codec: str | None) -> None:
    disk = Reaching(is_near=True, is_durable=True)
    emulated = device.open_backend(capacity_bytes=10_000, options={"device": "emulated"})
    tiers = [ts.TierConfig("device", emulated, 10_000), ts.TierConfig("disk", disk, 10_000, codec=codec)]
    with ts.Store(ts.StoreConfig(tiers)) as store:
        first, second = down_and_up(store)
    assert disk.asked == ([first, second] if codec is None else [])
    assert codec is not None or disk.given == [("write", first), ("read", second)]


def test_durable_files_keep_all_that_they_can_do_in_a_store(tmp_path: Path) -> None:
    options = {"path": str(tmp_path), "durable": True}
    for codec, is_whole in ((None, True), ("lz4", False), (None, True)):
        tier = ts.TierConfig("disk", "files", "8MB", options=options, codec=codec)
        with ts.Store(ts.StoreConfig([tier])) as store:
            (files,) = store._engine.backends
            assert isinstance(files, DurableFiles) is is_whole
            assert files.capabilities.has_direct_paths is is_whole
            assert files.capabilities.has_batches
            assert (store.stats().tiers["disk"].codec is None) is is_whole
            store.put("k", torch.randn(1000), replace=True)  # nothing of which can be packed
