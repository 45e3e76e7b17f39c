"""Parts of a model that the program calls itself: the bits of plain PyTorch, within the device's budget."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.training import host_models
from tests.training.host_models import CASES, assert_same_placed
from tests.training.leases import leased_bytes
from tests.training.swap_models import whole_layers
from tests.training.twins import (
    WIDTH,
    Loop,
    Optimizer,
    Trial,
    adam,
    assert_equal_models,
    assert_same,
    batch,
    blocks,
    config_of,
    every_layout,
    is_on_accelerator,
    like_blocks,
    same,
    with_copies,
    with_device,
    with_rest,
)
from tierstore.errors import UsageError
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload
from tierstore.training.session import Session


class Pair(nn.Module):
    """Parts that a program calls as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.judged = like_blocks(2), blocks(2)
        self.again = Again(self.judged)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, WIDTH)``."""
        found: Tensor = self.judged(self.made(x))
        return found


class Again(nn.Module):
    """A part that calls itself, and one that it shares with the whole."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.shared = shared

    def forward(self, x: Tensor, rounds: int = 3) -> Tensor:
        """Transform ``(batch, WIDTH)``."""
        x = torch.tanh(self.own(x))
        found: Tensor = self(x, rounds - 1) if rounds else self.shared(x)
        return found


def _build() -> tuple[Pair, Sequence[Optimizer]]:
    model = Pair()
    return model, adam(model)


def _pair(trial: Trial) -> Pair:
    assert isinstance(trial.model, Pair)
    return trial.model


def _end(trial: Trial, loss: Tensor) -> None:
    loss.backward()
    trial.log(loss)
    trial.log_gradients()
    for optimizer in trial.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _loop(use: Callable[[Pair, Tensor], Tensor], count: int = 4) -> Loop:
    def loop(trial: Trial) -> None:
        for _ in range(count):
            _end(trial, use(_pair(trial), batch()[0]).square().mean())

    return loop


# ---------------------------------------------------------------------- who calls, and how


def _with_evaluations(model: Pair, x: Tensor) -> Tensor:
    model.made.eval()
    with torch.no_grad():
        told = model.made(x) + model.made(x + 1)
    model.made.train()
    with torch.inference_mode():
        model.judged(x)
    found: Tensor = model.judged(told) + model.judged(model.made(x))
    return found


def _whole_and_parts(model: Pair, x: Tensor) -> Tensor:
    found: Tensor = model(x) + model.judged(x) + model(model.made(x)) + model.again(x)
    return found


def _one_by_one(model: Pair, x: Tensor) -> Tensor:
    for layer in (*model.made, *model.judged):
        x = layer(x)
    return x


def _functional(model: Pair, x: Tensor) -> Tensor:
    doubled = {name: 2 * each for name, each in model.made.named_parameters()}
    found: Tensor = model.judged(torch.func.functional_call(model.made, doubled, (x,)))
    return found


def _mapped(model: Pair, x: Tensor) -> Tensor:
    found: Tensor = torch.func.vmap(model.made)(x) + torch.func.vjp(model.made, x)[0]
    return found


def _checkpointed_once(model: Pair, x: Tensor) -> Tensor:
    return _checkpointed(model, x, use_reentrant=False)


def _checkpointed_in_a_pass(model: Pair, x: Tensor) -> Tensor:
    return _checkpointed(model, x, use_reentrant=True)


def _checkpointed(model: Pair, x: Tensor, *, use_reentrant: bool) -> Tensor:
    made = checkpoint(model.made, x.requires_grad_(), use_reentrant=use_reentrant)
    found = checkpoint(model.again, made, use_reentrant=use_reentrant)
    assert isinstance(found, Tensor)
    return found


def _in_a_hook(model: Pair, x: Tensor) -> Tensor:
    made: Tensor = model.made(x)

    def use(gradient: Tensor) -> Tensor:
        with torch.no_grad():
            changed: Tensor = gradient + 0.1 * model.made(gradient)
        return changed

    made.register_hook(use)
    found: Tensor = model.judged(made)
    return found


def _called_with(error: type[BaseException], model: Pair, x: Tensor) -> Tensor:
    def fail(*_: object) -> None:
        raise error

    for part in (model.made, model.again):
        handle = part.get_submodule("0.up" if part is model.made else "shared.1").register_forward_hook(fail)
        with handle, contextlib.suppress(error):
            part(x)
    found: Tensor = model.judged(model.made(x))
    return found


