"""The bindings of a run against ordinary tensors: they come, go, are aliased, pinned, pointed elsewhere."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from torch import Tensor, nn

import tierstore as ts
from tests.lock_order import locks_in_order
from tests.training.twins import LATE_AND_OVERWRITTEN
from tierstore.training import offload
from tierstore.training.bundles.binding import Residency, Where
from tierstore.training.bundles.bindings import Binding
from tierstore.training.bundles.pinning import pin, unpin_all
from tierstore.training.faults import guard

_SIZES = (1024, 1024, 700, 300)  # elements: one to four of them fit on the device together
_DEVICE_BYTES = 8 * 1024
NUMBERS = st.integers(0, len(_SIZES) - 1)


class Vector(nn.Module):
    """One parameter, which is a bundle of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(_SIZES[number])) + 1000 * number)


def vectors() -> nn.ModuleList:
    return nn.ModuleList(map(Vector, range(len(_SIZES))))


@dataclass(eq=False)
class Alias:
    """Something that refers to a parameter's memory, and what it should show."""

    number: int
    tensor: Tensor
    expected: Tensor


class BindingsMachine(RuleBasedStateMachine):
    """Opens, closes, aliases, writes, pins, points elsewhere and back, in any order, where not all fits."""

    aliases: Bundle[Alias] = Bundle("aliases")

    def __init__(self) -> None:
        super().__init__()
        self._context = contextlib.ExitStack()
        self._out_of_order = self._context.enter_context(locks_in_order())
        self.model, self.expected = vectors(), vectors()
        with torch.no_grad():
            for parameter in self.expected.parameters():
                parameter.requires_grad = False
        self.run = self._context.enter_context(
            offload(
                self.model,
                config={
                    "device": "emulated",
                    "device_options": LATE_AND_OVERWRITTEN,
                    "max_device_memory": _DEVICE_BYTES,
                    "offload_cpu_size": "1MB",
                    "offload_path": self._context.enter_context(tempfile.TemporaryDirectory()),
                },
            )
        )
        session = self.run._session
        assert session is not None
        self.bindings = session.bindings
        self.ours = list(self.model.parameters())
        self.plain = list(self.expected.parameters())
        self.windows = [0] * len(self.ours)
        self.live: list[Alias] = []

    def teardown(self) -> None:
        self.live.clear()
        for number, count in enumerate(self.windows):
            for _ in range(count):
                self.bindings.close(self._binding(number))
        self._context.close()
        for ours, plain in zip(self.ours, self.plain, strict=True):
            assert ours.detach().equal(plain)
        assert not self._out_of_order

    def _binding(self, number: int) -> Binding:
        found = guard.guarded_tensor_of(self.ours[number])
        assert found is not None
        return found.binding

    def _all(self) -> list[Binding]:
        return list(dict.fromkeys(self._binding(number) for number in range(len(self.ours))))

    # --- windows ------------------------------------------------------------------------------

    @rule(number=NUMBERS)
    def open(self, number: int) -> None:
        with contextlib.suppress(ts.CapacityError):
            self.bindings.open(self._binding(number))
            self.windows[number] += 1

    @precondition(lambda self: any(self.windows))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([n for n, count in enumerate(self.windows) if count]))
        self.windows[number] -= 1
        self.bindings.close(self._binding(number))

    @rule(number=NUMBERS)
    def pin_one(self, number: int) -> None:
        with contextlib.suppress(ts.CapacityError):
            pin(self.bindings, self._binding(number))

    @rule()
    def unpin(self) -> None:
        unpin_all(self.bindings)

    @rule()
    def sweep(self) -> None:
        gc.collect()
        self.bindings.sweep()

    # --- uses ---------------------------------------------------------------------------------

    @rule(number=NUMBERS)
    def read(self, number: int) -> None:
        with contextlib.suppress(ts.CapacityError):
            assert (self.ours[number].detach() + 0).equal(self.plain[number] + 0)

    @rule(number=NUMBERS)
    def write(self, number: int) -> None:
        with torch.no_grad(), contextlib.suppress(ts.CapacityError):
            self.ours[number].add_(1)
            self.plain[number].add_(1)

    @rule(target=aliases, number=NUMBERS, begin=st.integers(0, 200))
    def alias(self, number: int, begin: int) -> Alias:
        try:
            tensor = self.ours[number].detach()[begin:]
        except ts.CapacityError:
            tensor, number = torch.zeros(1), -1
        expected = self.plain[number][begin:] if number >= 0 else torch.zeros(1)
        found = Alias(number, tensor, expected)
        self.live.append(found)
        return found

    @rule(alias=aliases)
    def write_to_an_alias(self, alias: Alias) -> None:
        alias.tensor.mul_(0.5)
        alias.expected.mul_(0.5)

    @rule(alias=consumes(aliases))
    def drop_alias(self, alias: Alias) -> None:
        self.live.remove(alias)
        del alias.tensor

    @rule(number=NUMBERS)
    def point_elsewhere(self, number: int) -> None:
        fresh = torch.full((_SIZES[number],), float(number))
        with contextlib.suppress(ts.CapacityError):
            self.ours[number].data = fresh.clone()
            self.plain[number].data = fresh

    # --- the store moves beside -----------------------------------------------------------------

    @rule(number=NUMBERS, tier=st.sampled_from(["host", "disk"]))
    def push_down(self, number: int, tier: str) -> None:
        with contextlib.suppress(ts.LeaseError):
            self.run.store.evict(self._binding(number).key, to=tier).result()

    @rule(number=NUMBERS)
    def prefetch(self, number: int) -> None:
        self.run.store.prefetch(self._binding(number).key)

    # --- what is always so ----------------------------------------------------------------------

    @invariant()
    def residency_says_what_is_held(self) -> None:
        for binding in self._all():
            assert (binding.lease is None) is (binding.residency is Residency.AWAY), binding.key
            assert (binding.windows > 0) is (binding.residency is Residency.OPEN), binding.key
            if binding.residency is Residency.AWAY:
                assert binding.flat is None
                assert binding.storages is None

    @invariant()
    def tensors_wear_a_guard_where_they_have_no_bytes(self) -> None:
        for number, tensor in enumerate(self.ours):
            binding = self._binding(number)
            if binding.residency is not Residency.OPEN:
                assert type(tensor) is not nn.Parameter

    @invariant()
    def what_is_leased_is_what_bundles_hold(self) -> None:
        held = [each for each in self._all() if each.residency is not Residency.AWAY]
        assert self.run.store.leased_bytes("device") >= sum(each.nbytes for each in held)
        assert bool(held) or self.run.store.leased_bytes("device") == 0

    @invariant()
    def aliases_show_what_they_should(self) -> None:
        for alias in self.live:
            if alias.number < 0 or self._binding(alias.number).where[0] is Where.ABROAD:
                continue
            assert alias.tensor.equal(alias.expected)


TestBindings = BindingsMachine.TestCase
