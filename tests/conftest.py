"""What every test shares: Hypothesis' profiles, and the marks that need hardware."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

_SLOW_STORES = [HealthCheck.too_slow, HealthCheck.data_too_large]

# Two threads of a small operation spend their time waiting for each other, most of all beside others.
torch.set_num_threads(1)

settings.register_profile("default", max_examples=50, deadline=None, suppress_health_check=_SLOW_STORES)
settings.register_profile(
    "ci", max_examples=100, deadline=None, derandomize=True, suppress_health_check=_SLOW_STORES
)
settings.register_profile(
    "long", max_examples=5_000, stateful_step_count=200, deadline=None, suppress_health_check=_SLOW_STORES
)
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
settings.load_profile(_PROFILE)

_LONG_TIMEOUT_S = 7200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the long profile time, and skip what needs an accelerator where there is none."""
    if _PROFILE == "long":  # a test's own limit is for a hundred examples, not for thousands
        for item in items:
            item.add_marker(pytest.mark.timeout(_LONG_TIMEOUT_S), append=False)
    if torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="no torch accelerator on this machine")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