USES: dict[str, Callable[[Pair, Tensor], Tensor]] = {
    "evaluated between": _with_evaluations,
    "whole and parts": _whole_and_parts,
    "recursive": lambda model, x: model.again(model.made(x)),
    "one by one": _one_by_one,
    "functional": _functional,
    "mapped": _mapped,
    "checkpointed": _checkpointed_once,
    "checkpointed in a pass of its own": _checkpointed_in_a_pass,
    "in a hook": _in_a_hook,
    "an error": functools.partial(_called_with, ValueError),
    "an interrupt": functools.partial(_called_with, KeyboardInterrupt),
}


@every_layout
@pytest.mark.parametrize("use", USES)
def test_parts_give_the_bits_of_plain_pytorch(use: str, layout: str, tmp_path: Path) -> None:
    assert_same(_build, _loop(USES[use]), layout, tmp_path, with_copies(layout, "256KB"))


def _frozen() -> tuple[nn.Module, Sequence[Optimizer]]:
    model = Pair()
    model.made.requires_grad_(requires_grad=False)
    return model, [torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=1e-2)]


@every_layout
def test_a_part_that_is_frozen_whole_gives_the_bits_of_plain_pytorch(layout: str, tmp_path: Path) -> None:
    assert_same(_frozen, _loop(lambda model, x: model.judged(model.made(x))), layout, tmp_path)


MORE: dict[str, dict[str, Any]] = {
    "swapped": {"swap_config": {"swap": True, **whole_layers(1)}},
    "recomputed": {"recompute_config": {"recompute": True}},
    "stepped in backward": {"optimizer_in_backward": True},
}


def _train(model: Pair, optimizer: Optimizer, number: int) -> Tensor:
    torch.manual_seed(number)
    loss = model.judged(model.made(batch()[0])).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert isinstance(loss, Tensor)
    return loss.detach()


