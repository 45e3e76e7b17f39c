"""The rules that decide where everything lives: the same as seven places did before; and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tests.sampling import tried
from tierstore.errors import ConfigError
from tierstore.planning import BundleHomes, Home, Placement, Stashing
from tierstore.planning.rules import (
    BundleFacts,
    RunFacts,
    Wishes,
    check,
    follows_plan,
    obey,
    place,
    small_bytes,
)

MIB = 2**20
TIERS: list[dict[str, int]] = [
    {"host": 64 * MIB},
    {"host": 64 * MIB + 3, "disk": 512 * MIB},
    {"device": 64 * MIB + 1, "host": 128 * MIB},
    {"device": 64 * MIB, "host": 96 * MIB + 2, "disk": 512 * MIB},
    {"host": 110 * MIB, "disk": 512 * MIB},
]
BUNDLES = [BundleFacts("param/a", 30 * MIB), BundleFacts("param/b", 30 * MIB, is_pinned=True)]
TARGETS = (None, "cpu", "disk")


def facts_of(tiers: Mapping[str, int], more: int = 0, **wishes: object) -> RunFacts:
    """Return what is known of a run with 60 MiB and ``more``."""
    bundles = [*BUNDLES, BundleFacts("buffer/c", more)]
    return RunFacts(tiers, bundles, Wishes(**wishes))  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what was decided before


def _begins(wish: str | None) -> str | None:
    return {None: None, "cpu": "host", "disk": "disk"}[wish]


def _goes_back(wish: str | None, facts: RunFacts) -> str | None:
    """Return where a bundle of a kind was pushed down to after every use."""
    is_obeyed = wish is not None and not facts.wishes.auto_offload
    return _begins(wish) if is_obeyed and _begins(wish) != next(iter(facts.tiers)) else None


def _step_tier(bundle: BundleFacts, facts: RunFacts) -> str:
    fastest = next(iter(facts.tiers))
    optimizer_tier = "host" if facts.wishes.optimizer_target == "cpu" else fastest
    return fastest if bundle.is_pinned else optimizer_tier


def _fits(facts: RunFacts) -> bool:
    fastest_bytes = next(iter(facts.tiers.values()))
    return sum(each.nbytes for each in facts.bundles) <= int(fastest_bytes * facts.wishes.hbm_ratio)


def _fits_as_it_lies(facts: RunFacts) -> bool:
    sizes = [each.nbytes + 16 * 1024 for each in facts.bundles]  # a page for each of four slots
    return sum(sizes) + max(sizes) <= int(next(iter(facts.tiers.values())) * facts.wishes.hbm_ratio)


def _windows(facts: RunFacts) -> dict[str, int]:
    has_meter = "device" in facts.tiers
    if _fits_as_it_lies(facts) and not has_meter:
        return {}
    names = [name for number, name in enumerate(facts.tiers) if number == 0 or name == "host"]
    return {name: facts.tiers[name] // 4 for name in names}


def _stashes(facts: RunFacts, *, has_room: bool) -> bool:
    if "device" in facts.tiers and facts.wishes.offload_grad is None:
        return not has_room
    return not _fits(facts) or facts.wishes.offload_grad is not None


GRID = [
    facts_of(
        tiers,
        more,
        offload_param=param,
        offload_checkpoint=inputs,
        offload_grad=grad,
        offload_optimizer=state,
        auto_offload=auto,
        optimizer_target=target,
        hbm_ratio=ratio,
    )
    for tiers in TIERS
    for more, ratio in itertools.product((0, 4 * MIB, 5 * MIB), (1.0, 0.9))
    for param, grad, state in itertools.product(TARGETS, repeat=3)
    for inputs in TARGETS
    for auto, target in itertools.product((True, False), ("device", "cpu"))
]


def test_the_rules_decide_what_was_decided_in_seven_places() -> None:
    seen = 0
    for facts in GRID:
        wishes = facts.wishes
        asked = {
            wishes.offload_param,
            wishes.offload_checkpoint,
            wishes.offload_grad,
            wishes.offload_optimizer,
        }
        if "disk" in asked and "disk" not in facts.tiers:
            with pytest.raises(ConfigError, match="needs the tier 'disk'"):
                place(facts)
            continue
        placement = place(facts)
        assert placement.inputs == _begins(wishes.offload_checkpoint)
        for bundle in facts.bundles:
            homes = placement.bundles[bundle.key]
            for home, wish in (
                (homes.parameters, wishes.offload_param),
                (homes.gradients, wishes.offload_grad),
                (homes.state, wishes.offload_optimizer),
            ):
                assert home.tier == _begins(wish)
                assert (home.tier if home.returns else None) == _goes_back(wish, facts)
            fastest = next(iter(facts.tiers))
            steps_in = "host" if homes.state.device == "cpu" else fastest
            assert steps_in == _step_tier(bundle, facts)
            assert (homes.parameters.device == "device") == ("device" in facts.tiers)
            assert homes.is_pinned == bundle.is_pinned
        windows = {name: placement.ahead_bytes(name, facts.tiers[name]) for name in placement.ahead}
        assert windows == _windows(facts)
        assert list(windows) == list(_windows(facts))
        for has_room in (False, True):
            is_stashed = placement.stashing is Stashing.ALWAYS or (
                placement.stashing is Stashing.WITHOUT_ROOM and not has_room
            )
            assert is_stashed == _stashes(facts, has_room=has_room)
        assert (placement.residents is None) == bool(_windows(facts))
        seen += 1
    assert seen > len(GRID) // 2


def test_what_the_rules_decide_is_never_refused() -> None:
    for facts in GRID:
        try:
            placement = place(facts)
        except ConfigError:
            continue
        check(placement, facts)
        assert obey(placement.to_mapping(), facts) == placement
        assert obey({}, facts) == placement


def test_small_bundles_are_joined_below_a_part_of_what_is_left() -> None:
    assert [small_bytes(left, 1024 * MIB) for left in (0, 63, 64, 64 * MIB)] == [0, 0, 1, MIB]


def test_where_a_quarter_of_the_model_is_left_the_model_says_which_are_joined() -> None:
    assert {small_bytes(left * MIB, 64 * MIB) for left in (16, 17, 64, 1024)} == {MIB // 4}
    assert small_bytes(15 * MIB, 64 * MIB) < MIB // 4


# ---------------------------------------------------------------------- a placement that is given

DEVICE = facts_of(TIERS[3])
HOST = facts_of(TIERS[1], 8 * MIB)
FITTING = facts_of(TIERS[4])


def test_what_a_placement_says_is_obeyed_and_the_rest_is_the_rules() -> None:
    bundles = [
        {"keys": ["param/a"], "state": {"device": "cpu"}, "gradients": {"device": "cpu", "tier": "disk"}}
    ]
    found = obey({"bundles": bundles, "ahead": {"host": 0.5}, "stashing": "always"}, DEVICE)
    ruled = place(DEVICE)
    homes = BundleHomes(Home(), Home("disk", "cpu"), Home(None, "cpu"))
    assert found == replace(
        ruled, bundles={**ruled.bundles, "param/a": homes}, ahead={"host": 0.5}, stashing=Stashing.ALWAYS
    )


@pytest.mark.parametrize("pins", list(itertools.product((False, True, None), repeat=2)))
def test_what_a_placement_pins_or_unpins_is_placed_as_if_it_had_ever_been(
    pins: tuple[bool | None, bool | None],
) -> None:
    said = {each.key: pin for each, pin in zip(BUNDLES, pins, strict=True) if pin is not None}
    mapping = {"bundles": [{"keys": [key], "is_pinned": pin} for key, pin in said.items()]}
    for facts in tried(GRID, of=4):
        so = [replace(each, is_pinned=said.get(each.key, each.is_pinned)) for each in facts.bundles]
        try:
            expected = place(replace(facts, bundles=so))
        except ConfigError:
            continue
        assert obey(mapping, facts) == expected


@pytest.mark.parametrize("device", ["cpu", "device"])
@pytest.mark.parametrize("target", ["cpu", "device"])
def test_gradients_are_where_the_state_is_stepped_unless_they_say_otherwise(device: str, target: str) -> None:
    facts = facts_of(TIERS[3], optimizer_target=target)
    state = {"device": device}
    alone = obey(_of_a(state=state, gradients={"tier": "disk"}), facts)
    assert alone == obey(_of_a(state=state, gradients={"tier": "disk", "device": device}), facts)
    assert alone.bundles["param/a"].gradients == Home("disk", device)
    other = {"cpu": "device", "device": "cpu"}[device]
    with pytest.raises(ConfigError, match="one device makes the step"):
        obey(_of_a(state=state, gradients={"device": other}), facts)


def test_steps_are_planned_where_something_may_leave_or_a_placement_asks_for_it() -> None:
    asks: Sequence[Mapping[str, object]] = (
        {},
        {"ahead": {}},
        {"residents": None},
        {"residents": ["param/a"]},
        {"ahead": {"host": 0.5}},
    )
    for facts in (HOST, DEVICE, FITTING):
        for mapping in asks:
            placement = obey(mapping, facts)
            is_asked = any(mapping.values()) or "residents" in mapping
            assert follows_plan(placement, facts) == (facts is not FITTING or is_asked)


def _of_a(**homes: object) -> dict[str, object]:
    return {"bundles": [{"keys": ["param/a"], **homes}]}


CPU_STEP = {"state": {"device": "cpu"}, "gradients": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("facts", "mapping", "said"),
    [
        (
            DEVICE,
            {"bundles": [{"keys": ["param/x"]}]},
            "param/x: the model has no such bundle; it has param/a",
        ),
        (
            DEVICE,
            _of_a(parameters={"tier": "tape"}),
            "param/a: parameters.tier='tape': this run has device, host",
        ),
        (
            DEVICE,
            _of_a(parameters={"device": "cpu"}),
            "its modules compute on the device; name them in placement.modules",
        ),
        (
            DEVICE,
            _of_a(state={"tier": "device", "returns": True}),
            "state.returns=True: computing happens in",
        ),
        (DEVICE, _of_a(is_pinned=True, **CPU_STEP), "param/a: state.device='cpu': it is pinned"),
        (HOST, _of_a(parameters={"device": "device"}), "parameters.device='device': this run has no device"),
        (HOST, {"ahead": {"disk": 0.5}}, "ahead: disk: nothing is prefetched there; accepted: host"),
        (DEVICE, {"ahead": {"tape": 0.5}}, "ahead: tape"),
        (DEVICE, {"residents": ["param/x"]}, "residents: param/x: the model has no such bundle"),
        (DEVICE, {"high": {"disk": 0.5}}, "high: disk: no tier is below it"),
        (DEVICE, {"high": {"tape": 0.5}}, "high: tape: this run has device, host, disk"),
        (facts_of(TIERS[0]), {"high": {"host": 0.5}}, "high: host: no tier is below it"),
        (HOST, {"shares": {"device": 0.5}}, "shares: device: this run has host, disk"),
        (HOST, {"residents": ["param/x"]}, "residents: param/x: the model has no such bundle"),
        (
            HOST,
            {"residents": ["param/a"], "residents_without_state": ["param/a"]},
            "residents_without_state: param/a: bundles stay whole without optimizer_in_backward",
        ),
        (
            replace(HOST, wishes=Wishes(optimizer_in_backward=True)),
            {"residents": ["param/a"], "residents_without_state": ["param/b"]},
            "residents_without_state: param/b: residents does not name it",
        ),
        (DEVICE, {"stashing": "never"}, "stashing='never': a device"),
        (HOST, {"stashing": "never"}, "stashing='never': everything needs 68.0 MiB"),
        (FITTING, {"stashing": "without-room"}, "stashing='without-room': it is for a device"),
        (
            replace(DEVICE, wishes=Wishes(optimizer_in_backward=True)),
            _of_a(**CPU_STEP),
            "optimizer_in_backward steps where backward computes",
        ),
        (
            replace(DEVICE, bundles=[replace(each, optimizer="Whole") for each in DEVICE.bundles]),
            _of_a(**CPU_STEP),
            "Whole steps all at once, and would step param/a on 'cpu' and param/b on 'device'",
        ),
    ],
)
def test_a_placement_that_does_not_fit_the_run_is_refused_by_name(
    facts: RunFacts, mapping: object, said: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        obey(mapping, facts)
    assert said in str(refusal.value)


def test_a_placement_of_another_model_lists_what_is_missing() -> None:
    with pytest.raises(
        ConfigError, match=r"param/b has no homes\n  buffer/c has no homes|param/b has no homes"
    ):
        check(
            Placement({"param/a": BundleHomes(Home(None, "cpu"), Home(None, "cpu"), Home(None, "cpu"))}), HOST
        )
