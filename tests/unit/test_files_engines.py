"""What every engine of scratch files owes: the same tests, whoever moves the bytes."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.files_disk import (
    EVERY_ENGINE,
    IN_BACKGROUND,
    PAGE,
    TIMEOUT_S,
    Gate,
    ScriptedKernel,
    blank,
    buffer,
    disk_taken,
    finish,
    needs_ring,
    open_files,
    outcome,
    written,
)
from tierstore.errors import BackendError, UsageError
from tierstore.spi import Completion
from tierstore.units import KIB, MIB
from tierstore_backends.files import FilesBackend
from tierstore_backends.files.io.aio_streams import AioStreams
from tierstore_backends.files.io.io_request import Direction, FileSlot
from tierstore_backends.files.io.syscalls import KernelCall

BLOCK = 64 * KIB
in_background = pytest.mark.parametrize("engine", IN_BACKGROUND)
every_engine = pytest.mark.parametrize("engine", EVERY_ENGINE)


def assert_holds(files: FilesBackend, slot: FileSlot, seed: int, *, misalignment: int = 0) -> None:
    into = blank(slot.nbytes, misalignment=misalignment)
    finish(files.read(slot, into))
    assert into.equal(buffer(slot.nbytes, seed))


@every_engine
@pytest.mark.parametrize("direct", ["auto", False])
@pytest.mark.parametrize("misalignment", [0, 1])
def test_bytes_come_back(tmp_path: Path, engine: str, direct: object, misalignment: int) -> None:
    files = open_files(tmp_path, engine=engine, direct=direct, aio_block_size=BLOCK)
    assert files.io_stats.engine == engine
    assert not (files.io_stats.is_direct and engine == "aiofiles")
    for seed, nbytes in enumerate([1, PAGE, 5 * BLOCK + 3, 300_000]):
        slot = files.reserve(nbytes)
        finish(files.write(slot, buffer(nbytes, seed, misalignment=misalignment)))
        assert_holds(files, slot, seed, misalignment=misalignment)
    files.close()


@every_engine
def test_more_memory_that_has_to_bounce_than_there_is_waits_for_it(tmp_path: Path, engine: str) -> None:
    files = open_files(tmp_path, engine=engine, aio_block_size=BLOCK, aio_queue_depth=64)
    sources = [buffer(3 * BLOCK, i, misalignment=1) for i in range(30)]
    slots = [files.reserve(3 * BLOCK) for _ in sources]
    finish(*(files.write(slot, source) for slot, source in zip(slots, sources, strict=True)))
    into = [blank(3 * BLOCK, misalignment=3) for _ in slots]
    finish(*(files.read(slot, each) for slot, each in zip(slots, into, strict=True)))
    assert all(each.equal(source) for each, source in zip(into, sources, strict=True))
    if engine != "aiofiles":  # which goes through the page cache: there every address will do
        assert files.io_stats.bounced_bytes >= 2 * 30 * 3 * BLOCK
    files.close()


@in_background
def test_reads_go_before_writes_that_wait(tmp_path: Path, engine: str) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, engine=engine, threads=1, aio_queue_depth=1)
    first, second = written(files, 2, MIB)
    third = files.reserve(MIB)
    gate = Gate("write")
    kernel.twist = gate
    kernel.forget()
    under_way = [files.write(first, buffer(MIB))]
    gate.wait_for_caller()
    under_way += [files.write(third, buffer(MIB)), files.read(second, blank(MIB))]
    gate.open()
    finish(*under_way)
    assert [kind for kind, _, _ in kernel.calls if kind != "allocate"] == ["write", "read", "write"]
    files.close()


@in_background
def test_the_queue_depth_bounds_what_is_in_flight(tmp_path: Path, engine: str) -> None:
    files = open_files(tmp_path, engine=engine, threads=4, aio_block_size=BLOCK, aio_queue_depth=1)
    written(files, 8, 200 * KIB)
    stats = files.io_stats
    assert (stats.most_in_flight, stats.merged_batches) == (1, 0)
    files.close()


@in_background
def test_fragments_that_move_in_one_call_count_one_by_one(tmp_path: Path, engine: str) -> None:
    files = open_files(tmp_path, engine=engine, threads=4, aio_queue_depth=5)
    slots = [files.reserve(PAGE) for _ in range(64)]
    finish(files.write_many(slots, [buffer(PAGE, i) for i in range(64)]))
    assert 1 <= files.io_stats.most_in_flight <= 5
    assert files.io_stats.fragments == 64
    assert files.io_stats.merged_batches > 0
    files.close()


@every_engine
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_disk_that_fails_is_an_error_that_names_it(tmp_path: Path, engine: str, kind: str) -> None:
    def fail(each: str, offset: int, nbytes: int) -> None:
        if each == kind:
            raise OSError(errno.EROFS, f"scripted for {nbytes} bytes at {offset}")

    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, engine=engine, checksum=False)
    (slot,) = written(files, 1, 3 * PAGE)
    kernel.twist = fail
    move = files.write if kind == "write" else files.read
    error = outcome(move(slot, blank(3 * PAGE)))
    assert isinstance(error, BackendError)
    assert str(error).startswith(f"{'writing' if kind == 'write' else 'reading'} 12288 bytes at offset 0 of ")
    assert "failed: EROFS" in str(error)
    files.close()


@every_engine
def test_a_smaller_block_is_more_calls_of_fewer_bytes(tmp_path: Path, engine: str) -> None:
    def stats_with(block_bytes: int) -> tuple[int, int, float]:
        files = open_files(tmp_path, engine=engine, aio_block_size=block_bytes)
        (slot,) = written(files, 1, MIB)
        assert_holds(files, slot, 0)
        stats = files.io_stats
        files.close()
        assert (stats.read_bytes, stats.written_bytes) == (MIB, MIB)
        assert stats.call_seconds > 0
        assert stats.checksum_seconds > 0
        return stats.fragments, stats.read_calls + stats.write_calls, stats.mean_transfer_bytes

    assert stats_with(MIB) == (2, 2, float(MIB))
    assert stats_with(BLOCK) == (32, 32, float(BLOCK))


@needs_ring
def test_a_deeper_queue_has_more_in_flight(tmp_path: Path) -> None:
    def most_in_flight(engine: str, depth: int) -> int:
        files = open_files(tmp_path, engine=engine, threads=4, aio_block_size=BLOCK, aio_queue_depth=depth)
        slots = [files.reserve(BLOCK) for _ in range(64)]
        finish(*(files.write(slot, buffer(BLOCK)) for slot in slots[::2]))  # strangers: none is merged
        stats = files.io_stats
        files.close()
        return stats.most_in_flight

    assert most_in_flight("io_uring", 1) == 1
    assert 1 < most_in_flight("io_uring", 8) <= 8
    assert most_in_flight("threads", 8) <= 4  # a worker has one batch


@in_background
def test_neighbours_that_wait_are_moved_in_one_call(tmp_path: Path, engine: str) -> None:
    gate = Gate("write")
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, engine=engine, threads=1, aio_block_size=MIB)
    first, *slots = [files.reserve(32 * KIB) for _ in range(65)]
    finish(files.write(first, buffer(32 * KIB)))
    kernel.twist = gate
    kernel.forget()
    writing = [files.write(first, buffer(32 * KIB))]
    gate.wait_for_caller()
    writing += [files.write(slot, buffer(32 * KIB, i)) for i, slot in enumerate(slots)]
    gate.open()
    finish(*writing)
    assert [nbytes for _, nbytes in kernel.of_kind("write")] == [32 * KIB, MIB, MIB]
    assert files.io_stats.merged_batches == 2
    for i, slot in enumerate(slots):
        assert_holds(files, slot, i)
    files.close()


@in_background
def test_a_callback_may_use_the_backend_again_and_cannot_close_it(tmp_path: Path, engine: str) -> None:
    files = open_files(tmp_path, engine=engine, threads=1)
    slot = files.reserve(PAGE)
    into = blank(PAGE)
    refusals: list[BaseException] = []
    ended = Completion()

    def close_it(error: BaseException | None) -> None:
        try:
            files.close()
        except UsageError as refusal:
            refusals.append(refusal)
        ended.complete(error)

    files.write(slot, buffer(PAGE, 4)).add_done_callback(
        lambda _: files.read(slot, into).add_done_callback(close_it)
    )
    finish(ended)
    assert into.equal(buffer(PAGE, 4))
    # One whose callback ran here, for it was done before, may close; all others may not.
    assert len(refusals) == 1
    files.close()


@in_background
@pytest.mark.parametrize("failure", [None, errno.EIO])
def test_a_buffer_is_let_go_before_its_transfer_ends(
    tmp_path: Path, engine: str, failure: int | None
) -> None:
    gate = Gate("write")
    kernel = ScriptedKernel()
    files = open_files(tmp_path, syscalls=kernel, engine=engine, aio_block_size=BLOCK)
    slot = files.reserve(200 * KIB + 5)

    def pass_the_gate(kind: str, offset: int, nbytes: int) -> None:
        gate(kind, offset, nbytes)
        if failure is not None:
            raise OSError(failure, "scripted")

    kernel.twist = pass_the_gate
    source = buffer(200 * KIB + 5)
    kept = weakref.ref(source)
    writing = files.write(slot, source)
    del source
    is_gone: list[bool] = []
    writing.add_done_callback(lambda _: is_gone.append(kept() is None))
    gate.open()
    assert (outcome(writing) is None) == (failure is None)
    assert is_gone == [True]
    files.close()


@in_background
def test_closing_finishes_what_waits(tmp_path: Path, engine: str) -> None:
    gate = Gate("write")
    kernel = ScriptedKernel()
    files = open_files(tmp_path / "scratch", syscalls=kernel, engine=engine, threads=1, aio_block_size=BLOCK)
    kernel.twist = gate
    writing = files.write(files.reserve(MIB), buffer(MIB))
    gate.wait_for_caller()
    closers = [threading.Thread(target=files.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    assert (tmp_path / "scratch").exists()
    gate.open()
    for closer in closers:
        closer.join(TIMEOUT_S)
    assert writing.is_done
    assert writing.error is None
    assert not (tmp_path / "scratch").exists()


@in_background
def test_forgetting_the_backend_while_bytes_move_loses_none_of_them(tmp_path: Path, engine: str) -> None:
    gate = Gate("write")
    kernel = ScriptedKernel()
    files = open_files(tmp_path / "scratch", syscalls=kernel, engine=engine, aio_block_size=BLOCK)
    kernel.twist = gate
    writing = files.write(files.reserve(10 * BLOCK), buffer(10 * BLOCK))
    del files
    gc.collect()
    gate.open()
    finish(writing)


@in_background
def test_a_free_tail_is_cut_off_when_it_has_been_quiet(tmp_path: Path, engine: str) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, MIB, syscalls=kernel, engine=engine, quiet_s=0.0)
    slots = written(files, 16, BLOCK)
    was_cut = threading.Event()
    kernel.twist = lambda kind, _offset, nbytes: (
        was_cut.set() if kind == "truncate" and nbytes == BLOCK else None
    )
    for slot in slots[1:]:
        files.free(slot)
    assert was_cut.wait(TIMEOUT_S)
    # Fragments wait until the cut is made: what is written from here on is not cut off.
    finish(files.write(files.reserve(BLOCK), buffer(BLOCK)))
    assert disk_taken(tmp_path) <= 2 * BLOCK
    assert_holds(files, slots[0], 0)
    files.close()


@in_background
def test_a_tail_is_cut_off_some_time_after_the_last_transfer(tmp_path: Path, engine: str) -> None:
    kernel = ScriptedKernel()
    files = open_files(tmp_path, MIB, syscalls=kernel, engine=engine, quiet_s=0.01)
    slots = written(files, 2, BLOCK)
    was_cut = threading.Event()
    kernel.twist = lambda kind, _offset, _nbytes: was_cut.set() if kind == "truncate" else None
    files.free(slots[1])
    assert was_cut.wait(TIMEOUT_S)
    files.close()


@every_engine
def test_openings_leave_no_descriptor_and_no_thread_behind(tmp_path: Path, engine: str) -> None:
    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    open_files(tmp_path, engine=engine).close()
    before = held()
    for _ in range(20):
        files = open_files(tmp_path, engine=engine)
        written(files, 1, PAGE)
        files.close()
    # Fewer are others' that have ended meanwhile.
    assert all(now <= then for now, then in zip(held(), before, strict=True))


def test_a_stream_that_falls_short_says_so_and_goes_no_further(tmp_path: Path) -> None:
    class Half:
        """A file that moves half of what it is given, as one on a disk that fills up."""

        def __init__(self) -> None:
            self.given: list[int] = []

        async def seek(self, offset: int) -> int:
            return offset

        async def write(self, view: memoryview) -> int:
            self.given.append(len(view))
            return len(view) // 2

    half = Half()
    path = tmp_path / "file"
    with ThreadPoolExecutor(1) as executor:
        streams = AioStreams(lambda _: path, executor)
        streams._open[path] = half  # type: ignore[assignment]
        pages = [memoryview(bytearray(PAGE)) for _ in range(2)]
        assert asyncio.run(streams.move(KernelCall(Direction.WRITE, -1, 0, pages, 0))) == PAGE // 2
    assert half.given == [PAGE]
