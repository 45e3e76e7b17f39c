"""PyTorch's own machinery on an offloaded model: autocast, scaling, checkpoints, compilation."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint

from tests import target
from tests.training.twins import (
    WIDTH,
    Block,
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
    with_copies,
)
from tierstore.training import offload

pytestmark = every_layout


@pytest.mark.parametrize("make", ["adam", "fused"])
def test_a_grad_scaler(layout: str, tmp_path: Path, make: str) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [torch.optim.Adam(model.parameters(), lr=1e-2, fused=make == "fused" or None)]

    def loop(trial: Trial) -> None:
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for turn in range(5):
            loss = loss_of(trial.model, *batch())
            if turn == 2:
                loss = loss * float("inf")  # an overflow: the step is skipped
            scaler.scale(loss).backward()
            if turn % 2:
                scaler.unscale_(trial.optimizer)
                trial.log(nn.utils.clip_grad_norm_(trial.model.parameters(), 1.0))
            scaler.step(trial.optimizer)
            scaler.update()
            trial.log(torch.tensor(scaler.get_scale()))
            trial.log_gradients()
            trial.optimizer.zero_grad()

    assert_same(build, loop, layout, tmp_path)


def test_autocast(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(trial.model, *batch())
            loss.backward()
            trial.log(loss)
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, layout, tmp_path)


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(WIDTH, 5)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers."""
        x.requires_grad_(self.is_reentrant)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.is_reentrant)
        output: Tensor = self.head(x)
        return output


