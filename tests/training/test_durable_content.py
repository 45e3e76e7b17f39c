"""What a checkpoint keeps, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import tierstore as ts
from tests.training.durable_runs import (
    DURABLE,
    assert_ends_alike,
    begin,
    build,
    some_steps,
    uninterrupted,
)
from tests.training.test_ahead import KINDS
from tests.training.twins import (
    WIDTH,
    Block,
    Trial,
    assert_equal_lists,
    assert_equal_models,
    assert_equal_states,
    blocks,
    build_blocks,
    config_of,
    step,
)
from tierstore.errors import UsageError
from tierstore.training import offload

# ---------------------------------------------------------------------- what


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    extra = {
        "numbers": [1, -2.5, float("inf"), True, None],
        "tuple": (1, ("two",)),
        "dict": {3: "three", "a": {}, None: torch.arange(3)},
        "counter": Counter({30: 2}),
        "scalar": torch.tensor(2.0, dtype=torch.float64),
        "a/b": torch.zeros(2, 0),
        "a": {"b": torch.ones(2).bfloat16()},
    }
    _, run = begin("disk", tmp_path)
    run.checkpoint(extra)
    run.close()
    _, run = begin("disk", tmp_path)
    assert run.resumed is not None
    found = dict(run.resumed.extra)
    for name in ("numbers", "tuple", "counter"):
        assert found[name] == extra[name]
        assert type(found[name]) is type(extra[name])
    assert list(found["dict"]) == [3, "a", None]
    assert torch.equal(found["dict"][None], torch.arange(3))
    assert found["scalar"].dtype is torch.float64
    assert found["scalar"].shape == ()
    assert found["a/b"].shape == (2, 0)
    assert torch.equal(found["a"]["b"], torch.ones(2).bfloat16())
    run.close()


@pytest.mark.parametrize("extra", [[1], [], 0, "step", torch.ones(3)])
def test_what_is_no_mapping_is_refused_with_what_is_accepted(tmp_path: Path, extra: object) -> None:
    _, run = begin("disk", tmp_path)
    run.checkpoint({"step": 0})
    with pytest.raises(UsageError, match=f"given a {type(extra).__name__}; accepted is a mapping of text to"):
        run.checkpoint(extra)  # type: ignore[arg-type]
    run.close()
    _, run = begin("disk", tmp_path)
    assert run.resumed is not None
    assert run.resumed.extra == {"step": 0}
    run.close()


def test_a_value_that_cannot_be_kept_is_named_and_the_former_checkpoint_stays(tmp_path: Path) -> None:
    trial, run = begin("disk", tmp_path)
    run.checkpoint({"step": 0})
    some_steps(trial, 1)
    with pytest.raises(UsageError, match="'extra/what' is a object, which a checkpoint cannot hold"):
        run.checkpoint({"what": object()})
    with pytest.raises(UsageError, match="'extra/sparse' is a Tensor"):
        run.checkpoint({"sparse": torch.eye(2).to_sparse()})
    run.close()
    _, run = begin("disk", tmp_path)
    assert run.resumed is not None
    assert run.resumed.extra == {"step": 0}
    run.close()


Schedulers = list[torch.optim.lr_scheduler.LRScheduler]


def schedule(trial: Trial) -> Schedulers:
    kinds = torch.optim.lr_scheduler
    return [kinds.MultiStepLR(trial.optimizers[0], [2, 4]), kinds.CosineAnnealingLR(trial.optimizers[1], 9)]


def advance(trial: Trial, schedulers: Schedulers, count: int = 3) -> None:
    for _ in range(count):
        step(trial)
        for scheduler in schedulers:
            scheduler.step()


def test_schedulers_that_are_made_before_go_on(tmp_path: Path) -> None:
    plain = Trial(*build())
    torch.manual_seed(1)
    advance(plain, schedule(plain), 6)
    config = config_of("three", tmp_path, DURABLE)
    first = Trial(*build())
    schedulers = schedule(first)
    with offload(first.model, first.optimizers, config) as run:
        torch.manual_seed(1)
        advance(first, schedulers)
        run.checkpoint({"schedulers": [scheduler.state_dict() for scheduler in schedulers]})
        advance(first, schedulers, 1)
    second = Trial(*build(7))
    schedulers = schedule(second)
    with offload(second.model, second.optimizers, config) as run:
        assert run.resumed is not None
        for scheduler, state in zip(schedulers, run.resumed.extra["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        advance(second, schedulers)
        assert_ends_alike(plain, second, run)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_any_optimizer_comes_back(kind: str, tmp_path: Path) -> None:
    def fresh(seed: int) -> Trial:
        torch.manual_seed(seed)
        model = blocks()
        return Trial(model, [KINDS[kind](model)])

    plain, first, second = fresh(0), fresh(0), fresh(1)
    torch.manual_seed(1)
    some_steps(plain, 3)
    config = config_of("disk", tmp_path, DURABLE)
    with offload(first.model, first.optimizers, config) as run:
        torch.manual_seed(1)
        some_steps(first, 2)
        run.checkpoint()
    with offload(second.model, second.optimizers, config) as run:
        some_steps(second, 1)
        assert_ends_alike(plain, second, run)


def test_state_that_somebody_made_since_the_last_step_is_kept(tmp_path: Path) -> None:
    trial, run = begin("disk", tmp_path)
    some_steps(trial, 1)
    own = trial.model.get_parameter("0.up.weight")
    trial.optimizers[0].state[own]["mine"] = torch.full((3, 2), 7.0)
    trial.optimizers[0].state[own]["exp_avg"] = torch.full_like(own, 2.0)
    run.checkpoint()
    run.close()
    trial, run = begin("disk", tmp_path, seed=3)
    state = trial.optimizers[0].state[trial.model.get_parameter("0.up.weight")]
    assert torch.equal(state["mine"].clone(), torch.full((3, 2), 7.0))
    assert bool((state["exp_avg"] == 2.0).all())
    run.close()


def test_state_that_was_loaded_into_the_run_is_what_the_next_checkpoint_keeps(tmp_path: Path) -> None:
    plain = uninterrupted(2)
    trial, run = begin("disk", tmp_path, seed=4)
    some_steps(trial, 1)
    run.checkpoint()
    trial.model.load_state_dict(plain.model.state_dict())
    for mine, other in zip(trial.optimizers, plain.optimizers, strict=True):
        mine.load_state_dict(other.state_dict())
    run.checkpoint()
    run.close()
    resumed, run = begin("disk", tmp_path, seed=6)
    run.close()
    for parameter in plain.model.parameters():
        parameter.grad = None
    assert_equal_models(plain.model, resumed.model)
    for mine, other in zip(plain.optimizers, resumed.optimizers, strict=True):
        assert_equal_states(mine, other)


# ---------------------------------------------------------------------- what is refused


def test_every_difference_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    first, run = begin("disk", tmp_path)
    some_steps(first, 1)
    run.checkpoint({"step": 1})
    run.close()
    norm, head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 6).double()
    model = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), norm, head)
    model.register_buffer("more", torch.zeros(2))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    optimizers = [torch.optim.Adam(groups, lr=1e-3), torch.optim.SGD(model[2:].parameters(), lr=0.1)]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(UsageError) as caught:
        offload(model, optimizers, config_of("disk", tmp_path, DURABLE))
    text = str(caught.value)
    for part in (
        "there is no parameter 3.up.weight (float32[96, 48])",
        "the parameter 4.weight is float64[6, 48], saved was float32[5, 48]",
        "the parameter 3.weight (float32[48]) was not saved",
        "the buffer more (float32[2]) was not saved",
        "optimizer 0 is torch.optim.adam.Adam, saved was torch.optim.adamw.AdamW",
        "optimizer 0 has 2 parameter groups, saved were 1",
        "group 0 of optimizer 1 is without 3.norm.weight, ",
        "and with 3.weight, 3.bias",
        "offload(..., resume=False)",
    ):
        assert part in text
    assert_equal_lists(before, list(model.parameters()))
    _, run = begin("disk", tmp_path)
    assert run.resumed is not None
    assert run.resumed.extra == {"step": 1}
    run.close()


def test_another_number_of_optimizers_is_refused(tmp_path: Path) -> None:
    _, run = begin("disk", tmp_path)
    run.checkpoint()
    run.close()
    model, optimizers = build()
    with pytest.raises(UsageError, match="2 optimizers were saved, there are 1"):
        offload(model, optimizers[0], config_of("disk", tmp_path, DURABLE))


def test_parameters_in_another_order_are_refused(tmp_path: Path) -> None:
    model, _ = build_blocks()
    config = config_of("disk", tmp_path, DURABLE)
    with offload(model, torch.optim.Adam(model.parameters()), config) as run:
        run.checkpoint()
    with pytest.raises(UsageError, match="group 0 of optimizer 0 is in another order"):
        offload(model, torch.optim.Adam(reversed(list(model.parameters()))), config)


def test_a_directory_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    config = ts.OffloadConfig.from_mapping(config_of("disk", tmp_path, DURABLE))
    with ts.Store(config.store_config()) as store:
        store.put("mine", torch.ones(3))
    for resume in (True, False):
        with pytest.raises(UsageError, match=r"holds 1 keys \('mine'\) that are no checkpoint"):
            begin("disk", tmp_path, resume=resume)
    with ts.Store(config.store_config()) as store:
        assert torch.equal(store.get("mine"), torch.ones(3))


def test_keys_of_the_caller_beside_the_training_stay_his(tmp_path: Path) -> None:
    trial, run = begin("disk", tmp_path)
    some_steps(trial, 1)
    run.checkpoint({"step": 1})
    run.store.put("mine", torch.ones(3))
    run.store.flush("mine")  # leaves the checkpoint as it is
    some_steps(trial, 1)
    run.close()
    _, run = begin("disk", tmp_path, resume=True)
    assert run.resumed is not None
    assert run.resumed.extra == {"step": 1}
    run.close()
    _, run = begin("disk", tmp_path, resume=False)
    assert torch.equal(run.store.get("mine"), torch.ones(3))
    run.close()


def test_a_flush_of_the_whole_store_between_checkpoints_is_not_taken_for_one(tmp_path: Path) -> None:
    trial, run = begin("disk", tmp_path)
    run.checkpoint()
    some_steps(trial, 1)
    run.store.flush()
    run.close()
    with pytest.raises(UsageError, match=r"flushed or closed as a whole between checkpoints.*resume=False"):
        begin("disk", tmp_path)
    trial, run = begin("disk", tmp_path, resume=False)
    run.checkpoint({"again": True})
    run.close()
    _, run = begin("disk", tmp_path)
    assert run.resumed is not None
    run.close()


def test_without_a_durable_store_a_checkpoint_says_what_to_set(tmp_path: Path) -> None:
    model, optimizers = build()
    with offload(model, optimizers, config_of("disk", tmp_path)) as run:
        assert run.resumed is None
        with pytest.raises(UsageError, match=r"scratch space.*Set durable=True"):
            run.checkpoint()
    with pytest.raises(UsageError, match="the run is closed"):
        run.checkpoint()
    with (
        offload(model, optimizers, {"memory_offload": "OFF"}) as run,
        pytest.raises(UsageError, match=r"memory_offload is OFF.*Set it to ON and durable to true"),
    ):
        run.checkpoint()


def test_an_optimizer_of_what_is_not_in_the_model_is_refused_at_once(tmp_path: Path) -> None:
    model, _ = build_blocks()
    other = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.1)
    with pytest.raises(UsageError, match=r"a parameter of shape \[3\] that is not in the model"):
        offload(model, optimizer, config_of("disk", tmp_path, DURABLE))


def test_a_parameter_that_is_new_is_named(tmp_path: Path) -> None:
    trial, run = begin("disk", tmp_path)
    trial.model.register_parameter("late", nn.Parameter(torch.zeros(2)))
    with pytest.raises(UsageError, match="the parameter 'late' is new since offload"):
        run.checkpoint()
    run.close()


class TwoNames(nn.Module):
    """Has one buffer under a name that state dicts leave out, and under one that they hold."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("kept", self.get_buffer("cache"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count."""
        self.kept.add_(1)
        return x + self.kept


def test_a_buffer_is_kept_if_one_of_its_names_is(tmp_path: Path) -> None:
    model, config = TwoNames(), config_of("disk", tmp_path, {"durable": True})
    with offload(model, None, config) as run:
        model(torch.ones(2))
        run.checkpoint()
        run.save(tmp_path / "saved")
    model = TwoNames()
    with offload(model, None, config):
        assert model.kept.tolist() == [1, 1]
        assert model.kept is model.get_buffer("cache")
    model = TwoNames()
    with offload(model, None, config_of("disk", tmp_path / "other")) as run:
        run.load(tmp_path / "saved")
        assert model.kept.tolist() == [1, 1]
