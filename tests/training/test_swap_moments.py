"""When swapped bytes leave and when they come back, counted against what really ran."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.swap_models import DIM, Llama, config, inputs, operators, swapping, whole_layers
from tierstore.config import StoreConfig, TierConfig
from tierstore.store import Store
from tierstore.testing.faults import Gate
from tierstore.training import swap
from tierstore.training.activations.swapping.activation_store import (
    ActivationStore,
    OffloadedTensor,
    WeakOffloadedTensor,
)
from tierstore_backends.device import open_backend as open_device
from tierstore_backends.memory import open_backend as open_memory

# ---------------------------------------------------------------------- what really ran


def nodes_of(loss: Tensor) -> list[Node]:
    """Return every node that backward runs, other than those that accumulate gradients."""
    left, found = [loss.grad_fn], []
    seen: set[Node] = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [after for after, _ in node.next_functions]
        if "AccumulateGrad" not in node.name():
            found.append(node)
    return found


Event = tuple[str, object]


@contextlib.contextmanager
def recorded() -> Iterator[list[Event]]:
    """Write down what is brought and taken; `watch_nodes` adds what runs."""
    events: list[Event] = []
    bring, take = WeakOffloadedTensor.bring, OffloadedTensor.take

    def noted_bring(self: WeakOffloadedTensor) -> None:
        events.append(("bring", self.key))
        bring(self)

    def noted_take(self: OffloadedTensor) -> Tensor:
        events.append(("take", self.key))
        return take(self)

    with (
        mock.patch.object(WeakOffloadedTensor, "bring", noted_bring),
        mock.patch.object(OffloadedTensor, "take", noted_take),
    ):
        yield events


def watch_nodes(loss: Tensor, events: list[Event]) -> None:
    """Write down every node when it runs."""

    def note(node: Node) -> Any:  # noqa: ANN401
        name = node.name()
        return lambda *_: events.append(("node", name))

    for node in nodes_of(loss):
        node.register_prehook(note(node))


def nodes_ahead(events: Sequence[Event], key: str) -> int | None:
    """Return how many nodes ran between a key's first trigger and its first use, the user not counted."""
    use = events.index(("take", key))
    if ("bring", key) not in events[:use]:
        return None
    begin = events.index(("bring", key))
    return sum(kind == "node" for kind, _ in events[begin:use]) - 1


@pytest.mark.parametrize("prefetch", [1, 2, 3, 7, 20])
@pytest.mark.parametrize(
    "marks",
    [
        whole_layers,
        lambda k: {"layer_swap": [{"backward_prefetch": k, "layers": [0, 2]}]},
        lambda k: operators("attention", prefetch=k),
        lambda k: operators(r"feed_forward\.mul", r"aten\.silu", prefetch=k),
    ],
    ids=["all layers", "two layers", "modules", "operators"],
)
def test_bytes_begin_to_come_back_so_many_nodes_ahead(tmp_path: Path, prefetch: int, marks: Any) -> None:  # noqa: ANN401
    model = Llama()
    with swapping(model, config(tmp_path, marks(prefetch))) as active, recorded() as events:
        scores = model(inputs())
        after_model = len(nodes_of(scores))
        released = {key for key in active.store if "device" not in active.store.where(key)}
        loss = scores.square().mean()
        of_the_loss = len(nodes_of(loss)) - after_model
        watch_nodes(loss, events)
        loss.backward()
        taken = list(dict.fromkeys(str(key) for kind, key in events if kind == "take"))
        assert len(taken) >= 4
        assert active.stats().triggers == sum(kind == "bring" for kind, _ in events)
        for key in taken:
            before = [kind for kind, _ in events[: events.index(("take", key))]].count("node") - 1
            # What is used before so many nodes of the model have run has no trigger, and has not left.
            is_near = before - of_the_loss < prefetch
            assert nodes_ahead(events, key) == (None if is_near else prefetch)
            assert not (is_near and key in released)


