"""What stays in a tier where backward steps each parameter: key by key, beside room for two bundles."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tierstore.planning import Trained
from tierstore.planning.residents import Staying
from tierstore.planning.residents_in_backward import KeptInBackward, choose_in_backward, stay_in_backward

NO_LIMIT = 1 << 40
PARAMETERS, STATE = 16, 32


def bundle(number: int, own: int = PARAMETERS, state: int = STATE, *, is_trained: bool = True) -> Trained:
    keys = (f"p{number}", f"s{number}") if state else (f"p{number}",)
    return Trained(keys, (), own + state, 0, state, is_trained)


def kept(order: list[Trained], quota_bytes: int, low_bytes: int = NO_LIMIT) -> Staying:
    found = choose_in_backward(order, quota_bytes, low_bytes)
    assert found.without_state <= found.bundles
    return stay_in_backward(order, found, quota_bytes)


def counted(staying: Staying) -> tuple[int, int]:
    """Return how many bundles' parameters stay, and the state of how many."""
    own = sum(key.startswith("p") for key in staying.keys)
    return own, len(staying.keys) - own


def passing(order: list[Trained], staying: Staying) -> list[int]:
    """Return what comes and goes of each bundle."""
    return [
        (0 if each.keys[0] in staying.keys else each.kept_bytes - each.state_bytes)
        + sum(each.state_bytes for key in each.keys[1:] if key not in staying.keys)
        for each in order
    ]


# ---------------------------------------------------------------------- the model of 100.7 M parameters


def test_parameters_stay_before_any_state_does() -> None:
    model = [bundle(number) for number in range(24)]
    assert counted(kept(model, 154)) == (3, 0)  # a tenth of the need of 64 MiB each
    assert counted(kept(model, 307)) == (13, 0)
    assert counted(kept(model, 615)) == (24, 5)
    assert counted(kept(model, 922)) == (24, 14)


def test_a_tier_that_holds_all_but_its_gradients_keeps_all() -> None:
    model = [bundle(number) for number in range(24)]
    assert counted(kept(model, 24 * 48)) == (24, 24)
    assert counted(kept(model, 24 * 48 - 1)) == (24, 21)  # beside two bundles' state, which comes and goes


def test_nothing_stays_where_two_bundles_need_all_the_room() -> None:
    assert not kept([bundle(number) for number in range(24)], 2 * 48 + 15).keys
    assert not kept([], 1000).keys


# ---------------------------------------------------------------------- models of other kinds


def test_without_state_only_parameters_need_room() -> None:
    model = [bundle(number, state=0) for number in range(10)]  # as with SGD
    assert counted(kept(model, 100)) == (4, 0)
    assert kept(model, 100).leaving == frozenset()


def test_small_state_stays_where_it_finds_room() -> None:
    model = [bundle(number, state=1) for number in range(10)]  # as with Adafactor
    assert counted(kept(model, 160 + 1)) == (7, 7)  # beside two bundles of 17
    assert counted(kept(model, 160 + 2)) == (10, 0)
    assert counted(kept(model, 160 + 7)) == (10, 5)


def test_what_nothing_trains_stays_last() -> None:
    model = [bundle(0, state=0, is_trained=False), *(bundle(number) for number in range(1, 6))]
    assert "p0" not in kept(model, 5 * 48 + 15).keys
    assert "p0" in kept(model, 5 * 48 + 16).keys


def test_one_that_is_much_larger_stays_as_it_needs_its_room_anyway() -> None:
    model = [bundle(number) for number in range(8)]
    model[5] = bundle(5, own=160, state=320)
    staying = kept(model, 480 + 2 * 48 + 20)
    assert {"p5", "s5"} <= staying.keys
    assert counted(staying) == (2, 1)


def test_what_comes_and_goes_is_spread_over_the_step() -> None:
    model = [bundle(number) for number in range(16)]
    staying = kept(model, 16 * 16 + 8 * 32 + 64)
    going = [number for number, nbytes in enumerate(passing(model, staying)) if nbytes]
    assert counted(staying) == (16, 8)
    assert all(later - earlier == 2 for earlier, later in itertools.pairwise(going))


def test_a_tier_that_writes_back_early_keeps_one_bundle_less_than_it_writes_back_to() -> None:
    model = [bundle(number) for number in range(24)]
    assert counted(kept(model, 307, int(0.75 * 307))) == (11, 0)  # 11 * 16 + 48 is within 230
    assert kept(model, 307, 47).keys == frozenset()


# ---------------------------------------------------------------------- whatever the model

sizes = st.tuples(st.integers(1, 60), st.integers(0, 90), st.booleans())


@st.composite
def models(draw: st.DrawFn) -> list[Trained]:
    parts = draw(st.lists(sizes, max_size=12))
    return [
        bundle(number, own, state if trains else 0, is_trained=trains)
        for number, (own, state, trains) in enumerate(parts)
    ]


@given(models(), st.integers(0, 1500), st.integers(0, 1500))
def test_beside_what_stays_two_bundles_find_room_and_what_may_be_ahead_is_the_rest(
    order: list[Trained], quota_bytes: int, low_bytes: int
) -> None:
    staying = kept(order, quota_bytes, low_bytes)
    going = sorted(passing(order, staying), reverse=True)
    kept_bytes = sum(each.kept_bytes for each in order) - sum(going)
    if staying.keys:
        assert kept_bytes + sum(going[:2]) <= quota_bytes
        assert kept_bytes + sum(going[:1]) <= low_bytes
    assert staying.ahead_bytes == max(0, quota_bytes - kept_bytes - sum(going[:1]))
    everything = {key for each in order for key in each.keys}
    assert staying.leaving == {key for key in everything - staying.keys if key.startswith("s")}


@given(models(), st.integers(0, 1500))
def test_state_stays_with_its_parameters_only_and_nothing_that_would_fit_goes(
    order: list[Trained], quota_bytes: int
) -> None:
    staying = kept(order, quota_bytes)
    going = sorted(passing(order, staying), reverse=True)
    free_bytes = quota_bytes - sum(each.kept_bytes for each in order) + sum(going) - sum(going[:2])
    for each in order:
        stays = each.keys[0] in staying.keys
        assert stays or not staying.keys.intersection(each.keys)
        if staying.keys and not stays:
            assert each.kept_bytes - each.state_bytes > free_bytes


@given(models(), st.integers(0, 1500), st.integers(0, 300))
def test_more_room_never_saves_less(order: list[Trained], quota_bytes: int, more_bytes: int) -> None:
    """Up to what one more bundle could take: sizes differ, and keys are whole."""

    def saved(quota: int) -> int:
        keys = kept(order, quota).keys
        return sum(
            (3 if each.is_trained else 2) * (each.kept_bytes - each.state_bytes) * (each.keys[0] in keys)
            + 2 * each.state_bytes * (each.keys[-1] in keys)
            for each in order
            if each.keys[0] in keys
        )

    largest = max((each.kept_bytes for each in order), default=0)
    assert saved(quota_bytes) <= saved(quota_bytes + more_bytes) + 3 * largest


def test_what_is_named_stays_whole_unless_its_state_is_named_as_well() -> None:
    model = [bundle(number) for number in range(4)]
    staying = stay_in_backward(model, KeptInBackward(frozenset({"p1", "p2"}), frozenset({"p2"})), 200)
    assert staying == Staying(frozenset({"p1", "s1", "p2"}), frozenset({"s0", "s2", "s3"}), 200 - 64 - 48)
