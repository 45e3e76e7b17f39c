"""What scratch files owe as a backend: bytes come back, room is counted, order is kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import xxhash

from tests.files_disk import (
    PAGE,
    TIMEOUT_S,
    Gate,
    ScriptedKernel,
    blank,
    buffer,
    disk_taken,
    finish,
    open_files,
    written,
)
from tierstore.errors import CapacityError, StoreClosed, UsageError
from tierstore.spi import Backend, Completion, Medium
from tierstore.units import KIB, MIB
from tierstore_backends.files import FilesBackend, open_backend
from tierstore_backends.files.directory.ownership import segment_name
from tierstore_backends.files.options import parse_options

SMALL = 32 * KIB


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FilesBackend]:
    opened = open_files(tmp_path, aio_block_size=64 * KIB)
    yield opened
    opened.close()


def test_the_entry_point_opens_a_storage_backend(tmp_path: Path) -> None:
    files: Backend = open_backend(capacity_bytes=MIB, options={"path": tmp_path, "aio_queue_depth": 7})
    capabilities = files.capabilities
    assert (capabilities.medium, capabilities.is_durable, capabilities.depth) == (Medium.STORAGE, False, 7)
    assert capabilities.alignment_bytes % os.statvfs(tmp_path).f_frsize == 0
    files.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"checksum": False}, {"enable_aio": False}, {"direct": False}, {"direct": False, "threads": 1}],
    ids=str,
)
@pytest.mark.parametrize("misalignment", [0, 64, 1])
def test_bytes_come_back(tmp_path: Path, options: dict[str, object], misalignment: int) -> None:
    files = FilesBackend(8 * MIB, parse_options({"path": tmp_path, "aio_block_size": 64 * KIB, **options}))
    for nbytes in (1, PAGE - 1, PAGE, PAGE + 1, 64 * KIB, 300 * KIB + 5):
        slot = files.reserve(nbytes)
        finish(files.write(slot, buffer(nbytes, 1, misalignment=misalignment)))
        into = blank(nbytes, misalignment=64 - misalignment)
        finish(files.read(slot, into))
        assert into.equal(buffer(nbytes, 1))
    files.close()


def test_a_fragment_longer_than_a_hash_step_is_summed_whole(tmp_path: Path) -> None:
    files = open_files(tmp_path, aio_block_size=4 * MIB)
    nbytes = 2 * MIB + 5
    slot = files.reserve(nbytes)
    finish(files.write(slot, buffer(nbytes, 1)))
    assert slot.sums == (xxhash.xxh3_64_intdigest(bytes(buffer(nbytes, 1).numpy())),)
    into = blank(nbytes)
    finish(files.read(slot, into))
    assert into.equal(buffer(nbytes, 1))
    files.close()


def test_a_read_fills_its_buffer_and_nothing_around_it(files: FilesBackend) -> None:
    (slot,) = written(files, 1, 5000)
    whole = torch.full((5000 + 2 * PAGE,), 77, dtype=torch.uint8)
    finish(files.read(slot, whole[PAGE : PAGE + 5000]))
    assert whole[:PAGE].eq(77).all()
    assert whole[PAGE + 5000 :].eq(77).all()


def test_what_fills_a_slot_up_on_disk_is_zeros_and_nobodys_bytes(tmp_path: Path) -> None:
    files = open_files(tmp_path, threads=1)
    large, small = files.reserve(3 * PAGE), files.reserve(100)
    finish(files.write(large, buffer(3 * PAGE, misalignment=1).fill_(0xFF)))  # bounced
    finish(files.write(small, buffer(100)))
    with (tmp_path / segment_name(0)).open("rb") as file:
        file.seek(3 * PAGE + 100)
        assert file.read(PAGE - 100) == bytes(PAGE - 100)
    files.close()


def test_a_slot_can_be_written_again(files: FilesBackend) -> None:
    (slot,) = written(files, 1, 5000)
    finish(files.write(slot, buffer(5000, 9)))
    into = blank(5000)
    finish(files.read(slot, into))
    assert into.equal(buffer(5000, 9))


def test_nothing_can_be_kept_and_read(files: FilesBackend) -> None:
    slot = files.reserve(0)
    assert files.write(slot, buffer(0)).is_done
    assert files.read(slot, buffer(0)).is_done
    assert files.free(slot).is_done


def test_a_slot_in_several_extents_comes_back(tmp_path: Path) -> None:
    files = open_files(tmp_path, 16 * PAGE)
    slots = written(files, 16, PAGE)
    for slot in slots[::2]:
        files.free(slot)
    nbytes = 8 * PAGE - 7
    scattered = files.reserve(nbytes)
    assert len(scattered.extents) == 8
    finish(files.write(scattered, buffer(nbytes, 50)))
    into = blank(nbytes)
    finish(files.read(scattered, into))
    assert into.equal(buffer(nbytes, 50))
    for i in range(1, 16, 2):
        finish(files.read(slots[i], into[:PAGE]))
        assert into[:PAGE].equal(buffer(PAGE, i))
    files.close()


def test_a_slot_across_files_comes_back(tmp_path: Path) -> None:
    files = open_files(tmp_path, MIB, segment_bytes=64 * KIB)
    nbytes = 200 * KIB + 3
    first, second = files.reserve(PAGE), files.reserve(nbytes)
    finish(files.write(first, buffer(PAGE, 1)), files.write(second, buffer(nbytes, 2)))
    into = blank(nbytes)
    finish(files.read(second, into))
    assert into.equal(buffer(nbytes, 2))
    assert len(list(tmp_path.glob("*.bin"))) == 4
    files.close()


def test_room_is_counted_and_refused_with_numbers(tmp_path: Path) -> None:
    files = open_files(tmp_path, 4 * PAGE)
    slots = [files.reserve(1) for _ in range(3)]
    with pytest.raises(CapacityError) as caught:
        files.reserve(PAGE + 1)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (2 * PAGE, PAGE)
    files.free(slots[0])
    assert len(files.reserve(PAGE + 1).extents) == 2
    files.close()


def test_disk_taken_never_exceeds_the_capacity(tmp_path: Path) -> None:
    capacity = MIB + 3 * PAGE + 17
    files = open_files(tmp_path, capacity, stride_bytes=64 * MIB)
    for _ in range(3):
        slots = written(files, 16, 64 * KIB)
        assert files.physical_bytes >= MIB
        assert disk_taken(tmp_path) <= capacity
        for slot in slots:
            files.free(slot)
    files.close()


def test_shrinking_gives_disk_back_and_keeps_what_is_live(tmp_path: Path) -> None:
    files = open_files(tmp_path, MIB, stride_bytes=MIB)
    slots = written(files, 16, 64 * KIB)
    for i in range(16):
        if i not in {3, 15}:
            files.free(slots[i])
    files.resize(128 * KIB)
    assert disk_taken(tmp_path) <= 128 * KIB
    into = blank(64 * KIB)
    for i in (3, 15):
        finish(files.read(slots[i], into))
        assert into.equal(buffer(64 * KIB, i))
    with pytest.raises(CapacityError):
        files.reserve(1)
    files.close()


def test_no_block_is_taken_ahead_for_addresses_outside_the_capacity(tmp_path: Path) -> None:
    files = open_files(tmp_path, MIB, stride_bytes=MIB)
    low, high = files.reserve(960 * KIB), files.reserve(64 * KIB)
    files.free(low)
    files.resize(64 * KIB)  # what is left lies at the end of a file that does not exist yet
    finish(files.write(high, buffer(64 * KIB)))
    assert disk_taken(tmp_path) <= 64 * KIB
    files.close()


def test_files_grow_a_stride_at_a_time_with_their_blocks(tmp_path: Path) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, MIB, syscalls=kernel, stride_bytes=256 * KIB)
    for _ in range(5):
        written(files, 1, 64 * KIB)
    assert [nbytes for _, nbytes in kernel.of_kind("allocate")] == [256 * KIB, 256 * KIB]
    assert kernel.of_kind("truncate") == []
    files.close()


def test_growing_makes_room(tmp_path: Path) -> None:
    files = open_files(tmp_path, PAGE)
    first = written(files, 1, PAGE)[0]
    files.resize(3 * PAGE)
    second = files.reserve(2 * PAGE)
    finish(files.write(second, buffer(2 * PAGE, 5)))
    into = blank(PAGE)
    finish(files.read(first, into))
    assert into.equal(buffer(PAGE, 0))
    files.close()


def test_what_is_written_while_the_tail_is_cut_is_not_cut_off(tmp_path: Path) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, MIB, syscalls=kernel, quiet_s=0.0)
    slots = written(files, 16, 64 * KIB)
    gate = Gate("truncate")
    kernel.twist = gate
    for slot in slots:
        files.free(slot)
    gate.wait_for_caller()
    kernel.forget()
    slot = files.reserve(64 * KIB)
    writing = files.write(slot, buffer(64 * KIB, 3))
    assert kernel.of_kind("write") == []
    gate.open()
    finish(writing)
    into = blank(64 * KIB)
    finish(files.read(slot, into))
    assert into.equal(buffer(64 * KIB, 3))
    files.close()


def test_neighbours_that_wait_are_moved_in_one_call(tmp_path: Path) -> None:
    gate = Gate("write", "read")
    kernel = ScriptedKernel()
    files = open_files(tmp_path, 8 * MIB, syscalls=kernel, threads=1, aio_block_size=MIB)
    first, *slots = [files.reserve(SMALL) for _ in range(129)]
    kernel.twist = gate
    kernel.forget()
    writing = [files.write(first, buffer(SMALL))]
    gate.wait_for_caller()
    writing += [files.write(slot, buffer(SMALL, i)) for i, slot in enumerate(slots)]
    gate.open()
    finish(*writing)
    assert [nbytes for _, nbytes in kernel.of_kind("write")] == [SMALL, MIB, MIB, MIB, MIB]

    gate = Gate("read")
    kernel.twist = gate
    into = [blank(SMALL) for _ in slots]
    reading = [files.read(first, blank(SMALL))]
    gate.wait_for_caller()
    # Backwards and at odds with the order of the write: neighbours are found all the same.
    backwards = list(reversed(list(zip(slots, into, strict=True))))
    reading += [files.read(slot, each) for slot, each in backwards[1::2] + backwards[::2]]
    gate.open()
    finish(*reading)
    assert max(nbytes for _, nbytes in kernel.of_kind("read")) == MIB
    assert len(kernel.of_kind("read")) <= 7
    assert all(each.equal(buffer(SMALL, i)) for i, each in enumerate(into))
    files.close()


def test_memory_that_the_disk_cannot_use_is_not_tried_first(tmp_path: Path) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel)
    slot = files.reserve(64 * KIB)
    kernel.forget()
    finish(files.write(slot, buffer(64 * KIB, misalignment=1)))
    finish(files.read(slot, blank(64 * KIB, misalignment=1)))
    assert len(kernel.of_kind("write")) == len(kernel.of_kind("read")) == 1
    files.close()


def test_a_call_moves_at_most_a_block(tmp_path: Path) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, aio_block_size=64 * KIB)
    (slot,) = written(files, 1, MIB + 5)
    finish(files.read(slot, blank(MIB + 5)))
    for kind in ("write", "read"):
        sizes = [nbytes for _, nbytes in kernel.of_kind(kind)][-17:]
        assert sorted(sizes) == [PAGE] + [64 * KIB] * 16
    files.close()


def test_one_transfer_is_spread_over_all_threads(tmp_path: Path) -> None:
    everybody = threading.Barrier(3, timeout=TIMEOUT_S)
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, threads=3, aio_block_size=64 * KIB)
    slot = files.reserve(192 * KIB)

    def meet(kind: str, offset: int, nbytes: int) -> None:
        del offset, nbytes
        if kind == "write":
            everybody.wait()

    kernel.twist = meet
    finish(files.write(slot, buffer(192 * KIB)))
    files.close()


def test_the_queue_depth_bounds_the_fragments_under_way(tmp_path: Path) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, threads=4, aio_block_size=64 * KIB, aio_queue_depth=1)
    kernel.forget()
    written(files, 8, 200 * KIB)
    assert kernel.most_active == 1
    assert len(kernel.of_kind("write")) == 32  # and none was merged
    files.close()


def test_without_aio_the_caller_moves_the_bytes_before_the_call_returns(tmp_path: Path) -> None:
    movers: set[int] = set()
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, enable_aio=False, aio_block_size=64 * KIB)

    def note(kind: str, offset: int, nbytes: int) -> None:
        del kind, offset, nbytes
        movers.add(threading.get_ident())

    kernel.twist = note
    slot = files.reserve(300 * KIB)
    assert files.write(slot, buffer(300 * KIB)).is_done
    assert files.read(slot, blank(300 * KIB)).is_done
    assert movers == {threading.get_ident()}
    assert files.capabilities.depth == 1
    files.close()


def test_a_callback_may_use_the_backend_again(tmp_path: Path) -> None:
    files = open_files(tmp_path, threads=1)
    slot = files.reserve(PAGE)
    into = blank(PAGE)
    ended = Completion()

    def free_it(error: BaseException | None) -> None:
        files.free(slot)
        ended.complete(error)

    def read_it(error: BaseException | None) -> None:
        assert error is None
        files.read(slot, into).add_done_callback(free_it)

    files.write(slot, buffer(PAGE, 4)).add_done_callback(read_it)
    finish(ended)
    assert into.equal(buffer(PAGE, 4))
    files.close()


def test_a_callback_that_fails_harms_nobody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate("write")
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, threads=1)
    kernel.twist = gate
    slots = [files.reserve(PAGE) for _ in range(3)]

    def fail(error: BaseException | None) -> None:
        raise ValueError(f"somebody's bug, after {error}")

    writing = [files.write(slot, buffer(PAGE)) for slot in slots]
    writing[1].add_done_callback(fail)
    gate.open()
    finish(writing[0], writing[2])
    finish(files.read(slots[2], blank(PAGE)))
    assert "somebody's bug" in caplog.text
    files.close()


@pytest.mark.parametrize("enable_aio", [True, False])
def test_after_close_every_call_says_so(tmp_path: Path, *, enable_aio: bool) -> None:
    files = open_files(tmp_path, enable_aio=enable_aio)
    (slot,) = written(files, 1, PAGE)
    files.close()
    files.close()
    for call in (
        lambda: files.reserve(1),
        lambda: files.read(slot, blank(PAGE)),
        lambda: files.write(slot, buffer(PAGE)),
        lambda: files.free(slot),
        lambda: files.resize(0),
    ):
        with pytest.raises(StoreClosed):
            call()


def test_a_callback_cannot_close(tmp_path: Path) -> None:
    gate = Gate("write")
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel)
    kernel.twist = gate
    refusals: list[BaseException] = []

    def close(_: BaseException | None) -> None:
        try:
            files.close()
        except UsageError as refusal:
            refusals.append(refusal)

    writing = files.write(files.reserve(PAGE), buffer(PAGE))
    writing.add_done_callback(close)
    gate.open()
    finish(writing)
    assert len(refusals) == 1
    finish(files.write(files.reserve(PAGE), buffer(PAGE)))
    files.close()


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(PAGE - 1, dtype=torch.uint8),
        torch.zeros(PAGE + 1, dtype=torch.uint8),
        torch.zeros(PAGE, dtype=torch.int8),
        torch.zeros((1, PAGE), dtype=torch.uint8),
        torch.zeros(2 * PAGE, dtype=torch.uint8)[::2],
        torch.zeros(PAGE, dtype=torch.uint8, device="meta"),
    ],
    ids=["short", "long", "signed", "matrix", "strided", "meta"],
)
def test_a_buffer_that_does_not_fit_is_refused_and_nothing_changes(
    files: FilesBackend, wrong: torch.Tensor
) -> None:
    (slot,) = written(files, 1, PAGE)
    for call in (files.read, files.write):
        with pytest.raises(UsageError, match="a buffer of 4096 contiguous"):
            call(slot, wrong)
    into = blank(PAGE)
    finish(files.read(slot, into))
    assert into.equal(buffer(PAGE, 0))


def test_a_slot_without_bytes_cannot_be_read(files: FilesBackend) -> None:
    slot = files.reserve(PAGE)
    with pytest.raises(UsageError, match="holds no bytes"):
        files.read(slot, blank(PAGE))


def test_a_freed_slot_is_refused(files: FilesBackend) -> None:
    (slot,) = written(files, 1, PAGE)
    files.free(slot)
    calls: list[Callable[[], object]] = [
        lambda: files.free(slot),
        lambda: files.read(slot, blank(PAGE)),
        lambda: files.write(slot, buffer(PAGE)),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="was freed before"):
            call()


def test_another_backends_slot_is_refused(files: FilesBackend, tmp_path: Path) -> None:
    other = open_files(tmp_path / "other")
    slot = other.reserve(PAGE)
    with pytest.raises(UsageError, match="is not a slot of these scratch files"):
        files.free(slot)
    other.close()


def test_a_negative_slot_is_refused(files: FilesBackend) -> None:
    with pytest.raises(UsageError, match="-1 bytes"):
        files.reserve(-1)


def test_a_batch_of_an_empty_slot_and_one_of_two_fragments_keeps_each_ones_sums(files: FilesBackend) -> None:
    slots, sources = [files.reserve(96 * KIB), files.reserve(0)], [buffer(96 * KIB), buffer(0)]
    finish(files.write_many(slots, sources))
    into = [blank(96 * KIB), blank(0)]
    finish(files.read_many(slots, into))
    assert into[0].equal(sources[0])
