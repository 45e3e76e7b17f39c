"""Signals at every line and moment of a training step: nothing is lost, and the next step is right.

The trace function sends a signal where the library is, so that its handler has to wait.  A signal of a timer
comes in PyTorch's part of a step, too; a trace function would raise there where no signal can, such as at the
end of a ``with`` over a context manager of C.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import tierstore as ts
from tests.fault.test_signals import AlarmError, AtLine, handled, raising, send
from tests.sampling import IS_CI
from tierstore import signals, torch_private
from tierstore.training import offload

ROOT = str(Path(ts.__file__).parent)
LAYOUTS: dict[str, dict[str, object]] = {
    "disk": {"device": "cpu", "offload_cpu_size": "3KB", "offload_disk_size": "1MB"},
    "three": {
        "device": "emulated",
        "max_device_memory": "16KB",
        "offload_cpu_size": "3KB",
        "offload_disk_size": "1MB",
        "device_options": {"overwrite_freed": True},
    },
}
INPUT = torch.linspace(-1, 1, 16).view(2, 8)
State = list[torch.Tensor]
Place = tuple[str, int]  # a file and a line


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(INPUT).square().sum().backward()
    optimizer.step()


def state_of(model: nn.Module) -> State:
    return [value.clone() for value in model.state_dict().values()]


def twin_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a plain model with the values of an offloaded one, and its optimizer."""
    plain, plainly = build()
    plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    plainly.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return plain, plainly


def bits(state: State) -> list[bytes]:
    return [value.numpy().tobytes() for value in state]


def check_what_follows(
    model: nn.Module, optimizer: torch.optim.Optimizer, before: State, after: State
) -> None:
    """Every parameter is as before the step or as after it, and the next step is that of plain PyTorch."""
    for now, old, new in zip(bits(state_of(model)), bits(before), bits(after), strict=True):
        assert now in (old, new)
    plain, plainly = twin_of(model, optimizer)
    step(model, optimizer)
    step(plain, plainly)
    assert bits(state_of(model)) == bits(state_of(plain))


@contextlib.contextmanager
def at_moment(share: float, took_s: float) -> Iterator[None]:
    """Send a signal when a share of what a step takes is over."""
    signal.setitimer(signal.ITIMER_REAL, max(1e-6, share * took_s))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def wait_for_handlers() -> None:
    """Let what waits be called here."""
    while signals.waiting:
        pass


class Trained:
    """A run in its third step, and what may be found after the fourth."""

    def __init__(self, settings: dict[str, object], path: Path) -> None:
        self.model, self.optimizer = build()
        self.run = offload(self.model, self.optimizer, {**settings, "offload_path": str(path)})
        for _ in range(3):
            began_s = time.perf_counter()
            step(self.model, self.optimizer)
            self.took_s = time.perf_counter() - began_s

    def interrupted(self, met: AbstractContextManager[object], raised: type[BaseException]) -> bool:
        """Make a step that a signal comes in, and check what follows; return whether it was interrupted."""
        before = state_of(self.model)
        plain, plainly = twin_of(self.model, self.optimizer)
        step(plain, plainly)
        was_interrupted = False
        try:
            with met:
                step(self.model, self.optimizer)
            wait_for_handlers()
        except raised:
            was_interrupted = True
        assert not signals.waiting
        check_what_follows(self.model, self.optimizer, before, state_of(plain))
        self.run.store.check()
        return was_interrupted

    def close(self) -> None:
        """Leave, and check that everything came back."""
        last = bits(state_of(self.model))
        self.run.close()
        assert bits([value.detach() for value in self.model.state_dict().values()]) == last


class AtSource(AtLine):
    """Does something where our code comes to a line of its source for the first time, or notes all lines."""

    def __init__(self, place: Place | None, act: Callable[[], object]) -> None:
        super().__init__(0, act, of=(ROOT,))
        self.place = place
        self.seen: dict[Place, None] = {}

    def trace(self, frame: FrameType, event: str, argument: object) -> object:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and frame.f_code.co_filename.startswith(self.of):
            self.seen[place] = None
            if place == self.place and self.line is None:
                self.line = f"{place[0]}:{place[1]}"
                self.act()
        return super().trace(frame, event, argument)


def sweep(layout: str, path: Path, every: int, raised: type[BaseException]) -> int:
    """Have a signal at each line of our source that a step comes to; return how many came."""
    with handled(raising(raised)):
        trained = Trained(LAYOUTS[layout], path)
        whole = AtSource(None, send)
        with whole:
            step(trained.model, trained.optimizer)
        came = 0
        for place in itertools.islice(whole.seen, 0, None, every):
            met = AtSource(place, send)
            was_interrupted = trained.interrupted(met, raised)
            assert was_interrupted is (met.line is not None), place
            came += was_interrupted  # not every step comes to all of them: what is in which tier differs
        trained.close()
    return came


