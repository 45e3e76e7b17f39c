"""What a manifest says is what was committed, or is said to be damaged: whatever happens to its bytes."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.files_disk import PAGE, blank, buffer, finish, open_durable, outcome
from tierstore.errors import BackendError, IntegrityError
from tierstore.spi import Record
from tierstore_backends.files import DurableFiles
from tierstore_backends.files.durability.record_codec import (
    RecordLocation,
    Row,
    RowDamage,
    Sums,
    decode_place,
    decode_text,
    encode,
    encode_text,
    is_whole,
    mend,
)

U64 = st.integers(0, 2**64 - 1)
PLACES = st.builds(
    RecordLocation,
    st.lists(st.tuples(U64, U64), max_size=4).map(tuple),
    st.lists(U64, max_size=4).map(tuple),
    st.sampled_from(Sums),
    st.integers(0, 2**32 - 1),
)
TEXTS = st.text(st.characters(), max_size=20)  # with surrogates
ROWS = st.builds(
    encode,
    st.integers(1, 2**62),
    st.integers(1, 2**62),
    TEXTS.map(encode_text),
    TEXTS.map(encode_text),
    st.integers(0, 2**62),
    PLACES,
)

# ---------------------------------------------------------------------------------------- rows


@given(TEXTS, TEXTS, st.integers(0, 2**62), PLACES)
def test_a_row_is_read_as_it_was_made(name: str, note: str, nbytes: int, place: RecordLocation) -> None:
    row = encode(3, 7, encode_text(name), encode_text(note), nbytes, place)
    assert is_whole(*row)
    assert (decode_text(row[2]), decode_text(row[3]), row[4]) == (name, note, nbytes)
    assert decode_place(row[5]) == place


@given(ROWS, st.data())
def test_one_flipped_bit_anywhere_in_a_row_is_found_and_put_right(row: Row, data: st.DataObject) -> None:
    damaged = flipped(row, data)
    assert not is_whole(*damaged)
    assert mend(damaged) == (row, RowDamage.REPAIRED)


@given(ROWS, st.data())
def test_of_a_row_with_more_damage_nothing_wrong_is_told(row: Row, data: st.DataObject) -> None:
    damaged = row
    for _ in range(data.draw(st.integers(2, 20))):
        damaged = flipped(damaged, data)
    if damaged == row:
        return
    mended, damage = mend(damaged)
    if damage is RowDamage.ALL:
        assert mended is None
    else:
        assert mended is not None
        assert mended[:5] == row[:5]
        assert is_whole(*mended)
        assert mended == row or decode_place(mended[5]).kind is Sums.LOST


@given(
    st.tuples(
        *[st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.binary(max_size=40))] * 6
    )
)
def test_what_is_no_row_is_not_taken_for_one(
    raw: tuple[object, object, object, object, object, object],
) -> None:
    assert not is_whole(*raw)
    assert mend(raw) == (None, RowDamage.ALL)


def flipped(row: Row, data: st.DataObject) -> Row:
    """Flip one bit in one field of a row."""
    fields: list[int | bytes] = list(row)
    index = data.draw(st.sampled_from([i for i, field in enumerate(fields) if field != b""]))
    field = fields[index]
    if isinstance(field, int):
        fields[index] = field ^ 1 << data.draw(st.integers(0, 61))
    else:
        bit = data.draw(st.integers(0, 8 * len(field) - 1))
        fields[index] = bytes(byte ^ (bit // 8 == i) << bit % 8 for i, byte in enumerate(field))
    return tuple(fields)  # type: ignore[return-value]  # the types are those of the row


# ---------------------------------------------------------------------------------------- files

KEYS = {f"layers.{n}.weight": PAGE * (n % 3) + n for n in range(90)}


@pytest.fixture(scope="module")
def stores() -> Iterator[dict[str, Path]]:
    """A directory that was closed, and one that a crash left: with what is committed in the log."""
    with tempfile.TemporaryDirectory() as folder:
        files = open_durable(Path(folder) / "open")
        records = []
        for seed, (name, nbytes) in enumerate(KEYS.items()):
            slot = files.reserve(nbytes)
            finish(files.write(slot, buffer(nbytes, seed)))
            records.append(Record(name, f"note {seed}", slot))
            if len(records) in (30, 60):
                finish(files.commit(records))
        finish(files.commit(records))
        shutil.copytree(Path(folder) / "open", Path(folder) / "crashed")
        files.close()
        yield {"closed": Path(folder) / "open", "crashed": Path(folder) / "crashed"}


DAMAGE = st.one_of(
    st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True), st.integers(0, 7)),
    st.tuples(st.just("cut"), st.floats(0, 1, exclude_max=True), st.just(0)),
    st.tuples(st.just("garbage"), st.floats(0, 1, exclude_max=True), st.integers(1, 600)),
    st.tuples(st.just("zeros"), st.floats(0, 1, exclude_max=True), st.integers(1, 5000)),
    st.tuples(st.just("remove"), st.just(0.0), st.just(0)),
)


def harm(path: Path, what: str, where: float, how: int) -> None:
    """Damage a file."""
    data = bytearray(path.read_bytes())
    at = int(where * len(data))
    match what:
        case "remove":
            path.unlink()
            return
        case "flip":
            data[at] ^= 1 << how
        case "cut":
            del data[at:]
        case "garbage":
            data[at : at + how] = bytes((at * 7 + i * 13) % 256 for i in range(len(data[at : at + how])))
        case _:
            data[at : at + how] = bytes(len(data[at : at + how]))
    path.write_bytes(data)


def look(files: DurableFiles) -> set[str]:
    """Check that nothing which is found is wrong; return the names that are found."""
    records = files.recovered()
    seeds = {name: seed for seed, name in enumerate(KEYS)}
    for record in records:
        if record.name == "new":
            continue
        assert record.note == f"note {seeds[record.name]}"
        assert record.slot.nbytes == KEYS[record.name]
        into = blank(record.slot.nbytes)
        error = outcome(files.read(record.slot, into))
        assert error is None or isinstance(error, IntegrityError)
        assert error is not None or into.equal(buffer(record.slot.nbytes, seeds[record.name]))
    names = {record.name for record in records}
    assert len(names) == len(records)
    slot = files.reserve(100)
    finish(files.write(slot, buffer(100, 1)))
    finish(files.commit([*(record for record in records if record.name != "new"), Record("new", "", slot)]))
    return names


@pytest.mark.parametrize("state", ["closed", "crashed"])
@example(damage=[("garbage", 0.185546875, 1)], in_log=False)  # SQLite's message is no text
@given(damage=st.lists(DAMAGE, min_size=1, max_size=2), in_log=st.booleans())
def test_a_damaged_manifest_is_refused_or_tells_no_lie(
    stores: dict[str, Path], state: str, damage: list[tuple[str, float, int]], in_log: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        shutil.copytree(stores[state], path)
        victim = path / ("tierstore.db-wal" if in_log and state == "crashed" else "tierstore.db")
        for each in damage:
            if victim.exists() and victim.stat().st_size:
                harm(victim, *each)
        before = contents(path)
        files = opened(path)
        if files is None:
            unchanged(before, contents(path))
        else:
            assert look(files) == KEYS.keys()  # or it would have been refused
            files.close()
        files = opened(path, salvage=True)
        if files is not None:
            assert look(files) <= {*KEYS, "new"}
            files.close()


def opened(path: Path, *, salvage: bool = False) -> DurableFiles | None:
    """Open a directory; return nothing where that is refused as it has to be."""
    try:
        return open_durable(path, options={"salvage": salvage})
    except BackendError as error:
        refusal = str(error)
    assert "tierstore.db" in refusal
    return None


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def unchanged(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    """Everything is there, but for SQLite's log, which may have moved into its database."""
    ours = {name for name in before.keys() | after.keys() if name.endswith(".bin")}
    assert all(before.get(name) == after.get(name) for name in ours)


def test_every_byte_of_a_manifest_can_be_hit_without_a_lie(stores: dict[str, Path]) -> None:
    """One bit at a time, spread over all of it: most of them harm nobody."""
    size = (stores["closed"] / "tierstore.db").stat().st_size
    refused = 0
    with tempfile.TemporaryDirectory() as folder:
        for n, at in enumerate(range(0, size, size // 80)):
            path = Path(folder) / str(n)
            shutil.copytree(stores["closed"], path)
            data = bytearray((path / "tierstore.db").read_bytes())
            data[at] ^= 1 << n % 8
            (path / "tierstore.db").write_bytes(data)
            files = opened(path)
            if files is None:
                refused += 1
                continue
            assert look(files) == KEYS.keys()
            files.close()
            shutil.rmtree(path)
    assert refused < 16


def test_two_bytes_that_are_near_are_told_apart(stores: dict[str, Path]) -> None:
    """The oracle above can tell a wrong byte from a right one."""
    assert len({bytes(buffer(10, seed).numpy()) for seed, _ in itertools.islice(enumerate(KEYS), 50)}) == 50
