"""What a run decides while it goes on: what it follows, fetches ahead, shares and steps early.

Who carries it out gives facts in and does what comes out: `tierstore.training` with a store, a meter and
locks, and the simulator with a ledger and a virtual clock.  So that what is predicted is what happens,
nothing is decided twice.

Pure: no torch, threads, clocks or files; one thread at a time.
"""

from tierstore.planning.deciding.device_share import (
    ALIGNMENT_BYTES,
    LEARNING_STEPS,
    DeviceShare,
)
from tierstore.planning.deciding.following import (
    Advance,
    Advice,
    Follow,
    Follower,
    Prefetch,
    PrefetchWindow,
    ResidentChooser,
    next_version,
)
from tierstore.planning.deciding.phases import (
    CameBytes,
    EvaluationEnd,
    PhasePeak,
    StepPhase,
    TrainedBytes,
    high_of,
)
from tierstore.planning.deciding.resident_choice import ResidentChoice
from tierstore.planning.deciding.stashing import is_stashed, must_stash, room_bytes
from tierstore.planning.deciding.steps_ahead import Patience, StepTime, TierRoom, has_room_ahead, step_time

__all__ = [
    "ALIGNMENT_BYTES",
    "LEARNING_STEPS",
    "Advance",
    "Advice",
    "CameBytes",
    "DeviceShare",
    "EvaluationEnd",
    "Follow",
    "Follower",
    "Patience",
    "PhasePeak",
    "Prefetch",
    "PrefetchWindow",
    "ResidentChoice",
    "ResidentChooser",
    "StepPhase",
    "StepTime",
    "TierRoom",
    "TrainedBytes",
    "has_room_ahead",
    "high_of",
    "is_stashed",
    "must_stash",
    "next_version",
    "room_bytes",
    "step_time",
]
