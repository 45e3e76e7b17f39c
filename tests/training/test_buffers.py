"""Large buffers travel as parameters do; every bit, stride and class is what plain PyTorch leaves."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from tests import target
from tests.training.buffer_models import (
    ALL,
    KINDS,
    WRITES,
    Holder,
    Shared,
    Writing,
    head,
    holders,
    in_place,
    of,
    travels,
)
from tests.training.twins import (
    WIDTH,
    Loop,
    Optimizer,
    Trial,
    adam,
    assert_same,
    batch,
    config_of,
    every_layout,
    is_on_accelerator,
    step,
    steps,
)
from tierstore.errors import UsageError
from tierstore.training import offload
from tierstore.training.modules.buffers import group_buffers

# ---------------------------------------------------------------------- what travels


@every_layout
def test_buffers_of_every_kind_travel_and_keep_every_bit(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        if trial.run is not None:
            names = {name for name, each in trial.model.named_buffers() if travels(each)}
            assert names == {
                f"{n}.held" for n, kind in enumerate(KINDS) if kind not in ("number", "conjugated")
            }
        for _ in range(3):
            step(trial)
        for buffer in trial.model.buffers():
            trial.log(buffer)

    assert_same(holders(*KINDS), loop, layout, tmp_path, ALL)


@every_layout
def test_buffers_that_no_state_dict_holds_travel_too(layout: str, tmp_path: Path) -> None:
    build = of(*[lambda: Holder(KINDS["float"], persistent=False)] * 4)

    def loop(trial: Trial) -> None:
        steps(3)(trial)
        assert "0.held" not in trial.model.state_dict()
        assert trial.run is None or travels(trial.model.get_buffer("0.held"))

    assert_same(build, loop, layout, tmp_path, ALL)


def test_only_those_that_are_large_enough_travel(tmp_path: Path) -> None:
    model = nn.Sequential(Holder(KINDS["float"]), Holder(KINDS["half"]), head())
    for size, found in [("9KB", [True, False]), ("4KB", [True, True]), ("10KB", [False, False])]:
        with offload(model, None, config_of("host", tmp_path, {"buffer_min_size": size})):
            assert [travels(each) for each in model.buffers()] == found
    for more in ({}, {"buffer_min_size": None}):
        with offload(model, None, config_of("host", tmp_path, more)):
            assert not any(map(travels, model.buffers()))


def test_what_takes_little_memory_is_small_whatever_its_shape() -> None:
    model = Holder(lambda: torch.ones(1).expand(1000, 1000))
    assert group_buffers(model, 1000) == []


def test_a_buffer_stays_while_something_else_refers_to_its_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(Holder(KINDS["float"]), Holder(KINDS["float"]), head())
    kept = model.get_buffer("0.held")[1:]
    with offload(model, None, config_of("host", tmp_path, ALL)):
        assert [travels(each) for each in model.buffers()] == [False, True]
        kept.zero_()
        assert not model.get_buffer("0.held")[1:].any()
    assert (
        "1 large buffers (9.0 KiB) stay where the model computes, and are not offloaded: 0.held"
        in caplog.text
    )
    del kept
    graph = model[0](torch.randn(2, WIDTH)).sum()
    with offload(model, None, config_of("host", tmp_path, ALL)):
        assert [travels(each) for each in model.buffers()] == [False, True]
        graph.backward()
    del graph
    with offload(model, None, config_of("host", tmp_path, ALL)):
        assert all(map(travels, model.buffers()))


def test_what_a_buffer_is_a_view_of_keeps_no_memory(tmp_path: Path) -> None:
    model = Holder(lambda: torch.ones(WIDTH, WIDTH).tril().view(1, WIDTH, WIDTH))
    base = model.held._base
    assert base is not None
    reference = weakref.ref(base)
    with offload(model, None, config_of("host", tmp_path, ALL)):
        assert not travels(model.held)
    del base
    with offload(model, None, config_of("host", tmp_path, ALL)):
        assert travels(model.held)
        assert reference() is None


def odd_buffers() -> dict[str, Tensor]:
    """Return buffers that cannot get other memory without somebody's notice."""
    with torch.inference_mode():
        inference = torch.randn(4)
    return {
        "needs gradients": torch.randn(4, requires_grad=True),
        "own class": torch.randn(4).as_subclass(type("Own", (Tensor,), {})),
        "parameter": nn.Parameter(torch.randn(4), requires_grad=False),
        "sparse": torch.eye(3).to_sparse(),
        "inference": inference,
        "shared": torch.randn(4).share_memory_(),
        "number": torch.tensor(1),
    }


@pytest.mark.skipif(is_on_accelerator, reason="no such tensors there")
def test_what_cannot_travel_is_left_as_it_is(tmp_path: Path) -> None:
    model = nn.Sequential(head())
    before = odd_buffers()
    for name, buffer in before.items():
        model.register_buffer(name.replace(" ", "_"), buffer)
    with offload(model, None, config_of("host", tmp_path, ALL)):
        assert not any(map(travels, model.buffers()))
        assert all(a is b for a, b in zip(model.buffers(), before.values(), strict=True))
    assert all(a is b for a, b in zip(model.buffers(), before.values(), strict=True))


