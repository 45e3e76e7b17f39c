"""io_uring: refused with the reason where it does not work, and nobody waits for a ring that broke."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.files_disk import (
    IN_BACKGROUND,
    PAGE,
    TIMEOUT_S,
    ScriptedKernel,
    ScriptedRing,
    blank,
    buffer,
    finish,
    needs_ring,
    open_files,
    outcome,
)
from tierstore.errors import BackendError, ConfigError, InvariantError
from tierstore.units import KIB, MIB
from tierstore_backends.files.engines.choice import chosen
from tierstore_backends.files.io.io_request import Direction
from tierstore_backends.files.io.io_uring import UringRing
from tierstore_backends.files.io.syscalls import KernelCall, Ring
from tierstore_backends.files.options import EngineName, parse_options

BLOCK = 64 * KIB


class RefusingKernel(ScriptedKernel):
    """A kernel that answers a request for a ring as ``answer`` does."""

    def __init__(self, answer: Callable[[Ring], Ring]) -> None:
        super().__init__()
        self._answer = answer

    def open_ring(self, entries: int, *, is_direct: bool) -> Ring:
        """See `Syscalls`."""
        return self._answer(super().open_ring(entries, is_direct=is_direct))


class TwistedRing(ScriptedRing):
    """A ring whose answers or submissions ``twist`` changes."""

    def __init__(
        self,
        ring: Ring,
        *,
        result: Callable[[int], int] = lambda result: result,
        submit: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(ScriptedKernel(), ring)
        self._result = result
        self._before_submit = submit
        self._has_put = False

    def put(self, token: int, call: KernelCall) -> None:
        """See `Ring`."""
        self._has_put = True
        super().put(token, call)

    def submit(self) -> None:
        """See `Ring`: its thread submits nothing, too, at moments of its own."""
        if self._has_put:
            self._has_put = False
            self._before_submit()
        super().submit()

    def reap(self) -> list[tuple[int, int]]:
        """See `Ring`."""
        return [(token, self._result(result)) for token, result in super().reap()]


@needs_ring
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOSYS, "this kernel has no io_uring"),
        (errno.EPERM, "the kernel forbids io_uring here"),
        (errno.ENOMEM, "not enough lockable memory"),
        (errno.EMFILE, "the kernel refuses a ring: .*Too many open files"),
    ],
)
def test_a_kernel_that_refuses_a_ring_is_told_of(tmp_path: Path, code: int, reason: str) -> None:
    def refuse(ring: Ring) -> Ring:
        ring.close()
        raise OSError(code, os.strerror(code))

    with pytest.raises(BackendError, match=rf"engine='io_uring' cannot be used in .*scratch: .*{reason}"):
        open_files(tmp_path / "scratch", syscalls=RefusingKernel(refuse), engine="io_uring")
    assert not (tmp_path / "scratch").exists()
    open_files(tmp_path / "scratch", syscalls=RefusingKernel(refuse)).close()  # nobody asked for a ring


@needs_ring
@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (lambda result: -errno.EOPNOTSUPP, "a page could not be moved through a ring: .*not supported"),
        (lambda result: result - 1, "4095 of 4096 bytes were moved through a ring"),
    ],
)
def test_a_ring_that_moves_no_page_is_not_used(
    tmp_path: Path, result: Callable[[int], int], reason: str
) -> None:
    kernel = RefusingKernel(lambda ring: TwistedRing(ring, result=result))
    with pytest.raises(BackendError, match=reason):
        open_files(tmp_path, syscalls=kernel, engine="io_uring")
    assert list(tmp_path.iterdir()) == []


@needs_ring
def test_a_page_that_comes_back_different_is_found_at_opening(tmp_path: Path) -> None:
    class Forgetful(TwistedRing):
        def put(self, token: int, call: KernelCall) -> None:
            if call.direction is Direction.READ:
                offset = call.offset + len(call.vector[0])  # where nothing was written
                os.ftruncate(call.fd, 2 * offset)
                call = KernelCall(call.direction, call.fd, call.address, call.vector, offset)
            super().put(token, call)

    with pytest.raises(BackendError, match="a page came back different"):
        open_files(tmp_path, syscalls=RefusingKernel(Forgetful), engine="io_uring")


def test_a_package_that_is_not_there_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "liburing", None)
    with pytest.raises(
        BackendError, match=r"liburing package cannot be imported .*pip install 'tierstore\[io-uring\]'"
    ):
        open_files(tmp_path, engine="io_uring")


def test_a_package_that_is_too_old_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "liburing", types.ModuleType("liburing"))
    with pytest.raises(BackendError, match=r"has no Cqe: pip install -U 'tierstore\[io-uring\]'"):
        open_files(tmp_path, engine="io_uring")


@needs_ring
def test_a_ring_that_breaks_fails_what_waits_and_hangs_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[OSError] = []

    def fail() -> None:
        if failures:
            raise failures[0]

    kernel = RefusingKernel(lambda ring: TwistedRing(ring, submit=fail))
    files = open_files(tmp_path / "scratch", syscalls=kernel, engine="io_uring", aio_block_size=BLOCK)
    slot = files.reserve(10 * BLOCK)
    finish(files.write(slot, buffer(10 * BLOCK)))
    failures.append(OSError(errno.EBADF, "no such ring"))
    with caplog.at_level(logging.CRITICAL, "tierstore.files"):
        error = outcome(files.read(slot, blank(10 * BLOCK)))
    assert isinstance(error, InvariantError)
    assert "no such ring" in str(error)
    with pytest.raises(BackendError, match="the ring broke"):
        files.read(slot, blank(10 * BLOCK))
    files.close()
    assert not (tmp_path / "scratch").exists()


@needs_ring
@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY, errno.EINTR])
def test_a_submission_that_the_kernel_puts_off_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    files = open_files(tmp_path, engine="io_uring", aio_block_size=BLOCK)
    uring = sys.modules["liburing"]
    refusals = [OSError(code, "scripted") for _ in range(3)]
    submit = uring.io_uring_submit

    def put_off(ring: object) -> object:
        if refusals:
            raise refusals.pop()
        return submit(ring)

    monkeypatch.setattr(uring, "io_uring_submit", put_off)
    slot = files.reserve(10 * BLOCK)
    finish(files.write(slot, buffer(10 * BLOCK)))
    into = blank(10 * BLOCK)
    finish(files.read(slot, into))
    assert refusals == []
    assert into.equal(buffer(10 * BLOCK))
    files.close()


@needs_ring
def test_a_ring_takes_no_more_calls_than_it_was_opened_for(tmp_path: Path) -> None:
    ring = UringRing(2, is_direct=False)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    page = memoryview(bytearray(PAGE))
    for token in range(2):
        ring.put(token, KernelCall(Direction.WRITE, fd, 0, [page], token * PAGE))
    with pytest.raises(InvariantError, match="more than 2 calls"):
        ring.put(2, KernelCall(Direction.WRITE, fd, 0, [page], 0))
    ring.submit()
    ended: dict[int, int] = {}
    while len(ended) < 2:
        ring.wait(1.0)
        ended.update(ring.reap())
    assert ended == {0: PAGE, 1: PAGE}
    ring.close()
    os.close(fd)


class HoldingRing(TwistedRing):
    """A ring that keeps what has ended to itself until it is let go, and notes when it is waited for."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self.put_bytes = 0
        self.is_waited_for = threading.Event()
        self.is_let_go = False

    def put(self, token: int, call: KernelCall) -> None:
        """See `Ring`."""
        self.put_bytes += sum(len(view) for view in call.vector)
        super().put(token, call)

    def reap(self) -> list[tuple[int, int]]:
        """See `Ring`."""
        return super().reap() if self.is_let_go else []

    def wait(self, timeout_s: float | None) -> None:
        """See `Ring`."""
        self.is_waited_for.set()
        super().wait(timeout_s)


