"""The machine that a run has, as a planner sees it: its tiers, and links as fast as they were seen to be.

What was not seen yet is as a configuration limits it, or assumed, and `Machine.sources` says which.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from tierstore.config import OffloadConfig
from tierstore.planning.accelerators import accelerator, sheet_name
from tierstore.planning.deciding import ALIGNMENT_BYTES
from tierstore.planning.homes import DEVICE
from tierstore.planning.machine import ComputeFigures, LinkFigures, Machine, TierFigures, TierMedium
from tierstore.planning.rules import HOST
from tierstore.planning.simulating import Conditions
from tierstore.recorded import CopyRecord
from tierstore.store import Store
from tierstore.units import parse_rate
from tierstore.wrappers.bandwidth import BURST_NS

ASSUMED_DEVICE_BYTES_PER_S = 16e9
"""Of PCIe 4.0 with 16 lanes, what copies of pinned memory reach at least."""

ASSUMED_DISK_BYTES_PER_S = 1e9

LEAST_SEEN_BYTES = 1024**2
"""Of a link's copies together, until their rate says more than what beginning them takes."""

STRETCHES = 16
"""Of a link's copies, by bytes: what holds the process up for once is in one or two of them."""

MOST_TIMES_USUAL = 2
"""As long as a stretch of copies may take of what the middle one takes, by bytes, and still count whole."""

_LIMIT = "limit"
_ASSUMED_OPERATIONS_PER_S = 1e12
_ASSUMED_MEMORY_BYTES_PER_S = 20e9


def machine_of(store: Store, config: OffloadConfig) -> Machine:
    """Return the machine of a run: its capacities are what store and program may have at most.

    Args:
        store: of the run.
        config: of the run.
    """
    capacities = {tier.name: tier.capacity_bytes for tier in store.config.tiers}
    names = list(capacities)
    tiers = tuple(
        TierFigures(
            name,
            capacities[name],
            _medium(index, name),
            ALIGNMENT_BYTES if _medium(index, name) is TierMedium.DEVICE else 1,
        )
        for index, name in enumerate(names)
    )
    links: list[LinkFigures] = []
    sources: dict[str, str] = {}
    shares: dict[str, float] = {}
    for upper, lower in itertools.pairwise(tiers):
        both, source = _link(upper, lower, config)
        links += [both, replace(both, source=both.target, target=both.source)]
        if both.burst_s:  # a limit is of both directions together
            shares[_LIMIT] = both.bytes_per_s
        sources |= {f"links.{each.name}": source for each in links[-2:]}
    compute = ComputeFigures({"float32": _ASSUMED_OPERATIONS_PER_S}, _ASSUMED_MEMORY_BYTES_PER_S)
    sources["device"] = sources["host"] = "assumed"
    nominal = _in_the_sheet(store.device)
    if nominal is not None:
        sources["device"] = f"nominal: {nominal.name}"
    return Machine(
        "this run's",
        tiers,
        tuple(links),
        compute if nominal is None else nominal.device,
        compute,
        shares,
        has_streams=store.device.type != "cpu",
        sources=sources,
    )


def conditions_of(config: OffloadConfig, machine: Machine) -> Conditions:
    """Return what a configuration says that no placement does.

    Args:
        config: of a run.
        machine: of the run, whose tiers have the names of a store's.
    """
    ratios = {DEVICE: config.hbm_ratio, HOST: config.cpu_ratio}
    names = {tier.name for tier in machine.tiers}
    return Conditions(
        policy=config.eviction,
        high={tier: ratio for tier, ratio in ratios.items() if tier in names and ratio < 1},
        optimizer_in_backward=config.optimizer_in_backward,
    )


def with_seen_rates(machine: Machine, copies: Iterable[CopyRecord]) -> Machine:
    """Return the machine with its links as fast as copies were that have been recorded.

    A link's rate is its bytes over the time in which it was busy, however many copies there were at once;
    but for what held the process up in the midst of one.
    """
    seen = _rates(copies)
    links = tuple(
        replace(link, bytes_per_s=seen[link.source, link.target])
        if (link.source, link.target) in seen and not link.burst_s
        else link
        for link in machine.links
    )
    told = {
        f"links.{link.name}": "seen"
        for link in links
        if (link.source, link.target) in seen and not link.burst_s
    }
    return replace(machine, links=links, sources={**machine.sources, **told})