def test_a_consumer_that_leads_nowhere_gets_no_trigger_and_its_bytes_leave(tmp_path: Path) -> None:
    class WithBranch(nn.Module):
        """Its forward makes a branch that nobody uses."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)
            self.branch: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            """Transform."""
            y: Tensor = self.linear(x)
            self.branch = y.exp().sin()
            return y.tanh()

    model = nn.Sequential(WithBranch(), WithBranch())
    with swapping(model, config(tmp_path, whole_layers(1))) as active, recorded() as events:
        loss = model(inputs()).sum()
        here = {key for key in active.store if "device" in active.store.where(key)}
        loss.backward()
        taken = {key for kind, key in events if kind == "take"}
        left = set(active.store)
        assert len(left) >= 2  # the branches' are kept while the branches are
        assert not taken & left
        assert not here & left
        assert {key for kind, key in events if kind == "bring"} <= taken
        for each in model:
            assert isinstance(each, WithBranch)
            each.branch = None
        active.stats()
        assert len(active.store) == 0


class Waiting(nn.Module):
    """A layer whose operator is followed by others that backward knows nothing of."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OneOperator()])
        self._operators = operators

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        y: Tensor = self.layers[0](x)
        with torch.no_grad():
            for _ in range(self._operators):
                y.sin()
        return y + 1


@pytest.mark.parametrize(
    ("count", "triggers", "is_pushed_out"),
    [(0, 0, False), (30, 1, False), (0, 1, True)],
    ids=["still here", "released", "pushed out"],
)
def test_what_is_near_the_end_comes_with_the_first_node_if_it_has_gone(
    tmp_path: Path,
    count: int,
    triggers: int,
    is_pushed_out: bool,
) -> None:
    model = Waiting(count)

    def push_out(*_: object) -> None:
        active.store.evict("activation/0/0", to="host").result()  # as a quota does

    with swapping(model, config(tmp_path, whole_layers(4))) as active, recorded() as events:
        if is_pushed_out:
            model.layers[0].register_forward_hook(push_out)
        scores = model(inputs().requires_grad_())
        assert ("device" in active.store.where("activation/0/0")) == (triggers == 0)
        loss = scores.sum()
        watch_nodes(loss, events)
        loss.backward()
        assert active.stats().triggers == triggers
        # Backward reaches the model's last node, the addition's, one node before the operator's.
        assert nodes_ahead(events, "activation/0/0") == (1 if triggers else None)


def test_keys_are_numbered_by_layer_and_the_same_in_every_step(tmp_path: Path) -> None:
    model = Llama(3)
    with swapping(model, config(tmp_path, whole_layers(1))) as active:
        for number in range(3):
            scores = model(inputs(number))
            keys = set(active.store)
            assert keys == {
                f"activation/{layer}/{each}" for layer in range(3) for each in range(len(keys) // 3)
            }
            second = model(inputs(number))
            assert set(active.store) - keys == {f"{key}'" for key in keys}
            scores.sum().backward()
            del second
            active.stats()


# ---------------------------------------------------------------------- release


class OneOperator(nn.Module):
    """A layer of one operator, which saves its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        """Transform; the view is no operator that counts."""
        y: Tensor = self.inner(x.view(x.shape))
        return y


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_device_memory_is_given_up_three_times_so_many_operators_later(tmp_path: Path, prefetch: int) -> None:
    model = nn.Sequential(*(OneOperator() for _ in range(20)))
    marks = {"layer_swap": [{"backward_prefetch": prefetch, "layers": [2]}]}
    where: list[tuple[str, ...]] = []
    with swapping(model, config(tmp_path, marks)) as active:

        def look(*_: object) -> None:
            where.append(active.store.where("activation/2/0"))

        for layer in list(model)[2:]:
            layer.register_forward_hook(look)
        model(inputs().requires_grad_())
    later = 3 * prefetch
    assert ["device" in tiers for tiers in where] == [True] * later + [False] * (18 - later)


def test_what_is_not_wanted_at_once_leaves_when_the_forward_ends(tmp_path: Path) -> None:
    model = nn.Sequential(*(OneOperator() for _ in range(10)))
    with swapping(model, config(tmp_path, whole_layers(4))) as active:
        model(inputs().requires_grad_())
        active.store.fetch(*active.store, tier="host").result()  # nobody else waits for what leaves now
        here = [key for key in active.store if "device" in active.store.where(key)]
        # A layer has two nodes, the view's and the operator's: fewer than four run before those of layer 8.
        assert here == ["activation/8/0", "activation/9/0"]


class Operators(TorchDispatchMode):
    """Counts operators that are no views, outside the activation store."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self.is_ours = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self.count += self.is_ours and not func.is_view
        return func(*args, **(kwargs or {}))


def test_operators_are_counted_as_the_docs_say(tmp_path: Path) -> None:
    model, x = Llama(), inputs()
    with swapping(model, config(tmp_path, whole_layers())) as active, Operators() as counted:
        keep = ActivationStore.keep

        def kept(self: ActivationStore, tensor: Tensor, name: str) -> OffloadedTensor:
            counted.is_ours = False
            try:
                return keep(self, tensor, name)
            finally:
                counted.is_ours = True

        with mock.patch.object(ActivationStore, "keep", kept):
            model(x)
        assert active.stats().operators == counted.count > 50


# ---------------------------------------------------------------------- hand-over


def gated(host_bytes: int = 2**23) -> tuple[Store, Gate, Gate]:
    """Return a store with a gate before the device's copies, and one before the tier below host memory."""
    device = Gate(open_device(capacity_bytes=2**23, options={"device": "emulated"}))
    host = open_memory(capacity_bytes=host_bytes, options={})
    disk = Gate(open_memory(capacity_bytes=2**23, options={"storage": True}))
    tiers = [
        TierConfig("device", device, 2**23),
        TierConfig("host", host, host_bytes),
        TierConfig("disk", disk, 2**23),
    ]
    return Store(StoreConfig(tiers)), device, disk


def _slopes(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))


