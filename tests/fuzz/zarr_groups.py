"""Groups of zarr at import: each array is read as zarr itself reads it, or the import is refused.

The first byte of an input says which description in a right group the rest takes the place of.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import zarr

from tests.fuzz import Judge, see_that_it_is_short
from tierstore.arrays import from_array_view
from tierstore.cli.groups import read_group
from tierstore.config import machine
from tierstore.errors import TierStoreError

_DESCRIPTIONS = ("a/zarr.json", "zarr.json", "deep/zarr.json", "deep/x/zarr.json", "a/.zarray")
_MOST_BYTES = 64 << 20


def _make(path: Path) -> dict[str, bytes]:
    group = zarr.open_group(str(path), mode="w")
    group.create_array("a", data=np.arange(6, dtype=np.float32).reshape(2, 3), attributes={"key": "first"})
    group.create_group("deep").create_array("x", data=np.ones(4, np.int16), chunks=(2,))
    return {name: (path / name).read_bytes() if (path / name).exists() else b"" for name in _DESCRIPTIONS}


with tempfile.TemporaryDirectory() as _folder:
    _RIGHT = _make(Path(_folder))

SEEDS = {name: bytes([number]) + _RIGHT[name] for number, name in enumerate(_DESCRIPTIONS)}
TOKENS = (
    *(b'"zarr_format"', b'"node_type"', b'"array"', b'"group"', b'"shape"', b'"data_type"', b'"chunk_grid"'),
    *(
        b'"codecs"',
        b'"fill_value"',
        b'"attributes"',
        b'"key"',
        b'"bytes"',
        b'"zstd"',
        b'"transpose"',
        b'"gzip"',
    ),
    *(b'"sharding_indexed"', b'"chunk_shape"', b'"float32"', b'"int16"', b'"bool"', b'"string"', b'"NaN"'),
    *(
        b'"consolidated_metadata"',
        b'"must_understand"',
        b"null",
        b"true",
        b"-1",
        b"0",
        b"9223372036854775808",
    ),
)


@contextlib.contextmanager
def prepared(directory: Path) -> Iterator[Judge]:
    path = directory / "w.zarr"
    _make(path)

    def judge(content: bytes) -> None:
        changed = _DESCRIPTIONS[content[0] % len(_DESCRIPTIONS)] if content else ""
        for name, right in _RIGHT.items():
            (path / name).unlink(missing_ok=True)
            if name == changed or right:
                (path / name).write_bytes(content[1:] if name == changed else right)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = dict(read_group(str(path)))
            except TierStoreError as refused:
                see_that_it_is_short(refused)
                return
            members = zarr.open_group(str(path), mode="r").members(max_depth=None)
            arrays = [each for _, each in members if isinstance(each, zarr.Array)]
            assert len(found) == len(arrays)
            theirs = sorted(
                (from_array_view(np.asarray(each[...]), dict(each.attrs)) for each in arrays), key=repr
            )
        mine = sorted(found.values(), key=repr)
        assert all(a.dtype == b.dtype and repr(a) == repr(b) for a, b in zip(mine, theirs, strict=True))

    with mock.patch.object(machine, "available_host_bytes", return_value=_MOST_BYTES):
        yield judge
