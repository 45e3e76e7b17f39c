"""Files over several real small disks: full ones, missing ones, and ones in another's place."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import tierstore as ts
from tests.fault.test_files_disks import DISK, disk
from tests.files_disk import (
    PAGE,
    OnDrive,
    ScriptedKernel,
    blank,
    buffer,
    failing,
    finish,
    open_durable,
    open_files,
    outcome,
)
from tierstore.errors import BackendError, CapacityError, IntegrityError, TierStoreError, UsageError
from tierstore.spi import Record
from tierstore.units import KIB, MIB
from tierstore_backends.files.addressing.drives import SPAN_BYTES
from tierstore_backends.files.directory.ownership import DRIVE_NAME, MANIFEST_NAME
from tierstore_backends.files.durability.meta import Meta
from tierstore_backends.files.durability.record_codec import RecordLocation, Sums, encode
from tierstore_backends.files.durability.recovery import recover
from tierstore_backends.files.durable import DurableFiles

__all__ = ["disk"]  # a fixture

BLOCK = 64 * KIB


def open_store(folders: Sequence[Path], **more: object) -> DurableFiles:
    paths = [{"path": folder, "bandwidth": "1GB"} for folder in folders]
    return open_durable(folders[0], options={"path": paths, "aio_block_size": BLOCK, **more})


def kept(folders: Sequence[Path], *, locks: bool = True) -> dict[str, bytes]:
    """Return every file below ``folders``."""
    return {
        str(file): file.read_bytes()
        for folder in folders
        if folder.exists()
        for file in folder.rglob("*")
        if file.is_file() and (locks or file.suffix != ".lock")
    }


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two directories that keep ``large``, of many blocks, and ``0`` and ``1``, of a block on each."""
    found = [tmp_path / "first", tmp_path / "second"]
    with contextlib.closing(open_store(found)) as files:
        sizes = {"0": BLOCK, "1": BLOCK, "large": MIB}
        slots = {name: files.reserve(nbytes) for name, nbytes in sizes.items()}
        finish(*(files.write(slot, buffer(slot.nbytes, len(name))) for name, slot in slots.items()))
        finish(files.commit([Record(name, "note", slot) for name, slot in slots.items()]))
    return found


def check_all(files: DurableFiles) -> None:
    records = {record.name: record for record in files.recovered()}
    assert set(records) == {"0", "1", "large"}
    for name, record in records.items():
        into = blank(record.slot.nbytes)
        finish(files.read(record.slot, into))
        assert into.equal(buffer(record.slot.nbytes, len(name)))


def refused(
    folders: Sequence[Path], error: type[TierStoreError], *said: str, locks: bool = True, **more: object
) -> None:
    """Check that opening is refused with ``error``, which says all of ``said``; that nothing is touched.

    But for the lock file of a directory with a manifest, unless ``locks``: that stays, as after a crash.
    """
    before = kept(folders, locks=locks)
    with pytest.raises(error) as caught:
        open_store(folders, **more)
    for text in said:
        assert text in str(caught.value)
    assert kept(folders, locks=locks) == before


