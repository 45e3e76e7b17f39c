"""What the plan of a recorded step makes of the store's choice."""

from __future__ import annotations

import torch

import tierstore as ts
from tierstore.training.follow import Follower, Window


def test_a_gradient_is_needed_until_the_step_ends() -> None:
    tiers = [ts.TierConfig("host", "memory", 2048), ts.TierConfig("disk", "memory", 65536)]
    with ts.Store(ts.StoreConfig(tiers=tiers, eviction="next-use")) as store:
        follower = Follower(store, [Window("host", 0)], lambda _: 0, optimizers=1)

        def begin_step() -> None:
            follower.begin_forward()
            follower.note("first")
            follower.note_gradient("gradient")
            follower.note("last")
            follower.note_step(0)

        for key in ("gradient", "first"):
            store.put(key, torch.zeros(1024, dtype=torch.uint8), tier="host")
        begin_step()
        begin_step()  # by the plan: what comes next is the end, and then "first"
        store.put("new", torch.zeros(1024, dtype=torch.uint8), tier="host")
        assert (store.where("gradient"), store.where("first")) == (("host",), ("disk",))
