"""Parameters that share memory, and what else refers to it."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._sources import get_source_lines_and_file
from torch.utils.checkpoint import checkpoint

from tests.training.twins import (
    WIDTH,
    Optimizer,
    Trial,
    assert_equal_lists,
    assert_equal_models,
    assert_same,
    config_of,
    every_layout,
)
from tierstore.errors import UsageError
from tierstore.training import offload

Share = Callable[[nn.Linear, nn.Linear], None]

WRITERS: dict[str, Callable[[Any, Any], object]] = {
    "torch.save": torch.save,
    "the former format": functools.partial(torch.save, _use_new_zipfile_serialization=False),
    "pickle": pickle.dump,
}


@pytest.fixture(autouse=True, scope="module")
def _sources_are_read_once() -> Iterator[None]:
    """The former format keeps the source of each module's class: PyTorch parses a file each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "torch.serialization.get_source_lines_and_file", functools.cache(get_source_lines_and_file)
        )
        yield


def _interleave(a: nn.Linear, b: nn.Linear) -> None:
    columns = torch.randn(WIDTH, 2 * WIDTH)
    a.weight.data, b.weight.data = columns[:, :WIDTH], columns[:, WIDTH:]


def _overlap(a: nn.Linear, b: nn.Linear) -> None:
    flat = torch.randn(2 * WIDTH * WIDTH)
    a.weight.data = flat[: WIDTH * WIDTH].view(WIDTH, WIDTH)
    b.weight.data = flat[WIDTH * 5 + 3 :][: WIDTH * WIDTH].view(WIDTH, WIDTH)


def _part_a_flat_tensor(a: nn.Linear, b: nn.Linear) -> None:
    flat = torch.randn(2 * WIDTH * WIDTH + 5)
    a.weight.data = flat[5:][: WIDTH * WIDTH].view(WIDTH, WIDTH)
    b.weight.data = flat[5 + WIDTH * WIDTH :].view(WIDTH, WIDTH)


def _transpose(a: nn.Linear, b: nn.Linear) -> None:
    b.weight.data = a.weight.data.t()


def _tie(a: nn.Linear, b: nn.Linear) -> None:
    b.weight.data = a.weight.data


