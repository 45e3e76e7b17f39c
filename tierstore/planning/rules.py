"""The rules that decide where everything of a run lives: what is known of it in, a `Placement` out.

1. Bytes begin where the configuration says, and go back there after every use if it says that, too; else they
   begin as fast as there is room.
2. Where everything fits into the fastest tier, nothing is prefetched and no gradient is stashed.  Beside a
   device that is known only when a step was measured: there gradients are stashed until then, and something
   is always ahead.
3. A quarter of what the store may have of a tier may be ahead of its use.  Above which share a device writes
   back early is `tierstore.planning.deciding.DeviceShare`'s to say, when a step was measured.
4. Optimizers step where the configuration says, but what is pinned where it is.  What modules that compute
   on the host use lives in host memory or below, and is stepped there.
5. What stays from step to step is `tierstore.planning.residents`' to say, when a step has run.

A placement that is given is laid over theirs, and refused where it cannot be right.

Pure: sizes and names in, a decision out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tierstore.errors import ConfigError
from tierstore.planning.homes import CPU, DEVICE, BundleHomes, Home, Stashing
from tierstore.planning.placement import Placement, pins_in
from tierstore.quoting import listed, named, quoted
from tierstore.units import KIB, format_bytes

HOST = "host"
DISK = "disk"
AHEAD = 0.25
"""The share of a tier that may be ahead of its use."""

AHEAD_IN_BACKWARD = 0.5
"""The same where backward steps in the fastest tier: what stays there bounds it beside that."""

_SMALL_SHARE = 64  # bundles below this part of what is left of the fastest tier are worth joining
_MODEL_SHARE = (
    256  # and below this part of the model: the same ones whatever is left, if that is a quarter of it
)
_ALWAYS_SMALL = 16 * KIB  # or this, where the model is small
_PAGES_BYTES = 4 * 4 * KIB  # that a bundle, its gradients and its state may take more by beginning on pages
_TIER_OF = {"cpu": HOST, "disk": DISK}
_MOST_FAULTS = 32


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a configuration wants; the names are those of its keys.

    Attributes:
        offload_param, offload_checkpoint, offload_grad, offload_optimizer: where each goes: ``"cpu"``,
            ``"disk"`` or ``None``.
        auto_offload: whether that is only where they begin.
        optimizer_target: where optimizers compute: ``"device"`` or ``"cpu"``.
        optimizer_in_backward: whether backward steps.
        hbm_ratio: the share of the fastest tier that may be filled.
    """

    offload_param: str | None = None
    offload_checkpoint: str | None = None
    offload_grad: str | None = None
    offload_optimizer: str | None = None
    auto_offload: bool = True
    optimizer_target: str = DEVICE
    optimizer_in_backward: bool = False
    hbm_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class BundleFacts:
    """What is known of a bundle before anything is placed.

    Attributes:
        key: that it is under.
        nbytes: of it, with its gradients and state.
        is_pinned: whether its own bytes never leave the fastest tier.
        optimizer: the name of the one that steps it together with all others that it trains; ``None``: it
            is stepped alone, or not at all.
        is_on_host: whether its modules compute on the host, beside a device.
        target: where its optimizer computes: ``"device"`` or ``"cpu"``; ``None``: where the wishes say.
    """

    key: str
    nbytes: int
    is_pinned: bool = False
    optimizer: str | None = None
    is_on_host: bool = False
    target: str | None = None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known of a run before anything is placed.

    Attributes:
        tiers: the capacity of each, by name, fastest first.
        bundles: in the order of the model.
        wishes: of its configuration.
    """

    tiers: Mapping[str, int]
    bundles: Sequence[BundleFacts]
    wishes: Wishes

    @property
    def fastest(self) -> str:
        """The tier where computing happens."""
        return next(iter(self.tiers))

    @property
    def has_device(self) -> bool:
        """Whether computing happens elsewhere than in host memory."""
        return self.fastest != HOST

    @property
    def needed_bytes(self) -> int:
        """Of everything that is computed with in the fastest tier."""
        return sum(each.nbytes for each in self.bundles if not each.is_on_host)

    @property
    def is_usual(self) -> bool:
        """Whether nothing is said of where single bundles are computed with."""
        return not any(each.is_on_host or each.target for each in self.bundles)

    @property
    def fits(self) -> bool:
        """Whether everything fits into the fastest tier."""
        return self.needed_bytes <= int(self.tiers[self.fastest] * self.wishes.hbm_ratio)

    @property
    def needs_plan(self) -> bool:
        """Whether something may have to leave the fastest tier: what is needed next is then worth knowing.

        What fits to the byte may not where slots begin on pages and lie where there is room: with as much
        room more as the largest takes it does.
        """
        fastest_bytes = int(self.tiers[self.fastest] * self.wishes.hbm_ratio)
        return self.has_device or self._bytes_in_slots > fastest_bytes

    @property
    def _bytes_in_slots(self) -> int:
        """Of what is computed with in the fastest tier, however its slots lie."""
        sizes = [each.nbytes + _PAGES_BYTES for each in self.bundles if not each.is_on_host]
        return sum(sizes) + max(sizes, default=0)


def small_bytes(left_bytes: int | None, model_bytes: int) -> int:
    """Return below which size bundles are joined.

    Where a quarter of the model's bytes is left, and a MiB, it depends on the model alone: what was recorded
    under one quota then has the keys that a run under another one has.

    Args:
        left_bytes: of the fastest tier; ``None``: enough.
        model_bytes: of all parameters.
    """
    of_model = max(_ALWAYS_SMALL, model_bytes // _MODEL_SHARE)
    return of_model if left_bytes is None else min(left_bytes // _SMALL_SHARE, of_model)


def place(facts: RunFacts) -> Placement:
    """Decide.

    Raises:
        ConfigError: a tier is asked for that the store has not.
    """
    wishes = facts.wishes
    model_on = DEVICE if facts.has_device else CPU
    homes: dict[tuple[bool, bool, str | None], BundleHomes] = {}  # many bundles live alike
    for each in facts.bundles:
        kind = (each.is_pinned, each.is_on_host, each.target)
        if kind not in homes:
            homes[kind] = _homes(each, facts)
    ahead = [facts.fastest, *(t for t in facts.tiers if t == HOST)] if facts.needs_plan else []
    is_bounded = wishes.optimizer_in_backward and not facts.has_device
    return Placement(
        {each.key: homes[each.is_pinned, each.is_on_host, each.target] for each in facts.bundles},
        _stashing(facts),
        dict.fromkeys(ahead, AHEAD_IN_BACKWARD if is_bounded else AHEAD),
        None if facts.needs_plan else frozenset(),
        inputs=_home("offload_checkpoint", wishes.offload_checkpoint, model_on, facts).tier,
    )


def _homes(bundle: BundleFacts, facts: RunFacts) -> BundleHomes:
    """Return where all of a bundle lives, and of all that are like it."""
    wishes = facts.wishes
    model_on = DEVICE if facts.has_device and not bundle.is_on_host else CPU
    target = bundle.target or wishes.optimizer_target
    steps_on = CPU if target == CPU or not facts.has_device or bundle.is_on_host else DEVICE
    if bundle.is_pinned:
        steps_on = model_on
    tier = HOST if bundle.is_on_host else None
    return BundleHomes(
        _home("offload_param", wishes.offload_param, model_on, facts, tier),
        _home("offload_grad", wishes.offload_grad, steps_on, facts, tier),
        _home("offload_optimizer", wishes.offload_optimizer, steps_on, facts, tier),
        bundle.is_pinned,
    )


def follows_plan(placement: Placement, facts: RunFacts) -> bool:
    """Return whether steps are recorded and followed: something may leave, is ahead, or is to stay."""
    return facts.needs_plan or bool(placement.ahead) or placement.residents != frozenset()


def _stashing(facts: RunFacts) -> Stashing:
    if facts.has_device and facts.wishes.offload_grad is None:
        return Stashing.WITHOUT_ROOM
    is_needed = not facts.fits or facts.wishes.offload_grad is not None
    return Stashing.ALWAYS if is_needed else Stashing.NEVER


def _home(key: str, wish: str | None, device: str, facts: RunFacts, usual: str | None = None) -> Home:
    if wish is None:
        return Home(usual, device)
    tier = _TIER_OF[wish]
    if tier not in facts.tiers:
        raise ConfigError(
            f"{key}={wish!r} needs the tier {tier!r}; this configuration has {', '.join(facts.tiers)}. "
            "Give it a size, or leave the key out."
        )
    returns = not facts.wishes.auto_offload and tier not in (facts.fastest, usual)
    return Home(tier, device, returns=returns)


# ---------------------------------------------------------------------- a placement that is given


def obey(mapping: object, facts: RunFacts) -> Placement:
    """Return what is given, and where it says nothing what `place` decides.

    Raises:
        ConfigError: it cannot be right, or as `place`; every fault is listed by its name.
    """
    pins = pins_in(mapping)  # the rules decide for them: they are facts
    bundles = [replace(each, is_pinned=pins.get(each.key, each.is_pinned)) for each in facts.bundles]
    placement = place(replace(facts, bundles=bundles)).overlaid(mapping)
    check(placement, facts)
    return placement


def check(placement: Placement, facts: RunFacts) -> None:
    """Raise if a placement cannot be that of a run.

    Raises:
        ConfigError: it lists every fault by its name.
    """
    kinds = (_wrong_keys, _wrong_homes, _wrong_tiers, _wrong_flow)
    faults = [fault for faults_of in kinds for fault in faults_of(placement, facts)]
    if faults:
        more = len(faults) - _MOST_FAULTS
        raise ConfigError(
            "\n  ".join(
                [
                    "placement: it does not fit this run",
                    *faults[:_MOST_FAULTS],
                    *[f"and {more} more"][: more > 0],
                ]
            )
        )


def _wrong_keys(placement: Placement, facts: RunFacts) -> Iterator[str]:
    known = {each.key: None for each in facts.bundles}
    for key in placement.bundles:
        if key not in known:
            yield f"bundles: {named(key)}: the model has no such bundle; it has {listed(known, show=named)}"
    for key in known:
        if key not in placement.bundles:
            yield f"bundles: {named(key)} has no homes"
    yield from _wrong_residents(placement, facts)


def _wrong_residents(placement: Placement, facts: RunFacts) -> Iterator[str]:
    known = {each.key: None for each in facts.bundles}
    for key in sorted(placement.residents or ()):
        if key not in known:
            yield f"residents: {named(key)}: the model has no such bundle; it has {listed(known, show=named)}"
    for key in sorted(placement.residents_without_state):
        if not facts.wishes.optimizer_in_backward:
            yield f"residents_without_state: {named(key)}: bundles stay whole without optimizer_in_backward"
        elif key not in (placement.residents or ()):
            yield f"residents_without_state: {named(key)}: residents does not name it"


def _wrong_homes(placement: Placement, facts: RunFacts) -> Iterator[str]:
    on_host = {each.key for each in facts.bundles if each.is_on_host}
    for key, homes in placement.bundles.items():
        yield from _wrong_home(f"{named(key)}: parameters", homes.parameters, facts)
        yield from _wrong_home(f"{named(key)}: gradients", homes.gradients, facts)
        yield from _wrong_home(f"{named(key)}: state", homes.state, facts)
        if key in on_host:
            yield from _wrong_on_host(named(key), homes, facts)
        elif facts.has_device:
            yield from _wrong_devices(named(key), homes, facts)
    for key in sorted(on_host.intersection(placement.residents or ())):
        yield f"residents: {named(key)}: its modules compute on the host; it never is in {facts.fastest!r}"
    yield from _torn_steps(placement, facts)


def _wrong_home(where: str, home: Home, facts: RunFacts) -> Iterator[str]:
    if home.tier is not None and home.tier not in facts.tiers:
        yield f"{where}.tier={quoted(home.tier)}: this run has {', '.join(facts.tiers)}"
    if home.returns and home.tier == facts.fastest:
        yield f"{where}.returns=True: computing happens in {quoted(home.tier)}, and nothing returns there"
    if home.device == DEVICE and not facts.has_device:
        yield f"{where}.device='device': this run has no device"


def _wrong_devices(key: str, homes: BundleHomes, facts: RunFacts) -> Iterator[str]:
    """Yield what is to be computed with elsewhere than on the device, and cannot be."""
    if homes.parameters.device == CPU:
        yield (
            f"{key}: parameters.device='cpu': its modules compute on the device; name them in "
            "placement.modules"
        )
    if homes.state.device == CPU and homes.is_pinned:
        yield f"{key}: state.device='cpu': it is pinned, and stepped where it is"
    if homes.state.device == CPU and facts.wishes.optimizer_in_backward:
        yield f"{key}: state.device='cpu': optimizer_in_backward steps where backward computes"


def _wrong_on_host(key: str, homes: BundleHomes, facts: RunFacts) -> Iterator[str]:
    """Yield what is to be elsewhere than on the host, where its modules compute."""
    for name, home in (
        ("parameters", homes.parameters),
        ("gradients", homes.gradients),
        ("state", homes.state),
    ):
        if home.device != CPU:
            yield f"{key}: {name}.device={quoted(home.device)}: its modules are on the host; accepted: 'cpu'"
        if home.tier in (None, facts.fastest):
            yield (
                f"{key}: {name}.tier={quoted(home.tier)}: its modules compute on the host; accepted: "
                f"{listed(tier for tier in facts.tiers if tier != facts.fastest)}"
            )
    if homes.is_pinned:
        yield f"{key}: is_pinned=True: its modules compute on the host; take it out of pinned"


def _torn_steps(placement: Placement, facts: RunFacts) -> Iterator[str]:
    """Yield optimizers that step all at once, and not on one device."""
    devices: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for each in facts.bundles:
        if each.optimizer is not None and each.key in placement.bundles:
            devices[each.optimizer].setdefault(placement.bundles[each.key].state.device, each.key)
    for optimizer, keys in devices.items():
        if len(keys) > 1:
            told = " and ".join(f"{named(key)} on {quoted(device)}" for device, key in keys.items())
            yield f"state.device: {optimizer} steps all at once, and would step {told}"


def _wrong_tiers(placement: Placement, facts: RunFacts) -> Iterator[str]:
    *upper, slowest = facts.tiers
    for tier in placement.high:
        if tier == slowest:
            yield f"high: {named(tier)}: no tier is below it that it could write back to"
        elif tier not in upper:
            yield f"high: {named(tier)}: this run has {', '.join(facts.tiers)}"
    for tier in placement.shares:
        if tier not in facts.tiers:
            yield f"shares: {named(tier)}: this run has {', '.join(facts.tiers)}"


def _wrong_flow(placement: Placement, facts: RunFacts) -> Iterator[str]:
    reached = [tier for tier in facts.tiers if tier in (facts.fastest, HOST)]
    for tier in placement.ahead:
        if tier not in reached:
            yield f"ahead: {named(tier)}: nothing is prefetched there; accepted: {', '.join(reached)}"
    if placement.inputs is not None and placement.inputs not in facts.tiers:
        yield f"inputs={quoted(placement.inputs)}: this run has {', '.join(facts.tiers)}"
    match placement.stashing:
        case Stashing.NEVER if facts.has_device:
            yield "stashing='never': a device may have no room for all; accepted: always, without-room"
        case Stashing.NEVER if not facts.fits:
            yield (
                f"stashing='never': everything needs {format_bytes(facts.needed_bytes)}, and "
                f"{quoted(facts.fastest)} has {format_bytes(facts.tiers[facts.fastest])}; accepted: always"
            )
        case Stashing.WITHOUT_ROOM if not facts.has_device:
            yield "stashing='without-room': it is for a device; accepted: always, never"
        case _:
            pass
