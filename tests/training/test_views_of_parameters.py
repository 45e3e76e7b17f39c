"""Views of parameters that a program keeps, over steps and writes: the gradients that come through them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.leases import leased_bytes
from tests.training.twins import (
    Optimizer,
    Trial,
    adam,
    assert_equal_lists,
    assert_same,
    blocks,
    config_of,
    every_layout,
    step,
    with_device,
)
from tierstore.training import offload

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda w: w.t(),
    "flat": lambda w: w.view(-1),
    "rows": lambda w: w[1:3],
    "one row": lambda w: w[2],
    "columns": lambda w: w[:, ::2],
    "longer": lambda w: w.unsqueeze(0),
    "expanded": lambda w: w.unsqueeze(0).expand(3, *w.shape),
    "diagonal": lambda w: w.diagonal(),
    "strided": lambda w: w.as_strided((3, 2), (2, 5)),
    "of a view": lambda w: w.t()[1:].view_as(w.t()[1:]),
}


def _write(trial: Trial) -> None:
    with torch.no_grad():
        for parameter in trial.model.parameters():
            parameter.mul_(0.5)


def _write_to_data(trial: Trial) -> None:
    for parameter in trial.model.parameters():
        parameter.data.mul_(0.5)


def _forward(trial: Trial) -> None:
    with torch.no_grad():
        trial.model(torch.ones(2, 48))


MEANWHILE: dict[str, Callable[[Trial], object]] = {
    "step": step,
    "write": _write,
    "write to data": _write_to_data,
    "forward": _forward,
}


def _build() -> tuple[nn.Module, Sequence[Optimizer]]:
    model = blocks()
    return model, adam(model)


@pytest.mark.parametrize("layout", ["disk", pytest.param("three", marks=pytest.mark.long)])
@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_that_is_kept_gives_the_gradient_of_plain_pytorch(
    name: str, meanwhile: str, layout: str, tmp_path: Path
) -> None:
    def loop(trial: Trial) -> None:
        matrices = [p for p in trial.model.parameters() if p.dim() == 2]
        first = matrices[0]
        views = [VIEWS[name](w) for w in (first, matrices[-1])]
        for _ in range(2):
            MEANWHILE[meanwhile](trial)
            for view in views:
                view.square().sum().backward()
                trial.log(view)
            trial.log_gradients()
            (slope,) = torch.autograd.grad(views[0].pow(3).sum(), first, create_graph=True)
            slope.sum().backward()
            trial.log_gradients()
            step(trial)

    assert_same(_build, loop, layout, tmp_path, with_device(layout, "640KB"))


@every_layout
def test_a_view_that_a_module_keeps_from_its_forward(layout: str, tmp_path: Path) -> None:
    class Keeping(nn.Linear):
        kept: Tensor | None = None

        def forward(self, inputs: Tensor) -> Tensor:
            if self.kept is None:
                self.kept = self.weight.t()
            return inputs @ self.kept + self.bias

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Keeping(48, 48) for _ in range(4)))
        return model, adam(model)

    def loop(trial: Trial) -> None:
        for _ in range(4):
            trial.model(torch.ones(3, 48)).square().mean().backward()
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build, loop, layout, tmp_path, with_device(layout, "640KB"))


def test_the_bytes_may_go_when_the_view_is_gone(tmp_path: Path) -> None:
    model = blocks()
    with offload(model, adam(model), config_of("host", tmp_path)) as run:
        view = next(model.parameters()).view(-1)
        _forward(Trial(model, []))
        assert leased_bytes(run) > 0
        del view
        _forward(Trial(model, []))
        assert leased_bytes(run) == 0


@every_layout
def test_a_view_outlives_the_run(layout: str, tmp_path: Path) -> None:
    gradients = []
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        model, (optimizer,) = _build()
        trial = Trial(model, [optimizer])
        config = config_of(layout, tmp_path, with_device(layout, "640KB"))
        with offload(model, [optimizer], config) if is_offloaded else contextlib.nullcontext():
            torch.manual_seed(1)
            weight = next(p for p in model.parameters() if p.dim() == 2)
            view = weight.t()
            step(trial)
        optimizer.zero_grad()
        with torch.no_grad():
            weight.mul_(2)
        view.square().sum().backward()
        gradients += [view.detach().clone(), weight.grad]
    assert_equal_lists(gradients[:2], gradients[2:])


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "detached": Tensor.detach,
    "data": lambda w: w.data,
    "flat": lambda w: w.detach().view(-1),
    "bytes": lambda w: w.detach().view(-1).view(torch.uint8),
    "part of the bytes": lambda w: w.detach().view(-1).view(torch.uint8)[4:],
    "storage": lambda w: torch.empty(0, dtype=torch.uint8, device=w.device).set_(w.untyped_storage()),
}


@every_layout
@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.parametrize("bias", [False, True])
def test_what_shows_the_bytes_shows_them_after_the_run(
    name: str, layout: str, tmp_path: Path, *, bias: bool
) -> None:
    """One parameter's bytes are all of a lease, or a part of it; looked at as bytes, too."""
    model = nn.Sequential(nn.Linear(48, 48, bias=bias))
    model.register_buffer("table", torch.arange(200, dtype=torch.uint8))
    with offload(model, None, config_of(layout, tmp_path, {"buffer_min_size": 1})):
        kept = {key: ALIASES[name](each) for key, each in model.state_dict(keep_vars=True).items()}
        before = {key: each.clone() for key, each in kept.items()}
    for key, each in model.state_dict(keep_vars=True).items():
        assert torch.equal(kept[key], before[key]), key
        with torch.no_grad():
            each.view(-1)[1:].zero_()
        assert not kept[key].view(-1)[each.element_size() :].any(), key


def test_a_node_of_before_the_parameter_was_set_keeps_no_bytes(tmp_path: Path) -> None:
    model = blocks()
    weight = next(p for p in model.parameters() if p.dim() == 2)
    node = torch.autograd.graph.get_gradient_edge(weight)
    with offload(model, adam(model), config_of("host", tmp_path)) as run:
        with torch.no_grad():
            weight.set_(torch.ones_like(weight))  # type: ignore[call-overload]
        alias = weight.detach()
        _forward(Trial(model, []))
        del alias
        for _ in range(2):
            _forward(Trial(model, []))
        assert leased_bytes(run) == 0
    assert node.node is not torch.autograd.graph.get_gradient_edge(weight).node