def _rates(copies: Iterable[CopyRecord]) -> Mapping[tuple[str, str], float]:
    by_link: dict[tuple[str, str], list[CopyRecord]] = defaultdict(list)
    for copy in copies:
        if copy.is_whole:
            by_link[copy.source, copy.target].append(copy)
    found: dict[tuple[str, str], float] = {}
    for link, those in by_link.items():
        nbytes = sum(copy.nbytes for copy in those)
        busy_s = _typical_s(those)
        if nbytes >= LEAST_SEEN_BYTES and busy_s > 0:
            found[link] = nbytes / busy_s
    return found


def _typical_s(copies: Sequence[CopyRecord]) -> float:
    """Return for how long copies were under way, but for what held the process up.

    A collection of Python's garbage takes as long as many copies.  So copies are looked at in stretches of
    about as many bytes each: one in which a byte took more than `MOST_TIMES_USUAL` of what it takes in the
    middle one of them counts as if it had taken that.
    """
    total = sum(copy.nbytes for copy in copies)
    length = max(LEAST_SEEN_BYTES, total // STRETCHES)
    stretches = [[0, 0.0]]  # bytes and seconds
    until_s = -math.inf
    for copy in sorted(copies, key=lambda each: each.end_s):
        if stretches[-1][0] >= length:
            stretches.append([0, 0.0])
        stretches[-1][0] += copy.nbytes
        stretches[-1][1] += copy.end_s - max(copy.begin_s, until_s)  # it has waited for those before it
        until_s = copy.end_s
    usual = statistics.median_low([seconds / nbytes for nbytes, seconds in stretches if nbytes] or [0.0])
    over_s = sum(max(0.0, seconds - MOST_TIMES_USUAL * usual * nbytes) for nbytes, seconds in stretches)
    return _busy_s(copies) - (over_s if usual > 0 else 0.0)


def _busy_s(copies: Iterable[CopyRecord]) -> float:
    """Return for how long at least one of some copies was under way."""
    busy_s, until_s = 0.0, -math.inf
    for copy in sorted(copies, key=lambda each: each.begin_s):
        busy_s += max(0.0, copy.end_s - max(copy.begin_s, until_s))
        until_s = max(until_s, copy.end_s)
    return busy_s


def _in_the_sheet(device: torch.device) -> Machine | None:
    """Return what the sheet says of an accelerator; ``None``: it is not there, or nobody tells its name."""
    if device.type == "cpu":
        return None
    try:
        described = torch.get_device_module(device).get_device_name(device.index or 0)
    except (AttributeError, RuntimeError):
        return None
    found = sheet_name(str(described))
    return None if found is None else accelerator(found)


def _medium(index: int, name: str) -> TierMedium:
    if name == HOST:
        return TierMedium.HOST
    return TierMedium.DEVICE if index == 0 else TierMedium.STORAGE


def _link(upper: TierFigures, lower: TierFigures, config: OffloadConfig) -> tuple[LinkFigures, str]:
    """Return what is known of the link from a tier to the next before anything moved, and from where."""
    names = upper.name, lower.name
    if lower.medium is TierMedium.STORAGE:
        limit = config.disk_options.get("max_bandwidth")
        if isinstance(limit, int | str):
            burst_s = BURST_NS / 1e9
            return LinkFigures(*names, parse_rate(limit), shares=(_LIMIT,), burst_s=burst_s), "max_bandwidth"
        return LinkFigures(*names, ASSUMED_DISK_BYTES_PER_S), "assumed"
    limit = config.device_options.get("link_bandwidth")
    if isinstance(limit, int | str):
        latency = config.device_options.get("link_latency_s", 0.0)
        latency_s = float(latency) if isinstance(latency, int | float) else 0.0
        return LinkFigures(*names, parse_rate(limit), latency_s), "link_bandwidth"
    return LinkFigures(*names, ASSUMED_DEVICE_BYTES_PER_S), "assumed"
