"""``ignored=`` and ``pinned=``: what the store does not touch, and what never leaves its fastest tier."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from tests.training.twins import (
    WIDTH,
    Block,
    Optimizer,
    Trial,
    adam,
    assert_equal_lists,
    assert_equal_models,
    assert_equal_states,
    batch,
    blocks,
    config_of,
    every_layout,
    loss_of,
    step,
    steps,
    with_device,
)
from tierstore.errors import CapacityError, ConfigError, UsageError
from tierstore.testing.memory import DeviceBudget
from tierstore.training import Offload, offload
from tierstore.training.bundles.grouping import group_parameters
from tierstore.training.faults import guard
from tierstore.training.selection import SelectedTensors, select

IGNORED = [r"1\.up", r"2\.norm\.weight"]
PINNED = [r"0", r"3\.weight"]
Loop = Callable[[Trial], None]


def run_both(
    layout: str,
    path: Path,
    loop: Loop,
    selected: Mapping[str, Sequence[str]],
    *,
    build: Callable[[], tuple[nn.Module, Sequence[Optimizer]]],
    more: Mapping[str, object] | None = None,
    look: Callable[[Offload], None] = lambda _: None,
) -> tuple[Trial, Trial]:
    """Run a loop plain and offloaded with a selection; all has to be the same bits."""
    trials = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        trial = Trial(*build())
        torch.manual_seed(1)
        trials.append(trial)
        if not is_ours:
            loop(trial)
            continue
        config = config_of(layout, path, with_device(layout, "300KB") | {**(more or {})})
        with offload(trial.model, list(trial.optimizers), config, **selected) as run:  # type: ignore[arg-type]
            trial.run = run
            torch.manual_seed(1)
            look(run)
            loop(trial)
            look(run)
            run.store.check()
    plain, ours = trials
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)
    for expected, found in zip(plain.optimizers, ours.optimizers, strict=True):
        assert_equal_states(expected, found)
    return plain, ours


def build_two() -> tuple[nn.Module, Sequence[Optimizer]]:
    """Return a model with shared and frozen parameters and two optimizers."""
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, 5))
    model.get_submodule("2.down").weight = model.get_submodule("1.down").weight
    model.get_parameter("0.up.bias").requires_grad = False
    parameters = list(model.parameters())
    return model, [AdamW(parameters[:7], lr=1e-2), SGD(parameters[7:], lr=0.1, momentum=0.9)]


def clipping(trial: Trial) -> None:
    """Train with accumulation, clipping, a state dict in the middle and an evaluation."""
    for number in range(4):
        for _ in range(2):
            loss = loss_of(trial.model, *batch())
            loss.backward()
            trial.log(loss)
        trial.log(nn.utils.clip_grad_norm_(trial.model.parameters(), 0.5))
        trial.log_gradients()
        for optimizer in trial.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        for tensor in trial.model.state_dict().values():
            trial.log(tensor)
        with torch.no_grad():
            trial.log(trial.model(batch()[0]))


@pytest.mark.parametrize("loop", [steps(4), clipping], ids=["steps", "clipping"])
@pytest.mark.parametrize(
    "selected", [{"ignored": IGNORED}, {"pinned": PINNED}, {"ignored": IGNORED, "pinned": PINNED}],
    ids=["ignored", "pinned", "both"],
)  # fmt: skip
@every_layout
def test_all_bits_are_those_of_plain_pytorch(
    layout: str, selected: Mapping[str, Sequence[str]], loop: Loop, tmp_path: Path
) -> None:
    run_both(layout, tmp_path, loop, selected, build=build_two)


@pytest.mark.parametrize("target", ["device", "cpu"])
@every_layout
def test_an_optimizer_on_the_cpu_steps_pinned_parameters_where_they_are(
    layout: str, target: str, tmp_path: Path
) -> None:
    def look(run: Offload) -> None:
        for key in {_key_of(each) for each in (*pinned[0].parameters(), pinned[3].get_parameter("weight"))}:
            assert run.store.where(key)[0] == run.store.tier_names[0]

    pinned: list[nn.Module] = []

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model, optimizers = build_two()
        pinned[:] = model.children()
        return model, optimizers

    more = {"optimizer_target": target}
    run_both(layout, tmp_path, steps(4), {"pinned": PINNED}, build=build, more=more, look=look)


class Whole(SGD):
    """Not known to treat each parameter by itself: it is stepped as a whole."""


def build_whole() -> tuple[nn.Module, Sequence[Optimizer]]:
    model, _ = build_two()
    return model, [Whole(model.parameters(), lr=0.1, momentum=0.9)]


@every_layout
def test_an_optimizer_that_is_stepped_as_a_whole_sees_all_of_them(layout: str, tmp_path: Path) -> None:
    more = with_device(layout, "600KB") or {"offload_cpu_size": "600KB"}
    run_both(layout, tmp_path, steps(3), {"ignored": IGNORED, "pinned": PINNED}, build=build_whole, more=more)


def test_what_stays_on_the_device_cannot_be_stepped_as_a_whole_in_host_memory(tmp_path: Path) -> None:
    model, optimizers = build_whole()
    for layout in ("device", "disk"):
        config = config_of(layout, tmp_path, {"optimizer_target": "cpu"} | with_device(layout, "600KB"))
        if layout == "disk":  # computing happens there
            with offload(model, optimizers, config, pinned=["3"]):
                continue
        with pytest.raises(UsageError, match=r"'3\.weight' is pinned .*Whole would step it in host memory"):
            offload(model, optimizers, config, pinned=["3"])
        with offload(model, optimizers, config, ignored=["3"]):
            pass


# ---------------------------------------------------------------------- ignored


@every_layout
def test_an_ignored_parameter_is_never_touched(layout: str, tmp_path: Path) -> None:
    trial = Trial(model := blocks(), adam(model))
    ignored = dict(model.get_submodule("1.up").named_parameters())
    before = {name: (each.data_ptr(), type(each)) for name, each in ignored.items()}
    config = config_of(layout, tmp_path, with_device(layout, "300KB"))
    with offload(model, trial.optimizers, config, ignored=[r"1\.up"]) as run:
        steps(2)(trial)
        for name, each in ignored.items():
            assert (each.data_ptr(), type(each)) == before[name]
            assert guard.guarded_tensor_of(each) is None
            assert all(
                guard.guarded_tensor_of(value) is None for value in trial.optimizer.state[each].values()
            )
        assert not any("1.up" in key for key in run.store)
    for name, each in ignored.items():
        assert (each.data_ptr(), type(each)) == before[name]


def test_an_ignored_parameter_may_be_what_the_store_could_not_hold(tmp_path: Path) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.later = nn.LazyLinear(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.later(self.linear(x))
            return result

    torch.manual_seed(0)
    plain = Lazy()
    model = copy.deepcopy(plain)
    inputs = batch()[0]
    with pytest.raises(UsageError, match=r"'later\.weight' cannot be offloaded: it has no shape yet"):
        offload(copy.deepcopy(plain), None, config_of("disk", tmp_path))
    with offload(model, None, config_of("disk", tmp_path), ignored=["later"]):
        torch.manual_seed(1)
        found = model(inputs)
    torch.manual_seed(1)
    assert torch.equal(plain(inputs), found)


def test_ignored_parameters_count_as_the_programs_on_the_device(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        return model, [SGD(model.parameters(), lr=0.1)]

    with DeviceBudget(256 << 10) as budget:
        trial = Trial(*build())
        config = config_of("device", tmp_path, {"max_device_memory": "256KB"})
        with offload(trial.model, trial.optimizers, config, ignored=["[0-3]"]):
            for _ in range(4):
                loss: Tensor = trial.model(torch.ones(4, 64)).sum()
                loss.backward()
                trial.optimizer.step()
                trial.optimizer.zero_grad()
            assert budget.peak_bytes > 4 * 65 * 64 * 4


@every_layout
def test_weights_and_checkpoints_hold_what_is_ignored(layout: str, tmp_path: Path) -> None:
    plain = Trial(*build_two())
    torch.manual_seed(3)
    steps(1)(plain)
    ours = Trial(*build_two())
    config = config_of(layout, tmp_path, with_device(layout, "300KB"))
    with offload(ours.model, ours.optimizers, config, ignored=IGNORED) as run:
        ours.model.load_state_dict(plain.model.state_dict())
        for mine, other in zip(ours.optimizers, plain.optimizers, strict=True):
            mine.load_state_dict(copy.deepcopy(other.state_dict()))
        run.save(tmp_path / "saved")
        steps(2)(ours)
        run.load(tmp_path / "saved")
        ours.logged.clear()
        torch.manual_seed(4)
        steps(2)(ours)
    plain.logged.clear()
    torch.manual_seed(4)
    steps(2)(plain)
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)
    for expected, found in zip(plain.optimizers, ours.optimizers, strict=True):
        assert_equal_states(expected, found)
    with torch.device("meta"):
        empty, _ = build_two()
    with offload(empty, None, config_of(layout, tmp_path), ignored=IGNORED, weights=tmp_path / "saved"):
        assert type(empty.get_parameter("1.up.weight")) is nn.Parameter
        assert not empty.get_parameter("1.up.weight").is_meta


def test_an_ignored_parameter_without_values_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = blocks()
    for each in (model[0], model[2], model[3]):
        each.to_empty(device="cpu")
    with pytest.raises(UsageError, match=r"'1\.norm\.weight'.*on the meta device and has no values"):
        offload(model, None, config_of("host", tmp_path), ignored=["1"])


CHANGES = [((), IGNORED), (IGNORED, ()), (IGNORED, IGNORED), (IGNORED, [r"0\.down"])]


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=["more", "fewer", "same", "others"])
@pytest.mark.parametrize("pinned", [(), [r"3"]], ids=["", "pinned"])
@pytest.mark.parametrize("layout", ["disk", "three"])
def test_training_resumes_whatever_is_ignored_now(
    layout: str, pinned: Sequence[str], before: Sequence[str], after: Sequence[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = Trial(*build_two())
    torch.manual_seed(1)
    steps(4)(plain)
    config = config_of(layout, tmp_path, {"durable": True, "offload_disk_size": "64MB"})
    config |= with_device(layout, "300KB")
    torch.manual_seed(0)
    first = Trial(*build_two())
    with offload(first.model, first.optimizers, config, ignored=before, pinned=pinned) as run:
        torch.manual_seed(1)
        steps(1)(first)
        run.checkpoint()
        steps(1)(first)  # on what was pinned before the checkpoint, and is again
        run.checkpoint()
    torch.manual_seed(7)
    second = Trial(*build_two())
    with offload(second.model, second.optimizers, config, ignored=after) as run:
        assert run.resumed is not None
        steps(2)(second)
    assert_equal_lists(plain.logged, first.logged + second.logged)
    assert_equal_models(plain.model, second.model)
    for expected, found in zip(plain.optimizers, second.optimizers, strict=True):
        assert_equal_states(expected, found)


# ---------------------------------------------------------------------- pinned


@every_layout
def test_a_pinned_parameter_never_leaves_the_fastest_tier(layout: str, tmp_path: Path) -> None:
    trial = Trial(model := blocks(6), adam(model))
    assert isinstance(model, nn.Sequential)
    config = config_of(layout, tmp_path, with_device(layout, "300KB"))
    with offload(model, trial.optimizers, config, pinned=[r"1"]) as run:
        keys = {_key_of(each) for each in model[1].parameters()}
        fastest = run.store.tier_names[0]
        moved: list[tuple[str, ...]] = []
        for module in model[2:].modules():
            module.register_forward_hook(lambda *_: moved.extend(map(run.store.where, keys)))
            module.register_full_backward_hook(lambda *_: moved.extend(map(run.store.where, keys)))
        steps(3)(trial)
        assert moved
        assert all(where[0] == fastest for where in moved)


def _key_of(parameter: Tensor) -> str:
    guarded_tensor = guard.guarded_tensor_of(parameter)
    assert guarded_tensor is not None
    return guarded_tensor.binding.key


def test_what_is_pinned_has_to_fit_beside_the_largest_working_set(tmp_path: Path) -> None:
    model = blocks(6)
    with pytest.raises(CapacityError, match=r"beside .* that are pinned.*Pin fewer parameters"):
        offload(
            model, adam(model), config_of("device", tmp_path, {"max_device_memory": "160KB"}), pinned=[".*"]
        )
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    with pytest.raises(CapacityError, match=r"in host memory: beside .* pinned.*offload_cpu_size"):
        offload(model, adam(model), config_of("disk", tmp_path, {"offload_cpu_size": "160KB"}), pinned=[".*"])
    with offload(model, adam(model), config_of("device", tmp_path, {"max_device_memory": "160KB"})):
        pass


def test_pinned_parameters_travel_apart_from_others() -> None:
    model = blocks()
    pinned = {model.get_parameter("0.up.weight"): "0.up.weight"}
    groups = group_parameters(model, adam(model), pinned=pinned)
    assert [group.names for group in groups if group.is_pinned] == [["0.up.weight"]]
    assert sum(len(group.names) for group in groups) == len(list(model.parameters()))


# ---------------------------------------------------------------------- patterns


def test_both_ignored_and_pinned_is_refused(tmp_path: Path) -> None:
    model = blocks()
    with pytest.raises(UsageError, match=r"2 parameters are both ignored and pinned \('1\.up\.weight'"):
        offload(model, None, config_of("host", tmp_path), ignored=[r".*\.up"], pinned=[r"1\.up"])
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_a_pattern_that_means_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tierstore"):
        assert not select(blocks(), ["nowhere"], ["0.up.weight", "0.up"]).pinned
    hint = "levels are separated by a backslash and a point"
    assert [record.message for record in caplog.records] == [
        "ignored 'nowhere' means no parameter or buffer of the model",
        rf"pinned '0.up.weight' means no parameter or buffer of the model: {hint}, '0\.up\.weight'",
        rf"pinned '0.up' means no parameter or buffer of the model: {hint}, '0\.up'",
    ]


@pytest.mark.parametrize(
    ("patterns", "error"),
    [(["("], ConfigError), ([r"a\.\.b"], ConfigError), ([""], ConfigError), ([r"aten\.mm"], UsageError),
     ("0", UsageError)],
)  # fmt: skip
@pytest.mark.parametrize("what", ["ignored", "pinned"])
def test_what_is_no_pattern_is_refused(
    what: str, patterns: Sequence[str], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        offload(blocks(), None, config_of("host", tmp_path), **{what: patterns})  # type: ignore[arg-type]


def test_a_document_may_say_what_is_ignored_and_pinned(tmp_path: Path) -> None:
    model = blocks()
    config = config_of("three", tmp_path, {"ignored": [r"0\.up"], "max_device_memory": "300KB"})
    with offload(model, None, config, ignored=[r"0\.down"], pinned=["3"]) as run:
        kept = set(run.store)
    document = {"offload_config": config | {"ignored": [r"0\.(up|down)"], "pinned": ["3"]}}
    with offload(model, None, document) as run:
        assert set(run.store) == kept
    assert not any(".up" in key and key.startswith("param/0") for key in kept)


@given(
    depth=st.integers(1, 3),
    chosen=st.sets(st.integers(0, 11), max_size=4),
)
def test_a_name_means_itself_and_what_is_below(depth: int, chosen: set[int]) -> None:
    model = blocks()
    names = [name for name, _ in model.named_parameters()]
    texts = [r"\.".join(names[index % len(names)].split(".")[:depth]) for index in chosen]
    prefixes = [text.replace(r"\.", ".") for text in texts]
    expected = {
        name for name in names if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
    }
    assert set(select(model, texts, []).ignored.values()) == expected


def test_one_name_of_a_shared_parameter_is_enough() -> None:
    model, _ = build_two()
    assert list(select(model, [r"2\.down\.weight"], []).ignored.values()) == ["1.down.weight"]


def test_nothing_is_selected_where_nothing_is_said() -> None:
    assert select(blocks(), [], []) == SelectedTensors()


def test_the_work_of_patterns_grows_with_the_names() -> None:
    def seconds(count: int) -> float:
        model = nn.ParameterDict({f"p{number}": torch.zeros(1) for number in range(count)})
        begin = time.process_time()
        select(model, [r"p\d*7", "other"], [r"p\d*3"])
        return time.process_time() - begin

    few = min(seconds(1000) for _ in range(3))
    assert seconds(10_000) < 40 * few


def test_a_step_that_fails_leaves_pinned_and_ignored_as_they_are(tmp_path: Path) -> None:
    trial = Trial(model := blocks(), adam(model))
    config = config_of("three", tmp_path, {"max_device_memory": "300KB"})
    with offload(model, trial.optimizers, config, ignored=IGNORED, pinned=["0"]):
        handle = model[1].register_forward_pre_hook(_fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            step(trial)
        handle.remove()
        for optimizer in trial.optimizers:
            optimizer.zero_grad()
        step(trial)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def _fail(*_: object) -> None:
    raise RuntimeError("in the middle")
