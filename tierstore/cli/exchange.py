"""``tierstore export`` and ``tierstore import``: to and from safetensors files and zarr groups.

Tensors go one at a time, so that neither side has to fit into memory.  An import becomes durable in one
step at its end: all of it, or nothing.

In a zarr group each tensor is one array.  Its name is the key with everything but letters, digits, and
``_.-~`` percent-encoded; the attribute ``key`` has the key itself, and `tierstore.arrays` says how dtypes
that numpy does not have are shown.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch

from tierstore.arrays import to_array_view
from tierstore.cli import directory
from tierstore.cli.array_names import array_names, require_tells_case
from tierstore.cli.groups import KEY, read_group
from tierstore.errors import BackendError, KeyExists, UsageError
from tierstore.formats.safetensors_files import HeaderEntry, TensorFile, write_file
from tierstore.progress import progress
from tierstore.regular import NotRegularError, open_regular
from tierstore.store import Store
from tierstore.units import format_bytes

_FORMATS = ("safetensors", "zarr")
_CODECS: dict[str, Literal["auto"] | None] = {"none": None, "zstd": "auto"}  # zarr's own default is zstd


def add_export(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> None:
    """Add the verb ``export``."""
    parser = verbs.add_parser("export", parents=[shared], help="write a durable store's tensors to a file")
    directory.add_store(parser)
    parser.add_argument("target", metavar="TARGET", help="a new file or directory, or a zarr store's URL")
    directory.add_patterns(parser)
    _add_format(parser)
    parser.add_argument("--codec", choices=_CODECS, help="of zarr arrays (default: none)")
    parser.set_defaults(run=_export)


def add_import(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> None:
    """Add the verb ``import``."""
    parser = verbs.add_parser("import", parents=[shared], help="put a file's tensors into a durable store")
    directory.add_store(parser)
    parser.add_argument("source", metavar="SOURCE", help="a file or directory, or a zarr store's URL")
    _add_format(parser)
    parser.add_argument("--replace", action="store_true", help="replace keys that are there")
    parser.set_defaults(run=_import)


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=_FORMATS, help="default: zarr for *.zarr and URLs")


def _format(options: argparse.Namespace, place: str) -> str:
    if options.format is not None:
        return str(options.format)
    is_zarr = "://" in place or place.rstrip("/").endswith(".zarr") or Path(place).is_dir()
    return "zarr" if is_zarr else "safetensors"


# --- export -----------------------------------------------------------------------------------


def _export(options: argparse.Namespace) -> int:
    target = str(options.target)
    is_zarr = _format(options, target) == "zarr"
    if options.codec is not None and not is_zarr:
        raise UsageError(
            f"--codec={options.codec} is for zarr, and {target!r} becomes a safetensors file, which knows no "
            f"codecs: leave it out, or say --format=zarr."
        )
    if "://" not in target:
        _require_place(Path(target))
    with directory.open_store(options.store) as store:
        keys = directory.chosen(store, options.patterns)
        sizes = [store.spec(key).nbytes for key in keys]
        if is_zarr:
            _to_zarr_place(store, keys, sizes, target, options.codec or "none")
        else:
            _to_safetensors(store, keys, sizes, Path(target))
    print(f"{len(keys)} tensors ({format_bytes(sum(sizes))}) are in {target}")
    return 0


def _require_place(target: Path) -> None:
    if target.exists():
        raise UsageError(f"'{target}' is there already.")
    if not target.parent.is_dir():
        raise UsageError(f"'{target}' cannot be made: '{target.parent}' is not a directory.")


def _read(store: Store, keys: Sequence[str], sizes: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
    for key in progress(keys, sizes, "export"):
        yield key, store.get(key, device="cpu")


def _to_safetensors(store: Store, keys: Sequence[str], sizes: Sequence[int], target: Path) -> None:
    entries = [HeaderEntry(key, store.spec(key).dtype, tuple(store.spec(key).shape)) for key in keys]
    with _in_the_end(target) as fresh:
        write_file(fresh, entries, (tensor for _, tensor in _read(store, keys, sizes)), {})


def _to_zarr_place(store: Store, keys: Sequence[str], sizes: Sequence[int], target: str, codec: str) -> None:
    """Write a group; a local one is there only when it is whole."""
    if "://" in target:
        _to_zarr(store, keys, sizes, target, codec)
        return
    with _in_the_end(Path(target)) as fresh:
        _to_zarr(store, keys, sizes, str(fresh), codec)


@contextlib.contextmanager
def _in_the_end(target: Path) -> Iterator[Path]:
    """Yield a path in a new directory beside ``target``; what is there in the end becomes it.

    Nothing does if an error is raised, or if something else came to be called so meanwhile.

    Raises:
        BackendError: the file system failed.  Named is ``target``, which is what its user knows.
        UsageError: something else is called so now.
    """
    try:
        room = Path(tempfile.mkdtemp(prefix=".tierstore-export.", dir=target.parent))
    except OSError as error:
        raise BackendError(f"{str(target)!r} could not be written: {error.strerror}") from error
    fresh = room / "export"
    try:
        yield fresh
        _give_name(fresh, target)
    except OSError as error:
        why = str(error).replace(str(fresh), str(target)).replace(str(room), str(target))
        raise BackendError(f"{str(target)!r} could not be written: {why}") from error
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _give_name(fresh: Path, target: Path) -> None:
    """Call what was written ``target``; whatever is called so by now stays."""
    try:
        if fresh.is_dir():
            target.mkdir()
            try:
                fresh.rename(target)  # an empty directory gives way to another
            except OSError:
                target.rmdir()
                raise
        else:
            _link(fresh, target)
    except FileExistsError as error:
        raise UsageError(f"'{target}' is there already: it came while the export was written.") from error


def _link(fresh: Path, target: Path) -> None:
    try:
        target.hardlink_to(fresh)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        _require_place(target)
        fresh.rename(target)


def _to_zarr(store: Store, keys: Sequence[str], sizes: Sequence[int], target: str, codec: str) -> None:
    import zarr

    names = array_names(keys)
    if "://" not in target:
        require_tells_case(Path(target).parent, names)
    group = zarr.open_group(target, mode="w-")
    for key, tensor in _read(store, keys, sizes):
        array, attributes = to_array_view(tensor)
        group.create_array(
            names[key],
            data=array,
            compressors=_CODECS[codec],
            config={"write_empty_chunks": True},  # a chunk that is missing is then a lost one
            attributes={KEY: key, **attributes},
        )


# --- import -----------------------------------------------------------------------------------


def _import(options: argparse.Namespace) -> int:
    source = str(options.source)
    if "://" not in source:
        _require_readable(source)
    count = nbytes = 0
    tensors = read_group(source) if _format(options, source) == "zarr" else _from_safetensors(Path(source))
    first = list(itertools.islice(tensors, 1))  # what cannot be read makes no store
    store = directory.open_store(options.store, directory.DirectoryAccess.CHANGE)
    try:
        for key, tensor in itertools.chain(first, tensors):
            try:
                store.put(key, tensor, replace=bool(options.replace))
            except KeyExists as error:
                raise UsageError(
                    f"{key!r} is in {options.store} already: --replace takes the new tensor.", key=key
                ) from error
            count, nbytes = count + 1, nbytes + tensor.nbytes
        store.flush()
    finally:
        store.close(flush=False)
    print(f"{count} tensors ({format_bytes(nbytes)}) of {source} are in {options.store}")
    return 0


def _require_readable(source: str) -> None:
    """Tell what is not there from what may not be read: libraries call both missing.

    Raises:
        UsageError: it is not there.
        BackendError: it cannot be read.
    """
    try:
        if Path(source).is_dir():
            next(Path(source).iterdir(), None)
        else:
            os.close(open_regular(Path(source))[0])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"{source!r} is not there.") from error
    except NotRegularError as error:
        raise UsageError(f"{source!r} cannot be read: {error.strerror}") from error
    except OSError as error:
        raise BackendError(f"{source!r} cannot be read: {error}") from error


def _from_safetensors(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with TensorFile(source) as file:
        file.require_dtypes()
        sizes = [1] * len(file.names)
        for name in progress(file.names, sizes, "import"):
            yield name, file.read(name)