def _make_of_the_other(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = nn.Parameter(a.weight)


def _freeze_one(a: nn.Linear, b: nn.Linear) -> None:
    b.weight.data = a.weight.data
    b.weight.requires_grad = False


def _take_bits(a: nn.Linear, b: nn.Linear) -> None:
    b.bits = nn.Parameter(a.weight.detach()[3:9].view(torch.int32), requires_grad=False)


def _expand(a: nn.Linear, b: nn.Linear) -> None:
    b.weight.data = a.weight.data[:1].expand(WIDTH, WIDTH)
    b.weight.requires_grad = False


SHARES: dict[str, Share] = {
    "tied": _tie,
    "made of the other": _make_of_the_other,
    "transposed": _transpose,
    "overlapping": _overlap,
    "interleaved": _interleave,
    "parts of a flat tensor": _part_a_flat_tensor,
    "one frozen": _freeze_one,
    "other type": _take_bits,
    "expanded": _expand,
}


class Shared(nn.Module):
    """Two layers that share memory, far from each other."""

    def __init__(self, share: Share) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)
        share(self.first, self.last)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, WIDTH)``."""
        return self.last(self.middle(self.first(x)))  # type: ignore[no-any-return]


def _sgd(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]


def _adam(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2)]


def _one_each(model: nn.Module) -> list[Optimizer]:
    assert isinstance(model, Shared)
    others = [*model.middle.parameters(), *model.last.parameters()]
    return [torch.optim.Adam(model.first.parameters(), lr=1e-2), torch.optim.SGD(others, lr=0.05)]


def _loop(trial: Trial) -> None:
    model = trial.model
    assert isinstance(model, Shared)
    for turn in range(4):
        model(torch.randn(3, WIDTH)).square().mean().backward()
        trial.log_gradients()
        for optimizer in trial.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            if turn == 1:
                model.first.weight.mul_(0.5)
            if turn == 2 and 0 not in model.last.weight.stride():
                model.last.weight.data[2].fill_(0.25)
        for parameter in model.parameters():
            trial.log(parameter)
    _log_state_dict(trial)


def _log_state_dict(trial: Trial) -> None:
    """The tensors of a state dict share memory as the parameters do, and with them."""
    state = trial.model.state_dict()
    with torch.no_grad():
        state["first.weight"].zero_()
    for value in state.values():
        trial.log(value)


@every_layout
@pytest.mark.parametrize("optimizers", [_sgd, _adam, _one_each])
@pytest.mark.parametrize("share", SHARES)
def test_parameters_that_share_memory(
    layout: str, share: str, optimizers: Callable[[nn.Module], list[Optimizer]], tmp_path: Path
) -> None:
    models: list[Shared] = []

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        models.append(Shared(SHARES[share]))
        return models[-1], optimizers(models[-1])

    assert_same(build, _loop, layout, tmp_path)
    for model in models:
        with torch.no_grad():
            model.first.weight.add_(1)
    assert_equal_models(*models)


@every_layout
@pytest.mark.parametrize("share", SHARES)
def test_checkpoints_of_shared_memory(layout: str, share: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = config_of(layout, tmp_path)
    plain = Shared(SHARES[share])
    values = [p.detach().clone() for p in plain.parameters()]
    with offload(plain, None, config) as run:
        run.save(tmp_path / "saved")
    ours = Shared(SHARES[share])
    with offload(ours, None, config) as run, torch.no_grad():
        run.load(tmp_path / "saved")
        assert_equal_lists(values, list(ours.parameters()))
        for model in (plain, ours):
            model.first.weight.mul_(3)
        assert_equal_lists(list(plain.parameters()), list(ours.parameters()))
        if 0 not in ours.last.weight.stride():  # into which plain PyTorch does not load
            ours.load_state_dict(plain.state_dict())
    assert_equal_models(plain, ours)
    with torch.device("meta"):
        empty = Shared(SHARES[share])
    with offload(empty, None, config, weights=tmp_path / "saved" / "model.safetensors"), torch.no_grad():
        assert_equal_lists(values, list(empty.parameters()))
        empty.first.weight.mul_(3)
    assert_equal_models(plain, empty)


def _written_and_loaded(write: Callable[[Any, Any], object], model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    write(model, file)
    file.seek(0)
    read = pickle.load if write is pickle.dump else functools.partial(torch.load, weights_only=False)
    found: nn.Module = read(file)
    return found


@pytest.mark.parametrize("layout", ["disk", "three"])
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("share", SHARES)
def test_a_model_is_written_with_what_it_shares(layout: str, share: str, write: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for turn in range(3):
            try:
                found = _written_and_loaded(WRITERS[write], trial.model)
            except RuntimeError:  # it does not write one memory as two element types
                trial.log(torch.tensor(turn))
                continue
            with torch.no_grad():
                trial.model.get_parameter("first.weight").mul_(0.5)
                first, *others = found.parameters()
                first.fill_(turn)
            for parameter in others:
                assert type(parameter) is nn.Parameter
                trial.log(parameter)

    assert_same(lambda: (Shared(SHARES[share]), []), loop, layout, tmp_path)


@pytest.mark.parametrize("share", SHARES)
def test_a_durable_run_resumes_with_shared_memory(share: str, tmp_path: Path) -> None:
    config = config_of("three", tmp_path, {"durable": True})
    torch.manual_seed(0)
    plain = Shared(SHARES[share])
    torch.manual_seed(0)
    first = Shared(SHARES[share])
    with offload(first, None, config) as run:
        run.checkpoint()
    again = Shared(SHARES[share])
    with offload(again, None, config) as run, torch.no_grad():
        assert run.resumed is not None
        for model in (plain, again):
            model.first.weight.mul_(3)
    assert_equal_models(plain, again)


def test_backward_after_a_write_through_the_other_is_refused_as_pytorch_does(tmp_path: Path) -> None:
    model = Shared(_make_of_the_other)
    with offload(model, None, config_of("disk", tmp_path)):
        loss = model(torch.randn(2, WIDTH)).square().mean()
        with torch.no_grad():
            model.first.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- what is refused ------------------------------------------------------------------------------


def _inner(model: Shared) -> nn.Parameter:
    return model.get_parameter("middle.0.weight")


def _keep_a_state_dict(model: Shared) -> object:
    return model.state_dict()


def _keep_an_alias(model: Shared) -> object:
    return _inner(model).data


def _keep_a_view_of_some(model: Shared) -> object:
    return _inner(model).detach()[3, 2:9]


def _keep_the_storage(model: Shared) -> object:
    return _inner(model).untyped_storage()


def _keep_numpys_view(model: Shared) -> object:
    return _inner(model).detach().numpy()


def _keep_a_flat_tensor(model: Shared) -> object:
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    return flat


def _share_with_processes(model: Shared) -> object:
    return _inner(model).share_memory_()


def _register_a_buffer(model: Shared) -> object:
    model.register_buffer("alias", _inner(model).detach()[2])
    return None


@pytest.mark.parametrize(
    "keep",
    [
        _keep_a_state_dict,
        _keep_an_alias,
        _keep_a_view_of_some,
        _keep_the_storage,
        _keep_numpys_view,
        _keep_a_flat_tensor,
        _share_with_processes,
        _register_a_buffer,
    ],
)
def test_what_else_refers_to_a_parameters_memory_is_refused_by_name(
    keep: Callable[[Shared], object], tmp_path: Path
) -> None:
    model = Shared(_part_a_flat_tensor)
    kept = keep(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UsageError, match=r"middle\.0\.weight|first\.weight"):
        offload(model, None, config_of("disk", tmp_path))
    assert_equal_lists(before, list(model.parameters()))
    del kept


def test_what_only_a_cycle_refers_to_is_no_reason_to_refuse(tmp_path: Path) -> None:
    model = Shared(_tie)
    cycle: list[object] = [model.state_dict()]
    cycle.append(cycle)
    del cycle
    with offload(model, None, config_of("disk", tmp_path)):
        pass


def test_tensors_in_other_parts_of_a_flat_memory_are_no_reason_to_refuse(tmp_path: Path) -> None:
    flat = torch.randn(2 * WIDTH * WIDTH).untyped_storage()
    model = Shared(_tie)
    _inner(model).data = torch.empty(0).set_(flat, 9, (2 * WIDTH, WIDTH - 1), (WIDTH - 1, 1))
    rest = torch.empty(0).set_(flat, 0, (4,), (1,))
    model.register_buffer("rest", torch.empty(0).set_(flat, 5, (4,), (1,)))
    del flat
    rest.zero_()
    with offload(model, None, config_of("disk", tmp_path)):
        pass
    assert rest.sum() == 0


class Product(nn.Module):
    """A parameter that autograd saves as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``(batch, WIDTH)``."""
        return x * self.weight


class _AsItIs(torch.autograd.Function):
    """Returns its input: a view that nobody may use once its base is written to."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        del ctx
        return x

    @staticmethod
    def backward(ctx: object, *slopes: Tensor) -> Tensor:
        del ctx
        return slopes[0]


