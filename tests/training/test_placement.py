"""``placement:`` and ``run.placement``: what is decided can be read, given, and is obeyed bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from tests.training import one_budget
from tests.training.one_budget import RECOMPUTES, SWAPS
from tests.training.quiet import be_quiet
from tests.training.twins import (
    LAYOUTS,
    Loop,
    Optimizer,
    Trial,
    adam,
    assert_same,
    batch,
    blocks,
    build_blocks,
    config_of,
    every_layout,
    is_on_accelerator,
    is_simulated,
    loss_of,
    step,
    steps,
    with_device,
)
from tierstore.errors import ConfigError, TierStoreError, UsageError
from tierstore.planning import Placement, Stashing, Treatment
from tierstore.store import Store
from tierstore.training import Offload, offload
from tierstore.training.bundles.bindings import Binding, Bindings
from tierstore.training.faults import guard
from tierstore.training.optimizers import steps_by_bundle
from tierstore.training.optimizers.step_units import placed
from tierstore.training.session import Session

PATIENCE_S = 60.0

UP, DOWN = "param/0.up.weight", "param/1.down.weight"
ROOM = "240KB"  # for a step in host memory, and for what is pinned


def observed(look: Callable[[Offload], None], count: int = 3) -> Loop:
    """Return a loop of steps, after each of which an offloaded run is looked at."""

    def loop(trial: Trial) -> None:
        for _ in range(count):
            step(trial)
            if trial.run is not None:
                look(trial.run)

    return loop


def given(*bundles: Mapping[str, object], **more: object) -> dict[str, object]:
    return {"placement": {"bundles": list(bundles), **more}}


def bundle(key: str, **homes: object) -> dict[str, object]:
    return {"bundles": [{"keys": [key], **homes}]}


# ---------------------------------------------------------------------- what can be read


@every_layout
def test_a_run_says_where_everything_lives(layout: str, tmp_path: Path) -> None:
    model, optimizers = build_blocks()
    with offload(model, list(optimizers), config_of(layout, tmp_path)) as run:
        guarded = [guard.guarded_tensor_of(each) for each in model.parameters()]
        keys = {each.binding.key for each in guarded if each is not None}
        assert run.placement.bundles.keys() == keys
        has_device = "device" in run.store.tier_names
        assert {each.parameters.device for each in run.placement.bundles.values()} == {
            "device" if has_device else "cpu"
        }
        assert str(run.placement).startswith(f"{len(keys)} bundles; ")
        assert Placement.from_yaml(run.placement.to_yaml()) == run.placement


def test_residents_are_chosen_when_a_step_has_run(tmp_path: Path) -> None:
    trial = Trial(*build_blocks())
    config = config_of("disk", tmp_path, {"offload_cpu_size": "280KB"})
    with offload(trial.model, list(trial.optimizers), config) as run:
        first = run.placement
        steps(3)(trial)
        residents = run.placement.residents
        assert first.residents is None
        assert residents
        assert residents < run.placement.bundles.keys()
        assert isinstance(residents, frozenset)
        assert hash(run.placement) != hash(first)


def test_a_run_without_a_store_has_no_placement() -> None:
    with (
        offload(blocks(), None, {"memory_offload": "OFF"}) as run,
        pytest.raises(UsageError, match="nothing is placed"),
    ):
        _ = run.placement


# ---------------------------------------------------------------------- what can be given


@every_layout
def test_the_placement_of_a_run_given_to_the_next_is_its_own(layout: str, tmp_path: Path) -> None:
    model, optimizers = build_blocks()
    with offload(model, list(optimizers), config_of(layout, tmp_path)) as run:
        first = run.placement
    path = tmp_path / "run.yaml"
    document = {"offload_config": {**config_of(layout, tmp_path), "placement": first.to_mapping()}}
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    with offload(model, list(optimizers), path) as run:
        assert run.placement == first


def test_bundles_go_back_to_different_tiers_after_use(tmp_path: Path) -> None:
    at_disk = {"keys": [UP], "parameters": {"tier": "disk", "returns": True}}
    state_at_disk = {"keys": [DOWN], "state": {"tier": "disk", "returns": True}}

    def on_disk_alone(run: Offload) -> set[str]:
        keys = [key for key in run.store if not key.startswith("grad")]
        return {key for key in keys if run.store.where(key)[0] == "disk"}

    def look(run: Offload) -> None:
        assert {f"state/0/{UP[6:]}", f"state/0/{DOWN[6:]}"} < set(run.store)
        begin_s = time.monotonic()
        while on_disk_alone(run) != {UP, f"state/0/{DOWN[6:]}"}:  # they are on their way
            assert time.monotonic() - begin_s < PATIENCE_S

    more = {**given(at_disk, state_at_disk), "offload_cpu_size": "1100KB"}  # there is room for everything
    assert_same(build_blocks, observed(look), "disk", tmp_path, more)


@pytest.mark.skipif(is_on_accelerator and not is_simulated, reason="a GPU rounds otherwise than the CPU")
def test_one_bundle_is_stepped_in_host_memory_and_the_others_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers: dict[str, set[str]] = {}

    def note(bindings: Bindings, needed: Sequence[Binding], tier: str) -> AbstractContextManager[None]:
        tiers.setdefault(needed[0].key, set()).add(tier)
        return placed(bindings, needed, tier)

    monkeypatch.setattr(steps_by_bundle, "placed", note)
    cpu = {"keys": [UP], "state": {"device": "cpu"}, "gradients": {"device": "cpu"}}
    more = {**given(cpu), "offload_cpu_size": "64MB", **with_device("three", ROOM)}
    assert_same(build_blocks, steps(3), "three", tmp_path, more)
    assert tiers.pop(UP) == {"host"}
    assert tiers
    assert set.union(*tiers.values()) == {"device"}


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each != "host"])
def test_what_a_placement_pins_never_leaves(layout: str, tmp_path: Path) -> None:
    def look(run: Offload) -> None:
        assert run.store.where(UP)[0] == run.store.tier_names[0]

    more = with_device(layout, ROOM) or {"offload_cpu_size": ROOM}
    assert_same(
        build_blocks, observed(look), layout, tmp_path, {**given({"keys": [UP], "is_pinned": True}), **more}
    )


@every_layout
def test_gradients_are_stashed_as_a_placement_says(layout: str, tmp_path: Path) -> None:
    stashed: list[bool] = []

    def loop(trial: Trial) -> None:
        for _ in range(4):
            loss_of(trial.model, *batch()).backward()
            if trial.run is not None:
                stashed.append(
                    all(
                        guard.guarded_tensor_of(p.grad)
                        for p in trial.model.parameters()
                        if p.grad is not None
                    )
                )
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    more = {**given(stashing="always"), **with_device(layout, "4MB")}  # with room for all of them
    assert_same(build_blocks, loop, layout, tmp_path, more)
    assert all(stashed)


@pytest.mark.parametrize("ahead", [{}, {"host": 0.25}])
@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each != "host"])
def test_prefetched_is_only_where_something_may_be_ahead(
    ahead: Mapping[str, float], layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers: set[str] = set()
    prefetch = Store.prefetch

    def note(store: Store, *keys: str, tier: str | None = None) -> object:
        tiers.add(tier or store.tier_names[0])
        return prefetch(store, *keys, tier=tier or store.tier_names[0])

    monkeypatch.setattr(Store, "prefetch", note)
    assert_same(build_blocks, steps(4), layout, tmp_path, given(ahead=ahead))
    assert tiers <= ahead.keys()
    assert bool(tiers) or layout == "device" or not ahead


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if "max_device_memory" in LAYOUTS[each]])
def test_an_optimizer_that_steps_only_what_is_pinned_steps_it_on_the_device(
    layout: str, tmp_path: Path
) -> None:
    class Whole(torch.optim.SGD):
        """Not known to treat each parameter by itself."""

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [Whole(model[3].parameters(), lr=0.1, momentum=0.9), *adam(model[:3])]

    more = {
        "pinned": ["3"],
        "optimizer_target": "cpu",
        "offload_cpu_size": "64MB",
        **with_device(layout, "600KB"),
    }
    assert_same(build, steps(3), layout, tmp_path, more)


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if "max_device_memory" in LAYOUTS[each]])
def test_what_a_placement_unpins_may_be_stepped_in_host_memory_with_all_others(
    layout: str, tmp_path: Path
) -> None:
    class WholeToo(torch.optim.SGD):
        """Not known to treat each parameter by itself."""

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [WholeToo(model.parameters(), lr=0.1, momentum=0.9)]

    more = {
        "pinned": ["3"],
        "optimizer_target": "cpu",
        "offload_cpu_size": "64MB",
        **with_device(layout, "600KB"),
    }
    with pytest.raises(UsageError, match="is pinned and stays on the device"):
        offload(*build(), config_of(layout, tmp_path, more))
    unpinned = given({"keys": ["param/3.weight"], "is_pinned": False})
    assert_same(build, steps(3), layout, tmp_path, {**more, **unpinned})


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if "max_device_memory" in LAYOUTS[each]])
def test_what_a_placement_pins_is_stepped_on_the_device_whatever_the_target(
    layout: str, tmp_path: Path
) -> None:
    more = {
        **given({"keys": [UP], "is_pinned": True}),
        "optimizer_target": "cpu",
        "offload_cpu_size": "64MB",
        **with_device(layout, ROOM),
    }
    assert_same(build_blocks, steps(3), layout, tmp_path, more)


@pytest.mark.parametrize("more", [{}, {"ahead": {}}])
def test_residents_that_are_given_stay_and_no_others_are_chosen(
    more: Mapping[str, object], tmp_path: Path
) -> None:
    plans: list[bool] = []

    def look(run: Offload) -> None:
        assert run.placement.residents == frozenset({DOWN})
        assert run.store.where(DOWN)[0] == "host"

        assert run._session is not None
        plans.append(run._session.prefetcher.has_plan)

    room = {"offload_cpu_size": "300KB"}
    assert_same(
        build_blocks, observed(look, 4), "disk", tmp_path, {**given(residents=[DOWN], **more), **room}
    )
    assert plans == [False, True, True, True]


IN_BACKWARD = {"optimizer_in_backward": True, "offload_cpu_size": "200KB"}


def _state_in(run: Offload) -> dict[str, str]:
    """Return the fastest tier that each bundle's state is in, when nothing is under way any more."""
    be_quiet(run.store)
    return {
        key.removeprefix("state/0/"): run.store.where(key)[0] for key in run.store if key.startswith("state/")
    }


