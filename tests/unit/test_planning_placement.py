"""A placement as a value: what it is made of, what it prints, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.config import OffloadConfig, yaml_text
from tierstore.errors import ConfigError
from tierstore.planning import BundleHomes, Home, PlacedMark, Placement, Stashing, TableFrames, Treatment
from tierstore.planning.placement import tiers_in

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
devices = st.sampled_from(["device", "cpu"])
tiers = st.none() | st.sampled_from(["device", "host", "disk"]) | names


@st.composite
def homes(draw: st.DrawFn, device: str | None = None) -> Home:
    tier = draw(tiers)
    return Home(tier, device or draw(devices), returns=tier is not None and draw(st.booleans()))


@st.composite
def bundle_homes(draw: st.DrawFn) -> BundleHomes:
    step = draw(devices)
    return BundleHomes(draw(homes()), draw(homes(step)), draw(homes(step)), draw(st.booleans()))


marks = st.builds(
    PlacedMark,
    st.integers(0, 2**40),
    st.just("") | names,
    st.sampled_from(Treatment),
    st.integers(0, 2**40),
)
shares = st.floats(0, 1, exclude_min=True)
placements = st.builds(
    Placement,
    st.dictionaries(names, bundle_homes(), max_size=3),
    st.sampled_from(Stashing),
    st.dictionaries(names, shares, max_size=3),
    st.none() | st.frozensets(names, max_size=4),
    st.lists(marks, max_size=3).map(tuple),
    st.none() | names,
    st.dictionaries(names, devices, max_size=2),
    st.dictionaries(names, st.builds(TableFrames, st.integers(1, 2**50)), max_size=2),
    st.dictionaries(names, shares, max_size=2),
    st.dictionaries(names, shares, max_size=2),
)


@given(placements)
def test_a_placement_that_is_written_as_yaml_is_read_as_the_same(placement: Placement) -> None:
    found = Placement.from_yaml(placement.to_yaml())
    assert found == placement
    assert list(found.bundles) == list(placement.bundles)
    assert list(found.ahead) == list(placement.ahead)
    assert found.to_mapping() == placement.to_mapping()


@given(st.permutations(["a", "b", "c", "d"]), st.lists(st.booleans(), min_size=4, max_size=4))
def test_bundles_that_live_alike_keep_their_places_between_others(keys: list[str], pins: list[bool]) -> None:
    placement = Placement({key: BundleHomes(is_pinned=pin) for key, pin in zip(keys, pins, strict=True)})
    assert list(Placement.from_yaml(placement.to_yaml()).bundles) == keys


@given(placements)
def test_a_placement_can_be_copied_pickled_and_taken_apart(placement: Placement) -> None:
    copies: list[Placement] = [
        copy.copy(placement),
        copy.deepcopy(placement),
        pickle.loads(pickle.dumps(placement)),
    ]
    for found in copies:
        assert found == placement
        assert found.to_mapping() == placement.to_mapping()
        with pytest.raises(TypeError):
            found.bundles["a"] = BundleHomes()  # type: ignore[index]
    assert dataclasses.asdict(placement).keys() == {each.name for each in dataclasses.fields(Placement)}
    assert f"ahead={dict(placement.ahead)}" in repr(placement)


@given(placements)
def test_a_placement_as_a_mapping_is_plain_and_a_configuration_keeps_it(placement: Placement) -> None:
    config = OffloadConfig(placement=placement.to_mapping())
    assert Placement.from_mapping(config.placement) == placement
    assert OffloadConfig.from_mapping(config.to_mapping()) == config


@given(placements, placements)
def test_a_whole_placement_laid_over_another_is_that_one_beside_bundles_that_it_does_not_name(
    one: Placement, other: Placement
) -> None:
    found = one.overlaid(other.to_mapping())
    assert found == dataclasses.replace(other, bundles={**one.bundles, **other.bundles})


@given(placements)
def test_nothing_laid_over_a_placement_leaves_it_as_it_is(placement: Placement) -> None:
    assert placement.overlaid({}) == placement


@given(placements)
def test_what_is_printed_names_what_is_placed(placement: Placement) -> None:
    text = str(placement)
    assert f"{len(placement.bundles)} bundles" in text
    for homes_of_one in placement.bundles.values():
        assert str(homes_of_one) in text
    for mark in placement.marks:
        assert str(mark) in text
    assert placement.inputs is None or f"given: in {placement.inputs}" in text
    for table in placement.tables.values():
        assert str(table) in text


def test_a_placement_reads_as_prose() -> None:
    host = BundleHomes(Home("host"), Home(None, "cpu"), Home("disk", "cpu", returns=True))
    placement = Placement(
        {"param/a": host, "param/b": host, "param/c": BundleHomes(is_pinned=True)},
        Stashing.WITHOUT_ROOM,
        {"device": 0.25},
        marks=(PlacedMark(3, "", Treatment.SWAP, 2),),
    )
    assert str(placement).splitlines() == [
        "3 bundles; gradients are stashed: without-room",
        "  ahead: 0.25 of device",
        "  residents: chosen when a step has run",
        (
            "  param/a, param/b: parameters in host for the device; gradients in any tier for the cpu; "
            "state in disk after every use for the cpu"
        ),
        (
            "  param/c: pinned; parameters in any tier for the device; gradients in any tier for the device; "
            "state in any tier for the device"
        ),
        "  layer 3 as a whole: swap, 2 nodes ahead",
    ]


def test_one_property_of_one_home_may_be_given_alone() -> None:
    base = Placement({"a": BundleHomes(Home("host")), "b": BundleHomes(Home("host"))})
    found = base.overlaid({"bundles": [{"keys": ["b"], "parameters": {"tier": "disk"}}]})
    assert found == Placement({"a": BundleHomes(Home("host")), "b": BundleHomes(Home("disk"))})


def test_a_placement_can_not_be_changed() -> None:
    placement = Placement({"a": BundleHomes()}, ahead={"host": 0.5})
    with pytest.raises(dataclasses.FrozenInstanceError):
        placement.stashing = Stashing.ALWAYS  # type: ignore[misc]
    with pytest.raises(TypeError):
        placement.bundles["a"] = BundleHomes(is_pinned=True)  # type: ignore[index]
    with pytest.raises(TypeError):
        placement.ahead["host"] = 1.0  # type: ignore[index]


@given(
    st.lists(names, max_size=4),
    st.sampled_from([set, frozenset, list, tuple, lambda each: {}.fromkeys(each).keys()]),
)
def test_residents_in_whatever_they_come_are_a_frozen_set(
    keys: list[str], kind: Callable[[list[str]], frozenset[str]]
) -> None:
    placement = Placement(residents=kind(keys))
    assert type(placement.residents) is frozenset
    assert hash(placement) == hash(Placement(residents=frozenset(keys)))


@pytest.mark.parametrize(
    ("mapping", "high", "shares"),
    [
        (None, {}, {}),
        ({}, {}, {}),
        ("no mapping", {}, {}),
        ({"model": "cpu"}, {}, {}),
        ({"high": {"device": 0.5}, "residents": 7}, {"device": 0.5}, {}),
        ({"shares": {"host": 1}, "high": {"host": 1}}, {"host": 1.0}, {"host": 1.0}),
    ],
)
def test_what_is_said_of_tiers_is_told_before_bundles_are_known(
    mapping: object, high: Mapping[str, float], shares: Mapping[str, float]
) -> None:
    assert tiers_in(mapping) == Placement(high=high, shares=shares)


@pytest.mark.parametrize("name", ["high", "shares"])
@pytest.mark.parametrize("share", [0, -1, 1.5, True, "half", None, float("nan")])
def test_a_share_of_a_tier_that_is_none_is_refused_by_its_name(name: str, share: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name}\[host\]="):
        tiers_in({name: {"host": share}})


def test_what_a_run_uses_of_a_tier_is_never_more_than_its_quota() -> None:
    placement = Placement(shares={"host": 0.3})
    assert [placement.used_bytes("host", quota) for quota in (0, 3, 10, 1000)] == [0, 0, 2, 299]
    assert placement.used_bytes("device", 1000) == 1000


@pytest.mark.parametrize("residents", ["ab", "", b"ab", {"a": 1}, 1, [1], [""], {None}])
def test_residents_that_are_no_keys_are_refused(residents: object) -> None:
    with pytest.raises(ConfigError, match="residents="):
        Placement(residents=residents)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="residents_without_state="):
        Placement(residents_without_state=residents)  # type: ignore[arg-type]


def test_residents_without_state_are_told_where_there_are_some() -> None:
    keys = frozenset({"param/a", "param/b"})
    text = str(Placement(residents=keys, residents_without_state=frozenset({"param/b"})))
    assert "  residents: param/a, param/b\n  of these, without their state: param/b" in text
    assert "without" not in str(Placement(residents=keys))


@given(st.floats(0, 1, exclude_min=True), st.integers(0, 2**60))
def test_a_share_of_a_quota_is_exact_and_never_more_than_the_quota(share: float, quota_bytes: int) -> None:
    ahead_bytes = Placement(ahead={"host": share}).ahead_bytes("host", quota_bytes)
    numerator, denominator = share.as_integer_ratio()
    assert ahead_bytes * denominator <= numerator * quota_bytes < (ahead_bytes + 1) * denominator
    assert Placement().ahead_bytes("host", quota_bytes) == 0


_KEYED = {"keys": ["a"]}


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        (None, "placement=None"),
        ([], "placement=[]"),
        ("device", "placement='device'"),
        ({"bundels": []}, "placement: bundels"),
        ({1: 2}, "placement: 1"),
        ({"stashing": "sometimes"}, "placement.stashing='sometimes': accepted: 'always', 'without-room'"),
        ({"stashing": None}, "placement.stashing=None"),
        ({"stashing": [[]]}, "placement.stashing=[[]]"),
        ({"ahead": 0.5}, "placement.ahead=0.5"),
        ({"ahead": {"host": 0}}, "ahead[host]=0"),
        ({"ahead": {"host": 1.5}}, "ahead[host]=1.5"),
        ({"ahead": {"host": float("nan")}}, "ahead[host]=nan"),
        ({"ahead": {"host": True}}, "ahead[host]=True"),
        ({"ahead": {"": 0.5}}, "ahead['']=0.5"),
        ({"residents": "param/a"}, "placement.residents='param/a'"),
        ({"residents": [1]}, "placement.residents=[1]"),
        ({"residents_without_state": None}, "placement.residents_without_state=None"),
        ({"residents_without_state": [1]}, "placement.residents_without_state=[1]"),
        ({"bundles": {"a": {}}}, "placement.bundles={'a': {}}"),
        ({"bundles": ["a"]}, "placement.bundles[0].keys=None"),
        ({"bundles": [{}]}, "placement.bundles[0].keys=None"),
        ({"bundles": [{"keys": "a"}]}, "placement.bundles[0].keys='a'"),
        ({"bundles": [{"keys": [""]}]}, "placement.bundles[0].keys=['']"),
        ({"bundles": [_KEYED, _KEYED]}, "placement.bundles[1].keys='a': accepted: each key once"),
        ({"bundles": [{**_KEYED, "parameters": "host"}]}, "placement.bundles[a].parameters='host'"),
        ({"bundles": [{**_KEYED, "home": {}}]}, "placement.bundles[a]: home"),
        ({"bundles": [{**_KEYED, "state": {"teir": "host"}}]}, "placement.bundles[a].state: teir"),
        ({"bundles": [{**_KEYED, "state": {"tier": 1}}]}, "placement.bundles[a].state: Home: tier=1"),
        ({"bundles": [{**_KEYED, "state": {"device": "cuda"}}]}, "device='cuda': accepted: 'device', 'cpu'"),
        ({"bundles": [{**_KEYED, "state": {"device": ["cpu"]}}]}, "device=['cpu']"),
        ({"bundles": [{**_KEYED, "state": {"returns": 1}}]}, "returns=1"),
        ({"bundles": [{**_KEYED, "state": {"returns": True}}]}, "false, where no tier is named"),
        (
            {"bundles": [{**_KEYED, "state": {"device": "cpu"}, "gradients": {"device": "device"}}]},
            "one device makes the step",
        ),
        ({"bundles": [{**_KEYED, "gradients": {"device": "cpu"}}]}, "one device makes the step"),
        ({"bundles": [{**_KEYED, "is_pinned": "yes"}]}, "is_pinned='yes'"),
        ({"marks": "swap"}, "placement.marks='swap'"),
        ({"marks": [{"layer": 0}]}, "placement.marks[0]"),
        ({"marks": [{"layer": -1, "operators": "", "treatment": "keep"}]}, "layer=-1"),
        ({"marks": [{"layer": 0, "operators": "", "treatment": "burn"}]}, "placement.marks[0].treatment"),
        ({"marks": [{"layer": True, "operators": None, "treatment": "keep"}]}, "layer=True"),
    ],
)
def test_what_can_not_be_right_is_refused_by_its_name(mapping: object, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Placement.from_mapping(mapping)
    assert said in str(refusal.value)


def test_a_refusal_lists_every_fault() -> None:
    given_mapping = {
        "stashing": 1,
        "ahead": 2,
        "bundles": [{"keys": ["a"], "state": 3}],
        "marks": 4,
        "more": 5,
    }
    with pytest.raises(ConfigError) as refusal:
        Placement.from_mapping(given_mapping)
    for value in (1, 2, 3, 4, 5):
        assert f"={value}: accepted" in str(refusal.value)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["bundles", "keys", "ahead", "residents", "stashing", "marks", "state", "tier", "layer"]
            )
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(plain)
def test_whatever_is_given_is_a_placement_or_a_refusal(value: object) -> None:
    try:
        placement = Placement.from_mapping(value)
    except ConfigError:
        return
    assert Placement.from_mapping(placement.to_mapping()) == placement


@pytest.mark.parametrize("letter", ["x", "é", "語"])
def test_yaml_of_one_byte_more_than_a_configuration_may_have_is_refused(letter: str) -> None:
    text = "stashing: always #"
    text += letter * ((yaml_text.MOST_BYTES - len(text)) // len(letter.encode()))
    text += "x" * (yaml_text.MOST_BYTES - len(text.encode()))
    assert Placement.from_yaml(text).stashing is Stashing.ALWAYS
    with pytest.raises(ConfigError, match=f"placement: longer.* at most {yaml_text.MOST_BYTES} bytes"):
        Placement.from_yaml(text + "x")


def test_yaml_that_is_too_much_or_none_is_refused() -> None:
    for text in ("a: [", "- &a [*a]", "stashing: !!python/name:os.system", "x" * (yaml_text.MOST_BYTES + 1)):
        with pytest.raises(ConfigError):
            Placement.from_yaml(text)


@pytest.mark.parametrize(("said", "nbytes"), [("4GiB", 4 << 30), (4096, 4096), ("1.5 KB", 1536)])
def test_frames_of_a_table_are_said_in_bytes_or_as_text(said: object, nbytes: int) -> None:
    placement = Placement.from_mapping({"tables": {"deep.weight": {"frames": said}}})
    assert placement == Placement(tables={"deep.weight": TableFrames(nbytes)})
    assert placement.to_mapping()["tables"] == {"deep.weight": {"frames": nbytes}}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"deep": {"frames": "much"}}, r"placement\.tables\[deep\]: not a size: 'much'"),
        ({"deep": {"frames": 0}}, r"placement\.tables\[deep\]: frames=0"),
        ({"deep": {"frames": -1}}, r"cannot be negative"),
        ({"deep": {"rooms": 1}}, r"accepted: the keys 'frames'"),
        ({"deep": 4096}, r"tables\[deep\]=4096: accepted: a mapping"),
        ([1], r"tables=\[1\]: accepted: a mapping"),
    ],
)
def test_what_is_no_frames_of_a_table_is_refused(said: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Placement.from_mapping({"tables": said})
