"""What sharded runs have of a machine: two jobs beside each other, and what programs say of their bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from torch import distributed
from torch.distributed.tensor import DTensor

from tests.training.rank_lives import begin_group
from tests.training.rank_shards import CASES, build, differences, offloaded, raw, train
from tierstore.errors import TierStoreError


def shards_of_two_jobs(rank: int, processes: int, folder: Path) -> object:
    """One job trains in a directory, another one is sent away from it, and trains in its own meanwhile."""
    distributed.destroy_process_group()
    job, own = divmod(rank, processes // 2)
    begin_group(own, processes // 2, folder / f"group-{job}")
    between = vars(distributed)["FileStore"](str(folder / "between"), processes)
    case = CASES["plain"]
    plain, life = build(case, processes // 2), build(case, processes // 2)
    found: dict[str, object] = {}
    if job == 1:
        between.wait(["open-0", "open-1"])
        before = [(id(each), DTensor) for each in life.model.parameters()]
        try:
            with offloaded(life, case, folder / "first"):
                found["said"] = "not refused"
        except TierStoreError as error:
            found["said"] = f"{type(error).__name__}: {error}"
        found["is left"] = before == [(id(each), type(each)) for each in life.model.parameters()]
    place = folder / ("first", "second")[job]
    with offloaded(life, case, place) as run:
        train(life, case, 2, own)
        # The other one is there until the next step, which needs both.
        found["directories"] = sorted(each.name for each in (place / "run").iterdir())
        between.set(f"{('open', 'beside')[job]}-{own}", "")
        between.wait(["beside-0", "beside-1"])
        train(life, case, 1, own, 2)
        tiers = run.store.stats().tiers
        found["quotas"] = {name: each.capacity_bytes for name, each in tiers.items()}
    train(plain, case, 3, own)
    return {**found, "differs": differences(plain, life)}


def shards_programmed(rank: int, processes: int, folder: Path) -> object:
    """What ``run.program()`` says of the bytes of each kind, and what of parameters this process has."""
    found: dict[str, object] = {}
    for tiers in ("host", "disk"):  # gradients stay with the program, or go to the store
        case = replace(CASES["plain"], tiers=tiers)
        life = build(case, processes)
        with offloaded(life, case, folder / tiers) as run:
            train(life, case, 4, rank)
            program = run.program()
        said: Counter[str] = Counter()
        for datum in program.data.values():
            said[datum.kind.value] += datum.nbytes
        found[tiers] = said
        found["parameters"] = sum(len(raw(each)) for each in life.model.parameters())
    return found
