"""Fewer moments and keys that do the same: for a first look at a large program.

1. Neighbouring moments of one phase and layer become one: it computes as long as they do, and has at most
   what they have.
2. Keys of one layer and kind that these moments use alike become one, with the bytes of all: bundles are
   stepped together then, with one state.
3. Where layers are joined, so is what is between moments of one layer, and activations whatever makes them.
4. What is moved keeps its bytes.  What has to be there together is more, so what just fits may not, joined.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tierstore.planning.homes import BundleHomes
from tierstore.planning.placement import Placement
from tierstore.planning.program import ByteKind, Datum, Does, KeyUse, Moment, Phase, Program, Unit

MOST = 2000
"""Moments that a program has before it is worth joining any."""


@dataclass(frozen=True)
class Coarsening:
    """A program, and which keys of the one that it was made from each of its keys stands for.

    Attributes:
        program: with fewer moments.
        members: by key of ``program``, the keys that it stands for.
    """

    program: Program
    members: Mapping[str, tuple[str, ...]]

    def spread(self, placement: Placement) -> Placement:
        """Return a placement of the whole program: each key lives as the joint that stands for it."""
        bundles = {
            key: homes
            for joint, homes in placement.bundles.items()
            for key in self.members.get(joint, (joint,))
        }
        return _with_residents(
            placement,
            bundles,
            lambda joints: frozenset(key for joint in joints for key in self.members.get(joint, (joint,))),
        )

    def narrowed(self, placement: Placement) -> Placement:
        """Return a placement of this program: each joint lives as the first key that it stands for."""
        known = {key: members[0] for key, members in self.members.items()}
        bundles = {
            key: placement.bundles[first] for key, first in known.items() if first in placement.bundles
        }
        return _with_residents(
            placement,
            bundles,
            lambda firsts: frozenset(key for key, first in known.items() if first in firsts),
        )


def _with_residents(
    placement: Placement,
    bundles: Mapping[str, BundleHomes],
    renamed: Callable[[frozenset[str]], frozenset[str]],
) -> Placement:
    """Return a placement of other bundles, with its residents under their names."""
    return replace(
        placement,
        bundles=bundles,
        residents=None if placement.residents is None else renamed(placement.residents),
        residents_without_state=renamed(placement.residents_without_state),
    )


def coarsened(program: Program, most: int = MOST) -> Program:
    """Return a program of fewer moments that moves the same bytes; itself, if it has at most ``most``."""
    return coarsen(program, most).program


def coarsen(program: Program, most: int = MOST, *, in_layers: bool = False) -> Coarsening:
    """Return a program of fewer moments, and what its keys stand for; of at most ``most`` it is the same.

    Args:
        program: that may be long.
        most: moments that it may have.
        in_layers: join what is between moments of one layer with it, and activations whatever operator
            makes them.  Marks of single operators mean nothing then.
    """
    if len(program.moments) <= most:
        return Coarsening(program, {key: (key,) for key in program.data})
    groups = _grouped(program, in_layers=in_layers)
    joint_of = _joined(program, groups, in_layers=in_layers)
    groups = _with_joint_turns(program, groups, joint_of)
    members: dict[str, list[str]] = {}
    for key in program.data:
        members.setdefault(joint_of[key], []).append(key)
    data = {joint: _joint_datum(program, joint, keys, joint_of) for joint, keys in members.items()}
    made = replace(
        program,
        data=data,
        moments=tuple(_joint_moments(program, groups, joint_of)),
        units=_joint_units(program, joint_of),
        assumptions=(
            *program.assumptions,
            f"{len(program.moments)} moments were looked at as {len(set(groups))}",
        ),
    )
    return Coarsening(made, {joint: tuple(keys) for joint, keys in members.items()})


# ---------------------------------------------------------------------- what is joined


def _grouped(program: Program, *, in_layers: bool) -> list[int]:
    """Return of each moment the number of its group: neighbours of one phase and layer."""
    places = [(moment.phase, moment.layer) for moment in program.moments]
    if in_layers:
        beside = zip(places, places[2:], strict=False)
        places[1:-1] = [
            before if before == behind and before[1] is not None else place
            for place, (before, behind) in zip(places[1:-1], beside, strict=True)
        ]
    groups = [0] * len(places)
    for number, (former, place) in enumerate(itertools.pairwise(places), 1):
        is_alike = former == place and place[1] is not None and place[0] is not Phase.OPTIMIZER
        groups[number] = groups[number - 1] + (not is_alike)
    return groups


Signature = tuple[object, ...]


def _signatures(program: Program, groups: Sequence[int], *, in_layers: bool) -> dict[str, Signature]:
    """Return what is done with each key, by groups, but in optimizers' turns."""
    found: dict[str, dict[tuple[int, Does], None]] = {key: {} for key in program.data}
    for group, moment in zip(groups, program.moments, strict=True):
        if moment.phase is not Phase.OPTIMIZER:
            for use in moment.uses:
                found[use.key][group, use.does] = None
    return {
        key: (datum.kind, datum.layer, "" if in_layers else datum.operator, tuple(found[key]))
        for key, datum in program.data.items()
    }


def _joined(program: Program, groups: Sequence[int], *, in_layers: bool) -> dict[str, str]:
    """Return of each key the one that stands for it."""
    signatures = _signatures(program, groups, in_layers=in_layers)
    joint_of = {key: key for key in program.data}
    owned = {key for unit in program.units for key in _keys_of(unit)}
    for run in _runs_of_units(program, signatures):
        first = run[0]
        for unit in run:
            joint_of[unit.bundle] = first.bundle
            if unit.state is not None and first.state is not None:
                joint_of[unit.state] = first.state
        _join_alike([key for unit in run for key in unit.gradients], signatures, joint_of)
    kept = (ByteKind.PARAMETERS, ByteKind.BUFFER, ByteKind.ACTIVATION)
    others = [
        key
        for key, datum in program.data.items()
        if key not in owned and datum.kind in kept and datum.layer is not None
    ]
    _join_alike(others, signatures, joint_of)
    return joint_of


