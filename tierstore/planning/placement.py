"""Where everything of one run lives: decided in one place, and only read by everybody else.

1. A placement that exists is right in itself; whether it fits a model and its tiers is
   `tierstore.planning.rules.check`'s to say.
2. It says where bytes begin and where computing happens, and never how: quotas, leases and eviction go on
   from there.
3. What is not known before a step has run (`Placement.residents`) is ``None`` until then, and learned.

Pure: no torch, threads, clocks or files.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from fractions import Fraction
from itertools import groupby
from typing import Any, TypeVar

from tierstore.errors import ConfigError
from tierstore.planning.homes import (
    DEVICES,
    DEVICES_LISTED,
    BundleHomes,
    Home,
    PlacedMark,
    Stashing,
    Treatment,
    is_name,
    values_of,
)
from tierstore.planning.table_frames import TableFrames
from tierstore.planning.wrong_values import WrongValues
from tierstore.quoting import listed, named, quoted

V = TypeVar("V")

_SHOWN = 3
_SHARES = ("ahead", "high", "shares")


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


class FrozenMapping(Mapping[str, V]):
    """A mapping that nobody changes, and that can be copied and pickled."""

    __slots__ = ("_content",)

    def __init__(self, values: Mapping[str, V]) -> None:
        self._content = dict(values)

    def __getitem__(self, key: str) -> V:
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def __repr__(self) -> str:
        return repr(self._content)


@dataclass(frozen=True)
class Placement:
    """Where everything of one run lives.

    Args:
        bundles: by key, in the order of the model.
        stashing: when a gradient that backward makes becomes the store's.
        ahead: by tier, the share of what the store may have there that keys may take which are prefetched for
            later; a tier that is not named has nothing ahead.
        residents: keys of bundles that stay in the fastest tier from step to step, with their gradients and
            state, as long as anything else can go; ``None``: chosen when a step has run.
        residents_without_state: those of them whose state comes and goes, where backward steps; chosen
            together with them.
        high: by tier, the share of it above which it writes back what is needed last before anybody waits for
            room; a tier that is not named: as its configuration says, and a device where that says nothing as
            `tierstore.planning.deciding.DeviceShare.high`.
        shares: by tier, the share of its quota that the run uses at all; a tier that is not named: all of it.
        marks: what happens to activations, in the order in which later marks override.
        inputs: the tier in which what recomputed modules are given waits for backward; ``None``: it stays.
        modules: by pattern of their names, the device that modules compute on (``"cpu"`` or ``"device"``),
            with all below them; the first that matches counts.
        tables: by the name of its parameter, how much host memory each table has.

    Raises:
        ConfigError: lists every fault.
    """

    bundles: Mapping[str, BundleHomes] = field(default_factory=dict, hash=False)
    stashing: Stashing = Stashing.NEVER
    ahead: Mapping[str, float] = field(default_factory=dict, hash=False)
    residents: frozenset[str] | None = None
    marks: Sequence[PlacedMark] = ()
    inputs: str | None = None
    modules: Mapping[str, str] = field(default_factory=dict, hash=False)
    tables: Mapping[str, TableFrames] = field(default_factory=dict, hash=False)
    high: Mapping[str, float] = field(default_factory=dict, hash=False)
    shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    residents_without_state: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        faults = WrongValues()
        for key, homes in self.bundles.items():
            is_right = is_name(key) and isinstance(homes, BundleHomes)
            faults.add_unless(is_right, f"bundles[{named(key)}]", homes, "BundleHomes under a key")
        faults.add_unless(isinstance(self.stashing, Stashing), "stashing", self.stashing, values_of(Stashing))
        for name in _SHARES:
            for tier, share in getattr(self, name).items():
                is_right = is_name(tier) and _is_share(share)
                faults.add_unless(
                    is_right, f"{name}[{named(tier)}]", share, "a share greater than 0 and at most 1"
                )
        faults.add_unless(
            self.residents is None or _are_names(self.residents),
            "residents",
            self.residents,
            "keys of bundles, or null",
        )
        without = self.residents_without_state
        faults.add_unless(_are_names(without), "residents_without_state", without, "keys of bundles")
        are_marks = all(isinstance(each, PlacedMark) for each in self.marks)
        faults.add_unless(are_marks, "marks", self.marks, "a list of PlacedMark")
        is_tier = self.inputs is None or is_name(self.inputs)
        faults.add_unless(is_tier, "inputs", self.inputs, "a tier's name, or null")
        self._check_modules(faults)
        faults.raise_if_any("Placement")
        if self.residents is not None:
            object.__setattr__(self, "residents", frozenset(self.residents))
        object.__setattr__(self, "residents_without_state", frozenset(without))
        object.__setattr__(self, "marks", tuple(self.marks))
        object.__setattr__(self, "bundles", FrozenMapping(self.bundles))
        for name in _SHARES:
            shares = {tier: float(share) for tier, share in getattr(self, name).items()}
            object.__setattr__(self, name, FrozenMapping(shares))
        object.__setattr__(self, "modules", FrozenMapping(self.modules))
        object.__setattr__(self, "tables", FrozenMapping(self.tables))

    def _check_modules(self, faults: WrongValues) -> None:
        for pattern, device in self.modules.items():
            is_right = is_name(pattern) and device in DEVICES
            faults.add_unless(is_right, f"modules[{named(pattern)}]", device, DEVICES_LISTED)
        for name, table in self.tables.items():
            is_right = is_name(name) and isinstance(table, TableFrames)
            faults.add_unless(is_right, f"tables[{named(name)}]", table, "TableFrames under a name")

    def ahead_bytes(self, tier: str, quota_bytes: int) -> int:
        """Return how much may be ahead in a tier of which the store may have so much."""
        return math.floor(Fraction(self.ahead.get(tier, 0.0)) * quota_bytes)

    def said_high(self, tier: str, configured: float) -> float | None:
        """Return above which share a tier writes back early, as somebody says it; ``None``: nobody does.

        Args:
            tier: that is asked about.
            configured: the share that its configuration has; 1 says nothing.
        """
        return self.high.get(tier, configured if configured < 1 else None)

    def used_bytes(self, tier: str, quota_bytes: int) -> int:
        """Return how much of a tier's quota the run uses."""
        return math.floor(Fraction(self.shares.get(tier, 1.0)) * quota_bytes)

    def __str__(self) -> str:
        """Return what a person reads: bundles that live alike are told together."""
        ahead = ", ".join(f"{share:.4g} of {tier}" for tier, share in self.ahead.items())
        residents = "chosen when a step has run" if self.residents is None else _some(sorted(self.residents))
        lines = [
            f"{len(self.bundles)} bundles; gradients are stashed: {self.stashing.value}",
            f"ahead: {ahead or 'nothing'}",
            f"residents: {residents}",
            *(
                [f"of these, without their state: {_some(sorted(self.residents_without_state))}"]
                if self.residents_without_state
                else []
            ),
            *(f"{tier} writes back above {share:.4g} of it" for tier, share in self.high.items()),
            *(f"{share:.4g} of {tier} is used" for tier, share in self.shares.items()),
            *(f"{_some(keys)}: {homes}" for homes, keys in self._alike().items()),
            *map(str, self.marks),
            *([] if self.inputs is None else [f"what recomputed modules are given: in {self.inputs}"]),
            *(f"modules {quoted(pattern)}: on the {device}" for pattern, device in self.modules.items()),
            *(f"table {quoted(name)}: {table}" for name, table in self.tables.items()),
        ]
        return "\n  ".join(lines)

    # --- as plain values ----------------------------------------------------------------------

    def to_mapping(self) -> dict[str, Any]:
        """Return it as plain values, neighbours that live alike in one entry; `from_mapping` reads it."""
        return {
            "stashing": self.stashing.value,
            "ahead": dict(self.ahead),
            "residents": None if self.residents is None else sorted(self.residents),
            "residents_without_state": sorted(self.residents_without_state),
            "high": dict(self.high),
            "shares": dict(self.shares),
            "bundles": [
                {_KEYS: list(keys), **_plain(homes)}
                for homes, keys in groupby(self.bundles, self.bundles.__getitem__)
            ],
            "marks": [_plain(mark) for mark in self.marks],
            "inputs": self.inputs,
            "modules": dict(self.modules),
            "tables": {name: _plain(table) for name, table in self.tables.items()},
        }

    def _alike(self) -> dict[BundleHomes, list[str]]:
        alike: dict[BundleHomes, list[str]] = {}
        for key, homes in self.bundles.items():
            alike.setdefault(homes, []).append(key)
        return alike

    @classmethod
    def from_mapping(cls, mapping: object) -> Placement:
        """Read plain values; what is left out is as in ``Placement()``.

        Raises:
            ConfigError: lists every fault by the path of its name.
        """
        return cls().overlaid(mapping)

    def overlaid(self, mapping: object) -> Placement:
        """Return this one with what plain values say otherwise, down to one property of one home.

        Raises:
            ConfigError: lists every fault by the path of its name.
        """
        faults = WrongValues()
        given = _by_key(_in_full(mapping), faults)
        own = {**self.to_mapping(), "bundles": {key: _plain(homes) for key, homes in self.bundles.items()}}
        found = _read_placement(_overlaid(own, given, _OVERLAID_LEVELS), "placement", faults)
        faults.raise_if_any("placement")
        assert isinstance(found, Placement)
        return found

    def to_yaml(self) -> str:
        """Return it as YAML: `from_yaml` reads it back, and so does ``placement:`` of a configuration."""
        import yaml

        text: str = yaml.safe_dump(self.to_mapping(), sort_keys=False)
        return text

    @classmethod
    def from_yaml(cls, text: str) -> Placement:
        """Read YAML, bounded as that of a configuration.

        Raises:
            ConfigError: it is not YAML, or as `from_mapping`.
        """
        from tierstore.config import yaml_text

        return cls.from_mapping(yaml_text.parse(text, "placement"))


