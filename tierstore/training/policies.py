"""What decides for a run: made before its session, which asks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tierstore.planning import Placement
from tierstore.planning.deciding import PrefetchWindow, must_stash
from tierstore.planning.homes import CPU
from tierstore.planning.rules import HOST
from tierstore.store import Store
from tierstore.training.budgets.device_quota import DeviceQuota
from tierstore.training.budgets.memory_meters import AllocatorMeter, EmulatedMeter, Meter
from tierstore.training.budgets.prefetcher import Prefetcher
from tierstore.training.bundles.working_sets import TrainedSets
from tierstore.training.inventory import Inventory
from tierstore.training.modules.host_modules import PlacedModules
from tierstore.training.optimizers.in_backward import Stepping
from tierstore.training.placing import Placing
from tierstore.training.recording.device_clock import DeviceClock
from tierstore.training.recording.recorder import StepRecorder, nothing_known


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
        recorder: watches steps.
    """

    placing: Placing
    prefetcher: Prefetcher
    meter: Meter | None
    quota: DeviceQuota | None
    must_stash: Callable[[], bool]
    stepping: Stepping
    placed: PlacedModules
    recorder: StepRecorder


def policies_for(
    optimizers: Sequence[torch.optim.Optimizer],
    store: Store,
    trained: TrainedSets,
    inventory: Inventory,
    placement: Placement,
    stepping: Stepping,
    placed: PlacedModules,
    *,
    follows_plan: bool,
) -> Policies:
    """Return what decides for a session that is to be made.

    Args:
        optimizers: that train.
        store: where to.
        trained: what has to be there of the model.
        inventory: of what will be taken in.
        placement: where everything lives.
        stepping: when the optimizers step.
        placed: which modules compute on the host.
        follows_plan: whether what steps need is fetched ahead.
    """
    fastest = store.tier_names[0]
    quota: DeviceQuota | None = None

    def room_bytes() -> int:
        if quota is not None:
            return quota.staying_room_bytes
        # What is above this share is to be written back early: nothing that stays may be there.
        high = placing.placement.high.get(fastest, store.config.tiers[0].high)
        return int(store.rooms()[fastest].capacity_bytes * high)

    placing = Placing(placement, store, inventory, stepping, room_bytes, has_device=fastest != HOST)
    meter = None if fastest == HOST else _meter(store)
    prefetcher = Prefetcher(
        store,
        _windows(store, placement) if follows_plan else None,
        inventory.nbytes_of,
        len(optimizers),
        placing,
    )
    if meter is not None and trained.sets:
        quota = DeviceQuota(
            store,
            trained,
            meter,
            lambda own: prefetcher.set_limit(fastest, placing.placement.ahead_bytes(fastest, own)),
            inventory.gradients,
            inventory.state_bytes,
            placement.said_high(fastest, store.config.tiers[0].high),
        )
    return Policies(
        placing,
        prefetcher,
        meter,
        quota,
        lambda: must_stash(placement.stashing, has_room=quota is not None and quota.has_room_for_gradients),
        stepping,
        placed,
        StepRecorder(
            store.recorded,
            nothing_known if meter is None else meter.take_moment,
            len(optimizers),
            None if store.device.type == CPU else DeviceClock(store.device),
        ),
    )


def _meter(store: Store) -> Meter:
    if store.device.type == "cpu":
        return EmulatedMeter(store)
    return AllocatorMeter(store, store.device)


def _windows(store: Store, placement: Placement) -> list[PrefetchWindow]:
    """Return how far ahead is prefetched: to the fastest tier first.

    To the last one, too: a step beside the old values needs them in another tier than that of the new ones.
    """
    tiers = store.stats().tiers
    names = [name for name in store.tier_names if name in placement.ahead]
    return [
        PrefetchWindow(
            name,
            placement.ahead_bytes(name, tiers[name].capacity_bytes),
            is_slowest=name == store.tier_names[-1],
        )
        for name in names
    ]
