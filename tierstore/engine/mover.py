"""Carries out copies and frees on the backends; what they come to are events.

Small copies between host memory and a medium that takes many at a time travel in batches.  Outcomes
that are known at once are told, to be taken in by the turn that goes on; later ones are reported from
the backend's thread.  Knows no ledger and takes no lock: which replicas may be copied or freed is
decided elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch

from tierstore import trace_ranges
from tierstore.core import messages as m
from tierstore.engine.batches import SMALL_BYTES
from tierstore.engine.given import Given
from tierstore.errors import BackendError, CapacityError, IntegrityError
from tierstore.spi import (
    AddressableSlot,
    Backend,
    Buffer,
    Completion,
    FullBackend,
    Medium,
    PartialError,
    Record,
    Slot,
    held_bytes,
)

Tell = Callable[[Sequence[m.Event]], None]


class DataMover:
    """The slots of all replicas, and what is under way between them.  Safe from any thread.

    Args:
        backends: one for each tier, fastest first.
        names: the tiers' names, for messages.
        tell: queues events for whoever takes them in next: the caller of `start` and the like does.
        report: takes events in, from a backend's thread.
    """

    def __init__(self, backends: Sequence[Backend], names: Sequence[str], tell: Tell, report: Tell) -> None:
        self._backends = [cast("FullBackend", backend) for backend in backends]
        self._capabilities = [backend.capabilities for backend in backends]
        self._names = names
        self.tell = tell
        self._report = report
        self._media = [each.medium for each in self._capabilities]
        # Written by whoever carries out a command; a replica's entry is there from its StartCopy to
        # its FreeSlot, which the ledger never has under way at the same time.
        self._slots: dict[m.ReplicaId, Slot] = {}

    def slot(self, place: m.ReplicaId) -> Slot:
        """Return the slot of a replica that is kept READY."""
        return self._slots[place]

    def adopt(self, place: m.ReplicaId, slot: Slot) -> None:
        """Take a recovered replica's slot."""
        self._slots[place] = slot

    def charge_bytes(self, place: m.ReplicaId) -> int | None:
        """Return what a replica that was just written takes of its medium, where that may be less."""
        capabilities = self._capabilities[place.tier]
        return held_bytes(self._slots[place], capabilities) if capabilities.has_shrinking_slots else None

    def clear(self) -> None:
        """Forget every slot: nothing moves any more."""
        self._slots.clear()

    def reserve(self, command: m.StartCopy, given: Given | None = None) -> Slot | None:
        """Take room for a copy; if there is none, tell why and return ``None``.

        Args:
            command: the copy.
            given: memory that is to be the room, with the bytes in it.
        """
        place = command.target
        backend = self._backends[place.tier]
        try:
            slot = backend.reserve(command.nbytes) if given is None else given.to(backend)
        except CapacityError as error:
            # Kept by the books: its traceback would keep every frame that led here, and what they refer to.
            self.tell([m.CopyRefused(command.copy, error.with_traceback(None))])
            return None
        except BaseException as error:  # noqa: BLE001 - a foreign backend may raise anything
            self.tell([m.CopyDone(command.copy, self._explain(error, command))])
            return None
        self._slots[place] = slot
        return slot

    def start(self, command: m.StartCopy) -> None:
        """Begin a copy between two tiers."""
        assert command.source is not None  # those of callers are the engine's
        slot = self.reserve(command)
        if slot is None:
            return
        try:
            with self._range([command]) if trace_ranges.are_on() else trace_ranges.NO_RANGE:
                completion = self._move(
                    command.source.tier, self._slots[command.source], command.target.tier, slot
                )
        except BaseException as error:  # noqa: BLE001 - a foreign backend may raise anything
            self.tell([m.CopyDone(command.copy, self._explain(error, command))])
            return
        self._follow(command, completion)

    def _range(self, copies: Sequence[m.StartCopy]) -> contextlib.AbstractContextManager[None]:
        """Return a range for who profiles, of copies of one direction."""
        source, target = cast("m.ReplicaId", copies[0].source).tier, copies[0].target.tier
        verb = f"copy {self._names[source]} to {self._names[target]}:"
        return trace_ranges.named_range(
            verb, [each.key for each in copies], sum(each.nbytes for each in copies)
        )

    def _follow(self, command: m.StartCopy, completion: Completion) -> None:
        if completion.is_done:
            self.tell([self.outcome(command, completion.error)])
            return
        if completion.is_stream_ordered:
            # Told first: the end of the copy, in another thread, must not overtake it.
            self.tell([m.CopyOrdered(command.copy)])
        completion.add_done_callback(lambda error: self._report([self.outcome(command, error)]))

    def outcome(self, command: m.StartCopy, error: BaseException | None = None) -> m.CopyDone:
        """Return the event that a copy ended with."""
        if error is None:
            try:
                return m.CopyDone(command.copy, charge_bytes=self.charge_bytes(command.target))
            except BaseException as failure:  # noqa: BLE001 - a foreign slot may raise anything
                error = failure
        return m.CopyDone(command.copy, self._explain(error, command))

    def is_batched(self, command: m.StartCopy) -> bool:
        """Whether a copy is to travel with others: a small one between host memory and a medium that can."""
        if command.source is None or command.nbytes > SMALL_BYTES:
            return False
        source, target = command.source.tier, command.target.tier
        if self._media[source] is Medium.HOST:
            return self._capabilities[target].has_batches
        return self._media[target] is Medium.HOST and self._capabilities[source].has_batches

    def start_batch(self, batch: Sequence[m.StartCopy]) -> None:
        """Begin small copies of one direction, all in one call."""
        begun = [command for command in batch if self.reserve(command) is not None]
        if not begun:
            return
        try:
            with self._range(begun) if trace_ranges.are_on() else trace_ranges.NO_RANGE:
                completion = self._move_many(begun)
        except BaseException as error:  # noqa: BLE001 - a foreign backend may raise anything
            self.tell(self._outcomes(begun, error))
            return
        if completion.is_done:
            self.tell(self._outcomes(begun, completion.error))
            return
        completion.add_done_callback(lambda error: self._report(self._outcomes(begun, error)))

    def _move_many(self, copies: Sequence[m.StartCopy]) -> Completion:
        """Begin copies of one direction, between host memory and a medium that takes many at a time."""
        sources = [self._slots[cast("m.ReplicaId", copy.source)] for copy in copies]
        targets = [self._slots[copy.target] for copy in copies]
        source, target = cast("m.ReplicaId", copies[0].source).tier, copies[0].target.tier
        if self._media[source] is Medium.HOST:
            return self._backends[target].write_many(targets, _memories(sources))
        return self._backends[source].read_many(sources, _memories(targets))

    def _outcomes(self, copies: Sequence[m.StartCopy], error: BaseException | None) -> list[m.Event]:
        """Tell apart which copies of a batch failed."""
        if isinstance(error, PartialError):
            return [self.outcome(copy, error.errors.get(position)) for position, copy in enumerate(copies)]
        return [self.outcome(copy, error) for copy in copies]

    def _move(self, source: int, source_slot: Slot, target: int, target_slot: Slot) -> Completion:
        """Begin the copy: straight between host memory and the other medium, or through a buffer."""
        if self._media[source] is Medium.HOST:
            return self._backends[target].write(target_slot, cast("AddressableSlot", source_slot).memory)
        if self._media[target] is Medium.HOST:
            return self._backends[source].read(source_slot, cast("AddressableSlot", target_slot).memory)
        if (memory := self._reachable(source, source_slot, target)) is not None:
            return self._backends[target].write(target_slot, memory)
        if (memory := self._reachable(target, target_slot, source)) is not None:
            return self._backends[source].read(source_slot, memory)
        return self._move_through_buffer(source, source_slot, target, target_slot)

    def _reachable(self, device: int, slot: Slot, storage: int) -> torch.Tensor | None:
        """Return the memory of a device's slot, ordered for use, if a medium reaches it without a buffer."""
        if self._media[device] is not Medium.DEVICE or not self._capabilities[storage].has_direct_paths:
            return None
        addressable = cast("AddressableSlot", slot)
        if not self._backends[storage].accepts(addressable.memory):
            return None
        addressable.acquire()
        return addressable.memory

    def _move_through_buffer(
        self, source: int, source_slot: Slot, target: int, target_slot: Slot
    ) -> Completion:
        """Copy between two media that are not host memory.  The window bounds such buffers."""
        # Not by torch: whoever meters a device by its operations would take this for device memory.
        buffer = torch.from_numpy(np.empty(source_slot.nbytes, dtype=np.uint8))
        both = Completion()

        def begin_second(error: BaseException | None) -> None:
            if error is not None:
                both.complete(error)
                return
            try:
                second = self._backends[target].write(target_slot, buffer)
            except BaseException as failure:  # noqa: BLE001 - a foreign backend may raise anything
                both.complete(failure)
                return
            second.add_done_callback(both.complete)

        self._backends[source].read(source_slot, buffer).add_done_callback(begin_second)
        return both

    def free(self, place: m.ReplicaId) -> None:
        """Give a replica's bytes back."""
        slot = self._slots.get(place)
        if slot is None:  # the medium had refused it: there is nothing to give back
            self.tell([m.Freed(place)])
            return
        del self._slots[place]
        try:
            completion = self._backends[place.tier].free(slot)
        except BaseException as error:  # noqa: BLE001 - a foreign backend may raise anything
            self.tell([m.Freed(place, error)])
            return
        if completion.is_done:
            self.tell([m.Freed(place, completion.error)])
            return
        completion.add_done_callback(lambda error: self._report([m.Freed(place, error)]))

    def commit(self, command: m.Commit, note_of: Callable[[object], str]) -> None:
        """Make replicas what survives a power loss."""
        name = self._names[command.tier]

        def outcome(error: BaseException | None) -> m.Event:
            changed = len(command.replicas) + len(command.gone)
            return m.CommitDone(command.commit, _explain_commit(error, changed, name))

        try:
            records = [
                Record(key, note_of(spec), self._slots[place]) for key, place, spec in command.replicas
            ]
            completion = self._backends[command.tier].commit(records, command.gone)
        except BaseException as error:  # noqa: BLE001 - a foreign backend may raise anything
            self.tell([outcome(error)])
            return
        if completion.is_done:
            self.tell([outcome(completion.error)])
            return
        completion.add_done_callback(lambda error: self._report([outcome(error)]))

    def resize(self, tier: int, capacity_bytes: int) -> None:
        """Tell a medium how much it is to hold at most.

        Raises:
            BackendError: it refused, with whatever it raised as the cause.
        """
        try:
            self._backends[tier].resize(capacity_bytes)
        except BaseException as error:
            name = self._names[tier]
            raise BackendError(
                f"the medium of {name!r} did not take a capacity of {capacity_bytes} B: {error}. Its quota "
                "in the books may be the new one: resize it again.",
                transient=isinstance(error, BackendError) and error.transient,
                tier=name,
                needed_bytes=capacity_bytes,
            ) from error

    def _explain(self, error: BaseException | None, command: m.StartCopy) -> BaseException | None:
        """Name the key and the tiers in a backend's error, which knows neither."""
        if error is None:
            return None
        source = "the caller" if command.source is None else repr(self._names[command.source.tier])
        target = self._names[command.target.tier]
        message = f"copying {command.key!r} ({command.nbytes} B) from {source} to {target!r} failed: {error}"
        # Not the error's own type: a backend may make one that takes other arguments.
        kind = IntegrityError if isinstance(error, IntegrityError) else BackendError
        explained = kind(
            message,
            transient=isinstance(error, BackendError) and error.transient,
            key=command.key,
            tier=target,
            needed_bytes=command.nbytes,
        )
        explained.__cause__ = error
        return explained


def _explain_commit(error: BaseException | None, number: int, tier: str) -> BaseException | None:
    if error is None:
        return None
    explained = BackendError(
        f"making {number} keys durable in {tier!r} failed: {error}. What survives is what the last flush "
        "that ended well left, or what this one was to leave",
        transient=isinstance(error, BackendError) and error.transient,
        tier=tier,
    )
    explained.__cause__ = error
    return explained


def _memories(slots: Sequence[Slot]) -> list[Buffer]:
    """Return the bytes of slots in host memory."""
    return [cast("AddressableSlot", slot).memory for slot in slots]
