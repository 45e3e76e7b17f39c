"""Forks during a run: workers that leave the model alone never notice, others are told, training goes on."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.fault.test_forks import all_held, locks_of
from tests.forked import in_child, run_python
from tests.training.swap_models import Llama, config, inputs, whole_layers
from tierstore.errors import StoreForked
from tierstore.training import Offload, offload, swap

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

LAYOUTS: dict[str, dict[str, object]] = {
    "host": {"device": "cpu", "offload_cpu_size": "48KB", "offload_disk_size": "4MB"},
    "device": {
        "device": "emulated",
        "max_device_memory": "64KB",
        "offload_cpu_size": "48KB",
        "offload_disk_size": "4MB",
    },
    "durable": {"device": "cpu", "offload_cpu_size": "48KB", "offload_disk_size": "4MB", "durable": True},
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
    inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@contextlib.contextmanager
def running(layout: str, path: Path) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Offload]]:
    """Train before what happens inside the context, and after it; see that it has made no difference."""
    model, optimizer = build()
    plain, plain_optimizer = copy.deepcopy(model), None
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    expected = [step(plain, plain_optimizer, seed) for seed in range(4)]
    with offload(model, optimizer, {**LAYOUTS[layout], "offload_path": str(path)}) as run:
        found = [step(model, optimizer, seed) for seed in range(2)]
        yield model, optimizer, run
        found += [step(model, optimizer, seed) for seed in range(2, 4)]
        run.store.check()
    assert torch.equal(torch.stack(found), torch.stack(expected))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


Use = Callable[[nn.Module, torch.optim.Optimizer, Offload], object]
INPUT = torch.ones(2, 32)

USES: dict[str, Use] = {
    "stats": lambda model, optimizer, run: run.stats(),
    "save": lambda model, optimizer, run: run.save("nowhere"),
    "load": lambda model, optimizer, run: run.load("nowhere"),
    "checkpoint": lambda model, optimizer, run: run.checkpoint(),
    "suspend": lambda model, optimizer, run: run.suspend(),
    "resume": lambda model, optimizer, run: run.resume(),
    "clip": lambda model, optimizer, run: run.clip_grad_norm_(1.0),
    "store": lambda model, optimizer, run: run.store.keys(),
    "the model": lambda model, optimizer, run: model(INPUT),
    "the model in evaluation": lambda model, optimizer, run: torch.no_grad()(model)(INPUT),
    "a layer": lambda model, optimizer, run: model.get_submodule("1")(INPUT),
    "a parameter": lambda model, optimizer, run: next(model.parameters()).sum(),
    "its values": lambda model, optimizer, run: next(model.parameters()).tolist(),
    "its data": lambda model, optimizer, run: next(model.parameters()).data,
    "its bytes": lambda model, optimizer, run: next(model.parameters()).detach().numpy(),
    "a write": lambda model, optimizer, run: torch.no_grad()(Tensor.zero_)(next(model.parameters())),
    "a copy": lambda model, optimizer, run: copy.deepcopy(model),
    "a step": lambda model, optimizer, run: optimizer.step(),
    "state": lambda model, optimizer, run: optimizer.state[next(model.parameters())]["exp_avg"].sum(),
    "a state dict": lambda model, optimizer, run: sum(each.sum() for each in model.state_dict().values()),
}


def use_all(model: nn.Module, optimizer: torch.optim.Optimizer, run: Offload) -> None:
    """Try everything, and end the run in every way.  In the child."""
    for name, use in USES.items():
        try:
            with pytest.raises(StoreForked, match="'spawn'"):
                use(model, optimizer, run)
        except BaseException as failure:
            failure.add_note(f"in {name!r}")
            raise
    with run:
        pass
    run.close()
    assert next(model.parameters()).shape == (32, 32)
    assert "Linear" in repr(model)


@every_layout
def test_whatever_a_child_does_with_a_run_is_refused_by_name(layout: str, tmp_path: Path) -> None:
    with running(layout, tmp_path / "x") as parts:
        in_child(lambda: use_all(*parts))


IN_A_THREAD = """
import sys
from pathlib import Path
from tests.forked import in_child, in_thread
from tests.training.test_forks import LAYOUTS, running, use_all
for layout in LAYOUTS:
    with running(layout, Path(sys.argv[1]) / layout) as parts:
        in_thread(lambda: in_child(lambda: use_all(*parts)))
