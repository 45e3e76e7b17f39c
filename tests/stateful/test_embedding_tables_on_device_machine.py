"""Tables on a device that comes and goes, over a disk that fails, against ``nn.Embedding``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.row_carriers import CopyingCarrier, device_home
from tests.stateful.test_embedding_tables_machine import WIDTH, EmbeddingTableMachine
from tierstore.errors import BackendError


class OnDeviceMachine(EmbeddingTableMachine):
    """The rules of tables; the device's memory is the host's, so that the twin needs no other one."""

    carrier = CopyingCarrier()

    def until_it_works(self, call: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Try again where the disk fails or the link does, which either does once."""
        for _ in range(2):
            try:
                return call()
            except BackendError:
                pass
        return call()

    @property
    def has_device(self) -> bool:
        return self.table.weight.row_store.device is not None

    @precondition(lambda self: not self.has_device and self.table.weight.grad is None)
    @rule(cells=st.integers(0, 60), policy=st.sampled_from(["lfu", "lru"]))
    def attach_device(self, cells: int, policy: Any) -> None:  # noqa: ANN401
        home, self.carrier = device_home(cells, WIDTH, policy=policy)
        self.until_it_works(lambda: self.table.weight.attach_device(home))
        assert self.has_device

    @precondition(lambda self: self.has_device)
    @rule()
    def detach_device(self) -> None:
        self.until_it_works(self.table.weight.detach_device)
        assert not self.has_device

    @precondition(lambda self: self.has_device)
    @rule(calls=st.integers(1, 9))
    def let_the_link_fail(self, calls: int) -> None:
        self.carrier.fail_next(calls)

    @rule(batches=st.lists(st.lists(st.integers(0, 30), max_size=20), min_size=1, max_size=4))
    def train_with_prefetch(self, batches: list[list[int]]) -> None:
        for batch, coming in zip(batches, [*batches[1:], []], strict=True):
            self.table.prefetch(self.known(coming))
            self.backward(batch, len(batch) % 5)
            self.step()


_MARK = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # PyTorch's own optimizers
TestEmbeddingTablesOnDevice = _MARK(OnDeviceMachine.TestCase)
