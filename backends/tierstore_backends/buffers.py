"""What a caller's buffer has to be where a backend takes its bytes as they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tierstore.errors import UsageError
from tierstore.spi import Buffer, Slot


def check_buffer(
    buffer: Buffer, nbytes: int, *, accepts: Callable[[torch.Tensor], bool] | None = None
) -> None:
    """Refuse a buffer that does not fit a slot of ``nbytes``.

    Args:
        buffer: what was given.
        nbytes: how many bytes it must have, one after the other.
        accepts: says which memory may be used beside the host's; ``None``: no other.

    Raises:
        UsageError: it has other elements, another shape or other memory.
    """
    if (
        buffer.dtype is not torch.uint8
        or buffer.dim() != 1
        or buffer.numel() != nbytes
        or not buffer.is_contiguous()
        or not (buffer.is_cpu or (accepts is not None and accepts(buffer)))
    ):
        raise UsageError(
            f"a buffer of {nbytes} contiguous torch.uint8 in host memory is needed, "
            f"not {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}"
        )


def check_parts(
    slots: Sequence[Slot], begins: Sequence[int], nbytes: int, into: Buffer, alignment_bytes: int
) -> None:
    """Refuse parts that `tierstore.spi.PartBackend.read_parts` is not to be asked for.

    Args:
        slots: whose parts.
        begins: where each begins.
        nbytes: how long each of them is.
        into: what is to be filled.
        alignment_bytes: what begins and lengths are multiples of.

    Raises:
        UsageError: it names the first part that is not aligned or not within its slot, or says what else.
    """
    count = len(begins)
    if not count or len(slots) != count or nbytes < 1 or nbytes % alignment_bytes:
        raise UsageError(
            f"{count} parts of {nbytes} bytes, of {len(slots)} slots: at least one part is needed, a slot "
            f"for each, and a length that is a multiple of {alignment_bytes}"
        )
    check_buffer(into, count * nbytes)
    for position, (slot, begin) in enumerate(zip(slots, begins, strict=True)):
        if begin < 0 or begin % alignment_bytes or begin + nbytes > slot.nbytes:
            raise UsageError(
                f"part {position} begins at {begin} and has {nbytes} bytes: it has to begin at a multiple of "
                f"{alignment_bytes} and to end within the {slot.nbytes} bytes of its slot"
            )
