"""What `train_llama` prints: the job, the losses side by side, memory, tiers and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

import tierstore as ts
from llama_job import Job

_MIB = 1024**2


@dataclass(frozen=True)
class History:
    """What a training run left behind: the loss and the seconds of every step, and where it ended."""

    losses: Sequence[float]
    step_s: Sequence[float]
    parameters: dict[str, Tensor]


def mebibytes(nbytes: float) -> str:
    """Print a number of bytes the same way everywhere."""
    return f"{nbytes / _MIB:,.1f} MiB"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print ``rows``, the first of which names the columns: the first column left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  " + "  ".join([first.ljust(widths[0]), *cells]).rstrip())


def print_job(job: Job) -> None:
    """Say what is about to be trained, and how much of it there is."""
    print(
        f"A Llama of {job.shape.parameters / 1e6:.1f} M parameters ({job.shape.layers} layers) "
        f"learns {job.text_name}.\n"
        f"  parameters, gradients, AdamW's moments: {mebibytes(job.state_bytes)}\n"
        f"  the device ({job.config.device}) may hold {mebibytes(job.budget_bytes)}: "
        f"{job.state_bytes / job.budget_bytes:.1f} times less\n"
    )


def print_losses(offloaded: History, unlimited: History) -> bool:
    """Print both runs' losses side by side; return whether they and all final parameters are equal."""
    pairs = list(zip(offloaded.losses, unlimited.losses, strict=True))
    rows = [["step", "offloaded", "unlimited", ""]]
    for step, (ours, plain) in enumerate(pairs, start=1):
        rows.append([str(step), f"{ours:.9f}", f"{plain:.9f}", "equal" if ours == plain else "DIFFERENT"])
    print_table(rows)
    is_same = [
        torch.equal(parameter, offloaded.parameters[name]) for name, parameter in unlimited.parameters.items()
    ]
    print(f"\n  parameters after the last step: {sum(is_same)} of {len(is_same)} equal, bit for bit")
    return all(is_same) and all(ours == plain for ours, plain in pairs)


def print_peak(peak_bytes: int, budget_bytes: int) -> bool:
    """Print the device's peak, as measured from outside the store; return whether it kept the budget."""
    verdict = "within" if peak_bytes <= budget_bytes else "OVER"
    print(
        f"  peak on the device: {mebibytes(peak_bytes)}, {verdict} the budget of {mebibytes(budget_bytes)}\n"
    )
    return peak_bytes <= budget_bytes


def tier_rows(store: ts.Store) -> list[list[str]]:
    """Lay out what the store counted since it was opened, a row a tier.

    A device's quota is what the rest of the program leaves of its memory, so its peak may be from a time
    when there was more.
    """
    stats = store.stats()
    rows = [["tier", "last quota", "peak", "bytes in", "bytes out", "hits", "faults"]]
    for name, tier in stats.tiers.items():
        bytes_in = sum(traffic.nbytes for (_, to), traffic in stats.traffic.items() if to == name)
        bytes_out = sum(traffic.nbytes for (source, _), traffic in stats.traffic.items() if source == name)
        sizes = (tier.capacity_bytes, tier.peak_charged_bytes, bytes_in, bytes_out)
        rows.append([name, *map(mebibytes, sizes), f"{tier.hits:,}", f"{tier.faults:,}"])
    return rows


def print_times(offloaded: History, unlimited: History) -> None:
    """Print the median step times; the first step, which learns the trace, is left out if there are more."""
    ours, plain = (median(history.step_s[1:] or history.step_s) for history in (offloaded, unlimited))
    print(f"\n  step time: {ours:.2f} s offloaded, {plain:.2f} s unlimited: {ours / plain:.2f} times")
