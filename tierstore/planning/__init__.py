"""Plans: what a training step will use when, and where everything lives, as data.

A `Trace` records one step; `plan_from` turns it into the `Plan` that the store's next-use eviction and
the training loop's prefetch follow.  A `Placement` says where the bytes of a run live and what computes with
them; `tierstore.planning.rules` decide it.

A `Program` says what a step does, a `Machine` what it runs on, and a `Timeline` what happened when.
Pure: no torch, threads, clocks or files.
"""

from tierstore.core.model import Plan
from tierstore.planning.homes import BundleHomes, Home, PlacedMark, Stashing, Treatment
from tierstore.planning.machine import (
    ComputeFigures,
    LinkFigures,
    Machine,
    NetworkFigures,
    TierFigures,
    TierMedium,
)
from tierstore.planning.placement import Placement
from tierstore.planning.planner import plan_from
from tierstore.planning.program import (
    ByteKind,
    Datum,
    Does,
    KeyUse,
    Moment,
    OperatorWork,
    Phase,
    Program,
    Unit,
)
from tierstore.planning.residents import Trained, choose_residents
from tierstore.planning.staying import choose_staying, is_another_room
from tierstore.planning.table_frames import TableFrames
from tierstore.planning.timeline import Account, Interval, StallCause, StepTotals, Timeline
from tierstore.planning.trace import Trace

__all__ = [
    "Account",
    "BundleHomes",
    "ByteKind",
    "ComputeFigures",
    "Datum",
    "Does",
    "Home",
    "Interval",
    "KeyUse",
    "LinkFigures",
    "Machine",
    "Moment",
    "NetworkFigures",
    "OperatorWork",
    "Phase",
    "PlacedMark",
    "Placement",
    "Plan",
    "Program",
    "StallCause",
    "Stashing",
    "StepTotals",
    "TableFrames",
    "TierFigures",
    "TierMedium",
    "Timeline",
    "Trace",
    "Trained",
    "Treatment",
    "Unit",
    "choose_residents",
    "choose_staying",
    "is_another_room",
    "plan_from",
]
