"""The work that a job does: sizes, orders, bytes; and traces with their optimum."""

from __future__ import annotations

import collections
import itertools
import random
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.fio import traces, values
from bench.fio.content import Content, Tensors, VerifyError, digest
from bench.fio.keys import VERIFIES
from bench.fio.sequence import Sequence, chance, indices, tensor_sizes, zipf_shares
from bench.fio.values import Shape, Spreading
from tests.unit.test_bench_fio_plan import job

# ---------------------------------------------------------------------- sizes and orders


def test_a_split_is_kept_to_and_the_size_not_surpassed() -> None:
    mix = values.block_split("4k/10:64k/50:32k/40")
    sizes = tensor_sizes(mix, 64 * 1024**2, random.Random(0))
    counts = collections.Counter(sizes)
    shares = {nbytes: 100 * count / len(sizes) for nbytes, count in counts.items()}
    assert shares == pytest.approx(dict(mix.parts), abs=4)
    assert 0 <= 64 * 1024**2 - sum(sizes) < 4096


@pytest.mark.parametrize("rw", ["read", "randread"])
def test_every_tensor_comes_once_in_a_loop(rw: str) -> None:
    work = Sequence(job(f"rw={rw}"), 0, [4096] * 256)
    for _ in range(2):
        order = [io.tensor for io in work.loop()]
        assert sorted(order) == list(range(256))
        assert (order == sorted(order)) == (rw == "read")


def test_without_the_map_some_tensors_come_twice() -> None:
    order = [io.tensor for io in Sequence(job("rw=randread", "norandommap"), 0, [4096] * 256).loop()]
    assert len(order) == 256
    assert len(set(order)) < 256


def test_io_size_says_how_much_a_loop_moves() -> None:
    assert len(list(Sequence(job("io_size=300%"), 0, [4096] * 256).loop())) == 768
    assert len(list(Sequence(job("io_size=64k"), 0, [4096] * 256).loop())) == 16


@pytest.mark.parametrize(("lines", "share"), [(["rwmixread=70"], 0.7), (["rwmixwrite=70"], 0.3), ([], 0.5)])
def test_a_mix_has_its_share_of_reads(lines: list[str], share: float) -> None:
    ios = list(Sequence(job("rw=randrw", "io_size=2000%", *lines), 0, [4096] * 256).loop())
    assert sum(io.is_read for io in ios) / len(ios) == pytest.approx(share, abs=0.03)


def test_the_same_seed_is_the_same_work_and_another_is_not() -> None:
    def order(*lines: str, clone: int = 0) -> list[int]:
        return [io.tensor for io in Sequence(job("rw=randread", *lines), clone, [4096] * 256).loop()]

    assert order() == order()
    assert order("randseed=1") == order("randseed=1") != order()
    assert order(clone=1) != order()
    assert order("randrepeat=0") != order("randrepeat=0")


# ---------------------------------------------------------------------- shapes


def _top_share(chosen: list[int], share: float) -> float:
    """Return the part of all accesses that goes to the most wanted ``share`` of what was chosen at all."""
    hits = sorted(collections.Counter(chosen).values(), reverse=True)
    return sum(hits[: round(len(hits) * share)]) / len(chosen)


@pytest.mark.parametrize("theta", [0.5, 0.99, 1.2, 2.0])
def test_zipf_chooses_the_kth_in_proportion_to_its_power(theta: float) -> None:
    chosen = list(itertools.islice(indices(Spreading(Shape.ZIPF, theta), 1000, random.Random(1)), 200_000))
    found = np.sort(np.bincount(chosen, minlength=1000))[::-1] / 200_000
    harmonic = sum(k**-theta for k in range(1, 1001))
    for rank in (1, 2, 5):
        assert found[rank - 1] == pytest.approx(rank**-theta / harmonic, rel=0.08)
    assert zipf_shares(1000, theta).sum() == pytest.approx(1)


