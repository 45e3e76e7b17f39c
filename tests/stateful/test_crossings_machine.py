"""A model with modules on the host against the same in plain PyTorch: called, kept, dropped, failing."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from dataclasses import dataclass
from unittest import mock

import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from torch import Tensor, nn

from tests.lock_order import locks_in_order
from tests.training.host_models import WIDTH, Case, Moved, place_plainly, trial_of
from tests.training.twins import LATE_AND_OVERWRITTEN
from tierstore.errors import BackendError
from tierstore.store import Store
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload

CASE = Case(
    lambda: nn.Sequential(
        nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    ),
    {"[124]": "cpu"},
    {"1": "cpu", "2": "cpu", "4": "cpu"},
    ["1", "2", "4"],
    {"1": "2"},
)
ROWS = st.integers(1, 9)


@dataclass(eq=False)
class Pair:
    """What one call has returned, offloaded and plain."""

    ours: Tensor
    plain: Tensor

    def let_go(self) -> None:
        """Refer to nothing any more: whoever consumes a pair, Hypothesis keeps it."""
        self.ours = self.plain = torch.empty(0)


class CrossingsMachine(RuleBasedStateMachine):
    """Values cross, wait in graphs, are kept and written to, in any order."""

    outputs: Bundle[Pair] = Bundle("outputs")

    def __init__(self) -> None:
        super().__init__()
        self._context = contextlib.ExitStack()
        self._out_of_order = self._context.enter_context(locks_in_order())
        path = self._context.enter_context(tempfile.TemporaryDirectory())
        self.plain, self.ours, self.moved = trial_of(CASE), trial_of(CASE), Moved()
        place_plainly(self.plain.model, CASE, self.moved)
        config = {
            "device": "emulated",
            "max_device_memory": "64KB",
            "offload_cpu_size": "64KB",
            "offload_disk_size": "4MB",
            "offload_path": path,
            "device_options": LATE_AND_OVERWRITTEN,
        }
        self.run = self._context.enter_context(
            offload(self.ours.model, list(self.ours.optimizers), config, placement=CASE.patterns)
        )
        self._context.enter_context(DeviceBudget("1MiB", mixing="raise"))
        self._numbers = torch.Generator().manual_seed(0)

    def _call(self, rows: int) -> Pair:
        x = torch.randn(rows, WIDTH, generator=self._numbers)
        return Pair(self.ours.model(x), self.plain.model(x))

    @rule(target=outputs, rows=ROWS)
    def call(self, rows: int) -> Pair:
        pair = self._call(rows)
        assert torch.equal(pair.ours, pair.plain)
        return pair

    @rule(rows=ROWS)
    def evaluate(self, rows: int) -> None:
        with torch.inference_mode():
            pair = self._call(rows)
        assert torch.equal(pair.ours, pair.plain)

    @rule(pair=consumes(outputs))
    def go_back(self, pair: Pair) -> None:
        self._backward(pair, retain_graph=False)
        pair.let_go()

    @rule(pair=outputs)
    def go_back_and_keep_the_graph(self, pair: Pair) -> None:
        self._backward(pair, retain_graph=True)

    @staticmethod
    def _backward(pair: Pair, *, retain_graph: bool) -> None:
        """Go back in both; what a step has changed since raises in both."""
        raised = []
        for output in (pair.ours, pair.plain):
            try:
                output.sigmoid().mean().backward(retain_graph=retain_graph)
            except RuntimeError as error:
                raised.append(str(error).split(":", maxsplit=1)[0])
        assert len(raised) in (0, 2)
        assert len(set(raised)) <= 1

    @rule(pair=outputs)
    def write(self, pair: Pair) -> None:
        with torch.no_grad():
            for output in (pair.ours, pair.plain):
                output.mul_(0.5)

    @rule(pair=consumes(outputs))
    def drop(self, pair: Pair) -> None:
        pair.let_go()

    @rule(pairs=st.lists(consumes(outputs), max_size=4))
    def step(self, pairs: list[Pair]) -> None:
        for pair in pairs:
            pair.let_go()
        for trial in (self.ours, self.plain):
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    @rule(rows=ROWS, verb=st.sampled_from(["put", "adopt", "evict", "lease"]), after=st.integers(0, 3))
    def fail(self, rows: int, verb: str, after: int) -> None:
        plainly = getattr(Store, verb)
        left = [after]

        def failing(store: Store, key: str, *given: object, **named: object) -> object:
            if key.startswith("cross/"):
                left[0] -= 1
                if left[0] < 0:
                    raise BackendError("on purpose")
            return plainly(store, key, *given, **named)

        x = torch.randn(rows, WIDTH, generator=self._numbers)
        with mock.patch.object(Store, verb, failing), contextlib.suppress(BackendError):
            self.ours.model(x)

    @invariant()
    def nothing_waits_that_nobody_refers_to(self) -> None:
        waiting = {key for key in self.run.store if key.startswith("cross/")}
        if waiting and not self.bundle("outputs"):
            gc.collect()
            self.run._session.link.sweep()  # type: ignore[union-attr]
            assert not [key for key in self.run.store if key.startswith("cross/")]

    @invariant()
    def all_is_in_its_place(self) -> None:
        assert not self._out_of_order
        self.run.store.check()
        for key in self.run.store:
            if not key.startswith("cross/"):
                assert "device" not in self.run.store.where(key)
        for ours, plain in zip(self.ours.model.parameters(), self.plain.model.parameters(), strict=True):
            assert torch.equal(ours.detach().clone(), plain.detach())
            assert (ours.grad is None) == (plain.grad is None)
            if ours.grad is not None and plain.grad is not None:
                assert torch.equal(ours.grad.clone(), plain.grad)

    def teardown(self) -> None:
        self._context.close()


TestCrossings = CrossingsMachine.TestCase
