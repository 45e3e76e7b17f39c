"""What stays in the fastest tier from step to step, as a run and a simulated one choose it."""

from __future__ import annotations

import pytest

from tierstore.planning import Placement, Trained
from tierstore.planning.deciding import ResidentChoice
from tierstore.planning.residents import OTHERS

STEPPED = {
    f"param/{number}": Trained((f"param/{number}", f"state/{number}"), (), 300, 0, 200) for number in range(4)
}
FROZEN = {"param/base": Trained(("param/base",), (), 300, 0, is_trained=False)}


@pytest.mark.parametrize(
    ("room_bytes", "has_frozen", "count"),
    [
        (1200, False, 4),  # to the byte
        (1199, False, 1),  # else one comes while another leaves
        (1200, True, 1),  # as what is used beside it does
        (1200 + int(OTHERS * 300), True, 4),
    ],
)
def test_where_gradients_are_the_programs_own_all_that_is_stepped_stays(
    room_bytes: int, has_frozen: bool, count: int
) -> None:
    trained = {**FROZEN, **STEPPED} if has_frozen else STEPPED
    sizes = {key: 100 if key.startswith("param") else 200 for each in STEPPED.values() for key in each.keys}
    choice = ResidentChoice(Placement(), lambda: room_bytes, lambda: 1.0, in_backward=False)
    staying = choice.choose(trained, [key for each in trained.values() for key in each.keys], sizes)
    assert len(choice.residents) == count
    assert staying.keys == {key for bundle in choice.residents for key in STEPPED[bundle].keys}
