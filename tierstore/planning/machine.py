"""What a machine has, as data: tiers, links between them, what links share, and how fast it computes.

Every figure has a source: measured here, a data sheet, or given.  Bytes a second are of one direction and
plain numbers: data sheets count powers of 1000, texts of ours powers of 1024.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tierstore.planning.homes import is_name
from tierstore.planning.program import BYTES_LISTED, FIGURE_LISTED, is_bytes, is_figure
from tierstore.planning.wrong_values import WrongValues
from tierstore.quoting import listed, named, quoted

MACHINE_VERSION = 1


class TierMedium(enum.Enum):
    """What a tier is made of."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier.

    Attributes:
        name: as a store's tier.
        capacity_bytes: what the store and the program may have there.
        medium: what it is made of.
        alignment_bytes: every key takes a multiple of this.
    """

    name: str
    capacity_bytes: int
    medium: TierMedium
    alignment_bytes: int = 1

    def __post_init__(self) -> None:
        faults = WrongValues()
        faults.add_unless(is_name(self.name), "name", self.name, "a name")
        faults.add_unless(is_bytes(self.capacity_bytes), "capacity_bytes", self.capacity_bytes, BYTES_LISTED)
        faults.add_unless(isinstance(self.medium, TierMedium), "medium", self.medium, "a TierMedium")
        faults.add_unless(
            is_bytes(self.alignment_bytes) and self.alignment_bytes > 0,
            "alignment_bytes",
            self.alignment_bytes,
            "an int greater than 0",
        )
        faults.raise_if_any("TierFigures")


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """One direction between two tiers.

    Attributes:
        source, target: names of tiers.
        bytes_per_s: of one direction alone; ``math.inf`` where nothing is to be waited for.
        latency_s: from the order to the first byte; copies that wait do not pay it again.
        shares: names of `Machine.shares` that it takes part of.
        burst_s: a limit lets through at once what its rate lets through in this time.
    """

    source: str
    target: str
    bytes_per_s: float
    latency_s: float = 0.0
    shares: tuple[str, ...] = ()
    burst_s: float = 0.0

    def __post_init__(self) -> None:
        faults = WrongValues()
        faults.add_unless(
            is_rate(self.bytes_per_s), "bytes_per_s", self.bytes_per_s, "a number greater than 0"
        )
        for name in ("latency_s", "burst_s"):
            faults.add_unless(is_figure(getattr(self, name)), name, getattr(self, name), FIGURE_LISTED)
        faults.raise_if_any(f"LinkFigures {named(self.name)}")

    @property
    def name(self) -> str:
        """The link's name, such as ``"host->device"``."""
        return f"{self.source}->{self.target}"


@dataclass(frozen=True, slots=True)
class NetworkFigures:
    """What ranks exchange bytes over.

    Attributes:
        name: ``"peer"``: between the ranks of one host; ``"fabric"``: between hosts.
        bytes_per_s: that one rank sends, and receives, at once; of ``"fabric"``: that one host does.
        latency_s: of one message.
        shares: as `LinkFigures.shares`.
    """

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    shares: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        faults = WrongValues()
        faults.add_unless(
            is_rate(self.bytes_per_s), "bytes_per_s", self.bytes_per_s, "a number greater than 0"
        )
        faults.add_unless(is_figure(self.latency_s), "latency_s", self.latency_s, FIGURE_LISTED)
        faults.raise_if_any(f"NetworkFigures {quoted(self.name)}")


@dataclass(frozen=True, slots=True)
class ComputeFigures:
    """How fast something computes.

    Attributes:
        flops_per_s: by dtype, as ``"bfloat16"``; ``"float32"`` stands for dtypes that are not named.
        memory_bytes_per_s: what operators can read and write a second.
        operator_s: what starting one operator costs.
        efficiency: by sort of `OperatorWork`, the share of ``flops_per_s`` that is reached; 0.5 if not named.
    """

    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    operator_s: float = 0.0
    efficiency: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        faults = WrongValues()
        for name, rate in self.flops_per_s.items():
            faults.add_unless(is_rate(rate), f"flops_per_s[{quoted(name)}]", rate, "a number greater than 0")
        faults.add_unless(
            is_rate(self.memory_bytes_per_s),
            "memory_bytes_per_s",
            self.memory_bytes_per_s,
            "a number greater than 0",
        )
        faults.add_unless(is_figure(self.operator_s), "operator_s", self.operator_s, FIGURE_LISTED)
        for name, share in self.efficiency.items():
            is_share = is_figure(share) and 0 < share <= 1
            faults.add_unless(
                is_share, f"efficiency[{quoted(name)}]", share, "a share greater than 0 and at most 1"
            )
        faults.raise_if_any("ComputeFigures")


