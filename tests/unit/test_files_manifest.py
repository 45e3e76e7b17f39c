"""What the documentation says of a durable directory, read without any code of ours."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from tests.files_disk import PAGE, buffer, finish, open_durable
from tierstore.errors import BackendError
from tierstore.spi import Record
from tierstore_backends.files.directory.ownership import DirectoryOwner
from tierstore_backends.files.durability.manifest import Manifest
from tierstore_backends.files.durability.meta import Meta
from tierstore_backends.files.durability.record_codec import RecordLocation, Sums, encode

SEGMENT = 64 * 1024
SIZES = {"a": 5000, "ä/\n": 0, "lone \ud800": 1, "large": 2 * SEGMENT + 77}


def sum_of(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def read_as_documented(folder: Path) -> dict[str, bytes]:
    """Follow docs/reference/store-directory.md; check every sum."""
    database = sqlite3.connect(folder / "tierstore.db")
    database.text_factory = bytes
    ((body, total),) = database.execute("SELECT body, sum FROM meta").fetchall()
    assert int.from_bytes(total, "big") == sum_of(body)
    meta = json.loads(body)
    rows = database.execute("SELECT id, version, name, note, nbytes, place FROM records").fetchall()
    database.close()
    assert meta["records"] == len(rows)
    assert meta["format"] == 1
    assert meta["next_id"] > max(row[0] for row in rows)
    checks, records = 0, {}
    for id_, version, name, note, nbytes, place in rows:
        head = struct.pack("<4q", id_, version, nbytes, len(name)) + name + note
        check, head_check, block, kind, zero, count = struct.unpack_from("<QQIHHI", place)
        assert check == sum_of(head + place[8:])
        assert head_check == sum_of(head)
        assert (kind, zero) == (1 if nbytes else 0, 0)
        checks += check
        numbers = struct.unpack_from(f"<{(len(place) - 28) // 8}Q", place, 28)
        extents = list(zip(numbers[: 2 * count : 2], numbers[1 : 2 * count : 2], strict=True))
        records[name.decode("utf-8", "surrogatepass")] = read_fragments(
            folder, meta, extents, list(numbers[2 * count :]), nbytes, block
        )
    assert checks % 2**64 == meta["digest"]
    return records


def read_fragments(
    folder: Path,
    meta: dict[str, int],
    extents: list[tuple[int, int]],
    sums: list[int],
    nbytes: int,
    block: int,
) -> bytes:
    data = b""
    for begin, end in extents:
        start = begin
        assert start % meta["alignment_bytes"] == end % meta["alignment_bytes"] == 0
        while start < end:
            index, offset = divmod(start, meta["segment_bytes"])
            length = min(end - start, block, meta["segment_bytes"] - offset)
            with (folder / f"tierstore-{index:04}.bin").open("rb") as file:
                file.seek(offset)
                fragment = file.read(length)[: nbytes - len(data)]
            assert sum_of(fragment) == sums.pop(0)
            data += fragment
            start += length
    assert not sums
    return data


@pytest.mark.parametrize("block_bytes", [PAGE, 1 << 20])
def test_a_directory_can_be_read_by_its_documentation(tmp_path: Path, block_bytes: int) -> None:
    files = open_durable(tmp_path, segment_bytes=SEGMENT, options={"aio_block_size": block_bytes})
    records = []
    for seed, (name, nbytes) in enumerate(SIZES.items()):
        slot = files.reserve(nbytes)
        finish(files.write(slot, buffer(nbytes, seed)))
        records.append(Record(name, f"note {seed}", slot))
        finish(files.commit(records))
    files.close()
    assert read_as_documented(tmp_path) == {
        name: bytes(buffer(nbytes, seed).numpy()) for seed, (name, nbytes) in enumerate(SIZES.items())
    }


def test_a_manifest_that_was_closed_leaves_one_file_without_a_log(tmp_path: Path) -> None:
    meta = Meta(format=1, directory="x", created_by="y", segment_bytes=SEGMENT, alignment_bytes=PAGE)
    manifest = Manifest.create(tmp_path, meta)
    row = encode(1, 1, b"a", b"", 0, RecordLocation((), (), Sums.NONE, 0))
    manifest.commit((), [row], lambda: replace(meta, commit=1, records=1))
    manifest.close()
    manifest.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["tierstore.db"]


def test_a_store_that_does_not_open_closes_its_manifest_while_it_owns_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for owner, method in ((Manifest, "close"), (DirectoryOwner, "release")):
        original = getattr(owner, method)

        def called(self: object, original: Callable[[object], None] = original, name: str = method) -> None:
            order.append(name)
            original(self)

        monkeypatch.setattr(owner, method, called)

    def start(*_: object) -> None:
        raise BackendError("no engine")

    monkeypatch.setattr("tierstore_backends.files.backend._start", start)
    with pytest.raises(BackendError, match="no engine"):
        open_durable(tmp_path)
    assert order[-2:] == ["close", "release"]
    monkeypatch.undo()
    open_durable(tmp_path).close()
