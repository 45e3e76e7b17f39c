"""The sheet: well-known accelerators as data, for people who have not measured theirs, or not bought it.

1. Every figure of the sheet is *nominal*: the vendor's own, dense, in powers of 1000, and says from which
   document.  Real programs reach less; `tierstore doctor --write` measures what a machine does reach.
2. What no data sheet of an accelerator says (the host's memory, its drives, a network between hosts, what an
   operator costs to start) is an assumption, and the machine's ``sources`` call it so.
3. What could not be established from a vendor's document is not in the sheet.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tierstore.planning.machine import (
    ComputeFigures,
    LinkFigures,
    Machine,
    NetworkFigures,
    TierFigures,
    TierMedium,
)
from tierstore.planning.program import is_bytes
from tierstore.planning.wrong_values import WrongValues
from tierstore.quoting import listed

_GIGA = 10**9
_TERA = 10**12
_NEAR_CHARS = 64
_CUTOFF = 0.4  # of likeness: "h100" and "h100-sxm" are near enough

_PCIE_3, _PCIE_4, _PCIE_5 = 16 * _GIGA, 32 * _GIGA, 64 * _GIGA

# --- what is assumed where nobody says otherwise ------------------------------------------------

HOST_PER_DEVICE = 2
"""Bytes of host memory for each of the ranks' device memory."""

DISK_BYTES = 4 * _TERA
DISK_READ, DISK_WRITE = 7 * _GIGA, 5 * _GIGA  # one drive of four lanes of PCIe 4
DISK_LATENCY_S = 100e-6
HOST_FLOPS_PER_S = 2.0 * _TERA
HOST_MEMORY = 200 * _GIGA  # eight channels of DDR4-3200
FABRIC_PER_RANK = 25 * _GIGA  # one adapter of 200 Gbit/s a rank
FABRIC_LATENCY_S = 5e-6
COPY_LATENCY_S = 10e-6
PEER_LATENCY_S = 3e-6
OPERATOR_S = 4e-6