def shoot(layout: str, path: Path, count: int, raised: type[BaseException]) -> int:
    """Have a signal at a later moment in each of ``count`` steps; return how many were interrupted."""
    with handled(raising(raised), signal.SIGALRM):
        trained = Trained(LAYOUTS[layout], path)
        interrupted = 0
        for number in range(count):
            interrupted += trained.interrupted(at_moment(number / count, trained.took_s), raised)
        trained.close()
        return interrupted


@pytest.mark.parametrize("raised", [KeyboardInterrupt, AlarmError])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_step_after_a_signal_is_right(layout: str, raised: type[BaseException], tmp_path: Path) -> None:
    every, least = (303, 3) if IS_CI else (101, 10)
    assert sweep(layout, tmp_path, every, raised) > least


@pytest.mark.parametrize("raised", [KeyboardInterrupt, AlarmError])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_step_after_a_signal_of_a_timer_is_right(
    layout: str, raised: type[BaseException], tmp_path: Path
) -> None:
    assert shoot(layout, tmp_path, 30, raised) > 5


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("raised", [KeyboardInterrupt, AlarmError])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_step_after_a_signal_at_any_line_is_right(
    layout: str, raised: type[BaseException], tmp_path: Path
) -> None:
    assert sweep(layout, tmp_path / "lines", 1, raised) > 1000
    assert shoot(layout, tmp_path / "moments", 10_000, raised) > 1000


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_handler_may_look_at_the_model_and_its_run(layout: str, tmp_path: Path) -> None:
    model, optimizer = build()
    seen: list[State] = []
    with offload(model, optimizer, {**LAYOUTS[layout], "offload_path": str(tmp_path)}) as run:

        def look(_number: int, _frame: object) -> None:
            run.stats()
            seen.append(state_of(model))

        step(model, optimizer)
        with handled(look):
            for number in range(12):
                with AtLine(1 + number * 1997, send, of=(ROOT,)) as met:
                    step(model, optimizer)
                wait_for_handlers()
                if met.line is None:
                    break
    assert len(seen) == number + (met.line is not None)
    assert len(seen) > 5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("disabled", [torch.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction])
def test_a_handler_sees_values_where_pytorch_has_switched_subclasses_off(
    disabled: type[contextlib.AbstractContextManager[None]], layout: str, tmp_path: Path
) -> None:
    """As at the end of each `record_function`, and so of each optimizer's `zero_grad`."""
    model, optimizer = build()
    seen: list[State] = []
    with offload(model, optimizer, {**LAYOUTS[layout], "offload_path": str(tmp_path)}):
        step(model, optimizer)
        expected = state_of(model)
        with handled(lambda _number, _frame: seen.append(state_of(model))):
            with disabled():
                send()
                assert not torch_private.are_subclasses_seen()
            wait_for_handlers()
    (found,) = seen
    assert bits(found) == bits(expected)


@pytest.mark.filterwarnings(  # a file was opened, and the interrupt came before its ``with`` began
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_save_that_is_interrupted_leaves_a_checkpoint_and_the_next_one_works(tmp_path: Path) -> None:
    with handled(raising(AlarmError), signal.SIGALRM):
        trained = Trained(LAYOUTS["disk"], tmp_path / "run")
        path = tmp_path / "saved"
        began_s = time.perf_counter()
        trained.run.save(path)
        took_s = time.perf_counter() - began_s
        interrupted = 0
        for number in range(60):
            try:
                with at_moment(number / 60, took_s):
                    trained.run.save(path)
                wait_for_handlers()
            except AlarmError:
                interrupted += 1
            trained.run.load(path)
        trained.run.save(path)
        trained.close()
    assert interrupted > 5
    assert [each.name for each in tmp_path.iterdir() if "old" in each.name] == []


def test_a_run_that_is_closed_in_the_midst_of_its_end_is_closed_once(tmp_path: Path) -> None:
    for number in itertools.count():
        trained = Trained(LAYOUTS["disk"], tmp_path / str(number))
        before = state_of(trained.model)
        with handled(lambda *_, run=trained.run: run.close()):
            with AtLine(1 + (2003 if IS_CI else 401) * number, send, of=(ROOT,)) as met:
                trained.run.close()
            wait_for_handlers()
        assert bits(state_of(trained.model)) == bits(before), met.line
        if met.line is None:
            return
