"""Metrics are all numbers of the statistics, under names that are promised."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import filled_stats
from tests.filled_stats import Numbers
from tests.stores import make_store, numbered
from tierstore.metrics import Sample, as_metrics, parsed, samples
from tierstore.metrics_catalogue import CATALOGUE
from tierstore.stats import StoreStats
from tierstore.training.run_stats import RunStats

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
_ROW = re.compile(r"^\| `(tierstore_\w+)` \| (.*?) ?\| (.*) \|$", re.MULTILINE)
_UNITS = re.compile(r"_(bytes|seconds|bytes_per_second)(_total)?$")
_HAS_UNIT = re.compile(r"byte|second|_s_|nanos|_ms_")

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def _all() -> list[StoreStats | RunStats]:
    return [filled_stats.store(Numbers()), filled_stats.run(Numbers())]


@pytest.mark.parametrize("stats", _all(), ids=lambda each: type(each).__name__)
def test_every_number_of_the_statistics_is_a_metric_and_nothing_else(stats: StoreStats | RunStats) -> None:
    metrics = as_metrics(stats)
    assert Counter(metrics.values()) == Counter(filled_stats.leaves(stats.as_dict()))
    assert all(type(value) in (int, float) for value in metrics.values())


@given(
    st.lists(_texts, unique=True, max_size=4),
    st.lists(_texts, unique=True, max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_whatever_tiers_and_tables_are_called_each_number_has_a_name_of_its_own(
    tiers: list[str], tables: list[str], has_swap: bool, has_store: bool
) -> None:
    numbers = Numbers()
    stats = replace(filled_stats.run(numbers, tables), store=filled_stats.store(numbers, tiers))
    if not has_swap:
        stats = replace(stats, activations=None)
    if not has_store:
        stats = replace(stats, store=None)
    assert Counter(as_metrics(stats).values()) == Counter(filled_stats.leaves(stats.as_dict()))


@pytest.mark.parametrize("stats", _all(), ids=lambda each: type(each).__name__)
def test_every_name_is_in_the_catalogue(stats: StoreStats | RunStats) -> None:
    assert {each.name for each in samples(stats)} <= set(CATALOGUE)


def test_every_name_of_the_catalogue_is_one_of_a_run_s() -> None:
    assert {each.name for each in samples(filled_stats.run(Numbers()))} == set(CATALOGUE)


def test_names_are_such_as_prometheus_asks_for() -> None:
    for name, says in CATALOGUE.items():
        assert re.fullmatch(r"tierstore_[a-z][a-z0-9_]*[a-z0-9]", name), name
        assert not _HAS_UNIT.search(name) or _UNITS.search(name), f"{name}: its unit is not at its end"
        assert says
        assert says == says.strip()
    bases = [name.removesuffix("_total") for name in CATALOGUE]
    assert len(set(bases)) == len(bases), "one name for what only grows and for what does not"


def test_the_page_lists_each_name_with_its_labels_and_what_it_says() -> None:
    rows = {name: (labels, says) for name, labels, says in _ROW.findall(_PAGE.read_text(encoding="utf-8"))}
    labels = {
        each.name: ", ".join(f"`{label}`" for label, _ in each.labels)
        for each in samples(filled_stats.run(Numbers()))
    }
    assert rows == {name: (labels[name], says) for name, says in CATALOGUE.items()}


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z]\w{0,5}", fullmatch=True), _texts),
        max_size=3,
        unique_by=lambda x: x[0],
    )
)
def test_name_and_labels_are_read_back_from_the_text(labels: list[tuple[str, str]]) -> None:
    sample = Sample("tierstore_x", tuple(labels), 1)
    assert parsed(sample.text) == ("tierstore_x", dict(labels))
    assert "\n" not in sample.text


@given(st.dictionaries(_texts, st.one_of(st.integers(), st.floats(), st.text(), st.none(), st.booleans())))
def test_what_somebody_s_backend_counts_is_a_metric_whatever_it_is_called(io: dict[str, object]) -> None:
    stats = filled_stats.store(Numbers(), ["disk"])
    stats = replace(
        stats, tiers={"disk": replace(stats.tiers["disk"], codec=None, io=cast("Any", io), wrappers={})}
    )
    found = [each for each in samples(stats) if each.name.startswith("tierstore_tier_io_")]
    expected = [each for each in io.values() if isinstance(each, int | float)]
    assert Counter(map(repr, (each.value for each in found))) == Counter(
        repr(int(each) if isinstance(each, bool) else each) for each in expected
    )
    assert all(re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", each.name) for each in found)


def test_numbers_of_numpy_are_plain_ones() -> None:
    stats = filled_stats.store(Numbers(), ["disk"])
    io = {"calls": np.int64(3), "mean": np.float32(0.5)}
    stats = replace(stats, tiers={"disk": replace(stats.tiers["disk"], io=cast("Any", io))})
    metrics = as_metrics(stats)
    assert metrics['tierstore_tier_io_calls{tier="disk"}'] == 3
    assert json.loads(json.dumps(metrics)) == metrics


def test_a_store_s_metrics_are_those_of_its_statistics() -> None:
    with make_store(1000, 1000) as store:
        store.put("a", numbered(1))
        with store.lease("a"):
            metrics = store.metrics()
        assert metrics['tierstore_tier_hits_total{tier="host"}'] == store.stats().tiers["host"].hits == 1
        assert metrics['tierstore_traffic_bytes_total{source="caller",target="host"}'] == 100
