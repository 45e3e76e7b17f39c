"""``tierstore doctor --write FILE``: this machine as a file that the planner reads, every figure measured.

1. What was measured says so, and when; what cannot be measured here is called assumed.
2. A file that is there stays, unless ``--force`` says otherwise; it then is the old one or the new one.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.cli import measure, measure_device, text_files
from tierstore.cli.measure_device import ComputeSpeed, DeviceSpeed
from tierstore.errors import BackendError, UsageError
from tierstore.planning import ComputeFigures, LinkFigures, Machine, TierFigures, TierMedium
from tierstore.planning.machine_text import machine_to_yaml

_SHARED = 0.75
"""Of both directions' rates added up: where both at once reach less, they share one bus."""

_DEVICE_ALIGNMENT = 512
_DIGITS = 4
_EMULATED_PART = 4  # of what is available; there is no device whose memory could be asked


@dataclass(frozen=True, slots=True)
class MeasuredDisk:
    """One directory, as the doctor found it."""

    path: str
    free_bytes: int
    alone: measure.Disk
    at_once: measure.DiskAtOnce


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """What was measured of one machine.

    Attributes:
        name: of the device and the host, for people.
        is_emulated: whether the device is host memory.
        device_bytes: that are free there; of an emulated one `None`.
        host_bytes: that are available.
        copies: between both.
        device, host: how fast they compute.
        disks: the directories that were asked about.
    """

    name: str
    is_emulated: bool
    device_bytes: int | None
    host_bytes: int
    copies: DeviceSpeed
    device: ComputeSpeed
    host: ComputeSpeed
    disks: Sequence[MeasuredDisk]


