"""Machines in YAML: read as they were written, or refused as promised."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz import Judge, see_that_it_is_short
from tests.hostile_machines import MACHINE, MACHINES
from tests.hostile_yaml import DOCUMENTS
from tierstore.errors import ConfigError
from tierstore.planning.machine_text import machine_from_yaml, machine_to_yaml

_MOST_CHARS = 2000
_MOST_MESSAGE_CHARS = 10_000  # it lists every fault, up to 32 of them

SEEDS = {
    "right": MACHINE.encode(),
    **{name: text[:_MOST_CHARS].encode() for name, (text, _) in MACHINES.items()},
    **{
        f"yaml: {name}": text[:_MOST_CHARS].encode("utf-8", "surrogateescape")
        for name, (text, _) in DOCUMENTS.items()
    },
}
TOKENS = (
    *(b"tierstore_machine: 1\n", b"tiers: ", b"links: ", b"shares: ", b"compute: ", b"host: ", b"network: "),
    *(b"capacity: ", b"medium: ", b"bandwidth: ", b"latency_s: ", b"from: ", b"to: ", b"memory: "),
    *(b"unlimited", b"80GiB", b"25GB/s", b"312e12", b".nan", b".inf", b"-1", b"0", b"{", b"}", b"[", b"]"),
)


@contextlib.contextmanager
def prepared(directory: Path) -> Iterator[Judge]:
    del directory

    def judge(content: bytes) -> None:
        try:
            machine = machine_from_yaml(content.decode("utf-8", "ignore"))
        except ConfigError as refused:
            see_that_it_is_short(refused, _MOST_MESSAGE_CHARS)
            return
        assert machine_from_yaml(machine_to_yaml(machine)) == machine

    yield judge
