"""Parts of what lies in files: how many calls they are, what is counted, and what fails."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.files_disk import (
    EVERY_ENGINE,
    PAGE,
    Gate,
    Nth,
    ScriptedKernel,
    blank,
    buffer,
    failing,
    finish,
    open_durable,
    open_files,
    outcome,
    written,
)
from tierstore.errors import BackendError, IntegrityError, UsageError
from tierstore.spi import PartialError, Record
from tierstore.units import MIB
from tierstore_backends.files.io.io_request import Direction, FileSlot, FileSlotState, IoRequest, cut_parts


def expected(parts: list[tuple[int, int]], nbytes: int, whole_bytes: int) -> torch.Tensor:
    """Return what (slot, begin) of `written` slots has."""
    return torch.cat([buffer(whole_bytes, slot)[begin : begin + nbytes] for slot, begin in parts])


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_only_the_parts_are_read(tmp_path: Path, engine: str) -> None:
    """A block of 1 MiB of which eight pages are wanted costs eight pages."""
    files = open_files(tmp_path, engine=engine)
    slots = written(files, 2, MIB)
    before = files.io_stats
    parts = [(slot, page * PAGE) for page in (3, 90, 91, 250) for slot in (1, 0)]
    into = blank(8 * PAGE)
    finish(files.read_parts([slots[n] for n, _ in parts], [begin for _, begin in parts], PAGE, into))
    after = files.io_stats
    assert into.equal(expected(parts, PAGE, MIB))
    assert after.read_bytes - before.read_bytes == 8 * PAGE
    assert after.fragments - before.fragments == 8
    assert after.unchecked_bytes - before.unchecked_bytes == 8 * PAGE
    files.close()


@pytest.mark.parametrize("engine", EVERY_ENGINE[:-1])
def test_parts_that_touch_in_a_file_are_read_in_one_call(tmp_path: Path, engine: str) -> None:
    gate = Gate("read")
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, engine=engine, threads=1, aio_queue_depth=64)
    (slot, other) = written(files, 2, MIB)
    kernel.twist = gate
    if engine == "io_uring":  # where nothing blocks, everything waits at once
        gate.open()
    first = files.read_parts([other], [0], PAGE, blank(PAGE))  # holds the worker up
    kernel.forget()
    into = blank(32 * PAGE)
    order = random.Random(1).sample(range(0, 32 * PAGE, PAGE), 32)
    read = files.read_parts([slot] * 32, order, PAGE, into)
    gate.open()
    finish(first, read)
    assert into.equal(torch.cat([buffer(MIB, 0)[begin : begin + PAGE] for begin in order]))
    assert (32 * PAGE) in {nbytes for _, nbytes in kernel.of_kind("read")}
    files.close()


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_a_part_whose_call_fails_fails_alone(tmp_path: Path, engine: str) -> None:
    """And is there when it is asked for again."""
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, engine=engine)
    slots = written(files, 1, MIB)
    begins = [0, 7 * PAGE, 20 * PAGE, 50 * PAGE]
    for n in range(1, 5):
        kernel.twist = Nth(n, failing(errno.EIO), "read")
        into = blank(4 * PAGE)
        error = outcome(files.read_parts(slots * 4, begins, PAGE, into))
        kernel.twist = None
        assert isinstance(error, PartialError)
        ((position, cause),) = error.errors.items()
        assert isinstance(cause, BackendError)
        assert "reading 4096 bytes at offset" in str(cause)
        whole = expected([(0, begin) for begin in begins], PAGE, MIB).view(4, -1)
        others = [i for i in range(4) if i != position]
        assert into.view(4, -1)[others].equal(whole[others])
        finish(files.read_parts(slots * 4, begins, PAGE, into))
        assert into.equal(whole.view(-1))
    files.close()


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_a_short_read_of_a_part_goes_on(tmp_path: Path, engine: str) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, engine=engine)
    slots = written(files, 1, MIB)
    kernel.twist = Nth(2, lambda _: PAGE, "read")
    into = blank(9 * PAGE)
    finish(files.read_parts(slots * 3, [0, 10 * PAGE, 40 * PAGE], 3 * PAGE, into))
    assert into.equal(expected([(0, 0), (0, 10 * PAGE), (0, 40 * PAGE)], 3 * PAGE, MIB))
    assert files.io_stats.short_transfers == 1
    files.close()


def test_memory_that_the_disk_cannot_use_is_filled_all_the_same(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    slots = written(files, 1, MIB)
    into = blank(3 * PAGE, misalignment=1)
    finish(files.read_parts(slots * 3, [5 * PAGE, 6 * PAGE, 0], PAGE, into))
    assert into.equal(expected([(0, 5 * PAGE), (0, 6 * PAGE), (0, 0)], PAGE, MIB))
    files.close()


def test_corruption_is_not_noticed_in_a_part_and_is_in_the_whole(tmp_path: Path) -> None:
    """So whoever reads parts sums them."""
    files = open_files(tmp_path, direct=False)
    (slot,) = written(files, 1, MIB)
    (file,) = tmp_path.glob("tierstore-scratch-*.bin")
    with file.open("r+b") as stream:
        stream.seek(slot.extents[0][0] + 5 * PAGE)
        stream.write(b"\0" * PAGE)
    into = blank(PAGE)
    finish(files.read_parts([slot], [5 * PAGE], PAGE, into))
    assert not into.any()
    assert isinstance(outcome(files.read(slot, blank(MIB))), IntegrityError)
    files.close()


def test_a_slot_that_was_not_written_has_no_parts(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    slot = files.reserve(MIB)
    with pytest.raises(UsageError, match="holds no bytes"):
        files.read_parts([slot], [0], PAGE, blank(PAGE))
    files.close()


def test_parts_of_what_was_lost_are_refused_and_those_of_others_are_not(tmp_path: Path) -> None:
    files = open_durable(tmp_path)
    slots = [files.reserve(MIB) for _ in range(2)]
    finish(*(files.write(slot, buffer(MIB, i)) for i, slot in enumerate(slots)))
    finish(files.commit([Record(str(i), "", slot) for i, slot in enumerate(slots)]))
    files.close()
    file = max(tmp_path.glob("tierstore-*.bin"), key=lambda each: each.stat().st_size)
    with file.open("r+b") as stream:
        stream.truncate(max(slot.extents[0][0] for slot in slots) + PAGE)
    again = open_durable(tmp_path)
    there, lost = (record.slot for record in again.recovered())
    into = blank(2 * PAGE)
    assert isinstance(outcome(again.read_parts([there, lost], [0, 0], PAGE, into)), IntegrityError)
    with pytest.raises(UsageError, match="part 0 begins at 1 "):
        again.read_parts([lost], [1], PAGE, into[:PAGE])
    finish(again.read_parts([there, there], [PAGE, 0], PAGE, into))
    assert into.equal(torch.cat([buffer(MIB, 0)[PAGE : 2 * PAGE], buffer(MIB, 0)[:PAGE]]))
    again.close()


def test_a_read_of_parts_over_several_drives_fails_where_one_does(tmp_path: Path) -> None:
    drives = [{"path": str(tmp_path / name), "bandwidth": 1} for name in "ab"]
    kernel = ScriptedKernel()
    files = open_files(drives, syscalls=kernel)
    slots = written(files, 8, MIB // 4)
    parts = [(n, page * PAGE) for page in (1, 33, 60) for n in range(8)]  # none touch: a call each
    into = blank(len(parts) * PAGE)
    kernel.twist = Nth(5, failing(errno.EIO), "read")
    error = outcome(files.read_parts([slots[n] for n, _ in parts], [b for _, b in parts], PAGE, into))
    kernel.twist = None
    assert isinstance(error, PartialError)
    assert len(error.errors) == 1
    finish(files.read_parts([slots[n] for n, _ in parts], [b for _, b in parts], PAGE, into))
    assert into.equal(expected(parts, PAGE, MIB // 4))
    files.close()


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    gaps=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    block=st.integers(1, 4),
    segment=st.integers(4, 16),
    data=st.data(),
)
@settings(max_examples=200)
def test_a_part_is_cut_at_the_addresses_that_hold_it(
    lengths: list[int], gaps: list[int], block: int, segment: int, data: st.DataObject
) -> None:
    """Page by page, against a list of all addresses."""
    extents, at = [], 0
    for length, gap in zip(lengths, gaps, strict=False):
        extents.append((at + gap, at + gap + length))
        at += gap + length + 1
    addresses = [page for start, end in extents for page in range(start, end)]
    slot = FileSlot(len(addresses) * PAGE, [(a * PAGE, b * PAGE) for a, b in extents], None, block * PAGE)
    slot.state = FileSlotState.WRITTEN
    pages = data.draw(st.integers(1, len(addresses)))
    begins = data.draw(st.lists(st.integers(0, len(addresses) - pages), min_size=1, max_size=4))
    into = torch.zeros(len(begins) * pages * PAGE, dtype=torch.uint8)
    transfer = IoRequest(Direction.READ, [slot] * len(begins), [into] * len(begins), is_whole=False)
    cut_parts(transfer, [begin * PAGE for begin in begins], pages * PAGE, segment_bytes=segment * PAGE)
    found: dict[int, int] = {}
    for fragment in transfer.fragments:
        assert fragment.end - fragment.address == fragment.stop - fragment.start
        assert fragment.end - fragment.address <= block * PAGE
        assert fragment.address // (segment * PAGE) == (fragment.end - 1) // (segment * PAGE)
        assert fragment.start // (pages * PAGE) == fragment.part
        for i in range(0, fragment.stop - fragment.start, PAGE):
            found[fragment.start // PAGE + i // PAGE] = (fragment.address + i) // PAGE
    assert found == dict(enumerate(addresses[b + n] for b in begins for n in range(pages)))
    assert transfer.remaining == len(transfer.fragments)
