"""A run under a virtual clock: `simulate`.

The product's ledger and its decisions are driven by a program; links say how long copies take.  Pure and
deterministic: no torch, threads, clocks or files.
"""

from tierstore.planning.simulating.conditions import Conditions
from tierstore.planning.simulating.recomputing import with_recomputation
from tierstore.planning.simulating.simulator import simulate

__all__ = ["Conditions", "simulate", "with_recomputation"]