@pytest.mark.skipif(shutil.which("fio-genzipf") is None, reason="fio-genzipf is not installed")
@pytest.mark.parametrize(("kind", "parameter"), [("zipf", 1.2), ("zipf", 0.8), ("pareto", 0.2)])
def test_the_shape_is_fios(kind: str, parameter: float) -> None:
    """As many accesses are drawn as there are blocks; fio's hash sometimes maps two ranks to one."""
    count = 16384
    command = ["fio-genzipf", "-t", kind, "-i", str(parameter), "-g", "1", "-b", "65536", "-o", "20"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sums = [float(row) for row in re.findall(r"([\d.]+)%\s+\d+\s+[\d.]+[KMG]?\s*$", said, re.MULTILINE)]
    chosen = list(
        itertools.islice(indices(Spreading(Shape(kind), parameter), count, random.Random(0)), count)
    )
    for row in (0, 1, 4):  # the top 5, 10 and 25 %
        assert _top_share(chosen, 0.05 * (row + 1)) == pytest.approx(sums[row] / 100, abs=0.03)


def test_normal_chooses_around_the_middle() -> None:
    chosen = list(itertools.islice(indices(Spreading(Shape.NORMAL, 10), 1000, random.Random(1)), 50_000))
    assert np.mean(chosen) == pytest.approx(500, abs=5)
    assert np.std(chosen) == pytest.approx(100, rel=0.05)


# ---------------------------------------------------------------------- bytes


def test_neighbours_and_versions_have_different_bytes() -> None:
    content = Content("noise", 0, 4096)
    seen = {content.tensor(i, v, 512).numpy().tobytes() for i in range(20) for v in range(20)}
    assert len(seen) == 400
    assert torch.equal(content.tensor(3, 1, 512), Content("noise", 0, 4096).tensor(3, 1, 512))


def test_so_much_of_every_page_is_zeros_as_was_asked_for() -> None:
    assert (Content("noise", 50, 65536).tensor(0, 0, 65536) == 0).float().mean() == pytest.approx(
        0.5, abs=0.01
    )


@pytest.mark.parametrize("name", VERIFIES)
def test_every_checksum_tells_a_flipped_bit(name: str) -> None:
    if name.startswith("crc32c"):
        pytest.importorskip("google_crc32c")
    tensors = Tensors("x", [5000], Content("noise", 0, 8192))
    found = tensors.expected(0).clone()
    tensors.check(0, found, name)
    found[4321] ^= 1
    with pytest.raises(VerifyError, match=r"'x/0'.*1 of 5000 bytes, the first at offset 4321"):
        tensors.check(0, found, name)


def test_checksums_have_their_published_values() -> None:
    data = torch.tensor(list(b"123456789"), dtype=torch.uint8)
    assert digest("crc32")(data) == "cbf43926"
    assert digest("md5")(data) == "25f9e794323b453885f5181f1b624d0b"
    pytest.importorskip("google_crc32c")
    assert digest("crc32c")(data) == "e3069283"


# ---------------------------------------------------------------------- traces


def _best_hits(order: list[int], sizes: list[int], capacity: int) -> int:
    """Try everything that a cache could keep."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for tensor in order:
        following: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            others = held - {tensor}
            for count in range(len(others) + 1):
                for kept in itertools.combinations(sorted(others), count):
                    state = frozenset(kept) | {tensor}
                    if sum(sizes[each] for each in state) <= capacity:
                        now = hits + (tensor in held)
                        following[state] = max(following.get(state, -1), now)
        states = following
    return max(states.values())


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 4))
def test_beladys_hits_are_the_most_that_there_are(order: list[int], slots: int) -> None:
    assert traces.belady_hits(order, slots) == _best_hits(order, [1] * 5, slots)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
    st.integers(4, 12),
)
def test_the_bound_for_mixed_sizes_is_never_below_what_is_possible(
    order: list[int], sizes: list[int], capacity: int
) -> None:
    assert traces.pfoo_hits(order, sizes, capacity) >= _best_hits(order, sizes, capacity)


def test_the_optimum_of_a_cycle_is_known() -> None:
    """Of N in a cycle with room for C, all but N - C + 1 ... hit: (C - 1) / (N - 1) from the second round."""
    count, slots, rounds = 16, 8, 1 + 15 * 4
    hits = traces.belady_hits([i % count for i in range(count * rounds)], slots)
    assert hits / (count * (rounds - 1)) == pytest.approx((slots - 1) / (count - 1), abs=0.01)


def test_the_optimum_says_what_it_is() -> None:
    order = traces.accesses("cyclic", 4, 8, random.Random(0))
    assert order == [0, 1, 2, 3, 0, 1, 2, 3]
    assert traces.optimum(order, [5] * 4, 20).kind == traces.EXACT
    assert traces.optimum(order, [5] * 4, 20).ratio == 0.5
    assert traces.optimum(order, [5, 5, 5, 6], 20).kind == traces.BOUND


def test_a_scan_goes_through_the_cold_once_between_rounds_of_the_hot() -> None:
    order = traces.accesses("scan:25", 8, 16, random.Random(0))
    assert [sorted(order[0:2]), order[2:4], sorted(order[4:6]), order[6:8]] == [
        [0, 1],
        [2, 3],
        [0, 1],
        [4, 5],
    ]
    assert traces.accesses("scan:100", 4, 8, random.Random(0)).count(0) == 2


def test_a_zipf_trace_has_the_shape() -> None:
    order = traces.accesses("zipf:1.1", 100, 5000, random.Random(0))
    top = collections.Counter(order).most_common(1)[0][1] / 5000
    assert top == pytest.approx(zipf_shares(100, 1.1)[0], rel=0.15)


def test_chance_depends_on_what_it_is_for() -> None:
    one = job("rw=randread")
    assert chance(one, 0, "order").random() != chance(one, 0, "mix").random()
