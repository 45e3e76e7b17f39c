"""IDX files, in which MNIST is published: a few bytes of header, then bytes of pixels or labels.

Nothing is believed: a header that is not of the kind, that promises what the file does not hold, or less than
it holds, is named with the numbers.
"""

from __future__ import annotations

import gzip
from io import BufferedIOBase
from pathlib import Path

import torch
from torch import Tensor

KINDS = {3: "images", 1: "labels"}  # by dimensions
MOST_BYTES = 2**32
_TYPE_BYTE = 8  # unsigned bytes, the only type of elements here


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read unsigned bytes of so many dimensions; a name that ends with ``.gz`` is a compressed file's.

    Raises:
        OSError: the file cannot be read, or is no whole compressed one.
        ValueError: it is no IDX file of bytes with these dimensions; names file and numbers.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            return _read(path, file, dimensions)
        except EOFError as error:
            raise ValueError(f"{path} ends in the midst of what was compressed") from error


def _read(path: Path, file: BufferedIOBase, dimensions: int) -> Tensor:
    header = file.read(4 * (1 + dimensions))
    expected = bytes([0, 0, _TYPE_BYTE, dimensions])
    if len(header) < 4 * (1 + dimensions) or header[:4] != expected:
        raise ValueError(
            f"{path} is no IDX file of {KINDS[dimensions]}: it begins with {header[:4].hex() or 'nothing'}, "
            f"not {expected.hex()}"
        )
    sizes = [int.from_bytes(header[at : at + 4], "big") for at in range(4, len(header), 4)]
    nbytes = 1
    for size in sizes:
        nbytes *= size
    said = " x ".join(map(str, sizes))
    if not 0 < nbytes <= MOST_BYTES:
        raise ValueError(f"{path} says that it has {said} bytes; accepted: 1 to {MOST_BYTES:,}")
    content = file.read(nbytes + 1)
    if len(content) != nbytes:
        has = "more" if len(content) > nbytes else f"{len(content):,}"
        raise ValueError(
            f"{path} says that it has {said} = {nbytes:,} bytes behind its header, and has {has}"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(sizes)
