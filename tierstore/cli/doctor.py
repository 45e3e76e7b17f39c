"""``tierstore doctor [PATH]``: what this machine offers a store, measured, and what is missing for more."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import psutil
import torch

from tierstore.alone import fault_alone
from tierstore.cli import machine_file, measure, measure_device
from tierstore.cli.room import remove_ours, room
from tierstore.engine.registry import GROUP
from tierstore.errors import UsageError
from tierstore.spi import Examiner
from tierstore.units import GIB, format_bytes

_EMULATED = "emulated"
_FEW_FREE_BYTES = GIB
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ASK_FOR_THEM = "THP_MEM_ALLOC_ENABLE"  # read by PyTorch's CPU allocator, once
_HAVE_NATIVE_PARTS = ("zarr",)  # of our backends, those named for a package that the rest of us does not load
_IN_MEMORY = ("tmpfs", "ramfs")
_PINNING_WORKS = "works"
_PINNING_NOT_NEEDED = "not needed"


@dataclass(frozen=True, slots=True)
class Host:
    """The machine's own memory.  ``lockable_bytes`` is ``None`` where there is no limit."""

    cores: int
    memory_bytes: int
    available_bytes: int
    lockable_bytes: int | None
    copy_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Device:
    """One device that a store can have a tier on.  The emulated one is host memory."""

    name: str
    description: str
    memory_bytes: int | None = None
    free_bytes: int | None = None
    pinning: str = _PINNING_NOT_NEEDED
    link: measure.LinkSpeed | None = None


@dataclass(frozen=True, slots=True)
class PathReport:
    """The directory that was asked about."""

    path: str
    file_system: str
    free_bytes: int
    disk: measure.Disk


@dataclass(frozen=True, slots=True)
class Report:
    """All of it.

    ``backends`` maps a name to what is wrong with it, or to ``None``; ``findings`` does so for what each
    backend can do in the directory; ``more_places`` has the directories that were asked about after the
    first.
    """

    versions: dict[str, str]
    host: Host
    devices: list[Device]
    backends: dict[str, str | None]
    place: PathReport
    findings: dict[str, dict[str, str | None]]
    missing: list[str]
    more_places: list[PathReport] = field(default_factory=list)