# ---------------------------------------------------------------------- reading plain values


Reader = Callable[[object, str, WrongValues], object]
"""Takes a value, what it is called, and where faults go."""

_KEYS = "keys"
_OVERLAID_LEVELS = {"bundles": 3}  # by key, by kind, by property; all else is one value


def _made(kind: type[Any], readers: Mapping[str, Reader]) -> Reader:
    """Return what makes an object of a mapping of its fields."""
    known = [each.name for each in fields(kind)]
    accepted = f"the keys {listed(known)}"

    def read(given: object, where: str, faults: WrongValues) -> object:
        if isinstance(given, Mapping):
            for key in given:
                if key not in known:
                    faults.add(f"{where}: {named(key)}", given[key], accepted)
            before = len(faults.lines)
            values = {
                key: readers.get(key, _as_given)(value, f"{where}.{key}", faults)
                for key, value in given.items()
                if key in known
            }
            if len(faults.lines) == before:
                try:
                    return kind(**values)
                except (ConfigError, TypeError) as fault:  # a field is wrong, or missing
                    faults.lines.append(f"{where}: {fault}")
        else:
            faults.add(where, given, "a mapping")
        return None

    return read


def _as_given(given: object, where: str, faults: WrongValues) -> object:
    del where, faults
    return given


def _enum(kind: type[enum.Enum]) -> Reader:
    def read(given: object, where: str, faults: WrongValues) -> object:
        found = next((each for each in kind if each.value == given), None)
        faults.add_unless(found is not None, where, given, values_of(kind))
        return found

    return read


