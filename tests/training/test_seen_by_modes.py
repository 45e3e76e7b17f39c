"""What modes see of an offloaded loop, and what a loop sees of modes: what plain PyTorch shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.training.twins import Trial, adam, assert_same, batch, blocks, every_layout, step

Optimizer = torch.optim.Optimizer


class Asking(nn.Module):
    """Does what PyTorch does: takes another way where a mode is on, or where it is told of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = blocks(3)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, width)``."""
        return self.inner(x) + modes()  # type: ignore[no-any-return]


def modes() -> int:
    return torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()


def build() -> tuple[nn.Module, Sequence[Optimizer]]:
    model = Asking()
    return model, adam(model)


def training(trial: Trial) -> None:
    for _ in range(3):
        step(trial)
        trial.log(torch.tensor(modes()))


def in_hooks(trial: Trial) -> None:
    found: list[int] = []
    for parameter in trial.model.parameters():
        parameter.register_hook(lambda gradient: found.append(modes()))
    trial.optimizer.register_step_pre_hook(lambda *_: found.append(modes()))
    training(trial)
    trial.log(torch.tensor(found))


def evaluation(context: Callable[[], object]) -> Callable[[Trial], None]:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            trial.model.eval()
            with context():  # type: ignore[attr-defined]
                trial.log(trial.model(batch()[0]))
            trial.model.train()
            step(trial)

    return loop


def along(trial: Trial) -> None:
    for _ in range(3):
        x, _ = batch()
        with torch.no_grad(), forward_ad.dual_level():
            for each in forward_ad.unpack_dual(trial.model(forward_ad.make_dual(x, torch.ones_like(x)))):
                trial.log(each)
        step(trial)


LOOPS: dict[str, Callable[[Trial], None]] = {
    "training": training,
    "hooks": in_hooks,
    "no_grad": evaluation(torch.no_grad),
    "inference_mode": evaluation(torch.inference_mode),
    "forward-mode derivatives": along,
}


@every_layout
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("name", LOOPS)
def test_no_mode_of_the_librarys_is_on_while_the_program_runs(name: str, layout: str, tmp_path: Path) -> None:
    assert_same(build, LOOPS[name], layout, tmp_path)
