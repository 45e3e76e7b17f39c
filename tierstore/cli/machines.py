"""The machine that a run is planned for: a file, a name of the sheet, or this one; with the run's quotas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from tierstore.cli.text_files import named_file, read_text
from tierstore.cli.this_machine import EmulatedFigures, device_name, this_machine
from tierstore.config import OffloadConfig, yaml_text
from tierstore.config import machine as here
from tierstore.errors import UsageError
from tierstore.planning import Machine, TierMedium
from tierstore.planning.accelerators import accelerator, sheet_name
from tierstore.planning.machine_text import machine_from_yaml
from tierstore.quoting import named
from tierstore.units import format_bytes, parse_bytes, parse_rate

_ENDINGS = (".yaml", ".yml")
_OPTIONS = {"device": "--max-device-memory", "host": "--max-host-memory", "disk": "--max-disk"}
_KEYS = {"device": "max_device_memory", "host": "offload_cpu_size", "disk": "offload_disk_size"}


@dataclass(frozen=True, slots=True)
class RunMachine:
    """The machine with what a run may have of it.

    Attributes:
        machine: with the quotas as its capacities.
        remarks: what was assumed of it, and what of the quotas is strange.
        memory_bytes: without a device, all of the first tier: the program's own bytes are beside the quota.
    """

    machine: Machine
    remarks: tuple[str, ...] = ()
    memory_bytes: int | None = None


def machine_of(
    given: str | None,
    settings: OffloadConfig,
    quotas: Mapping[str, int],
    change: Callable[[Machine], Machine] = lambda machine: machine,
) -> RunMachine:
    """Return the machine of a run.

    Args:
        given: the path of a YAML file, or a name of the sheet; ``None``: this machine.
        settings: of the run.
        quotas: by tier, what the command line gives; they come before those of the settings.
        change: what the command line says of the machine beside its quotas.

    Raises:
        ConfigError: the file is no machine, or the sheet has none of that name.
        UsageError: the file cannot be read, or a quota is for a tier that is not there, or for nothing.
    """
    wanted = {**_quotas_of(settings), **quotas}
    machine, remarks = (_here(settings, wanted), (_ASSUMED,)) if given is None else (_named(given), ())
    machine = change(machine)
    if settings.device is not None and here.is_cpu(settings.device):
        machine = without_device(machine)
    return with_quotas(machine, wanted, remarks)


def with_quotas(machine: Machine, quotas: Mapping[str, int], remarks: tuple[str, ...] = ()) -> RunMachine:
    """Return a machine with what a run may have of it.

    Raises:
        UsageError: a tier is not there, or only the disk may be nothing.
    """
    sizes = {tier.name: tier.capacity_bytes for tier in machine.tiers}
    for tier, nbytes in quotas.items():
        if tier not in sizes and nbytes:
            raise UsageError(
                f"{_OPTIONS[tier]} {format_bytes(nbytes)}: {named(machine.name)} has no tier {tier}; it has "
                f"{', '.join(sizes)}"
            )
        if not nbytes and tier != "disk":
            why = "nothing can be computed" if tier == "device" else "every copy goes through host memory"
            raise UsageError(f"{_OPTIONS[tier]} 0 B: {why}; accepted: a size greater than 0")
    beyond = [
        f"{_OPTIONS[tier]} {format_bytes(nbytes)}: {machine.name} has {format_bytes(sizes[tier])}"
        for tier, nbytes in quotas.items()
        if nbytes > sizes.get(tier, nbytes)
    ]
    kept = {tier: nbytes for tier, nbytes in quotas.items() if tier in sizes}
    first = machine.tiers[0]
    has_device = first.medium is TierMedium.DEVICE
    memory_bytes = None if has_device else max(first.capacity_bytes, kept.get(first.name, 0))
    return RunMachine(machine.with_capacities(kept), (*remarks, *beyond), memory_bytes)


def without_device(machine: Machine) -> Machine:
    """Return a machine that computes in host memory; one without a device is as it was."""
    if machine.tiers[0].medium is not TierMedium.DEVICE:
        return machine
    if len(machine.tiers) == 1:
        raise UsageError(f"{named(machine.name)} has nothing but its device, and the run computes on the cpu")
    tiers = machine.tiers[1:]
    names = {tier.name for tier in tiers}
    links = tuple(link for link in machine.links if {link.source, link.target} <= names)
    return replace(machine, tiers=tiers, links=links, device=machine.host, has_streams=False)


_ASSUMED = (
    "no --machine was given: sizes are this machine's, rates are assumed and not measured; "
    "tierstore doctor --write machine.yaml measures them"
)


def _quotas_of(settings: OffloadConfig) -> dict[str, int]:
    given = {tier: getattr(settings, key) for tier, key in _KEYS.items()}
    return {tier: parse_bytes(size) for tier, size in given.items() if size is not None}


def _named(given: str) -> Machine:
    is_file = given.endswith(_ENDINGS) or "/" in given or Path(given).is_file()
    if not is_file:
        return accelerator(given)
    text = read_text(Path(given), yaml_text.MOST_BYTES)
    with named_file(given):
        return machine_from_yaml(text)


def _here(settings: OffloadConfig, quotas: Mapping[str, int]) -> Machine:
    given = settings.offload_path
    paths = [str(path) for path in ([given] if isinstance(given, str | PurePath) else given)]
    if settings.device == here.EMULATED:
        if "device" not in quotas:
            raise UsageError(
                "--max-device-memory has to be given: the emulated device has no memory of its own"
            )
        return this_machine(paths, emulated=_emulated(settings, quotas["device"]))
    return this_machine(paths, _in_the_sheet())


def _emulated(settings: OffloadConfig, capacity_bytes: int) -> EmulatedFigures:
    rate = settings.device_options.get("link_bandwidth")
    latency_s = settings.device_options.get("link_latency_s", 0.0)
    return EmulatedFigures(
        capacity_bytes,
        float(parse_rate(rate)) if isinstance(rate, int | str) else None,
        float(latency_s) if isinstance(latency_s, int | float) else 0.0,
    )


def _in_the_sheet() -> Machine | None:
    """Return what the sheet says of this machine's accelerator."""
    name = device_name()
    found = None if name is None else sheet_name(name)
    return None if found is None else accelerator(found)
