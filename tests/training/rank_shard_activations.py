"""Activations of sharded models: swapped and recomputed beside the shards, each as without tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.sampling import tried
from tests.training.rank_shards import CASES, Case, Life, build, differences, new_model, offloaded
from tierstore.training.run_stats import RunStats
from tierstore.training.sharding.found import is_sharded

SECTIONS: Mapping[str, Mapping[str, object]] = {
    "swapped": {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [0, 2]}]}},
    "recomputed": {"recompute_config": {"recompute": True}},
    "both": {
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [0, 2, 3]}]},
        "recompute_config": {"recompute": [1]},
    },
}
OF_SHARDS: Mapping[str, Case] = {
    "resharded": Case(reshards=True),
    "not resharded": Case(reshards=False),
    "clipped and accumulated": CASES["clipped and accumulated"],
    "mixed precision": CASES["mixed precision"],
    "prefetched by FSDP": CASES["prefetched by FSDP"],
    "frozen": CASES["frozen"],
    "one group": CASES["one group"],
    "tensor parallel": Case(mesh="tensor parallel"),
}
TRIED = tried(OF_SHARDS, always=1, of=8)
_ROOM = {"max_device_memory": "6MB", "offload_cpu_size": "16MB"}
_ROWS = 512  # of which activations are worth moving


def shards_and_activations(rank: int, processes: int, folder: Path) -> object:
    """Every way with some cases: whether bits differ, and what of activations was moved, sharded and not."""
    found: dict[str, object] = {}
    for name in TRIED:
        case = replace(OF_SHARDS[name], tiers="three")
        expected = build(case, processes)
        _train(expected, case, rank)
        for what, sections in SECTIONS.items():
            life = build(case, processes)
            ours = _offloaded(life, case, rank, folder / f"{name}, {what}", sections)
            alone = new_model(case)
            alone.get_submodule("layers.0").requires_grad_(not case.frozen)
            theirs = _offloaded(
                Life(alone, torch.optim.Adam(alone.parameters())),
                case,
                rank,
                folder / f"{name}, {what}, alone",
                sections,
            )
            found[f"{name}, {what}"] = {
                "differs": differences(expected, life),
                "moved": _moved(ours),
                "moved alone": _moved(theirs),
            }
    return found


def _offloaded(life: Life, case: Case, rank: int, folder: Path, sections: Mapping[str, object]) -> RunStats:
    folder.mkdir(exist_ok=True)
    with offloaded(life, case, folder, config=_ROOM, sections=sections, layers="layers") as run:
        _train(life, case, rank)
        return run.stats()


def _train(life: Life, case: Case, rank: int) -> None:
    data_rank = rank // 2 if case.mesh == "tensor parallel" else rank
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + data_rank)
        for number in range(case.passes):
            if is_sharded(life.model):
                life.model.set_requires_gradient_sync(number == case.passes - 1)
            loss = life.model(torch.randn(_ROWS, 7, generator=generator)).float().square().mean()
            loss.backward()
            life.losses.append(float(loss.detach()))
        if case.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(life.model.parameters(), case.max_norm)
        life.optimizer.step()
        life.optimizer.zero_grad()


def _moved(stats: RunStats) -> Mapping[str, Any]:
    found = {}
    if stats.activations is not None:
        found = {"kept": stats.activations.kept, "kept bytes": stats.activations.kept_bytes}
    return found | {"recomputed": stats.recompute is not None}