def test_what_is_wanted_while_it_is_on_its_way_down_is_handed_over(tmp_path: Path) -> None:
    model = Llama(2).eval()
    expected = _slopes(model, inputs())
    store, device, _ = gated()
    with store, swap(model, {"swap": True, **whole_layers(1000)}, store=store) as active:
        found = _slopes(model, inputs())
        stats = active.stats()
        assert device.held > 0
        device.open()
        assert all(map(torch.equal, expected, found))
        assert stats.activations.handed_over == stats.activations.kept > 10
        assert stats.activations.brought == 0
        assert stats.store.traffic.get(("host", "device")) is None


def test_what_is_wanted_while_it_goes_on_to_disk_is_read_from_the_block_being_written() -> None:
    store, device, disk = gated(host_bytes=4096)
    device.open()
    with store:
        activation_store = ActivationStore(store)
        first = activation_store.keep(
            torch.arange(1024), "first"
        )  # 8 KiB: host memory is too small, and it goes on
        small = activation_store.keep(torch.arange(512.0), "small")
        small.release()
        other = activation_store.keep(torch.ones(1024), "other")
        assert store.where("small") == ("host",)
        assert disk.held > 0
        assert torch.equal(small.take(), torch.arange(512.0))
        disk.open()
        assert torch.equal(first.take(), torch.arange(1024))
        assert torch.equal(other.take(), torch.ones(1024))


# ---------------------------------------------------------------------- on to disk


def test_a_full_host_hands_on_what_is_needed_last(tmp_path: Path) -> None:
    model = nn.Sequential(*(OneOperator() for _ in range(12)))
    nbytes = inputs().nbytes
    settings = config(tmp_path, whole_layers(1), "roomy", offload_cpu_size=5 * nbytes)
    with swapping(model, settings) as active:
        x = inputs().requires_grad_()
        scores = model(x)
        # The last layer's stay on the device; those before it may be on their way down when forward ends.
        keys = [f"activation/{layer}/0" for layer in range(11)]
        for key in keys:
            if active.store.where(key)[-1] == "device":
                active.store.evict(key, to="host").result()
        tiers = [active.store.where(key)[-1] for key in keys]
        count = tiers.count("disk")
        assert count >= 6
        assert tiers == ["disk"] * count + ["host"] * (11 - count)
        scores.sum().backward()
        copies = active.stats().store.traffic[("disk", "host")].copies
        assert copies in (count, count + 1)  # that of the last layer may have pushed one more out
    assert x.grad is not None


def test_a_step_is_the_same_when_everything_below_is_too_small(tmp_path: Path) -> None:
    model = Llama(2).eval()
    expected = _slopes(model, inputs())
    settings = config(tmp_path, whole_layers(1), offload_cpu_size="16KB", offload_disk_size=0)
    with swapping(model, settings) as active:
        found = _slopes(model, inputs())
        assert all(map(torch.equal, expected, found))
        assert active.stats().activations.refused > 0


def test_the_end_of_forward_waits_for_no_copy_and_backward_gets_what_has_not_left(tmp_path: Path) -> None:
    plain, model = Llama().eval(), Llama().eval()
    model.load_state_dict(plain.state_dict())
    plain(inputs()).sum().backward()
    settings = config(tmp_path, whole_layers(60), device_options={"link_latency_s": 2.0})
    with swapping(model, settings) as active:
        scores = model(inputs())
        kept = active.stats().activations
        assert kept.kept > 0
        assert (kept.released, kept.stalls) == (0, 0)
        scores.sum().backward()
        assert active.stats().activations.handed_over == kept.kept
        assert active.stats().activations.brought == 0
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)
