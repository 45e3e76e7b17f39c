"""Modules of which the rows of large tables are kept apart, and brought as batches need them.

A table is an ordinary module with one parameter of its true shape.  `tierstore.optim` steps it.
"""

from __future__ import annotations

from pathlib import Path

from tierstore import signals
from tierstore.nn.embedding_table import EmbeddingTable
from tierstore.nn.initializers import Normal, Uniform

__all__ = ["EmbeddingTable", "Normal", "Uniform"]

signals.wait_in(Path(__file__).parent)  # a handler finds no rows in hand
