"""MindSpore's planner, to the letter: which idle spans of a graph's tensors leave the device, and whereto.

It is here to be compared with: `tierstore.planning.searching.greedy` weighs by time where this one counts
kernels, and the table in its tests is what the original gives.

1. A *span* is an idle interval of one tensor between two kernels, with at least one kernel strictly
   inside.  What persists has one more, from its last use to its first one in the next step; another output
   of the graph has one to the end of the step, and does not come back.
2. What a kernel touches is on the device while it runs.  If that alone is more than the device has, nothing
   is planned.
3. Forced spans come first: to the host if that is asked and has room at every kernel strictly inside, else to
   the disk.  All others follow in ascending order of kernels inside times bytes, and in the order in which
   they were found where those are equal: each stays on the device if it fits, goes to the host if it fits
   there, and else to the disk.
4. A span that leaves goes right after the kernel before it and comes back right before the one after it.
   What happens between the same two kernels shares one slot.

Not here: the contiguous blocks of communication kernels.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from tierstore.errors import CapacityError, ConfigError
from tierstore.quoting import quoted

_LINKS_OF_SLOT = 2


class GraphLevel(enum.Enum):
    """Where a span's bytes are."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """A tensor of a graph.

    Attributes:
        nbytes: of it.
        persists: whether it lives from step to step: a weight.
        is_output: whether the graph returns it.
        forced: where its spans have to go; ``None``: where the plan says.
    """

    nbytes: int
    persists: bool = False
    is_output: bool = False
    forced: GraphLevel | None = None


@dataclass(frozen=True, slots=True)
class GraphSpan:
    """An idle interval of one tensor.

    Attributes:
        tensor: its name.
        begin: the kernel that used it last.
        end: the kernel that uses it next; counted on beyond the step's last where that is in the next step.
        returns: whether anybody uses it at its end.
    """

    tensor: str
    begin: int
    end: int
    returns: bool = True


@dataclass(frozen=True)
class GraphPlan:
    """Where spans go.

    Attributes:
        kernels: how many there are.
        levels: of each span, in the order in which they were found.
    """

    kernels: int
    levels: Mapping[GraphSpan, GraphLevel]

    @property
    def moved(self) -> tuple[GraphSpan, ...]:
        """Spans that leave the device."""
        return tuple(span for span, level in self.levels.items() if level is not GraphLevel.DEVICE)

    @property
    def moves(self) -> int:
        """How many times a tensor goes out or in."""
        return sum(1 + span.returns for span in self.moved)

    @property
    def slots(self) -> int:
        """Between how many pairs of neighbouring kernels something moves."""
        out = {span.begin for span in self.moved}
        back = {(span.end - 1) % self.kernels for span in self.moved if span.returns}
        return len(out | back)

    @property
    def links(self) -> int:
        """How many links the original's graph of actors has: one a kernel, two a slot."""
        return self.kernels + _LINKS_OF_SLOT * self.slots

    def tensors_in(self, level: GraphLevel) -> frozenset[str]:
        """Return the tensors that have a span in a level."""
        return frozenset(span.tensor for span, found in self.levels.items() if found is level)


def plan_graph(
    kernels: Sequence[Sequence[str]],
    tensors: Mapping[str, GraphTensor],
    device_bytes: int,
    host_bytes: int,
) -> GraphPlan:
    """Plan as the third generation does: over device, host and disk.

    Args:
        kernels: the tensors that each touches, in the order of execution.
        tensors: all of them, by name.
        device_bytes: what the plan may use of the device.
        host_bytes: and of host memory; the disk is taken to be large enough.

    Raises:
        CapacityError: one kernel touches more than the device has.
        ConfigError: a kernel touches what is not among the tensors.
    """
    used = _used_bytes(kernels, tensors, device_bytes)
    levels = [_Level(used, device_bytes), _Level([0] * len(kernels), host_bytes)]
    spans = _spans(kernels, tensors)
    found: dict[GraphSpan, GraphLevel] = {}
    for span in spans:
        forced = tensors[span.tensor].forced
        if forced is not None:
            is_held = forced is GraphLevel.HOST and levels[1].holds(span, tensors[span.tensor].nbytes)
            found[span] = GraphLevel.HOST if is_held else GraphLevel.DISK
    for span in sorted(spans, key=lambda each: (each.end - each.begin - 1) * tensors[each.tensor].nbytes):
        if span not in found:
            nbytes = tensors[span.tensor].nbytes
            held = (place for place, level in enumerate(levels) if level.holds(span, nbytes))
            found[span] = GraphLevel(next(held, GraphLevel.DISK.value))
    return GraphPlan(len(kernels), {span: found[span] for span in spans})


