"""Plans: what a training step will use when, and where everything lives, as data.

A `Trace` records one step; `plan_from` turns it into the `Plan` that the store's next-use eviction and
the training loop's prefetch follow.  A `Placement` says where the bytes of a run live and what computes with
them; `tierstore.planning.rules` decide it.  Pure: no torch, threads, clocks or files.
"""

from tierstore.core.model import Plan
from tierstore.planning.homes import BundleHomes, Home, PlacedMark, Stashing, Treatment
from tierstore.planning.placement import Placement
from tierstore.planning.planner import plan_from
from tierstore.planning.residents import Trained, choose_residents
from tierstore.planning.table_frames import TableFrames
from tierstore.planning.trace import Trace

__all__ = [
    "BundleHomes",
    "Home",
    "PlacedMark",
    "Placement",
    "Plan",
    "Stashing",
    "TableFrames",
    "Trace",
    "Trained",
    "Treatment",
    "choose_residents",
    "plan_from",
]
