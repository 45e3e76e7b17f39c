"""What is kept of a run of `train_llama`, for its picture: plain numbers, as JSON."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import tierstore as ts

_SAMPLES_EVERY_S = 0.01
_POINTS_A_STEP = 24


class Metered(Protocol):
    """What tells how many bytes are live on a device."""

    @property
    def live_bytes(self) -> int:
        """Now."""
        ...


@dataclass(frozen=True)
class TierRecord:
    """A tier, when training had ended.

    Attributes:
        name: of the tier.
        quota_bytes: that it was given.
        peak_bytes: the most that it held.
    """

    name: str
    quota_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class RunRecord:
    """Three runs of one job.

    Attributes:
        model: what was trained, in words.
        parameters: how many there are.
        state_bytes: of parameters, gradients and AdamW's moments.
        budget_bytes: what the device may hold.
        ended_by: what ended the run without offloading; ``None``: nothing did.
        offloaded, unlimited: the losses of the other two, step by step.
        is_equal: whether these and all parameters at the end are equal, bit for bit.
        peak_bytes: the most that was live on the device, as measured from outside the store.
        tiers: of the store, fastest first.
        memory: live bytes on the device while the offloaded run trained: steps since the beginning, bytes.
    """

    model: str
    parameters: int
    state_bytes: int
    budget_bytes: int
    ended_by: str | None
    offloaded: Sequence[float]
    unlimited: Sequence[float]
    is_equal: bool
    peak_bytes: int
    tiers: Sequence[TierRecord]
    memory: Sequence[tuple[float, int]]


def tiers_of(store: ts.Store, config: ts.OffloadConfig) -> list[TierRecord]:
    """Return the tiers of a store, with the quotas that a configuration gave them."""
    given = {tier.name: tier.capacity_bytes for tier in config.store_config().tiers}
    return [
        TierRecord(name, given[name], tier.peak_charged_bytes) for name, tier in store.stats().tiers.items()
    ]


@contextmanager
def sampled(meter: Metered) -> Iterator[list[tuple[float, int]]]:
    """Sample live bytes a hundred times a second; yield them as they grow: seconds, bytes."""
    samples: list[tuple[float, int]] = []
    begun, is_over = time.perf_counter(), threading.Event()

    def sample() -> None:
        while not is_over.wait(_SAMPLES_EVERY_S):
            samples.append((time.perf_counter() - begun, meter.live_bytes))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()


def by_step(samples: Sequence[tuple[float, int]], step_s: Sequence[float]) -> list[tuple[float, int]]:
    """Return the largest sample of each part of a step, at steps since the beginning in the place of seconds.

    Args:
        samples: seconds, bytes.
        step_s: how long each step took.
    """
    largest: dict[int, int] = {}
    begin_s = 0.0
    for step, seconds in enumerate(step_s):
        for at_s, nbytes in samples:
            if begin_s <= at_s < begin_s + seconds:
                part = step * _POINTS_A_STEP + int((at_s - begin_s) / seconds * _POINTS_A_STEP)
                largest[part] = max(largest.get(part, 0), nbytes)
        begin_s += seconds
    return [((part + 0.5) / _POINTS_A_STEP, largest[part]) for part in sorted(largest)]


def write_record(record: RunRecord, path: Path) -> None:
    """Write a record as JSON, one that there was before is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")


def read_record(path: Path) -> RunRecord:
    """Return the record that a file has."""
    found: Mapping[str, object] = json.loads(path.read_text(encoding="utf-8"))
    record = RunRecord(**found)  # type: ignore[arg-type]  # what `write_record` has written
    tiers = [TierRecord(**each) for each in record.tiers]  # type: ignore[arg-type]
    return RunRecord(**{**vars(record), "tiers": tiers})