# ---------------------------------------------------------------------- sharing


@every_layout
def test_buffers_that_share_memory_are_one_bundle(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        steps(3)(trial)
        if trial.run is not None:
            keys = [key for key in trial.run.store if key.startswith("buffer/")]
            assert keys == ["buffer/0.one.held"]

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        return of(Shared)()

    assert_same(build, loop, layout, tmp_path, ALL)
    assert_same(of(lambda: Shared(is_view=True)), steps(3), layout, tmp_path, ALL)
    model, _ = build()
    with offload(model, None, config_of(layout, tmp_path, ALL)):
        pass
    shared = cast("Shared", cast("nn.Sequential", model)[0])
    assert shared.one.held is shared.two.held
    shared.one.held.zero_()
    assert not shared.other.held.any()


def test_a_buffer_that_aliases_a_parameter_is_refused_as_ever(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model.register_buffer("alias", model.get_parameter("0.weight").detach())
    with pytest.raises(UsageError, match=r"the buffer 'alias' shares memory with the parameter '0\.weight'"):
        offload(model, None, config_of("host", tmp_path, ALL))
    with offload(model, None, config_of("host", tmp_path, ALL), ignored=["0"]):
        assert not travels(model.get_buffer("alias"))


# ---------------------------------------------------------------------- writing


@every_layout
@pytest.mark.parametrize("how", WRITES)
def test_what_a_module_writes_to_its_buffer_is_kept(how: str, layout: str, tmp_path: Path) -> None:
    if how == "numpy" and is_on_accelerator:
        pytest.skip("its memory cannot be read by the host")
    assert_same(of(*[lambda: Writing(WRITES[how])] * 4), steps(3), layout, tmp_path, ALL)


@every_layout
def test_running_statistics_which_no_version_counter_tells_of_are_kept(layout: str, tmp_path: Path) -> None:
    layer = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))  # noqa: E731

    def loop(trial: Trial) -> None:
        steps(3)(trial)
        trial.model.eval()
        trial.log(trial.model(batch()[0]))

    assert_same(of(*[layer] * 5), loop, layout, tmp_path, ALL)


class Norm(nn.Module):
    """Uses its child's running statistics, and does not call the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise as the child would."""
        child = self.child
        y = F.batch_norm(x, child.running_mean, child.running_var, child.weight, child.bias, training=True)
        return cast("Tensor", self.linear(y))


@every_layout
def test_statistics_that_a_parent_writes_are_kept(layout: str, tmp_path: Path) -> None:
    assert_same(of(*[Norm] * 5), steps(3), layout, tmp_path, ALL)


@pytest.mark.skipif(is_on_accelerator, reason="what the host cannot read counts as written")
def test_a_buffer_that_nobody_writes_is_not_written_back(tmp_path: Path) -> None:
    model = nn.Sequential(*(Holder(KINDS["mask"]) for _ in range(20)), head())
    config = config_of("disk", tmp_path, {**ALL, "offload_cpu_size": "48KB"})
    with offload(model.requires_grad_(requires_grad=False), None, config) as run, torch.no_grad():
        for _ in range(2):
            model(batch()[0])
        before = run.stats().traffic["host", "disk"].nbytes
        for _ in range(3):
            model(batch()[0])
        assert run.stats().traffic["host", "disk"].nbytes == before
        assert run.stats().traffic["disk", "host"].nbytes > 0


# ---------------------------------------------------------------------- replacing


class Replacing(nn.Module):
    """Has another buffer after each call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.how = how
        self.register_buffer("state", torch.ones(WIDTH, WIDTH))
        self.state: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Use it, and replace it: backward needs the former one."""
        x = cast("Tensor", self.linear(x))
        y = x + torch.tanh(x @ self.state.clone())
        new = self.state * 0.9 + x.detach().mean()
        if self.how == "assigned":
            self.state = new
        elif self.how == "in the dict":
            self._buffers["state"] = new
        elif self.how == "registered":
            self.register_buffer("state", new)
        elif self.how == "pointed":
            self.state.data = new
        elif self.how == "set":
            self.state.set_(new.clone())  # type: ignore[call-overload]
        elif self.how == "deleted":
            del self.state
            self.state = new
        return y


