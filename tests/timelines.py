"""Timelines made by hand, for tests of what shows them."""

from __future__ import annotations

from tierstore.planning import Account, ByteKind, Interval, StallCause, StepTotals, Timeline

GB = 10**9


def timeline(
    name: str = "planned",
    source: str = "simulated",
    *,
    layers: int = 10,
    steps: int = 4,
    key: str = "layers.{}.weight",
    pace_s: float = 0.010,
) -> Timeline:
    """Return a run whose layers compute for ``pace_s`` each and wait a tenth of that for each second copy."""
    intervals: list[Interval] = []
    held: list[tuple[float, dict[ByteKind, int]]] = []
    charges: list[tuple[float, int]] = []
    totals: list[StepTotals] = []
    at_s = 0.0
    for _ in range(steps):
        begin_s = at_s
        for layer in range(layers):
            weight = key.replace("{}", str(layer))
            intervals.append(Interval(at_s, at_s + pace_s, "compute", f"layers.{layer}"))
            intervals.append(
                Interval(at_s, at_s + pace_s / 2, "host->device", weight, key=weight, nbytes=GB // 10)
            )
            held.append((at_s, {ByteKind.PARAMETERS: GB, ByteKind.ACTIVATION: (layer + 1) * GB // 10}))
            charges.append((at_s, GB + layer))
            at_s += pace_s
            if layer % 2:
                stall_s = pace_s / 10
                intervals.append(
                    Interval(at_s, at_s + stall_s, "waiting", weight, key=weight, cause=StallCause.COPY_UP)
                )
                at_s += stall_s
        stalled_s = layers // 2 * pace_s / 10
        moved = {"host->device": layers * GB // 10}
        totals.append(StepTotals(begin_s, at_s, moved, {StallCause.COPY_UP: stalled_s}, {"device": 2 * GB}))
    kinds = {ByteKind.PARAMETERS: GB, ByteKind.ACTIVATION: GB}
    largest = tuple((key.replace("{}", str(layer)), GB // 10) for layer in range(min(3, layers)))
    return Timeline(
        name,
        source,
        tuple(intervals),
        tuple(totals),
        Account(0.0, 2 * GB, kinds, largest, f"layers.{layers - 1}"),
        {"device": tuple(charges)},
        tuple(held),
        assumptions=("shapes do not depend on data",),
    )