@pytest.mark.parametrize("is_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpoint(layout: str, tmp_path: Path, is_reentrant: bool) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Checkpointed(is_reentrant=is_reentrant)
        return model, adam(model)

    assert_same(build, steps(4), layout, tmp_path)


def test_checkpoint_around_the_whole_model(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            inputs, classes = batch()
            output = checkpoint(trial.model, inputs, use_reentrant=False)
            nn.functional.cross_entropy(output, classes).backward()
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, layout, tmp_path)


def test_submodules_that_are_used_without_the_model(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        first, second, *_, head = trial.model.children()
        for _ in range(3):
            inputs, classes = batch()
            hidden = checkpoint(second, first(inputs), use_reentrant=False)
            nn.functional.cross_entropy(head(hidden), classes).backward()
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, layout, tmp_path)


def test_saved_tensors_on_the_cpu(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            with torch.autograd.graph.save_on_cpu():
                loss = loss_of(trial.model, *batch())
            loss.backward()
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, layout, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks, where a graph breaks
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # PyTorch's own use
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # of its own code
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_modules_compiled_one_by_one(layout: str, tmp_path: Path, backend: str) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(2)
        return model, adam(model)

    def loop(trial: Trial) -> None:
        torch._dynamo.reset()
        assert isinstance(trial.model, nn.Sequential)
        for block in trial.model:
            block.compile(backend=backend)
        for _ in range(3):
            step(trial)

    assert_same(build, loop, layout, tmp_path)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # PyTorch's own use
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # of its own code
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # in it
@pytest.mark.parametrize("inner", ["up", ""])
def test_a_hook_that_is_younger_than_what_was_compiled_is_called(
    layout: str, tmp_path: Path, inner: str
) -> None:
    def loop(trial: Trial) -> None:
        torch._dynamo.reset()
        assert isinstance(trial.model, nn.Sequential)
        first, second, *rest = trial.model
        # Plain PyTorch would not call the hook: the loop beside it runs uncompiled.
        called = second if trial.run is None else torch.compile(second, backend="eager")
        for number in range(4):
            if number == 2:
                second.get_submodule(inner).register_forward_hook(lambda module, args, output: output * 1.5)
            inputs, classes = batch()
            loss = nn.functional.cross_entropy(nn.Sequential(*rest)(called(first(inputs))), classes)
            loss.backward()
            trial.log(loss)
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, layout, tmp_path)
    torch._dynamo.reset()  # it would keep the models


class Attending(nn.Module):
    """Attention, whose parent uses its child's weight, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        # The simulated accelerator has no fused cell for a GRU.
        self.recurrent = (nn.RNN if is_simulated else nn.GRU)(WIDTH, 24, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, width)`` as sequences of three."""
        sequence = self.layer(torch.stack((x, x * 2, x - 1), dim=1))
        hidden, _ = self.recurrent(sequence)
        output: Tensor = self.head(hidden[:, -1])
        return output


@pytest.mark.filterwarnings("ignore:RNN module weights")  # of cuDNN's
def test_attention_and_recurrent_layers(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Attending()
        return model, adam(model)

    def loop(trial: Trial) -> None:
        for _ in range(3):
            step(trial)
            trial.model.eval()
            with torch.no_grad():
                trial.log(trial.model(batch()[0]))
            trial.model.train()

    is_on_device = layout in ("device", "three")
    cudnn_needs = "16MB" if target.accelerator == "cuda" else "256KB"
    small = {"max_device_memory": cudnn_needs} if is_on_device else {"offload_cpu_size": "512KB"}
    assert_same(build, loop, layout, tmp_path, small)


class Convolving(nn.Module):
    """Convolutions in the channels-last layout, with a normalised weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 16, 3, padding=1))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, width)``, seen as small images, to logits."""
        images = x.view(-1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        images = self.second(nn.functional.relu(self.norm(self.first(images))))
        output: Tensor = self.head(images.mean((2, 3)))
        return output


def test_channels_last_convolutions_and_parametrizations(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Convolving().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, adam(model)

    def loop(trial: Trial) -> None:
        for _ in range(3):
            step(trial)

    assert_same(build, loop, layout, tmp_path)


def test_nothing_keeps_a_model_whose_run_has_ended(layout: str, tmp_path: Path) -> None:
    model = Convolving()  # a parametrized module has a class of its own, which refers to it
    optimizer = torch.optim.SGD(model.parameters())
    with offload(model, optimizer, config_of(layout, tmp_path)):
        step(Trial(model, [optimizer]))
    modules = [weakref.ref(each) for each in model.modules()]
    del model, optimizer
    gc.collect()
    assert not any(each() for each in modules)


def test_values_changed_and_read_by_hand(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        average = [p.detach().clone() for p in trial.model.parameters()]
        for _ in range(3):
            step(trial)
            with torch.no_grad():
                for old, parameter in zip(average, trial.model.parameters(), strict=True):
                    old.mul_(0.9).add_(parameter, alpha=0.1)
                    parameter.data.clamp_(-0.2, 0.2)
                    if not is_on_accelerator:  # NumPy sees host memory alone
                        parameter.detach().numpy()[...] *= 0.5
                    nn.init.trunc_normal_(parameter) if parameter.dim() > 1 else parameter.zero_()
                    trial.log(parameter.norm())
        for old in average:
            trial.log(old)
        trial.log(sum(p.square().sum() for p in trial.model.parameters()))  # type: ignore[arg-type]

    assert_same(build_blocks, loop, layout, tmp_path, with_copies(layout))


def test_a_penalty_on_the_weights(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss = loss_of(trial.model, *batch())
            for parameter in trial.model.parameters():
                loss = loss + 0.01 * parameter.square().sum()
            loss.backward()
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    # Backward keeps the penalty's gradients until the model's are there, too.
    assert_same(build_blocks, loop, layout, tmp_path, with_copies(layout, "192KB"))


class Clamping(nn.Module):
    """Changes its weight through ``data`` while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.blocks = blocks()

    def forward(self, x: Tensor) -> Tensor:
        """Clamp, then use."""
        self.weight.data.clamp_(-0.1, 0.1)
        output: Tensor = self.blocks(x @ self.weight)
        return output


def test_a_module_that_writes_its_weight_through_data(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Clamping()
        return model, [torch.optim.Adam(model.blocks.parameters())]

    assert_same(build, steps(3), layout, tmp_path)


def test_state_dicts_and_copies_are_ordinary(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        step(trial)
        for tensor in trial.model.state_dict().values():
            assert isinstance(tensor, Tensor)
            assert type(copy.deepcopy(tensor)) is Tensor
            trial.log(tensor)
        twin = copy.deepcopy(trial.model)
        inputs, _ = batch()
        trial.log(twin(inputs))
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        file = io.BytesIO()
        torch.save(trial.model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        trial.log(loaded(inputs))
        trial.log(trial.model(inputs))
        step(trial)

    assert_same(build_blocks, loop, layout, tmp_path, with_copies(layout))


def test_loading_state_dicts(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        step(trial)
        model, optimizer = trial.model.state_dict(), trial.optimizer.state_dict()
        file = io.BytesIO()
        torch.save((model, optimizer), file)
        step(trial)
        step(trial)
        file.seek(0)
        model, optimizer = torch.load(file)
        trial.model.load_state_dict(model)
        trial.optimizer.load_state_dict(optimizer)
        before = _state_tensors(optimizer)
        for _ in range(2):
            step(trial)
        if trial.run is not None:  # plain PyTorch goes on with the caller's tensors
            assert all(torch.equal(a, b) for a, b in zip(before, _state_tensors(optimizer), strict=True))

    assert_same(build_blocks, loop, layout, tmp_path)


def _state_tensors(state_dict: dict[str, Any]) -> list[Tensor]:
    values = (value for entries in state_dict["state"].values() for value in entries.values())
    return [value.clone() for value in values if isinstance(value, Tensor) and value.dim()]