def test_a_tensor_that_cannot_be_asked_for_its_graph_does_not_matter(tmp_path: Path) -> None:
    base = torch.ones(3, requires_grad=True) * 2
    unusable: Tensor = _AsItIs.apply(base)  # type: ignore[no-untyped-call]
    base.add_(1)
    with pytest.raises(RuntimeError, match="is a view and its base"):
        _ = unusable.grad_fn
    layer = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(layer)
    node = layer.weight.view(-1).grad_fn  # keeps the node that accumulates: graphs are looked for
    with offload(model, None, config_of("disk", tmp_path)):
        model(torch.ones(3, WIDTH)).sum().backward()
    del node, unusable


def test_a_graph_that_still_needs_a_parameter_is_refused_by_name(tmp_path: Path) -> None:
    for model in (nn.Sequential(nn.Linear(WIDTH, WIDTH), Product()), nn.Sequential(Product())):
        x = torch.randn(3, WIDTH, requires_grad=True)
        loss = model(x).tanh().sum()
        with pytest.raises(UsageError, match=r"a graph of an earlier forward.*weight"):
            offload(model, None, config_of("disk", tmp_path))
        loss.backward()
        with offload(model, None, config_of("disk", tmp_path)):
            pass
        assert loss.grad_fn is not None


class _Box:
    def __init__(self, held: object) -> None:
        self.held = held


@pytest.mark.parametrize(
    "pack",
    [lambda t: t, lambda t: ("packed", [t]), _Box, lambda t: _Box({"it": t})],
    ids=["plain", "list", "box", "deep"],
)
def test_a_graph_whose_hooks_hold_a_parameter_is_refused_and_they_are_not_asked(
    pack: Callable[[Tensor], object], tmp_path: Path
) -> None:
    def unpack(_: object) -> Tensor:
        raise AssertionError("nobody has called backward")

    model = nn.Sequential(Product())
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = model(torch.randn(3, WIDTH, requires_grad=True)).sum()
    with pytest.raises(UsageError, match=r"a graph of an earlier forward.*weight"):
        offload(model, None, config_of("disk", tmp_path))
    del loss
    offload(model, None, config_of("disk", tmp_path)).close()


class _WithModule(_Box):
    """Refers to a module, as what computes again does, and holds a copy."""

    def __init__(self, module: nn.Module, copied: Tensor) -> None:
        super().__init__(copied)
        self.module = module


