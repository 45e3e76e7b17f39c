"""What CI tries is a part, and whoever asks for all gets all."""

from __future__ import annotations

import pytest

from tests import sampling
from tests.sampling import tried

CASES = [f"case {number}" for number in range(40)]


@pytest.fixture
def in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "IS_CI", True)


def test_all_are_tried_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "IS_CI", False)
    assert tried(CASES) == CASES


@pytest.mark.usefixtures("in_ci")
@pytest.mark.parametrize(("always", "of"), [(2, 6), (1, 3), (4, 1), (0, 7), (50, 2)])
def test_ci_tries_a_few_and_one_of_so_many_others_in_their_order(always: int, of: int) -> None:
    found = tried(CASES, always=always, of=of)
    assert len(found) == min(always, 40) + max(0, 40 - always) // of
    assert found == sorted(set(found), key=CASES.index)


@pytest.mark.usefixtures("in_ci")
def test_which_ones_depends_on_nothing_but_their_names() -> None:
    assert set(tried(CASES[::-1])) == set(tried(iter(CASES)))
    assert tried(CASES, name=lambda case: case[::-1]) != tried(CASES)


@pytest.mark.usefixtures("in_ci")
def test_of_few_cases_all_are_tried() -> None:
    assert tried({"a": 1, "b": 2}) == ["a", "b"]
    assert tried([]) == []