def _mapping_of(reader: Reader) -> Reader:
    def read(given: object, where: str, faults: WrongValues) -> object:
        if not isinstance(given, Mapping):
            faults.add(where, given, "a mapping")
            return {}
        return {key: reader(value, f"{where}[{named(key)}]", faults) for key, value in given.items()}

    return read


def _list_of(reader: Reader) -> Reader:
    def read(given: object, where: str, faults: WrongValues) -> object:
        if not isinstance(given, list | tuple):
            faults.add(where, given, "a list")
            return ()
        return tuple(reader(value, f"{where}[{number}]", faults) for number, value in enumerate(given))

    return read


def _names_or_none(given: object, where: str, faults: WrongValues) -> object:
    return None if given is None else _read_names(given, where, faults, "a list of keys, or null")


def _names(given: object, where: str, faults: WrongValues) -> object:
    return _read_names(given, where, faults, "a list of keys")


def _read_names(given: object, where: str, faults: WrongValues, accepted: str) -> object:
    are_names = isinstance(given, list | tuple) and all(map(is_name, given))
    faults.add_unless(are_names, where, given, accepted)
    return frozenset(given) if are_names and isinstance(given, Sequence) else frozenset()


def _are_names(given: object) -> bool:
    return isinstance(given, Set | list | tuple) and all(map(is_name, given))


def _by_key(given: object, faults: WrongValues) -> object:
    """Return a placement's plain values with its bundles by their keys."""
    entries = given.get("bundles") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(entries, list | tuple):
        faults.add_unless(entries is None, "placement.bundles", entries, "a list")
        return given
    bundles: dict[str, object] = {}
    for number, entry in enumerate(entries):
        where = f"placement.bundles[{number}]"
        keys = entry.get(_KEYS) if isinstance(entry, Mapping) else None
        are_keys = isinstance(keys, list | tuple) and all(map(is_name, keys))
        faults.add_unless(are_keys, f"{where}.{_KEYS}", keys, "a list of the keys of bundles")
        for key in keys if are_keys and isinstance(keys, Sequence) else ():
            faults.add_unless(key not in bundles, f"{where}.{_KEYS}", key, "each key once")
            bundles[key] = _with_one_device({name: entry[name] for name in entry if name != _KEYS})
    return {**given, "bundles": bundles}