@needs_ring
def test_no_more_than_64_mib_of_writes_are_ahead_of_a_read(tmp_path: Path) -> None:
    rings: list[HoldingRing] = []

    def hold(ring: Ring) -> Ring:
        rings.append(HoldingRing(ring))
        rings[-1].is_let_go = len(rings) == 1  # the probe's
        return rings[-1]

    files = open_files(tmp_path, 200 * MIB, syscalls=RefusingKernel(hold), engine="io_uring")
    source = buffer(4 * MIB)
    slots = [files.reserve(4 * MIB) for _ in range(40)]
    writing = files.write_many(slots, [source] * 40)
    ring = rings[1]
    while ring.put_bytes < 64 * MIB:
        assert ring.is_waited_for.wait(TIMEOUT_S)
    assert ring.is_waited_for.wait(TIMEOUT_S)
    assert ring.put_bytes == 64 * MIB
    ring.is_let_go = True
    ring.wake()
    finish(writing)
    files.close()


@pytest.mark.parametrize("engine", ["threads", "io_uring", "aiofiles"])
def test_a_write_with_background_io_switched_off_is_a_contradiction(engine: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine='{engine}' .* enable_aio=False forbids"):
        parse_options({"path": "x", "engine": engine, "enable_aio": False})


def test_plain_is_what_io_without_background_means() -> None:
    options = parse_options({"path": "x", "engine": "plain", "enable_aio": False})
    assert chosen(options) is chosen(parse_options({"path": "x", "engine": "plain"})) is EngineName.PLAIN


def test_aiofiles_and_direct_io_are_a_contradiction() -> None:
    with pytest.raises(ConfigError, match="engine='aiofiles' goes through the page cache"):
        parse_options({"path": "x", "engine": "aiofiles", "direct": True})


def test_an_unknown_engine_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="engine='libaio': accepted: 'auto', 'threads', 'io_uring'"):
        parse_options({"path": "x", "engine": "libaio"})


@pytest.mark.slow
@pytest.mark.parametrize("engine", IN_BACKGROUND)
def test_a_program_that_ends_while_bytes_move_ends_quietly(tmp_path: Path, engine: str) -> None:
    program = f"""
import torch
from tierstore_backends.files import open_backend
files = open_backend(
    capacity_bytes=64 << 20, options={{"path": {str(tmp_path / "scratch")!r}, "engine": {engine!r}}}
)
for _ in range(8):
    files.write(files.reserve(8 << 20), torch.zeros(8 << 20, dtype=torch.uint8))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "scratch").exists()