def add_to(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser(
        "doctor",
        parents=[shared],
        help="what this machine offers a store, and what is missing for more",
        description="Look at devices, memory and the disk at each PATH, and measure each for about a second. "
        "Writes one temporary file of at most 256 MiB to each PATH.",
    )
    parser.add_argument(
        "path", metavar="PATH", nargs="*", default=["."], help="a directory (default: this one)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--write",
        metavar="FILE",
        type=Path,
        help="write this machine as a file that the planner reads; measures some seconds longer",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="with --write: which device (default: an accelerator, else emulated)"
    )
    parser.add_argument("--force", action="store_true", help="with --write: write over a file that is there")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Examine the machine and print the report.

    Raises:
        UsageError: PATH is not a directory.
        BackendError: PATH cannot be written or read.
    """
    if options.write is None and (options.force or options.device is not None):
        raise UsageError("--force and --device say how --write writes; give --write FILE, too")
    if options.write is not None:
        machine_file.require_writable(options.write, force=options.force)
    report = examine(*(Path(path) for path in options.path))
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        for line in _lines(report):
            print(line)
    if options.write is not None:
        _write(report, options)
    return 0


def _write(report: Report, options: argparse.Namespace) -> None:
    """Measure what a machine file says beyond the report, and write it."""
    devices = {device.name: device for device in report.devices}
    device = devices.get(options.device or next(iter(devices)))
    if device is None:
        raise UsageError(f"there is no device {options.device!r}; accepted: {', '.join(devices)}")
    places = [report.place, *report.more_places]
    is_emulated = device.name == _EMULATED
    try:
        found = machine_file.measured(
            f"{device.name}: {device.description}; {report.host.cores} cores",
            measure_device.CPU if is_emulated else device.name,
            device.free_bytes,
            report.host.available_bytes,
            [(place.path, place.free_bytes, place.disk) for place in places],
        )
    finally:
        for place in places:
            remove_ours(Path(place.path))
    machine_file.write(
        options.write,
        machine_file.machine_of(found, datetime.datetime.now(datetime.UTC).date()),
        force=options.force,
    )
    if not options.json:
        print(f"machine   written to {options.write}: read it, and correct what you know better")


def examine(path: Path, *more: Path) -> Report:
    """Look at the machine and at the directory ``path``, and others; about two seconds, and one for each."""
    for each in (path, *more):
        if not each.is_dir():
            raise UsageError(f"{each} is not a directory; give one that exists, on the disk to be measured")
    try:
        return _examine(path, *more)
    finally:
        for each in (path, *more):
            remove_ours(each)


def _examine(path: Path, *more: Path) -> Report:
    place, *more_places = (_place(each) for each in (path, *more))
    host = _host()
    devices = [*_accelerators(), Device(_EMULATED, "CPU tensors behind a quota and a link of their own")]
    backends = {entry_point.name: _fault_of(entry_point) for entry_point in entry_points(group=GROUP)}
    versions = {
        "tierstore": version("tierstore"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    missing = list(_missing(host, devices, backends))
    missing += [line for each in (place, *more_places) for line in _missing_disk(each)]
    findings = _findings(backends, path)
    return Report(versions, host, devices, backends, place, findings, missing, more_places)


def _host() -> Host:
    memory = psutil.virtual_memory()
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Host(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        lockable_bytes=None if soft_limit == resource.RLIM_INFINITY else soft_limit,
        copy_bytes_per_s=measure.host_copy_bytes_per_s(),
    )


def _accelerators() -> Iterator[Device]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return
    for index in range(torch.accelerator.device_count()):
        name = f"{accelerator.type}:{index}"
        free_bytes, memory_bytes = torch.accelerator.get_memory_info(name)
        description = str(getattr(torch, accelerator.type).get_device_name(index))
        try:
            link, pinning = measure.link(name), _PINNING_WORKS
        except RuntimeError as refusal:
            link, pinning = None, f"failed: {str(refusal).splitlines()[0]}"
        yield Device(name, description, memory_bytes, free_bytes, pinning, link)


def _fault_of(entry_point: EntryPoint) -> str | None:
    fault = _death_of(entry_point)
    if fault is not None:
        return fault
    try:
        entry_point.load()
    except (ImportError, AttributeError) as fault:
        return str(fault)
    return None


def _death_of(entry_point: EntryPoint) -> str | None:
    """Say how a process ends that loads a backend; ``None``: it lives, or loads nothing that is not here."""
    if entry_point.dist is None or entry_point.dist.name != "tierstore":
        return fault_alone(entry_point.module)
    return fault_alone(entry_point.name) if entry_point.name in _HAVE_NATIVE_PARTS else None


def _findings(backends: dict[str, str | None], path: Path) -> dict[str, dict[str, str | None]]:
    """Let those backends that can examine a directory do so."""
    findings: dict[str, dict[str, str | None]] = {}
    for entry_point in entry_points(group=GROUP):
        if backends[entry_point.name] is not None:
            continue
        examine: Examiner | None = getattr(import_module(entry_point.module), "examine", None)
        if examine is not None:
            with room(path) as place:
                findings[entry_point.name] = {each.name: each.fault for each in examine(place)}
    return findings


def _place(path: Path) -> PathReport:
    free_bytes = shutil.disk_usage(path).free
    return PathReport(
        str(path), _file_system(path), free_bytes, measure.disk(path, room_bytes=free_bytes // 2)
    )


def _file_system(path: Path) -> str:
    parents = [str(each) for each in (path.resolve(), *path.resolve().parents)]
    mounted = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounted[each] for each in parents if each in mounted), "unknown")


def _missing(host: Host, devices: list[Device], backends: dict[str, str | None]) -> Iterator[str]:
    if [device.name for device in devices] == [_EMULATED]:
        yield "no accelerator that torch can use: compute in host memory ('cpu') or on the emulated device"
    if _HUGE_PAGES.exists() and "[madvise]" in _HUGE_PAGES.read_text() and not os.environ.get(_ASK_FOR_THEM):
        yield f"huge pages are given on request only, and PyTorch does not ask: set {_ASK_FOR_THEM}=1"
    for device in devices:
        yield from _missing_pinning(device, host)
    for name, fault in backends.items():
        if fault is not None:
            yield f"backend {name!r} cannot be loaded: {fault}"


def _missing_pinning(device: Device, host: Host) -> Iterator[str]:
    if device.pinning in (_PINNING_WORKS, _PINNING_NOT_NEEDED):
        return
    yield f"{device.name}: pinning {device.pinning}; copies will be slower and will block"
    if host.lockable_bytes is not None:
        yield f"the limit of locked memory is {format_bytes(host.lockable_bytes)}: raise it with 'ulimit -l'"


def _missing_disk(place: PathReport) -> Iterator[str]:
    if place.file_system in _IN_MEMORY:
        yield f"{place.path} is a {place.file_system}: host memory that no quota counts, not a disk"
    elif not place.disk.is_direct:
        yield (
            f"{place.path} ({place.file_system}) refuses direct I/O: reads and writes there go through the "
            "page cache, which is memory that no quota counts; choose another file system for offload_path"
        )
    if place.free_bytes < _FEW_FREE_BYTES:
        yield f"{place.path} has {format_bytes(place.free_bytes)} free: little for a disk tier"


def _lines(report: Report) -> Iterator[str]:
    yield "  ".join(f"{name} {number}" for name, number in report.versions.items())
    host = report.host
    lockable = "no limit" if host.lockable_bytes is None else format_bytes(host.lockable_bytes)
    yield (
        f"host      {host.cores} cores, {format_bytes(host.available_bytes)} available of "
        f"{format_bytes(host.memory_bytes)}, lockable: {lockable}, copies {_rate(host.copy_bytes_per_s)}"
    )
    for device in report.devices:
        yield f"device    {_device_line(device)}"
    for name, fault in report.backends.items():
        yield f"backend   {name}: {'ready' if fault is None else fault}"
    for place in (report.place, *report.more_places):
        disk = place.disk
        mode = f"direct, alignment {disk.alignment_bytes}" if disk.is_direct else "through the page cache"
        yield (
            f"disk      {place.path}: {place.file_system}, {format_bytes(place.free_bytes)} "
            f"free, {mode}, writes {_rate(disk.write_bytes_per_s)}, reads {_rate(disk.read_bytes_per_s)}"
        )
    for backend, findings in report.findings.items():
        for finding, fault in findings.items():
            yield f"{backend:<9} {finding}: {'works' if fault is None else fault}"
    for line in report.missing or ["nothing"]:
        yield f"missing   {line}"


def _device_line(device: Device) -> str:
    words = [f"{device.name}: {device.description}"]
    if device.memory_bytes is not None and device.free_bytes is not None:
        words.append(f"{format_bytes(device.free_bytes)} free of {format_bytes(device.memory_bytes)}")
        words.append(f"pinning {device.pinning}")
    if device.link is not None:
        words.append(f"to it {_rate(device.link.to_device_bytes_per_s)}")
        words.append(f"from it {_rate(device.link.from_device_bytes_per_s)}")
    return ", ".join(words)


def _rate(bytes_per_s: int) -> str:
    return f"{format_bytes(bytes_per_s)}/s"
