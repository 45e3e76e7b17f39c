"""The pool's arithmetic, against a plain array that says who owns each granule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierstore_backends.pinned.ranges import FreeRanges

_BLOCKS = (40, 7, 100)  # lengths, in units of one
_STARTS = (0, 1000, 2000)

_Steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 60), st.sampled_from((1, 4, 8))),
        st.tuples(st.just("give"), st.integers(0, 100), st.just(0)),
    ),
    max_size=60,
)


def _new() -> tuple[FreeRanges, set[int]]:
    ranges = FreeRanges()
    for start, nbytes in zip(_STARTS, _BLOCKS, strict=True):
        ranges.give(start, nbytes)
    cells = {start + i for start, nbytes in zip(_STARTS, _BLOCKS, strict=True) for i in range(nbytes)}
    return ranges, cells


def _runs(free: set[int]) -> set[tuple[int, int]]:
    """Return the maximal runs of free cells, as (start, length)."""
    runs: set[tuple[int, int]] = set()
    for start in free:
        if start - 1 not in free:
            end = start
            while end in free:
                end += 1
            runs.add((start, end - start))
    return runs


def _fits(run: tuple[int, int], nbytes: int, alignment: int) -> bool:
    start, length = run
    first = next(cell for cell in range(start, start + length + alignment) if cell % alignment == 0)
    return first + nbytes <= start + length


@given(_Steps)
def test_free_ranges_are_the_maximal_runs_of_what_nobody_has(steps: list[tuple[str, int, int]]) -> None:
    ranges, free = _new()
    taken: list[tuple[int, int]] = []
    for verb, number, alignment in steps:
        if verb == "take":
            candidates = [run for run in _runs(free) if _fits(run, number, alignment)]
            start = ranges.take(number, alignment)
            assert (start is None) == (not candidates)
            if start is not None:
                assert start % alignment == 0
                cells = set(range(start, start + number))
                assert cells <= free
                chosen = next(run for run in _runs(free) if run[0] <= start < run[0] + run[1])
                assert chosen[1] == min(length for _, length in candidates)
                free -= cells
                taken.append((start, number))
        elif taken:
            start, nbytes = taken.pop(number % len(taken))
            free |= set(range(start, start + nbytes))
            assert ranges.give(start, nbytes) in _runs(free)
        assert set(ranges) == _runs(free)
        assert ranges.free_bytes == len(free)
        assert sorted(ranges.of_at_least(number)) == sorted(run for run in _runs(free) if run[1] >= number)
        assert ranges.largest_bytes == max((length for _, length in _runs(free)), default=0)
