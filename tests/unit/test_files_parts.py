"""Parts of what lies in files: how many calls they are, what is counted, and what fails."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
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
from tierstore_backends.files.io.io_request import (
    Direction,
    FileSlot,
    FileSlotState,
    IoRequest,
    PartsRun,
    RunCut,
    cut_parts,
)


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


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_of_many_parts_those_fail_whose_calls_do(tmp_path: Path, engine: str) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, engine=engine, aio_queue_depth=2)
    slots = written(files, 4, MIB)
    chance = random.Random(3)
    parts = [(chance.randrange(4), chance.randrange(256) * PAGE) for _ in range(150)]
    given = [slots[n] for n, _ in parts], [begin for _, begin in parts], PAGE
    whole = expected(parts, PAGE, MIB).view(150, PAGE)
    for n in (1, 2, 40, 77):
        before = files.io_stats
        kernel.twist = Nth(n, failing(errno.EIO), "read")
        into = blank(150 * PAGE)
        error = outcome(files.read_parts(*given, into))
        kernel.twist = None
        failed = set(error.errors) if isinstance(error, PartialError) else set()
        assert len(failed) <= 1  # pages that touch are asked for again, one by one
        there = [i for i in range(150) if i not in failed]
        assert into.view(150, PAGE)[there].equal(whole[there])
        after = files.io_stats
        assert after.fragments - before.fragments == 150
        assert after.unchecked_bytes - before.unchecked_bytes == len(there) * PAGE
    files.close()


@pytest.mark.parametrize("engine", EVERY_ENGINE)
@pytest.mark.parametrize(
    "twist", [lambda _: PAGE, failing(errno.EINTR), failing(errno.EINVAL)], ids=["short", "EINTR", "EINVAL"]
)
def test_parts_that_come_short_or_late_are_all_there(
    tmp_path: Path, engine: str, twist: Callable[..., int]
) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, engine=engine, aio_queue_depth=2)
    slots = written(files, 2, MIB)
    parts = [(n, page * PAGE) for page in (0, 1, 2, 9, 30, 31, 77, 80, 90, 101) for n in (0, 1)]
    for n in (1, 3, 7):
        kernel.twist = Nth(n, twist, "read")
        into = blank(2 * len(parts) * PAGE)
        finish(files.read_parts([slots[n] for n, _ in parts], [b for _, b in parts], 2 * PAGE, into))
        kernel.twist = None
        assert into.equal(expected(parts, 2 * PAGE, MIB))
    files.close()


def test_memory_that_the_disk_cannot_use_is_filled_with_many_parts(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    slots = written(files, 1, MIB)
    begins = [page * PAGE for page in range(0, 200, 2)]
    into = blank(100 * PAGE, misalignment=1)
    finish(files.read_parts(slots * 100, begins, PAGE, into))
    assert into.equal(expected([(0, begin) for begin in begins], PAGE, MIB))
    files.close()


@given(
    pages=st.lists(st.integers(0, 60), min_size=1, max_size=60),
    drives=st.integers(1, 3),
    length=st.integers(1, 3),
    depth=st.integers(1, 8),
    piece=st.integers(3, 9),
    segment=st.integers(6, 16),
)
@settings(max_examples=200)
def test_runs_have_every_part_once(
    pages: list[int], drives: int, length: int, depth: int, piece: int, segment: int
) -> None:
    span = 16 * segment * PAGE  # a multiple of what a file has
    slots = [FileSlot(64 * PAGE, [(n * span, n * span + 64 * PAGE)], None, 16 * PAGE) for n in range(drives)]
    given_slots = [slots[page % drives] for page in pages]
    begins = [page * PAGE for page in pages]
    into = torch.zeros(len(pages) * length * PAGE, dtype=torch.uint8)
    transfer = IoRequest(Direction.READ, given_slots, [into] * len(pages), is_whole=False)
    cut = RunCut(depth, span, piece * PAGE)
    cut_parts(transfer, begins, length * PAGE, segment_bytes=segment * PAGE, runs=cut)
    found: dict[int, int] = {}
    for fragment in transfer.fragments:
        if not isinstance(fragment, PartsRun):
            found.setdefault(fragment.part, fragment.address)  # the first of those that cross
            continue
        assert len({each.address // span for each in fragment.pieces}) == 1
        for each in fragment.pieces:
            nbytes = len(each.positions) * length * PAGE
            assert nbytes <= piece * PAGE
            assert each.address // (segment * PAGE) == (each.address + nbytes - 1) // (segment * PAGE)
            for number, position in enumerate(each.positions):
                assert position not in found
                found[position] = each.address + number * length * PAGE
        assert fragment.errors == {}
        fragment.error = BackendError("all of it")
        assert set(fragment.errors) == {position for each in fragment.pieces for position in each.positions}
    wanted = [slot.extents[0][0] + begin for slot, begin in zip(given_slots, begins, strict=True)]
    assert [found[position] for position in range(len(pages))] == wanted
    assert transfer.remaining == len(transfer.fragments)
