"""Offloaded models in ``DistributedDataParallel``: the same bits in every process, however it is wrapped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.forked_programs import run_program
from tests.sampling import IS_CI
from tests.training.twins import config_of
from tierstore.errors import CapacityError, UsageError
from tierstore.training import offload

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")

PROCESSES = 2


def _led(folder: Path, *layouts: str) -> dict[str, list[object]]:
    """Let replicas train in layouts; return what each process found, or how it failed."""
    words = (str(PROCESSES), str(folder), *layouts)
    done = run_program("tests.training.replica_worker", *words, timeout_s=300)
    assert done.returncode == 0, done.stderr
    return {layout: json.loads((folder / f"{layout}.json").read_text()) for layout in layouts}


@pytest.fixture(scope="module", name="led")
def _led_in_ci(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    return _led(tmp_path_factory.mktemp("replicas"), "disk", "three")


def _check(found: list[object], cases: Sequence[int]) -> None:
    assert len(found) == PROCESSES
    for each in found:
        assert isinstance(each, dict), each
        assert len(each) in cases
        assert not {kind: differences for kind, differences in each.items() if differences}


@pytest.mark.parametrize("layout", ["disk", "three"])
def test_replicas_train_as_without_offloading(layout: str, led: dict[str, list[object]]) -> None:
    """Each of 7 kinds is wrapped at each of 3 times, in one of the two: all pairs with a layout come.

    CI tries half of them.
    """
    _check(led[layout], (5, 6) if IS_CI else (10, 11))


@pytest.mark.long
@pytest.mark.parametrize("layout", ["host", "device"])
def test_replicas_train_as_without_offloading_where_there_is_no_disk(layout: str, tmp_path: Path) -> None:
    _check(_led(tmp_path, layout)[layout], (7 * 3,))


@pytest.fixture
def _group() -> Iterator[None]:
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))


@pytest.mark.usefixtures("_group")
def test_all_parameters_at_once_are_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    model = _model()
    with offload(model, None, config_of("disk", tmp_path)):
        with pytest.raises(CapacityError, match="init_sync=False"):
            DistributedDataParallel(model)
        DistributedDataParallel(model, init_sync=False)(torch.ones(2, 64)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("is_before", [False, True])
def test_gradients_that_do_not_fit_are_refused_before_the_first_step(tmp_path: Path, is_before: bool) -> None:
    model = _model()
    config = config_of("device", tmp_path, {"max_device_memory": "400KB"})
    if is_before:
        model = DistributedDataParallel(model)
        with pytest.raises(CapacityError, match="gradient_as_bucket_view"):
            offload(model, None, config)
    else:
        with offload(model, None, config):
            with pytest.raises(CapacityError, match="gradient_as_bucket_view"):
                DistributedDataParallel(model, init_sync=False)
            DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True)


@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_wrappers_that_move_parameters_themselves_are_refused_by_name(tmp_path: Path) -> None:
    sharded = pytest.importorskip("torch.distributed.fsdp").FullyShardedDataParallel
    model = _model()
    with offload(model, None, config_of("host", tmp_path)), pytest.raises(UsageError, match="FullySharded"):
        sharded(model, device_id=torch.device("cpu"))
    for model in (sharded(_model(), device_id=torch.device("cpu")), nn.Sequential(nn.Linear(2, 2))):
        if type(model) is nn.Sequential:
            model.append(sharded(_model(), device_id=torch.device("cpu"), use_orig_params=True))
        with pytest.raises(UsageError, match=r"the mod.* is a FullyShardedDataParallel, which moves param"):
            offload(model, None, config_of("host", tmp_path))
    precision = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16)
    model = _model()
    with offload(model, None, config_of("host", tmp_path)), pytest.raises(UsageError, match="mixed_prec"):
        DistributedDataParallel(model, mixed_precision=precision)


@pytest.mark.usefixtures("_group")
def test_optimizers_in_parts_are_refused_by_name(tmp_path: Path) -> None:
    model = _model()
    kinds = pytest.importorskip("torch.distributed.optim")
    redundant = kinds.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    with pytest.raises(UsageError, match="ZeroRedundancyOptimizer steps or averages parameters of several"):
        offload(model, redundant, config_of("host", tmp_path))
    adam = torch.optim.Adam(model.parameters())
    local = kinds.PostLocalSGDOptimizer(optim=adam, averager=None)
    with pytest.raises(UsageError, match="PostLocalSGDOptimizer steps or averages parameters of several"):
        offload(model, local, config_of("host", tmp_path))


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("is_before", [False, True])
def test_steps_in_backward_are_refused_as_they_come_before_the_average(
    tmp_path: Path, is_before: bool
) -> None:
    model = _model()
    wrapped = DistributedDataParallel(model) if is_before else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = config_of("host", tmp_path, {"optimizer_in_backward": True})
    with (
        pytest.raises(UsageError, match="optimizer_in_backward steps each parameter with the gradient of"),
        offload(wrapped, optimizer, config),
    ):
        DistributedDataParallel(model)


@pytest.mark.usefixtures("_group")
def test_gradients_that_wait_are_there_when_a_wrapper_is_made(tmp_path: Path) -> None:
    model = _model()
    with offload(model, None, config_of("disk", tmp_path, {"offload_grad": "cpu"})) as run:
        model(torch.ones(2, 64)).sum().backward()
        expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        assert [key for key in run.store if key.startswith("grad/")]
        kept = model[0].weight.grad  # type: ignore[index]
        wrapper = DistributedDataParallel(model, init_sync=False)
        assert not [key for key in run.store if key.startswith("grad/")]
        assert model[0].weight.grad is kept  # type: ignore[index]
        wrapper(torch.ones(2, 64)).sum().backward()
        for parameter, value in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, value * 2)
