"""What the tests of durable files share: directories that keep something, and how to look at them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.files_disk import (
    blank,
    buffer,
    finish,
    open_durable,
    outcome,
)
from tierstore.spi import Record
from tierstore.units import KIB
from tierstore_backends.files import DurableFiles
from tierstore_backends.files.directory.ownership import Keeping, segment_name

SEGMENT = 64 * KIB
FIRST = segment_name(0, Keeping.DURABLE)
DB = "tierstore.db"
WITNESS = "tierstore-witness.bin"
LOCK = "tierstore.lock"


def write(files: DurableFiles, sizes: Mapping[str, int], seed: int = 0) -> list[Record]:
    """Write a buffer for each name."""
    records = []
    for name, nbytes in sizes.items():
        slot = files.reserve(nbytes)
        finish(files.write(slot, buffer(nbytes, seed)))
        records.append(Record(name, str(seed), slot))
    return records


def kept(path: Path, sizes: Mapping[str, int], **options: object) -> Path:
    """Make a directory that keeps ``sizes``, in files of 64 KiB; close it."""
    files = open_durable(path, segment_bytes=SEGMENT, options=options)
    finish(files.commit(write(files, sizes)))
    files.close()
    return path


def read(files: DurableFiles, record: Record) -> BaseException | None:
    """Read a record; return its error, or check its bytes."""
    into = blank(record.slot.nbytes)
    error = outcome(files.read(record.slot, into))
    assert error is not None or into.equal(buffer(record.slot.nbytes, int(record.note)))
    return error


def found(files: DurableFiles) -> dict[str, Record]:
    return {record.name: record for record in files.recovered()}


def look(path: Path, **options: object) -> dict[str, str]:
    """Open a directory; return what each name reads as: its seed, or its error's type; close it."""
    files = open_durable(path, segment_bytes=SEGMENT, options=options)
    told = {}
    for name, record in found(files).items():
        error = read(files, record)
        told[name] = record.note if error is None else type(error).__name__
    files.close()
    return told


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
