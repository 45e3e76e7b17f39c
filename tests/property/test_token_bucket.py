"""A bucket never lets more pass than its rate and one burst, nor ever less than it could."""

from __future__ import annotations

import itertools
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from tests.virtual_timer import S, VirtualTimer
from tierstore.pacing import TokenBucket
from tierstore.spi import Completion
from tierstore.wrappers.bandwidth import _LimitedLink

RATES = st.integers(1, 10**12)
BURSTS = st.integers(1, 10**9)
SIZES = st.one_of(st.integers(0, 10**10), st.integers(0, 100))
PAUSES_NS = st.one_of(st.integers(0, 10**12), st.integers(0, 1_000), st.just(0))


@given(RATES, BURSTS, st.lists(st.tuples(PAUSES_NS, SIZES, PAUSES_NS), max_size=30))
def test_no_more_passes_than_rate_and_burst_over_any_sequence(
    rate: int, burst: int, sequence: list[tuple[int, int, int]]
) -> None:
    bucket = TokenBucket(rate, burst)
    now_ns = 0
    passed: list[tuple[int, int]] = []  # when, and how many
    for pause_ns, nbytes, late_ns in sequence:
        now_ns += pause_ns
        now_ns = max(now_ns, bucket.due_ns(nbytes, now_ns)) + late_ns
        bucket.take(nbytes, now_ns)
        passed.append((now_ns, nbytes))
        assert sum(n for _, n in passed) <= burst + Fraction(now_ns, S) * rate
    for first, last in itertools.combinations_with_replacement(range(len(passed)), 2):
        within = [n for _, n in passed[first : last + 1]]
        distance = Fraction(passed[last][0] - passed[first][0], S)
        assert sum(within) <= max(burst, *within) + distance * rate


@given(RATES, BURSTS, st.lists(SIZES, min_size=1, max_size=30))
def test_what_comes_without_a_pause_passes_as_soon_as_the_rate_allows(
    rate: int, burst: int, sizes: list[int]
) -> None:
    bucket = TokenBucket(rate, burst)
    now_ns = 0
    for nbytes in sizes:
        now_ns = max(now_ns, bucket.due_ns(nbytes, now_ns))
        bucket.take(nbytes, now_ns)
    least_s = Fraction(max(0, sum(sizes) - burst), rate)
    assert least_s * S <= now_ns <= least_s * S + len(sizes)  # the clock ticks in nanoseconds


@given(
    st.integers(1, 10**6),
    st.lists(
        st.tuples(st.sampled_from(["read", "write"]), st.integers(0, 10**5), st.integers(0, S)), max_size=25
    ),
)
def test_a_link_begins_everything_once_in_order_and_within_the_limit(
    rate: int, sequence: list[tuple[str, int, int]]
) -> None:
    timer = VirtualTimer()
    link = _LimitedLink(rate, timer)
    begun: list[tuple[int, str, int]] = []
    for number, (kind, nbytes, pause_ns) in enumerate(sequence):

        def begin(number: int = number, kind: str = kind) -> Completion:
            begun.append((timer.time_ns, kind, number))
            return Completion.done()

        timer.advance(timer.time_ns + pause_ns)
        link.enter(kind, begin, nbytes)  # type: ignore[arg-type]
    timer.run_out()
    assert sorted(number for *_, number in begun) == list(range(len(sequence)))
    for direction in ("read", "write"):
        numbers = [number for _, kind, number in begun if kind == direction]
        assert numbers == sorted(numbers)
    burst = max(1, rate // 20)
    total = 0
    for when_ns, _, number in begun:
        total += sequence[number][1]
        assert total <= burst + Fraction(when_ns, S) * rate
