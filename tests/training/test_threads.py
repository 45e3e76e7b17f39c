"""Several threads use one offloaded model at once: what is each thread's own, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.twins import assert_equal_lists, config_of, every_layout, with_device
from tierstore.errors import UsageError
from tierstore.training import offload

WIDTH = 32
TIMEOUT_S = 60


class Parent(nn.Module):
    """Computes with its child, then with the child's weight, which it reads itself."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.child(inputs) @ self.child.weight * self.scale)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Parent() for _ in range(8)))


def inputs_of(number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def roomy(layout: str, path: Path) -> dict[str, object]:
    """Return a layout with room for what a few threads have in use at once."""
    more = {"offload_cpu_size": "96KB"} if layout == "disk" else {}
    return config_of(layout, path, {**more, **with_device(layout, "256KB")})


def at_once(*acts: Callable[[], object]) -> list[Any]:
    """Run something in a thread each, from one moment on; return what they return, raise what one raises."""
    results: list[Any] = [None] * len(acts)
    failures: list[BaseException] = []
    start = threading.Barrier(len(acts))

    def run(number: int) -> None:
        try:
            start.wait(TIMEOUT_S)
            results[number] = acts[number]()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


class Midway(TorchDispatchMode):
    """Does something in the midst of each operator of one name, in this thread."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._act = name, act

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:  # noqa: ANN401 - torch's own
        if func.__name__.startswith(self._name):
            self._act()
        return func(*args, **(kwargs or {}))


def backward(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs).sum()
    loss.backward()
    return loss.detach()


@every_layout
def test_a_state_dict_shares_no_entry_with_one_that_another_thread_makes_meanwhile(
    layout: str, tmp_path: Path
) -> None:
    model = build()
    expected = [each.clone() for each in model.state_dict().values()]
    others: list[dict[str, Tensor]] = []
    is_in_another = threading.Event()
    with offload(model, None, roomy(layout, tmp_path)):

        def make_another(*_: object) -> None:
            if not is_in_another.is_set():
                is_in_another.set()
                others.extend(at_once(model.state_dict))

        model[3].register_state_dict_pre_hook(make_another)
        found = model.state_dict()
        assert_equal_lists(expected, list(found.values()))
        assert_equal_lists(expected, list(others[0].values()))
        assert not {id(each) for each in found.values()} & {id(each) for each in others[0].values()}


# --- what is refused -------------------------------------------------------------------------------


def test_a_backward_that_adds_to_what_another_thread_steps_with_is_refused(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    config = {**roomy("host", tmp_path), "offload_grad": "cpu"}
    failures: list[BaseException] = []

    def add() -> None:
        try:
            loss.backward()
        except BaseException as error:  # noqa: BLE001 - looked at below
            failures.append(error)

    def let_add() -> None:
        if not failures:
            thread = threading.Thread(target=add)
            thread.start()
            thread.join(TIMEOUT_S)

    with offload(model, optimizer, config):
        backward(model, inputs_of(0))
        loss = model(inputs_of(1)).sum()
        with Midway("add_", let_add):
            optimizer.step()
        assert [type(each) for each in failures] == [UsageError]
        assert all(each.grad is not None for each in model.parameters())
