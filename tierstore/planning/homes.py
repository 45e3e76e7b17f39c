"""The pieces of a placement: where one bundle lives, and what becomes of its gradients and activations.

Each is right in itself, or is not made: an error lists every fault.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

from tierstore.planning.wrong_values import WrongValues
from tierstore.quoting import listed

DEVICE = "device"
CPU = "cpu"
DEVICES = (DEVICE, CPU)
DEVICES_LISTED = listed(DEVICES)
"""In messages of what is accepted."""


class Stashing(enum.Enum):
    """When a gradient that backward makes becomes the store's."""

    ALWAYS = "always"  # under a key of its own
    WITHOUT_ROOM = "without-room"  # until it is known that the device has room for all of them
    NEVER = "never"  # it is autograd's own


class Treatment(enum.Enum):
    """What becomes of activations between forward and backward."""

    KEEP = "keep"  # they stay
    SWAP = "swap"  # they leave the device and come back
    RECOMPUTE = "recompute"  # they are made again


def is_name(value: object) -> bool:
    """Whether something can name a tier, a bundle or a table."""
    return isinstance(value, str) and bool(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@functools.cache
def values_of(kind: type[enum.Enum]) -> str:
    """Return the values of an enum, as a message lists them."""
    return listed([each.value for each in kind])


@dataclass(frozen=True, slots=True)
class Home:
    """Where one kind of a bundle's bytes lives.

    Args:
        tier: where they are put first; ``None``: as fast as there is room.
        device: what computes with them: ``"device"``, the one that the model runs on, or ``"cpu"``.
        returns: whether they go back to ``tier`` after every use; else quotas and the plan decide.

    Raises:
        ConfigError: lists every fault.
    """

    tier: str | None = None
    device: str = DEVICE
    returns: bool = False

    def __post_init__(self) -> None:
        faults = WrongValues()
        faults.add_unless(
            self.tier is None or is_name(self.tier), "tier", self.tier, "a tier's name, or null"
        )
        faults.add_unless(self.device in DEVICES, "device", self.device, DEVICES_LISTED)
        faults.add_unless(isinstance(self.returns, bool), "returns", self.returns, "true or false")
        faults.add_unless(
            not (self.returns is True and self.tier is None),
            "returns",
            self.returns,
            "false, where no tier is named",
        )
        faults.raise_if_any("Home")

    def __str__(self) -> str:
        where = self.tier or "any tier"
        return f"{where}{' after every use' if self.returns else ''} for the {self.device}"


@dataclass(frozen=True, slots=True)
class BundleHomes:
    """Where all of one bundle lives.

    Args:
        parameters: its own bytes (of a bundle of buffers, theirs); ``device`` runs the modules.
        gradients: those of its parameters that are stashed; ``device`` is the state's, and in plain values
            follows it.
        state: what optimizers keep for it; ``device`` makes the step.
        is_pinned: whether its own bytes never leave the fastest tier.
    """

    parameters: Home = Home()
    gradients: Home = Home()
    state: Home = Home()
    is_pinned: bool = False

    def __post_init__(self) -> None:
        faults = WrongValues()
        for name in ("parameters", "gradients", "state"):
            faults.add_unless(isinstance(getattr(self, name), Home), name, getattr(self, name), "a Home")
        faults.add_unless(isinstance(self.is_pinned, bool), "is_pinned", self.is_pinned, "true or false")
        faults.add_unless(
            self.gradients.device == self.state.device,
            "gradients.device",
            self.gradients.device,
            f"{self.state.device!r}, as of the state: one device makes the step",
        )
        faults.raise_if_any("BundleHomes")

    def __str__(self) -> str:
        pinned = "pinned; " if self.is_pinned else ""
        return (
            f"{pinned}parameters in {self.parameters}; gradients in {self.gradients}; state in {self.state}"
        )


@dataclass(frozen=True, slots=True)
class PlacedMark:
    """What happens to activations that one mark means.

    Args:
        layer: its number.
        operators: the pattern of those of the layer; empty: the whole of it.
        treatment: what becomes of their activations.
        ahead: how many nodes of the backward graph before their use they come back.
    """

    layer: int
    operators: str
    treatment: Treatment
    ahead: int = 0

    def __post_init__(self) -> None:
        faults = WrongValues()
        faults.add_unless(_is_count(self.layer), "layer", self.layer, "an int of at least 0")
        faults.add_unless(isinstance(self.operators, str), "operators", self.operators, "a pattern, or ''")
        faults.add_unless(
            isinstance(self.treatment, Treatment), "treatment", self.treatment, values_of(Treatment)
        )
        faults.add_unless(_is_count(self.ahead), "ahead", self.ahead, "an int of at least 0")
        faults.raise_if_any("PlacedMark")

    def __str__(self) -> str:
        ahead = f", {self.ahead} nodes ahead" if self.treatment is Treatment.SWAP else ""
        return f"layer {self.layer} {self.operators or 'as a whole'}: {self.treatment.value}{ahead}"
