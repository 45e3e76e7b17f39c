"""When a checkpoint may be made, and what it is of then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.ahead_loops import Taken, count_taken, quiet_step
from tests.training.durable_runs import (
    DURABLE,
    assert_ends_alike,
    begin,
    some_steps,
)
from tests.training.twins import (
    Trial,
    assert_equal_lists,
    batch,
    build_blocks,
    config_of,
    loss_of,
)
from tierstore.errors import UsageError
from tierstore.training import offload, register_optimizer
from tierstore.training.optimizers.speculative_steps import SpeculativeSteps
from tierstore.training.optimizers.step_units import StepUnit

__all__ = ["count_taken"]


# ---------------------------------------------------------------------- when


def test_a_checkpoint_between_backward_and_step_is_of_the_last_step(tmp_path: Path, taken: Taken) -> None:
    """Steps ahead are under way then; they are no part of it, and are taken over all the same."""
    config = config_of("three", tmp_path, {**DURABLE, "max_device_memory": "192KB"})

    def fresh(seed: int) -> Trial:
        torch.manual_seed(seed)
        return Trial(*build_blocks())

    expected, trial, resumed = fresh(0), fresh(0), fresh(1)
    ahead: list[str] = []
    with offload(trial.model, trial.optimizers, config) as run:
        for each in (expected, trial):
            torch.manual_seed(1)
            for _ in range(5):
                quiet_step(each)
        random = torch.get_rng_state()
        taken.since()

        def between() -> None:
            ahead.extend(key for key in run.store if key.endswith("~next"))
            run.checkpoint({"step": 5})

        quiet_step(trial, between)
        assert ahead
        assert taken.since() == len(ahead)
    torch.set_rng_state(random)
    quiet_step(expected)
    assert_equal_lists(expected.logged, trial.logged)
    with offload(resumed.model, resumed.optimizers, config) as run:
        assert not any(key.endswith("~next") for key in run.store)
        torch.set_rng_state(random)  # the batch of the sixth step had been drawn by then
        quiet_step(resumed)
        assert_ends_alike(expected, resumed, run)


def test_gradients_that_are_accumulated_are_no_part_of_it(tmp_path: Path) -> None:
    trial, run = begin("disk", tmp_path)
    torch.manual_seed(1)
    some_steps(trial, 1)
    loss_of(trial.model, *batch()).backward()
    run.checkpoint()
    run.close()
    resumed, run = begin("disk", tmp_path)
    assert all(parameter.grad is None for parameter in resumed.model.parameters())
    run.close()


def test_in_a_hook_before_the_step_it_is_of_the_step_before_and_after_it_of_this_one(tmp_path: Path) -> None:
    trial, run = begin("disk", tmp_path)
    optimizer = trial.optimizers[1]
    seen: list[torch.Tensor] = []

    def note(name: str) -> None:
        run.checkpoint({"name": name})
        seen.append(run.store.get(key).clone())

    key = next(key for key in run.store if key.startswith("param/3"))
    before = optimizer.register_step_pre_hook(lambda *_: note("before"))
    after = optimizer.register_step_post_hook(lambda *_: note("after"))
    some_steps(trial, 1)
    some_steps(trial, 1)
    before.remove()
    after.remove()
    assert torch.equal(seen[1], seen[2])
    assert not torch.equal(seen[2], seen[3])
    run.close()
    _, run = begin("disk", tmp_path)
    assert torch.equal(run.store.get(key), seen[3])
    run.close()


def test_while_the_model_runs_it_is_refused(tmp_path: Path) -> None:
    trial, run = begin("three", tmp_path)
    handle = trial.model.get_submodule("0.up").register_forward_hook(lambda *_: run.checkpoint())
    with pytest.raises(UsageError, match="the model runs"):
        some_steps(trial, 1)
    handle.remove()
    some_steps(trial, 1)
    run.checkpoint()
    run.close()


def test_while_something_refers_to_a_parameter_it_is_refused_and_then_not(tmp_path: Path) -> None:
    trial, run = begin("disk", tmp_path)
    alias = trial.model.get_parameter("0.up.weight").data
    with pytest.raises(UsageError, match=r"in use \('0\.up\.weight'"):
        run.checkpoint()
    alias.fill_(3.0)
    del alias
    run.checkpoint()
    run.close()
    trial, run = begin("disk", tmp_path)
    assert bool((trial.model.get_parameter("0.up.weight") == 3.0).all())
    run.close()


class Torn(torch.optim.SGD):
    """Fails in the midst of a step when told to; each bundle is one call of ``step``."""

    calls_to_failure = -1

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 - PyTorch's own signature
        """Step, or fail."""
        self.calls_to_failure -= 1
        if self.calls_to_failure == -1:
            raise ArithmeticError("torn")
        return super().step(closure)


register_optimizer(Torn)


def test_after_a_step_that_failed_in_its_midst_it_is_refused_until_a_whole_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, _ = build_blocks()
    optimizer = Torn(model.parameters(), lr=0.1)
    trial = Trial(model, [optimizer])
    with offload(model, optimizer, config_of("disk", tmp_path, DURABLE)) as run:
        some_steps(trial, 1)
        run.checkpoint({"step": 1})
        optimizer.calls_to_failure = 2
        with pytest.raises(ArithmeticError):
            some_steps(trial, 1)
        with pytest.raises(UsageError, match="a step of Torn is under way, or failed in its midst"):
            run.checkpoint()
        some_steps(trial, 1)
        run.checkpoint({"step": 2})


def test_after_a_step_that_failed_when_some_were_taken_over_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = SpeculativeSteps.take
    taken: list[bool] = []

    def take_once(ahead: SpeculativeSteps, turn: StepUnit) -> bool:
        if any(taken):
            raise ArithmeticError("torn")
        taken.append(take(ahead, turn))
        return taken[-1]

    torch.manual_seed(0)
    trial = Trial(*build_blocks())
    config = config_of("three", tmp_path, {**DURABLE, "max_device_memory": "192KB"})
    with offload(trial.model, trial.optimizers, config) as run:
        for _ in range(5):
            quiet_step(trial)
        run.checkpoint()
        monkeypatch.setattr(SpeculativeSteps, "take", take_once)
        with pytest.raises(ArithmeticError):
            quiet_step(trial)
        with pytest.raises(UsageError, match="a step of Adam is under way, or failed in its midst"):
            run.checkpoint()


def test_inside_a_step_that_is_not_over_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, run = begin("disk", tmp_path)
    some_steps(trial, 1)
    loss_of(trial.model, *batch()).backward()
    before = trial.optimizers[0].register_step_pre_hook(lambda *_: run.checkpoint())  # it has not begun
    monkeypatch.setattr(trial.optimizers[0], "_init_group", lambda *_: run.checkpoint())
    with pytest.raises(UsageError, match="a step of AdamW is under way"):
        trial.optimizers[0].step()
    monkeypatch.undo()
    before.remove()
    trial.optimizers[0].step()  # a whole one
    run.checkpoint()
    run.close()
