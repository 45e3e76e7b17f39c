"""A zarr group, read: every array of it and of the groups in it, or the reason why not.

Rule 1: nothing that was found is left out in silence: what is neither an array nor a group stops the import.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from tierstore.arrays import from_array_view
from tierstore.config import machine
from tierstore.errors import BackendError, CapacityError, IntegrityError, UsageError
from tierstore.progress import progress
from tierstore.quoting import quoted, shortened
from tierstore.units import format_bytes

if TYPE_CHECKING:
    import zarr

KEY: Final = "key"
"""The attribute of an array that has its key."""
_MOST_ERROR_CHARS: Final = 500


def read_group(source: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the key and the tensor of each array of a zarr group, in groups within it, too.

    The key is the array's attribute `KEY`, or else its name; within a group that is in ``source``, behind
    the path of that group and a slash.

    Raises:
        UsageError: ``source`` is no zarr group, or a part of it cannot be told; said before anything is read.
        CapacityError: an array is larger than the memory that is available.
        BackendError: an array cannot be read, or chunks of it are lost.
    """
    if "://" not in source and (Path(source) / "tierstore.db").exists():
        raise UsageError(f"{source!r} is itself a durable store: export it, and import what that makes.")
    if "://" not in source:
        _require_regular_files(Path(source))
    arrays = _arrays(source)
    keys = _keys_of(arrays, source)
    sizes = [array.nbytes for _, array in arrays]
    for name, array in progress(arrays, sizes, "import"):
        yield keys[name], _read_array(name, array, source)


def _arrays(source: str) -> list[tuple[str, zarr.Array[Any]]]:
    """Return the arrays of a group, each with its path in it.

    Raises:
        UsageError: it is no group, or something in it is neither an array nor a group.
    """
    import zarr

    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            members = zarr.open_group(source, mode="r").members(max_depth=None)
    except Exception as error:  # whatever zarr meets: it takes a description for what it should be
        raise UsageError(f"{source!r} is not a zarr group: {_said(error)}") from error
    arrays = [(name, each) for name, each in members if isinstance(each, zarr.Array)]
    if "://" in source:
        others = [str(each.message) for each in warned if "is not recognized" in str(each.message)]
    else:
        groups = ["", *(name for name, each in members if isinstance(each, zarr.Group))]
        folders = _other_folders(Path(source), groups, {name for name, _ in members})
        others = [f"{quoted(folder)} is neither an array nor a group." for folder in folders]
    if others:
        raise UsageError(
            f"{source!r} has something else in it, or an array that has lost its description: {others[0]} "
            "Take it away, or bring the description back."
        )
    return arrays


def _other_folders(source: Path, groups: Sequence[str], members: set[str]) -> list[str]:
    """Return the folders in the groups on a disk that are no members of them; files may be anything."""
    found: list[str] = []
    for group in groups:
        with os.scandir(source / group) as entries:
            names = [f"{group}/{entry.name}".lstrip("/") for entry in entries if entry.is_dir()]
        found += [name for name in names if name not in members]
    return sorted(found)


def _require_regular_files(source: Path) -> None:
    """See to it that zarr, which opens what it finds, comes to an end with that.

    Raises:
        UsageError: a pipe, a device, a link to nothing, or one that leads to a folder once more; the first is
            named.
    """
    folders, seen = [source], {source.resolve()}
    while folders:
        with os.scandir(folders.pop()) as found:
            entries = list(found)
        for entry in entries:
            if entry.is_dir():
                place = Path(entry.path).resolve()
                if place in seen:
                    raise UsageError(
                        f"{entry.path!r} leads to {str(place)!r}, which is in the group once already."
                    )
                folders.append(place)
                seen.add(place)
            elif not entry.is_file():
                raise UsageError(
                    f"{entry.path!r} is no regular file, and a zarr group on disk has only those."
                )


def _keys_of(members: Sequence[tuple[str, zarr.Array[Any]]], source: str) -> dict[str, str]:
    """Return the key of each array: its attribute, or its name.

    Raises:
        UsageError: one is no text, or two arrays have the same.
    """
    names: dict[str, str] = {}
    for name, array in members:
        key = array.attrs.get(KEY, name.rpartition("/")[2])
        if not isinstance(key, str):
            raise UsageError(
                f"array {quoted(name)} of {source!r} has {quoted(key)} as its attribute {KEY!r}; "
                "accepted: a text"
            )
        group = name.rpartition("/")[0]
        key = f"{group}/{key}" if group else key
        if key in names:
            raise UsageError(
                f"arrays {quoted(names[key])} and {quoted(name)} of {source!r} are both {quoted(key)}: "
                "accepted is one array a key",
                key=key,
            )
        names[key] = name
    return {name: key for key, name in names.items()}


def _read_array(name: str, array: zarr.Array[Any], source: str) -> torch.Tensor:
    _require_memory(name, array.nbytes, source)
    if KEY in array.attrs and array.nchunks_initialized < array.nchunks:
        lost = array.nchunks - array.nchunks_initialized
        raise IntegrityError(f"{lost} of {array.nchunks} chunks of array {name!r} of {source!r} are lost")
    try:
        values = np.asarray(array[...])
    except Exception as error:  # whatever zarr, its codecs and numpy meet
        raise BackendError(f"array {quoted(name)} of {source!r} cannot be read: {_said(error)}") from error
    return from_array_view(values, dict(array.attrs))


def _said(error: Exception) -> str:
    """Return what an error of zarr's says, which may quote the whole of a description."""
    return shortened(f"{type(error).__name__}: {error}", _MOST_ERROR_CHARS)


def _require_memory(name: str, nbytes: int, source: str) -> None:
    """See to it that an array is not larger than memory: its file may hold next to nothing."""
    available_bytes = machine.available_host_bytes()
    if nbytes > available_bytes:
        raise CapacityError(
            f"array {quoted(name)} of {source!r} is said to have {format_bytes(nbytes)}; "
            f"{format_bytes(available_bytes)} of host memory are available",
            key=name,
            needed_bytes=nbytes,
            free_bytes=available_bytes,
        )
