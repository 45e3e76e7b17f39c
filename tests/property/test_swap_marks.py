"""What a mark covers: exactly the saved outputs of the marked operators, against a brute-force oracle.

The oracle runs the net plain, keeps every tensor alive so that addresses tell storages apart, writes down
who wrote what in which module, and judges every saved tensor afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tierstore.config import OffloadConfig
from tierstore.store import Store
from tierstore.training import SwapConfig, swap
from tierstore.training.activations.swapping import forward_pass
from tierstore.training.activations.swapping.forward_pass import ForwardPass, Swapped

WIDTH = 6

# ---------------------------------------------------------------------- nets


class Piece(nn.Module):
    """Some operations in a row, with a parameter and a buffer of its own.

    Args:
        steps: names of what is done, in order.
    """

    def __init__(self, steps: Sequence[str]) -> None:
        super().__init__()
        self.steps = steps
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.shift: Tensor
        self.register_buffer("shift", torch.rand(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, width)``."""
        for step in self.steps:
            x = STEPS[step](self, x)
        return x


STEPS: Mapping[str, Callable[[Piece, Tensor], Tensor]] = {
    "linear": lambda m, x: functional.linear(x, m.weight, m.scale),
    "scaled weight": lambda m, x: x @ (m.weight * m.scale).t(),
    "weight of a weight": lambda m, x: x @ (m.weight * m.scale).sigmoid().t(),
    "sigmoid": lambda m, x: x.sigmoid(),
    "change by another": lambda m, x: x.cos().mul_(2) * x,
    "mul": lambda m, x: x * x.cos(),
    "mul by parameter": lambda m, x: x * m.scale,
    "mul by buffer": lambda m, x: x * m.shift.exp(),
    "relu in place": lambda m, x: (x + 1).relu_(),
    "change in place": lambda m, x: x.sigmoid().mul_(2).tanh(),
    "change the input in place": lambda m, x: x.mul_(0.5).tanh(),
    "turned": lambda m, x: x.t().sigmoid().t() * x,
    "half": lambda m, x: torch.cat([x[:, : WIDTH // 2].exp(), x[:, WIDTH // 2 :]], dim=1).sin(),
    "repeated": lambda m, x: x * x.mean(0, keepdim=True).expand_as(x),
    "dropout": lambda m, x: functional.dropout(x, 0.3),
    "norm": lambda m, x: m.norm(x),
    "softmax": lambda m, x: x.softmax(-1),
    "constant": lambda m, x: x * torch.full((WIDTH,), 2.0).sqrt(),
    "detached": lambda m, x: x * x.detach().exp(),
    "buffer in place": lambda m, x: x.tanh() * m.shift.mul_(1.0),
}


class Layer(nn.Module):
    """Two pieces, and operations of its own around them."""

    def __init__(self, steps: Sequence[Sequence[str]]) -> None:
        super().__init__()
        first, second, own = steps
        self.one, self.two, self.own = Piece(first), Piece(second), Piece(own)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, width)``."""
        y: Tensor = self.two(self.one(x)) + x.sin()
        for step in self.own.steps:
            y = STEPS[step](self.own, y)
        return y


class Net(nn.Module):
    """Layers between operations that belong to none."""

    def __init__(self, layers: Sequence[Sequence[Sequence[str]]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(steps) for steps in layers)
        self.head = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return a number."""
        x = x.tanh()
        for layer in self.layers:
            x = layer(x)
        score: Tensor = (x.sigmoid() * self.head).sum()
        return score


# ---------------------------------------------------------------------- the oracle


@dataclass
class Journal(TorchDispatchMode):
    """Who wrote what where, of one run that keeps everything alive."""

    own: frozenset[int]
    moment: int = 0
    places: list[tuple[str, ...]] = field(default_factory=lambda: [()])
    writes: dict[int, list[tuple[int, tuple[str, ...], str, bool]]] = field(default_factory=dict)
    saved: list[tuple[int, int]] = field(default_factory=list)
    alive: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __hash__(self) -> int:
        return id(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        self.moment += 1
        given = [each for each in _flat((args, kwargs or {})) if isinstance(each, Tensor)]
        made = [each for each in _flat(result) if isinstance(each, Tensor)]
        self.alive += [*given, *made]
        owned = [_address(each) in self.own or self._is_own(_address(each)) for each in given]
        name = func.overloadpacket.__name__
        old = {_address(each) for each in given}
        for tensor in made:
            address = _address(tensor)
            in_place = name.endswith("_") and address == _address(given[0])
            if address not in old:
                entry = (self.moment, self.places[-1], name, bool(owned) and all(owned))
                self.writes.setdefault(address, []).append(entry)
            elif in_place and not (address in self.own or self._is_own(address)):
                self.writes.setdefault(address, []).append((self.moment, self.places[-1], name, False))
        return result

    def _is_own(self, address: int) -> bool:
        return bool(self.writes.get(address)) and self.writes[address][-1][3]

    def pack(self, tensor: Tensor) -> Tensor:
        """Note what is saved when."""
        self.saved.append((_address(tensor), self.moment))
        self.alive.append(tensor.untyped_storage())
        return tensor

    def judge(self, marks: Sequence[Mark]) -> list[int | None]:
        """Return for each saved tensor how far ahead it comes back; ``None``: it stays."""
        return [self._judge_one(address, moment, marks) for address, moment in self.saved]

    def _judge_one(self, address: int, moment: int, marks: Sequence[Mark]) -> int | None:
        before = [entry for entry in self.writes.get(address, []) if entry[0] <= moment]
        if address in self.own or not before or before[-1][3]:
            return None
        _, place, name, _ = before[-1]
        return next((mark.prefetch for mark in reversed(marks) if mark.covers(place, name)), None)


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "dot")
"""What runs for a matmul: of other words none matches a pattern below."""


@dataclass(frozen=True)
class Mark:
    """What a mark says, in the oracle's words.

    Attributes:
        prefetch: how far ahead.
        layers: numbers.
        path: a pattern of a submodule; empty: the layer as a whole.
        operator: a pattern of an operator in its own forward; ``None``: all that runs in it.
    """

    prefetch: int
    layers: tuple[int, ...]
    path: str = ""
    operator: str | None = None

    def covers(self, place: tuple[str, ...], name: str) -> bool:
        """Say whether an operator that ran at ``place`` is meant."""
        if place[:1] != ("layers",) or int(place[1]) not in self.layers:
            return False
        inner = place[2:]
        if self.operator is None:
            return not self.path or (bool(inner) and re.fullmatch(self.path, inner[0]) is not None)
        there = re.fullmatch(self.path, inner[0]) is not None if len(inner) == 1 else not (self.path or inner)
        called = [name, *(["matmul"] if name in PRODUCTS else [])]
        is_meant = any(re.fullmatch(self.operator, each) for each in called)
        return there and len(inner) == bool(self.path) and is_meant

    def entry(self) -> dict[str, object]:
        """Return it as a configuration says it."""
        marked: dict[str, object] = {"backward_prefetch": self.prefetch, "layers": list(self.layers)}
        levels = [each for each in (self.path, self.operator) if each]
        return {**marked, "op_name": r"\.".join(levels)} if levels else marked


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def _placed(net: nn.Module, journal: Journal) -> Iterator[None]:
    handles = []
    for name, module in net.named_modules():
        place = tuple(name.split(".")) if name else ()
        enter = lambda *_, place=place: journal.places.append(place)  # noqa: E731
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(lambda *_: (journal.places.pop(), None)[1]))
    yield
    for handle in handles:
        handle.remove()


def _expected(net: Net, x: Tensor, marks: Sequence[Mark], *, is_autocast: bool) -> list[int | None]:
    own = frozenset(_address(each) for each in (*net.parameters(), *net.buffers()))
    journal = Journal(own)
    with (
        _placed(net, journal),
        torch.autograd.graph.saved_tensors_hooks(journal.pack, lambda packed: packed),
        torch.autocast("cpu", torch.bfloat16, enabled=is_autocast),
        journal,
    ):
        net(x)
    return journal.judge(marks)


def _is_legal(net: Net, x: Tensor, *, is_autocast: bool) -> bool:
    """Say whether backward runs: not, if something was changed in place that it needs."""
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        scores = net(x)
    try:
        scores.backward()
    except RuntimeError:
        return False
    return True


# ---------------------------------------------------------------------- what is really swapped


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    settings = {
        "device": "emulated",
        "max_device_memory": "8MB",
        "offload_cpu_size": "8MB",
        "offload_disk_size": 0,
    }
    with Store(OffloadConfig.from_mapping(settings).store_config()) as opened:
        yield opened


def _found(
    net: Net, x: Tensor, settings: SwapConfig, store: Store, *, is_autocast: bool
) -> tuple[list[int | None], bool]:
    """Return what is swapped, and whether backward runs."""
    found: list[int | None] = []
    real = ForwardPass.pack

    def pack(self: ForwardPass, tensor: Tensor) -> object:
        storage = tensor.untyped_storage()
        scope = self.watch.scope_of(storage)
        packed = real(self, tensor)
        found.append(scope.prefetch if isinstance(packed, Swapped) and scope is not None else None)
        return packed

    with (
        mock.patch.object(ForwardPass, "pack", pack),
        mock.patch.object(forward_pass, "SMALLEST_BYTES", 1),
        swap(net, settings, store=store) as active,
    ):
        is_legal = _is_legal(net, x, is_autocast=is_autocast)
        active.stats()
    assert len(store) == 0
    return found, is_legal


OPERATORS = ("mul", "sigmoid|tanh", "relu_", "mul_", ".*mul.*", "_softmax", "cos|add", "native_batch_norm")
"""Patterns of operators; none is the name of a submodule as well."""

steps = st.lists(st.sampled_from(sorted(STEPS)), max_size=3)
nets = st.lists(st.tuples(steps, steps, steps), min_size=1, max_size=3)
layer_ids = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True).map(tuple)
prefetches = st.integers(1, 5)
layer_marks = st.builds(Mark, prefetches, layer_ids)
operator_marks = st.builds(
    Mark,
    prefetches,
    layer_ids,
    st.sampled_from(["one", "two", "one|two", "t.*", ".*"]),
    st.sampled_from([None, None, *OPERATORS]),
)


