"""What is used, stepped or trained only after the program was measured: within the budget, the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.twins import (
    Optimizer,
    Trial,
    assert_equal_lists,
    assert_equal_models,
    assert_equal_states,
    config_of,
    is_on_accelerator,
)
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload

pytestmark = pytest.mark.skipif(is_on_accelerator, reason="an independent meter sees an emulated device only")

DIM, EXPERTS, STEPS = 64, 6, 12
LAYER_BYTES = 4 * DIM * DIM
NEED_BYTES = 4 * 2 * EXPERTS * LAYER_BYTES  # parameters, gradients and Adam's state of all experts


class Mixture(nn.Module):
    """Experts of which somebody says who is asked, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(EXPERTS)
        )
        self.head = nn.Linear(DIM, 8)

    def forward(self, x: Tensor, asked: Sequence[int] = range(EXPERTS)) -> Tensor:
        """Transform ``(batch, DIM)`` to ``(batch, 8)``."""
        for number in asked:
            x = x + self.experts[number](x)
        found: Tensor = self.head(x)
        return found


Asked = Callable[[int], Sequence[int]]
Change = Callable[[Mixture, int], None]


def _mixture(trial: Trial) -> Mixture:
    assert isinstance(trial.model, Mixture)
    return trial.model


def _end(trial: Trial, loss: Tensor, stepped: Sequence[Optimizer] | None = None) -> None:
    loss.backward()
    trial.log(loss)
    for optimizer in trial.optimizers if stepped is None else stepped:
        optimizer.step()
    for optimizer in trial.optimizers:
        optimizer.zero_grad()


def _loss(model: nn.Module, *args: object) -> Tensor:
    found: Tensor = model(torch.randn(4, DIM), *args).square().mean()
    return found


def _one_optimizer() -> tuple[nn.Module, list[Optimizer]]:
    model = Mixture()
    return model, [torch.optim.Adam(model.parameters(), lr=1e-3)]


def _head_first() -> tuple[nn.Module, list[Optimizer]]:
    model = Mixture()
    model.experts.requires_grad_(requires_grad=False)
    return model, [torch.optim.Adam(model.parameters(), lr=1e-3)]


def _head_alone() -> tuple[nn.Module, list[Optimizer]]:
    model = Mixture()
    model.experts.requires_grad_(requires_grad=False)
    return model, [torch.optim.Adam(model.head.parameters(), lr=1e-3)]


def _two_optimizers() -> tuple[nn.Module, list[Optimizer]]:
    model = Mixture()
    light, heavy = model.experts[:3], model.experts[3:]
    return model, [
        torch.optim.SGD(light.parameters(), lr=1e-3),
        torch.optim.Adam([*heavy.parameters(), *model.head.parameters()], lr=1e-3),
    ]


def _asking(asked: Asked) -> Callable[[Trial], None]:
    def loop(trial: Trial) -> None:
        for number in range(STEPS):
            _end(trial, _loss(trial.model, asked(number)))

    return loop


def _changing(change: Change) -> Callable[[Trial], None]:
    def loop(trial: Trial) -> None:
        for number in range(STEPS):
            change(_mixture(trial), number)
            _end(trial, _loss(trial.model))

    return loop


def _stepping(who: Callable[[int, Sequence[Optimizer]], Sequence[Optimizer]]) -> Callable[[Trial], None]:
    def loop(trial: Trial) -> None:
        for number in range(STEPS):
            _end(trial, _loss(trial.model), who(number, trial.optimizers))

    return loop


def _thaw(model: Mixture, number: int) -> None:
    if number == 4:
        model.experts.requires_grad_(requires_grad=True)


