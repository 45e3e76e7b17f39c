"""What a step of a run asks of its store, the same step of its simulation asks, too, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.training.recorded_machines import MODELS, QUOTAS, machine_of, opened, step
from tierstore.core import messages as m
from tierstore.core.ledger import Ledger
from tierstore.planning.simulating import simulate

LEARNING, STEPS = 2, 5

Asked = tuple[object, ...]

SAID = {
    m.FetchRequested: ("keys", "tier"),
    m.LeaseRequested: ("keys", "tier"),
    m.EvictRequested: ("keys", "to"),
    m.PutRequested: ("key", "tier"),
    m.RenameRequested: ("names",),
    m.DropRequested: ("keys",),
    m.PlanFollowed: ("plan",),
    m.Advanced: ("position",),
}
"""By kind of request, what it says, but for numbers."""


def asked_in(event: m.Event) -> Asked | None:
    """Return what an event asks for; ``None``: it tells what hardware did."""
    if isinstance(event, m.SplitRequested):
        return type(event), *event.names.values()
    if type(event) not in SAID:
        return None
    said = [getattr(event, name) for name in SAID[type(event)]]
    return type(event), *[tuple(each) if isinstance(each, list) else each for each in said]


@pytest.mark.parametrize(("name", "number"), [(name, number) for name in MODELS for number in (0, 1)])
def test_a_simulated_step_asks_for_what_the_runs_step_asks_for(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Asked] = []
    apply = Ledger.apply

    def noted(ledger: Ledger, *events: m.Event) -> Sequence[m.Command]:
        asked.extend(each for each in map(asked_in, events) if each is not None)
        return apply(ledger, *events)

    monkeypatch.setattr(Ledger, "apply", noted)
    trained, quota = MODELS[name](), QUOTAS[name][number]
    with opened(trained, tmp_path, quota) as run:
        for _ in range(LEARNING):
            step(trained)
        asked.clear()
        for _ in range(LEARNING, STEPS):
            step(trained)
        real = list(asked)
        program, placement, machine = run.program(), run.placement, machine_of(run, quota)
    asked.clear()
    simulate(program, machine, placement, steps=STEPS)
    assert len(real) > 300
    assert asked[-len(real) :] == real
