"""A codec around a medium that survives: found again with a codec, without one, damaged or renamed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch
import xxhash

from tests.codec_bytes import KIB, MIB, Lasting, Shelf, random, repeating
from tierstore.codec import Compressed, DurableCompressed, chunk_records, with_codec
from tierstore.codec.chunk_records import (
    ChunkRecord,
    DamagedNoteError,
    agree,
    packed_note,
    read_note,
    split_name,
)
from tierstore.errors import BackendError, IntegrityError
from tierstore.spi import Buffer, Capabilities, DurableBackend, Record, held_bytes
from tierstore.testing.conformance import contents, finish, stored, succeed

CHUNK = 64 * KIB
ODD_NAMES = ["k", "", "\x1f", "\x1f=k", "\x1f1 k", "\x1e", "a\nb", "\x1f1 ", "schlüssel"]
ODD_NOTES = ["", "note", "\x1e", "\x1e\n", "\x1elz4 0 {}\nnote", "two\nlines"]


def opened(shelf: Shelf, codec: str | None = "lz4") -> DurableCompressed:
    return DurableCompressed(Lasting(64 * MIB, shelf), codec, chunk_bytes=CHUNK)


def found(backend: DurableCompressed) -> dict[str, Record]:
    records = backend.recovered()
    assert len({record.name for record in records}) == len(records)
    return {record.name: record for record in records}


def commit(backend: DurableCompressed, values: dict[str, Buffer], note: str = "note") -> None:
    records = [Record(name, note, stored(backend, value)) for name, value in values.items()]
    succeed(backend.commit(records))


def test_what_survives_is_a_durable_backend_and_nothing_else_is() -> None:
    durable = with_codec(Lasting(MIB, Shelf()), "lz4", "disk").backend
    assert durable.capabilities.is_durable
    assert durable.capabilities.has_batches
    assert not Compressed(Lasting(MIB, Shelf()), "lz4").capabilities.is_durable


@pytest.mark.parametrize("written", ["lz4", None])
@pytest.mark.parametrize("opened_with", ["lz4", None])
def test_a_directory_is_found_again_whatever_the_codecs(written: str | None, opened_with: str | None) -> None:
    shelf = Shelf()
    values = {"packed": repeating(3 * CHUNK + 7), "plain": random(2 * CHUNK), "small": random(10)}
    commit(opened(shelf, written), values, "a note")
    again = opened(shelf, opened_with)
    records = found(again)
    assert set(records) == set(values)
    for name, value in values.items():
        assert records[name].note == "a note"
        assert records[name].slot.nbytes == value.numel()
        assert torch.equal(contents(again, records[name].slot), value)


def test_what_was_found_takes_what_it_took_when_it_was_written() -> None:
    shelf = Shelf()
    first = opened(shelf)
    slot = stored(first, repeating(5 * CHUNK))
    succeed(first.commit([Record("k", "", slot)]))
    second = opened(shelf)
    again = found(second)["k"].slot
    assert held_bytes(again, second.capabilities) == held_bytes(slot, first.capabilities) < CHUNK


def test_a_key_of_many_parts_is_noted_once() -> None:
    shelf = Shelf()
    commit(opened(shelf), {"k": repeating(3 * CHUNK)}, "a long note")
    assert [note.count("a long note") for _, note, _ in shelf.records] == [1, 0, 0]


def test_what_was_found_can_be_kept_by_another_name_and_freed() -> None:
    shelf = Shelf()
    commit(opened(shelf), {"k": repeating(3 * CHUNK), "gone": repeating(3 * CHUNK, 5)})
    second = opened(shelf, None)
    records = found(second)
    succeed(second.commit([Record("renamed", "new note", records["k"].slot)]))
    succeed(second.free(records["gone"].slot))
    third = opened(shelf)
    assert {name: record.note for name, record in found(third).items()} == {"renamed": "new note"}


def test_any_text_is_a_name_and_a_note() -> None:
    for note in ODD_NOTES:
        for make in (repeating, random):
            shelf = Shelf()
            values = {name: make(2 * CHUNK, seed) for seed, name in enumerate(ODD_NAMES)}
            commit(opened(shelf), values, note)
            again = opened(shelf)
            records = found(again)
            assert {name: record.note for name, record in records.items()} == dict.fromkeys(values, note)
            for name, value in values.items():
                assert torch.equal(contents(again, records[name].slot), value)


class Reaching(Lasting):
    """One that reaches a device's memory."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, has_direct_paths=True)

    def accepts(self, memory: torch.Tensor) -> bool:
        return memory.numel() > 0


