"""What is known of storages, whichever live and die, against a list that compares objects."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tierstore.training.pytorch.live_storages import LiveStorages


class Holder:
    """The one that keeps a storage alive."""

    def __init__(self) -> None:
        self.storage: torch.UntypedStorage | None = torch.empty(64).untyped_storage()


class LiveStoragesMachine(RuleBasedStateMachine):
    """The table against what was said last of each storage that lives.  Addresses are used again."""

    def __init__(self) -> None:
        super().__init__()
        self.table: LiveStorages[int] = LiveStorages()
        self.said: dict[Holder, int] = {}

    holders = Bundle("holders")

    @rule(target=holders)
    def make(self) -> Holder:
        holder = Holder()
        assert holder.storage is not None
        assert self.table.get(holder.storage) is None
        return holder

    @rule(holder=holders, number=st.integers())
    def put(self, holder: Holder, number: int) -> None:
        assert holder.storage is not None
        self.table.put(holder.storage, number)
        self.said[holder] = number

    @rule(holder=holders)
    def discard(self, holder: Holder) -> None:
        assert holder.storage is not None
        self.table.discard(holder.storage)
        self.said.pop(holder, None)

    @rule(holder=consumes(holders))
    def die(self, holder: Holder) -> None:
        holder.storage = None
        self.said.pop(holder, None)

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.said.clear()

    @invariant()
    def knows_what_was_said(self) -> None:
        assert len(self.table) == len(self.said)
        for holder, number in self.said.items():
            assert holder.storage is not None
            assert self.table.get(holder.storage) == number


TestLiveStorages = LiveStoragesMachine.TestCase
TestLiveStorages.settings = settings(stateful_step_count=50)