def _thaw_one_more(model: Mixture, number: int) -> None:
    if number == 0:
        model.experts.requires_grad_(requires_grad=False)
    if number % 2 == 0:
        model.experts[EXPERTS - 1 - number // 2].requires_grad_(requires_grad=True)


def _thaw_others(model: Mixture, number: int) -> None:
    model.experts.requires_grad_(requires_grad=False)
    for each in (5 * number, number * number):
        model.experts[each % EXPERTS].requires_grad_(requires_grad=True)


def _thawed_by_a_hook(trial: Trial) -> None:
    """The model is called when it happens."""
    model, number = _mixture(trial), 0

    def thaw(*_: object) -> None:
        _thaw(model, number)

    with model.register_forward_pre_hook(thaw):
        for number in range(STEPS):  # noqa: B007 - the hook reads it
            _end(trial, _loss(model))


def _thawed_beside_a_target(trial: Trial) -> None:
    """What a first forward makes is there when the model runs for the second time."""
    for number in range(STEPS):
        _thaw(_mixture(trial), number)
        target = trial.model(torch.randn(4, DIM))
        found = trial.model(torch.randn(4, DIM))
        _end(trial, (found - target.detach() - 1).square().mean())


def _with_a_group_more(trial: Trial) -> None:
    for number in range(STEPS):
        if number == 4:
            experts = _mixture(trial).experts.requires_grad_(requires_grad=True)
            trial.optimizer.add_param_group({"params": list(experts.parameters())})
        _end(trial, _loss(trial.model))


def _adversaries() -> tuple[nn.Module, list[Optimizer]]:
    model = Mixture()
    layers = list(model.experts)
    model.experts = nn.ModuleList([nn.Sequential(*layers[:3]), nn.Sequential(*layers[3:])])
    critic, maker = model.experts
    return model, [
        torch.optim.RMSprop(critic.parameters(), lr=1e-3),
        torch.optim.Adam([*maker.parameters(), *model.head.parameters()], lr=1e-3),
    ]


def _adversarial(*, is_frozen: bool) -> Callable[[Trial], None]:
    def loop(trial: Trial) -> None:
        model, (critics, makers) = _mixture(trial), trial.optimizers
        critic, maker = model.experts
        for _ in range(STEPS // 2):
            for _ in range(2):
                made = maker(torch.randn(4, DIM)).detach()
                _end(trial, critic(made).mean() - critic(torch.randn(4, DIM)).mean(), [critics])
            critic.requires_grad_(requires_grad=not is_frozen)
            _end(trial, -model.head(critic(maker(torch.randn(4, DIM)))).mean(), [makers])
            critic.requires_grad_(requires_grad=True)

    return loop


LATE: dict[str, tuple[Callable[[], tuple[nn.Module, list[Optimizer]]], Callable[[Trial], None]]] = {
    "experts in turn": (_one_optimizer, _asking(lambda number: [number % EXPERTS])),
    "experts later": (_one_optimizer, _asking(lambda n: [0] if n < 4 else [n % EXPERTS])),
    "an expert more each time": (_one_optimizer, _asking(lambda n: range(1 + n // 2))),
    "thawed": (_head_first, _changing(_thaw)),
    "thawed, in no optimizer": (_head_alone, _changing(_thaw)),
    "thawed one by one": (_one_optimizer, _changing(_thaw_one_more)),
    "others thawed each time": (_one_optimizer, _changing(_thaw_others)),
    "thawed by a hook": (_head_first, _thawed_by_a_hook),
    "thawed beside a target": (_head_first, _thawed_beside_a_target),
    "a group more": (_head_alone, _with_a_group_more),
    "the second optimizer later": (_two_optimizers, _stepping(lambda n, them: them if n > 3 else them[:1])),
    "the first optimizer later": (_two_optimizers, _stepping(lambda n, them: them if n > 3 else them[1:])),
    "optimizers in turn": (_two_optimizers, _stepping(lambda n, them: [them[n % 2]])),
    "an optimizer rarely": (_two_optimizers, _stepping(lambda n, them: [them[n % 5 == 4]])),
    "a critic twice": (_adversaries, _adversarial(is_frozen=False)),
    "a critic twice, frozen meanwhile": (_adversaries, _adversarial(is_frozen=True)),
}


@pytest.mark.parametrize("percent", [22, 30, 45, 65, 85, 100])
@pytest.mark.parametrize("kind", LATE)
def test_what_comes_later_stays_within_the_budget(kind: str, percent: int, tmp_path: Path) -> None:
    build, loop = LATE[kind]
    torch.manual_seed(0)
    plain = Trial(*build())
    torch.manual_seed(1)
    loop(plain)
    limit_bytes = NEED_BYTES * percent // 100
    torch.manual_seed(0)
    ours = Trial(*build())
    config = config_of("device", tmp_path, {"max_device_memory": limit_bytes})
    with DeviceBudget(limit_bytes), offload(ours.model, list(ours.optimizers), config) as run:
        torch.manual_seed(1)
        loop(ours)
        run.store.check()
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)
    for expected, found in zip(plain.optimizers, ours.optimizers, strict=True):
        assert_equal_states(expected, found)


def test_what_is_frozen_and_thawed_in_each_step_is_met_once(tmp_path: Path) -> None:
    """A critic that is frozen while the other one learns: nothing of it is new after the first time."""
    build, _ = LATE["a critic twice"]
    model, optimizers = build()
    trial = Trial(model, optimizers)
    limit_bytes = NEED_BYTES * 85 // 100
    moved = []
    with offload(model, optimizers, config_of("device", tmp_path, {"max_device_memory": limit_bytes})) as run:
        for _ in range(4):
            _adversarial(is_frozen=True)(trial)
            traffic = run.store.stats().traffic
            moved.append(traffic["host", "device"].nbytes + traffic["device", "host"].nbytes)
    later = [there - before for before, there in itertools.pairwise(moved)]
    assert max(later) < 0.6 * moved[0], "in the first round each of them is met once"


@pytest.mark.parametrize("percent", [118, 125, 140])
def test_where_all_fits_nothing_moves_after_a_thaw(percent: int, tmp_path: Path) -> None:
    """Gradients are the program's own there: they are in no peak."""
    torch.manual_seed(0)
    model, optimizers = _head_first()
    trial = Trial(model, optimizers)
    config = config_of("device", tmp_path, {"max_device_memory": NEED_BYTES * percent // 100})
    with offload(model, optimizers, config) as run:
        for number in range(30):
            _thaw(_mixture(trial), number)
            _end(trial, _loss(model))
        before = run.store.stats().traffic
        for _ in range(3):
            _end(trial, _loss(model))
        assert run.store.stats().traffic == before