def _in_full(given: object) -> object:
    """Return plain values in full: patterns of modules alone are short for ``{"modules": ...}``."""
    known = [each.name for each in fields(Placement)]
    if not isinstance(given, Mapping) or any(key in known for key in given):
        return given
    words = list(given.values())
    is_short = all(isinstance(each, str) for each in words) and any(each.lower() in _SAID for each in words)
    return {"modules": given} if is_short else given


_SAID = frozenset({*DEVICES, "gpu", "cuda", "ascend", "npu", "host"})
"""What people say where they mean a device; two of them are accepted."""


def patterns_in(mapping: object) -> dict[str, str]:
    """Return what plain values say of modules: the device that each pattern's compute on, in their order.

    Raises:
        ConfigError: something in it is neither; every fault is listed by its name.
    """
    given = _in_full(mapping)
    modules = given.get("modules") if isinstance(given, Mapping) else None
    return dict(Placement.from_mapping({"modules": modules}).modules) if modules is not None else {}


def tiers_in(mapping: object) -> Placement:
    """Return what plain values say of tiers as such: `Placement.high` and `Placement.shares`, and no more.

    Raises:
        ConfigError: something in them is neither; every fault is listed by its name.
    """
    given = _in_full(mapping)
    known = given if isinstance(given, Mapping) else {}
    return Placement.from_mapping({name: known[name] for name in ("high", "shares") if name in known})


def with_patterns(mapping: object, modules: Mapping[str, str]) -> Mapping[str, object]:
    """Return plain values in which ``modules`` come before those that they name already.

    Raises:
        ConfigError: as `patterns_in`.
    """
    former = patterns_in(mapping)
    given = _in_full(mapping)
    rest = {key: value for key, value in former.items() if key not in modules}
    return {**(given if isinstance(given, Mapping) else {}), "modules": {**modules, **rest}}


def _with_one_device(homes: Mapping[str, object]) -> Mapping[str, object]:
    """Return a bundle's homes with gradients where its state is stepped, if they do not say where."""
    gradients, state = homes.get("gradients", {}), homes.get("state")
    if isinstance(gradients, Mapping) and isinstance(state, Mapping) and "device" in state:
        return {**homes, "gradients": {"device": state["device"], **gradients}}
    return homes


def pins_in(mapping: object) -> dict[str, bool]:
    """Return which bundles plain values pin and unpin, by key; of what is wrong, nothing."""
    given = _by_key(mapping, WrongValues())
    bundles = given.get("bundles") if isinstance(given, Mapping) else None
    pins = {
        key: homes.get("is_pinned") for key, homes in (bundles.items() if isinstance(bundles, dict) else ())
    }
    return {key: pin for key, pin in pins.items() if isinstance(pin, bool)}


def _overlaid(base: object, given: object, levels: Mapping[str, int]) -> object:
    """Return plain values with what is given otherwise: as deep as there are levels."""
    if not isinstance(base, Mapping) or not isinstance(given, Mapping):
        return given
    return {
        **base,
        **{key: _deeply(base.get(key), value, levels.get(key, 0)) for key, value in given.items()},
    }


def _deeply(base: object, given: object, levels: int) -> object:
    if not levels or not isinstance(base, Mapping) or not isinstance(given, Mapping):
        return given
    return {**base, **{key: _deeply(base.get(key), value, levels - 1) for key, value in given.items()}}


def _plain(value: Home | BundleHomes | PlacedMark | TableFrames) -> dict[str, object]:
    """Return a mapping of what has fields."""
    found = {each.name: getattr(value, each.name) for each in fields(value)}
    return {
        name: _plain(each) if isinstance(each, Home) else each.value if isinstance(each, enum.Enum) else each
        for name, each in found.items()
    }


_read_placement = _made(
    Placement,
    {
        "stashing": _enum(Stashing),
        "residents": _names_or_none,
        "residents_without_state": _names,
        **dict.fromkeys(_SHARES, _mapping_of(_as_given)),
        "bundles": _mapping_of(
            _made(BundleHomes, dict.fromkeys(("parameters", "gradients", "state"), _made(Home, {})))
        ),
        "marks": _list_of(_made(PlacedMark, {"treatment": _enum(Treatment)})),
        "modules": _mapping_of(_as_given),
        "tables": _mapping_of(_made(TableFrames, {})),
    },
)


def _some(keys: Sequence[str]) -> str:
    """Return the first of some keys, and how many more there are."""
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return (", ".join(keys[:_SHOWN]) + more) or "none"
