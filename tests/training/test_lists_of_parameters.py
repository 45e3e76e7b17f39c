"""Functions over lists of parameters: done a run of one bundle at a time, they end as in one."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.training.twins import assert_equal_lists, config_of, every_layout
from tierstore.training import offload

_BLOCKS = 4
_ODD = _BLOCKS
"""The number of the parameter that has another shape than all others."""

Pair = tuple[int, int]
"""Which parameter is written to, and which one is read."""

_FUNCTIONS: dict[str, Callable[..., object]] = {
    "add": functools.partial(torch._foreach_add_, alpha=0.5),
    "copy": torch._foreach_copy_,
    "lerp": functools.partial(torch._foreach_lerp_, weight=0.25),
    "multiply and add": lambda to, of: torch._foreach_addcmul_(to, of, of, 0.5),
    "maximum, made": torch._foreach_maximum,
}

_PAIRS = st.lists(st.tuples(st.integers(0, _ODD), st.integers(0, _BLOCKS - 1)), min_size=1, max_size=6)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [64] * _BLOCKS + [48]
    return nn.Sequential(*(nn.Linear(64, size, bias=False) for size in sizes))


def _end(model: nn.Sequential, name: str, pairs: Sequence[Pair]) -> tuple[list[Tensor], str]:
    """Return what a function makes of a model's parameters, and how it refuses them."""
    parameters = list(model.parameters())
    made: object = None
    refusal = ""
    with torch.no_grad():
        try:
            made = _FUNCTIONS[name]([parameters[to] for to, _ in pairs], [parameters[of] for _, of in pairs])
        except RuntimeError as error:
            refusal = str(error)
    return [*made] if isinstance(made, list | tuple) else [], refusal


@every_layout
@pytest.mark.parametrize("name", _FUNCTIONS)
@settings(max_examples=max(5, settings().max_examples // 20))
@given(pairs=_PAIRS)
@example(pairs=[(0, 1), (1, 2), (0, 1)])  # the last one reads what the second one wrote
@example(pairs=[(0, 1), (1, 2), (0, 1), (_ODD, 0), (2, 3)])  # refused after others have been written
def test_places_of_lists_are_done_in_their_order(layout: str, name: str, pairs: list[Pair]) -> None:
    expected = _model()
    results, refusal = _end(expected, name, pairs)
    model = _model()
    with tempfile.TemporaryDirectory() as place, offload(model, None, config_of(layout, Path(place))):
        results_here, refusal_here = _end(model, name, pairs)
        assert_equal_lists(results, results_here)
        assert refusal_here == refusal
    assert_equal_lists(list(expected.parameters()), list(model.parameters()))
