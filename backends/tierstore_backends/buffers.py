"""What a caller's buffer has to be where a backend takes its bytes as they lie."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tierstore.errors import UsageError
from tierstore.spi import Buffer


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
