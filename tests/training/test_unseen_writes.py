"""Writes of a module to its own weights that no version counter tells of."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tierstore as ts
from tests.training.twins import (
    WIDTH,
    Trial,
    assert_equal_lists,
    assert_equal_models,
    assert_same,
    config_of,
    every_layout,
    with_device,
)
from tierstore.training import offload
from tierstore.training.bundles.unseen_writes import is_pytorchs_own
from tierstore.units import MIB

Write = Callable[[Tensor], None]


def _numpy(weight: Tensor) -> None:
    weight.detach().numpy()[2:5] *= 0.5


def _dlpack(weight: Tensor) -> None:
    torch.utils.dlpack.from_dlpack(weight.detach())[1].detach().numpy()[:] += 1


def _pointer(weight: Tensor) -> None:
    values = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    values[7] += 1.0


def _storage(weight: Tensor) -> None:
    begin = weight.storage_offset() * weight.element_size()
    storage = weight.untyped_storage()
    storage[begin + 3] = (storage[begin + 3] + 1) % 64


def _data(weight: Tensor) -> None:
    weight.data[3].mul_(0.5)


def _fused(weight: Tensor) -> None:
    step = torch.ones(())
    torch._fused_sgd_(
        [weight.detach()],
        [torch.full_like(weight, 0.5)],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=bool(step),
    )


class _Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        return func(*args, **(kwargs or {}))


def _list_in_a_mode(weight: Tensor) -> None:
    mode = _Nothing()  # type: ignore[no-untyped-call]
    with mode, torch.no_grad():
        torch._foreach_mul_([weight.detach()], 0.5)


WRITES: dict[str, Write] = {
    write.__name__.strip("_").replace("_", " "): write
    for write in (_numpy, _dlpack, _pointer, _storage, _data, _fused, _list_in_a_mode)
}


class Writing(nn.Linear):
    """A layer that writes to its weight before it uses it."""

    write: Write = staticmethod(_numpy)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, WIDTH)``."""
        type(self).write(self.weight)
        return super().forward(x)


def _layers(write: Write) -> nn.Module:
    kind = type("WritingLayer", (Writing,), {"write": staticmethod(write)})
    return nn.Sequential(*(kind(WIDTH, WIDTH) for _ in range(8)))


def _hooked(write: Write) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    for layer in model:
        layer.register_forward_pre_hook(lambda module, _: write(module.weight))
    return model


def _hooked_after(write: Write) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    for layer in model:
        layer.register_forward_hook(lambda module, _, __: write(module.weight))
    return model


def _replaced(write: Write) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    for layer in model:

        def forward(x: Tensor, layer: nn.Linear = layer) -> Tensor:  # type: ignore[assignment]
            write(layer.weight)
            return nn.functional.linear(x, layer.weight, layer.bias)

        layer.forward = forward
    return model


MODELS: dict[str, Callable[[Write], nn.Module]] = {
    "modules": _layers,
    "hooks": _hooked,
    "hooks after": _hooked_after,
    "replaced": _replaced,
}


def _loop(trial: Trial) -> None:
    for _ in range(3):
        with torch.no_grad():
            trial.log(trial.model(torch.randn(2, WIDTH)))
        for parameter in trial.model.parameters():
            trial.log(parameter)


def _run_twins(make: Callable[[], nn.Module], layout: str, path: Path) -> None:
    torch.manual_seed(0)
    plain = Trial(make(), [])
    torch.manual_seed(0)
    ours = Trial(make(), [])
    torch.manual_seed(1)
    _loop(plain)
    torch.manual_seed(1)
    with offload(ours.model, None, config_of(layout, path, with_device(layout, "160KB"))) as run:
        _loop(ours)
        run.store.check()
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)


@every_layout
@pytest.mark.parametrize("write", WRITES)
def test_a_module_that_writes_to_its_own_weight(layout: str, write: str, tmp_path: Path) -> None:
    _run_twins(lambda: _layers(WRITES[write]), layout, tmp_path)