@every_layout
@pytest.mark.parametrize("name", MORE)
def test_parts_of_a_run_that_does_more_give_the_bits_of_plain_pytorch(
    name: str, layout: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain, (its_optimizer,) = _build()
    expected = [_train(plain, its_optimizer, number) for number in range(4)]
    torch.manual_seed(0)
    ours, (optimizer,) = _build()
    more = {**with_device(layout, "256KB"), **_only(MORE[name], is_section=False)}
    config = with_rest(config_of(layout, tmp_path, more), ours)
    document = {"offload_config": config, **_only(MORE[name], is_section=True)}
    with offload(ours, optimizer, document, layers="made") as run:
        assert all(same(each, _train(ours, optimizer, number)) for number, each in enumerate(expected))
        run.store.check()
    assert_equal_models(plain, ours)


def _only(more: dict[str, Any], *, is_section: bool) -> dict[str, Any]:
    return {name: value for name, value in more.items() if name.endswith("_config") is is_section}


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"root"}))
@pytest.mark.parametrize("layout", ["device", "three"])
def test_parts_on_the_host_are_called_across_the_border(case: str, layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            x = torch.randn(6, host_models.WIDTH)
            for part in trial.model.children():
                x = part(x)
            _end(trial, x.square().mean())

    assert_same_placed(CASES[case], loop, layout, tmp_path, with_device(layout, "256KB"))


# ---------------------------------------------------------------------- the device's budget


class Branch(nn.Module):
    """A layer of whose output much is kept for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, DIM)``."""
        return torch.tanh(self.linear(x)).exp().tanh()


DIM = 64
LAYER_BYTES = 4 * DIM * DIM
SHALLOW, DEEP = 2, 8


@pytest.mark.skipif(is_on_accelerator, reason="an independent meter sees an emulated device only")
@pytest.mark.parametrize("order", ["dg", "gd", "ddg", "dgg", "ggd"])
def test_parts_that_take_unlike_much_stay_within_the_budget(order: str, tmp_path: Path) -> None:
    """Whoever is called first and how often: a generator, and a judge that keeps four times as much."""
    limit_bytes = 44 * LAYER_BYTES  # all that is trained is 40, what the judge keeps 28
    model = nn.ModuleDict(
        {
            name: nn.Sequential(*(Branch() for _ in range(layers)))
            for name, layers in (("g", SHALLOW), ("d", DEEP))
        }
    )
    optimizers = {name: torch.optim.Adam(part.parameters(), lr=1e-3) for name, part in model.items()}
    config = config_of("device", tmp_path, {"max_device_memory": limit_bytes})
    with DeviceBudget(limit_bytes), offload(model, list(optimizers.values()), config):
        for which in 4 * order:
            model[which](torch.randn(DIM, DIM)).square().mean().backward()
            optimizers[which].step()
            optimizers[which].zero_grad()


class Ways(nn.Module):
    """A model that makes four times as much in each layer where it is told so, in one way or another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Branch() for _ in range(DEEP))

    def forward(
        self, x: Tensor, *, is_wide: bool = False, task: str = "", memory: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Transform ``(batch, DIM)``."""
        switches = (is_wide, task == "wide", memory is not None, not self.training)
        widening = 4 if any(switches) or torch.is_autocast_enabled("cpu") else 1
        x = x.float()
        for layer in self.layers:
            x = torch.cat([layer(x)] * widening).tanh()[: len(x)]
        return x


def _in_autocast(model: Ways, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found: Tensor = model(x)
    return found


WAYS: dict[str, Callable[[Ways, Tensor], Tensor]] = {
    "switch": lambda model, x: model(x, is_wide=True),
    "word": lambda model, x: model(x, task="wide"),
    "argument": lambda model, x: model(x, memory=[x[:0]]),
    "evaluating": lambda model, x: model.eval()(x),
    "autocast": _in_autocast,
}


@pytest.mark.skipif(is_on_accelerator, reason="an independent meter sees an emulated device only")
@pytest.mark.parametrize("order", ["nnnw", "wn", "nwnw", "nnw"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_training", [True, False])
def test_ways_that_take_unlike_much_stay_within_the_budget(
    *, is_training: bool, way: str, order: str, tmp_path: Path
) -> None:
    """Inputs are as large in each call: it is what else is given that makes one take more."""
    limit_bytes = (80 if is_training else 18) * LAYER_BYTES
    model = Ways()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3) if is_training else None
    config = config_of("device", tmp_path, {"max_device_memory": limit_bytes})
    with DeviceBudget(limit_bytes) as meter, offload(model, optimizer, config) as run:
        for kind in 3 * order:
            x = torch.randn(DIM, DIM)
            with torch.set_grad_enabled(is_training):
                found = WAYS[way](model.train(), x) if kind == "w" else model.train()(x)
            if optimizer is not None:
                found.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            del x, found  # what is held when the next one begins is the program's
        kept_bytes = run.store.stats().tiers["device"].charged_bytes
    assert meter.peak_bytes > limit_bytes // 2
    assert kept_bytes, "what the wide ones leave is the store's"


# ---------------------------------------------------------------------- what is interrupted, ended, compiled


def test_a_part_is_refused_while_the_run_is_suspended(tmp_path: Path) -> None:
    model, optimizers = _build()
    with offload(model, list(optimizers), config_of("device", tmp_path)) as run:
        run.suspend()
        with pytest.raises(UsageError, match="the model is called"):
            model.made(batch()[0])
        run.resume()


def test_a_use_begins_where_the_program_calls_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, begun = Pair(), list[nn.Module]()
    begin = Session._begin_forward

    def note(
        session: Session, called: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        begun.append(called)
        begin(session, called, args, kwargs)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def begun_by(use: Callable[[Pair, Tensor], Tensor | None]) -> list[nn.Module]:
        begun.clear()
        found = use(model, torch.ones(6, WIDTH))
        if found is not None:
            found.sum().backward()
        return begun

    monkeypatch.setattr(Session, "_begin_forward", note)
    with offload(model, None, config_of("disk", tmp_path)) as run:
        begun_by(_whole_and_parts)  # the first call is looked at
        assert begun_by(_whole_and_parts) == [model, model.judged, model.made, model, model.again]
        assert begun_by(_checkpointed_once) == [model.made, model.again]
        assert begun_by(_checkpointed_in_a_pass) == [model.made, model.again]
        assert begun_by(_in_a_hook) == [model.made, model.judged]
        with model.judged.get_submodule("1.up").register_forward_hook(interrupt):
            try:
                model.judged(torch.ones(6, WIDTH))
            except KeyboardInterrupt:  # what it has left open stays while it is kept
                assert begun_by(lambda model, x: model.made(x)) == [model.made]
                assert not leased_bytes(run)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # PyTorch's own use
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # of its own code
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # in it
@every_layout
def test_parts_that_are_compiled_give_the_bits_of_plain_pytorch(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        torch._dynamo.reset()
        model = _pair(trial)
        made, judged = (torch.compile(each, backend="eager") for each in (model.made, model.judged))
        for _ in range(3):
            _end(trial, judged(made(batch()[0])).square().mean())

    assert_same(_build, loop, layout, tmp_path)
    torch._dynamo.reset()  # it would keep the models