def test_where_nothing_was_packed_nothing_stands_around_the_medium() -> None:
    shelf = Shelf()
    for values in ({}, {"k": random(CHUNK), "\x1f1 k": random(10)}):
        medium = Reaching(64 * MIB, shelf)
        disk = with_codec(medium, None, "disk")
        assert disk.backend is medium
        assert disk.backend.capabilities.has_direct_paths
        commit_as(medium, values)
    assert [record.name for record in with_codec(Lasting(MIB, shelf), None, "disk").found] == ["k", "\x1f1 k"]


def test_packed_records_make_themselves_known_until_the_last_is_gone() -> None:
    shelf = Shelf()
    commit(opened(shelf), {"packed": repeating(2 * CHUNK), "plain": random(10)})
    medium = Reaching(64 * MIB, shelf)
    disk = with_codec(medium, None, "disk")
    assert isinstance(disk.backend, DurableCompressed)
    assert not disk.backend.capabilities.has_direct_paths  # it would have to unpack in a device's memory
    records = {record.name: record for record in disk.found}
    assert torch.equal(contents(disk.backend, records["packed"].slot), repeating(2 * CHUNK))
    succeed(disk.backend.commit([records["plain"]]))
    assert not isinstance(with_codec(Lasting(MIB, shelf), None, "disk").backend, Compressed)


def test_a_codec_that_is_asked_for_looks_at_all_bytes_in_host_memory() -> None:
    assert not with_codec(Reaching(MIB, Shelf()), "lz4", "disk").backend.capabilities.has_direct_paths


def test_what_was_recovered_is_asked_for_once() -> None:
    class Once(Lasting):
        asked = 0

        def recovered(self) -> Sequence[Record]:
            self.asked += 1
            return super().recovered()

    shelf = Shelf()
    for codec in (None, "lz4", None):
        medium = Once(64 * MIB, shelf)
        disk = with_codec(medium, codec, "disk")
        assert medium.asked == 1
        assert [record.name for record in disk.found] == [name for name, _, _ in shelf.records]
        commit_as(cast("DurableBackend", disk.backend), {"k": repeating(CHUNK)})


def commit_as(backend: DurableBackend, values: dict[str, Buffer], note: str = "note") -> None:
    succeed(backend.commit([Record(name, note, stored(backend, value)) for name, value in values.items()]))


@pytest.mark.parametrize("opened_with", ["lz4", None])
@pytest.mark.parametrize("packs", [True, False])
def test_names_that_were_written_without_a_wrapper_are_found_with_one(
    opened_with: str | None, packs: bool
) -> None:
    shelf = Shelf()
    values = {name: random(1000, seed) for seed, name in enumerate(ODD_NAMES)}
    commit_as(Lasting(64 * MIB, shelf), values)
    if packs:  # a session with a codec adds a key
        disk = with_codec(Lasting(64 * MIB, shelf), "lz4", "disk")
        values["packed"] = repeating(3 * CHUNK)
        new = Record("packed", "note", stored(disk.backend, values["packed"]))
        succeed(disk.backend.commit([*disk.found, new]))  # type: ignore[attr-defined]
    disk = with_codec(Lasting(64 * MIB, shelf), opened_with, "disk")
    assert isinstance(disk.backend, Compressed) == (packs or opened_with is not None)
    assert [record.name for record in disk.found] == list(values)
    for record in disk.found:
        assert record.note == "note"
        assert torch.equal(contents(disk.backend, record.slot), values[record.name])


def test_keys_are_found_in_the_order_in_which_they_were_committed() -> None:
    shelf = Shelf()
    names = ["b", "packed 1", "a", "packed 0", "c"]
    commit(opened(shelf), {n: repeating(2 * CHUNK) if "packed" in n else random(9) for n in names})
    assert list(found(opened(shelf))) == names


@pytest.mark.parametrize(
    "name", ["\x1f0 k", "\x1f01 k", "\x1f1", "\x1f\u0661 k", f"\x1f{'9' * 5000} k", "\x1f-1 k"], ids=ascii
)
def test_a_name_that_is_not_quite_one_of_ours_is_a_name(name: str) -> None:
    assert split_name(name) == (name, 0)


def test_a_key_named_like_a_part_of_another_is_not_taken_for_it() -> None:
    shelf = Shelf()
    values = {"k": repeating(3 * CHUNK), "\x1f1 k": random(10), "\x1f2 k": repeating(2 * CHUNK, 5)}
    commit(opened(shelf), values)
    again = opened(shelf)
    for name, record in found(again).items():
        assert torch.equal(contents(again, record.slot), values.pop(name))
    assert not values


def test_a_commit_that_fails_says_so() -> None:
    medium = Lasting(MIB, Shelf())
    backend = DurableCompressed(medium, "lz4")
    medium.fails = True
    slot = stored(backend, repeating(CHUNK))
    assert isinstance(finish(backend.commit([Record("k", "", slot)])), BackendError)


def damage_digit(note: str) -> str:
    return note.replace('"width":4', '"width":2')


