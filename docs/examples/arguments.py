"""What the examples' command lines share: one line for what is wrong, the device, and tierstore's log."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import NoReturn

import torch


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line: ``--help`` has the rest."""

    def error(self, message: str) -> NoReturn:
        """Leave with exit code 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see --help)\n")

    def add_device(self) -> None:
        """Add ``--device``; by default CUDA's where there is one."""
        default = "cuda" if torch.cuda.is_available() else "emulated"
        self.add_argument(
            "--device", default=default, metavar="NAME", help="emulated, cuda or cuda:N (%(default)s)"
        )


def check_counts(arguments: argparse.Namespace, *names: str) -> None:
    """Refuse numbers below 1, which argparse lets through; ``None`` is none.

    Raises:
        ValueError: names the option.
    """
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def device_of(name: str) -> torch.device:
    """Return where a model computes on the device of that name.

    An emulated device has a budget and a link of its own, and computes in host memory.

    Raises:
        ValueError: there is no such device.
    """
    kind = name.partition(":")[0]
    if kind not in ("emulated", "cuda"):
        raise ValueError(f"--device must be emulated, cuda or cuda:N, not {name!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: there is no CUDA device here; 'emulated' needs none")
    return torch.device("cpu" if kind == "emulated" else name)


@contextlib.contextmanager
def shown_log(line: str) -> Iterator[None]:
    """Print what tierstore logs, from INFO on.

    Args:
        line: the format of a line, as ``logging`` has it.
    """
    log, handler = logging.getLogger("tierstore"), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(line))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