@pytest.mark.parametrize("layout", ["disk", "three"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_other_code_than_pytorchs_around_a_weight(
    layout: str, model: str, frozen: bool, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        return MODELS[model](_numpy).requires_grad_(not frozen)

    _run_twins(make, layout, tmp_path)


class _Halving(TorchDispatchMode):
    """Halves every weight that is multiplied or added up."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.sum.default):
            for each in args:
                if isinstance(each, Tensor) and each.shape[-2:] == (WIDTH, WIDTH):
                    each.mul_(0.5)
        return func(*args, **(kwargs or {}))


def _evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.randn(2, WIDTH))


def _train(model: nn.Module) -> None:
    model(torch.randn(2, WIDTH)).sum().backward()
    model.zero_grad()


def _look(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.sum()


@every_layout
@pytest.mark.parametrize("use", [_evaluate, _train, _look])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_dispatch_mode_writes_to_what_it_is_handed(
    layout: str, frozen: bool, use: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    if frozen and use is _train:
        pytest.skip("nothing trains")

    def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).requires_grad_(not frozen), []

    def loop(trial: Trial) -> None:
        for _ in range(3):
            mode = _Halving()  # type: ignore[no-untyped-call]
            with mode:
                use(trial.model)
            for parameter in trial.model.parameters():
                trial.log(parameter)

    assert_same(build, loop, layout, tmp_path)


class _HalvingGradients(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 - as torch's own
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        torch._foreach_mul_(gradients, 0.5)
        return super().step(closure)


_OPTIMIZERS = {
    "foreach": torch.optim.SGD,
    "own": _HalvingGradients,
}


@every_layout
@pytest.mark.parametrize("budget", ["176KB", "4MB"])
@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_a_step_in_a_dispatch_mode_writes_to_gradients(
    kind: str, budget: str, layout: str, tmp_path: Path
) -> None:
    """No counter tells what functions over lists write there: ``SGD`` with ``nesterov`` does to gradients."""

    def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        made = _OPTIMIZERS[kind](model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
        return model, [made]

    def loop(trial: Trial) -> None:
        for turn in range(6):
            if turn % 3 != 2:  # else gradients are what they were set to
                trial.model(torch.randn(2, WIDTH)).square().mean().backward()
            mode = _Nothing()  # type: ignore[no-untyped-call]
            with mode:
                trial.optimizer.step()
            trial.log_gradients()
            trial.model.zero_grad(set_to_none=False)

    assert_same(build, loop, layout, tmp_path, with_device(layout, budget))


@pytest.mark.parametrize("layout", ["disk", "three"])
def test_a_numpy_view_of_a_frozen_parameter_keeps_its_bytes(layout: str, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12))).requires_grad_(requires_grad=False)
    with offload(model, None, config_of(layout, tmp_path, with_device(layout, "160KB"))):
        view = model.get_parameter("0.weight").numpy()
        model(torch.randn(2, WIDTH))
        view[:] = 3
        model(torch.randn(2, WIDTH))
        assert model.get_parameter("0.weight").eq(3).all()
        del view
        model(torch.randn(2, WIDTH))
        assert model.get_parameter("0.weight").eq(3).all()


def test_only_pytorchs_own_code_is_taken_to_tell_what_it_writes() -> None:
    class Own(nn.Linear):
        pass

    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    wrapped = nn.Linear(2, 2)
    wrapped.register_forward_hook(lambda *_: None)
    wrapped.register_forward_pre_hook(lambda *_: None)
    assert is_pytorchs_own(nn.Linear(2, 2))
    assert is_pytorchs_own(nn.TransformerEncoderLayer(8, 2))
    assert not is_pytorchs_own(Own(2, 2))
    with offload(hooked, None, {"device": "cpu", "offload_cpu_size": "1MB", "offload_disk_size": 0}):
        assert not is_pytorchs_own(hooked)


def test_a_frozen_module_of_the_users_that_writes_nothing_is_never_written_back(tmp_path: Path) -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(*(Own(512, 512, bias=False) for _ in range(6))).requires_grad_(requires_grad=False)
    config = {"device": "cpu", "offload_cpu_size": 3 * MIB, "offload_disk_size": "64MB"}
    with offload(model, None, {**config, "offload_path": str(tmp_path)}) as run:

        def written_bytes() -> int:
            return _traffic(run.store)

        model(torch.randn(2, 512))
        before_bytes = written_bytes()
        for _ in range(3):
            model(torch.randn(2, 512))
        assert written_bytes() == before_bytes


def _traffic(store: ts.Store) -> int:
    return store.stats().traffic["host", "disk"].nbytes
