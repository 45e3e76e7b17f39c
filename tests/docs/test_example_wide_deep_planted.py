"""The generated clicks, and the AUC that says what was learned of them."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from wide_deep_auc import area_under_curve
from wide_deep_planted import (
    EFFECT,
    MOST_IDS,
    PlantedBatches,
    PlantedClicks,
    Stream,
    Zipf,
    effects,
    scattered,
)

# ---------------------------------------------------------------------- AUC


def by_definition(scores: Tensor, labels: Tensor) -> float:
    pairs = list(itertools.product(scores[labels == 1].tolist(), scores[labels == 0].tolist()))
    return float(sum((one > zero) + (one == zero) / 2 for one, zero in pairs) / len(pairs))


@given(
    st.lists(
        st.tuples(st.sampled_from([-torch.inf, -1.0, 0.0, 0.5, 7.0]), st.integers(0, 1)), max_size=40
    ).filter(lambda lines: len({label for _, label in lines}) == 2)
)
def test_auc_is_the_share_of_pairs_in_order_and_ties_count_half(lines: list[tuple[float, int]]) -> None:
    scores, labels = torch.tensor([score for score, _ in lines]), torch.tensor([label for _, label in lines])
    assert area_under_curve(scores, labels) == by_definition(scores, labels)


def test_auc_is_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    chance = torch.Generator().manual_seed(0)
    labels = (torch.rand(20_000, generator=chance) < 0.2).float()
    scores = (labels + torch.randn(20_000, generator=chance)).mul(20).round()
    assert len(scores.unique()) < 300
    assert area_under_curve(scores, labels) == pytest.approx(metrics.roc_auc_score(labels, scores), abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "labels", "fault"),
    [
        ([1.0, 2.0], [1.0, 1.0], "2 ones and 0 zeros"),
        ([], [], "0 ones and 0 zeros"),
        ([1.0, torch.nan], [1.0, 0.0], "1 of 2 scores"),
        ([1.0], [1.0, 0.0], r"\[1\] for \[2\]"),
    ],
)
def test_auc_of_nothing_is_refused(scores: list[float], labels: list[float], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        area_under_curve(torch.tensor(scores), torch.tensor(labels))


# ---------------------------------------------------------------------- Zipf's law


@pytest.mark.parametrize(
    ("count", "exponent"), [(1, 1.05), (2, 1.0), (50, 0.0), (50, 2.5), (1000, 1.0), (1000, 1.05)]
)
def test_the_kth_number_is_as_frequent_as_zipf_says(count: int, exponent: float) -> None:
    draws = 200_000
    found = np.bincount(Zipf(count, exponent).draw(np.random.default_rng(1), draws), minlength=count + 1)
    shares = np.arange(1, count + 1) ** -exponent
    expected = draws * shares / shares.sum()
    assert found[0] == 0
    assert len(found) == count + 1
    squares = ((found[1:] - expected) ** 2 / expected).sum()
    assert squares < count + 5 * np.sqrt(2 * count)  # chi-square: five deviations above its mean


def test_billions_of_numbers_need_no_table() -> None:
    drawn = Zipf(2**35, 1.05).draw(np.random.default_rng(0), 10_000)
    assert drawn.min() == 1
    assert 2**30 < drawn.max() <= 2**35


@pytest.mark.parametrize("count", [1, 2, 3, 10, 97, 100, 1024, 30_030])
def test_scattered_numbers_are_all_there_once_and_neighbours_are_apart(count: int) -> None:
    found = scattered(np.arange(1, count + 1), count)
    assert sorted(found.tolist()) == list(range(count))
    if count > 10:
        assert np.abs(np.diff(found)).min() > count // 4


# ---------------------------------------------------------------------- the planted model


def test_effects_are_normal_and_of_the_seed() -> None:
    ids = np.arange(100_000)
    found, again, other = effects(ids, 0), effects(ids[::-1], 0)[::-1], effects(ids, 1)
    assert np.array_equal(found, again)
    assert abs(np.corrcoef(found, other)[0, 1]) < 0.02
    assert abs(found.mean()) < 0.01
    assert found.std() == pytest.approx(EFFECT, rel=0.01)
    assert np.quantile(found, 0.8413) == pytest.approx(EFFECT, rel=0.02)
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.02


def test_each_field_has_ids_of_its_own_and_all_of_them_together_are_the_vocabulary() -> None:
    clicks = PlantedClicks(vocabulary=100, batch_size=4096, exponent=0.0)
    batch = clicks.batch(0, 0)
    assert batch.ids.unique().tolist() == list(range(100))
    fields = [set(column.tolist()) for column in batch.ids.t()]
    assert fields[:13] == [{field} for field in range(13)]
    assert sum(map(len, fields)) == 100
    assert batch.weights[:, 13:].unique().tolist() == [1]
    assert 0 <= batch.weights.min() < 0.01
    assert [each.dtype for each in batch] == [torch.int64, torch.float32, torch.float32]


def test_labels_are_drawn_with_the_planted_probabilities() -> None:
    clicks = PlantedClicks(vocabulary=1000, batch_size=50_000)
    batch = clicks.batch(0, 0)
    probabilities = clicks.planted_logits(batch).sigmoid()
    for part in torch.argsort(probabilities).chunk(10):
        deviation = (probabilities[part] * (1 - probabilities[part])).sum().sqrt() / len(part)
        assert abs(batch.labels[part].mean() - probabilities[part].mean()) < 4 * deviation


def test_another_stream_or_seed_has_other_lines() -> None:
    clicks, other = (PlantedClicks(vocabulary=1000, batch_size=32, seed=seed) for seed in (0, 1))
    found = [clicks.batch(0, 0), clicks.batch(0, 1), clicks.batch(1, 0), other.batch(0, 0)]
    assert all(not torch.equal(a.ids, b.ids) for a, b in itertools.combinations(found, 2))


def test_workers_make_the_same_batches_in_the_same_order() -> None:
    batches = PlantedBatches(PlantedClicks(vocabulary=1000, batch_size=16), Stream(1, 5))
    alone = list(DataLoader(batches, batch_size=None))
    # What a process that is started anew gets: starting two takes seconds.
    sent = pickle.loads(pickle.dumps(batches))
    together = list(DataLoader(sent, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    assert len(alone) == len(together) == 5
    for ours, theirs in zip(alone, together, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(
    ("vocabulary", "exponent", "fault"),
    [(38, 1.0, "39 to"), (MOST_IDS + 1, 1.0, "not 68,719,476,737"), (100, -0.5, "at least 0, not -0.5")],
)
def test_what_makes_no_clicks_is_refused(vocabulary: int, exponent: float, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        PlantedClicks(vocabulary, 8, exponent)
