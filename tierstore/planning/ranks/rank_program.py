"""What one of many ranks does in a step: its shards, and the collectives between.

The first rank stands for all: where shards differ, by padding, its are the largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tierstore.planning.program import (
    ByteKind,
    Datum,
    Does,
    KeyUse,
    Moment,
    OperatorWork,
    Phase,
    Program,
    Unit,
)
from tierstore.planning.ranks.collectives import Collective, CollectiveKind, RankNetwork
from tierstore.planning.ranks.gathering import REST, Gathering, groups_of, passes_of, spans_of
from tierstore.planning.ranks.reducing import Reducing, landings_of
from tierstore.planning.ranks.shards import RankGroup, RankShards, Sharding
from tierstore.planning.ranks.weaving import Weaving, read
from tierstore.planning.simulating.exchanges import Exchanges

BY_FORMULA = (
    "collectives take what rings take by formula; congestion, ranks that are late, and copies that slow "
    "collectives down are not in it"
)
NOT_VALIDATED = (
    "times of networks and of several hosts were never compared with real ones: NVLink, InfiniBand and their "
    "like are not validated; bytes and order of collectives are, with gloo processes of one machine"
)
BY_BYTES = "shards are divided by bytes: rows that are padded are not counted"


@dataclass(frozen=True)
class RankProgram:
    """What one rank does.

    Attributes:
        program: of it: shards, and moments that begin and await collectives.
        exchanges: what these carry over which network, for `tierstore.planning.simulating.Conditions`.
        collectives: of one step, in the order in which they are begun.
    """

    program: Program
    exchanges: Exchanges
    collectives: tuple[Collective, ...]


def rank_program(program: Program, network: RankNetwork, ranks: RankGroup) -> RankProgram:
    """Return what one rank does in a step of a program that all ranks run, each with a batch of its own.

    Args:
        program: of one process alone, with seconds (`tierstore.planning.roofline`).
        network: between the ranks.
        ranks: how they share the work.
    """
    world_size, shard = network.ranks_per_host * network.hosts, ranks.shard
    if world_size == 1:
        return RankProgram(program, Exchanges(), ())
    shards = RankShards(program, world_size, ranks.rows)
    weaving = Weaving(program, network)
    reducing = Reducing(program, weaving, shards)
    gathered: dict[str, str] = {}
    match shard:
        case Sharding.FULL:
            gathered = _shard_fully(program, weaving, reducing, shards)
        case Sharding.OPTIMIZER:
            reducing.scatter({unit.bundle: unit.bundle for unit in program.units}, {})
            _gather_stepped(program, weaving, shards)
        case Sharding.NONE:
            reducing.average(ranks.bucket_bytes)

    def change(number: int, moment: Moment) -> Moment:
        del number  # all are treated alike
        if moment.phase is Phase.OPTIMIZER:
            return _stepped(program, moment, shards, shard)
        return _with_gathered(reducing.with_whole(moment), gathered)

    _divide_data(weaving, shards, shard)
    woven = weaving.woven(change)
    gradients = {key for each in landings_of(program) for key in each.last}
    is_padded = shard is Sharding.NONE or gradients <= set(ranks.rows)
    told = (BY_FORMULA, NOT_VALIDATED, *[BY_BYTES] * (not is_padded))
    found = replace(
        woven,
        units=tuple(_unit(unit, shards, shard, network.ranks_per_host) for unit in program.units),
        standing_bytes=program.standing_bytes + _buffer_bytes(program, ranks),
        facts={**program.facts, "ranks": str(world_size), "hosts": str(network.hosts), "shard": shard.value},
        assumptions=(*program.assumptions, *told),
    )
    return RankProgram(found, weaving.exchanges(), weaving.ordered(found))


# ---------------------------------------------------------------------- full shards


def _shard_fully(
    program: Program, weaving: Weaving, reducing: Reducing, shards: RankShards
) -> dict[str, str]:
    """Weave in what full shards need; return by bundle the key of what it is gathered into."""
    groups = groups_of(program)
    gathering = Gathering(program, weaving, shards, groups)
    passes = passes_of(program)
    ends = {each: number for number, each in enumerate(passes) if _is_backward(program, number)}
    spans = [
        replace(span, last=max(span.last, ends.get(span.pass_number, 0))) if span.group == REST else span
        for span in spans_of(program, groups)
    ]
    gathering.weave(spans)
    gathering.end_rest(spans)
    last = {(span.group, span.pass_number): span.last for span in spans if _is_backward(program, span.last)}
    reducing.scatter(groups, last)
    return {bundle: gathering.whole(bundle) for bundle in groups}


def _is_backward(program: Program, number: int) -> bool:
    return program.moments[number].phase is Phase.BACKWARD


def _with_gathered(moment: Moment, gathered: Mapping[str, str]) -> Moment:
    """Return a moment that uses what was gathered in the place of bundles."""
    uses = dict.fromkeys(
        KeyUse(gathered[use.key], Does.READ) if use.key in gathered else use for use in moment.uses
    )
    return replace(moment, uses=tuple(uses))


# ---------------------------------------------------------------------- shards of optimizers


def _gather_stepped(program: Program, weaving: Weaving, shards: RankShards) -> None:
    """Let each rank have what the others have stepped, after all steps."""
    turns = [number for number, moment in enumerate(program.moments) if moment.phase is Phase.OPTIMIZER]
    for unit in program.units if turns else ():
        uses = read(unit.bundle)
        begun = weaving.after(turns[-1], f"all-gather of {unit.bundle}", uses)
        nbytes = shards.gathered_bytes(unit.bundle)
        weaving.begin(begun, Collective(CollectiveKind.ALL_GATHER, unit.bundle, nbytes))
        weaving.await_in(weaving.after(turns[-1], f"{unit.bundle} is gathered", uses), begun)


def _stepped(program: Program, moment: Moment, shards: RankShards, shard: Sharding) -> Moment:
    """Return a turn of an optimizer that steps a shard."""
    bundles = {unit.bundle for unit in program.units}
    bundle = next((use.key for use in moment.uses if use.key in bundles), None)
    if bundle is None or shard is Sharding.NONE:
        return moment
    ratio = shards.ratio(bundle)
    return replace(
        moment,
        compute_s=moment.compute_s * ratio,
        workspace_bytes=round(moment.workspace_bytes * ratio),
        work=tuple(_part(each, ratio) for each in moment.work),
    )


def _part(work: OperatorWork, ratio: float) -> OperatorWork:
    return replace(work, flops=work.flops * ratio, moved_bytes=round(work.moved_bytes * ratio))


def _unit(unit: Unit, shards: RankShards, shard: Sharding, ranks_per_host: int) -> Unit:
    """Return what one turn steps of a shard; all ranks of a host step on its cores at once."""
    ratio = 1.0 if shard is Sharding.NONE else shards.ratio(unit.bundle)
    host_step_s = None if unit.host_step_s is None else unit.host_step_s * ratio * ranks_per_host
    return replace(unit, device_step_s=unit.device_step_s * ratio, host_step_s=host_step_s)


# ---------------------------------------------------------------------- data


def _divide_data(weaving: Weaving, shards: RankShards, shard: Sharding) -> None:
    """Let the data that ranks divide be shards."""
    kinds: set[ByteKind] = set()
    if shard is not Sharding.NONE:
        kinds |= {ByteKind.GRADIENT, ByteKind.STATE}
    if shard is Sharding.FULL:
        kinds.add(ByteKind.PARAMETERS)
    for key, datum in list(weaving.data.items()):
        if datum.kind in kinds:
            weaving.data[key] = _divided(datum, shards)


def _divided(datum: Datum, shards: RankShards) -> Datum:
    return replace(datum, nbytes=shards.nbytes(datum.key))


def _buffer_bytes(program: Program, ranks: RankGroup) -> int:
    """Return what is sent from: all buckets, or the largest gradient once more."""
    sizes = [program.data[key].nbytes for each in landings_of(program)[:1] for key in each.last]
    if ranks.shard is not Sharding.NONE or not sizes:
        return 0
    return max(sizes) if ranks.bucket_bytes is None else sum(sizes)
