"""A device's share for tests, and uses of a model that it is told of."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.planning.deciding import CameBytes, DeviceShare, PhasePeak, StepPhase, TrainedBytes

BUNDLE, STATE, GRADIENT = 8192, 16384, 8192  # bytes of each of ten bundles
TRAINED = TrainedBytes(
    all_bytes=10 * (BUNDLE + STATE + GRADIENT),
    gradient_bytes=10 * GRADIENT,
    pinned_bytes=0,
    largest_bytes=BUNDLE + STATE + GRADIENT,
    largest_bundle_bytes=BUNDLE,
)
PLENTY = 1 << 40


def share_of(
    limit_bytes: int,
    below_bytes: int = PLENTY,
    trained: TrainedBytes = TRAINED,
    staying_bytes: int = 0,
    came_bytes: int = 0,
    *,
    has_streams: bool = True,
) -> DeviceShare:
    share = DeviceShare(
        limit_bytes,
        trained,
        below_bytes,
        lambda: staying_bytes,
        lambda: CameBytes(came_bytes),
        has_streams=has_streams,
    )
    share.quota_bytes = share.own_bytes
    return share


@dataclass
class Use:
    """What one step of a program takes on the device."""

    model_bytes: int
    optimizer_bytes: int = 0
    elements: int = 1
    standing_bytes: int = 0
    called: str | None = None
    at_gradients_bytes: int = 0
    whole_bytes: int = 0


def begin(share: DeviceShare, phase: StepPhase, use: Use) -> int | None:
    """Begin a use of the model; return what the last one took, if it was too much."""
    share.begin_use(phase, use.called)
    if share.phase is not phase:
        share.enter(phase, PhasePeak())
    needed_bytes = share.too_much(phase, use.elements)
    if needed_bytes is None:
        share.expect_more(phase, use.elements)
        if share.begin_learning(phase, use.elements):
            share.note_standing(use.standing_bytes)
    return needed_bytes


def step(share: DeviceShare, use: Use) -> int | None:
    """One step; returns as `begin`."""
    needed_bytes = begin(share, StepPhase.MODEL, use)
    if needed_bytes is not None:
        return needed_bytes
    if share.is_learning:
        share.note_at_gradients(use.at_gradients_bytes)
    share.enter(StepPhase.OPTIMIZER, PhasePeak(use.model_bytes, whole_bytes=use.whole_bytes))
    if share.learns_from(StepPhase.MODEL):
        share.begin_step(0)
    share.enter(StepPhase.BETWEEN, PhasePeak(use.optimizer_bytes))
    share.end_step()
    return None
