"""Scratch files when the kernel says no: at any call, in any way, only what was hit is harmed."""

from __future__ import annotations

import errno
import gc
import logging
import re
from pathlib import Path

import pytest
import torch

from tests.files_disk import (
    EVERY_ENGINE,
    PAGE,
    Gate,
    Nth,
    ScriptedKernel,
    Twist,
    blank,
    buffer,
    disk_taken,
    failing,
    finish,
    open_files,
    outcome,
)
from tests.files_story import Story, at_every_call, no_error
from tierstore.errors import BackendError, IntegrityError, InvariantError, UsageError
from tierstore.units import KIB, MIB
from tierstore_backends.files import FilesBackend
from tierstore_backends.files.directory.ownership import segment_name
from tierstore_backends.files.io.io_request import FileSlot
from tierstore_backends.files.io.kernel import KERNEL

BLOCK = 16 * KIB
every_engine = pytest.mark.parametrize("engine", EVERY_ENGINE)


@pytest.mark.parametrize("direct", ["auto", False])
@every_engine
def test_an_io_error_at_any_call_harms_only_the_transfer_that_met_it(
    tmp_path: Path, engine: str, direct: object
) -> None:
    def one_named_error_at_most(story: Story) -> None:
        assert len(story.errors) <= 1
        for error in story.errors:
            assert isinstance(error, BackendError)
            assert not error.transient
            assert re.search(r"(reading|writing) \d+ bytes at offset \d+ of .*\.bin failed: EIO", str(error))

    calls = at_every_call(
        tmp_path, failing(errno.EIO), check=one_named_error_at_most, engine=engine, direct=direct
    )
    assert calls > 20


@every_engine
@pytest.mark.parametrize("most", [0, PAGE + 511, 3 * PAGE])
def test_a_short_transfer_at_any_call_is_continued(tmp_path: Path, most: int, engine: str) -> None:
    calls = at_every_call(tmp_path, lambda _: most, "read", "write", check=no_error, engine=engine)
    assert calls > 20


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN, errno.EINVAL])
@every_engine
def test_what_another_try_can_mend_is_mended_at_any_call(tmp_path: Path, code: int, engine: str) -> None:
    at_every_call(tmp_path, failing(code), "read", "write", check=no_error, engine=engine)


@every_engine
def test_a_write_that_finds_the_disk_full_at_any_call_is_tried_again_with_more_room(
    tmp_path: Path, engine: str
) -> None:
    at_every_call(tmp_path, failing(errno.ENOSPC), "write", check=no_error, engine=engine)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EIO])
def test_files_grow_without_blocks_where_none_can_be_allocated_ahead(tmp_path: Path, code: int) -> None:
    calls = at_every_call(tmp_path, failing(code), "allocate", check=no_error)
    assert calls >= 2


@pytest.mark.parametrize(
    ("code", "is_transient"), [(errno.EAGAIN, True), (errno.EBUSY, True), (errno.EIO, False)]
)
def test_an_error_says_whether_a_retry_can_help(tmp_path: Path, code: int, *, is_transient: bool) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel)
    slot = files.reserve(5000)
    kernel.twist = always("write", code)
    error = outcome(files.write(slot, buffer(5000)))
    kernel.twist = None
    assert isinstance(error, BackendError)
    assert error.transient == is_transient
    assert isinstance(error.__cause__, OSError)
    assert str(error) == (
        f"writing 5000 bytes at offset 0 of {tmp_path / segment_name(0)} failed: "
        f"{errno.errorcode[code]} (scripted for 8192 bytes at 0)"
    )
    finish(files.write(slot, buffer(5000)))
    files.close()


