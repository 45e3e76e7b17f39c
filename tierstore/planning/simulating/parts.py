"""What one simulated run is made of."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.planning.placement import Placement
from tierstore.planning.program import Program
from tierstore.planning.simulating.conditions import Conditions
from tierstore.planning.simulating.dividing import DividedDevice
from tierstore.planning.simulating.holdings import Holdings
from tierstore.planning.simulating.host_lane import HostLane
from tierstore.planning.simulating.lanes import Lanes
from tierstore.planning.simulating.ledger_store import LedgerStore
from tierstore.planning.simulating.own_bytes import OwnBytes
from tierstore.planning.simulating.windows import KeyWindows


@dataclass(frozen=True, slots=True)
class RunParts:
    """What one simulated run is made of.

    Attributes:
        program: what it does.
        placement: where everything lives.
        conditions: what else it does.
        store: where its keys are.
        windows: on them.
        device: divides the first tier; ``None``: nobody does.
        own: the program's bytes, and what computes with them.
        lanes: what computes.
        host_lane: steps beside the device.
        holdings: who holds what.
    """

    program: Program
    placement: Placement
    conditions: Conditions
    store: LedgerStore
    windows: KeyWindows
    device: DividedDevice | None
    own: OwnBytes
    lanes: Lanes
    host_lane: HostLane
    holdings: Holdings
