"""Metrics of runs and stores for OpenTelemetry: observable instruments on a meter.

Extra ``tierstore[opentelemetry]``.  Numbers are asked for when a reader collects, and never else.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from tierstore.integrations.logged import Measured
from tierstore.metrics import Sample, is_counter, samples
from tierstore.metrics_catalogue import CATALOGUE

_SAME_COLLECTION_S: Final = 0.1
"""Instruments are asked one after another: what was found for the first one holds for those after it."""

_UNITS: Final = {"bytes": "By", "seconds": "s", "bytes_per_second": "By/s"}

log = logging.getLogger("tierstore")


def export(meter: Meter, **measured: Measured) -> None:
    """Make the instruments of every metric on a meter.  Once for each meter.

    A run that is gone is left out, and one that cannot be asked is left out with a warning.

    Args:
        meter: from a provider of the program's.
        measured: runs and stores, which are not kept alive; each one's name is the attribute ``run``.
    """
    collected = _Collected({name: weakref.ref(each) for name, each in measured.items()})
    # What somebody's backend counts is in no catalogue: it has to be there now.
    names = {**CATALOGUE, **dict.fromkeys(sorted(set(collected.by_name()) - set(CATALOGUE)), "")}
    for name, description in names.items():
        create = meter.create_observable_counter if is_counter(name) else meter.create_observable_gauge
        create(name, [_callback(collected, name)], unit=_unit(name), description=description)


def _callback(collected: _Collected, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _: collected.by_name().get(name, ())


def _unit(name: str) -> str:
    base = name.rpartition("_")[0] if is_counter(name) else name
    return next((unit for suffix, unit in _UNITS.items() if base.endswith(suffix)), "1")


class _Collected:
    """What the instruments of one meter find, asked for once for each collection.  Thread-safe."""

    def __init__(self, measured: Mapping[str, weakref.ref[Measured]]) -> None:
        self._measured = measured
        self._lock = threading.Lock()  # guards the next two
        self._until_s = 0.0
        self._found: dict[str, list[Observation]] = {}

    def by_name(self) -> dict[str, list[Observation]]:
        """Return what there is now, or was a moment ago."""
        with self._lock:
            if time.monotonic() >= self._until_s:
                self._found = self._collect()
                self._until_s = time.monotonic() + _SAME_COLLECTION_S
            return self._found

    def _collect(self) -> dict[str, list[Observation]]:
        found: dict[str, list[Observation]] = {}
        for run, reference in self._measured.items():
            for sample in _samples_of(run, reference()):
                attributes = {"run": run, **dict(sample.labels)}
                found.setdefault(sample.name, []).append(Observation(sample.value, attributes))
        return found


def _samples_of(name: str, measured: Measured | None) -> list[Sample]:
    if measured is None:
        return []
    try:
        return samples(measured.stats())
    except Exception:
        log.warning("the metrics of %r could not be collected", name, exc_info=True)
        return []
