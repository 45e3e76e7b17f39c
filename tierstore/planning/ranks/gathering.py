"""When parameters of fully sharded ranks are whole: they are gathered before their use, and go after it.

As FSDP2's `fully_shard` of each layer and then of the model does it:

1. The bundles of a layer are a group; all others are one that is whole from forward to the end of backward.
   A program without layers has a group for each bundle.
2. In forward a group is gathered before its first use and goes after its last.  In backward each is gathered
   while the one before it computes: the first one as backward begins.
3. At most two groups of layers are whole at once: the next is gathered into the memory of the last but one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tierstore.planning.program import ByteKind, Does, Phase, Program
from tierstore.planning.ranks.collectives import Collective, CollectiveKind
from tierstore.planning.ranks.shards import RankShards
from tierstore.planning.ranks.weaving import Weaving, ended, made, read

REST = "the rest"


@dataclass(frozen=True, slots=True)
class GatherSpan:
    """While a group is whole.

    Attributes:
        group: its name.
        is_backward: whether backward uses it.
        pass_number: of the step's passes.
        first, last: numbers of moments.
    """

    group: str
    is_backward: bool
    pass_number: int
    first: int
    last: int

    def is_followed_back_by(self, other: GatherSpan) -> bool:
        """Return whether both are of the backward of one pass."""
        return self.is_backward and other.is_backward and self.pass_number == other.pass_number


def groups_of(program: Program) -> dict[str, str]:
    """Return the name of each bundle's group."""
    bundles = [each for each in program.data.values() if each.kind is ByteKind.PARAMETERS]
    if all(each.layer is None for each in bundles):
        return {each.key: each.key for each in bundles}
    return {each.key: REST if each.layer is None else layer_group(each.layer) for each in bundles}


def layer_group(layer: int) -> str:
    """Return the name of a layer's group."""
    return f"layer {layer}"


def passes_of(program: Program) -> list[int]:
    """Return the number of the pass that each moment belongs to: a forward after a backward begins one."""
    found: list[int] = []
    number, has_gone_back = 0, False
    for moment in program.moments:
        if moment.phase is Phase.FORWARD and has_gone_back:
            number, has_gone_back = number + 1, False
        has_gone_back = has_gone_back or moment.phase is Phase.BACKWARD
        found.append(number)
    return found


def spans_of(program: Program, groups: dict[str, str]) -> list[GatherSpan]:
    """Return when each group is whole, in the order in which that begins."""
    found: dict[tuple[str, int, bool], tuple[int, int]] = {}
    for (number, last), group, key in _group_uses(program, groups):
        former = found.get((group, *key))
        found[group, *key] = (number, last) if former is None else (former[0], max(former[1], last))
    spans = [
        GatherSpan(group, is_backward, pass_number, first, last)
        for (group, pass_number, is_backward), (first, last) in found.items()
    ]
    return sorted(spans, key=lambda span: (span.first, span.group != REST))


def _group_uses(
    program: Program, groups: dict[str, str]
) -> Iterator[tuple[tuple[int, int], str, tuple[int, bool]]]:
    """Yield each use of a group: the moments, the group, and the pass with whether it is backward."""
    passes = passes_of(program)
    names = frozenset(groups.values())
    for number, moment in enumerate(program.moments):
        if moment.phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        key = passes[number], moment.phase is Phase.BACKWARD
        if moment.layer is not None and layer_group(moment.layer) in names:
            yield (number, number), layer_group(moment.layer), key  # FSDP2's hooks are those of the layer
        for use in moment.uses:
            datum = program.data[use.key]
            bundle = datum.owner if datum.kind is ByteKind.GRADIENT and use.does is not Does.END else use.key
            if bundle in groups:
                group = groups[bundle]
                last = min(number + use.moments, len(program.moments)) - 1
                yield (number, last), group, (key[0], key[1] and group != REST)


class Gathering:
    """Weaves all-gathers of parameters into a program.

    Args:
        program: of one rank.
        weaving: told of them.
        shards: what a rank has.
        groups: the name of each bundle's group.
    """

    def __init__(
        self, program: Program, weaving: Weaving, shards: RankShards, groups: dict[str, str]
    ) -> None:
        self._program = program
        self._weaving = weaving
        self._groups = groups
        self._bytes = dict.fromkeys(groups.values(), 0)
        for key, group in groups.items():
            self._bytes[group] += shards.gathered_bytes(key)
        self._passes = passes_of(program)
        self._begun: dict[GatherSpan, str] = {}
        self._gone: list[str] = []  # the moments after which groups of layers were gone

    def whole(self, bundle: str) -> str:
        """Return the key of what a bundle is gathered into."""
        return f"whole/{self._groups[bundle]}"

    def weave(self, spans: list[GatherSpan]) -> None:
        """Weave in the gathers of spans."""
        layers = [span for span in spans if span.group != REST]
        for span in spans:
            if span.group == REST:
                self._begin(span, span.first, None)
                self._wait(span)
        for span, following in itertools.zip_longest(layers, layers[1:]):
            if span not in self._begun:
                self._begin(span, self._first_backward(span), self._freed(2))
            self._wait(span)
            if following is not None and span.is_followed_back_by(following):
                self._begin(following, span.first, self._freed(1))
            self._gone.append(self._go(span))

    def end_rest(self, spans: list[GatherSpan]) -> None:
        """Let the group that is no layer's go at the end of its spans."""
        for span in spans:
            if span.group == REST:
                self._go(span)

    def _first_backward(self, span: GatherSpan) -> int:
        """Return before which moment a span's gather begins that nothing has begun yet.

        The backward of the group beside the layers, which runs first, begins that of the last layer.
        """
        if not span.is_backward or REST not in self._bytes:
            return span.first
        return next(
            number
            for number, moment in enumerate(self._program.moments)
            if moment.phase is Phase.BACKWARD and self._passes[number] == span.pass_number
        )

    def _freed(self, back: int) -> str | None:
        return self._gone[-back] if len(self._gone) >= back else None

    def _begin(self, span: GatherSpan, number: int, after: str | None) -> None:
        members = [key for key, group in self._groups.items() if group == span.group]
        key = self._weaving.workspace(f"whole/{span.group}", self._bytes[span.group])
        name = self._weaving.before(number, f"all-gather of {span.group}", [*read(*members), *made(key)])
        collective = Collective(CollectiveKind.ALL_GATHER, span.group, self._bytes[span.group])
        self._weaving.begin(name, collective, after)
        self._begun[span] = name

    def _wait(self, span: GatherSpan) -> None:
        name = self._weaving.before(span.first, f"{span.group} is gathered")
        self._weaving.await_in(name, self._begun[span])

    def _go(self, span: GatherSpan) -> str:
        return self._weaving.after(span.last, f"{span.group} goes", ended(f"whole/{span.group}"))
