"""Optimizers that change only the rows that a batch has used: of tables, and of other embeddings.

They are ordinary optimizers of PyTorch: with an offloaded model, and without.  One may step tables
(`tierstore.nn`) and other parameters together.
"""

from __future__ import annotations

from pathlib import Path

from tierstore import signals
from tierstore.optim.adagrad import Adagrad
from tierstore.optim.ftrl import FTRL
from tierstore.optim.lazy_adam import LazyAdam
from tierstore.optim.sgd import SGD
from tierstore.optim.sparse_adam import SparseAdam

__all__ = ["FTRL", "SGD", "Adagrad", "LazyAdam", "SparseAdam"]

signals.wait_in(Path(__file__).parent)  # a handler finds no rows in hand
