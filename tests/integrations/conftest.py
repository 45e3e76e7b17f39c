"""What every test of this folder begins with."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _without_what_others_have_left() -> Iterator[None]:
    """Let accelerate forget its process-wide state: a training that has failed leaves its loaders there."""
    yield
    if "accelerate.state" in sys.modules:
        from accelerate.state import (  # type: ignore[import-untyped]
            AcceleratorState,
            GradientState,
        )

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
