"""How many bytes a step writes, against what any order of it would have to write."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import tierstore as ts
from tests.training.twins import Trial, assert_equal_lists, assert_equal_models
from tierstore.training import offload
from tierstore.units import MIB

DIM = 512
SETTLING_STEPS, STEPS = 5, 4


def trial(count: int) -> Trial:
    torch.manual_seed(0)
    layers = [nn.Linear(DIM, DIM, bias=False) for _ in range(count)]
    model = nn.Sequential(*itertools.chain.from_iterable((layer, nn.Tanh()) for layer in layers))
    return Trial(model, [torch.optim.Adam(model.parameters(), 1e-3)])


def train(one: Trial, steps: int) -> None:
    for _ in range(steps):
        loss = one.model(torch.ones(2, DIM)).square().mean()
        loss.backward()
        one.optimizer.step()
        one.optimizer.zero_grad()
        one.log(loss)


def written_bytes(store: ts.Store) -> int:
    return store.stats().traffic["host", "disk"].nbytes


@pytest.mark.parametrize(
    ("count", "quota_bytes", "most"),
    [
        (12, 19 * MIB, 1.25),  # layers are large beside the quota here: a piece more or less is a thirtieth
        (24, 60 * MIB, 1.08),  # 1.14 if what was stepped in place stayed where it was
    ],
)
def test_a_step_writes_little_more_than_it_has_to(
    tmp_path: Path, count: int, quota_bytes: int, most: float
) -> None:
    least_bytes = 4 * count * 4 * DIM * DIM - quota_bytes  # with gradients and both moments
    plain, ours = trial(count), trial(count)
    config = {"device": "cpu", "offload_cpu_size": quota_bytes, "offload_disk_size": "1GB"}
    with offload(ours.model, ours.optimizer, {**config, "offload_path": str(tmp_path)}) as run:
        train(ours, SETTLING_STEPS)
        before_bytes = written_bytes(run.store)
        train(ours, STEPS)
        assert (written_bytes(run.store) - before_bytes) / STEPS <= most * least_bytes
        run.store.check()
    train(plain, SETTLING_STEPS + STEPS)
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)


@pytest.mark.parametrize("share", [0.6, 0.7, 0.8])
def test_a_step_through_a_device_of_most_of_the_need_brings_parameters_and_state_once(share: float) -> None:
    """A step beside the old values needs those in host memory, too: else they are brought once more."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(DIM // 4, DIM // 4) for _ in range(16)))
    optimizer = torch.optim.Adam(model.parameters())
    parameter_bytes = sum(each.nbytes for each in model.parameters())
    config = {
        "device": "emulated",
        "max_device_memory": int(share * 4 * parameter_bytes),
        "offload_cpu_size": 8 * parameter_bytes,
        "offload_disk_size": 0,
    }
    with offload(model, optimizer, config) as run:
        brought: list[int] = []
        for _ in range(SETTLING_STEPS + STEPS):
            model(torch.ones(2, DIM // 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            brought.append(run.store.stats().traffic["host", "device"].nbytes)
    assert (brought[-1] - brought[-1 - STEPS]) / STEPS <= 2.5 * parameter_bytes  # 2.9 to 3.4 without
