"""Where a parameter group is stepped, in a run: on the host, or on the device."""

from __future__ import annotations

from typing import Final

from tierstore.errors import ConfigError
from tierstore.quoting import quoted

_NAMES: Final = {"cpu": "cpu", "device": "device", "gpu": "device", "ascend": "device"}
"""Ours, and the original system's, which calls the device by its kind."""


def target_of(value: object) -> str:
    """Return ``"cpu"`` or ``"device"``.

    Args:
        value: one of these, or the original system's ``"GPU"`` or ``"Ascend"``, in any case of letters.

    Raises:
        TypeError: it is no text.
        ConfigError: it is another text.
    """
    if not isinstance(value, str):
        raise TypeError(f"target={quoted(value)}: it has to be 'cpu' or 'device'")
    if value.lower() not in _NAMES:
        raise ConfigError(
            f"target={value!r}: it has to be 'cpu' or 'device' ('GPU' and 'Ascend' are that, too)"
        )
    return _NAMES[value.lower()]