def cut_short(note: str) -> str:
    head, _, own = note.partition("\n")
    return f"{head[: len(head) // 2]}\n{own}"


def other_codec(note: str) -> str:
    return note.replace("lz4", "zip", 1)


@pytest.mark.parametrize("damage", [damage_digit, cut_short, other_codec])
@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_note_makes_its_key_unreadable_and_no_other(damage: object, which: int) -> None:
    shelf = Shelf()
    commit(opened(shelf), {"k": repeating(2 * CHUNK), "other": repeating(2 * CHUNK, 9)}, "note")
    name, note, data = shelf.records[which]
    shelf.records[which] = (name, damage(note), data)  # type: ignore[operator]
    assert shelf.records[which][1] != note
    again = opened(shelf)
    records = found(again)
    slot = records["k"].slot
    assert slot.nbytes == 2 * CHUNK
    assert records["k"].note == "note"
    error = finish(again.read(slot, torch.empty(2 * CHUNK, dtype=torch.uint8)))
    assert isinstance(error, IntegrityError)
    assert "'k'" in str(error)
    assert torch.equal(contents(again, records["other"].slot), repeating(2 * CHUNK, 9))


@pytest.mark.parametrize("damage", [damage_digit, cut_short, other_codec])
def test_a_damaged_note_of_a_key_in_one_part_is_noticed(damage: object) -> None:
    shelf = Shelf()
    commit(opened(shelf), {"k": repeating(CHUNK)})
    name, note, data = shelf.records[0]
    shelf.records[0] = (name, damage(note), data)  # type: ignore[operator]
    again = opened(shelf)
    error = finish(again.read(found(again)["k"].slot, torch.empty(CHUNK, dtype=torch.uint8)))
    assert isinstance(error, IntegrityError)
    assert "damaged" in str(error)


def test_a_damaged_one_is_kept_as_it_is_by_commits_and_given_back_when_freed() -> None:
    shelf = Shelf()
    commit(opened(shelf), {"k": repeating(2 * CHUNK)})
    name, note, data = shelf.records[1]
    shelf.records[1] = (name, damage_digit(note), data)
    second = opened(shelf)
    slot = found(second)["k"].slot
    succeed(second.commit([Record("renamed", "note", slot)]))
    assert [each[1] for each in shelf.records][1] == damage_digit(note)
    shelf.records[1] = (shelf.records[1][0], note, data)  # somebody mends it
    third = opened(shelf)
    assert torch.equal(contents(third, found(third)["renamed"].slot), repeating(2 * CHUNK))
    inner = Lasting(64 * MIB, shelf)
    fourth = DurableCompressed(inner, "lz4")
    succeed(fourth.free(found(fourth)["renamed"].slot))
    fourth.reserve(64 * MIB)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_part_that_is_missing_makes_the_key_unreadable(lost: int) -> None:
    shelf = Shelf()
    commit(opened(shelf), {"k": repeating(3 * CHUNK)})
    del shelf.records[lost]
    again = opened(shelf)
    slot = found(again)["k"].slot
    assert slot.nbytes == 3 * CHUNK
    error = finish(again.read(slot, torch.empty(3 * CHUNK, dtype=torch.uint8)))
    assert isinstance(error, IntegrityError)
    assert "does not agree" in str(error)


@pytest.mark.parametrize("opened_with", ["lz4", None])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_note_that_is_gone_is_its_keys_damage_alone(which: int, opened_with: str | None) -> None:
    shelf = Shelf()
    values = {"k": repeating(3 * CHUNK), "other": repeating(2 * CHUNK, 9), "plain": random(10)}
    commit(opened(shelf), values)
    name, _, data = shelf.records[which]
    shelf.records[which] = (name, "", data)
    for _ in range(2):  # and again, after a commit of what was found
        again = opened(shelf, opened_with)
        records = found(again)
        for key in ("other", "plain"):
            assert torch.equal(contents(again, records[key].slot), values[key])
        slot = records["k"].slot
        assert slot.nbytes == 3 * CHUNK
        error = finish(again.read(slot, torch.empty(3 * CHUNK, dtype=torch.uint8)))
        assert isinstance(error, IntegrityError)
        assert "'k'" in str(error)
        held = sum(held_bytes(record.slot, again.capabilities) for record in records.values())
        assert held == sum(data.numel() for _, _, data in shelf.records)
        succeed(again.commit(list(records.values())))
    for record in records.values():
        succeed(again.free(record.slot))
    again.reserve(64 * MIB)  # nothing was left behind


def test_a_key_of_which_nothing_is_understood_has_the_bytes_that_it_takes() -> None:
    shelf = Shelf()
    commit(opened(shelf), {"k": repeating(CHUNK)})
    name, note, data = shelf.records[0]
    shelf.records[0] = (name, other_codec(note), data)
    again = opened(shelf)
    slot = found(again)["k"].slot
    assert slot.nbytes == held_bytes(slot, again.capabilities) == data.numel()
    succeed(again.free(slot))


