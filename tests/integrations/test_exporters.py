"""Exporters give what `metrics` has to Prometheus, OpenTelemetry and TensorBoard, when they are asked."""

from __future__ import annotations

import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Sum
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from torch.utils.tensorboard import SummaryWriter

from tests import filled_stats
from tests.filled_stats import Numbers
from tests.stores import make_store, numbered
from tierstore.integrations import opentelemetry, tensorboard
from tierstore.integrations.logged import FEW, scalars
from tierstore.integrations.prometheus import TierstoreCollector
from tierstore.metrics import Sample, samples
from tierstore.metrics_catalogue import CATALOGUE


class Run:
    """Has statistics, and counts who asks for them."""

    def __init__(self) -> None:
        self.value: object = filled_stats.run(Numbers())
        self.asked = 0
        self.fails = False

    def stats(self) -> object:
        self.asked += 1
        if self.fails:
            raise OSError("the disk is gone")
        return self.value


Told = dict[tuple[str, frozenset[tuple[str, str]]], float]


def _expected(run: Run, name: str) -> Told:
    return {(each.name, frozenset({*each.labels, ("run", name)})): each.value for each in samples(run.value)}


class _Prometheus:
    def __init__(self, **runs: Run) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(TierstoreCollector(**runs))

    def told(self) -> Told:
        text = generate_latest(self.registry).decode()
        return {
            (each.name, frozenset(each.labels.items())): each.value
            for family in text_string_to_metric_families(text)
            for each in family.samples
        }


class _OpenTelemetry:
    def __init__(self, **runs: Run) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False)
        opentelemetry.export(self.provider.get_meter("test"), **runs)

    def told(self) -> Told:
        found: Told = {}
        data = self.reader.get_metrics_data()
        for resource in [] if data is None else data.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        attributes = {name: str(value) for name, value in (point.attributes or {}).items()}
                        found[metric.name, frozenset(attributes.items())] = point.value  # type: ignore[union-attr]
        return found


