"""Several operations that end as one: what a wrapper needs to make one completion of many."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tierstore.spi import Buffer, Completion, PartialError

Errors = Sequence[BaseException | None]


def when_all(operations: Sequence[Completion], then: Callable[[Errors], None]) -> None:
    """Call ``then`` with what each operation ended with, once the last has: there, or now."""
    errors: list[BaseException | None] = [None] * len(operations)
    lock = threading.Lock()
    remaining = len(operations)

    def note(position: int, error: BaseException | None) -> None:
        nonlocal remaining
        with lock:
            errors[position] = error
            remaining -= 1
            is_last = not remaining
        if is_last:
            then(errors)

    if not operations:
        then(errors)
    for position, operation in enumerate(operations):
        operation.add_done_callback(lambda error, position=position: note(position, error))  # type: ignore[misc]


def first_error(errors: Errors) -> BaseException | None:
    """Return the first of them that is one."""
    return next((error for error in errors if error is not None), None)


def each_error(error: BaseException | None, count: int) -> Errors:
    """Tell apart what the slots of a batch ended with (see `tierstore.spi.BatchBackend`)."""
    if isinstance(error, PartialError):
        return [error.errors.get(position) for position in range(count)]
    return [error] * count


def as_one(errors: Errors) -> BaseException | None:
    """Return what a batch ends with whose slots ended with ``errors``: the other way round."""
    failed = {position: error for position, error in enumerate(errors) if error is not None}
    return PartialError(failed) if failed else None


def _is_over(errors: Errors) -> None:
    raise RuntimeError(f"an operation ended twice: {errors}")


class FanIn:
    """A read or a write of some slots, until all of its parts have ended.

    A *part* concerns one slot or several.  Parts are expected before they begin, and noted when they end;
    the operation itself is the first part, so that it cannot end while more are being thought of.

    Args:
        buffers: the caller's, one for each slot.
        finish: called once with each slot's error, before the completion completes.
    """

    def __init__(self, buffers: Sequence[Buffer], finish: Callable[[Errors], None]) -> None:
        self.buffers = buffers  # until it has ended
        self.completion = Completion()
        self._count = len(buffers)
        self._finish = finish
        self._lock = threading.Lock()  # guards the next two
        self._remaining = 1
        self._errors: dict[int, BaseException] = {}

    def has_failed(self, position: int) -> bool:
        """Whether a part that concerns the slot at ``position`` has failed."""
        return position in self._errors

    def expect(self, parts: int = 1) -> None:
        """Count parts that are about to begin."""
        with self._lock:
            self._remaining += parts

    def note(self, positions: Sequence[int] = (), errors: Errors = ()) -> None:
        """Count a part that has ended, with errors for some of its positions or without."""
        with self._lock:
            for position, error in zip(positions, errors, strict=True):
                if error is not None:
                    self._errors.setdefault(position, error)
            self._remaining -= 1
            is_last = not self._remaining
        if is_last:
            self._end()

    def _end(self) -> None:
        # The caller may use the memory again once nothing refers to it: let go first.
        self.buffers = ()
        finish, self._finish = self._finish, _is_over  # whoever finishes refers to this: no cycle
        finish([self._errors.get(position) for position in range(self._count)])
        if self._errors and self._count > 1:
            self.completion.complete(PartialError(self._errors))
        else:
            self.completion.complete(self._errors.get(0))
