"""Machines in YAML that cannot be, and one that is right."""

from __future__ import annotations

from collections.abc import Mapping

MACHINE = """\
tierstore_machine: 1
name: one of eight
tiers:
  device: {capacity: 80GiB, alignment_bytes: 512}
  host: {capacity: 256GiB}
  disk: {capacity: 3TiB}
links:
  - {from: host, to: device, bandwidth: 25GB/s, latency_s: 10e-6, shares: [bus]}
  - {from: device, to: host, bandwidth: 25e9, latency_s: 1.0e-5, shares: [bus]}
  - {from: disk, to: host, bandwidth: 6000000000, shares: [drive], burst_s: 0.05}
  - {from: host, to: disk, bandwidth: unlimited, shares: [drive]}
shares: {bus: 45GB/s, drive: 6GB/s}
compute: {bfloat16: 312e12, float32: 19.5e12, memory: 2039e9, efficiency: {matmul: 0.6, attention: 0.5}}
host: {float32: 1e12, memory: 20GB/s, operator_s: 1e-6}
network: {peer: {bandwidth: 300e9}, fabric: {bandwidth: 25e9, latency_s: 5e-6}}
ranks_per_host: 8
hosts: 128
has_streams: true
sources: {compute.bfloat16: a data sheet}
"""


def _with(former: str, latter: str) -> str:
    """Return the machine's text with something else in it."""
    assert former in MACHINE
    return MACHINE.replace(former, latter, 1)


_PCIE = "bandwidth: 25GB/s"

MACHINES: Mapping[str, tuple[str, str]] = {
    "nothing": ("", "machine=None: accepted: a mapping"),
    "a list": ("[1]", "accepted: a mapping"),
    "no version": ("name: x", "no key 'tierstore_machine'"),
    "a later one": (_with("machine: 1", "machine: 2"), "tierstore_machine=2; this tierstore reads version 1"),
    "a true version": (_with("machine: 1", "machine: true"), "reads version 1"),
    "a key twice": (_with("hosts: 128", "hosts: 128\nhosts: 1"), "'hosts' is given twice"),
    "a tier twice": (_with("  disk: ", "  host: "), "'host' is given twice"),
    "an unknown key": (_with("hosts: 128", "host_count: 128"), "host_count=128: accepted: no such key"),
    "a key of a wrong name": (_with(" burst_s", " burst"), "did you mean 'burst_s'?"),
    "a dtype of a wrong name": (_with("bfloat16: 312", "bfloat17: 312"), "did you mean 'bfloat16'?"),
    "a sort of a wrong name": (_with("matmul:", "matmull:"), "did you mean 'matmul'?"),
    "a network of a wrong name": (_with("{peer:", "{peers:"), "did you mean 'peer'?"),
    "a capacity below 0": (_with("256GiB", "-1"), "tiers.host.capacity=-1"),
    "a capacity that is no size": (_with("256GiB", "lots"), "tiers.host.capacity='lots'"),
    "an absurd capacity": (_with("256GiB", "999999999999TiB"), "tiers.host.capacity='999999999999TiB'"),
    "half a byte": (_with("256GiB", "0.5"), "tiers.host.capacity=0.5"),
    "no capacity": (_with("capacity: 256GiB", ""), "tiers.host.capacity=None"),
    "a device of 0 bytes": (_with("80GiB", "0"), "nothing can be computed there"),
    "no device at all": (_with("80GiB", "0B"), "nothing can be computed there"),
    "a medium that is none": (_with("capacity: 256GiB", "capacity: 1, medium: water"), "medium='water'"),
    "a tier of no known medium": (_with("  disk:", "  tape:"), "tiers.tape.medium=None"),
    "no number": (_with(_PCIE, "bandwidth: .nan"), "links[0].bandwidth=nan"),
    "infinite": (_with(_PCIE, "bandwidth: .inf"), "links[0].bandwidth=inf"),
    "beyond floats": (_with(_PCIE, "bandwidth: 1e999"), "links[0].bandwidth"),
    "negative": (_with(_PCIE, "bandwidth: -25e9"), "links[0].bandwidth"),
    "nothing a second": (_with(_PCIE, "bandwidth: 0"), "links[0].bandwidth=0"),
    "absurdly fast": (_with(_PCIE, "bandwidth: 1e30"), "links[0].bandwidth='1e30'"),
    "absurdly slow": (_with(_PCIE, "bandwidth: 1e-9"), "links[0].bandwidth='1e-9'"),
    "true a second": (_with(_PCIE, "bandwidth: true"), "links[0].bandwidth=True"),
    "a latency of hours": (_with("10e-6", "100000"), "links[0].latency_s=100000"),
    "a latency below 0": (_with("10e-6", "-1.0"), "links[0].latency_s=-1.0"),
    "an efficiency above 1": (_with("matmul: 0.6", "matmul: 1.5"), "compute.efficiency.matmul=1.5"),
    "an efficiency of 0": (_with("matmul: 0.6", "matmul: 0"), "compute.efficiency.matmul=0"),
    "a link to nowhere": (_with("to: device", "to: devise"), "links[host->devise]"),
    "a link to itself": (_with("to: device", "to: host"), "links[host->host]"),
    "a link twice": (_with("from: device, to: host", "from: host, to: device"), "each direction"),
    "a link that is missing": (
        MACHINE.replace("  - {from: host, to: disk, bandwidth: unlimited, shares: [drive]}\n", ""),
        "host->disk, too",
    ),
    "a share that is none": (_with("[bus]", "[train]"), "links[host->device].shares='train'"),
    "a share below 0": (_with("bus: 45GB/s", "bus: -1"), "shares.bus=-1"),
    "no tiers": ("tierstore_machine: 1\ntiers: {}\n", "accepted: at least one tier"),
    "no compute": (MACHINE.replace("compute: {", "#"), "compute=None: accepted: a mapping"),
    "no memory's rate": (_with("memory: 20GB/s, ", ""), "host.memory=None"),
    "no ranks": (_with("ranks_per_host: 8", "ranks_per_host: 0"), "ranks_per_host=0"),
    "a tier's name that is a number": (_with("  host:", "  5:"), "tiers.5"),
    "links that are a mapping": (
        "tierstore_machine: 1\nlinks: {}\ntiers: {device: {capacity: 1}}",
        "links={}: accepted: a list",
    ),
    "a source that is a list": (_with("a data sheet", "[]"), "sources.compute.bfloat16=[]"),
    "many unknown keys": (MACHINE + "".join(f"key{n}: 1\n" for n in range(1000)), "and 968 more"),
    "a long key": (MACHINE + f"? {'k' * 5_000}\n: 1\n", "no such key"),
}
"""By name: a text, and what the refusal says."""
