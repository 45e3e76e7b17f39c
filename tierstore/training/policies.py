"""What decides for a run: made before its session, which asks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierstore.training.budgets.device_quota import DeviceQuota
from tierstore.training.budgets.memory_meters import Meter
from tierstore.training.budgets.prefetcher import Prefetcher
from tierstore.training.modules.host_modules import PlacedModules
from tierstore.training.optimizers.in_backward import Stepping
from tierstore.training.placing import Placing


@dataclass(frozen=True)
class Policies:
    """What decides for a session; made before it.

    Attributes:
        placing: where everything lives.
        prefetcher: learns and follows the plan.
        meter: of what the program has on the device; ``None``: there is no device.
        quota: of the device; ``None``: it is not divided with the program.
        must_stash: says whether gradients that backward makes from now on go to the store.
        stepping: when the optimizers step.
        placed: which modules compute on the host.
    """

    placing: Placing
    prefetcher: Prefetcher
    meter: Meter | None
    quota: DeviceQuota | None
    must_stash: Callable[[], bool]
    stepping: Stepping
    placed: PlacedModules
