"""This machine, as far as it is known without measuring: sizes are asked for, rates are assumed.

Every figure says in `Machine.sources` which of both it is.  Where the shipped sheet has the accelerator, its
nominal figures are taken.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tierstore.config import machine as here
from tierstore.errors import ConfigError
from tierstore.planning import ComputeFigures, LinkFigures, Machine, TierFigures, TierMedium

ASSUMED = "assumed; tierstore doctor --write measures it"
ASKED = "asked of this machine"

_CORE_FLOPS_PER_S = 50e9  # 8 lanes of float32, two operations each, three times a nanosecond
_MEMORY_BYTES_PER_S = 20e9
_DISK_BYTES_PER_S = 1e9
_DISK_LATENCY_S = 100e-6
_LINK_BYTES_PER_S = 16e9  # PCIe 4.0 of eight lanes, or 3.0 of sixteen
_LINK_LATENCY_S = 10e-6
_DEVICE_FLOPS_PER_S = {"float32": 20e12, "bfloat16": 100e12, "float16": 100e12}
_DEVICE_MEMORY_BYTES_PER_S = 1000e9
_OPERATOR_S = 5e-6
_ALIGNMENT_BYTES = {"device": 512, "host": 512, "disk": 4096}  # of each tier's keys
_DEVICE, _HOST, _DISK = "device", "host", "disk"


@dataclass(frozen=True, slots=True)
class EmulatedFigures:
    """What a run has that computes with the host's cores behind a quota and a link of their own.

    Attributes:
        capacity_bytes: of its memory.
        link_bytes_per_s: in both directions; ``None``: as fast as host memory is.
        link_latency_s: of a copy.
    """

    capacity_bytes: int
    link_bytes_per_s: float | None = None
    link_latency_s: float = 0.0


def this_machine(
    paths: Sequence[str], known: Machine | None = None, emulated: EmulatedFigures | None = None
) -> Machine:
    """Return this machine.

    Args:
        paths: the directories of the tier on disk.
        known: figures of its accelerator, from the sheet; ``None``: it is not there.
        emulated: the device that takes the place of the accelerator; ``None``: none does.

    Raises:
        ConfigError: the sizes of its tiers cannot be told.
    """
    name = here.default_device()
    capacities = {} if here.is_cpu(name) else {_DEVICE: here.free_device_bytes(name)}
    if emulated is not None:
        capacities = {_DEVICE: emulated.capacity_bytes}
    capacities[_HOST] = here.available_host_bytes()
    free_bytes = here.free_disk_bytes(*paths)
    if free_bytes:
        capacities[_DISK] = free_bytes
    if emulated is not None:
        return _machine(f"{_cores()} cores, {here.EMULATED} device", capacities, None, emulated)
    return _machine(_name_of(name), capacities, known)


def device_name() -> str | None:
    """Return what torch calls this machine's accelerator; ``None``: there is none."""
    name = here.default_device()
    return None if here.is_cpu(name) else _name_of(name)


def _machine(
    name: str, capacities: dict[str, int], known: Machine | None, emulated: EmulatedFigures | None = None
) -> Machine:
    media = {_DEVICE: TierMedium.DEVICE, _HOST: TierMedium.HOST, _DISK: TierMedium.STORAGE}
    host = ComputeFigures({"float32": _CORE_FLOPS_PER_S * _cores()}, _MEMORY_BYTES_PER_S, _OPERATOR_S)
    has_device = _DEVICE in capacities
    has_streams = has_device and emulated is None
    device = host if not has_streams else known.device if known is not None else _any_device()
    rate, latency_s = _LINK_BYTES_PER_S, _LINK_LATENCY_S
    if emulated is not None:
        rate, latency_s = emulated.link_bytes_per_s or _MEMORY_BYTES_PER_S, emulated.link_latency_s
    links = [
        *(_both_ways(_DEVICE, _HOST, rate, latency_s, known) if has_device else ()),
        *(_both_ways(_HOST, _DISK, _DISK_BYTES_PER_S, _DISK_LATENCY_S, None) if _DISK in capacities else ()),
    ]
    sizes = {f"tiers.{tier}": ASKED for tier in capacities}
    rates = {f"links.{link.name}": ASSUMED for link in links}
    return Machine(
        f"this machine ({name})",
        tuple(
            TierFigures(tier, nbytes, media[tier], _ALIGNMENT_BYTES[tier])
            for tier, nbytes in capacities.items()
        ),
        tuple(links),
        device,
        host,
        has_streams=has_streams,
        sources={
            **sizes,
            **rates,
            "host": ASSUMED,
            "device": ASSUMED,
            **({} if known is None else dict(known.sources)),
        },
    )


def _both_ways(
    upper: str, lower: str, bytes_per_s: float, latency_s: float, known: Machine | None
) -> tuple[LinkFigures, ...]:
    found = known and (known.link(upper, lower), known.link(lower, upper))
    if found and all(found):
        return tuple(each for each in found if each is not None)
    return (
        LinkFigures(upper, lower, bytes_per_s, latency_s),
        LinkFigures(lower, upper, bytes_per_s, latency_s),
    )


def _any_device() -> ComputeFigures:
    return ComputeFigures(_DEVICE_FLOPS_PER_S, _DEVICE_MEMORY_BYTES_PER_S, _OPERATOR_S)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _name_of(device: str) -> str:
    kind, _, index = device.partition(":")
    if here.is_cpu(device):
        return f"{_cores()} cores, no accelerator"
    try:
        return str(getattr(torch, kind).get_device_name(int(index or 0)))
    except (AttributeError, RuntimeError) as cause:
        raise ConfigError(f"torch cannot name the accelerator {device!r}: give --machine") from cause