@every_layout
@pytest.mark.parametrize("how", ["assigned", "in the dict", "registered", "pointed", "set", "deleted"])
def test_a_buffer_that_is_replaced_is_the_new_one(how: str, layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for number in range(4):
            step(trial)
            if trial.run is not None and number == 2 and how not in ("pointed", "set"):
                assert not any(map(travels, trial.model.buffers()))
                assert not [key for key in trial.run.store if key.startswith("buffer/")]
        for buffer in trial.model.buffers():
            trial.log(buffer)

    assert_same(of(*[lambda: Replacing(how)] * 4), loop, layout, tmp_path, ALL)


def test_a_replaced_buffer_that_somebody_keeps_has_its_bytes(tmp_path: Path) -> None:
    model = nn.Sequential(Holder(KINDS["float"]), head())
    before = model.get_buffer("0.held").clone()
    with offload(model, adam(model), config_of("three", tmp_path, ALL)) as run:
        kept = model.get_buffer("0.held")
        loss = model(batch()[0]).sum()
        model[0].held = torch.zeros(WIDTH, WIDTH)
        loss.backward()
        model(batch()[0])
        assert torch.equal(kept, before)
        del loss
        assert "buffer/0.held" in run.store
    assert type(kept) is Tensor
    assert torch.equal(kept, before)
    assert not model.get_buffer("0.held").any()


@every_layout
def test_a_buffer_that_is_replaced_by_its_own_alias_keeps_its_bytes(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            step(trial)
            trial.model[0].held = trial.model[0].held.detach()  # type: ignore[index]
        with torch.no_grad():
            trial.model.get_buffer("0.held").mul_(0.5)
        step(trial)
        for buffer in trial.model.buffers():
            trial.log(buffer)

    assert_same(of(*[lambda: Holder(KINDS["float"])] * 3), loop, layout, tmp_path, ALL)


# ---------------------------------------------------------------------- outside of the module


class Tables(nn.Module):
    """Has buffers and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.rand(WIDTH) > 0.5)
        self.register_buffer("index", torch.randperm(WIDTH))
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))
        self.mask: Tensor
        self.index: Tensor
        self.table: Tensor


class Parent(nn.Module):
    """Uses its child's buffers and never calls the child: in functions, as an index, by an alias."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Tables()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Compute with them."""
        x = cast("Tensor", self.linear(x))[:, self.child.index]
        x = torch.where(self.child.mask, x, -x)
        x[:, self.child.mask] = x[:, self.child.mask] * 2
        y: Tensor = x + torch.tanh(x @ self.child.table.t().clone())
        with torch.no_grad():
            self.child.table.mul_(0.99)
        return y.masked_fill(~self.child.mask, 0.5)


@every_layout
def test_a_buffer_is_brought_where_it_is_used_outside_its_module(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            step(trial)
            parent = trial.model.get_submodule("1")
            trial.log(parent.get_buffer("child.table"))
            with torch.no_grad():
                parent.get_buffer("child.table").add_(1.0)
                parent.get_buffer("child.table").data[0] = 3.0
            trial.log(torch.arange(float(WIDTH), device=batch()[0].device)[parent.get_buffer("child.mask")])

    assert_same(of(*[Parent] * 3), loop, layout, tmp_path, ALL)


def copy_everything(trial: Trial) -> None:
    """Copy a model in every way, and use the copies."""
    step(trial)
    copies = [copy.deepcopy(trial.model), pickle.loads(pickle.dumps(trial.model))]
    file = io.BytesIO()
    torch.save(trial.model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert all(type(each) is Tensor for each in loaded.values())
    for each in [*(value for other in copies for value in other.state_dict().values()), *loaded.values()]:
        trial.log(each)
    assert all(type(each) is Tensor for other in copies for each in other.buffers())
    for each in copies:
        trial.log(each(batch()[0]))
    step(trial)


def load_everything(trial: Trial) -> None:
    """Load state dicts, in place and by assignment."""
    first = {name: each.clone() for name, each in trial.model.state_dict().items()}
    steps(2)(trial)
    trial.model.load_state_dict(first)
    step(trial)
    trial.model.load_state_dict({name: each * 2 for name, each in first.items()}, strict=True)
    step(trial)
    buffers = {name: each.clone() for name, each in first.items() if "linear" not in name}
    buffers = {name: each for name, each in buffers.items() if name in dict(trial.model.named_buffers())}
    trial.model.load_state_dict(buffers, strict=False, assign=True)
    step(trial)
    for buffer in trial.model.buffers():
        trial.log(buffer)


def change_types(trial: Trial) -> None:
    """Give the model other types, and back."""
    step(trial)
    for change in ("double", "float", "bfloat16", "float"):
        getattr(trial.model, change)()
        for buffer in trial.model.buffers():
            trial.log(buffer)
    step(trial)
    trial.model.to(target.accelerator or "cpu")
    step(trial)


def call_functionally(trial: Trial) -> None:
    """Call the model with other tensors, and with its own."""
    values = {**dict(trial.model.named_parameters()), **dict(trial.model.named_buffers())}
    trial.log(torch.func.functional_call(trial.model, values, (batch()[0],)))
    other = {name: each.detach().clone() for name, each in values.items()}
    trial.log(torch.func.functional_call(trial.model, other, (batch()[0],)))
    step(trial)


LOOPS: dict[str, Loop] = {
    "copied": copy_everything,
    "loaded": load_everything,
    "of other types": change_types,
    "functional": call_functionally,
}


@every_layout
@pytest.mark.parametrize("what", LOOPS)
def test_models_with_buffers_are(what: str, layout: str, tmp_path: Path) -> None:
    build = of(lambda: Holder(KINDS["float"]), lambda: Writing(in_place), lambda: Holder(KINDS["transposed"]))
    assert_same(build, LOOPS[what], layout, tmp_path, ALL)
