"""A codec around a backend that finds its slots again: it finds them again too, packed or not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from tierstore.codec.chunk_records import (
    ChunkRecord,
    DamagedNoteError,
    agree,
    first_name,
    is_ours,
    later_name,
    own_note,
    packed_note,
    plain_record,
    read_note,
    split_name,
)
from tierstore.codec.compressed import Compressed
from tierstore.codec.slots import CHUNK_BYTES, Chunk, CodecSlot, PackedShape, SlotDamage
from tierstore.errors import ConfigError, IntegrityError
from tierstore.spi import Completion, DurableBackend, Record, held_bytes


class DurableCompressed(Compressed):
    """A `Compressed` that is a `tierstore.spi.DurableBackend`, as the one within is.

    Whatever is damaged is so for its own key alone: that one says so when it is read.
    """

    def __init__(self, backend: DurableBackend, codec: str | None, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        if not backend.capabilities.is_durable:
            raise ConfigError(
                "what survives needs a backend whose medium does: this one says that it does not"
            )
        super().__init__(backend, codec, chunk_bytes=chunk_bytes)
        self._capabilities = replace(self._capabilities, is_durable=True)
        # By key, the names that the backend within may have for it, where that is not its own alone.
        self._names: dict[str, frozenset[str]] = {}

    def commit(self, records: Sequence[Record], gone: Collection[str] | None = None) -> Completion:
        """Change what survives; see `tierstore.spi.DurableBackend`."""
        inner = [(record.name, self._inner(record)) for record in records]
        named = {key: frozenset(each.name for each in parts) for key, parts in inner}
        former = {key: self._names_of(key) for key in (*named, *(gone or ()))}
        for key, names in former.items():  # until it has ended well, it may have either
            self._note_names(key, names | named.get(key, frozenset()))
        within = [each for _, parts in inner for each in parts]
        kept = {each.name for each in within}
        gone_within = None if gone is None else set().union(*former.values()) - kept
        completion = self.within.commit(within, gone_within)

        def note(error: BaseException | None) -> None:
            if error is None:
                if gone is None:
                    self._names.clear()
                for key in former:
                    self._note_names(key, named.get(key, frozenset()))

        completion.add_done_callback(note)  # before whoever commits next knows of it
        return completion

    def _names_of(self, key: str) -> frozenset[str]:
        return self._names.get(key) or frozenset((first_name(key),))

    def _note_names(self, key: str, names: frozenset[str]) -> None:
        if not names or names == {first_name(key)}:
            self._names.pop(key, None)
        else:
            self._names[key] = names

    def recovered(self) -> Sequence[Record]:
        """Return what the last commit named; what cannot be unpacked is there too, and says so when read."""
        return self.unpacked(self.within.recovered())

    def unpacked(self, found: Sequence[Record]) -> list[Record]:
        """Return our records for those that the backend within has recovered: in place of `recovered`."""
        groups: dict[str, dict[int, Record]] = {}
        for record in found:
            if is_ours(record.note):
                key, chunk = split_name(record.name)
                groups.setdefault(key, {})[chunk] = record
        if not groups:
            return [self._as_it_is(record) for record in found]
        for record in found:
            if record.name in groups and not is_ours(record.note):
                groups[record.name][0] = record  # other parts say that it is one: its note is damaged
        for key, group in groups.items():
            self._note_names(key, frozenset(record.name for record in group.values()))
        return list(self._in_order(found, groups))

    def _in_order(self, found: Sequence[Record], groups: Mapping[str, dict[int, Record]]) -> Iterator[Record]:
        """Yield our records in the order of the first of each that was found."""
        seen: set[str] = set()
        for record in found:
            key = split_name(record.name)[0] if is_ours(record.note) else record.name
            if key not in groups:
                yield self._as_it_is(record)
            elif key not in seen:
                seen.add(key)
                yield self._found(key, groups[key])

    def _as_it_is(self, record: Record) -> Record:
        slot = CodecSlot(record.slot.nbytes, self, record.slot, self._medium)
        slot.weigh()
        return Record(record.name, record.note, slot)

    def _found(self, key: str, group: Mapping[int, Record]) -> Record:
        """Return our record for those of the backend within that stand for it."""
        records = [group[chunk] for chunk in sorted(group)]
        try:
            lines, note = _read(records)
        except (ValueError, KeyError, TypeError) as cause:
            return self._damaged(key, group, cause)
        if not lines:
            slot = CodecSlot(records[0].slot.nbytes, self, records[0].slot, self._medium)
        else:
            slot = CodecSlot(lines[0].nbytes, self, None, self._medium)
            slot.shape = PackedShape(lines[0].width, lines[0].block_bytes, lines[0].chunk_bytes)
            slot.chunks = [
                Chunk(record.slot, line.lengths, line.digest)
                for record, line in zip(records, lines, strict=True)
            ]
        slot.weigh()
        return Record(key, note, slot)

    def _damaged(self, key: str, group: Mapping[int, Record], cause: Exception) -> Record:
        """Return a record whose slot is there to be kept or freed, but not to be read."""
        error = IntegrityError(f"the compressed bytes of {key!r} cannot be read: {cause}", key=key)
        error.__cause__ = cause.with_traceback(None)
        held = sum(held_bytes(record.slot, self._medium) for record in group.values())
        slot = CodecSlot(_told_nbytes(group.values()) or held, self, None, self._medium)
        slot.damage = SlotDamage(error, group)
        slot.chunks = [Chunk(record.slot, (), 0) for record in group.values()]
        slot.weigh()
        notes = [own_note(record.note) for chunk, record in group.items() if chunk == 0]
        return Record(key, notes[0] if notes else "", slot)

    def _inner(self, record: Record) -> list[Record]:
        """Return the records of the backend within that stand for one of ours."""
        slot = self._own(record.slot)
        if slot.damage is not None:
            return [
                Record(_name(record.name, chunk), found.note, found.slot)
                for chunk, found in slot.damage.records.items()
            ]
        if slot.whole is not None:
            return [Record(*plain_record(record.name, record.note), slot.whole)]
        return [
            Record(
                _name(record.name, index),
                packed_note(_line(slot, index), "" if index else record.note),
                chunk.slot,
            )
            for index, chunk in enumerate(slot.chunks)
            if chunk is not None
        ]


def _name(key: str, chunk: int) -> str:
    return later_name(key, chunk) if chunk else first_name(key)


def _line(slot: CodecSlot, index: int) -> ChunkRecord:
    """Describe a packed chunk."""
    chunk, shape = slot.chunks[index], slot.shape
    assert chunk is not None  # guaranteed: whoever commits a slot has written it, whole
    assert shape is not None
    return ChunkRecord(
        nbytes=slot.nbytes,
        chunk=index,
        chunks=len(slot.chunks),
        width=shape.width,
        block_bytes=shape.block_bytes,
        chunk_bytes=shape.chunk_bytes,
        lengths=chunk.lengths,
        digest=chunk.digest,
    )


def _read(records: Sequence[Record]) -> tuple[list[ChunkRecord], str]:
    """Return what the chunks' notes say, nothing if the slot is stored as it is, and the slot's own note.

    Raises:
        ValueError: it cannot be understood, or is not what is there; so do ``KeyError`` and ``TypeError``.
    """
    told = [read_note(record.note) for record in records]
    lines = [line for line, _ in told if line is not None]
    if not lines and len(records) == 1 and split_name(records[0].name)[1] == 0:
        return [], told[0][1]
    if len(lines) != len(records) or not agree(lines, [record.slot.nbytes for record in records]):
        raise DamagedNoteError("what is noted of its parts does not agree with what is there")
    return lines, told[0][1]


def _told_nbytes(records: Iterable[Record]) -> int | None:
    """Return how many bytes a slot had, if any of its parts still says so."""
    for record in records:
        try:
            line, _ = read_note(record.note)
        except (ValueError, KeyError, TypeError):
            continue
        if line is not None:
            return line.nbytes
    return None
