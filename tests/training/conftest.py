"""On an accelerator every tensor of these tests is the device's; the simulated one's streams are late."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator

import pytest
import torch
from torch._C._dynamo.eval_frame import set_eval_frame

from tests import target
from tests.lock_order import locks_in_order
from tests.sampling import IS_CI
from tierstore.training import first_call, first_plan, planned

_LOOKS_AHEAD = frozenset(
    {
        *("test_device_budget", "test_foreseen", "test_held_memory", "test_one_budget"),
        *("test_one_budget_bound", "test_one_budget_ends", "test_planned", "test_planned_first"),
        "test_refusals_for_room",
    }
)


@pytest.fixture(autouse=True)
def _on_the_accelerator() -> Iterator[None]:
    if target.accelerator is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        if target.accelerator == "openreg":
            from tests.accelerator import late

            stack.enter_context(late(kernel_us=20, copy_us=500))
        else:
            before = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(mode=True, warn_only=True)
            stack.callback(torch.use_deterministic_algorithms, before)
        stack.enter_context(torch.device(target.accelerator, 0))
        yield
    torch.accelerator.synchronize()


@pytest.fixture(autouse=True)
def _locks_are_taken_in_order() -> Iterator[None]:
    with locks_in_order() as out_of_order:
        yield
    assert not out_of_order


@pytest.fixture(autouse=True)
def _runs_are_not_planned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no machine be so busy that a few steps are worth a search: what moves would be the clock's to say.

    Nor is anything planned before the first step: what moves is that of the rules, in less time.
    `test_planned` and `test_planned_first` are about what plans do.  CI looks ahead at the first step of one
    test in four, and of those in which it matters.
    """
    if IS_CI and request.path.stem not in _LOOKS_AHEAD and zlib.crc32(request.node.nodeid.encode()) % 4:
        monkeypatch.setattr(first_call, "may_be_refused", lambda *_: False)
    monkeypatch.setattr(first_call, "MOST_BUNDLES", 0)
    monkeypatch.setattr(first_plan, "MOST_MOMENTS", 0)
    monkeypatch.setattr(planned, "SHARE_OF_TIME", 0.0)


@pytest.fixture
def compiler_at_work() -> Iterator[None]:
    """Let the compiler evaluate frames, as it does while something compiled runs or was interrupted."""
    before = set_eval_frame(False)
    yield
    set_eval_frame(before)
