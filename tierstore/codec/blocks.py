"""Bytes to fewer bytes and back: byte shuffle and lz4, a block at a time.  Pure: no I/O, no lock.

Numbers of a tensor resemble each other byte by byte: the exponents of neighbours are alike, their last bits
are not.  A *shuffle* of width ``w`` therefore puts first bytes first: byte 0 of every ``w``-byte number, then
byte 1 of every one, and so on; lz4 then finds what repeats.

Rule 1: a block that lz4 does not make shorter is stored as it is, and told by its length; so a packed block
is never longer than its bytes.
Rule 2: what is unpacked has the length that was asked for, or it is an `IntegrityError`.

The calls into numpy and lz4 let go of the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import lz4.block  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from tierstore.errors import IntegrityError
from tierstore.units import KIB

Bytes = npt.NDArray[np.uint8]
"""A one-dimensional contiguous array of bytes."""

BLOCK_BYTES: Final = 256 * KIB
"""What is packed at once: shuffled and unshuffled, it stays in a core's own cache."""

WIDTHS: Final = (1, 2, 4, 8)
"""How many bytes the numbers of a tensor may have."""

WORTHWHILE: Final = 0.9
"""Bytes that stay longer than this share of themselves are not packed: reading them back costs more."""

_WIDER_HAS_TO_GAIN: Final = 0.98  # a wider shuffle costs more: it must be more than noise that speaks for it
_SAMPLES: Final = 8
_LONGEST_SAMPLE: Final = 16 * KIB
_SHORTEST_SAMPLE: Final = 4 * KIB
_DECIDING_SAMPLE: Final = 128 * KIB


def shuffle(raw: Bytes, width: int) -> Bytes:
    """Return the first bytes of all numbers, then their second bytes, ...; a rest stays at the end."""
    count = len(raw) // width
    body = count * width
    out = np.empty(len(raw), np.uint8)
    parts: list[npt.NDArray[np.unsignedinteger]] = [raw[:body].view(f"<u{width}")]
    for size in _below(width):
        parts = [half for part in parts for half in _halves(part, size)]
    for index, plane in enumerate(parts):
        out[index * count : (index + 1) * count] = plane
    out[body:] = raw[body:]
    return out


def unshuffle(shuffled: Bytes, width: int, into: Bytes) -> None:
    """Undo `shuffle`."""
    count = len(into) // width
    body = count * width
    parts: list[npt.NDArray[np.unsignedinteger]] = [
        shuffled[index * count : (index + 1) * count] for index in range(width)
    ]
    size = 1
    while len(parts) > 1:
        size *= 2
        is_last = size == width
        parts = [
            _joined(low, high, into[:body].view(f"<u{size}") if is_last else np.empty(count, f"<u{size}"))
            for low, high in zip(parts[::2], parts[1::2], strict=True)
        ]
    if width == 1:
        into[:body] = parts[0]
    into[body:] = shuffled[body:]


def _below(width: int) -> Iterator[int]:
    """Yield the sizes that numbers of ``width`` bytes are halved to."""
    while width > 1:
        width //= 2
        yield width


def _halves(
    numbers: npt.NDArray[np.unsignedinteger], size: int
) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.unsignedinteger]]:
    """Return the low and the high halves of numbers, ``size`` bytes each."""
    return numbers.astype(f"<u{size}"), (numbers >> (8 * size)).astype(f"<u{size}")


def _joined(
    low: npt.NDArray[np.unsignedinteger],
    high: npt.NDArray[np.unsignedinteger],
    out: npt.NDArray[np.unsignedinteger],
) -> npt.NDArray[np.unsignedinteger]:
    """Put halves together in ``out``."""
    np.copyto(out, high)
    np.left_shift(out, 8 * low.itemsize, out=out)
    np.bitwise_or(out, low, out=out)
    return out


def spans(nbytes: int, step: int) -> list[tuple[int, int]]:
    """Cut ``nbytes`` into ranges of ``step``, the last of which may be shorter."""
    return [(start, min(start + step, nbytes)) for start in range(0, nbytes, step)]


def pack(raw: Bytes, width: int, block_bytes: int, into: Bytes) -> list[int]:
    """Pack ``raw``, block by block, one after the other into ``into``; return the blocks' lengths.

    ``into`` is at least as long as ``raw``.
    """
    lengths: list[int] = []
    at = 0
    for start, stop in spans(len(raw), block_bytes):
        block = raw[start:stop]
        packed = _compress(block, width)
        stored = np.frombuffer(packed, np.uint8) if len(packed) < len(block) else block
        into[at : at + len(stored)] = stored
        at += len(stored)
        lengths.append(len(stored))
    return lengths


def unpack(stored: Bytes, width: int, into: Bytes) -> None:
    """Unpack one block.

    Raises:
        IntegrityError: it does not unpack to as many bytes as ``into`` has.
    """
    if len(stored) == len(into):
        into[:] = stored
        return
    try:
        raw = lz4.block.decompress(stored, uncompressed_size=len(into))
    except (lz4.block.LZ4BlockError, ValueError, MemoryError) as cause:
        raise IntegrityError(f"a compressed block of {len(stored)} B cannot be unpacked: {cause}") from cause
    if len(raw) != len(into):
        raise IntegrityError(
            f"a compressed block of {len(stored)} B unpacks to {len(raw)} B, not to {len(into)}"
        )
    unshuffle(np.frombuffer(raw, np.uint8), width, into)


def best_width(raw: Bytes) -> int | None:
    """Return the width of the shuffle that makes ``raw`` shortest, or None if none is worth it.

    Judged by short samples from all over, so that bytes which cannot be packed cost next to nothing; lz4
    finds less in short ones, so where these leave it open, a longer one decides.
    """
    samples = _samples(raw)
    sampled = sum(map(len, samples))
    best, shortest = None, float(sampled)
    for width in WIDTHS:
        packed = sum(_packed_length(sample, width) for sample in samples)
        if packed < shortest * _WIDER_HAS_TO_GAIN:
            best, shortest = width, packed
    if best is None or shortest < sampled * WORTHWHILE:
        return best
    longer = min(max(len(raw) // 8, _SHORTEST_SAMPLE), _DECIDING_SAMPLE)
    start = (len(raw) - longer) // 2 // WIDTHS[-1] * WIDTHS[-1]
    decisive = raw[max(start, 0) :][:longer]
    return best if _packed_length(decisive, best) < len(decisive) * WORTHWHILE else None


def _samples(raw: Bytes) -> Sequence[Bytes]:
    """Return pieces from all over, an eighth at most where there is much of it."""
    piece = min(max(len(raw) // 64, _SHORTEST_SAMPLE), _LONGEST_SAMPLE)
    count = min(max(len(raw) // (8 * piece), 1), _SAMPLES)
    widest = WIDTHS[-1]
    starts = [(len(raw) - piece) * index // max(count - 1, 1) // widest * widest for index in range(count)]
    return [raw[max(start, 0) :][:piece] for start in starts]


def _packed_length(block: Bytes, width: int) -> int:
    return min(len(_compress(block, width)), len(block))


def _compress(block: Bytes, width: int) -> bytes:
    packed: bytes = lz4.block.compress(block if width == 1 else shuffle(block, width), store_size=False)
    return packed