def test_where_backward_steps_parameters_stay_without_state_that_goes_down_after_its_step(
    tmp_path: Path,
) -> None:
    trial = Trial(*build_blocks())
    with offload(trial.model, list(trial.optimizers), config_of("disk", tmp_path / "a", IN_BACKWARD)) as run:
        steps(4)(trial)
        chosen = run.placement
        residents, without = chosen.residents, chosen.residents_without_state
        assert residents
        assert without
        assert without < residents
        where = _state_in(run)
        staying = {key.removeprefix("param/") for key in residents - without}
        assert {key for key, tier in where.items() if tier == "host"} == staying
    again = {**IN_BACKWARD, "placement": chosen.to_mapping()}
    trial = Trial(*build_blocks())
    with offload(trial.model, list(trial.optimizers), config_of("disk", tmp_path / "b", again)) as run:
        steps(4)(trial)
        assert run.placement == chosen
        assert _state_in(run) == where


def test_residents_are_chosen_where_null_asks_for_it_though_everything_fits(tmp_path: Path) -> None:
    trial = Trial(*build_blocks())
    config = config_of("host", tmp_path, {**given(residents=None), "offload_cpu_size": "64MB"})
    with offload(trial.model, list(trial.optimizers), config) as run:
        first = run.placement
        steps(3)(trial)
        assert first.residents is None
        assert run.placement.residents is not None


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("layout", "placement", "said"),
    [
        ("disk", bundle("param/9.weight"), r"param/9\.weight: the model has no such bundle"),
        ("host", bundle(UP, state={"tier": "disk"}), r"state\.tier='disk': this run has host"),
        ("device", bundle(UP, parameters={"device": "cpu"}), "modules compute on the device"),
        ("disk", {"stashing": "never"}, "stashing='never': everything needs"),
        ("disk", {"placement": {}}, "placement: placement"),
    ],
)
def test_a_placement_that_can_not_be_right_is_refused_before_anything_changes(
    layout: str, placement: Mapping[str, object], said: str, tmp_path: Path
) -> None:
    if layout not in LAYOUTS:
        pytest.skip("there is no such layout here")
    model = blocks()
    before = [(each.data_ptr(), type(each)) for each in model.parameters()]
    with pytest.raises(ConfigError, match=said):
        offload(model, adam(model), config_of(layout, tmp_path, {"placement": placement}))
    assert [(each.data_ptr(), type(each)) for each in model.parameters()] == before
    loss_of(model, *batch()).backward()


