"""Handwritten digits that come with a package, so that an example has images without a download."""

from __future__ import annotations

import torch
from torch import Tensor


def handwritten_digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images of 8x8 bytes, ``(1797, 8, 8)``, and which digit each is, ``(1797,)``.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as missing:
        raise ValueError(
            "the default data set comes with scikit-learn: pip install scikit-learn, or name files "
            "with --data"
        ) from missing
    digits = load_digits()
    pixels = (torch.from_numpy(digits.images) * (255 / 16)).to(torch.uint8)
    return pixels, torch.from_numpy(digits.target)