@dataclass(frozen=True)
class Machine:
    """One machine, or one of several alike.

    Attributes:
        name: for people.
        tiers: fastest first.
        links: every pair of neighbours in both directions; others may be there, too.
        device: how fast the first tier's device computes.
        host: how fast the host's cores do, together.
        shares: bytes a second that several links have together: a bus that is not duplex, a drive's reads and
            writes, a switch.
        network: between ranks.
        ranks_per_host: ranks with a device of their own, which share the host's memory and drives.
        hosts: machines like this one.
        has_streams: whether copies and computing go on beside each other without the host.
        sources: where figures come from, by their path (``"links.host->device"``).

    Raises:
        ConfigError: lists every fault.
    """

    name: str
    tiers: tuple[TierFigures, ...]
    links: tuple[LinkFigures, ...]
    device: ComputeFigures
    host: ComputeFigures
    shares: Mapping[str, float] = field(default_factory=dict)
    network: tuple[NetworkFigures, ...] = ()
    ranks_per_host: int = 1
    hosts: int = 1
    has_streams: bool = True
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        faults = WrongValues()
        names = [tier.name for tier in self.tiers]
        faults.add_unless(
            bool(names) and len(set(names)) == len(names), "tiers", names, "at least one, each name once"
        )
        for link in self.links:
            is_between = link.source in names and link.target in names and link.source != link.target
            faults.add_unless(
                is_between, f"links[{named(link.name)}]", link.name, f"between two of {listed(names)}"
            )
            for share in link.shares:
                faults.add_unless(
                    share in self.shares, f"links[{named(link.name)}].shares", share, "a name of the shares"
                )
        for upper, lower in itertools.pairwise(names):
            for source, target in ((upper, lower), (lower, upper)):
                is_there = any((link.source, link.target) == (source, target) for link in self.links)
                faults.add_unless(
                    is_there,
                    "links",
                    [each.name for each in self.links],
                    f"{named(source)}->{named(target)}, too",
                )
        for name, rate in self.shares.items():
            faults.add_unless(is_rate(rate), f"shares[{quoted(name)}]", rate, "a number greater than 0")
        for name in ("ranks_per_host", "hosts"):
            count = getattr(self, name)
            faults.add_unless(is_bytes(count) and count > 0, name, count, "an int greater than 0")
        faults.raise_if_any(f"Machine {quoted(self.name)}")

    def tier(self, name: str) -> TierFigures:
        """Return the figures of one tier.

        Raises:
            KeyError: there is none of that name.
        """
        return {each.name: each for each in self.tiers}[name]

    def link(self, source: str, target: str) -> LinkFigures | None:
        """Return the link that goes straight from one tier to another; ``None``: there is none."""
        return next((each for each in self.links if (each.source, each.target) == (source, target)), None)

    def with_capacities(self, capacities: Mapping[str, int]) -> Machine:
        """Return the machine with other capacities of some tiers; one of 0 bytes below the first is gone.

        Where a tier between two others is gone, bytes take the slower one of its links.
        """
        tiers = tuple(
            replace(tier, capacity_bytes=capacities.get(tier.name, tier.capacity_bytes))
            for tier in self.tiers
        )
        links = list(self.links)
        for upper, gone, lower in zip(tiers, tiers[1:], tiers[2:], strict=False):
            if not gone.capacity_bytes and self.link(upper.name, lower.name) is None:
                links += [self._through(upper, gone, lower), self._through(lower, gone, upper)]
        kept = (*tiers[:1], *(tier for tier in tiers[1:] if tier.capacity_bytes))
        names = {tier.name for tier in kept}
        left = tuple(each for each in links if {each.source, each.target} <= names)
        return replace(self, tiers=kept, links=left)

    def _through(self, source: TierFigures, gone: TierFigures, target: TierFigures) -> LinkFigures:
        first, second = self.link(source.name, gone.name), self.link(gone.name, target.name)
        assert first is not None
        assert second is not None
        return LinkFigures(
            source.name,
            target.name,
            min(first.bytes_per_s, second.bytes_per_s),
            first.latency_s + second.latency_s,
            tuple(dict.fromkeys((*first.shares, *second.shares))),
            min(first.burst_s, second.burst_s),
        )


def is_rate(value: object) -> bool:
    """Whether something is a number greater than 0; infinity is one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
