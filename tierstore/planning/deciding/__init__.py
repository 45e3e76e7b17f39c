"""What a run decides while it goes on: what it follows, fetches ahead, shares and steps early.

Who carries it out gives facts in and does what comes out: `tierstore.training` with a store, a meter and
locks, and the simulator with a ledger and a virtual clock.  So that what is predicted is what happens,
nothing is decided twice.

Pure: no torch, threads, clocks or files; one thread at a time.
"""

from tierstore.planning.deciding.device_share import (
    ALIGNMENT_BYTES,
    DeviceShare,
    PhasePeak,
    StepPhase,
    TrainedBytes,
)
from tierstore.planning.deciding.following import (
    Advance,
    Advice,
    Follow,
    Follower,
    Prefetch,
    PrefetchWindow,
    next_version,
)

__all__ = [
    "ALIGNMENT_BYTES",
    "Advance",
    "Advice",
    "DeviceShare",
    "Follow",
    "Follower",
    "PhasePeak",
    "Prefetch",
    "PrefetchWindow",
    "StepPhase",
    "TrainedBytes",
    "next_version",
]