def plan_graph_one_level(
    kernels: Sequence[Sequence[str]],
    tensors: Mapping[str, GraphTensor],
    device_bytes: int,
    manual: Set[str] = frozenset(),
) -> GraphPlan:
    """Plan as the second generation does: what does not stay leaves to one level.

    Nothing leaves if the device holds all weights beside the most that lives of everything else, and nobody
    asked for more.

    Args:
        kernels: as of `plan_graph`.
        tensors: as of `plan_graph`.
        device_bytes: what the plan may use.
        manual: tensors of which all spans leave.

    Raises:
        CapacityError, ConfigError: as of `plan_graph`.
    """
    used = _used_bytes(kernels, tensors, device_bytes)
    spans = _spans(kernels, tensors)
    if not manual and _peak_bytes(kernels, tensors) <= device_bytes:
        return GraphPlan(len(kernels), dict.fromkeys(spans, GraphLevel.DEVICE))
    level = _Level(used, device_bytes)
    found = {span: GraphLevel.HOST for span in spans if span.tensor in manual}
    for span in sorted(spans, key=lambda each: (each.end - each.begin - 1) * tensors[each.tensor].nbytes):
        if span not in found:
            is_held = level.holds(span, tensors[span.tensor].nbytes)
            found[span] = GraphLevel.DEVICE if is_held else GraphLevel.HOST
    return GraphPlan(len(kernels), {span: found[span] for span in spans})


class _Level:
    """What one level holds while each kernel runs."""

    def __init__(self, used_bytes: list[int], capacity_bytes: int) -> None:
        self._used_bytes = used_bytes
        self._capacity_bytes = capacity_bytes

    def holds(self, span: GraphSpan, nbytes: int) -> bool:
        """Take a span in, if there is room at every kernel strictly inside; say whether there was."""
        inside = [kernel % len(self._used_bytes) for kernel in range(span.begin + 1, span.end)]
        if any(self._used_bytes[kernel] + nbytes > self._capacity_bytes for kernel in inside):
            return False
        for kernel in inside:
            self._used_bytes[kernel] += nbytes
        return True


def _used_bytes(
    kernels: Sequence[Sequence[str]], tensors: Mapping[str, GraphTensor], device_bytes: int
) -> list[int]:
    """Return what each kernel touches."""
    for number, kernel in enumerate(kernels):
        for name in kernel:
            if name not in tensors:
                raise ConfigError(f"kernel {number} touches {quoted(name)}, which is not among the tensors")
    used = [sum(tensors[name].nbytes for name in dict.fromkeys(kernel)) for kernel in kernels]
    if used and max(used) > device_bytes:
        largest = used.index(max(used))
        raise CapacityError(
            f"kernel {largest} touches {used[largest]} bytes at once; the device has {device_bytes}. "
            f"Give it {used[largest]} bytes at least."
        )
    return used


def _uses(kernels: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    uses: dict[str, list[int]] = {}
    for number, kernel in enumerate(kernels):
        for name in dict.fromkeys(kernel):
            uses.setdefault(name, []).append(number)
    return uses


def _spans(kernels: Sequence[Sequence[str]], tensors: Mapping[str, GraphTensor]) -> list[GraphSpan]:
    spans: list[GraphSpan] = []
    for name, used in _uses(kernels).items():
        spans += [GraphSpan(name, begin, end) for begin, end in itertools.pairwise(used)]
        if tensors[name].persists:
            spans.append(GraphSpan(name, used[-1], used[0] + len(kernels)))
        elif tensors[name].is_output:
            spans.append(GraphSpan(name, used[-1], len(kernels), returns=False))
    return [span for span in spans if span.end - span.begin > 1]


def _peak_bytes(kernels: Sequence[Sequence[str]], tensors: Mapping[str, GraphTensor]) -> int:
    """Return the most that lives at once without a plan: all weights, and others from first to last use."""
    uses = _uses(kernels)
    weights = sum(tensor.nbytes for tensor in tensors.values() if tensor.persists)
    ends = {
        name: len(kernels) - 1 if tensors[name].is_output else used[-1]
        for name, used in uses.items()
        if not tensors[name].persists
    }
    lives = [
        sum(tensors[name].nbytes for name, end in ends.items() if uses[name][0] <= number <= end)
        for number in range(len(kernels))
    ]
    return weights + max(lives, default=0)
