"""The wrappers that a tier's options ask for.

One more is one more `WrapperKind` here; its options are then known to every tier, and what it counts stands
in the stats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tierstore.config.checks import Faults
from tierstore.errors import ConfigError
from tierstore.quoting import quoted
from tierstore.spi import Backend
from tierstore.wrappers import bandwidth, retrying
from tierstore.wrappers.kinds import TierWrapper, WrapperKind

KINDS: Final[tuple[WrapperKind, ...]] = (bandwidth.KIND, retrying.KIND)
"""From the medium outwards: every try has to keep to the limit."""

_NAMES: Final = frozenset(name for kind in KINDS for name in kind.options)


def split_options(tier: str, options: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Return what a tier's options say to wrappers, checked, and what is left for its backend.

    Raises:
        ConfigError: lists every fault of the former.
    """
    faults = Faults(f"TierConfig {quoted(tier)}")
    own: dict[str, object] = {}
    for kind in KINDS:
        given = {name: check for name, check in kind.options.items() if name in options}
        checked = faults.checked(options, given)
        if (fault := kind.fault(checked)) is not None:
            faults.add(fault[0], options[fault[0]], fault[1])
        own |= checked
    faults.raise_if_any()
    return own, {name: value for name, value in options.items() if name not in _NAMES}


def wrap(
    backend: Backend, options: Mapping[str, object], tier: str, wrappers: dict[str, TierWrapper]
) -> Backend:
    """Return a backend with the wrappers around it that checked options ask for.

    Args:
        backend: what holds the bytes; the outermost wrapper owns it.
        options: see `split_options`.
        tier: whose backend it is, for messages.
        wrappers: gets each, by the name of its kind.

    Raises:
        ConfigError: the backend is of a medium that a wrapper cannot stand before.
    """
    for kind in KINDS:
        if any(options.get(name) for name in kind.options):
            try:
                backend = wrappers[kind.name] = kind.wrap(backend, options, tier)
            except ConfigError as fault:
                raise ConfigError(f"TierConfig {quoted(tier)}: {fault}", tier=tier) from None
    return backend
