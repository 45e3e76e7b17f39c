"""The planners of runs that are opened in a test."""

from __future__ import annotations

import pytest

from tierstore.training.planned import RunPlanner


def noted_planners(monkeypatch: pytest.MonkeyPatch) -> list[RunPlanner]:
    """Return a list that every planner is added to when it begins to watch its run.

    Args:
        monkeypatch: of the test.
    """
    found: list[RunPlanner] = []
    watch = RunPlanner.watch

    def noted(planner: RunPlanner) -> None:
        found.append(planner)
        watch(planner)

    monkeypatch.setattr(RunPlanner, "watch", noted)
    return found
