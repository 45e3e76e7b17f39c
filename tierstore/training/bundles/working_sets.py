"""What has to be where computing happens at the same time: to train one bundle, and to run one module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tierstore.errors import CapacityError
from tierstore.planning.deciding import ALIGNMENT_BYTES
from tierstore.training.bundles.grouping import Group
from tierstore.training.bundles.layout import lay_out
from tierstore.units import align_up, format_bytes


def bundle_bytes(group: Group) -> int:
    """Return the bytes that a bundle takes where it is computed with."""
    _, nbytes = lay_out(zip(group.names, group.tensors, strict=True))
    return align_up(nbytes, ALIGNMENT_BYTES)


class Needs(Protocol):
    """Bytes that have to be in one tier together."""

    @property
    def name(self) -> str:
        """Of what needs them."""
        ...

    @property
    def pinned_bytes(self) -> int:
        """Those of them that always stay there."""
        ...

    @property
    def together_bytes(self) -> int:
        """The others."""
        ...

    @property
    def verb(self) -> str:
        """What is done with it, as a participle."""
        ...

    @property
    def what(self) -> str:
        """What these bytes are, as a message says it."""
        ...


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """What has to be there together to train one bundle, or to have one of buffers.

    Attributes:
        name: of its first tensor.
        bundle_bytes: of its tensors.
        state_bytes: of what optimizers keep for them.
        gradients: the bytes of each gradient.
        pinned_bytes: of its tensors, where they stay on the device.
        is_buffer: whether it is a buffer: nobody trains it.
    """

    name: str
    bundle_bytes: int
    state_bytes: int
    gradients: tuple[int, ...] = ()
    pinned_bytes: int = 0
    is_buffer: bool = False

    @property
    def together_bytes(self) -> int:
        """The bytes that have to be there at the same time, but those that are pinned."""
        return self.nbytes - self.pinned_bytes

    @property
    def verb(self) -> str:
        """See `Needs.verb`."""
        return "used" if self.is_buffer else "trained"

    @property
    def what(self) -> str:
        """See `Needs.what`."""
        if self.is_buffer:
            return "the buffer takes"
        return "its bundle's parameters, gradients and optimizer state need"

    @property
    def nbytes(self) -> int:
        """Return the bytes of all."""
        return self.bundle_bytes + self.state_bytes + sum(self.gradients)


class TrainedSets(NamedTuple):
    """What has to be there of a whole model.

    Attributes:
        sets: bundle by bundle.
        widening: the most numbers that a matrix makes of each it is given.
    """

    sets: Sequence[WorkingSet]
    widening: float


@dataclass(frozen=True, slots=True)
class ForwardSet:
    """What has to be there together while one module's forward runs, but what is pinned.

    Attributes:
        name: of the module.
        bundles: the first name of each that its own forward needs.
        around: likewise of those that the modules around it hold meanwhile.
        bundle_bytes: of each that it needs.
        around_bytes: of each that is held.
    """

    name: str
    bundles: tuple[str, ...]
    around: tuple[str, ...]
    bundle_bytes: tuple[int, ...]
    around_bytes: tuple[int, ...]

    @property
    def together_bytes(self) -> int:
        """The bytes of all of them."""
        return sum(self.bundle_bytes) + sum(self.around_bytes)

    @property
    def pinned_bytes(self) -> int:
        """Of no bundle in it."""
        return 0

    @property
    def verb(self) -> str:
        """See `Needs.verb`."""
        return "run"

    @property
    def what(self) -> str:
        """See `Needs.what`."""
        around = f", the modules around it hold {_listed(self.around)}" if self.around else ""
        return f"its forward needs the bundles of {_listed(self.bundles)}{around}, which take"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


_SHOWN = 4

_DEVICE = ("on the device", "max_device_memory")
_FASTEST = {"host": ("in host memory", "offload_cpu_size")}
"""Where computing happens, and the key that bounds it."""


def largest_needs(needs: Sequence[Needs]) -> tuple[Needs, int]:
    """Return what needs most beside all that is pinned, and how much that is with it."""
    pinned_bytes = sum(each.pinned_bytes for each in needs)
    largest = max(needs, key=lambda each: each.together_bytes)
    return largest, largest.together_bytes + pinned_bytes


def too_large(tier: str, limit_bytes: int, needs: Sequence[Needs]) -> CapacityError:
    """Return what to raise if the largest needs do not fit into the fastest tier.

    Args:
        tier: its name.
        limit_bytes: what it may have.
        needs: of every bundle, and of what else has to fit.
    """
    where, limit = _FASTEST.get(tier, _DEVICE)
    largest, needed_bytes = largest_needs(needs)
    pinned_bytes = needed_bytes - largest.together_bytes
    own_bytes = largest.together_bytes + largest.pinned_bytes
    beside = f"beside {format_bytes(pinned_bytes)} that are pinned, " if pinned_bytes else ""
    advice = "Pin fewer parameters, raise it, or" if pinned_bytes else "Raise it, or"
    return CapacityError(
        f"{largest.name!r} cannot be {largest.verb} {where}: {beside}{largest.what} "
        f"{format_bytes(own_bytes)} together, and {limit} is {format_bytes(limit_bytes)}. {advice} split "
        "the module.",
        key=largest.name,
        tier=tier,
        needed_bytes=needed_bytes,
        free_bytes=limit_bytes,
    )
