"""Nothing is lost in the end: whatever an interrupt or an error hits while a model runs, opens or closes."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

import tierstore as ts
from tests.fault.test_interrupts import InterruptAt
from tests.sampling import IS_CI
from tests.training.leases import leased_bytes
from tests.training.twins import same
from tierstore.errors import BackendError, KeyNotFound, StoreClosed, TierStoreError
from tierstore.training import Offload, offload
from tierstore.training.pytorch import own_work
from tierstore.training.pytorch.saved_tensor_hooks import top_hooks

TRAINING = (str(Path(ts.__file__).parent / "training"),)

LAYOUTS: dict[str, dict[str, object]] = {
    "host": {"device": "cpu", "offload_cpu_size": "1MB", "offload_disk_size": 0},
    "device": {
        "device": "emulated",
        "max_device_memory": "64KB",
        "offload_cpu_size": "1MB",
        "offload_disk_size": 0,
        "device_options": {"overwrite_freed": True},
    },
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

# An interrupt in a weak reference's callback is said on stderr and goes no further.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """Leave nothing that dies in the midst of another test, whose interrupt it would take."""
    yield
    gc.collect()


class FailAt(InterruptAt):
    """Raises an ordinary error instead."""

    def _look(self, frame: FrameType, event: str, argument: object) -> None:
        try:
            super()._look(frame, event, argument)
        except KeyboardInterrupt:
            raise BackendError("the medium failed") from None


Inject = Callable[..., InterruptAt]
every_kind = pytest.mark.parametrize("inject", [InterruptAt, FailAt], ids=["interrupt", "error"])


def build(count: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with gradients and with state."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.step()
        model(torch.ones(2, 8)).sum().backward()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every tensor that an offloaded model has to have in the end."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter
        if parameter.grad is not None:
            found[f"the gradient of {name}"] = parameter.grad
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"the optimizer's {entry!r} of {name!r}"] = value
    return found


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def is_ordinary(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


_STRIDE = 51 if IS_CI else 17
every_stride = pytest.mark.parametrize("stride", [_STRIDE, pytest.param(1, marks=pytest.mark.long)])


def numbers(inject: Inject, stride: int, act: Callable[[InterruptAt], None]) -> Iterator[str]:
    """Let ``act`` be hit at a later moment each time; stop when none is left."""
    for number in itertools.count(1, stride):
        injected = inject(number, of=TRAINING)
        act(injected)
        if injected.moment is None:
            assert number > 20
            return
        yield injected.moment


# --- while it runs ------------------------------------------------------------------------------


@every_kind
@every_stride
@every_layout
def test_whatever_hits_a_forward_and_a_backward_pass_leaks_no_lease(
    layout: str, stride: int, inject: Inject, tmp_path: Path
) -> None:
    model, inputs = build(), torch.ones(2, 8)
    expected = model(inputs).detach().clone()
    values = copies(dict(model.named_parameters()))

    def act(injected: InterruptAt) -> None:
        with contextlib.suppress(KeyboardInterrupt, BackendError), injected:
            model(inputs).sum().backward()
        model.zero_grad()

    with offload(model, None, {**LAYOUTS[layout], "offload_path": str(tmp_path)}) as run:
        for moment in numbers(inject, stride, act):
            found = model(inputs)
            assert torch.equal(found, expected), moment
            del found
            with torch.no_grad():
                model(inputs)  # sweeps
            assert leased_bytes(run) == 0, moment
            run.store.check()
    for name, parameter in model.named_parameters():
        assert is_ordinary(parameter)
        assert same(parameter, values[name])


@every_kind
@every_stride
@every_layout
def test_whatever_hits_the_use_of_a_parameter_leaks_no_lease(
    layout: str, stride: int, inject: Inject, tmp_path: Path
) -> None:
    model = build()
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    expected = [weight.detach().clone() for weight in weights]

    def act(injected: InterruptAt) -> None:
        with contextlib.suppress(KeyboardInterrupt, BackendError), injected:
            torch.cat([weight.t() for weight in weights])
        assert top_hooks() is None, "ours are in force no more"

    with offload(model, None, {**LAYOUTS[layout], "offload_path": str(tmp_path)}) as run:
        for moment in numbers(inject, stride, act):
            with torch.no_grad():
                model(torch.ones(2, 8))  # sweeps
            assert leased_bytes(run) == 0, moment
            assert all(map(same, expected, weights)), moment


# --- where it begins and ends -------------------------------------------------------------------


@every_kind
@every_stride
@every_layout
def test_whatever_hits_the_opening_gives_everything_back(
    layout: str, stride: int, inject: Inject, tmp_path: Path
) -> None:
    model, optimizer = trained()
    values = copies(everything(model, optimizer))
    opened: list[Offload] = []

    def act(injected: InterruptAt) -> None:
        with contextlib.suppress(KeyboardInterrupt, BackendError), injected:
            opened.append(offload(model, optimizer, {**LAYOUTS[layout], "offload_path": str(tmp_path)}))
        for run in opened:
            run.close()
        opened.clear()

    for moment in numbers(inject, stride, act):
        found = everything(model, optimizer)
        assert found.keys() == values.keys(), moment
        for name, tensor in found.items():
            assert is_ordinary(tensor), (name, moment)
            assert same(tensor, values[name]), (name, moment)
        assert not any(module._forward_pre_hooks for module in model.modules()), moment


@every_kind
@every_stride
@every_layout
def test_whatever_hits_the_end_loses_nothing(
    layout: str, stride: int, inject: Inject, tmp_path: Path
) -> None:
    count = 0
    for number in itertools.count(2, stride):  # the first moment is before anything of ours runs
        model, optimizer = trained()
        values = copies(everything(model, optimizer))
        run = offload(model, optimizer, {**LAYOUTS[layout], "offload_path": str(tmp_path)})
        injected = inject(number, of=TRAINING)
        with contextlib.suppress(KeyboardInterrupt, BackendError), injected:
            run.__exit__(None, None, None)
        if injected.moment is None:
            break
        assert_all_back(model, optimizer, values, injected.moment)
        count += 1
    assert count > 5


@every_layout
def test_what_cannot_be_brought_back_is_named_and_raises_and_the_rest_is_there(
    layout: str, tmp_path: Path
) -> None:
    seen: set[str] = set()
    while True:
        model, optimizer = trained()
        values = copies(everything(model, optimizer))
        run = offload(model, optimizer, {**LAYOUTS[layout], "offload_path": str(tmp_path)})
        key = next((key for key in run.store if key not in seen), None)
        if key is None:
            run.close()
            break
        seen.add(key)
        run.store.drop(key)  # nobody should, but then its bytes are certainly gone
        with pytest.raises(TierStoreError, match="could not be brought back") as raised:
            run.close()
        run.close()  # says it once
        found = everything(model, optimizer)
        lost = [name for name, tensor in found.items() if not is_ordinary(tensor)]
        assert 0 < len(lost) < len(found)
        assert isinstance(raised.value.__cause__, KeyNotFound)
        for name in lost:
            assert name in str(raised.value)
            assert_gone(found[name])
        for name in found.keys() - set(lost):
            assert same(found[name], values[name]), (name, key)
    assert len(seen) > 1


def assert_gone(tensor: Tensor) -> None:
    uses: list[Callable[[Tensor], object]] = [
        torch.sum,
        torch.clone,
        Tensor.tolist,
        Tensor.numpy,
        copy.deepcopy,
        lambda tensor: tensor + 1,
        lambda tensor: tensor.data,
        lambda tensor: torch.nn.functional.linear(torch.ones(2, 8), tensor),
        lambda tensor: torch._foreach_add([tensor], 1),
    ]
    for use in uses:
        with pytest.raises(StoreClosed, match="could not be brought back"):
            use(tensor)
    assert "could not be brought back" in repr(tensor)
    assert tensor.shape[0] == 8


def test_what_is_gone_can_be_given_other_values(tmp_path: Path) -> None:
    model, optimizer = trained()
    run = offload(model, optimizer, {**LAYOUTS["host"], "offload_path": str(tmp_path)})
    run.store.drop(run.store.keys()[0])
    with pytest.raises(TierStoreError):
        run.close()
    for parameter in model.parameters():
        parameter.data = torch.ones(parameter.shape)
        assert type(parameter) is nn.Parameter
    model(torch.ones(2, 8)).sum().backward()


def test_an_end_where_two_things_fail_tells_both(tmp_path: Path) -> None:
    model, optimizer = trained()
    run = offload(model, optimizer, {**LAYOUTS["host"], "offload_path": str(tmp_path)})
    run.store.close(flush=False)  # which nobody should do
    with pytest.raises(TierStoreError, match="StoreClosed") as raised:
        run.close()
    assert isinstance(raised.value.__cause__, BaseExceptionGroup)
    for parameter in model.parameters():
        assert_gone(parameter)


def assert_all_back(
    model: nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Tensor], moment: str
) -> None:
    found = everything(model, optimizer)
    assert found.keys() == values.keys(), moment
    for name, tensor in found.items():
        assert is_ordinary(tensor), (name, moment)
        assert same(tensor, values[name]), (name, moment)


def test_no_interrupt_leaves_a_thread_in_the_midst_of_the_librarys_own_work() -> None:
    for number in itertools.count(1):
        is_over = False
        with contextlib.suppress(KeyboardInterrupt):
            with InterruptAt(number, of=(str(own_work.__file__),)), own_work.ordinary_mode():
                pass
            is_over = True
        assert not own_work.is_own_work()
        if is_over:
            break
    assert number > 1
