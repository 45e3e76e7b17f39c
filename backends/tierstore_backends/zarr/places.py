"""A zarr store from what the user wrote: a path, a URL, or a store object.

Promises: a store that is opened here belongs to nobody else, least of all to another event loop; and that
what is opened here is closed here.  Knows nothing of owners and arrays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, WrapperStore

from tierstore.errors import BackendError, ConfigError
from tierstore.regular import open_regular
from tierstore_backends.paths import matter_with, takes_nothing
from tierstore_backends.zarr.failures import brief, explain

# fsspec keeps instances by thread number, and a number comes again when its thread is gone: the new loop
# would get the old loop's connections.  And what this owner lists must be what is there now.
_OURS_ALONE = {"skip_instance_cache": True, "use_listings_cache": False}
_COPYING = (LocalStore, FsspecStore, ObjectStore)
_PASSWORD = re.compile(r"//[^/@\s]*@")


@dataclass(frozen=True, slots=True)
class OpenStore:
    """An open store.

    Attributes:
        store: the store.
        name: how messages call it; without passwords.
        has_folders: whether it is made of directories, which stay when what was in them is removed.
        keeps_buffers: whether it may hold on to the memory that ``set`` is given.
        made: directories that exist only for it, the deepest first.
    """

    store: Store
    name: str
    has_folders: bool = False
    keeps_buffers: bool = True
    made: tuple[Path, ...] = field(default=())

    async def close(self) -> None:
        """End connections and remove the directories that were made, as far as they are empty."""
        inner = self.store
        while isinstance(inner, WrapperStore):
            inner = inner._store  # noqa: SLF001 - where zarr says that it is
        if isinstance(inner, FsspecStore):
            await _close_sessions(inner.fs)
        else:
            self.store.close()
        with contextlib.suppress(OSError):  # something else is in there, or it is gone: not ours either way
            for folder in self.made:
                folder.rmdir()


def check_store(given: object, storage_options: Mapping[str, object] | None) -> None:
    """Refuse what can never be opened.

    Raises:
        ConfigError: neither a path nor a URL nor a store that can be written; says what is accepted.
    """
    if isinstance(given, Store):
        can = given.supports_writes and given.supports_deletes and given.supports_listing
        if given.read_only or not can:
            raise ConfigError(
                f"{given} cannot be written, deleted from and listed: a scratch store needs all three"
            )
    elif not isinstance(given, str | Path) or not str(given) or "\0" in str(given):
        raise ConfigError("accepted: a directory's path, a URL such as 's3://bucket/prefix', or a zarr store")
    if storage_options is not None and not (isinstance(given, str) and _is_remote(given)):
        raise ConfigError("storage_options go with the URL of a remote store, which this is not")


async def open_place(given: Store | str | Path, storage_options: Mapping[str, object] | None) -> OpenStore:
    """Open a store in the running loop.

    Raises:
        ConfigError: no such protocol, or its package is not installed.
        BackendError: the store cannot be opened.
    """
    if type(given) is LocalStore:
        return OpenStore(PrivateStore(given.root), str(given), has_folders=True, keeps_buffers=False)
    if isinstance(given, Store):
        return OpenStore(given, str(given), keeps_buffers=type(given) not in _COPYING)
    if given == "memory://":
        return OpenStore(MemoryStore(), "memory://")
    if isinstance(given, str) and _is_remote(given):
        return _open_url(given, storage_options or {})
    return _open_folder(Path(str(given).removeprefix("file://")))


class PrivateStore(LocalStore):
    """A zarr store in a directory, whose files are their owner's alone, as all files of tierstore are.

    What lies there and is no regular file is refused: opening a pipe would wait for who writes to it.
    """

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Read an object, or a part of it; ``None`` if it is not there."""
        path = self.root / key
        try:
            return await asyncio.to_thread(_get, path, prototype or default_buffer_prototype(), byte_range)
        except (FileNotFoundError, NotADirectoryError):
            if path.is_symlink():  # to what is not there: nothing can be made here either
                raise
            return None

    async def _set(self, key: str, value: Buffer, exclusive: bool = False) -> None:
        """Write an object, whole or not at all; where ``exclusive``, only if it is not there."""
        await asyncio.to_thread(_put, self.root / key, value, is_exclusive=exclusive)


def _get(path: Path, prototype: BufferPrototype, byte_range: ByteRequest | None) -> Buffer:
    descriptor, nbytes = open_regular(path)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - it is opened already
        start, end = _span(byte_range, nbytes)
        file.seek(start)
        return prototype.buffer.from_bytes(file.read(max(0, min(end, nbytes) - start)))


def _span(byte_range: ByteRequest | None, nbytes: int) -> tuple[int, int]:
    match byte_range:
        case RangeByteRequest(start, end):
            return start, end
        case OffsetByteRequest(offset):
            return offset, nbytes
        case SuffixByteRequest(suffix):
            return max(0, nbytes - suffix), nbytes
    return 0, nbytes


def _put(path: Path, value: Buffer, *, is_exclusive: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    draft.touch(mode=0o600, exist_ok=False)
    try:
        with draft.open("wb") as file:
            file.write(value.as_buffer_like())
        if is_exclusive:
            os.link(draft, path)
            draft.unlink()
        else:
            draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _is_remote(given: str) -> bool:
    return "://" in given and given != "memory://" and not given.startswith("file://")


def _open_folder(folder: Path) -> OpenStore:
    root = folder.expanduser().absolute()  # now: the program may change its working directory later
    try:
        made = tuple(each for each in (root, *root.parents) if not each.exists())
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = matter_with(root) or takes_nothing(root)
        if why is not None:
            raise BackendError(f"a zarr store cannot be kept in {root}: {why}") from error
        raise explain(error, f"making {root}") from error
    return OpenStore(PrivateStore(root), str(root), has_folders=True, keeps_buffers=False, made=made)


def _open_url(url: str, storage_options: Mapping[str, object]) -> OpenStore:
    name = _PASSWORD.sub("//***@", url)
    try:
        store = FsspecStore.from_url(url, storage_options={**_OURS_ALONE, **storage_options})
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError(
            f"store={name!r} cannot be opened: {brief(error)}. Remote stores need fsspec and the package "
            f"of their protocol (tierstore[remote] has S3's), with storage_options that it knows."
        ) from error
    except Exception as error:
        raise explain(error, f"opening {name}") from error
    return OpenStore(store, name, keeps_buffers=False)


async def _close_sessions(fs: object) -> None:
    """Close the connections of a file system: s3fs has them in ``_s3``, most others in ``_session``."""
    for name in ("_s3", "_session"):
        close = getattr(getattr(fs, name, None), "close", None)
        if close is None:
            continue
        with contextlib.suppress(Exception):  # they are gone either way
            closing = close()
            if hasattr(closing, "__await__"):
                await closing