@given(nets, st.lists(layer_marks, max_size=1), st.lists(operator_marks, max_size=3), st.booleans())
def test_exactly_the_saved_outputs_of_marked_operators_are_swapped(
    store: Store,
    layers: Sequence[Sequence[Sequence[str]]],
    whole: Sequence[Mark],
    some: Sequence[Mark],
    is_autocast: bool,
) -> None:
    names = [mark.entry()["op_name"] for mark in some]
    if len(set(names)) < len(names):
        return  # of two marks with one name the first counts: said by the configuration's own tests
    torch.manual_seed(0)
    net = Net(layers)
    torch.manual_seed(1)
    is_legal = _is_legal(copy.deepcopy(net), torch.randn(5, WIDTH), is_autocast=is_autocast)
    torch.manual_seed(1)
    expected = _expected(net, torch.randn(5, WIDTH), [*whole, *some], is_autocast=is_autocast)
    settings = SwapConfig.from_mapping(
        {
            "swap": True,
            "layer_swap": [mark.entry() for mark in whole],
            "op_swap": [mark.entry() for mark in some],
        }
    )
    torch.manual_seed(1)
    found, runs = _found(net, torch.randn(5, WIDTH), settings, store, is_autocast=is_autocast)
    # Without any mark in any layer no hook is there.
    assert (found or [None] * len(expected)) == expected
    assert runs == is_legal