@pytest.mark.parametrize(
    ("marks", "layers", "said"),
    [
        ([{"layer": 0, "operators": "", "treatment": "keep"}], None, "recompute_config decide these"),
        ([], "nowhere", "layers='nowhere'"),
    ],
)
def test_what_is_said_of_activations_is_refused_before_anything_is_taken_in(
    marks: Sequence[object], layers: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "adopt", None)  # nothing comes this far
    model = one_budget.build().model
    document = one_budget.document(
        tmp_path, swap="operators swapped", recompute="a layer recomputed", placement={"marks": marks}
    )
    with pytest.raises((ConfigError, UsageError), match=said):
        offload(model, adam(model), document, layers=layers)


def test_more_is_pinned_than_there_is_room_for(tmp_path: Path) -> None:
    model = blocks()
    with offload(model, adam(model), config_of("disk", tmp_path)) as run:
        keys = list(run.placement.bundles)
    with pytest.raises(TierStoreError, match="that are pinned"):
        offload(model, adam(model), config_of("disk", tmp_path, given({"keys": keys, "is_pinned": True})))


def test_the_enumeration_of_stashing_is_what_a_run_prints(tmp_path: Path) -> None:
    with offload(blocks(), None, config_of("host", tmp_path)) as run:
        assert run.placement.stashing is Stashing.NEVER
        assert "stashed: never" in str(run.placement)