def test_hooks_that_refer_to_the_model_hold_none_of_its_parameters(tmp_path: Path) -> None:
    model = nn.Sequential(Product())
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: _WithModule(model, t.clone()), lambda box: box.held
    ):
        loss = model(torch.randn(3, WIDTH, requires_grad=True)).sum()
    with offload(model, None, config_of("disk", tmp_path)):
        pass
    loss.backward()


HOOKS_AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": contextlib.nullcontext,
    "a user's": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: [t], lambda held: held[0]),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
}


@pytest.mark.parametrize("around", HOOKS_AROUND)
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("layers", [None, ""], ids=["kept", "swapped"])
def test_a_graph_of_the_same_models_former_run_is_in_nobodys_way(
    around: str, is_checkpointed: bool, layers: str | None, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Product())
    x = torch.randn(3, WIDTH, requires_grad=True)
    former = offload(model, None, config_of("disk", tmp_path / "former"), layers=layers)
    with former, HOOKS_AROUND[around]():
        kept = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
    with offload(model, None, config_of("disk", tmp_path / "next")):
        model(x).sum().backward()
    assert kept.grad_fn is not None


def _checkpointed_function(model: nn.Module, x: Tensor) -> Tensor:
    """Use parameters outside their modules."""

    def function(x: Tensor) -> Tensor:
        x = nn.functional.linear(x, model.get_parameter("0.weight")).relu()
        return nn.functional.linear(x, model.get_parameter("1.weight"), model.get_parameter("1.bias"))

    return cast("Tensor", checkpoint(function, x, use_reentrant=False))


CHECKPOINTED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "model": lambda model, x: cast("Tensor", checkpoint(model, x, use_reentrant=False)),
    "reentrant": lambda model, x: cast("Tensor", checkpoint(model, x, use_reentrant=True)),
    "function": _checkpointed_function,
}


@every_layout
@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_a_checkpoint_from_before_the_run_is_computed_again_in_it(
    kind: str, layout: str, tmp_path: Path
) -> None:
    x = torch.randn(3, WIDTH, requires_grad=True)
    losses: list[Tensor] = []

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        losses.append(CHECKPOINTED[kind](model, x).square().mean())
        return model, _adam(model)

    def loop(trial: Trial) -> None:
        trial.model(torch.randn(3, WIDTH)).sum().backward()
        losses[-1].backward()
        for parameter in trial.model.parameters():
            trial.log(parameter.grad)
        trial.optimizer.step()

    assert_same(build, loop, layout, tmp_path)


def test_a_checkpoint_of_another_model_is_not_computed_by_an_opening(tmp_path: Path) -> None:
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    kept = checkpoint(other, torch.randn(3, WIDTH), use_reentrant=False)
    count = other.get_buffer("1.num_batches_tracked")
    assert count == 1
    layer = nn.Linear(WIDTH, WIDTH)
    node = layer.weight.view(-1).grad_fn  # keeps the node that accumulates: graphs are looked for
    with offload(nn.Sequential(layer), None, config_of("disk", tmp_path)):
        assert count == 1
    del node
    kept.sum().backward()
    assert count == 2


def test_parameters_that_autograd_knows_without_needing_them_are_no_reason_to_refuse(tmp_path: Path) -> None:
    """As where a wrapper such as DistributedDataParallel keeps their accumulation nodes."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]  # type: ignore[union-attr]
    total = sum(p.sum() for p in model.parameters())
    with offload(model, None, config_of("disk", tmp_path)):
        total.backward()  # type: ignore[union-attr]
        assert all(p.grad is not None and p.grad.eq(1).all() for p in model.parameters())
    assert len(nodes) == 2


def test_an_ignored_parameter_that_shares_memory_with_another_is_refused_by_name(tmp_path: Path) -> None:
    model = Shared(_tie)
    with pytest.raises(
        UsageError, match=r"'first\.weight', which is ignored, shares memory with .*'last\.weight'"
    ):
        offload(model, None, config_of("disk", tmp_path), ignored=["first"])
    with offload(model, None, config_of("disk", tmp_path), pinned=["first"]), torch.no_grad():
        model.first.weight.zero_()
        assert model.last.weight.abs().sum() == 0


def test_a_graph_of_a_run_that_is_closed_is_in_nobodys_way(tmp_path: Path) -> None:
    former = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with offload(former, None, config_of("disk", tmp_path / "former")):
        kept = former(torch.randn(3, WIDTH)).sum()
    model = nn.Sequential(Product())
    output = model(torch.randn(3, WIDTH))
    output.sum().backward()  # its graph refers to the parameter, and needs it no more
    with offload(model, None, config_of("host", tmp_path / "other")):
        assert output.grad_fn is not None
    assert kept.grad_fn is not None