def measured(
    name: str,
    device: str,
    device_bytes: int | None,
    host_bytes: int,
    disks: Sequence[tuple[str, int, measure.Disk]],
) -> MeasuredMachine:
    """Measure what a machine file says beyond the report: a few seconds, and two for each directory.

    Args:
        name: for people.
        device: that torch knows, or ``"cpu"``: the emulated one.
        device_bytes: that are free there.
        host_bytes: that are available.
        disks: directories, what is free there, and what was measured already.

    Raises:
        BackendError: the device or a directory cannot be measured; cause attached.
    """
    try:
        copies = measure_device.device_speed(device)
        computing = measure_device.compute_speed(device)
    except RuntimeError as refusal:
        why = str(refusal).splitlines()[0]
        raise BackendError(
            f"{device}: cannot be measured: {why}; free memory there, and try again"
        ) from refusal
    is_emulated = device == measure_device.CPU
    host = computing if is_emulated else measure_device.compute_speed(measure_device.CPU)
    found = [
        MeasuredDisk(path, free_bytes, alone, measure.disk_at_once(Path(path), room_bytes=free_bytes // 2))
        for path, free_bytes, alone in disks
    ]
    return MeasuredMachine(name, is_emulated, device_bytes, host_bytes, copies, computing, host, found)


def machine_of(found: MeasuredMachine, today: datetime.date) -> Machine:
    """Return what was measured as a machine."""
    measured_today = f"measured {today.isoformat()}"
    bus = _bus(found.copies)
    copies = found.copies
    shares_of_copies = ("bus",) if bus is not None else ()
    links = [
        LinkFigures(
            "host",
            "device",
            _rounded(copies.to_device_bytes_per_s),
            _rounded(copies.to_device_latency_s),
            shares_of_copies,
        ),
        LinkFigures(
            "device",
            "host",
            _rounded(copies.from_device_bytes_per_s),
            _rounded(copies.from_device_latency_s),
            shares_of_copies,
        ),
        *_disk_links(found.disks),
    ]
    shares = {
        **({} if bus is None else {"bus": _rounded(bus)}),
        **({"drive": _rounded(_together(found.disks))} if found.disks else {}),
    }
    return Machine(
        name=found.name,
        tiers=_tiers(found),
        links=tuple(links),
        device=_figures(found.device),
        host=_figures(found.host),
        shares=shares,
        has_streams=not found.is_emulated,
        sources={
            **{f"links.{link.name}": measured_today for link in links},
            **{f"shares.{name}": measured_today for name in shares},
            **{f"compute.{dtype}": measured_today for dtype in found.device.flops_per_s},
            **{f"host.{dtype}": measured_today for dtype in found.host.flops_per_s},
            **dict.fromkeys(
                ("compute.memory", "compute.operator_s", "host.memory", "host.operator_s", "tiers.host"),
                measured_today,
            ),
            "tiers.device": _source_of_device(found, measured_today),
            "compute.efficiency": f"{measured_today}: the rates are those that products of matrices reached; "
            "other sorts are assumed to reach half",
            **_sources_of_disks(found.disks, measured_today),
        },
    )


def require_writable(path: Path, *, force: bool) -> None:
    """See to it, before anything is measured, that a machine file may be written.

    Raises:
        UsageError: it is there already, or none can be made there.
    """
    text_files.require_places([str(path)])
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} is there already; --force writes over it, or give another name")


def write(path: Path, machine: Machine, *, force: bool) -> None:
    """Write a machine file: whole, or not at all.

    Raises:
        UsageError: somebody has made it meanwhile, or it cannot be written.
    """
    text = machine_to_yaml(machine)
    if force:
        text_files.write_text(path, text)
    else:
        text_files.write_new_text(path, text)


def _bus(copies: DeviceSpeed) -> float | None:
    """Return what both directions reach at once, if that is less than each alone would have it."""
    alone = copies.to_device_bytes_per_s + copies.from_device_bytes_per_s
    if copies.both_bytes_per_s >= _SHARED * alone:
        return None
    return max(copies.both_bytes_per_s, copies.to_device_bytes_per_s, copies.from_device_bytes_per_s)


def _tiers(found: MeasuredMachine) -> tuple[TierFigures, ...]:
    device_bytes = found.device_bytes
    if device_bytes is None:
        device_bytes = found.host_bytes // _EMULATED_PART
    host_bytes = found.host_bytes - (device_bytes if found.is_emulated else 0)
    tiers = [
        TierFigures("device", max(device_bytes, 1), TierMedium.DEVICE, _DEVICE_ALIGNMENT),
        TierFigures("host", max(host_bytes, 1), TierMedium.HOST, _DEVICE_ALIGNMENT),
    ]
    if found.disks:
        free_bytes = sum(disk.free_bytes for disk in found.disks)
        alignment_bytes = max(disk.alone.alignment_bytes or _DEVICE_ALIGNMENT for disk in found.disks)
        tiers.append(TierFigures("disk", max(free_bytes, 1), TierMedium.STORAGE, alignment_bytes))
    return tuple(tiers)


def _disk_links(disks: Sequence[MeasuredDisk]) -> list[LinkFigures]:
    """Return links of all directories together: keys are spread over them."""
    if not disks:
        return []
    read = sum(disk.alone.read_bytes_per_s for disk in disks)
    write = sum(disk.alone.write_bytes_per_s for disk in disks)
    latency_s = max(disk.at_once.latency_s for disk in disks)
    return [
        LinkFigures("disk", "host", _rounded(read), _rounded(latency_s), ("drive",)),
        LinkFigures("host", "disk", _rounded(write), _rounded(latency_s), ("drive",)),
    ]


def _together(disks: Sequence[MeasuredDisk]) -> int:
    """Return what reading and writing reach at once: never less than one of them alone."""
    return sum(
        max(disk.at_once.together_bytes_per_s, disk.alone.read_bytes_per_s, disk.alone.write_bytes_per_s)
        for disk in disks
    )


def _figures(speed: ComputeSpeed) -> ComputeFigures:
    rates = {dtype: _rounded(rate) for dtype, rate in speed.flops_per_s.items()}
    return ComputeFigures(
        rates, _rounded(speed.memory_bytes_per_s), _rounded(speed.operator_s), {"matmul": 1.0}
    )


def _rounded(figure: float) -> float:
    """Return a figure with the digits that mean something, if it is measured again."""
    return float(f"{figure:.{_DIGITS}g}")


def _source_of_device(found: MeasuredMachine, measured_today: str) -> str:
    if not found.is_emulated:
        return f"{measured_today}: what was free"
    return (
        f"assumed: one part in {_EMULATED_PART} of what is available; max_device_memory says how much it is"
    )


def _sources_of_disks(disks: Sequence[MeasuredDisk], measured_today: str) -> dict[str, str]:
    if not disks:
        return {}
    cached = [disk.path for disk in disks if not disk.alone.is_direct]
    how = f"{measured_today} in {', '.join(disk.path for disk in disks)}"
    if cached:
        how += f"; through the page cache, which is host memory: {', '.join(cached)}"
    if len(disks) > 1:
        how += "; one after another, added up"
    return dict.fromkeys(("tiers.disk", "links.disk->host", "links.host->disk", "shares.drive"), how)
