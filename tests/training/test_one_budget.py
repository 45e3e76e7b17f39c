"""Parameters, optimizer state and activations in one store: the bits are the same, whatever is combined."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.training.one_budget import RECOMPUTES, SWAPS, TIERS, Way, build, document, train
from tests.training.twins import (
    Trial,
    assert_equal_lists,
    assert_equal_models,
    assert_equal_states,
)
from tierstore.training import offload

WAYS = {
    f"{'added up' if batches > 1 else 'at once'}, {'bf16' if dtype is not None else 'float32'}": Way(
        batches, dtype
    )
    for batches in (1, 3)
    for dtype in (None, torch.bfloat16)
}
ALL = list(itertools.product(SWAPS, RECOMPUTES, TIERS, WAYS))


def _some() -> Iterator[tuple[str, str, str, str]]:
    """Yield a twelfth of them, in which swap, recompute and tiers meet each of each other."""
    recomputes, ways = list(RECOMPUTES), list(WAYS)
    for (i, swap), (j, tiers) in itertools.product(enumerate(SWAPS), enumerate(TIERS)):
        yield swap, recomputes[(i + j) % len(recomputes)], tiers, ways[(j - i) % len(ways)]


@functools.cache
def _plain(way: Way) -> Trial:
    trial = build()
    train(trial, way)
    return trial


def _assert_same(path: Path, swap: str, recompute: str, tiers: str, way: Way) -> None:
    plain, ours = _plain(way), build()
    settings = document(path, swap=swap, recompute=recompute, tiers=tiers)
    with offload(ours.model, list(ours.optimizers), settings) as run:
        train(ours, way)
        run.store.check()
        assert [key for key in run.store if key.startswith("activation/")] == []
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)
    assert_equal_states(plain.optimizer, ours.optimizer)


@pytest.mark.parametrize(("swap", "recompute", "tiers", "way"), list(_some()))
def test_whatever_is_combined_the_bits_are_the_same(
    tmp_path: Path, swap: str, recompute: str, tiers: str, way: str
) -> None:
    _assert_same(tmp_path, swap, recompute, tiers, WAYS[way])


@pytest.mark.long
@pytest.mark.parametrize(("swap", "recompute", "tiers", "way"), ALL)
def test_every_combination_has_the_same_bits(
    tmp_path: Path, swap: str, recompute: str, tiers: str, way: str
) -> None:
    _assert_same(tmp_path, swap, recompute, tiers, WAYS[way])
