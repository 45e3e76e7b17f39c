"""Files in several directories: where bytes go, who waits for whom, and what is said of each drive."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.files_disk import (
    PAGE,
    TIMEOUT_S,
    Gate,
    Nth,
    OnDrive,
    ScriptedKernel,
    blank,
    buffer,
    disk_taken,
    failing,
    finish,
    open_files,
    outcome,
)
from tierstore.errors import BackendError, CapacityError, ConfigError, StoreClosed, UsageError
from tierstore.units import GIB, KIB, MIB
from tierstore_backends.files.addressing.direct_io_probe import IoMode
from tierstore_backends.files.addressing.directory_locks import in_common, with_common_alignment
from tierstore_backends.files.addressing.drives import SPAN_BYTES, DriveFiles, reach, split_by_drive
from tierstore_backends.files.addressing.segments import Segments
from tierstore_backends.files.addressing.stripes import Stripes
from tierstore_backends.files.backend import FilesBackend
from tierstore_backends.files.engines.choice import Started, start
from tierstore_backends.files.engines.fan_out import DriveEngine
from tierstore_backends.files.engines.plain import PlainEngine
from tierstore_backends.files.io.io_request import Direction, FileSlot, Fragment, IoRequest, cut
from tierstore_backends.files.io.kernel import KERNEL
from tierstore_backends.files.io.syscalls import Syscalls
from tierstore_backends.files.options import DriveOption, FilesOptions, parse_options

BLOCK = 64 * KIB


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [tmp_path / "fast", tmp_path / "slow"]


def open_drives(
    folders: Sequence[Path],
    capacity_bytes: int = 8 * MIB,
    *,
    rates: Sequence[int] = (3, 1),
    syscalls: Syscalls = KERNEL,
    stride_bytes: int = 64 * KIB,
    quiet_s: float = 3600.0,
    **options: object,
) -> FilesBackend:
    paths = [{"path": folder, "bandwidth": rate} for folder, rate in zip(folders, rates, strict=False)]
    return FilesBackend(
        capacity_bytes,
        parse_options({"path": paths, "aio_block_size": BLOCK, **options}),
        syscalls=syscalls,
        segment_bytes=MIB,
        stride_bytes=stride_bytes,
        quiet_s=quiet_s,
    )


def written_bytes(files: FilesBackend) -> list[int]:
    return [drive.written_bytes for drive in files.io_stats.drives]


def taken(folders: Sequence[Path]) -> int:
    return sum(disk_taken(folder) for folder in folders)


def test_an_address_is_one_of_its_drive() -> None:
    extents = [(0, PAGE), (SPAN_BYTES + PAGE, SPAN_BYTES + 3 * PAGE), (5 * PAGE, 6 * PAGE)]
    assert split_by_drive(extents, 3) == [[(0, PAGE), (5 * PAGE, 6 * PAGE)], [(PAGE, 3 * PAGE)], []]
    assert reach(sorted(extents)) == [(0, 6 * PAGE), (SPAN_BYTES, SPAN_BYTES + 3 * PAGE)]


def test_a_file_is_found_by_its_drive_and_its_place_there(tmp_path: Path) -> None:
    segments = [
        Segments(tmp_path / name, os.O_RDWR, KERNEL, segment_bytes=MIB, stride_bytes=PAGE) for name in "ab"
    ]
    files = DriveFiles(segments)
    address = SPAN_BYTES + 3 * MIB + PAGE
    assert files.path(address) == tmp_path / "b" / "tierstore-scratch-0003.bin"
    assert files.indices([(address, address + MIB)]) == {(SPAN_BYTES // MIB) + 3, (SPAN_BYTES // MIB) + 4}


@pytest.mark.parametrize("nbytes", [1, PAGE, BLOCK, 4 * BLOCK, MIB, 4 * MIB - 5])
@pytest.mark.parametrize("engine", ["threads", "plain", "aiofiles"])
def test_bytes_come_back(folders: list[Path], nbytes: int, engine: str) -> None:
    with_engine = {"engine": engine} if engine != "plain" else {"enable_aio": False}
    files = open_drives(folders, **with_engine)
    slots = [files.reserve(nbytes) for _ in range(2)]
    finish(*(files.write(slot, buffer(nbytes, i)) for i, slot in enumerate(slots)))
    for i, slot in enumerate(slots):
        into = blank(nbytes)
        finish(files.read(slot, into))
        assert into.equal(buffer(nbytes, i))
    files.close()
    assert not any(folder.exists() for folder in folders)


def test_batches_over_drives_come_back(folders: list[Path]) -> None:
    files = open_drives(folders)
    sizes = [PAGE, 5 * BLOCK, 100, BLOCK, 20 * BLOCK]
    slots = [files.reserve(nbytes) for nbytes in sizes]
    finish(files.write_many(slots, [buffer(nbytes, i) for i, nbytes in enumerate(sizes)]))
    into = [blank(nbytes) for nbytes in sizes]
    finish(files.read_many(slots, into))
    assert all(got.equal(buffer(len(got), i)) for i, got in enumerate(into))
    files.close()


def test_bytes_follow_the_bandwidth_and_the_statistics_say_so(folders: list[Path]) -> None:
    files = open_drives(folders)
    slot = files.reserve(4 * MIB)
    finish(files.write(slot, buffer(4 * MIB)))
    stats = files.io_stats
    assert [drive.path for drive in stats.drives] == [str(folder) for folder in folders]
    assert [drive.bandwidth_bytes_per_s for drive in stats.drives] == [3, 1]
    assert [drive.live_bytes for drive in stats.drives] == [3 * MIB, MIB]
    assert written_bytes(files) == [3 * MIB, MIB]
    assert stats.written_bytes == 4 * MIB
    assert [disk_taken(folder) > 0 for folder in folders] == [True, True]
    files.close()


def test_one_directory_has_no_drives_to_speak_of(tmp_path: Path) -> None:
    files = open_files([tmp_path / "only"])
    assert files.io_stats.drives == ()
    files.close()


def test_everything_can_be_reserved_and_not_a_byte_more(folders: list[Path]) -> None:
    files = open_drives(folders, 4 * MIB)
    slots = [files.reserve(3 * MIB), files.reserve(MIB)]
    with pytest.raises(CapacityError, match="2 drives with 0 B free"):
        files.reserve(1)
    finish(*(files.write(slot, buffer(slot.nbytes, i)) for i, slot in enumerate(slots)))
    assert taken(folders) <= 4 * MIB
    finish(files.free(slots[0]))
    again = files.reserve(3 * MIB)
    finish(files.write(again, buffer(3 * MIB, 7)))
    assert taken(folders) <= 4 * MIB
    files.close()


def test_a_capacity_that_changes_is_shared_out_again(folders: list[Path]) -> None:
    files = open_drives(folders, 4 * MIB)
    slot = files.reserve(MIB)
    finish(files.write(slot, buffer(MIB)))
    files.resize(8 * MIB)
    more = files.reserve(7 * MIB)
    finish(files.write(more, buffer(7 * MIB, 1)))
    assert written_bytes(files) == [6 * MIB, 2 * MIB]
    with pytest.raises(CapacityError, match="cannot shrink"):
        files.resize(4 * MIB)
    finish(files.free(more))
    files.resize(MIB)
    assert taken(folders) <= MIB
    into = blank(MIB)
    finish(files.read(slot, into))
    assert into.equal(buffer(MIB))
    files.close()


def test_a_drive_that_hangs_holds_up_nobody_who_does_not_need_it(folders: list[Path]) -> None:
    gate = Gate("write", "read")
    kernel = ScriptedKernel()
    files = open_drives(folders, rates=(1, 1), syscalls=OnDrive(folders[1], kernel), threads=2)
    kernel.twist = gate
    slots = [files.reserve(BLOCK) for _ in range(32)]
    on_slow = [slot for slot in slots if slot.extents[0][0] >= SPAN_BYTES]
    on_fast = [slot for slot in slots if slot.extents[0][0] < SPAN_BYTES]
    assert len(on_slow) == len(on_fast) == 16
    hanging = [files.write(slot, buffer(BLOCK, 1)) for slot in on_slow]
    gate.wait_for_caller()
    finish(*(files.write(slot, buffer(BLOCK, 2)) for slot in on_fast))
    for slot in on_fast:
        finish(files.read(slot, blank(BLOCK)))
    assert not any(completion.is_done for completion in hanging)
    gate.open()
    finish(*hanging)
    files.close()


def test_a_transfer_ends_when_its_last_drive_has_ended(folders: list[Path]) -> None:
    gate = Gate("write")
    kernel = ScriptedKernel()
    files = open_drives(folders, syscalls=OnDrive(folders[1], kernel))
    kernel.twist = gate
    slot = files.reserve(8 * BLOCK)
    writing = files.write(slot, buffer(8 * BLOCK))
    gate.wait_for_caller()
    assert not writing.is_done
    gate.open()
    finish(writing)
    files.close()


def test_a_failing_drive_is_named_with_file_offset_and_reason_and_others_stay_readable(
    folders: list[Path],
) -> None:
    kernel = ScriptedKernel()
    files = open_drives(folders, rates=(1, 1), syscalls=OnDrive(folders[1], kernel))
    slots = [files.reserve(BLOCK) for _ in range(8)]
    whole = files.reserve(8 * BLOCK)
    finish(*(files.write(slot, buffer(BLOCK, i)) for i, slot in enumerate(slots)))
    finish(files.write(whole, buffer(8 * BLOCK, 99)))
    fail = failing(errno.EIO)
    kernel.twist = lambda kind, offset, nbytes: fail(nbytes + 0 * offset) if kind == "read" else None
    for i, slot in enumerate(slots):
        into = blank(BLOCK)
        error = outcome(files.read(slot, into))
        start = slot.extents[0][0]
        assert start % SPAN_BYTES < MIB  # in the first file
        if start < SPAN_BYTES:
            assert error is None
            assert into.equal(buffer(BLOCK, i))
        else:
            assert isinstance(error, BackendError)
            where = f"offset {start % SPAN_BYTES} of {folders[1] / 'tierstore-scratch-0000.bin'}"
            assert where in str(error)
            assert "failed: EIO" in str(error)
            assert "(drive 2 of 2)" in str(error)
    assert str(folders[1]) in str(outcome(files.read(whole, blank(8 * BLOCK))))
    kernel.twist = None
    into = blank(8 * BLOCK)
    finish(files.read(whole, into))
    assert into.equal(buffer(8 * BLOCK, 99))
    files.close()


def test_a_write_that_fails_on_one_drive_leaves_every_other_slot_as_it_was(folders: list[Path]) -> None:
    kernel = ScriptedKernel()
    files = open_drives(folders, syscalls=OnDrive(folders[1], kernel))
    kept, other = files.reserve(8 * BLOCK), files.reserve(8 * BLOCK)
    finish(files.write(kept, buffer(8 * BLOCK, 1)))
    fail = failing(errno.EIO)
    kernel.twist = lambda kind, offset, nbytes: fail(nbytes + 0 * offset) if kind == "write" else None
    error = outcome(files.write(other, buffer(8 * BLOCK, 2)))
    assert isinstance(error, BackendError)
    assert str(folders[1]) in str(error)
    kernel.twist = None
    into = blank(8 * BLOCK)
    finish(files.read(kept, into))
    assert into.equal(buffer(8 * BLOCK, 1))
    finish(files.write(other, buffer(8 * BLOCK, 3)))  # and may be written again
    files.close()


def full(kernel: ScriptedKernel) -> None:
    """Let the disk have no blocks left."""
    fail = failing(errno.ENOSPC)
    kernel.twist = lambda kind, offset, nbytes: fail(nbytes + 0 * offset) if kind == "write" else None


def test_what_a_full_drive_refuses_goes_to_the_others(
    folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    kernel = ScriptedKernel()
    files = open_drives(folders, 4 * MIB, rates=(1, 1), syscalls=OnDrive(folders[1], kernel))
    kept = files.reserve(8 * BLOCK)
    finish(files.write(kept, buffer(8 * BLOCK, 50)))
    full(kernel)
    slots = [files.reserve(nbytes) for nbytes in (MIB, BLOCK, BLOCK, 100, 2 * MIB - 4 * BLOCK)]
    with caplog.at_level(logging.WARNING):
        finish(*(files.write(slot, buffer(slot.nbytes, i)) for i, slot in enumerate(slots)))
    assert caplog.text.count(f"{folders[1]} is full") == 1
    for i, slot in enumerate(slots):
        into = blank(slot.nbytes)
        finish(files.read(slot, into))
        assert into.equal(buffer(slot.nbytes, i))
        assert all(start < SPAN_BYTES for start, _ in slot.extents)
    into = blank(8 * BLOCK)
    finish(files.read(kept, into))
    assert into.equal(buffer(8 * BLOCK, 50))

    # What is free in total is what it was, and can be reserved and written.
    rest = 4 * MIB - 8 * BLOCK - MIB - 2 * BLOCK - PAGE - (2 * MIB - 4 * BLOCK)
    slot = files.reserve(rest)
    finish(files.write(slot, buffer(rest, 9)))
    with pytest.raises(CapacityError):
        files.reserve(1)
    assert taken(folders) <= 4 * MIB
    files.close()


def test_a_full_drive_keeps_no_blocks_of_what_the_others_took_over(folders: list[Path]) -> None:
    kernel = ScriptedKernel()
    files = open_drives(
        folders, 4 * MIB, rates=(1, 1), syscalls=OnDrive(folders[1], kernel), stride_bytes=MIB
    )
    kept = files.reserve(2 * BLOCK)
    finish(files.write(kept, buffer(2 * BLOCK)))
    assert disk_taken(folders[1]) > 8 * BLOCK  # a stride
    full(kernel)
    rest = files.reserve(4 * MIB - 2 * BLOCK)
    finish(files.write(rest, buffer(rest.nbytes)))
    assert disk_taken(folders[1]) <= 2 * BLOCK
    assert taken(folders) <= 4 * MIB
    files.close()


def test_a_drive_that_was_full_takes_no_more_than_what_is_left_of_its_share(folders: list[Path]) -> None:
    kernel = ScriptedKernel()
    files = open_drives(
        folders, 4 * MIB, rates=(1, 1), syscalls=OnDrive(folders[1], kernel), stride_bytes=MIB
    )
    early = files.reserve(2 * BLOCK)  # a block on each, not yet written
    full(kernel)
    rest = files.reserve(4 * MIB - 2 * BLOCK)
    finish(files.write(rest, buffer(rest.nbytes)))
    kernel.twist = None
    finish(files.write(early, buffer(2 * BLOCK)))
    assert disk_taken(folders[1]) <= BLOCK
    assert taken(folders) <= 4 * MIB
    files.close()


def test_a_full_drive_gets_nothing_new_until_something_on_it_is_freed(folders: list[Path]) -> None:
    kernel = ScriptedKernel()
    files = open_drives(folders, 4 * MIB, rates=(1, 1), syscalls=OnDrive(folders[1], kernel))
    kept = files.reserve(8 * BLOCK)
    finish(files.write(kept, buffer(8 * BLOCK)))
    full(kernel)
    finish(files.write(files.reserve(8 * BLOCK), buffer(8 * BLOCK)))
    assert all(start < SPAN_BYTES for start, _ in files.reserve(8 * BLOCK).extents)
    finish(files.free(kept))
    kernel.twist = None
    assert any(start >= SPAN_BYTES for start, _ in files.reserve(8 * BLOCK).extents)
    files.close()


def test_slots_of_a_batch_that_met_a_full_drive_go_elsewhere_and_the_others_stay(folders: list[Path]) -> None:
    kernel = ScriptedKernel()
    files = open_drives(folders, rates=(1, 1), syscalls=OnDrive(folders[1], kernel))
    full(kernel)
    sizes = [BLOCK, BLOCK, 6 * BLOCK, 100, BLOCK, 3 * BLOCK + 1]
    slots = [files.reserve(nbytes) for nbytes in sizes]
    before = [slot.extents for slot in slots]
    finish(files.write_many(slots, [buffer(nbytes, i) for i, nbytes in enumerate(sizes)]))
    for slot, extents in zip(slots, before, strict=True):
        was_there = any(start >= SPAN_BYTES for start, _ in extents)
        assert (slot.extents != extents) == was_there
    into = [blank(nbytes) for nbytes in sizes]
    finish(files.read_many(slots, into))
    assert all(got.equal(buffer(len(got), i)) for i, got in enumerate(into))
    files.close()


def test_a_write_that_meets_a_full_drive_and_a_failing_one_fails(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    crowded, faulty = ScriptedKernel(), ScriptedKernel()
    syscalls = OnDrive(folders[1], crowded, OnDrive(folders[2], faulty))
    files = open_drives(folders, rates=(1, 1, 1), syscalls=syscalls)
    full(crowded)
    faulty.twist = Nth(1, failing(errno.EIO), "write")  # only once: a second attempt would not see it
    slot = files.reserve(3 * BLOCK)
    error = outcome(files.write(slot, buffer(3 * BLOCK)))
    assert isinstance(error, BackendError)
    assert "failed: E" in str(error)
    files.close()


def test_where_every_drive_is_full_the_write_fails_and_nothing_else(folders: list[Path]) -> None:
    kernel = ScriptedKernel()
    files = open_drives(folders, syscalls=kernel)
    full(kernel)
    slot = files.reserve(8 * BLOCK)
    error = outcome(files.write(slot, buffer(8 * BLOCK)))
    assert isinstance(error, BackendError)
    assert "ENOSPC" in str(error)
    kernel.twist = None
    finish(files.write(slot, buffer(8 * BLOCK, 4)))
    into = blank(8 * BLOCK)
    finish(files.read(slot, into))
    assert into.equal(buffer(8 * BLOCK, 4))
    files.close()


def test_a_directory_in_use_is_refused_and_the_others_are_given_up(folders: list[Path]) -> None:
    holder = open_files(folders[1])
    with pytest.raises(UsageError, match=str(folders[1])):
        open_drives(folders)
    assert not folders[0].exists()
    holder.close()
    open_drives(folders).close()


def test_a_directory_that_cannot_be_used_is_named(folders: list[Path]) -> None:
    folders[1].write_text("in the way")
    with pytest.raises(BackendError, match=str(folders[1])):
        open_drives(folders)
    assert not folders[0].exists()


def two_engines(tmp_path: Path) -> tuple[DriveEngine, list[PlainEngine], list[Fragment]]:
    """Return engines of two drives, and the fragments of a transfer over both."""
    engines = [PlainEngine([lambda batch: None]) for _ in range(2)]
    whole = DriveEngine(engines, Stripes([], PAGE, PAGE), folders=[tmp_path] * 2, segment_bytes=MIB)
    slot = FileSlot(2 * PAGE, [(0, PAGE), (SPAN_BYTES, SPAN_BYTES + PAGE)], None, PAGE)
    return whole, engines, cut(IoRequest(Direction.READ, [slot], [buffer(2 * PAGE)]), segment_bytes=MIB)


def test_a_drive_whose_engine_has_ended_fails_what_other_drives_have_begun(tmp_path: Path) -> None:
    whole, engines, fragments = two_engines(tmp_path)
    engines[1].close()
    transfer = fragments[0].transfer
    whole.submit(fragments)
    assert isinstance(transfer, IoRequest)
    assert isinstance(outcome(transfer.completion), StoreClosed)


def test_where_nothing_has_begun_it_is_said_at_once(tmp_path: Path) -> None:
    whole, _, fragments = two_engines(tmp_path)
    whole.close()
    with pytest.raises(StoreClosed):
        whole.submit(fragments)


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("tierstore-files")}


def test_an_engine_that_does_not_start_ends_those_of_other_drives(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = workers()

    def start_first(options: FilesOptions, *rest: object) -> Started:
        if options.path == folders[1]:
            raise BackendError("not here")
        return start(options, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("tierstore_backends.files.engines.fan_out.start", start_first)
    with pytest.raises(BackendError, match="not here"):
        open_drives(folders)
    assert workers() == before
    assert not any(folder.exists() for folder in folders)


def test_a_completion_s_callback_cannot_close_the_files_of_any_drive(folders: list[Path]) -> None:
    files = open_drives(folders, rates=(1, 1))
    for slot in [files.reserve(BLOCK) for _ in range(2)]:  # one on each drive
        refusals: list[BaseException] = []
        ended = threading.Event()

        def close(_: BaseException | None, into: list[BaseException], ended: threading.Event) -> None:
            try:
                files.close()
            except UsageError as error:
                into.append(error)
            ended.set()

        files.write(slot, buffer(BLOCK)).add_done_callback(
            lambda error, into=refusals, ended=ended: close(error, into, ended)  # type: ignore[misc]
        )
        assert ended.wait(TIMEOUT_S)
        assert len(refusals) == 1
    files.close()


def test_free_tails_are_cut_off_every_drive_when_it_has_been_quiet(folders: list[Path]) -> None:
    gate = Gate("truncate")
    kernel = ScriptedKernel()
    files = open_drives(folders, rates=(1, 1), syscalls=OnDrive(folders[1], kernel), quiet_s=0.0)
    slot = files.reserve(8 * BLOCK)
    finish(files.write(slot, buffer(8 * BLOCK)))
    kernel.twist = gate
    finish(files.free(slot))
    gate.wait_for_caller()  # the second drive's worker cuts
    gate.open()
    files.close()


def test_the_coarsest_alignment_holds_on_all_drives() -> None:
    modes = [
        IoMode(is_direct=True, alignment_bytes=n, memory_alignment_bytes=m) for n, m in ((512, 64), (4096, 4))
    ]
    assert [mode.alignment_bytes for mode in with_common_alignment(modes)] == [4096, 4096]
    assert in_common(modes) == IoMode(is_direct=True, alignment_bytes=4096, memory_alignment_bytes=64)


def test_after_close_nothing_moves(folders: list[Path]) -> None:
    before = workers()
    files = open_drives(folders)
    slot = files.reserve(8 * BLOCK)
    files.close()
    assert workers() == before
    with pytest.raises(StoreClosed):
        files.write(slot, buffer(8 * BLOCK))
    assert not any(folder.exists() for folder in folders)


def test_bandwidths_are_measured_where_none_are_given(folders: list[Path]) -> None:
    files = open_files(folders)
    assert all(drive.bandwidth_bytes_per_s > MIB for drive in files.io_stats.drives)
    files.close()


def test_drives_are_read_from_paths_and_from_mappings() -> None:
    options = parse_options({"path": ["/a", "/b"]})
    assert options.folders == (Path("/a"), Path("/b"))
    assert options.path == Path("/a")
    given = [{"path": "/a", "bandwidth": "2GB/s"}, {"path": "/b", "bandwidth": 5}]
    drives = parse_options({"path": given}).drives
    assert drives == (DriveOption(Path("/a"), 2 * GIB), DriveOption(Path("/b"), 5))
    assert parse_options({"path": ["/a"]}) == parse_options({"path": "/a"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "1 to 256 directories"),
        (["/a", "/a"], "/a is the same directory as /a"),
        (["/a", "/b/../a"], "the same directory as"),
        (["/a", "/b", "/a/deeper"], "/a/deeper is inside /a"),
        (["/a", ""], "the path of a directory"),
        ([{"path": "/a", "bandwidth": 1}, "/b"], "for all, or for none"),
        ([{"path": "/a", "bandwith": 1}, "/b"], "unknown key 'bandwith'"),
        ([{"path": "/a", "bandwidth": 0}, {"path": "/b", "bandwidth": 1}], "above 0"),
        ([{"path": "/a", "bandwidth": True}, {"path": "/b", "bandwidth": 1}], "bytes per second"),
        ([{"bandwidth": 1}, {"path": "/b", "bandwidth": 1}], "the path of a directory"),
    ],
)
def test_a_bad_list_of_drives_is_refused_with_what_is_accepted(given: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_options({"path": given})
