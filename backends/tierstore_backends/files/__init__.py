"""Asynchronous disk files: the tier below host memory.

What it promises: at most ``capacity_bytes`` of disk, counted in the file system's own blocks; every
byte checked on its way back.  As scratch space: nothing left behind after ``close``, and after a crash
nothing that the next owner of the directory does not sweep.  With ``durable=True``: what was committed is
found again, and nothing else; the manifest that says so is beside the files and beside the capacity.

The rooms, each ignorant of the ones after it:

- `extents`, `bit_flips`, `options`: where bytes live in one linear address space, what a damaged bit may have
  made, and what a user writes.  Pure.
- `directory`: who may use a directory, what it may consist of, and what is swept from it.
- `io`: the few calls into the kernel, beside them io_uring and aiofiles; requests, and the fragments that
  they are cut into.
- `addressing`: the address space as a few large files, in one directory or in several; what can be done
  there.
- `engines`: who moves the bytes: fragments merged where they touch, summed, and counted.
- `durability`: what is kept, as bytes and as a database that may be damaged; from there to slots.
- `volume`, `backend`: a directory made ready, and the `tierstore.spi.Backend` on it.
- `commits`, `durable`: from slots to what is kept, and the `tierstore.spi.DurableBackend`.
- `read_only`, `examination`: the same directory to look into, without changing anything in it; what works
  there.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierstore.units import parse_bytes
from tierstore_backends.files.backend import FilesBackend
from tierstore_backends.files.durable import DurableFiles
from tierstore_backends.files.examination import examine
from tierstore_backends.files.options import parse_options

__all__ = ["DurableFiles", "FilesBackend", "examine", "open_backend"]


def open_backend(*, capacity_bytes: int, options: Mapping[str, object]) -> FilesBackend | DurableFiles:
    """Open a directory for at most ``capacity_bytes``: to keep what is committed, or as scratch space.

    Args:
        capacity_bytes: the most that the files may take on disk.
        options: ``path`` is required; see `tierstore_backends.files.options.FilesOptions`.

    Raises:
        ConfigError: an unknown option, a bad value or a negative capacity; the message lists every fault.
        UsageError: another live backend owns the directory; the message names its process.  Or it holds
            a durable store and is wanted as scratch space, or a later version of tierstore wrote it.
        CapacityError: a durable directory keeps more than ``capacity_bytes``.
        IntegrityError: the manifest of a durable directory is damaged; nothing was changed.
        BackendError: the directory cannot be made or used.
    """
    capacity_bytes, parsed = parse_bytes(capacity_bytes), parse_options(options)
    return DurableFiles(capacity_bytes, parsed) if parsed.durable else FilesBackend(capacity_bytes, parsed)