def _join_alike(keys: Sequence[str], signatures: Mapping[str, Signature], joint_of: dict[str, str]) -> None:
    first: dict[Signature, str] = {}
    for key in keys:
        joint_of[key] = first.setdefault(signatures[key], key)


def _keys_of(unit: Unit) -> tuple[str, ...]:
    return (unit.bundle, *unit.gradients, *([] if unit.state is None else [unit.state]))


def _runs_of_units(program: Program, signatures: Mapping[str, Signature]) -> list[list[Unit]]:
    """Return units whose turns follow each other and that are alike."""
    units = {unit.bundle: unit for unit in program.units}
    turns = [
        next((units[use.key] for use in moment.uses if use.key in units), None)
        for moment in program.moments
        if moment.phase is Phase.OPTIMIZER
    ]

    def alike(unit: Unit | None) -> object:
        if unit is None or program.data[unit.bundle].layer is None:
            return object()
        return (
            unit.optimizer,
            unit.may_step_ahead,
            unit.host_step_s is None,
            unit.state is None,
            signatures[unit.bundle],
            frozenset(signatures[key] for key in unit.gradients),
        )

    runs = [[each for each in run if each is not None] for _, run in itertools.groupby(turns, alike)]
    return [run for run in runs if run]


def _with_joint_turns(program: Program, groups: Sequence[int], joint_of: Mapping[str, str]) -> list[int]:
    """Return the groups with the turns of units that became one in one."""
    bundles = {unit.bundle for unit in program.units}
    found: list[int] = []
    former: tuple[int, str | None] | None = None
    for group, moment in zip(groups, program.moments, strict=True):
        turn = next((joint_of[use.key] for use in moment.uses if use.key in bundles), None)
        turn = turn if moment.phase is Phase.OPTIMIZER else None
        if former is None:
            found.append(0)
        else:
            is_same = group == former[0] or (turn is not None and turn == former[1])
            found.append(found[-1] + (not is_same))
        former = (group, turn)
    return found


# ---------------------------------------------------------------------- what becomes of it


def _joint_datum(program: Program, joint: str, keys: Sequence[str], joint_of: Mapping[str, str]) -> Datum:
    first = program.data[joint]  # not always the first of them: units have an order of their own
    owner = None if first.owner is None else joint_of.get(first.owner, first.owner)
    return replace(first, nbytes=sum(program.data[key].nbytes for key in keys), owner=owner)


def _joint_units(program: Program, joint_of: Mapping[str, str]) -> tuple[Unit, ...]:
    by_bundle: dict[str, list[Unit]] = {}
    for unit in program.units:
        by_bundle.setdefault(joint_of[unit.bundle], []).append(unit)
    return tuple(
        replace(
            units[0],
            gradients=tuple(dict.fromkeys(joint_of[key] for unit in units for key in unit.gradients)),
            device_step_s=sum(unit.device_step_s for unit in units),
            host_step_s=None
            if units[0].host_step_s is None
            else sum(unit.host_step_s or 0.0 for unit in units),
        )
        for units in by_bundle.values()
    )


def _joint_moments(program: Program, groups: Sequence[int], joint_of: Mapping[str, str]) -> list[Moment]:
    numbered = list(zip(groups, enumerate(program.moments), strict=True))
    return [
        _joint_moment(program, groups, [each for _, each in group], joint_of)
        for _, group in itertools.groupby(numbered, lambda each: each[0])
    ]


def _joint_moment(
    program: Program,
    groups: Sequence[int],
    moments: Sequence[tuple[int, Moment]],
    joint_of: Mapping[str, str],
) -> Moment:
    first = moments[0][1]
    uses: dict[tuple[str, Does], KeyUse] = {}
    for number, moment in moments:
        for use in moment.uses:
            key = joint_of[use.key]
            if use.does in (Does.READ, Does.WRITE) and (key, Does.MAKE) in uses:
                continue  # it is there while the moment lasts
            last = min(number + use.moments, len(groups)) - 1
            spans = groups[last] - groups[number] + 1
            former = uses.get((key, use.does))
            uses[key, use.does] = KeyUse(key, use.does, max(spans, former.moments if former else 1))
    for key, does in list(uses):
        if does is Does.WRITE:
            uses.pop((key, Does.READ), None)
    return replace(
        first,
        name=first.name if len(moments) == 1 else f"{first.name} and {len(moments) - 1} more",
        uses=tuple(uses.values()),
        compute_s=sum(moment.compute_s for _, moment in moments),
        host_s=sum(moment.host_s for _, moment in moments),
        work=tuple(work for _, moment in moments for work in moment.work),
        workspace_bytes=_most_beside(program, moments),
        nodes=sum(moment.nodes for _, moment in moments),
    )


def _most_beside(program: Program, moments: Sequence[tuple[int, Moment]]) -> int:
    """Return the most that moments have beside what there was when the first of them began."""
    live_bytes = moments[0][1].live_bytes
    most, made = 0, 0
    for _, moment in moments:
        most = max(most, made + moment.workspace_bytes + moment.live_bytes - live_bytes)
        for use in moment.uses:
            nbytes = program.data[use.key].nbytes
            made += nbytes if use.does is Does.MAKE else -nbytes if use.does is Does.END else 0
    return most
