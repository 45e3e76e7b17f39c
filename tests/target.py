"""The accelerator that the tests of training run on."""

from __future__ import annotations

accelerator: str | None = None
"""Its type, as ``--on-accelerator`` and ``--simulate-accelerator`` set it before any test is collected."""
