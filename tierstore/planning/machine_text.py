"""A `Machine` as YAML that people write and read, and back: what was written is read back exactly.

1. Every fault is told at once, by its path: what is unknown, missing, negative, infinite, none or absurd.
2. Texts of sizes and rates count powers of 1024, as everywhere; plain numbers are what they are: data sheets
   count powers of 1000.
3. A tier of capacity 0 is none, but of the first one: there, nothing could be computed.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

import yaml

from tierstore.config import yaml_text
from tierstore.errors import ConfigError
from tierstore.planning import columns
from tierstore.planning.columns import COUNTS, FILLED_TEXTS, TEXTS, TRUTHS, CellReader
from tierstore.planning.homes import is_name
from tierstore.planning.machine import (
    MACHINE_VERSION,
    ComputeFigures,
    LinkFigures,
    Machine,
    NetworkFigures,
    TierFigures,
    TierMedium,
)
from tierstore.planning.program import is_bytes, is_figure
from tierstore.planning.wrong_values import WrongValues
from tierstore.quoting import listed, named, quoted
from tierstore.units import GIB, MIB, parse_bytes, parse_rate

T = TypeVar("T")

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "int16", "int32", "int64", "complex64", "complex128"),
)
"""What a machine can say how fast it computes with."""

SORTS = ("matmul", "attention", "convolution", "other")
"""Of operators: what efficiencies are for."""

NETWORKS = ("peer", "fabric")
"""Between the ranks of one host, and between hosts."""

_VERSION = "tierstore_machine"
_OWNER = "machine"
_UNLIMITED = "unlimited"
_SLOWEST, _FASTEST = 1.0, 1e21
_LONGEST_S = 3600.0
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]{1,3})?", re.ASCII)
_NEAR_CHARS = 64
_MEDIA = {"device": TierMedium.DEVICE, "host": TierMedium.HOST, "disk": TierMedium.STORAGE}
"""What a tier is made of that does not say so, by its name."""


def machine_to_yaml(machine: Machine) -> str:
    """Return a machine as YAML; `machine_from_yaml` reads it."""
    text: str = yaml.safe_dump(machine_to_mapping(machine), sort_keys=False, width=110)
    return text


def machine_from_yaml(text: str) -> Machine:
    """Read YAML, bounded as that of a configuration.

    Raises:
        ConfigError: it is not YAML, of another version, or something in it cannot be so: every fault is
            listed.
    """
    return machine_from_mapping(yaml_text.parse(text, _OWNER))


def machine_to_mapping(machine: Machine) -> dict[str, object]:
    """Return a machine as plain values, as YAML and JSON can say them."""
    tiers = {
        tier.name: {
            "capacity": _size(tier.capacity_bytes),
            "medium": tier.medium.value,
            **_unless(1, alignment_bytes=tier.alignment_bytes),
        }
        for tier in machine.tiers
    }
    links = [
        {
            "from": link.source,
            "to": link.target,
            **_of_link(link),
            **_unless(0, burst_s=link.burst_s),
        }
        for link in machine.links
    ]
    return {
        _VERSION: MACHINE_VERSION,
        "name": machine.name,
        "tiers": tiers,
        "links": links,
        "shares": {name: _rate(rate) for name, rate in machine.shares.items()},
        "compute": _of_compute(machine.device),
        "host": _of_compute(machine.host),
        "network": {each.name: _of_link(each) for each in machine.network},
        "ranks_per_host": machine.ranks_per_host,
        "hosts": machine.hosts,
        "has_streams": machine.has_streams,
        "sources": dict(machine.sources),
    }


def machine_from_mapping(given: object) -> Machine:
    """Read plain values.

    Raises:
        ConfigError: as `machine_from_yaml`.
    """
    faults = WrongValues()
    section = _Section(given, _OWNER, faults)
    faults.raise_if_any(_OWNER)
    _require_version(section)
    tiers = _tiers(section.part("tiers"))
    links = _links(section)
    compute, host = _compute(section.part("compute")), _compute(section.part("host"))
    shares = section.values("shares", RATES)
    network = _networks(section)
    ranks_per_host, hosts = (section.value(each, COUNTS, 1) for each in ("ranks_per_host", "hosts"))
    has_streams = section.value("has_streams", TRUTHS, default=True)
    sources = section.values("sources", TEXTS)
    name = section.value("name", TEXTS, "")
    section.end()
    faults.raise_if_any(_OWNER)
    whole = Machine(
        name,
        tiers,
        links,
        compute,
        host,
        shares,
        network,
        ranks_per_host,
        hosts,
        has_streams,
        sources,
    )
    return whole if all(tier.capacity_bytes for tier in tiers) else whole.with_capacities({})


# ---------------------------------------------------------------------- writing


def _size(nbytes: int) -> int | str:
    """Return bytes as people write them, where that is exact."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return nbytes


