"""Who may use a place in a store: one live owner, told by a marker object.

Rule 1: the owner is whoever the marker names.  It is written with a conditional create where the store has
one, and read back: the first to write it wins.
Rule 2: each owner keeps its arrays in a group of its own name, which is random.  What it removes lies there
and nowhere else; so even two owners at a time, where a store cannot keep them apart, never touch each other.
Rule 3: what a dead owner left is swept, if it is provably dead: its process ran on this kernel, in this
process namespace, and is gone; or it was this process and gave up.  Otherwise the place is refused.
Rule 4: on release nothing of ours is left: neither the group nor the marker.

Knows nothing of what the arrays contain.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import json
import os
import re
import socket
import threading
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.storage import FsspecStore

from tierstore import forks
from tierstore.callers import opener
from tierstore.errors import BackendError, UsageError

MARKER = "tierstore-zarr-owner.json"
_FORMAT = 1
_OWNER = re.compile(r"[0-9a-f]{32}", re.ASCII)
_CLAIM_ATTEMPTS = 20
_LONGEST_MARKER = 4096

# The owners, which process each is of, and which call opened it; guarded by _guard.
_live: dict[str, tuple[forks.Process, str]] = {}
_guard = forks.free_in_child(threading.Lock())


@dataclass(frozen=True, slots=True)
class Note:
    """What the marker says.

    Attributes:
        owner: 32 hexadecimal digits; names the group of arrays.
        host: for messages.
        boot: which run of which kernel; empty if unknown.
        namespace: in which its process numbers mean something; empty if unknown.
        pid: the owner's process.
        started: when that process began, in the kernel's ticks: tells apart processes of one number.
        format: of this note and of everything in the group.
    """

    owner: str
    host: str
    boot: str
    namespace: str
    pid: int
    started: int
    format: int = _FORMAT

    @property
    def group(self) -> str:
        """The group that holds the owner's arrays."""
        return f"tierstore-{self.owner}"

    def encode(self) -> bytes:
        """Return the marker's bytes."""
        return json.dumps(asdict(self)).encode()


def new_note() -> Note:
    """Return a note of this process with an owner's name that nobody else has."""
    return Note(
        owner=uuid.uuid4().hex,
        host=socket.gethostname(),
        boot=_read("/proc/sys/kernel/random/boot_id"),
        namespace=_namespace(),
        pid=os.getpid(),
        started=started_at(os.getpid()) or 0,
    )


def parse_note(text: bytes) -> Note | None:
    """Read a marker; ``None`` if it is not one of this format, whatever it is."""
    if len(text) > _LONGEST_MARKER:
        return None
    try:
        given = json.loads(text)
        note = Note(**given)
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = Note.__annotations__
    is_typed = all(type(getattr(note, name)).__name__ == kind for name, kind in kinds.items())
    # The name becomes part of a path that is removed: nothing but what was made here may pass.
    return note if is_typed and note.format == _FORMAT and _OWNER.fullmatch(note.owner) else None


def started_at(pid: int) -> int | None:
    """Return when a process of this machine began, in ticks since boot; ``None`` if there is none."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None


def is_dead(note: Note) -> bool:
    """Whether the owner is provably gone."""
    here = new_note()
    if not note.boot or not note.namespace or (note.boot, note.namespace) != (here.boot, here.namespace):
        return False
    with _guard:
        if note.owner in _live and _live[note.owner][0] is forks.here():
            return False
    if note.pid == here.pid and note.started == here.started:
        return True  # this process, and none of its owners
    return started_at(note.pid) != note.started


class Claim:
    """The right to a place, from `claim` to `release`.

    Args:
        store: where.
        name: how messages call it.
        note: whose.
    """

    def __init__(self, store: Store, name: str, note: Note) -> None:
        self._store = store
        self._name = name
        self.note = note

    async def release(self) -> None:
        """Remove the group and the marker.  What fails is the store's own error; may be tried again."""
        try:
            await self._store.delete_dir(self.note.group)
            found = await _get(self._store, MARKER)
            if found is not None and parse_note(found) == self.note:
                await self._store.delete(MARKER)
        finally:
            _forget(self.note)


def _forget(note: Note) -> None:
    with _guard:
        _live.pop(note.owner, None)


async def claim(store: Store, name: str) -> Claim:
    """Become the owner of a place, after sweeping what a dead one left there.

    Raises:
        UsageError: another owner is there, alive for all that is known; or the marker is not ours.
        BackendError: others come and go too fast.
    """
    note = new_note()
    with _guard:
        _live[note.owner] = forks.here(), opener()
    try:
        await _write_marker(store, name, note)
    except BaseException:
        _forget(note)
        raise
    return Claim(store, name, note)


async def _write_marker(store: Store, name: str, note: Note) -> None:
    for _ in range(_CLAIM_ATTEMPTS):
        await _create(store, MARKER, note.encode())
        found = await _get(store, MARKER)
        if found is None:
            continue  # whoever was there has just left
        other = parse_note(found)
        if other == note:
            return
        await _sweep(store, _dead(other, name))
    raise BackendError(f"{name} is taken and given up again and again by others", transient=True)


def _dead(other: Note | None, name: str) -> Note:
    """Return the note of an owner that is provably gone; refuse any other."""
    if other is None:
        raise UsageError(
            f"{name}: the object {MARKER!r} there is not a marker of this version of tierstore, "
            f"so nothing is touched. Use another prefix, or remove that object if nobody needs it."
        )
    if not is_dead(other):
        with _guard:
            opened_by = _live[other.owner][1] if other.owner in _live else ""
        note = f" ({opened_by}, opened it)" if opened_by else ""
        raise UsageError(
            f"{name} is in use by a live backend of process {other.pid} on {other.host!r}{note}, "
            f"or by one whose end cannot be proved from here. Close that one, or use another prefix; "
            f"if it is certainly gone, remove the objects under {other.group + '/'!r} and then {MARKER!r}."
        )
    return other


async def _sweep(store: Store, dead: Note) -> None:
    """Remove what a dead owner left; its marker last, and only if it is still its own."""
    await store.delete_dir(dead.group)
    found = await _get(store, MARKER)
    if found is not None and parse_note(found) == dead:
        await store.delete(MARKER)


async def _get(store: Store, key: str) -> bytes | None:
    # One byte more than a marker has shows that it is none, however long it is.
    found = await store.get(key, default_buffer_prototype(), RangeByteRequest(0, _LONGEST_MARKER + 1))
    return None if found is None else found.to_bytes()


async def _create(store: Store, key: str, text: bytes) -> None:
    """Write an object unless it is there: in one step where the store can."""
    value: Buffer = default_buffer_prototype().buffer.from_bytes(text)
    if isinstance(store, FsspecStore) and "mode" in inspect.signature(store.fs._pipe_file).parameters:  # noqa: SLF001 - fsspec's names of its asynchronous methods
        try:
            await store.fs._pipe_file(f"{store.path.rstrip('/')}/{key}", text, mode="create")  # noqa: SLF001
        except FileExistsError:
            return
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
        else:
            return
    await store.set_if_not_exists(key, value)


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""
