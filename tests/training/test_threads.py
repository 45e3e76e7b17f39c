"""Several threads use one offloaded model at once: the bits of plain PyTorch, whoever ends first."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.leases import leased_bytes
from tests.training.twins import assert_equal_lists, config_of, every_layout, same, with_device
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


def child_of(model: nn.Sequential) -> nn.Linear:
    return cast("Parent", model[3]).child


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


@contextmanager
def in_a_window(module: nn.Module) -> Iterator[Callable[[], None]]:
    """Have another thread stand still in a call of ``module``; yield what lets it end, and waits for that."""
    is_there, may_go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        if threading.current_thread() is thread:
            is_there.set()
            assert may_go_on.wait(TIMEOUT_S)

    def end() -> None:
        may_go_on.set()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()

    handle = module.register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: module(inputs_of(99)))
    thread.start()
    try:
        assert is_there.wait(TIMEOUT_S)
        yield end
    finally:
        end()
        handle.remove()


# --- one closes its window in the midst of another's use ----------------------------------------

MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])


@every_layout
@MODES
def test_a_call_that_ends_takes_no_bytes_from_a_use_in_another_thread(
    mode: Callable[[], Any], layout: str, tmp_path: Path
) -> None:
    model = build()
    child = child_of(model)
    expected = child.weight.detach() * 3
    with offload(model, None, roomy(layout, tmp_path)):
        model(inputs_of(0))
        with in_a_window(child) as end, mode(), Midway("mul", end):
            found = child.weight * 3
        assert same(found.detach(), expected)


@every_layout
@MODES
def test_a_call_that_ends_takes_no_bytes_from_a_threads_first_use(
    mode: Callable[[], Any], layout: str, tmp_path: Path
) -> None:
    model = build()
    child = child_of(model)
    expected = child.weight.detach() * 3
    with offload(model, None, roomy(layout, tmp_path)) as run:
        with in_a_window(child) as end, mode(), Midway("mul", end):
            found = child.weight * 3  # the first that is seen of this thread
        assert same(found.detach(), expected)
        del found
        evaluate(model, [0])
        assert leased_bytes(run) == 0


@every_layout
@MODES
def test_a_use_that_ends_takes_no_bytes_from_a_use_in_another_thread(
    mode: Callable[[], Any], layout: str, tmp_path: Path
) -> None:
    model = build()
    weight: Tensor = child_of(model).weight
    expected = weight.detach() * 3, weight.detach() + 1
    with offload(model, None, roomy(layout, tmp_path)):
        is_midway, may_end = threading.Event(), threading.Event()
        found: list[Tensor] = []

        def wait() -> None:
            is_midway.set()
            assert may_end.wait(TIMEOUT_S)

        def use() -> None:
            weight.sum()
            with mode(), Midway("add", wait):
                found.append(weight + 1)

        def begin() -> None:
            thread.start()
            assert is_midway.wait(TIMEOUT_S)

        weight.sum()
        thread = threading.Thread(target=use)
        with mode(), Midway("mul", begin):
            first = weight * 3
        may_end.set()
        thread.join(TIMEOUT_S)
        assert_equal_lists(expected, [first.detach(), found[0].detach()])


@every_layout
def test_a_call_in_another_thread_leaves_a_backward_its_weights(layout: str, tmp_path: Path) -> None:
    plain, ours = build(), build()
    expected = gradients_of(plain, inputs_of(1))
    with offload(ours, None, roomy(layout, tmp_path)):
        loss = ours(inputs_of(1)).sum()
        with in_a_window(child_of(ours)) as end, Midway("mm", end):
            found = torch.autograd.grad(loss, list(ours.parameters()))
        assert_equal_lists(expected, found)


# --- random interleavings -------------------------------------------------------------------------


def gradients_of(model: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(model(inputs).sum(), list(model.parameters()))


def evaluate(model: nn.Module, numbers: Sequence[int]) -> list[Tensor]:
    with torch.no_grad():
        return [model(inputs_of(number)) for number in numbers]


@every_layout
def test_threads_that_evaluate_and_take_gradients_at_once(layout: str, tmp_path: Path) -> None:
    plain, ours = build(), build()

    def acts(model: nn.Module) -> list[Callable[[], list[Tensor]]]:
        return [
            lambda: evaluate(model, range(8)),
            lambda: [each for number in range(3) for each in gradients_of(model, inputs_of(number))],
            lambda: evaluate(model, range(8, 16)),
            lambda: [each.detach() * 2 for _ in range(3) for each in model.parameters()],
        ]

    expected = [act() for act in acts(plain)]
    with offload(ours, None, roomy(layout, tmp_path)) as run:
        for _ in range(3):
            for wanted, found in zip(expected, at_once(*acts(ours)), strict=True):
                assert_equal_lists(wanted, found)
        run.store.check()
    assert_equal_lists(list(plain.parameters()), list(ours.parameters()))


@every_layout
def test_training_beside_threads_that_evaluate(layout: str, tmp_path: Path) -> None:
    def loop(model: nn.Module, together: Callable[..., list[Any]]) -> list[Tensor | None]:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        run = offload(model, optimizer, roomy(layout, tmp_path)) if model is ours else None
        found: list[Tensor | None] = []
        for turn in range(4):
            loss, evaluated = together(
                functools.partial(backward, model, inputs_of(turn)),
                functools.partial(evaluate, model, [turn, turn + 1]),
            )
            found += [loss, *evaluated, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        if run is not None:
            run.store.check()
            run.close()
        return [*found, *(p.detach() for p in model.parameters())]

    plain, ours = build(), build()
    expected = loop(plain, lambda *acts: [act() for act in acts])
    assert_equal_lists(expected, loop(ours, at_once))


PARTS = 3

Optimizers = list[torch.optim.Optimizer]


def _after_backward(part: nn.Module) -> tuple[Optimizers, Callable[[], None]]:
    optimizer = torch.optim.Adam(part.parameters(), lr=1e-2)

    def end_turn() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return [optimizer], end_turn


def _in_hooks(part: nn.Module) -> tuple[Optimizers, Callable[[], None]]:
    optimizers = {each: torch.optim.Adam([each], lr=1e-2) for each in part.parameters()}

    def step_and_clear(parameter: Tensor) -> None:
        optimizers[cast("nn.Parameter", parameter)].step()
        parameter.grad = None

    for each in optimizers:
        each.register_post_accumulate_grad_hook(step_and_clear)
    return list(optimizers.values()), lambda: None


def _train(part: nn.Module, number: int, end_turn: Callable[[], None]) -> None:
    for turn in range(3):
        part(inputs_of(turn * PARTS + number)).square().sum().backward()
        end_turn()


@every_layout
@pytest.mark.parametrize("way", [_after_backward, _in_hooks])
def test_threads_that_train_a_part_each_make_state_at_once(
    layout: str, way: Callable[[nn.Module], tuple[Optimizers, Callable[[], None]]], tmp_path: Path
) -> None:
    def loop(model: nn.ModuleList, together: Callable[..., list[Any]]) -> None:
        optimizers, ends = zip(*map(way, model), strict=True)
        acts = [functools.partial(_train, model[number], number, end) for number, end in enumerate(ends)]
        if model is plain:
            together(*acts)
        else:
            with offload(
                model, [each for some in optimizers for each in some], roomy(layout, tmp_path)
            ) as run:
                together(*acts)
                run.store.check()

    plain, ours = (nn.ModuleList(build()[:4] for _ in range(PARTS)) for _ in range(2))
    loop(plain, lambda *acts: [act() for act in acts])
    loop(ours, at_once)
    assert_equal_lists(list(plain.parameters()), list(ours.parameters()))


def backward(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs).sum()
    loss.backward()
    return loss.detach()


@every_layout
def test_threads_that_add_to_the_same_gradients_in_a_fixed_order(layout: str, tmp_path: Path) -> None:
    """Forwards run at once, and each backward's accumulations come after those of the one before."""
    plain, ours = build(), build()

    def each_in_turn(model: nn.Module, together: Callable[..., list[Any]]) -> list[Tensor | None]:
        turns = [threading.Event() for _ in range(4)]
        turns[0].set()

        def act(number: int) -> Tensor:
            loss: Tensor = model(inputs_of(number)).sum()
            assert turns[number].wait(TIMEOUT_S)
            try:
                loss.backward()
            finally:
                turns[(number + 1) % 4].set()
            evaluate(model, [number])
            return loss.detach()

        found = together(*(lambda number=number: act(number) for number in range(4)))
        return [*found, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    more = {"offload_grad": "cpu"}
    expected = each_in_turn(plain, lambda *acts: [act() for act in acts])
    with offload(ours, None, {**roomy(layout, tmp_path), **more}) as run:
        assert_equal_lists(expected, each_in_turn(ours, at_once))
        run.store.check()


@every_layout
def test_a_state_dict_is_made_beside_threads_that_call_the_model(layout: str, tmp_path: Path) -> None:
    plain, ours = build(), build()
    expected = [each.clone() for each in plain.state_dict().values()]
    with offload(ours, None, roomy(layout, tmp_path)):
        for _ in range(3):
            found, aliases, _ = at_once(
                ours.state_dict,
                lambda: [each.detach() for each in list(ours.parameters())[:4]],
                lambda: evaluate(ours, range(8)),
            )
            assert_equal_lists(expected, list(found.values()))
            assert_equal_lists([each.detach() for each in list(plain.parameters())[:4]], aliases)
            with torch.no_grad():
                next(ours.parameters()).add_(1)
                next(plain.parameters()).add_(1)
            assert same(aliases[0], next(plain.parameters()).detach()), "an alias follows"
            expected = [each.clone() for each in plain.state_dict().values()]
            assert_equal_lists(expected, list(found.values()))
            del aliases


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


class Attention(nn.Module):
    """Takes another way where somebody sees the uses of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        batch = inputs.view(-1, 2, 8)
        return cast("Tensor", self.inner(batch, batch, batch)[0].reshape(inputs.shape))


@every_layout
def test_attention_computes_the_same_way_in_several_threads(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(Attention() for _ in range(3))).eval()
    expected = evaluate(model, range(20))
    in_one_piece = torch._native_multi_head_attention
    calls: list[int] = []

    def counted(*args: Any) -> Any:  # noqa: ANN401 - torch's own
        calls.append(threading.get_ident())
        return in_one_piece(*args)

    monkeypatch.setattr(torch, "_native_multi_head_attention", counted)
    with offload(model, None, roomy(layout, tmp_path)):
        for found in at_once(*(lambda: evaluate(model, range(20)) for _ in range(2))):
            assert_equal_lists(expected, found)
    assert len(calls) == 2 * 20 * 3
    assert len(set(calls)) == 2


# --- what is asked for while several threads use the model ------------------------------------------


class Doubling(nn.Parameter):
    """A parameter of a user's class that sees its uses."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - torch's own
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result * 2 if func in (torch.Tensor.mul, torch.nn.functional.linear) else result


@every_layout
def test_a_class_of_a_users_sees_its_uses_in_two_threads(layout: str, tmp_path: Path) -> None:
    def made() -> nn.Sequential:
        model = build()
        for each in model:
            parent = cast("Parent", each)
            parent.child.weight = Doubling(parent.child.weight.detach())
        return model

    plain, ours = made(), made()
    expected = evaluate(plain, range(2))
    with offload(ours, None, roomy(layout, tmp_path)):
        evaluate(ours, [0])
        for found in at_once(lambda: evaluate(ours, range(2)), lambda: evaluate(ours, range(2))):
            assert_equal_lists(expected, found)


@every_layout
def test_what_is_asked_of_a_parameter_while_another_thread_is_in_a_call(layout: str, tmp_path: Path) -> None:
    plain, ours = build(), build()

    def ask(model: nn.Sequential) -> list[object]:
        weight = child_of(model).weight
        copied = copy.deepcopy(child_of(model))
        pickled = pickle.loads(pickle.dumps(weight))
        weight.grad = torch.ones(WIDTH, WIDTH)
        new = nn.Parameter(weight)
        return [
            repr(weight),
            weight.data.sum().item(),
            weight.detach().numpy().sum().item(),
            weight.tolist(),
            type(copied.weight),
            copied.weight.sum().item(),
            (type(pickled), pickled.sum().item(), pickled.requires_grad),
            weight.grad.sum().item(),
            (weight.stride(), weight.shape, weight.is_leaf, weight.requires_grad, weight.data_ptr() != 0),
            torch.nn.utils.parameters_to_vector([weight, *copied.parameters()]).sum().item(),
            new.sum().item(),
            torch.stack([weight, weight]).sum().item(),
            torch._foreach_norm([weight, weight])[1].item(),
        ]

    expected = ask(plain)
    with offload(ours, None, roomy(layout, tmp_path)):
        evaluate(ours, [0])
        with in_a_window(child_of(ours)):
            assert ask(ours) == expected
        with torch.no_grad(), in_a_window(child_of(ours)) as end:
            child_of(ours).weight.mul_(2)
            child_of(ours).weight.data.add_(1)
            end()
        assert same(child_of(ours).weight.detach(), child_of(plain).weight.detach() * 2 + 1)


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