"""


def test_a_child_that_a_thread_makes_is_told_the_same(tmp_path: Path) -> None:
    """In a process of its own: among what hundreds of other tests leave, such a child has been killed."""
    run_python(IN_A_THREAD, str(tmp_path))


@every_layout
def test_a_child_waits_for_no_lock_of_a_run_that_a_thread_of_its_parent_holds(
    layout: str, tmp_path: Path
) -> None:
    with running(layout, tmp_path / "x") as parts:
        locks = locks_of(parts[2])
        assert len(locks) > 20
        with all_held(locks):
            in_child(lambda: use_all(*parts))


@every_layout
def test_a_fork_in_the_midst_of_a_forward_and_a_backward_pass_changes_nothing(
    layout: str, tmp_path: Path
) -> None:
    with running(layout, tmp_path / "x") as (model, optimizer, run):
        forked: list[str] = []

        def fork(what: str) -> None:
            forked.append(what)
            in_child(run.close)

        layer = model.get_submodule("2")
        handles = [
            layer.register_forward_hook(lambda *_: fork("forward")),
            layer.register_full_backward_hook(lambda *_: fork("backward")),
            optimizer.register_step_pre_hook(lambda *_: fork("step")),
        ]
        model(INPUT).sum().backward()
        optimizer.register_step_pre_hook(lambda *_: None)
        optimizer.zero_grad()
        for handle in handles:
            handle.remove()
        assert forked == ["forward", "backward"]


class Squares(Dataset[Tensor]):
    """What a worker computes without the model."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((32,), float(index)) ** 2


class Peeking(Squares):
    """Data that use the model, which a worker must not."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            return self._model(super().__getitem__(index))  # type: ignore[no-any-return]


@every_layout
def test_workers_of_a_loader_that_do_not_use_the_model_never_notice(layout: str, tmp_path: Path) -> None:
    with running(layout, tmp_path / "x") as (model, _, _):
        loader = DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        found = []
        for batch in loader:
            with torch.no_grad():
                model(batch)
            found.append(batch)
        assert torch.equal(torch.cat(found), torch.stack([Squares()[n] for n in range(8)]))


def test_a_worker_of_a_loader_that_uses_the_model_says_why_it_cannot(tmp_path: Path) -> None:
    with running("host", tmp_path / "x") as (model, _, _):
        loader = DataLoader(Peeking(model), num_workers=1, multiprocessing_context="fork")
        with pytest.raises(StoreForked, match="'spawn'"):
            list(loader)


def test_a_process_of_multiprocessing_ends_by_itself(tmp_path: Path) -> None:
    with running("host", tmp_path / "x") as (model, optimizer, run):
        child = multiprocessing.get_context("fork").Process(target=use_all, args=(model, optimizer, run))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, range(-4, 4)) == [4, 3, 2, 1, 0, 1, 2, 3]


def test_a_child_trains_a_model_of_its_own(tmp_path: Path) -> None:
    def train() -> None:
        with running("host", tmp_path / "y"):
            pass

    with running("host", tmp_path / "x"):
        in_child(train)


def test_the_store_of_a_swap_is_its_parents(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Llama()
    torch.manual_seed(1)  # for dropout
    model(inputs()).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with swap(model, config(tmp_path, whole_layers())) as swapped:

        def use() -> None:
            for act in (lambda: model(inputs()), loss.backward, swapped.stats):
                with pytest.raises(StoreForked):
                    act()
            swapped.close()

        torch.manual_seed(1)
        loss = model(inputs()).sum()
        in_child(use)
        with all_held(locks_of(swapped)):
            in_child(use)
        loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)
