"""Room on several drives: slots are cut by bandwidth, and a drive without room is no reason to refuse."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from tierstore.units import GIB, KIB, MIB
from tierstore_backends.files.addressing.stripes import Load, allot, split

BLOCK = MIB
PLENTY = 1 << 40


def loads(*weights: int) -> list[Load]:
    return [Load(weight, 0, PLENTY) for weight in weights]


@pytest.mark.parametrize(
    "weights", [(1, 1), (3, 1), (2_000_000_000, 550_000_000), (5, 3, 1), (1, 1, 1, 97), (2, 1, 1)]
)
@pytest.mark.parametrize("nbytes", [64 * MIB, 64 * MIB - 4 * KIB, 7 * MIB, 2 * MIB, 100 * MIB + 8 * KIB])
def test_each_part_is_less_than_a_block_away_from_its_share_of_the_blocks(
    weights: tuple[int, ...], nbytes: int
) -> None:
    parts = split(nbytes, BLOCK, loads(*weights))
    assert sum(parts) == nbytes
    blocks = -(-nbytes // BLOCK)
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - Fraction(blocks * BLOCK * weight, sum(weights))) < BLOCK
    assert sum(part % BLOCK > 0 for part in parts) <= 1


def test_a_slot_of_one_block_or_less_is_not_cut() -> None:
    for nbytes in (4 * KIB, BLOCK - 4 * KIB, BLOCK):
        assert sorted(split(nbytes, BLOCK, loads(2, 3))) == [0, nbytes]


def test_small_slots_follow_the_bandwidth_one_after_another() -> None:
    live = [0, 0, 0]
    for _ in range(1200):
        parts = split(64 * KIB, BLOCK, [Load(w, b, PLENTY) for w, b in zip((6, 3, 1), live, strict=True)])
        live = [have + part for have, part in zip(live, parts, strict=True)]
    for have, weight in zip(live, (6, 3, 1), strict=True):
        assert abs(have - 1200 * 64 * KIB * weight // 10) <= 64 * KIB


def test_slots_of_a_few_blocks_follow_the_bandwidth_in_the_long_run() -> None:
    live = [0, 0]
    for _ in range(1100):
        parts = split(2 * BLOCK, BLOCK, [Load(w, b, PLENTY) for w, b in zip((10, 1), live, strict=True)])
        live = [have + part for have, part in zip(live, parts, strict=True)]
    assert abs(live[1] - 200 * BLOCK) <= BLOCK


def test_a_small_slot_goes_whole_to_a_drive_that_has_room_for_it() -> None:
    assert split(8 * KIB, BLOCK, [Load(100, 0, 4 * KIB), Load(1, 9 * MIB, 64 * KIB)]) == [0, 8 * KIB]


def test_where_a_part_has_no_room_the_others_take_it() -> None:
    crowded = [Load(1, 0, 2 * MIB), Load(1, 0, PLENTY), Load(1, 0, 0)]
    assert split(30 * MIB, BLOCK, crowded) == [2 * MIB, 28 * MIB, 0]


def test_what_fits_exactly_is_never_refused() -> None:
    for free in itertools.product((0, 4 * KIB, 3 * MIB, 40 * MIB), repeat=3):
        parts = split(
            sum(free), BLOCK, [Load(weight, 0, f) for weight, f in zip((7, 2, 1), free, strict=True)]
        )
        assert parts == list(free)


def test_shares_of_the_capacity_follow_the_bandwidths() -> None:
    assert allot(10 * GIB, 4096, [3, 2], least=[0, 0], most=[PLENTY, PLENTY]) == [6 * GIB, 4 * GIB]


def test_shares_add_up_to_the_capacity_rounded_down() -> None:
    shares = allot(GIB + 5, 4096, [3, 3, 1], least=[0] * 3, most=[PLENTY] * 3)
    assert sum(shares) == GIB
    assert not any(share % 4096 for share in shares)


def test_no_share_is_more_than_the_disk_has_while_another_can_be() -> None:
    assert allot(10 * GIB, 4096, [1, 1], least=[0, 0], most=[GIB + 1, PLENTY]) == [GIB, 9 * GIB]


def test_a_capacity_above_all_disks_is_shared_out_all_the_same() -> None:
    shares = allot(10 * GIB, 4096, [1, 1], least=[0, 0], most=[GIB, 3 * GIB])
    assert sum(shares) == 10 * GIB
    assert shares[0] >= GIB
    assert shares[1] >= 3 * GIB


def test_no_share_is_less_than_what_is_in_use() -> None:
    assert allot(GIB, 4096, [1, 1], least=[0, 700 * MIB], most=[PLENTY] * 2) == [324 * MIB, 700 * MIB]
