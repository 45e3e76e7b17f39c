"""Metrics of runs and stores for Prometheus: a collector for the registry of ``prometheus_client``.

Extra ``tierstore[prometheus]``.  Numbers are asked for when somebody scrapes, and never else.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tierstore.integrations.logged import Measured
from tierstore.metrics import Sample, samples
from tierstore.metrics_catalogue import CATALOGUE

log = logging.getLogger("tierstore")


class TierstoreCollector(Collector):
    """Collects the metrics of some runs and stores; one for a registry.

    A run that is gone is left out, and one that cannot be asked is left out with a warning: what else is
    scraped goes on.

    Args:
        measured: runs and stores, which are not kept alive.  Each one's name is the label ``run`` of its
            metrics: ``REGISTRY.register(TierstoreCollector(train=run))``.
    """

    def __init__(self, **measured: Measured) -> None:
        self._measured = {name: weakref.ref(each) for name, each in measured.items()}

    def describe(self) -> Iterable[Metric]:
        """Return nothing: a registry would compute it all once to see names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for run, sample in self._samples():
            names = ("run", *(name for name, _ in sample.labels))
            if sample.name not in families:
                kind = CounterMetricFamily if sample.is_counter else GaugeMetricFamily
                families[sample.name] = kind(sample.name, CATALOGUE.get(sample.name, ""), labels=names)
            families[sample.name].add_metric((run, *(value for _, value in sample.labels)), sample.value)
        yield from families.values()

    def _samples(self) -> Iterator[tuple[str, Sample]]:
        for name, reference in self._measured.items():
            measured = reference()
            if measured is None:
                continue
            try:
                found = samples(measured.stats())
            except Exception:
                log.warning("the metrics of %r could not be collected", name, exc_info=True)
                continue
            yield from ((name, sample) for sample in found)