def test_a_full_disk_is_passed_over(disk: Path, tmp_path: Path) -> None:
    paths = [{"path": tmp_path / "roomy", "bandwidth": 1}, {"path": disk / "scratch", "bandwidth": 1}]
    with contextlib.closing(open_files(paths, 6 * DISK, aio_block_size=BLOCK, stride_bytes=MIB)) as files:
        (disk / "others").write_bytes(bytes(DISK // 2))  # of what the files were to have
        slots = [files.reserve(512 * KIB) for _ in range(4 * DISK // (512 * KIB))]
        finish(*(files.write(slot, buffer(slot.nbytes, i)) for i, slot in enumerate(slots)))
        for i, slot in enumerate(slots):
            into = blank(slot.nbytes)
            finish(files.read(slot, into))
            assert into.equal(buffer(slot.nbytes, i))
        on_roomy, on_full = files.io_stats.drives
        assert on_full.live_bytes > 0
        assert on_roomy.live_bytes + on_full.live_bytes == 4 * DISK


def test_a_small_disk_is_given_no_more_than_it_has(disk: Path, tmp_path: Path) -> None:
    paths = [{"path": tmp_path / "roomy", "bandwidth": 1}, {"path": disk / "scratch", "bandwidth": 1}]
    with contextlib.closing(open_files(paths, 4 * DISK, aio_block_size=BLOCK)) as files:
        files.reserve(4 * DISK)
        assert 0 < files.io_stats.drives[1].live_bytes <= DISK


def test_what_was_kept_is_found_again(folders: list[Path]) -> None:
    with contextlib.closing(open_store(folders)) as files:
        check_all(files)
        assert [drive.live_bytes > 0 for drive in files.io_stats.drives] == [True, True]
    manifests = [path.name for folder in folders for path in folder.iterdir() if path.name == MANIFEST_NAME]
    assert manifests == [MANIFEST_NAME]


def test_measured_bandwidths_are_kept_and_given_ones_count_for_the_present(tmp_path: Path) -> None:
    found = [tmp_path / "first", tmp_path / "second"]

    def rates(paths: object) -> list[int]:
        with contextlib.closing(open_durable(found[0], options={"path": paths})) as files:
            return [drive.bandwidth_bytes_per_s for drive in files.io_stats.drives]

    measured = rates(found)
    assert min(measured) > 0
    assert rates([{"path": path, "bandwidth": 7 + i} for i, path in enumerate(found)]) == [7, 8]
    assert rates(found) == measured


def test_bandwidths_that_changed_cost_nothing_that_is_kept(folders: list[Path]) -> None:
    paths = [{"path": path, "bandwidth": rate} for path, rate in zip(folders, (1, 1 << 40), strict=True)]
    with contextlib.closing(open_durable(folders[0], 2 * MIB, options={"path": paths})) as files:
        check_all(files)
        files.reserve(2 * MIB - MIB - 2 * BLOCK)  # all that is free


def test_a_capacity_below_what_is_kept_is_refused(folders: list[Path]) -> None:
    paths = [{"path": path, "bandwidth": 1} for path in folders]
    with pytest.raises(CapacityError, match="2 drives"):
        open_durable(folders[0], MIB, options={"path": paths})
    open_durable(folders[0], MIB + 2 * BLOCK, options={"path": paths}).close()


def test_a_store_over_two_drives_is_opened_again_and_a_missing_drive_is_named(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]

    def opened() -> ts.Store:
        sizes = {"offload_cpu_size": "16MB", "offload_disk_size": "32MB"}
        return ts.Store(ts.StoreConfig.default("cpu", offload_path=paths, durable=True, **sizes))

    tensors = {str(i): buffer(4 * MIB - i, i) for i in range(4)}
    with opened() as store:
        for key, tensor in tensors.items():
            store.put(key, tensor)
    with opened() as store:
        assert set(store) == set(tensors)
        assert all(store.get(key).equal(tensor) for key, tensor in tensors.items())
    (tmp_path / "b").rename(tmp_path / "unplugged")
    with pytest.raises(BackendError, match=f"{paths[1]} was given as drive 2"):
        opened()


def test_a_moved_store_is_found_again(folders: list[Path], tmp_path: Path) -> None:
    moved = [folder.rename(tmp_path / f"moved {folder.name}") for folder in folders]
    with contextlib.closing(open_store(moved)) as files:
        check_all(files)


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_missing_drive_is_named(folders: list[Path], tmp_path: Path, lacking: int) -> None:
    folders[lacking].rename(tmp_path / "unmounted")
    refused(folders, BackendError, f"{folders[lacking]} was given as drive {lacking + 1}", "mounted")
    assert not folders[lacking].exists()
    folders[lacking].mkdir()  # the mount point alone
    refused(folders, BackendError, f"{folders[lacking]} was given as drive {lacking + 1}", "mounted")
    folders[lacking].rmdir()
    (tmp_path / "unmounted").rename(folders[lacking])
    with contextlib.closing(open_store(folders)) as files:
        check_all(files)


def test_swapped_drives_are_named(folders: list[Path]) -> None:
    refused(
        folders[::-1],
        UsageError,
        f"{folders[1]} is drive 2 of 2, and was given as drive 1",
        f"{folders[0]} is drive 1 of 2, and was given as drive 2",
    )


def test_a_drive_of_another_store_is_named(folders: list[Path], tmp_path: Path) -> None:
    others = [tmp_path / "third", tmp_path / "fourth"]
    open_store(others).close()
    refused([folders[0], others[1]], UsageError, f"{others[1]} is a drive of the store")


def test_a_drive_too_many_or_too_few_is_refused(folders: list[Path], tmp_path: Path) -> None:
    third = tmp_path / "third"
    refused([*folders, third], BackendError, str(third))
    assert not third.exists()
    for i, folder in enumerate(folders):
        before = kept([folder])
        with pytest.raises(
            UsageError, match=f"{folder} is drive {i + 1} of 2, and was given as drive 1 of 1"
        ):
            open_durable(folder)
        assert kept([folder]) == before


def test_a_store_of_one_directory_does_not_become_one_of_two(tmp_path: Path) -> None:
    alone, other = tmp_path / "alone", tmp_path / "other"
    open_durable(alone).close()
    said = f"{alone / MANIFEST_NAME}", "with 1 directories, and given are 2"
    refused([alone, other], UsageError, *said, locks=False)
    assert not other.exists()
    refused([other, alone], UsageError, f"{alone} holds a store of its own", locks=False)
    assert not other.exists()
    open_durable(alone).close()


def test_a_manifest_whose_drives_say_nothing_is_refused(folders: list[Path]) -> None:
    for folder in folders:
        (folder / DRIVE_NAME).unlink()
    said = "with 2 directories, and given are 2, which say that they belong to none"
    refused(folders, UsageError, said, locks=False)
    with pytest.raises(UsageError, match="with 2 directories, and given are 1"):
        open_durable(folders[0])


def test_drives_without_their_manifest_are_refused(folders: list[Path]) -> None:
    (folders[0] / MANIFEST_NAME).unlink()
    refused(folders, IntegrityError, f"{folders[0]} is the first drive", f"no {MANIFEST_NAME}")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"store": 1}', '{"store": "x", "drive": 3, "drives": 2}']
)
def test_a_damaged_identity_is_refused_with_what_it_says(folders: list[Path], content: str) -> None:
    (folders[1] / DRIVE_NAME).write_text(content)
    refused(folders, IntegrityError, f"{folders[1] / DRIVE_NAME} is damaged", "'drive'")
    first = json.loads((folders[0] / DRIVE_NAME).read_text())
    (folders[1] / DRIVE_NAME).write_text(json.dumps(first | {"drive": 2}))  # as the message says
    with contextlib.closing(open_store(folders)) as files:
        check_all(files)


def test_a_drive_of_a_store_is_no_scratch_space(folders: list[Path]) -> None:
    before = kept(folders)
    for folder in folders:
        with pytest.raises(UsageError, match="durable=True"):
            open_files(folder)
    assert kept(folders) == before


def test_a_drive_on_which_nothing_was_written_yet_is_no_scratch_space_either(tmp_path: Path) -> None:
    found = [tmp_path / "first", tmp_path / "second"]
    open_store(found).close()
    with pytest.raises(UsageError, match=DRIVE_NAME):
        open_files(found[1])


@pytest.mark.parametrize(
    "extent", [(SPAN_BYTES - PAGE, SPAN_BYTES + PAGE), (2 * SPAN_BYTES, 2 * SPAN_BYTES + 2 * PAGE)]
)
def test_addresses_that_no_drive_has_are_lost(extent: tuple[int, int]) -> None:
    row = encode(1, 1, b"k", b"", 2 * PAGE, RecordLocation((extent,), (7,), Sums.KEPT, MIB))
    meta = Meta(1, "store", "a test", SPAN_BYTES, PAGE, bandwidths=[1, 1], next_id=2)
    recovered = recover([row], meta, "the manifest")
    assert list(recovered.lost) == recovered.slots
    assert recovered.live == []


def test_a_store_that_could_not_be_made_leaves_nothing(tmp_path: Path) -> None:
    found = [tmp_path / "first", tmp_path / "second"]
    found[0].mkdir()
    (found[0] / f"{MANIFEST_NAME}.new").mkdir()  # nobody can write there
    with pytest.raises(BackendError):
        open_store(found)
    assert not found[1].exists()
    shutil.rmtree(found[0])
    open_store(found).close()


def test_files_lost_on_one_drive_cost_only_what_was_there(folders: list[Path]) -> None:
    (segment,) = folders[1].glob("tierstore-0*.bin")
    segment.unlink()
    with contextlib.closing(open_store(folders)) as files:
        ends = {}
        for record in files.recovered():
            into = blank(record.slot.nbytes)
            ends[record.name] = outcome(files.read(record.slot, into))
            if ends[record.name] is None:
                assert into.equal(buffer(record.slot.nbytes, len(record.name)))
        assert sum(error is None for error in ends.values()) == 1  # of the two small ones
        for error in ends.values():
            if error is not None:
                assert isinstance(error, IntegrityError)
                assert f"{segment} (drive 2 of 2)" in str(error)


def test_a_drive_that_cannot_be_synced_is_named_and_the_commit_fails(tmp_path: Path) -> None:
    found = [tmp_path / "first", tmp_path / "second"]
    kernel = ScriptedKernel()
    files = open_durable(
        found[0],
        syscalls=OnDrive(found[1], kernel),
        options={"path": [{"path": path, "bandwidth": 1} for path in found], "aio_block_size": BLOCK},
    )
    with contextlib.closing(files):
        slot = files.reserve(MIB)
        finish(files.write(slot, buffer(MIB)))
        for kind, name in (("sync folder", f"{found[1]} "), ("sync", f"{found[1]}/tierstore-0000.bin")):
            fail = failing(errno.EIO)
            kernel.twist = lambda k, _, nbytes, kind=kind, fail=fail: fail(nbytes) if k == kind else None
            error = outcome(files.commit([Record("k", "", slot)]))
            assert isinstance(error, BackendError)
            assert name in str(error)
            assert "EIO" in str(error)
        kernel.twist = None
        kernel.forget()
        finish(files.commit([Record("k", "", slot)]))
        assert sum(nbytes for _, nbytes in kernel.of_kind("write")) == MIB // 2  # what was in doubt, again


def test_what_is_only_written_again_stays_where_it_is_on_a_full_drive(tmp_path: Path) -> None:
    found = [tmp_path / "first", tmp_path / "second"]
    kernel = ScriptedKernel()
    options = {"path": [{"path": path, "bandwidth": 1} for path in found], "aio_block_size": BLOCK}
    with contextlib.closing(
        open_durable(found[0], syscalls=OnDrive(found[1], kernel), options=options)
    ) as files:
        slot = files.reserve(MIB)
        finish(files.write(slot, buffer(MIB)))
        extents = slot.extents
        for kind, code in (("sync", errno.EIO), ("write", errno.ENOSPC)):
            fail = failing(code)
            kernel.twist = lambda k, _, nbytes, kind=kind, fail=fail: fail(nbytes) if k == kind else None
            assert isinstance(outcome(files.commit([Record("k", "", slot)])), BackendError)
        assert slot.extents == extents
        kernel.twist = None
        finish(files.commit([Record("k", "", slot)]))
        into = blank(MIB)
        finish(files.read(slot, into))
        assert into.equal(buffer(MIB))


def test_a_file_that_is_removed_from_one_drive_fails_the_commit(folders: list[Path]) -> None:
    with contextlib.closing(open_store(folders)) as files:
        slot = files.reserve(MIB)
        finish(files.write(slot, buffer(MIB)))
        (segment,) = folders[1].glob("tierstore-0*.bin")
        segment.unlink()
        error = outcome(files.commit([Record("k", "", slot)]))
        assert isinstance(error, BackendError)
        assert str(segment) in str(error)