def _rate(rate: float) -> float | str:
    return rate if math.isfinite(rate) else _UNLIMITED


def _unless(default: float, **values: float) -> dict[str, float]:
    """Return those values that say something."""
    return {name: value for name, value in values.items() if value != default}


def _of_link(link: LinkFigures | NetworkFigures) -> dict[str, object]:
    return {
        "bandwidth": _rate(link.bytes_per_s),
        **_unless(0, latency_s=link.latency_s),
        **({"shares": list(link.shares)} if link.shares else {}),
    }


def _of_compute(figures: ComputeFigures) -> dict[str, object]:
    return {
        **{dtype: _rate(rate) for dtype, rate in figures.flops_per_s.items()},
        "memory": _rate(figures.memory_bytes_per_s),
        **_unless(0, operator_s=figures.operator_s),
        **({"efficiency": dict(figures.efficiency)} if figures.efficiency else {}),
    }


# ---------------------------------------------------------------------- what stands in a place


def _as_number(value: object) -> object:
    """Return a number that YAML takes for a text, as 312e12, as that number."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _read_rate(value: object) -> float:
    if value == _UNLIMITED:
        return math.inf
    number = _as_number(value)
    rate = parse_rate(number) if isinstance(number, str) else number
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not _SLOWEST <= rate <= _FASTEST:
        raise ValueError
    return rate


def _read_seconds(value: object) -> float:
    number = _as_number(value)
    if not is_figure(number) or not isinstance(number, int | float) or number > _LONGEST_S:
        raise ValueError
    return number


def _read_share(value: object) -> float:
    if not is_figure(value) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError
    return value


def _read_size(value: object) -> int:
    nbytes = parse_bytes(value) if isinstance(value, int | str) else None
    if not is_bytes(nbytes) or nbytes is None:
        raise ValueError
    return nbytes


_BOUNDS = f"from {_SLOWEST:.0f} to {_FASTEST:.0e}"
RATES = CellReader(
    _read_rate,
    f"a number a second {_BOUNDS}, or a text of bytes as '25GB/s' (of 1024), or {_UNLIMITED!r}",
)
SECONDS = CellReader(_read_seconds, f"seconds from 0 to {_LONGEST_S:.0f}")
EFFICIENCIES = CellReader(_read_share, "a share greater than 0 and at most 1")
SIZES = CellReader(_read_size, "bytes below 2**63, as an int or as a text like '80GiB'")


class _Section:
    """Reads one mapping by its names; what is wrong, missing or left over is noted."""

    def __init__(self, given: object, where: str, faults: WrongValues) -> None:
        self.where, self.faults = where, faults
        faults.add_unless(isinstance(given, Mapping), where, given, "a mapping")
        self.is_whole = isinstance(given, Mapping)
        self.given: Mapping[object, object] = given if isinstance(given, Mapping) else {}
        self._known: list[str] = []

    def path(self, name: object) -> str:
        return named(name) if self.where == _OWNER else f"{self.where}.{named(name)}"

    def has(self, name: str) -> bool:
        """Say whether something stands under a name, which is known then."""
        self._known.append(name)
        return self.given.get(name) is not None

    def value(self, name: str, cell: CellReader[T], default: T) -> T:
        """Return what stands under a name; where nothing does, the default."""
        if not self.has(name):
            return default
        try:
            return cell.read(self.given[name])
        except ValueError:
            self.faults.add(self.path(name), self.given[name], cell.accepted)
            return default

    def needed(self, name: str, cell: CellReader[T], default: T) -> T:
        """Return what has to stand under a name; the default is for what goes on reading."""
        found = self.value(name, cell, default)
        if self.is_whole and self.given.get(name) is None:
            self.faults.add(self.path(name), None, cell.accepted)
        return found

    def part(self, name: str) -> _Section:
        """Return the mapping that has to stand under a name."""
        self.has(name)
        return _Section(self.given.get(name), self.path(name), self.faults)

    def parts(self, name: str) -> list[_Section]:
        """Return the mappings of the list under a name; none where nothing stands there."""
        if not self.has(name):
            return []
        given = self.given[name]
        if not isinstance(given, list):
            self.faults.add(self.path(name), given, "a list of mappings")
            return []
        return [
            _Section(each, f"{self.path(name)}[{number}]", self.faults) for number, each in enumerate(given)
        ]

    def values(self, name: str, cell: CellReader[T]) -> dict[str, T]:
        """Return what stands under names that anybody chose, in the mapping under a name, if there is one."""
        if not self.has(name):
            return {}
        inner = _Section(self.given[name], self.path(name), self.faults)
        found: dict[str, T] = {}
        for each, value in inner.given.items():
            try:
                found[FILLED_TEXTS.read(each)] = cell.read(value)
            except ValueError:
                self.faults.add(inner.path(each), value, cell.accepted)
        return found

    def each(self) -> list[tuple[str, _Section]]:
        """Return the mappings that this one consists of, by their names."""
        for name, given in self.given.items():
            self.faults.add_unless(is_name(name), self.path(name), given, "a name that is a text")
        texts = [name for name in self.given if isinstance(name, str) and name]
        self._known += texts
        return [(name, _Section(self.given[name], self.path(name), self.faults)) for name in texts]

    def end(self) -> None:
        """Note what nobody asked for."""
        for name in self.given:
            if name not in self._known:
                self.faults.add(
                    self.path(name), self.given[name], f"no such key; {_meant(name, self._known)}"
                )


def _meant(name: object, known: Sequence[str]) -> str:
    is_short = isinstance(name, str) and len(name) <= _NEAR_CHARS
    meant = difflib.get_close_matches(str(name), known, n=1) if is_short else []
    return f"did you mean {meant[0]!r}?" if meant else f"accepted: {listed(known, 24, show=str)}"


# ---------------------------------------------------------------------- reading


def _require_version(section: _Section) -> None:
    if not section.has(_VERSION):
        raise ConfigError(f"{_OWNER}: no key {_VERSION!r}; accepted: '{_VERSION}: {MACHINE_VERSION}'")
    version = section.given[_VERSION]
    if version != MACHINE_VERSION or isinstance(version, bool):
        raise ConfigError(
            f"{_OWNER}: {_VERSION}={quoted(version)}; this tierstore reads version {MACHINE_VERSION}"
        )


def _tiers(section: _Section) -> tuple[TierFigures, ...]:
    """Return the tiers, fastest first."""
    found: list[TierFigures] = []
    for name, each in section.each():
        capacity_bytes = each.needed("capacity", SIZES, 0)
        medium = _medium(name, each)
        alignment_bytes = each.value("alignment_bytes", COUNTS, 1)
        each.end()
        if not found and each.given.get("capacity") is not None and not capacity_bytes:
            each.faults.add(
                each.path("capacity"), each.given["capacity"], "more than 0: nothing can be computed there"
            )
        found.append(TierFigures(name, capacity_bytes, medium, alignment_bytes))
    if section.is_whole and not section.given:
        section.faults.add(section.where, {}, "at least one tier")
    return tuple(found)


def _medium(name: str, section: _Section) -> TierMedium:
    known = _MEDIA.get(name)
    cell = columns.chosen(TierMedium)
    if known is None:
        return section.needed("medium", cell, TierMedium.HOST)
    return section.value("medium", cell, known)


def _links(section: _Section) -> tuple[LinkFigures, ...]:
    links = tuple(map(_link, section.parts("links")))
    for name, times in Counter(link.name for link in links).items():
        section.faults.add_unless(times == 1, "links", name, "each direction between two tiers once")
    return links


def _link(section: _Section) -> LinkFigures:
    link = LinkFigures(
        section.needed("from", FILLED_TEXTS, "?"),
        section.needed("to", FILLED_TEXTS, "?"),
        section.needed("bandwidth", RATES, 1.0),
        section.value("latency_s", SECONDS, 0.0),
        section.value("shares", columns.several(FILLED_TEXTS), ()),
        section.value("burst_s", SECONDS, 0.0),
    )
    section.end()
    return link


def _networks(section: _Section) -> tuple[NetworkFigures, ...]:
    if not section.has("network"):
        return ()
    inner = section.part("network")
    found = tuple(_network(name, inner.part(name)) for name in NETWORKS if inner.has(name))
    inner.end()
    return found


def _network(name: str, section: _Section) -> NetworkFigures:
    figures = NetworkFigures(
        name,
        section.needed("bandwidth", RATES, 1.0),
        section.value("latency_s", SECONDS, 0.0),
        section.value("shares", columns.several(FILLED_TEXTS), ()),
    )
    section.end()
    return figures


def _compute(section: _Section) -> ComputeFigures:
    rates = {dtype: section.value(dtype, RATES, 1.0) for dtype in DTYPES if section.has(dtype)}
    memory = section.needed("memory", RATES, 1.0)
    operator_s = section.value("operator_s", SECONDS, 0.0)
    given = section.given.get("efficiency")
    efficiency: dict[str, float] = {}
    if section.has("efficiency"):
        shares = _Section(given, section.path("efficiency"), section.faults)
        efficiency = {sort: shares.value(sort, EFFICIENCIES, 1.0) for sort in SORTS if shares.has(sort)}
        shares.end()
    section.end()
    return ComputeFigures(rates, memory, operator_s, efficiency)
