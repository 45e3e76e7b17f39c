"""Plans: what a training step will use when, as data.

A `Trace` records one step; `plan_from` turns it into the `Plan` that the store's next-use eviction and
the training loop's prefetch follow.  Pure: no torch, threads, clocks or files.
"""

from tierstore.core.model import Plan
from tierstore.planning.planner import plan_from
from tierstore.planning.residents import Trained, choose_residents
from tierstore.planning.trace import Trace

__all__ = ["Plan", "Trace", "Trained", "choose_residents", "plan_from"]
