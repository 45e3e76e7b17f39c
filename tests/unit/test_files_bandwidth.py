"""The bandwidth of a drive: measured in its directory, in a moment, and not believed to the last byte."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.files_disk import OnDrive, ScriptedKernel
from tierstore.errors import BackendError
from tierstore.units import MIB
from tierstore_backends.files.addressing.bandwidth import alike, measure_all
from tierstore_backends.files.addressing.direct_io_probe import IoMode, probe
from tierstore_backends.files.io.kernel import KERNEL
from tierstore_backends.files.options import Direct


class Clock:
    """Time that passes only when a disk is asked for something: so many seconds for a MiB."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def disk(self, write_s: float, read_s: float) -> ScriptedKernel:
        """Return a disk that takes so long for a MiB."""

        def pass_by(kind: str, offset: int, nbytes: int) -> None:
            del offset
            self.now_s += {"write": write_s, "read": read_s}.get(kind, 0.0) * nbytes / MIB

        return ScriptedKernel(pass_by)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "a", tmp_path / "b"]
    for folder in found:
        folder.mkdir()
    return found


def modes(folders: list[Path]) -> list[tuple[Path, IoMode]]:
    return [(folder, probe(folder, Direct.AUTO, KERNEL)) for folder in folders]


def test_it_is_that_of_a_byte_that_is_written_and_then_read(folders: list[Path]) -> None:
    clock = Clock()
    slow = OnDrive(folders[1], clock.disk(write_s=0.003, read_s=0.001))
    if not probe(folders[1], Direct.AUTO, KERNEL).is_direct:
        pytest.skip("reads go through the page cache here, which is not measured")
    (rate,) = measure_all(modes(folders)[1:], slow, clock)
    assert rate == pytest.approx(2 * MIB / 0.004, rel=0.01)


def test_each_directory_is_measured_by_itself(folders: list[Path]) -> None:
    clock = Clock()
    disk = clock.disk(write_s=0.001, read_s=0.001)
    other = clock.disk(write_s=0.004, read_s=0.004)
    both = OnDrive(folders[0], disk)
    both_rates = measure_all(modes(folders)[:1], both, clock)
    both_rates += measure_all(modes(folders)[1:], OnDrive(folders[1], other), clock)
    assert both_rates[0] / both_rates[1] == pytest.approx(4.0, rel=0.01)


def test_a_slow_disk_is_not_asked_for_more_than_two_blocks_each_way(folders: list[Path]) -> None:
    clock = Clock()
    disk = clock.disk(write_s=1.0, read_s=1.0)
    measure_all(modes(folders)[:1], OnDrive(folders[0], disk), clock)
    assert len(disk.of_kind("write")) == 2


def test_a_fast_disk_is_measured_for_no_longer_than_a_moment(folders: list[Path]) -> None:
    clock = Clock()
    disk = clock.disk(write_s=0.0005, read_s=0.0005)
    measure_all(modes(folders)[:1], OnDrive(folders[0], disk), clock)
    assert clock.now_s <= 0.05
    assert len(disk.of_kind("write")) <= 64


def test_nothing_stays_behind(folders: list[Path]) -> None:
    measure_all(modes(folders), KERNEL)
    assert not any(list(folder.iterdir()) for folder in folders)


def test_one_block_that_waited_for_somebody_else_does_not_count(folders: list[Path]) -> None:
    clock = Clock()
    disk = clock.disk(write_s=0.001, read_s=0.001)
    steady = disk.twist
    assert steady is not None

    def with_a_hiccup(kind: str, offset: int, nbytes: int) -> int | None:
        if kind == "write" and offset == 3 * MIB:
            clock.now_s += 0.010
        return steady(kind, offset, nbytes)

    disk.twist = with_a_hiccup
    (rate,) = measure_all(modes(folders)[:1], OnDrive(folders[0], disk), clock)
    if probe(folders[0], Direct.AUTO, KERNEL).is_direct:
        assert rate == pytest.approx(1000 * MIB, rel=0.01)


@pytest.mark.parametrize("is_disturbed", [lambda now_s: now_s < 0.02, lambda now_s: now_s >= 0.021])
def test_the_faster_of_two_passes_counts(folders: list[Path], is_disturbed: Callable[[float], bool]) -> None:
    clock = Clock()
    disk = clock.disk(write_s=0.001, read_s=0.001)
    undisturbed = disk.twist
    assert undisturbed is not None

    def beside_somebody_else(kind: str, offset: int, nbytes: int) -> int | None:
        if is_disturbed(clock.now_s):
            clock.now_s += 0.003
        return undisturbed(kind, offset, nbytes)

    disk.twist = beside_somebody_else
    (rate,) = measure_all(modes(folders)[:1], OnDrive(folders[0], disk), clock)
    assert rate == pytest.approx(1000 * MIB, rel=0.01)


def test_a_full_drive_counts_as_the_slowest_other(folders: list[Path]) -> None:
    def full(kind: str, offset: int, nbytes: int) -> None:
        if kind == "write":
            raise OSError(errno.ENOSPC, f"{nbytes} at {offset}")

    clock = Clock()
    rates = measure_all(modes(folders), OnDrive(folders[0], ScriptedKernel(full)), clock)
    assert rates[0] == rates[1]


def test_a_drive_that_fails_is_named(folders: list[Path]) -> None:
    def broken(kind: str, offset: int, nbytes: int) -> None:
        if kind == "read":
            raise OSError(errno.EIO, f"{nbytes} at {offset}")

    if not probe(folders[1], Direct.AUTO, KERNEL).is_direct:
        pytest.skip("reads go through the page cache here, which is not measured")
    with pytest.raises(BackendError, match=str(folders[1])):
        measure_all(modes(folders), OnDrive(folders[1], ScriptedKernel(broken)))


def test_drives_that_hardly_differ_are_equal() -> None:
    assert alike([1000, 1200, 500, 1100]) == [1100, 1100, 500, 1100]
    assert alike([1000, 3000]) == [1000, 3000]