def test_a_bad_place_on_disk_fails_its_own_slot_and_none_that_moved_with_it(tmp_path: Path) -> None:
    bad = 5 * PAGE

    def refuse_the_bad(kind: str, offset: int, nbytes: int) -> None:
        gate(kind, offset, nbytes)
        if kind == "write" and offset <= bad < offset + nbytes:
            raise OSError(errno.EIO, "bad sector")

    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, threads=1)
    slots = [files.reserve(PAGE) for _ in range(16)]
    kernel.twist = gate = Gate("write", "read")
    kernel.twist = refuse_the_bad
    writing = [files.write(slot, buffer(PAGE, i)) for i, slot in enumerate(slots)]
    gate.open()
    errors = [outcome(completion) for completion in writing]
    assert max(nbytes for _, nbytes in kernel.of_kind("write")) > PAGE
    assert [i for i, error in enumerate(errors) if error is not None] == [5]
    kernel.twist = None
    into = blank(PAGE)
    for i, slot in enumerate(slots):
        if i != 5:
            finish(files.read(slot, into))
            assert into.equal(buffer(PAGE, i))
    files.close()


def test_one_bad_fragment_fails_the_whole_transfer_once(tmp_path: Path) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, aio_block_size=BLOCK)
    slot = files.reserve(10 * BLOCK)
    kernel.twist = always("write", errno.EIO)
    assert isinstance(outcome(files.write(slot, buffer(10 * BLOCK))), BackendError)
    assert len(kernel.of_kind("write")) >= 10
    files.close()


@pytest.mark.parametrize("had_bytes", [False, True])
def test_a_slot_whose_write_failed_holds_no_bytes_until_it_is_written_again(
    tmp_path: Path, *, had_bytes: bool
) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel)
    slot = files.reserve(PAGE)
    if had_bytes:
        finish(files.write(slot, buffer(PAGE, 1)))
    kernel.twist = always("write", errno.EIO)
    assert isinstance(outcome(files.write(slot, buffer(PAGE, 2))), BackendError)
    with pytest.raises(UsageError, match="holds no bytes"):
        files.read(slot, blank(PAGE))
    kernel.twist = None
    finish(files.write(slot, buffer(PAGE, 3)))
    into = blank(PAGE)
    finish(files.read(slot, into))
    assert into.equal(buffer(PAGE, 3))
    files.close()


def always(kind: str, code: int) -> Twist:
    def fail(each: str, offset: int, nbytes: int) -> None:
        if each == kind:
            raise OSError(code, f"scripted for {nbytes} bytes at {offset}")

    return fail


def test_a_call_that_never_moves_anything_is_given_up(tmp_path: Path) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel)
    slot = files.reserve(PAGE)
    kernel.twist = lambda kind, _offset, _nbytes: 100 if kind == "write" else None
    error = outcome(files.write(slot, buffer(PAGE)))
    assert isinstance(error, BackendError)
    assert "and then no more" in str(error)
    files.close()


@pytest.mark.parametrize("direct", ["auto", False])
def test_a_file_that_ends_inside_a_slot_is_an_error(tmp_path: Path, direct: object) -> None:
    files = open_files(tmp_path, direct=direct, checksum=False)
    slots = [files.reserve(2 * PAGE) for _ in range(2)]
    finish(*(files.write(slot, buffer(2 * PAGE, i)) for i, slot in enumerate(slots)))
    with (tmp_path / segment_name(0)).open("r+b") as file:
        file.truncate(3 * PAGE)
    into = blank(2 * PAGE)
    error = outcome(files.read(slots[1], into))
    assert isinstance(error, BackendError)
    assert "4096 of 8192 bytes, and then no more" in str(error)
    finish(files.read(slots[0], into))
    assert into.equal(buffer(2 * PAGE, 0))
    files.close()