# ---------------------------------------------------------------------- activations


@pytest.mark.parametrize("again", RECOMPUTES)
@pytest.mark.parametrize("swapped", SWAPS)
def test_a_run_says_what_happens_to_activations(swapped: str, again: str, tmp_path: Path) -> None:
    layers = range(one_budget.LAYERS)
    patterns = {
        "no swap": [],
        "layers swapped": [""],
        "operators swapped": ["attention", r"feed_forward\.mul", "aten.silu"],
    }[swapped]
    said = {(layer, pattern, Treatment.SWAP) for layer in layers for pattern in patterns}
    if again == "a layer recomputed":
        said |= {(0, "", Treatment.RECOMPUTE)}
    if again == "operators recomputed":
        said |= {(layer, "feed_forward", Treatment.RECOMPUTE) for layer in (layers if not patterns else [0])}
    model = one_budget.build().model
    with offload(model, adam(model), one_budget.document(tmp_path, swap=swapped, recompute=again)) as run:
        first = run.placement
    assert {(mark.layer, mark.operators, mark.treatment) for mark in first.marks} == said
    assert all(mark.ahead == 2 * (mark.treatment is Treatment.SWAP) for mark in first.marks)
    if swapped == "no swap":
        return
    for more in (first.to_mapping(), {**first.to_mapping(), "marks": []}):
        document = one_budget.document(tmp_path, swap=swapped, recompute=again, placement=more)
        with offload(model, adam(model), document) as run:
            assert run.placement == first
    other = one_budget.document(tmp_path, swap="no swap", recompute=again, placement=first.to_mapping())
    with pytest.raises(ConfigError, match="swap_config and recompute_config decide these"):
        offload(model, adam(model), other)
