"""When gradients are reduced over ranks: sharded, each group at once; or whole, one at a time or in buckets.

1. Backward makes a whole gradient.  What a gradient's key stands for is made when the collective is over.
2. A reduce-scatter begins when its group's backward is over, and is awaited before the next one begins, and
   at the end of backward (FSDP2).
3. Without shards and buckets each gradient is a message of its own that is awaited at once, and at the end of
   a pass ranks tell each other which gradients there are (`Offload.average_gradients`).
4. Buckets are filled in the order in which gradients are made, the first of the usual ones up to 1 MiB,
   and are awaited at the end of backward (``DistributedDataParallel`` from its second step on).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tierstore.planning.program import ByteKind, Does, KeyUse, Moment, Phase, Program
from tierstore.planning.ranks.collectives import Collective, CollectiveKind
from tierstore.planning.ranks.gathering import REST, passes_of
from tierstore.planning.ranks.shards import RankShards
from tierstore.planning.ranks.weaving import Weaving, ended, made

USUAL_BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20  # of the usual ones: it leaves early
_FLAG_BYTES = 4


@dataclass(frozen=True)
class Landings:
    """When the gradients of one pass are accumulated.

    Attributes:
        last: by key, the number of the moment that accumulates it last, in the order of these.
        end: the number of the last moment of backward.
    """

    last: Mapping[str, int]
    end: int


def landings_of(program: Program) -> list[Landings]:
    """Return when gradients are accumulated, for each pass that makes any."""
    passes = passes_of(program)
    found: dict[int, dict[str, int]] = {}
    ends: dict[int, int] = {}
    for number, moment in enumerate(program.moments):
        if moment.phase is not Phase.BACKWARD:
            continue
        ends[passes[number]] = number
        for use in moment.uses:
            if _accumulates(program, use):
                last = found.setdefault(passes[number], {})
                last.pop(use.key, None)  # it is again the last one
                last[use.key] = number
    return [Landings(last, ends[number]) for number, last in found.items()]


class Reducing:
    """Weaves reductions of gradients into a program.

    Args:
        program: of one rank.
        weaving: told of them.
        shards: what a rank has.
    """

    def __init__(self, program: Program, weaving: Weaving, shards: RankShards) -> None:
        self._program = program
        self._weaving = weaving
        self._shards = shards
        self._landings = landings_of(program)
        self._has_made: set[str] = set()  # in an earlier pass
        for key in dict.fromkeys(key for each in self._landings for key in each.last):
            weaving.workspace(_whole(key), program.data[key].nbytes)

    # --- sharded ------------------------------------------------------------------------------

    def scatter(self, groups: Mapping[str, str], ends: Mapping[tuple[str, int], int]) -> None:
        """Weave in a reduce-scatter for each group and pass.

        Args:
            groups: the name of each bundle's group.
            ends: by group and pass, the number of the moment after which it begins; where there is none it
                begins after the group's last gradient.
        """
        for pass_number, landings in enumerate(self._landings):
            members: dict[str, list[str]] = {}
            last: dict[str, int] = {}
            for key, number in landings.last.items():
                owner = self._program.data[key].owner
                group = groups.get(owner or "", "")
                members.setdefault(group, []).append(key)
                last[group] = max(last.get(group, 0), number, ends.get((group, pass_number), 0))
            pending: tuple[str, str, Sequence[str]] | None = None
            for group in sorted(members, key=lambda each: (last[each], each == REST)):
                if pending is not None:
                    self._receive(last[group], *pending)
                begun = self._scatter(last[group], group, members[group])
                pending = (begun, group, members[group])
            if pending is not None:
                self._receive(landings.end, *pending)

    def _scatter(self, number: int, group: str, keys: Sequence[str]) -> str:
        nbytes = sum(self._shards.gathered_bytes(key) for key in keys)
        sent = self._weaving.workspace(f"sent/{group}", nbytes)
        uses = [*made(sent), *ended(*map(_whole, keys))]
        name = self._weaving.after(number, f"reduce-scatter of {group}", uses)
        self._weaving.begin(name, Collective(CollectiveKind.REDUCE_SCATTER, group, nbytes))
        return name

    def _receive(self, number: int, begun: str, group: str, keys: Sequence[str]) -> None:
        name = self._weaving.after(number, f"{group} is reduced", ended(f"sent/{group}"))
        self._weaving.await_in(name, begun)
        self._land(number, group, keys)

    def _land(self, number: int, what: str, keys: Sequence[str]) -> None:
        """Let gradients be what was reduced."""
        uses = [KeyUse(key, Does.WRITE if key in self._has_made else Does.MAKE) for key in keys]
        self._has_made.update(keys)
        self._weaving.after(number, f"gradients of {what}", uses)

    # --- whole --------------------------------------------------------------------------------

    def average(self, bucket_bytes: int | None) -> None:
        """Weave in all-reduces: of buckets, or of each gradient alone."""
        if bucket_bytes is None:
            self._average_alone()
        else:
            self._average_in_buckets(bucket_bytes)

    def _average_alone(self) -> None:
        """Weave in an all-reduce for each gradient, awaited at once."""
        for landings in self._landings:
            for key, number in landings.last.items():
                begun = self._all_reduce(number, key, [key])
                self._take(number, begun, key, [key])
            flags = Collective(
                CollectiveKind.ALL_REDUCE, "which gradients there are", _FLAG_BYTES * len(landings.last)
            )
            begun = self._weaving.after(landings.end, flags.name)
            self._weaving.begin(begun, flags)
            self._weaving.await_in(self._weaving.after(landings.end, f"{flags.what} is known"), begun)

    def _average_in_buckets(self, bucket_bytes: int) -> None:
        """Weave in an all-reduce for each bucket of gradients, awaited at the end of backward."""
        for landings in self._landings:
            begun = []
            for index, keys in enumerate(self._buckets(landings, bucket_bytes)):
                what = f"bucket {index}"
                number = max(landings.last[key] for key in keys)
                begun.append((self._all_reduce(number, what, keys), what, keys))
            for each in begun:
                self._take(landings.end, *each)

    def _buckets(self, landings: Landings, bucket_bytes: int) -> list[list[str]]:
        buckets: list[list[str]] = [[]]
        filled, most = 0, FIRST_BUCKET_BYTES if bucket_bytes == USUAL_BUCKET_BYTES else bucket_bytes
        for key in landings.last:
            buckets[-1].append(key)
            filled += self._program.data[key].nbytes
            if filled >= most:
                buckets.append([])
                filled, most = 0, bucket_bytes
        return [each for each in buckets if each]

    def _all_reduce(self, number: int, what: str, keys: Sequence[str]) -> str:
        nbytes = sum(self._program.data[key].nbytes for key in keys)
        name = self._weaving.after(number, f"all-reduce of {what}")
        self._weaving.begin(name, Collective(CollectiveKind.ALL_REDUCE, what, nbytes))
        return name

    def _take(self, number: int, begun: str, what: str, keys: Sequence[str]) -> None:
        name = self._weaving.after(number, f"{what} is reduced", ended(*map(_whole, keys)))
        self._weaving.await_in(name, begun)
        self._land(number, what, keys)

    # --- what backward makes ------------------------------------------------------------------

    def with_whole(self, moment: Moment) -> Moment:
        """Return a moment; one of backward makes whole gradients."""
        if moment.phase is not Phase.BACKWARD:
            return moment
        return replace(moment, uses=tuple(self._whole_use(use) for use in moment.uses))

    def _whole_use(self, use: KeyUse) -> KeyUse:
        if not _accumulates(self._program, use):
            return use
        return KeyUse(_whole(use.key), Does.MAKE, use.moments)


def _accumulates(program: Program, use: KeyUse) -> bool:
    is_gradient = program.data[use.key].kind is ByteKind.GRADIENT
    return is_gradient and use.does in (Does.MAKE, Does.WRITE)


def _whole(key: str) -> str:
    return f"whole/{key}"
