"""Who held the device's memory when there was too little of it: a note at the error that says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tierstore.errors import CapacityError, KeyNotFound
from tierstore.planning.program import ByteKind
from tierstore.planning.rules import HOST
from tierstore.training.session import Session
from tierstore.units import format_bytes

_BEGIN = "Who holds the device: "
_KINDS = {
    "param": ByteKind.PARAMETERS,
    "buffer": ByteKind.BUFFER,
    "passing": ByteKind.BUFFER,
    "grad": ByteKind.GRADIENT,
    "state": ByteKind.STATE,
    "activation": ByteKind.ACTIVATION,
}
_LONGEST_CHAIN = 8


def note_holders(error: BaseException, session: Session) -> None:
    """Add a note of who holds the device to an error that says that there is too little of it; once.

    Errors are looked at with their causes: the outermost of those that are told by a store or an allocator is
    noted.  Nothing is raised by it.

    Args:
        error: that came out of a run.
        session: of the run.
    """
    first = session.store.tier_names[0]
    if first == HOST:
        return
    for each in _chain(error):
        if not _is_of_memory(each, first):
            continue
        if not any(note.startswith(_BEGIN) for note in getattr(each, "__notes__", ())):
            with contextlib.suppress(Exception):  # the error is what is to be raised
                if account := account_of(session):
                    each.add_note(_BEGIN + account)
        return


def noted(error: CapacityError, session: Session) -> CapacityError:
    """Return an error of a run, with a note of who holds the device if it is of that."""
    note_holders(error, session)
    return error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it came of, and so on."""
    each: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if each is None:
            return
        yield each
        each = each.__cause__ or each.__context__


def _is_of_memory(error: BaseException, tier: str) -> bool:
    if isinstance(error, CapacityError):
        return error.tier in (None, tier)
    return isinstance(error, torch.OutOfMemoryError)


def account_of(session: Session) -> str:
    """Return who holds the device now, and who held it at the peak of the steps that were recorded.

    Where nobody holds anything, and no step was recorded, there is nothing to tell.

    Args:
        session: of a run whose fastest tier is a device's.
    """
    store = session.store
    tier = store.tier_names[0]
    kinds: dict[str, int] = {}
    for key in tuple(store):
        with contextlib.suppress(KeyNotFound):  # somebody else drops it
            if tier in store.where(key):
                kind = _KINDS.get(key.partition("/")[0])
                name = "others" if kind is None else kind.value
                kinds[name] = kinds.get(name, 0) + store.spec(key).nbytes
    held = ", ".join(
        f"{name} {format_bytes(n)}" for name, n in sorted(kinds.items(), key=lambda each: -each[1])
    )
    stats = store.stats().tiers[tier]
    own_bytes = 0 if session.meter is None else session.meter.live_bytes()
    now = (
        f"the store has {format_bytes(stats.charged_bytes)} of {tier!r} ({held or 'nothing'}), of which "
        f"{format_bytes(store.leased_bytes(tier))} are in use, and the program was seen to have "
        f"{format_bytes(own_bytes)} beside it."
    )
    from tierstore.planning.simulating.holdings import told
    from tierstore.training.recorded_runs import learned_timeline

    timeline = learned_timeline(session)
    if timeline is None:
        return now if own_bytes or stats.charged_bytes else ""
    return f"{now} In the steps that were recorded most was held so: {told(timeline.account, tier)}"
