"""What each process says of itself at start, and what is wrong with all of that together.

Every process judges the same list, so all of them raise the same error or none does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.training.ranks.where import RankPlace
from tierstore.units import format_bytes

_SHOWN = 8  # ranks that a message names


@dataclass(frozen=True, slots=True)
class Introduction:
    """What one process says of itself.

    Attributes:
        where: which one it is.
        given: what `offload` was given that has to be the same everywhere, as text, by its name.
        quotas: those that its machine's processes share, by their keys, but for those that are left open.
        machine_bytes: of host memory that its machine has.
        fault: what is wrong with it alone; "": nothing.
    """

    where: RankPlace
    given: Mapping[str, str]
    quotas: Mapping[str, int]
    machine_bytes: int
    fault: str = ""


def locals_of(all_of_them: Sequence[Introduction]) -> list[int]:
    """Return for each process how many share its machine's quotas: as torchrun says, or by counting."""
    counted = Counter(each.where.machine for each in all_of_them)
    return [each.where.told_local or counted[each.where.machine] for each in all_of_them]


def judge(all_of_them: Sequence[Introduction]) -> None:
    """Raise if the processes cannot train together.

    Raises:
        ConfigError: it lists all that is wrong, with the ranks and their numbers.
    """
    faults = [
        *(f"rank {each.where.rank}: {each.fault}" for each in all_of_them if each.fault),
        *_differences(all_of_them),
        *_shares_of_nothing(all_of_them),
        *_machines_that_are_too_small(all_of_them),
    ]
    if faults:
        raise ConfigError(
            f"the {len(all_of_them)} processes cannot train together:\n  " + "\n  ".join(faults)
        )


def _differences(all_of_them: Sequence[Introduction]) -> Iterator[str]:
    names = dict.fromkeys(name for each in all_of_them for name in each.given)
    for name in names:
        ranks: defaultdict[str, list[int]] = defaultdict(list)
        for each in all_of_them:
            ranks[each.given.get(name, "nothing")].append(each.where.rank)
        if len(ranks) > 1:
            said = "; ".join(f"{value} on {ranks_in_words(which)}" for value, which in ranks.items())
            yield f"{name} is {said}; accepted: the same on all of them"


def _shares_of_nothing(all_of_them: Sequence[Introduction]) -> Iterator[str]:
    for each, local in zip(all_of_them, locals_of(all_of_them), strict=True):
        for key, total_bytes in each.quotas.items():
            if 0 < total_bytes < local:
                yield (
                    f"{key}={total_bytes}: shared by the {local} processes of its machine it leaves nothing "
                    f"for rank {each.where.rank}; accepted: at least {local}"
                )


def _machines_that_are_too_small(all_of_them: Sequence[Introduction]) -> Iterator[str]:
    shares: defaultdict[str, list[tuple[Introduction, int]]] = defaultdict(list)
    for each, local in zip(all_of_them, locals_of(all_of_them), strict=True):
        host_bytes = each.quotas.get("offload_cpu_size")
        if host_bytes is not None:
            shares[each.where.machine].append((each, host_bytes // local))
    for there in shares.values():
        total_bytes = sum(share for _, share in there)
        machine_bytes = min(each.machine_bytes for each, _ in there)
        if total_bytes > machine_bytes:
            ranks = ranks_in_words([each.where.rank for each, _ in there])
            yield (
                f"offload_cpu_size: {ranks} are on one machine and may have {format_bytes(total_bytes)} of "
                f"host memory together, and the machine has {format_bytes(machine_bytes)}; accepted: at most "
                "that, for all processes of the machine"
            )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks as messages name them."""
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', ...' if len(ranks) > _SHOWN else ''}"