@pytest.mark.parametrize("flipped", [0, PAGE, 5 * BLOCK + 6])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, flipped: int) -> None:
    files = open_files(tmp_path, aio_block_size=BLOCK)
    first, slot = files.reserve(PAGE), files.reserve(5 * BLOCK + 7)
    finish(files.write(first, buffer(PAGE, 1)), files.write(slot, buffer(5 * BLOCK + 7, 2)))
    flip(tmp_path / segment_name(0), PAGE + flipped)
    into = blank(5 * BLOCK + 7)
    error = outcome(files.read(slot, into))
    assert isinstance(error, IntegrityError)
    offset = PAGE + flipped - flipped % BLOCK
    nbytes = min(BLOCK, 5 * BLOCK + 7 - (flipped - flipped % BLOCK))
    assert f"{nbytes} bytes at offset {offset} of {tmp_path / segment_name(0)} are not" in str(error)
    assert len(set(re.findall("[0-9a-f]{16}", str(error)))) == 2
    finish(files.read(first, into[:PAGE]))
    assert into[:PAGE].equal(buffer(PAGE, 1))
    files.close()


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_beyond_the_bytes_of_a_slot_is_nobodys(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    slot = files.reserve(100)
    finish(files.write(slot, buffer(100)))
    flip(tmp_path / segment_name(0), 100)
    finish(files.read(slot, blank(100)))
    files.close()


def test_without_checksums_a_flipped_bit_comes_through(tmp_path: Path) -> None:
    files = open_files(tmp_path, checksum=False)
    slot = files.reserve(100)
    finish(files.write(slot, buffer(100)))
    flip(tmp_path / segment_name(0), 50)
    into = blank(100)
    finish(files.read(slot, into))
    assert into.ne(buffer(100)).nonzero().tolist() == [[50]]
    files.close()


@every_engine
def test_an_unforeseen_failure_still_ends_the_transfer(tmp_path: Path, engine: str) -> None:
    def break_down(kind: str, offset: int, nbytes: int) -> None:
        raise RuntimeError(f"a bug at {kind} of {nbytes} at {offset}")

    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, threads=1, engine=engine)
    slot = files.reserve(PAGE)
    kernel.twist = break_down
    error = outcome(files.write(slot, buffer(PAGE)))
    assert isinstance(error, InvariantError)
    assert "a bug at" in str(error)
    kernel.twist = None
    finish(files.write(slot, buffer(PAGE)))
    files.close()


def test_an_error_keeps_nothing_alive_that_refers_to_the_buffer(tmp_path: Path) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, aio_block_size=BLOCK)
    slot = files.reserve(3 * BLOCK)
    kernel.twist = always("write", errno.EINVAL)  # tried again and bounced: the longest way
    error = outcome(files.write(slot, buffer(3 * BLOCK)))
    chain = error
    while chain is not None:
        assert chain.__traceback__ is None
        chain = chain.__cause__ or chain.__context__
    files.close()


def test_a_failed_cut_fails_the_resize_and_the_next_one_works(tmp_path: Path) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, MIB, syscalls=kernel)
    slots = [files.reserve(64 * KIB) for _ in range(16)]
    finish(*(files.write(slot, buffer(64 * KIB, i)) for i, slot in enumerate(slots)))
    for slot in slots[1:]:
        files.free(slot)
    kernel.twist = Nth(1, failing(errno.EIO), "truncate")
    with pytest.raises(BackendError, match="could not be made smaller"):
        files.resize(512 * KIB)
    files.resize(256 * KIB)
    assert disk_taken(tmp_path) <= 256 * KIB
    into = blank(64 * KIB)
    finish(files.read(slots[0], into))
    assert into.equal(buffer(64 * KIB, 0))
    files.close()


def full_but_for_a_hole(tmp_path: Path, kernel: ScriptedKernel) -> tuple[FilesBackend, FileSlot]:
    """Return files of 64 KiB whose first half is free and whose second half is live."""
    files = open_files(tmp_path, 64 * KIB, syscalls=kernel)
    low, high = files.reserve(32 * KIB), files.reserve(32 * KIB)
    finish(files.write(low, buffer(32 * KIB, 1)), files.write(high, buffer(32 * KIB, 2)))
    files.free(low)
    return files, high


def test_a_file_system_that_cannot_punch_holes_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = ScriptedKernel()
    files, _ = full_but_for_a_hole(tmp_path, kernel)
    kernel.twist = always("punch", errno.EOPNOTSUPP)
    with caplog.at_level(logging.WARNING, "tierstore.files"):
        files.resize(32 * KIB)
    assert "cannot give back 32.0 KiB" in caplog.text
    files.close()