@dataclass(frozen=True, slots=True)
class SheetEntry:
    """One accelerator, as its vendor says.

    Attributes:
        name: in full.
        memory_bytes: of the device, in powers of 1000 as data sheets count.
        memory_bytes_per_s: of its memory.
        flops_per_s: by dtype, without sparsity; matrix units' where there are some.
        host_bytes_per_s: to the host, each direction.
        peer_bytes_per_s: to other accelerators of one host, each direction, by all links together; ``None``:
            over the host.
        source: the document.
        host_memory_bytes_per_s: of a host that comes with it; ``None``: assumed.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: int
    flops_per_s: Mapping[str, float]
    host_bytes_per_s: int
    peer_bytes_per_s: int | None
    source: str
    host_memory_bytes_per_s: int | None = None


def _half(tera: float, float32: float, **others: float) -> dict[str, float]:
    """Return figures of an accelerator that is as fast in both kinds of 16 bits."""
    rates = {"bfloat16": tera, "float16": tera, "float32": float32, **others}
    return {dtype: rate * _TERA for dtype, rate in rates.items()}


_HOPPER = {"float64": 67.0, "float8_e4m3fn": 1979.0, "float8_e5m2": 1979.0}

SHEET: Mapping[str, SheetEntry] = {
    "v100-32gb": SheetEntry(
        "NVIDIA V100 SXM2 32GB",
        32 * _GIGA,
        900 * _GIGA,
        {"float16": 125.0 * _TERA, "float32": 15.7 * _TERA, "float64": 7.8 * _TERA},
        _PCIE_3,
        150 * _GIGA,
        "NVIDIA V100 Tensor Core GPU data sheet",
    ),
    "a100-40gb": SheetEntry(
        "NVIDIA A100 SXM 40GB",
        40 * _GIGA,
        1555 * _GIGA,
        _half(312.0, 19.5, float64=19.5),
        _PCIE_4,
        300 * _GIGA,
        "NVIDIA A100 Tensor Core GPU data sheet",
    ),
    "a100-80gb": SheetEntry(
        "NVIDIA A100 SXM 80GB",
        80 * _GIGA,
        2039 * _GIGA,
        _half(312.0, 19.5, float64=19.5),
        _PCIE_4,
        300 * _GIGA,
        "NVIDIA A100 Tensor Core GPU data sheet",
    ),
    "a10": SheetEntry(
        "NVIDIA A10 24GB",
        24 * _GIGA,
        600 * _GIGA,
        _half(125.0, 31.2),
        _PCIE_4,
        None,
        "NVIDIA A10 Tensor Core GPU data sheet",
    ),
    "l4": SheetEntry(
        "NVIDIA L4 24GB",
        24 * _GIGA,
        300 * _GIGA,
        _half(121.0, 30.3, float8_e4m3fn=242.5, float8_e5m2=242.5),
        _PCIE_4,
        None,
        "NVIDIA L4 Tensor Core GPU data sheet; matrix figures are half of those with sparsity",
    ),
    "l40s": SheetEntry(
        "NVIDIA L40S 48GB",
        48 * _GIGA,
        864 * _GIGA,
        _half(362.0, 91.6, float8_e4m3fn=733.0, float8_e5m2=733.0),
        _PCIE_4,
        None,
        "NVIDIA L40S GPU data sheet",
    ),
    "rtx-3090": SheetEntry(
        "NVIDIA GeForce RTX 3090 24GB",
        24 * _GIGA,
        936 * _GIGA,
        _half(71.0, 35.6),
        _PCIE_4,
        None,
        "NVIDIA Ampere GA102 GPU architecture white paper; matrix figures with float32 accumulation",
    ),
    "rtx-4090": SheetEntry(
        "NVIDIA GeForce RTX 4090 24GB",
        24 * _GIGA,
        1008 * _GIGA,
        _half(165.2, 82.6),
        _PCIE_4,
        None,
        "NVIDIA Ada GPU architecture white paper; matrix figures with float32 accumulation",
    ),
    "h100-80gb": SheetEntry(
        "NVIDIA H100 SXM 80GB",
        80 * _GIGA,
        3350 * _GIGA,
        _half(989.0, 67.0, **_HOPPER),
        _PCIE_5,
        450 * _GIGA,
        "NVIDIA H100 Tensor Core GPU data sheet; matrix figures are half of those with sparsity",
    ),
    "h100-pcie": SheetEntry(
        "NVIDIA H100 PCIe 80GB",
        80 * _GIGA,
        2000 * _GIGA,
        _half(756.0, 51.0, float64=51.0, float8_e4m3fn=1513.0, float8_e5m2=1513.0),
        _PCIE_5,
        300 * _GIGA,
        "NVIDIA H100 PCIe product brief PB-11133-001; matrix figures are half of those with sparsity",
    ),
    "h200": SheetEntry(
        "NVIDIA H200 SXM 141GB",
        141 * _GIGA,
        4800 * _GIGA,
        _half(989.0, 67.0, **_HOPPER),
        _PCIE_5,
        450 * _GIGA,
        "NVIDIA H200 Tensor Core GPU data sheet; matrix figures are half of those with sparsity",
    ),
    "gh200-96gb": SheetEntry(
        "NVIDIA GH200 96GB",
        96 * _GIGA,
        4000 * _GIGA,
        _half(989.0, 67.0, **_HOPPER),
        450 * _GIGA,
        450 * _GIGA,
        "NVIDIA GH200 Grace Hopper Superchip data sheet; the link to the host is NVLink-C2C",
        512 * _GIGA,
    ),
    "gh200-144gb": SheetEntry(
        "NVIDIA GH200 144GB",
        144 * _GIGA,
        4900 * _GIGA,
        _half(989.0, 67.0, **_HOPPER),
        450 * _GIGA,
        450 * _GIGA,
        "NVIDIA GH200 Grace Hopper Superchip data sheet; the link to the host is NVLink-C2C",
        512 * _GIGA,
    ),
    "b200": SheetEntry(
        "NVIDIA B200 180GB",
        180 * _GIGA,
        7700 * _GIGA,
        _half(2250.0, 75.0, float8_e4m3fn=4500.0, float8_e5m2=4500.0),
        _PCIE_5,
        900 * _GIGA,
        "NVIDIA HGX B200 data sheet, an eighth of eight; matrix figures are half of those with sparsity; not "
        "established: its memory (7.7 or 8 TB/s) and float32 (75 or 80 TFLOP/s); the lower stands here",
    ),
    "mi300x": SheetEntry(
        "AMD Instinct MI300X 192GB",
        192 * _GIGA,
        5300 * _GIGA,
        _half(1307.0, 163.4, float64=163.4, float8_e4m3fn=2614.0, float8_e5m2=2614.0),
        _PCIE_5,
        448 * _GIGA,
        "AMD Instinct MI300X data sheet; to peers: seven links of 64 GB/s each way",
    ),
    "mi325x": SheetEntry(
        "AMD Instinct MI325X 256GB",
        256 * _GIGA,
        6000 * _GIGA,
        _half(1307.0, 163.4, float64=163.4, float8_e4m3fn=2614.0, float8_e5m2=2614.0),
        _PCIE_5,
        448 * _GIGA,
        "AMD Instinct MI325X data sheet; to peers: seven links of 64 GB/s each way",
    ),
}
"""By name: what vendors say."""


def accelerator(
    name: str,
    *,
    hosts: int = 1,
    ranks_per_host: int = 1,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
) -> Machine:
    """Return a machine with accelerators of the sheet.

    Args:
        name: of an entry of `SHEET`, as ``"a100-80gb"``.
        hosts: machines like it.
        ranks_per_host: accelerators of each.
        host_bytes: of host memory of one host; ``None``: assumed, twice what its accelerators have.
        disk_bytes: of one host's drives; 0: there are none; ``None``: assumed, 4 TB.

    Raises:
        ConfigError: there is no such entry (near names are told), or a number cannot be so.
    """
    entry = SHEET.get(_plain(name))
    faults = WrongValues()
    faults.add_unless(entry is not None, "name", name, _nearest(name))
    for what, count in (("hosts", hosts), ("ranks_per_host", ranks_per_host)):
        faults.add_unless(is_bytes(count) and count > 0, what, count, "an int greater than 0")
    for what, nbytes in (("host_bytes", host_bytes), ("disk_bytes", disk_bytes)):
        faults.add_unless(nbytes is None or is_bytes(nbytes), what, nbytes, "an int of at least 0, or None")
    faults.raise_if_any("accelerator")
    assert entry is not None
    whole = _machine(entry, hosts, ranks_per_host)
    given = {"host": host_bytes, "disk": disk_bytes}
    capacities = {tier: nbytes for tier, nbytes in given.items() if nbytes is not None}
    told = {f"tiers.{tier}": "given" for tier in capacities}
    return replace(whole.with_capacities(capacities), sources={**whole.sources, **told})


def sheet_name(device: str) -> str | None:
    """Return what the sheet calls an accelerator that torch names; ``None``: it is not there.

    Every part of the sheet's name has to be in torch's; of several the longest one counts.

    Args:
        device: as its driver names it: ``"NVIDIA A100-SXM4-80GB"``.
    """
    parts = set(re.findall(r"[a-z]+[0-9]+[a-z]*|[0-9]+gb|[0-9]+|[a-z]+", device.lower()))
    found = [name for name in SHEET if set(name.split("-")) <= parts]
    return max(found, key=len, default=None)


def _plain(name: object) -> str:
    """Return a name as the sheet writes it; nothing for what cannot be one."""
    is_short = isinstance(name, str) and len(name) <= _NEAR_CHARS
    return "" if not is_short else str(name).strip().lower().replace(" ", "-").replace("_", "-")


def _nearest(name: object) -> str:
    near = difflib.get_close_matches(_plain(name), SHEET, n=3, cutoff=_CUTOFF)
    hint = f"perhaps {listed(near)}; all of them: " if near else ""
    return f"{hint}{listed(SHEET, len(SHEET), show=str)}"


def _machine(entry: SheetEntry, hosts: int, ranks_per_host: int) -> Machine:
    host_memory = entry.host_memory_bytes_per_s or HOST_MEMORY
    up = LinkFigures("host", "device", entry.host_bytes_per_s, COPY_LATENCY_S, ("host memory",))
    read = LinkFigures("disk", "host", DISK_READ, DISK_LATENCY_S, ("drive",))
    return Machine(
        name=entry.name,
        tiers=(
            TierFigures("device", entry.memory_bytes, TierMedium.DEVICE, 512),
            TierFigures("host", HOST_PER_DEVICE * entry.memory_bytes * ranks_per_host, TierMedium.HOST, 512),
            TierFigures("disk", DISK_BYTES, TierMedium.STORAGE, 4096),
        ),
        links=(
            up,
            replace(up, source="device", target="host"),
            read,
            replace(read, source="host", target="disk", bytes_per_s=DISK_WRITE),
        ),
        device=ComputeFigures(entry.flops_per_s, entry.memory_bytes_per_s, OPERATOR_S),
        host=ComputeFigures({"float32": HOST_FLOPS_PER_S}, host_memory),
        shares={"host memory": host_memory, "drive": DISK_READ},
        network=_network(entry, hosts, ranks_per_host),
        ranks_per_host=ranks_per_host,
        hosts=hosts,
        has_streams=True,
        sources=_sources(entry),
    )


def _network(entry: SheetEntry, hosts: int, ranks_per_host: int) -> tuple[NetworkFigures, ...]:
    """Return what several ranks exchange bytes over; of one rank nothing."""
    peer_rate = entry.peer_bytes_per_s or entry.host_bytes_per_s
    over_the_host = ("host memory",) if entry.peer_bytes_per_s is None else ()
    peer = NetworkFigures("peer", peer_rate, PEER_LATENCY_S, over_the_host)
    fabric = NetworkFigures("fabric", FABRIC_PER_RANK * ranks_per_host, FABRIC_LATENCY_S)
    return (*[peer] * (ranks_per_host > 1), *[fabric] * (hosts > 1))


def _sources(entry: SheetEntry) -> dict[str, str]:
    nominal = f"nominal: {entry.source}"
    own_host = entry.host_memory_bytes_per_s is not None
    return {
        "tiers.device": nominal,
        "tiers.host": f"assumed: {HOST_PER_DEVICE} times what the accelerators have",
        "tiers.disk": f"assumed: {DISK_BYTES // _TERA} TB",
        "links.host->device": nominal,
        "links.device->host": nominal,
        "links.disk->host": "assumed: one drive of four lanes of PCIe 4",
        "links.host->disk": "assumed: one drive of four lanes of PCIe 4",
        "links.latency_s": "assumed",
        "shares.drive": "assumed: reads and writes share what reads alone reach",
        "shares.host memory": nominal if own_host else "assumed: eight channels of DDR4-3200",
        **{f"compute.{dtype}": nominal for dtype in entry.flops_per_s},
        "compute.memory": nominal,
        "compute.operator_s": "assumed",
        "compute.efficiency": "assumed: half of the nominal rate is reached",
        "host.float32": "assumed",
        "host.memory": nominal if own_host else "assumed: eight channels of DDR4-3200",
        "network.peer": "assumed: over the host" if entry.peer_bytes_per_s is None else nominal,
        "network.fabric": "assumed: 200 Gbit/s for each rank",
    }
