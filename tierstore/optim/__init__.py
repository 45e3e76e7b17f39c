"""Optimizers that change only the rows that a batch has used: of embeddings whose gradients are sparse.

They are ordinary optimizers of PyTorch: with an offloaded model, and without.  Dense gradients are taken as
well, and change every element.
"""

from __future__ import annotations

from tierstore.optim.ftrl import FTRL
from tierstore.optim.lazy_adam import LazyAdam

__all__ = ["FTRL", "LazyAdam"]
