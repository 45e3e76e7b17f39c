"""Where a datum lives, as a placement says."""

from __future__ import annotations

from collections.abc import Mapping

from tierstore.planning.homes import BundleHomes, Home
from tierstore.planning.placement import Placement
from tierstore.planning.program import ByteKind, Program

_NO_HOMES = BundleHomes()


def homes_of(placement: Placement, key: str | None) -> BundleHomes:
    """Return where a bundle lives; where nothing is said: as fast as there is room."""
    return placement.bundles.get(key or "", _NO_HOMES)


def return_homes(program: Program, placement: Placement) -> Mapping[str, Home]:
    """Return by key the homes that are gone back to after every use."""
    found: dict[str, Home] = {}
    for key, datum in program.data.items():
        homes = homes_of(placement, datum.owner or key)
        home = {
            ByteKind.PARAMETERS: homes.parameters,
            ByteKind.BUFFER: homes.parameters,
            ByteKind.GRADIENT: homes.gradients,
            ByteKind.STATE: homes.state,
        }.get(datum.kind)
        if home is not None and home.returns:
            found[key] = home
    return found
