"""Where the values of sharded parameters come from that are on the meta device before a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed
from torch.distributed.tensor import DTensor

from tests.sampling import tried
from tests.training.rank_shards import (
    CASES,
    Case,
    Life,
    as_sharded,
    build,
    differences,
    give_values,
    local_bytes,
    new_model,
    offloaded,
    said_by,
    train,
)
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload

VALUED: Mapping[str, Case] = {
    "files": CASES["clipped"],
    "one file": replace(CASES["frozen"], tiers="host"),
    "three tiers": CASES["three tiers"],
    "columns": replace(CASES["clipped"], mesh="columns"),
    "replicas": replace(CASES["clipped"], mesh="replicas"),
    "tensor parallel": replace(CASES["clipped"], mesh="tensor parallel"),
}
TRIED = tried(VALUED, always=1, of=8)


def on_meta(case: Case, processes: int) -> Life:
    """Return a sharded model without values."""
    with torch.device("meta"):
        model = new_model(case)
    return as_sharded(model, case, processes)


def written(folder: Path, case: Case, *, files: int, but: str = "") -> Path:
    """Write the values that `build` gives a model; return what ``weights`` is to be.

    Args:
        folder: where to.
        case: that is built.
        files: how many; of several, an index says what is where.
        but: a tensor that is left out.
    """
    torch.manual_seed(0)
    state = {name: each for name, each in new_model(case).state_dict().items() if name != but}
    folder.mkdir(exist_ok=True)
    if files == 1:
        save_file(state, folder / "one.safetensors")
        return folder / "one.safetensors"
    names = list(state)
    places = {name: f"part-{number % files}.safetensors" for number, name in enumerate(names)}
    for file in sorted(set(places.values())):
        save_file({name: state[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def shards_valued(rank: int, processes: int, folder: Path) -> object:
    """Models without values read theirs from files, each process its part, and train."""
    found: dict[str, object] = {}
    if rank == 0:
        written(folder / "weights", CASES["plain"], files=3)
        written(folder / "weights", CASES["plain"], files=1)
        written(folder / "tensor parallel weights", VALUED["tensor parallel"], files=2)
        written(folder / "torn", CASES["plain"], files=2, but="layers.2.back.weight")
    distributed.barrier()
    for name in TRIED:
        case = VALUED[name]
        plain, life = build(case, processes), on_meta(case, processes)
        weights = folder / ("tensor parallel weights" if case.mesh == "tensor parallel" else "weights")
        weights /= "one.safetensors" if name == "one file" else ""
        (place := folder / name).mkdir(exist_ok=True)
        with DeviceBudget("64MB") as meter, offloaded(life, case, place, weights=weights):
            peak_bytes = meter.peak_bytes
            here = [each for each in life.model.parameters() if type(each) is DTensor]
            for each in (plain, life):
                train(each, case, 2, rank)
        found[name] = {
            "differs": differences(plain, life),
            "here": len(here),
            "peak": peak_bytes,
            "whole": sum(len(each) for _, each in local_bytes(build(case, processes))),
        }
        for each in (plain, life):
            train(each, case, 1, rank, 2)  # ordinary again
        found[f"{name} afterwards"] = {"differs": differences(plain, life)}
    case = CASES["plain"]
    torn = on_meta(case, processes)
    found["torn"] = said_by(lambda: _begin(torn, folder, weights=folder / "torn"))
    found["anew"] = said_by(lambda: _begin(torn, folder, config={"durable": True}))
    found["still on meta"] = all(each.is_meta for each in torn.model.parameters())
    found |= {name: {"differs": each} for name, each in _others(rank, processes, folder).items()}
    return found


def _begin(life: Life, folder: Path, **more: object) -> None:
    with offloaded(life, CASES["plain"], folder / "torn", **more):
        pass


def _others(rank: int, processes: int, folder: Path) -> Mapping[str, list[str]]:
    """Other ways to values: memory of its own, no tiers, and a checkpoint."""
    case = CASES["plain"]
    plain = build(case, processes)
    lives = {name: on_meta(case, processes) for name in ("to_empty", "off", "begun", "resumed")}
    give_values(lives["to_empty"].model)
    values = build(replace(case, is_meta=True), processes)
    with offloaded(lives["to_empty"], case, folder / "to_empty"):
        for each in (values, lives["to_empty"]):
            train(each, case, 2, rank)
    weights = folder / "weights"
    with offload(lives["off"].model, lives["off"].optimizer, {"memory_offload": "OFF"}, weights=weights):
        train(lives["off"], case, 2, rank)
    with offloaded(
        lives["begun"], case, folder / "durable", config={"durable": True}, weights=weights
    ) as run:
        train(lives["begun"], case, 1, rank)
        run.checkpoint()
    with offloaded(lives["resumed"], case, folder / "durable", config={"durable": True}):
        lives["resumed"].losses = list(lives["begun"].losses)
        train(lives["resumed"], case, 1, rank, 1)
    train(plain, case, 2, rank)
    return {
        "to_empty": differences(values, lives["to_empty"]),
        "off": differences(plain, lives["off"]),
        "resumed": differences(plain, lives["resumed"]),
    }