def test_bytes_of_a_later_format_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    commit(opened(shelf), {"k": repeating(CHUNK)})
    name, note, data = shelf.records[0]
    line, own = read_note(note)
    assert line is not None
    with monkeypatch.context() as patch:
        patch.setattr(chunk_records, "VERSION", chunk_records.VERSION + 1)
        shelf.records[0] = (name, packed_note(line, own), data)
    again = opened(shelf)
    error = finish(again.read(found(again)["k"].slot, torch.empty(CHUNK, dtype=torch.uint8)))
    assert isinstance(error, IntegrityError)
    assert "format 2, and this version of tierstore knows 1" in str(error)


def said(note: str, **fields: object) -> str:
    """Let a line say something else, with a digest that is right."""
    head, _, own = note[1:].partition("\n")
    _, _, text = head.split(" ", 2)
    text = fields.pop("text", None) or json.dumps({**json.loads(text), **fields})  # type: ignore[assignment]
    return f"\x1elz4 {xxhash.xxh3_64_hexdigest(text.encode())} {text}\n{own}"


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "[" * 100_000},
        {"text": "[1]"},
        {"text": "{"},
        {"text": '{"v":1,"nbytes":Infinity}'},
        {"nbytes": -1},
        {"nbytes": 0},
        {"nbytes": 2**62},
        {"nbytes": 2**62, "chunk_bytes": 2**62, "block_bytes": 2**62},
        {"nbytes": 1e400},
        {"nbytes": "100"},
        {"nbytes": True},
        {"chunk": 1},
        {"chunk": -1},
        {"chunks": 2**40},
        {"chunks": 0},
        {"width": 0},
        {"width": 3},
        {"width": 2**40},
        {"block_bytes": 0},
        {"block_bytes": 1},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1},
        {"lengths": []},
        {"lengths": 7},
        {"lengths": [-5, 5]},
        {"lengths": [2**70]},
        {"lengths": ["1"]},
        {"digest": "x"},
        {"digest": None},
        {"v": [1]},
    ],
    ids=lambda fields: str(fields)[:50],
)
@pytest.mark.parametrize("opened_with", ["lz4", None])
def test_a_line_that_says_what_cannot_be_costs_its_key_and_no_other(
    fields: dict[str, object], opened_with: str | None
) -> None:
    shelf = Shelf()
    commit(opened(shelf), {"k": repeating(CHUNK), "other": repeating(2 * CHUNK, 9)}, "note")
    name, note, data = shelf.records[0]
    shelf.records[0] = (name, said(note, **fields), data)
    again = opened(shelf, opened_with)
    records = found(again)
    slot = records["k"].slot
    assert 0 <= slot.nbytes <= 256 * data.numel()
    error = finish(again.read(slot, torch.empty(slot.nbytes, dtype=torch.uint8)))
    assert isinstance(error, IntegrityError)
    assert "'k'" in str(error)
    assert torch.equal(contents(again, records["other"].slot), repeating(2 * CHUNK, 9))


def test_a_chunk_that_is_larger_than_there_is_room_to_unpack_it_costs_its_key() -> None:
    shelf = Shelf()
    commit(opened(shelf), {"k": repeating(CHUNK), "other": repeating(2 * CHUNK, 9)}, "note")
    name, note, _ = shelf.records[0]
    large = random(4 * CHUNK)
    digest = xxhash.xxh3_64_hexdigest(large.numpy().tobytes())
    told = {"nbytes": 4 * CHUNK, "chunk_bytes": 4 * CHUNK, "block_bytes": 4 * CHUNK, "lengths": [4 * CHUNK]}
    shelf.records[0] = (name, said(note, **told, digest=digest), large)
    again = opened(shelf)
    records = found(again)
    error = finish(again.read(records["k"].slot, torch.empty(4 * CHUNK, dtype=torch.uint8)))
    assert isinstance(error, IntegrityError)
    assert torch.equal(contents(again, records["other"].slot), repeating(2 * CHUNK, 9))


def test_lines_agree_only_if_they_are_of_one_slot() -> None:
    lines = [ChunkRecord(100, chunk, 2, 4, 50, 50, (30,), 7) for chunk in (0, 1)]
    assert agree(lines, [30, 30])
    assert not agree(lines, [30, 31])
    assert not agree(lines[:1], [30])
    assert not agree(lines[::-1], [30, 30])
    assert not agree([lines[0], ChunkRecord(100, 1, 2, 8, 50, 50, (30,), 7)], [30, 30])


def test_a_note_that_is_ours_but_nonsense_is_damaged() -> None:
    with pytest.raises(DamagedNoteError):
        read_note("\x1enonsense\nnote")