def test_a_hole_that_cannot_be_punched_fails_the_resize(tmp_path: Path) -> None:
    kernel = ScriptedKernel()
    files, high = full_but_for_a_hole(tmp_path, kernel)
    kernel.twist = always("punch", errno.EIO)
    with pytest.raises(BackendError, match="could not be made smaller"):
        files.resize(32 * KIB)
    finish(files.read(high, blank(32 * KIB)))
    files.close()


def test_a_tail_that_cannot_be_cut_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, MIB, syscalls=kernel, quiet_s=0.0, threads=1)
    slots = [files.reserve(64 * KIB) for _ in range(4)]
    finish(*(files.write(slot, buffer(64 * KIB, i)) for i, slot in enumerate(slots)))
    gate = Gate("truncate")

    def fail_at_the_gate(kind: str, offset: int, nbytes: int) -> None:
        gate(kind, offset, nbytes)
        if kind == "truncate":
            raise OSError(errno.EIO, "scripted")

    kernel.twist = fail_at_the_gate
    for slot in slots[1:]:
        files.free(slot)
    gate.wait_for_caller()
    into = blank(64 * KIB)
    reading = files.read(slots[0], into)
    gate.open()
    finish(reading)
    assert into.equal(buffer(64 * KIB, 0))
    assert "could not be given back" in caplog.text
    files.close()


def test_the_kernels_own_refusals_come_as_errors() -> None:
    for call in (KERNEL.allocate, KERNEL.punch):
        with pytest.raises(OSError, match="Bad file descriptor") as caught:
            call(-1, 0, PAGE)
        assert caught.value.errno == errno.EBADF


def refuse_direct_io(kind: str, offset: int, nbytes: int) -> None:
    del offset, nbytes
    if kind in {"read", "write"}:
        raise OSError(errno.EINVAL, "no direct I/O here")


def test_a_directory_that_refuses_direct_io_is_used_through_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = ScriptedKernel(refuse_direct_io)
    files = open_files(tmp_path, syscalls=kernel)
    kernel.twist = None
    assert f"{tmp_path} refuses direct I/O" in caplog.text
    slot = files.reserve(5000)
    finish(files.write(slot, buffer(5000, misalignment=3)))
    into = blank(5000, misalignment=1)
    finish(files.read(slot, into))
    assert into.equal(buffer(5000))
    files.close()


def test_direct_io_that_is_demanded_and_refused_fails_the_opening_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="refuses direct I/O, and direct=True demands it"):
        open_files(tmp_path / "scratch", syscalls=ScriptedKernel(refuse_direct_io), direct=True)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_at_opening_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"scratch files cannot be written in .*scratch"):
        open_files(tmp_path / "scratch", syscalls=ScriptedKernel(always("write", errno.EIO)))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_gives_back_other_bytes_is_not_used_directly(tmp_path: Path) -> None:
    class Forgetful(ScriptedKernel):
        def read(self, fd: int, vector: object, offset: int) -> int:
            count = super().read(fd, vector, offset)  # type: ignore[arg-type]
            torch.frombuffer(vector[0], dtype=torch.uint8).fill_(0)  # type: ignore[index]
            return count

    with pytest.raises(BackendError, match="refuses direct I/O"):
        open_files(tmp_path, syscalls=Forgetful(), direct=True)


def test_forgetting_the_backend_while_bytes_move_loses_none_of_them(tmp_path: Path) -> None:
    gate = Gate("write")
    kernel = ScriptedKernel()
    files = open_files(tmp_path / "scratch", syscalls=kernel, aio_block_size=BLOCK)
    kernel.twist = gate
    writing = files.write(files.reserve(10 * BLOCK), buffer(10 * BLOCK))
    del files
    gc.collect()
    gate.open()
    finish(writing)
