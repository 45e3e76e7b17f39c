"""What a simulated run is configured to do, beside its placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierstore.core.eviction import POLICIES
from tierstore.planning.program import is_figure
from tierstore.planning.simulating.exchanges import Exchanges
from tierstore.planning.wrong_values import WrongValues
from tierstore.quoting import listed


@dataclass(frozen=True)
class Conditions:
    """What a run does that no placement says.

    Attributes:
        policy: who is evicted next, as ``eviction`` of a configuration.
        high: by tier, the share of it above which it writes back, where the placement says nothing; of a tier
            that is not named: all of it.
        low: by tier, the share down to which it then goes on; of one that is not named: as ``high``.
        is_divided: whether the first tier's capacity is what program and store may have together, as
            ``max_device_memory`` is; only where the first tier is a device's.
        is_enforced: whether a run ends where program and store have more than that together; else it goes on,
            and its peak is more than the capacity: nothing stops a run on an emulated device.
        optimizer_in_backward: whether backward steps a bundle as soon as its gradients are there.
        steps_ahead: whether steps may be made before the optimizer's turn, where the product would.
        exchanges: collectives of a rank: `tierstore.planning.ranks` makes them.

    Raises:
        ConfigError: lists every fault.
    """

    policy: str = "next-use"
    high: Mapping[str, float] = field(default_factory=dict)
    low: Mapping[str, float] = field(default_factory=dict)
    is_divided: bool = True
    is_enforced: bool = True
    optimizer_in_backward: bool = False
    steps_ahead: bool = True
    exchanges: Exchanges = field(default_factory=Exchanges)

    def __post_init__(self) -> None:
        faults = WrongValues()
        faults.add_unless(self.policy in POLICIES, "policy", self.policy, listed(POLICIES))
        for name in ("high", "low"):
            for tier, share in getattr(self, name).items():
                is_share = is_figure(share) and 0 < share <= 1
                faults.add_unless(
                    is_share, f"{name}[{tier!r}]", share, "a share greater than 0 and at most 1"
                )
        faults.raise_if_any("Conditions")