Exporter = Callable[..., _Prometheus | _OpenTelemetry]
EXPORTERS = pytest.mark.parametrize("exporter", [_Prometheus, _OpenTelemetry])


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each collection be one of its own, also right after another one."""
    monkeypatch.setattr(opentelemetry, "_SAME_COLLECTION_S", 0.0)


@EXPORTERS
def test_every_metric_is_exported_with_its_labels(exporter: Exporter) -> None:
    run, other = Run(), Run()
    assert exporter(train=run, other=other).told() == _expected(run, "train") | _expected(other, "other")


@EXPORTERS
def test_tiers_and_tables_with_odd_names_are_told_apart(exporter: Exporter) -> None:
    names = ['"', "\\", "\n", 'a",b="c', "é", "{}"]
    run = Run()
    run.value = replace(filled_stats.run(Numbers(), names), store=filled_stats.store(Numbers(), names))
    assert exporter(train=run).told() == _expected(run, "train")


@EXPORTERS
def test_what_is_exported_is_what_there_is_now(exporter: Exporter) -> None:
    run = Run()
    exported = exporter(train=run)
    exported.told()
    run.value = filled_stats.run(Numbers(), ["later"])
    assert exported.told() == _expected(run, "train")


def test_prometheus_asks_for_nothing_until_somebody_scrapes() -> None:
    run = Run()
    exported = _Prometheus(train=run)
    assert run.asked == 0
    exported.told()
    assert run.asked == 1


def test_a_collection_of_opentelemetry_s_asks_once_for_all_instruments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opentelemetry, "_SAME_COLLECTION_S", 60.0)
    run = Run()
    exported = _OpenTelemetry(train=run)
    assert run.asked == 1, "for the names of what somebody's backend counts"
    exported.told()
    assert run.asked == 1
    assert len(exported.told()) > 100


@EXPORTERS
def test_one_that_cannot_be_asked_is_left_out_with_a_warning_and_comes_back(
    exporter: Exporter, caplog: pytest.LogCaptureFixture
) -> None:
    run, other = Run(), Run()
    exported = exporter(train=run, other=other)
    exported.told()
    run.fails = True
    with caplog.at_level(logging.WARNING, "tierstore"):
        assert not any(("run", "train") in labels for _, labels in exported.told())
    assert "the disk is gone" in caplog.text
    run.fails = False
    assert exported.told() == _expected(run, "train") | _expected(other, "other")


@EXPORTERS
def test_a_run_that_is_gone_is_left_out_and_is_not_kept(exporter: Exporter) -> None:
    run, other = Run(), Run()
    exported = exporter(train=run, other=other)
    expected = _expected(other, "other")
    del run
    gc.collect()
    assert exported.told() == expected


def test_prometheus_is_told_what_each_metric_says_and_which_only_grow() -> None:
    run = Run()
    registry = _Prometheus(train=run).registry
    families = {each.name: each for each in registry.collect()}
    for name, says in CATALOGUE.items():
        family = families[name.removesuffix("_total")]
        assert family.documentation == says
        assert family.type == ("counter" if name.endswith("_total") else "gauge")


def test_opentelemetry_is_told_units_and_which_only_grow() -> None:
    run = Run()
    exported = _OpenTelemetry(train=run)
    data = exported.reader.get_metrics_data()
    assert data is not None
    metrics = {each.name: each for each in data.resource_metrics[0].scope_metrics[0].metrics}
    assert metrics.keys() == CATALOGUE.keys()
    for name, metric in metrics.items():
        assert isinstance(metric.data, Sum) == name.endswith("_total")
    units = Counter(metric.unit for metric in metrics.values())
    assert units.keys() == {"By", "By/s", "s", "1"}
    assert metrics["tierstore_tier_io_drive_bandwidth_bytes_per_second"].unit == "By/s"
    assert metrics["tierstore_run_stall_seconds_total"].unit == "s"


@EXPORTERS
def test_what_somebody_s_backend_counts_is_exported(exporter: Exporter) -> None:
    run = Run()
    stats = filled_stats.store(Numbers(), ["disk"])
    run.value = replace(stats, tiers={"disk": replace(stats.tiers["disk"], io={"moods": 7})})
    told = exporter(train=run).told()
    assert told["tierstore_tier_io_moods", frozenset({("run", "train"), ("tier", "disk")})] == 7


@EXPORTERS
def test_a_store_is_exported_from_any_thread_while_it_works(exporter: Exporter) -> None:
    with make_store(1000, 10_000) as store:
        exported = exporter(cache=store)
        ended = threading.Event()
        faults: list[BaseException] = []

        def scrape() -> None:
            try:
                while not ended.is_set():
                    exported.told()
            except BaseException as fault:  # noqa: BLE001 - raised below
                faults.append(fault)

        thread = threading.Thread(target=scrape)
        thread.start()
        for number in range(50):
            store.put(str(number), numbered(number))
        ended.set()
        thread.join()
        assert faults == []
        key = (
            "tierstore_traffic_bytes_total",
            frozenset({("run", "cache"), ("source", "caller"), ("target", "host")}),
        )
        assert exported.told()[key] == 5000


# ---------------------------------------------------------------------- scalars


def test_scalars_for_a_log_are_few_and_all_are_there_when_asked_for() -> None:
    run = Run()
    few, every = scalars(run), scalars(run, None)
    assert set(CATALOGUE) >= FEW
    assert few.items() < every.items()
    assert Counter(every.values()) == Counter(each.value for each in samples(run.value))
    assert len(few) == sum(each.name in FEW for each in samples(run.value))
    assert all(name.startswith("tierstore/") for name in every)


def test_names_of_scalars_have_the_values_of_labels_behind_them() -> None:
    stats = filled_stats.run(Numbers())
    run = Run()
    run.value = stats
    assert stats.store is not None
    found = scalars(run)
    assert found["tierstore/tier_hits_total/disk"] == stats.store.tiers["disk"].hits
    assert found["tierstore/traffic_bytes_total/device/disk"] == stats.store.traffic["device", "disk"].nbytes
    assert set(scalars(run, ["tierstore_run_steps_total"])) == {"tierstore/run_steps_total"}


def test_tensorboard_has_each_scalar_of_each_step(tmp_path: Path) -> None:
    run = Run()
    with SummaryWriter(str(tmp_path)) as writer:
        for step in (1, 2):
            run.value = filled_stats.run(Numbers())
            tensorboard.write(writer, run, step)
    read = EventAccumulator(str(tmp_path)).Reload()
    expected = scalars(run, None)
    assert set(read.Tags()["scalars"]) == set(expected)
    for tag, value in expected.items():
        assert [(each.step, each.value) for each in read.Scalars(tag)] == [(1, value), (2, value)]


def test_a_sample_is_a_counter_by_its_name() -> None:
    assert Sample("tierstore_x_total", (), 1).is_counter
    assert not Sample("tierstore_total_x", (), 1).is_counter
