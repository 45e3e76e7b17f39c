"""The `tierstore.spi.Backend` over the arrays of one owner in one zarr store."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Coroutine

from tierstore.errors import CapacityError, StoreClosed, UsageError
from tierstore.spi import Buffer, Capabilities, Completion, Medium, Slot
from tierstore.units import format_bytes
from tierstore_backends.buffers import check_buffer
from tierstore_backends.lifetime import BackendLifetime
from tierstore_backends.quota import Quota
from tierstore_backends.zarr import owner
from tierstore_backends.zarr.arrays import Arrays, CodecCounts
from tierstore_backends.zarr.failures import explain, forget_frames
from tierstore_backends.zarr.layout import cut
from tierstore_backends.zarr.loop import LoopThread
from tierstore_backends.zarr.options import ZarrOptions
from tierstore_backends.zarr.places import OpenStore, open_place
from tierstore_backends.zarr.slots import ArraySlotState, ZarrSlot


class ZarrBackend:
    """Scratch arrays in a zarr store.

    Args:
        capacity_bytes: the most that the chunks of all slots may take in the store.
        options: where and how; see `tierstore_backends.zarr.options`.

    Raises:
        ConfigError: the store or the codec cannot be what the options say.
        UsageError: another live backend owns the place.
        BackendError: the store failed.
    """

    def __init__(self, capacity_bytes: int, options: ZarrOptions) -> None:
        self._capabilities = Capabilities(Medium.STORAGE, depth=options.concurrency, has_shrinking_slots=True)
        self._most_chunk_bytes = options.chunk_bytes
        self._quota = Quota("zarr", capacity_bytes)
        self._numbers = itertools.count()
        self._loop = LoopThread(options.concurrency)
        try:
            self._arrays, claim = self._loop.run(_open(options))
        except BaseException:
            self._loop.close()
            raise
        # A fork's child has no loop, and the arrays are its parent's: nothing that it could let go of.
        self._ending = BackendLifetime(self, lambda: None, _shut, self._loop, self._arrays, claim)

    @property
    def capabilities(self) -> Capabilities:
        """See `tierstore.spi.Backend`."""
        return self._capabilities

    @property
    def held_bytes(self) -> int:
        """What the chunks of all slots take in the store, or may take: never above the capacity."""
        return self._quota.held_bytes

    @property
    def group(self) -> str:
        """The path in the store of the group that holds the arrays."""
        return self._arrays.group

    @property
    def codec_counts(self) -> CodecCounts:
        """What the codec did so far."""
        return self._arrays.counts

    def reserve(self, nbytes: int) -> ZarrSlot:
        """Count a slot of ``nbytes``; the store is not asked.

        Raises:
            CapacityError: fewer bytes are free.
            UsageError: ``nbytes`` is negative.
            StoreClosed: after ``close``.
        """
        self._check_open()
        if nbytes < 0:
            raise UsageError(f"a slot cannot have {nbytes} bytes")
        shape = cut(nbytes, self._most_chunk_bytes)
        self._quota.take(shape.padded_bytes)
        return ZarrSlot(nbytes, f"{self._arrays.group}/{next(self._numbers)}", shape, self._arrays)

    def read(self, slot: Slot, into: Buffer) -> Completion:
        """Fill ``into``, chunk by chunk.

        Completes with ``IntegrityError`` where a chunk is missing, cut or different; with ``BackendError``
        where the store fails.

        Raises:
            UsageError: not a slot of this backend, one without bytes, or a buffer that does not fit.
            StoreClosed: after ``close``.
        """
        own = self._own(slot)
        if own.state is not ArraySlotState.WRITTEN and own.nbytes:
            raise UsageError(f"{own} holds no bytes: nothing was written there, or writing failed")
        check_buffer(into, own.nbytes)
        if not own.nbytes:
            return Completion.done()
        return self._begin(lambda: self._arrays.read(own, into.numpy()))

    def write(self, slot: Slot, source: Buffer) -> Completion:
        """Write ``source`` as an array.

        Completes with ``BackendError`` where the store fails, and with ``CapacityError`` where a slot that
        takes less than it was reserved for does not find its bytes again; it then holds none, and may be
        written again.

        Raises:
            UsageError: not a slot of this backend, or a buffer that does not fit.
            StoreClosed: after ``close``.
        """
        own = self._own(slot)
        check_buffer(source, own.nbytes)
        if not own.nbytes:
            own.state = ArraySlotState.WRITTEN
            return Completion.done()
        try:
            self._quota.take(own.shape.padded_bytes - own.taken_bytes)
        except CapacityError as error:
            return Completion.done(error)
        own.taken_bytes = own.shape.padded_bytes
        # From here to the end of the write the old bytes are gone and the new ones not there.
        own.state = ArraySlotState.RESERVED
        arrays, quota = self._arrays, self._quota
        return self._begin(lambda: _write(arrays, quota, own, source))

    def free(self, slot: Slot) -> Completion:
        """Remove the slot's array.  Done when the store has removed it.

        Completes with ``BackendError`` where the store fails, for as long as ``free_patience_s`` if it may
        pass; the bytes stay counted then, and the slot may be freed again.

        Raises:
            UsageError: not a slot of this backend, or freed before.
            StoreClosed: after ``close``.
        """
        own = self._own(slot)
        own.state = ArraySlotState.FREED
        if own.form is None:  # nothing was ever stored for it
            self._quota.give(own.taken_bytes)
            return Completion.done()
        arrays, quota = self._arrays, self._quota
        return self._begin(lambda: _free(arrays, quota, own))

    def resize(self, capacity_bytes: int) -> None:
        """Hold at most ``capacity_bytes``.

        Raises:
            CapacityError: more is held.
            StoreClosed: after ``close``.
        """
        self._check_open()
        held_bytes = self._quota.held_bytes
        if held_bytes > capacity_bytes:
            raise CapacityError(
                f"{self._arrays.place.name} holds {format_bytes(held_bytes)}: free some before the capacity "
                f"becomes {format_bytes(capacity_bytes)}",
                needed_bytes=held_bytes,
                free_bytes=0,
            )
        self._quota.resize(capacity_bytes)

    def close(self) -> None:
        """Finish what is under way and remove everything of ours.  Idempotent; from any thread.

        Raises:
            UsageError: called from a completion's callback, which would wait for itself.
            BackendError: something could not be removed; the next owner of the place sweeps it.
        """
        if self._loop.is_own_thread():
            raise UsageError("scratch arrays cannot be closed from a completion's callback")
        self._ending.close()

    def _begin(self, work: Callable[[], Coroutine[None, None, None]]) -> Completion:
        completion = Completion()
        name = self._arrays.place.name
        works = [work]

        async def run() -> None:
            error: BaseException | None = None
            try:
                # Taken out: when the completion is told, nothing here may refer to the buffer any more.
                await works.pop()()
            except BaseException as failure:  # noqa: BLE001 - whoever waits for the completion gets it
                error = forget_frames(explain(failure, f"an operation in {name}"))
            completion.complete(error)

        try:
            self._loop.begin(run)
        except RuntimeError as error:
            raise StoreClosed(f"the arrays in {name} were closed") from error
        return completion

    def _check_open(self) -> None:
        if self._ending.is_over:
            raise StoreClosed(f"the arrays in {self._arrays.place.name} were closed")

    def _own(self, slot: Slot) -> ZarrSlot:
        self._check_open()
        if not isinstance(slot, ZarrSlot) or slot.home is not self._arrays:
            raise UsageError(f"{slot!r} is not a slot of the arrays in {self._arrays.place.name}")
        if slot.state is ArraySlotState.FREED:
            raise UsageError(f"{slot!r} was freed before")
        return slot


async def _write(arrays: Arrays, quota: Quota, slot: ZarrSlot, source: Buffer) -> None:
    try:
        await arrays.write(slot, source.numpy())
    except BaseException:
        slot.held_bytes = slot.nbytes
        raise
    stored_bytes = slot.stored_bytes
    quota.give(slot.taken_bytes - stored_bytes)
    slot.taken_bytes = stored_bytes
    slot.held_bytes = min(stored_bytes, slot.nbytes)
    slot.state = ArraySlotState.WRITTEN


async def _free(arrays: Arrays, quota: Quota, slot: ZarrSlot) -> None:
    try:
        await arrays.remove(slot)
    except BaseException:
        slot.state = ArraySlotState.RESERVED
        raise
    quota.give(slot.taken_bytes)


async def _open(options: ZarrOptions) -> tuple[Arrays, owner.Claim]:
    """Open the store, become its owner, and make the group.  Leaves nothing open if it fails."""
    await options.codec.probe()
    place = await open_place(options.store, options.storage_options)
    try:
        claim = await _claim(place)
        arrays = Arrays(
            place,
            claim.note.group,
            options.codec,
            concurrency=options.concurrency,
            is_checked=options.checksum,
            free_patience_s=options.free_patience_s,
        )
        try:
            await arrays.open()
        except BaseException:
            with contextlib.suppress(Exception):  # the error under way says more
                await claim.release()
            raise
    except BaseException:
        await place.close()
        raise
    return arrays, claim


async def _claim(place: OpenStore) -> owner.Claim:
    try:
        return await owner.claim(place.store, place.name)
    except Exception as error:
        raise explain(error, f"becoming the owner of {place.name}") from error


def _shut(loop: LoopThread, arrays: Arrays, claim: owner.Claim) -> None:
    """End everything, in a thread that nothing here waits for."""
    if loop.is_own_thread():  # the garbage collector came by there
        threading.Thread(target=_shut, args=(loop, arrays, claim), name="tierstore-zarr-end").start()
        return
    loop.refuse()
    try:
        loop.run(_end(loop, arrays, claim))
    except Exception as error:
        raise explain(error, f"removing {arrays.group} from {arrays.place.name}") from error
    finally:
        loop.close()


async def _end(loop: LoopThread, arrays: Arrays, claim: owner.Claim) -> None:
    arrays.end()
    await loop.settled()
    try:
        await claim.release()
    finally:
        await arrays.place.close()
