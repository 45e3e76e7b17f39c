"""Which tensor comes when: sizes of tensors, and the order in which they are read and written.

Promises: the same seed yields the same work.  Knows nothing of stores.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bench.fio.job import Job
from bench.fio.values import Mix, Shape, Spreading

_DRAWS = 4096  # random ranks that are drawn at a time


class Io(NamedTuple):
    """One operation to do: on which tensor, and which way."""

    tensor: int
    is_read: bool


def chance(job: Job, clone: int, purpose: str) -> random.Random:
    """Return the chance of one thread of a job; different purposes do not disturb each other.

    Jobs that differ in their names only do the same work, so that they can be compared.
    """
    seed = job.randseed if job.randseed is not None else 0
    start: object = seed if job.is_repeatable else os.urandom(16).hex()
    return random.Random(f"{start}/{clone}/{purpose}")


def tensor_sizes(mix: Mix, size_bytes: int, draws: random.Random) -> list[int]:
    """Cut ``size_bytes`` into tensors of the mix's sizes; what is left at the end is not used."""
    if mix.is_single:
        return [mix.smallest] * (size_bytes // mix.smallest)
    sizes, room = [], size_bytes
    candidates, weights = zip(*mix.parts, strict=True)
    while room >= mix.smallest:
        nbytes = draws.choices(candidates, weights)[0]
        if nbytes <= room:
            sizes.append(nbytes)
            room -= nbytes
    return sizes


def zipf_shares(count: int, theta: float) -> np.ndarray:
    """Return how often each rank is chosen: the k-th of ``count`` in proportion to ``k ** -theta``."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -theta
    shares: np.ndarray = weights / weights.sum()
    return shares


def indices(spread: Spreading, count: int, draws: random.Random) -> Iterator[int]:
    """Yield tensors for ever, chosen by ``spread`` among ``count``; fio's manual defines the shapes.

    Which tensor has which rank is chance for zipf and pareto; for normal the middle ones come most often.
    """
    generator = np.random.default_rng(draws.getrandbits(64))
    rank_of = generator.permutation(count)
    cumulative = np.cumsum(zipf_shares(count, spread.parameter)) if spread.shape is Shape.ZIPF else None
    while True:
        ranks = _ranks(spread, count, generator, cumulative)
        yield from (rank_of[ranks] if spread.shape is not Shape.NORMAL else ranks).tolist()


def _ranks(
    spread: Spreading, count: int, generator: np.random.Generator, cumulative: np.ndarray | None
) -> np.ndarray:
    uniform = generator.random(_DRAWS)
    if cumulative is not None:
        found: np.ndarray = np.minimum(np.searchsorted(cumulative, uniform, side="right"), count - 1)
        return found
    if spread.shape is Shape.PARETO:
        power = np.log(spread.parameter) / np.log(1 - spread.parameter)
        drawn: np.ndarray = (uniform**power * count).astype(np.int64)
        return drawn
    if spread.shape is Shape.NORMAL:
        positions: np.ndarray = generator.normal(count / 2, max(count * spread.parameter / 100, 1e-9), _DRAWS)
        inside: np.ndarray = positions[(positions >= 0) & (positions < count)].astype(np.int64)
        return inside
    ranks: np.ndarray = (uniform * count).astype(np.int64)
    return ranks


def order(job: Job, count: int, draws: random.Random) -> Iterator[int]:
    """Yield for ever which tensor is next."""
    if not job.direction.is_random:
        yield from itertools.cycle(range(count))
    elif job.spread.shape is not Shape.UNIFORM or not job.has_random_map:
        yield from indices(job.spread, count, draws)
    else:
        while True:
            yield from draws.sample(range(count), count)


class Sequence:
    """The work of one thread of a job, loop by loop."""

    def __init__(self, job: Job, clone: int, sizes: list[int]) -> None:
        self._job = job
        self._sizes = sizes
        self._order = order(job, len(sizes), chance(job, clone, "order"))
        self._mix = chance(job, clone, "mix")

    def loop(self) -> Iterator[Io]:
        """Yield one loop: as many operations as ``io_size``, or ``size``, asks for."""
        direction = self._job.direction
        is_mixed = direction.has_reads and direction.has_writes
        # What does not fill another tensor at the end of size is not asked for either.
        room = self._job.loop_bytes - self._job.size_bytes % min(self._sizes)
        while room > 0:
            index = next(self._order)
            room -= self._sizes[index]
            is_read = self._mix.random() * 100 < self._job.read_percent if is_mixed else direction.has_reads
            yield Io(index, is_read)
