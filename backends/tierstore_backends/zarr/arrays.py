"""Slots written to, read from and removed from a zarr store, a bounded number of chunks at a time.

Every coroutine here runs in the backend's event loop.  Chunks are encoded and stored one by one and not
through zarr's arrays, for three reasons: to those a chunk that is missing is a chunk of zeros, which here is
lost data; they do not tell what a chunk takes once it is encoded; and they do not check what they read.
What is stored is a plain zarr v3 array all the same, which any zarr reads.

Rule 1: what a slot's chunks take together never exceeds what they take raw: while they are encoded, each
balances its gain against those before it, and where that fails the slot is stored raw.
Rule 2: before a chunk is written a second time it is removed: a store may keep both for a moment.
Rule 3: a failure names the store, the array and the chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash
from zarr.core.buffer import Buffer, default_buffer_prototype

from tierstore.errors import IntegrityError
from tierstore_backends.zarr.codecs import Bytes, Chain, view, wrap
from tierstore_backends.zarr.failures import brief, explain, is_transient
from tierstore_backends.zarr.layout import GROUP_DOCUMENT, array_document, chunk_key, document_key
from tierstore_backends.zarr.places import OpenStore
from tierstore_backends.zarr.slots import Form, StoredChunk, ZarrSlot

_PAYS = 15 / 16  # a codec that gains less on a slot's first chunk is not worth decoding
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


@dataclass(slots=True)
class CodecCounts:
    """What a codec did so far, slots written several times counted as often.

    Attributes:
        encoded_slots: slots that were stored encoded.
        raw_slots: slots that were stored raw because the codec did not pay.
        given_bytes: the bytes of both.
        stored_bytes: what they took.
    """

    encoded_slots: int = 0
    raw_slots: int = 0
    given_bytes: int = 0
    stored_bytes: int = 0


class _DoesNotPayError(Exception):
    """Encoded, the chunks so far take more than raw."""


class Arrays:
    """What is done with the arrays of one owner.

    Args:
        place: the store.
        group: the path of the group that holds the arrays.
        codec: how chunks are encoded.
        concurrency: the most chunks on their way at a time.
        is_checked: whether chunks are summed.
        free_patience_s: how long a removal that may succeed is tried again.
    """

    def __init__(
        self,
        place: OpenStore,
        group: str,
        codec: Chain,
        *,
        concurrency: int,
        is_checked: bool,
        free_patience_s: float,
    ) -> None:
        self.place = place
        self.group = group
        self.counts = CodecCounts()
        self._store = place.store
        self._codec = codec
        self._concurrency = concurrency
        self._is_checked = is_checked
        self._free_patience_s = free_patience_s
        self._turns = asyncio.Semaphore(concurrency)
        self._is_ending = asyncio.Event()

    async def open(self) -> None:
        """Write the group's document."""
        with self._telling("writing the group"):
            await self._put(document_key(self.group), wrap(_bytes(GROUP_DOCUMENT)))

    def end(self) -> None:
        """Let nobody wait any more for better times."""
        self._is_ending.set()

    # --- write --------------------------------------------------------------------------------

    async def write(self, slot: ZarrSlot, source: Bytes) -> None:
        """Store the bytes of a slot; ``slot.chunks`` and ``slot.form`` say how.

        Raises:
            BackendError: the store failed.  The slot holds no bytes then.
        """
        if slot.form is not None:
            await self._remove(slot)  # rule 2
        slot.chunks = []
        if self._codec:
            encoded = await self._encode(slot, source, 0)
            if len(encoded) <= _PAYS * slot.shape.chunk_bytes:
                try:
                    await self._store_encoded(slot, source, encoded)
                except _DoesNotPayError:
                    await self._remove(slot)
                else:
                    return self._count(slot)
        await self._store_raw(slot, source)
        return self._count(slot)

    def _count(self, slot: ZarrSlot) -> None:
        if not self._codec:
            return
        self.counts.encoded_slots += slot.form is Form.ENCODED
        self.counts.raw_slots += slot.form is Form.RAW
        self.counts.given_bytes += slot.nbytes
        self.counts.stored_bytes += slot.stored_bytes

    async def _store_raw(self, slot: ZarrSlot, source: Bytes) -> None:
        async def chunk_buffer(chunk: int) -> Buffer:
            data = _chunk(slot, source, chunk)
            return wrap(data.copy() if self.place.keeps_buffers else data)

        await self._store_all(slot, Form.RAW, chunk_buffer)

    async def _store_encoded(self, slot: ZarrSlot, source: Bytes, first: Buffer) -> None:
        gained_bytes = 0

        async def chunk_buffer(chunk: int) -> Buffer:
            nonlocal gained_bytes
            encoded = await self._encode(slot, source, chunk) if chunk else first
            gained_bytes += slot.shape.chunk_bytes - len(encoded)
            if gained_bytes < 0:
                raise _DoesNotPayError
            return encoded

        await self._store_all(slot, Form.ENCODED, chunk_buffer)

    async def _store_all(
        self, slot: ZarrSlot, form: Form, chunk_buffer: Callable[[int], Awaitable[Buffer]]
    ) -> None:
        """Store the array's document and every chunk."""
        slot.form = form
        chunks: dict[int, StoredChunk] = {}
        codecs = self._codec.documents if form is Form.ENCODED else ()

        async def store_one(number: int) -> None:
            if number < 0:
                document = _bytes(array_document(slot.shape, codecs))
                with self._telling(f"writing the document of array {slot.array}"):
                    await self._put(document_key(slot.array), wrap(document))
                return
            buffer = await chunk_buffer(number)
            chunks[number] = self._sum(buffer)
            with self._telling(f"writing chunk {number} of array {slot.array}"):
                await self._put(chunk_key(slot.array, number), buffer)

        await self._each(range(-1, slot.shape.chunks), store_one)
        slot.chunks = [chunks[number] for number in range(slot.shape.chunks)]

    async def _encode(self, slot: ZarrSlot, source: Bytes, chunk: int) -> Buffer:
        with self._telling(f"encoding chunk {chunk} of array {slot.array}"):
            return await self._codec.encode(_chunk(slot, source, chunk))

    async def _put(self, key: str, buffer: Buffer) -> None:
        await self._store.set(key, buffer)

    def _sum(self, buffer: Buffer) -> StoredChunk:
        data = view(buffer)
        return StoredChunk(data.size, xxhash.xxh3_64_intdigest(data.data) if self._is_checked else 0)

    # --- read ---------------------------------------------------------------------------------

    async def read(self, slot: ZarrSlot, into: Bytes) -> None:
        """Fill ``into`` with the bytes of a slot.

        Raises:
            IntegrityError: a chunk is missing, of another length, or other than what was stored.
            BackendError: the store failed.
        """

        async def read_one(chunk: int) -> None:
            where = f"chunk {chunk} of array {slot.array} in {self.place.name}"
            with self._telling(f"reading chunk {chunk} of array {slot.array}"):
                buffer = await self._store.get(chunk_key(slot.array, chunk), default_buffer_prototype())
            if buffer is None:
                raise IntegrityError(
                    f"{where} is missing: it was removed by somebody else, or lost by the store"
                )
            data = await self._decode(slot, buffer, slot.chunks[chunk], where)
            span = slot.shape.span(chunk)
            into[span] = data[: span.stop - span.start]

        await self._each(range(slot.shape.chunks), read_one)

    async def _decode(self, slot: ZarrSlot, buffer: Buffer, stored: StoredChunk, where: str) -> Bytes:
        found = self._sum(buffer)
        if found.nbytes != stored.nbytes:
            raise IntegrityError(f"{where} has {found.nbytes} B of the {stored.nbytes} B that were stored")
        if found.checksum != stored.checksum:
            raise IntegrityError(
                f"{where} ({found.nbytes} B) has the checksum {found.checksum:016x}, "
                f"but what was written has {stored.checksum:016x}"
            )
        if slot.form is Form.RAW:
            return view(buffer)
        try:
            data = await self._codec.decode(buffer, slot.shape.chunk_bytes)
        except Exception as error:
            raise IntegrityError(f"{where} cannot be decoded: {brief(error)}") from error
        if data.size != slot.shape.chunk_bytes:
            raise IntegrityError(f"{where} decodes to {data.size} B instead of {slot.shape.chunk_bytes} B")
        return data

    # --- free ---------------------------------------------------------------------------------

    async def remove(self, slot: ZarrSlot) -> None:
        """Remove everything of a slot; while the store fails in ways that may pass, again and again.

        Raises:
            BackendError: the store failed for good, or for longer than the patience lasts.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._free_patience_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._remove(slot)
            except Exception as error:
                if not is_transient(error) or self._is_ending.is_set() or loop.time() >= until:
                    raise
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_ending.wait(), min(pause_s, max(until - loop.time(), 0)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _remove(self, slot: ZarrSlot) -> None:
        if self.place.has_folders:
            with self._telling(f"removing array {slot.array}"):
                await self._store.delete_dir(slot.array)
        else:
            keys = slot.keys()

            async def remove_one(number: int) -> None:
                with self._telling(f"removing {keys[number]}"):
                    await self._store.delete(keys[number])

            await self._each(range(len(keys)), remove_one)
        slot.form = None

    # --- many at a time -----------------------------------------------------------------------

    async def _each(self, numbers: Iterable[int], do: Callable[[int], Awaitable[None]]) -> None:
        """Do something for each number, a few at a time; after a failure begin no more and raise it."""
        waiting = list(numbers)[::-1]
        errors: list[BaseException] = []

        async def work() -> None:
            while waiting and not errors:
                async with self._turns:
                    if not waiting or errors:
                        return
                    try:
                        await do(waiting.pop())
                    except BaseException as error:  # noqa: BLE001 - raised below, when all are done
                        errors.append(error)

        await asyncio.gather(*(work() for _ in range(min(len(waiting), self._concurrency))))
        if errors:
            raise errors[0]

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Turn whatever a store raises into an error that says what was done, and where."""
        try:
            yield
        except Exception as error:
            raise explain(error, f"{what} in {self.place.name}") from error


def _chunk(slot: ZarrSlot, source: Bytes, chunk: int) -> Bytes:
    """Return the bytes of one chunk: a view, or a padded copy."""
    data = source[slot.shape.span(chunk)]
    if data.size == slot.shape.chunk_bytes:
        return data
    padded = np.zeros(slot.shape.chunk_bytes, dtype=np.uint8)
    padded[: data.size] = data
    return padded


def _bytes(document: Mapping[str, object]) -> Bytes:
    return np.frombuffer(json.dumps(document).encode(), dtype=np.uint8)
