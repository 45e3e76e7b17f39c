"""A run whose state is several times what the process may have is left for real, in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.fault import limited_victim as victim
from tests.sampling import too_long_for_ci
from tierstore.training import offload


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(victim.WIDTH, victim.WIDTH, bias=False) for _ in range(victim.LAYERS)))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


class Left(NamedTuple):
    """What a child has left.

    Attributes:
        folder: where its files are.
        outcome: what it says itself.
    """

    folder: Path
    outcome: dict[str, Any]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """Let a child train, in a limit, and leave its run."""
    return left_by_child(tmp_path_factory.mktemp("limited"))


@pytest.fixture
def left_in_cgroup(tmp_path: Path) -> Iterator[Left]:
    """Let a child train in a cgroup of its own, whose limit is the kernel's to keep: it kills."""
    root = Path("/sys/fs/cgroup")
    cgroup = (root / "memory" if (root / "memory").is_dir() else root) / f"tierstore-test-{os.getpid()}"
    try:
        cgroup.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not any((cgroup / f"memory.{limit}").exists() for limit in ("max", "limit_in_bytes")):
            pytest.skip("cgroups do not limit memory here")
        yield left_by_child(tmp_path, str(cgroup))
    finally:
        cgroup.rmdir()


def left_by_child(folder: Path, *cgroup: str) -> Left:
    model, _ = build()
    save_file(model.state_dict(), folder / "weights.safetensors")
    child = subprocess.run(
        [sys.executable, "-m", "tests.fault.limited_victim", str(folder), *cgroup],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        timeout=100,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return Left(folder, json.loads((folder / "outcome.json").read_text()))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    return [victim._step(model, optimizer) for _ in range(count)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute as the child does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@too_long_for_ci
def test_restoring_that_finds_no_memory_leaves_the_run_as_it_was(left: Left) -> None:
    plain, plain_optimizer = build()
    assert left.outcome["steps"] == steps(plain, plain_optimizer, 2)
    assert "MemoryError" in left.outcome["failed"]
    assert [left.outcome["after"]] == steps(plain, plain_optimizer, 1)
    model, optimizer = build()
    with offload(model, optimizer, {"memory_offload": "OFF"}) as run:
        run.load(left.folder / "saved")
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        for entry, value in plain_optimizer.state[other].items():
            assert torch.equal(optimizer.state[mine][entry], value)


def test_by_default_it_is_released_and_goes_on_elsewhere_bit_for_bit(left: Left) -> None:
    check_that_it_was_released(left, "RLIMIT_DATA leaves")


def test_what_would_outgrow_its_cgroup_is_released_and_the_kernel_kills_nobody(left_in_cgroup: Left) -> None:
    check_that_it_was_released(left_in_cgroup, "the limit of the cgroup")


def check_that_it_was_released(left: Left, reason: str) -> None:
    (said,) = [each for each in left.outcome["said"] if "released" in each]
    assert reason in said
    assert "as run.checkpoint() number 1 left them" in left.outcome["placeholder"]
    plain, plain_optimizer = build()
    steps(plain, plain_optimizer, 2)
    model, optimizer = build()
    config = {"device": "cpu", "offload_path": str(left.folder / "files"), "durable": True}
    sizes = {"offload_cpu_size": "64MB", "offload_disk_size": "512MB"}
    with offload(model, optimizer, {**config, **sizes}):
        assert steps(model, optimizer, 1) == steps(plain, plain_optimizer, 1)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
