"""Parameters that are parts of one memory, before a run or by what happens in it, in the run and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.twins import (
    WIDTH,
    Optimizer,
    Trial,
    assert_equal_lists,
    assert_equal_models,
    config_of,
    every_layout,
    with_device,
)
from tierstore.training import offload


def _weight(model: nn.Sequential, layer: int = 0) -> nn.Parameter:
    return model.get_parameter(f"{layer}.weight")


def _build() -> tuple[nn.Module, Sequence[Optimizer]]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    return model, [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]


def _log_all(trial: Trial) -> None:
    for parameter in trial.model.parameters():
        trial.log(torch.tensor([*parameter.shape, *parameter.stride()]))
        trial.log(parameter)
    trial.log_gradients()


def _numbers(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32) / count


def _vector(model: nn.Sequential) -> Tensor:
    flat = _numbers(sum(p.numel() for p in model.parameters()))
    nn.utils.vector_to_parameters(flat, model.parameters())
    return flat


def _vector_twice(model: nn.Sequential) -> Tensor:
    _vector(model)
    model(torch.ones(1, WIDTH))
    return _vector(model)


def _parts_with_gaps(model: nn.Sequential) -> Tensor:
    flat = torch.zeros(2 * WIDTH * WIDTH + 2 * WIDTH)
    flat[3 : 3 + WIDTH * WIDTH] = _numbers(WIDTH * WIDTH)
    _weight(model, 0).data = flat[3 : 3 + WIDTH * WIDTH].view(WIDTH, WIDTH)
    _weight(model, 4).data = flat[-WIDTH * WIDTH :].view(WIDTH, WIDTH)
    return flat


def _overlapping_parts(model: nn.Sequential) -> Tensor:
    """Two of one bundle overlap, two of different bundles do, and one lies beside them all."""
    flat = _numbers(5 * WIDTH * WIDTH)
    square = WIDTH * WIDTH
    _weight(model, 0).data = flat[:square].view(WIDTH, WIDTH)
    model.get_parameter("0.bias").data = flat[5 : 5 + WIDTH]
    _weight(model, 2).data = flat[square : 2 * square].view(WIDTH, WIDTH)
    _weight(model, 3).data = flat[square + 7 : 2 * square + 7].view(WIDTH, WIDTH)
    _weight(model, 5).data = flat[-square:].view(WIDTH, WIDTH)
    return flat


def _transposed_parts(model: nn.Sequential) -> Tensor:
    flat = _numbers(3 * WIDTH * WIDTH)
    for layer in range(3):
        _weight(model, layer).data = flat[layer::3].view(WIDTH, WIDTH).t()
    return flat


def _parts_end_to_end_transposed(model: nn.Sequential) -> Tensor:
    flat = _numbers(3 * WIDTH * WIDTH)
    for layer, part in enumerate(flat.chunk(3)):
        _weight(model, layer).data = part.view(WIDTH, WIDTH).t()
    return flat


def _one_part_let_go(model: nn.Sequential) -> Tensor:
    flat = _vector(model)
    torch.manual_seed(2)
    model[1] = nn.Linear(WIDTH, WIDTH)
    _weight(model, 2).data = torch.ones(WIDTH, WIDTH)
    return flat


def _parts_of_a_part(model: nn.Sequential) -> Tensor:
    flat = _numbers(3 * WIDTH * WIDTH)
    _weight(model, 0).data = flat[: WIDTH * WIDTH].view(WIDTH, WIDTH)
    model.get_parameter("0.bias").data = _weight(model, 0).data[3]
    model.get_parameter("1.bias").data = flat[-WIDTH:]
    return flat


def _nothing(_: nn.Sequential) -> Tensor:
    return torch.empty(0)


PARTS: dict[str, Callable[[nn.Sequential], Tensor]] = {
    act.__name__.strip("_").replace("_", " "): act
    for act in (
        _vector,
        _vector_twice,
        _parts_with_gaps,
        _overlapping_parts,
        _transposed_parts,
        _parts_end_to_end_transposed,
        _one_part_let_go,
        _parts_of_a_part,
    )
}


def _sharing(model: nn.Module) -> list[tuple[int, int]]:
    """Return for each parameter the first one that has its storage, and where it lies if several have it."""
    parameters = list(model.parameters())
    storages = [p.untyped_storage().data_ptr() for p in parameters]
    return [
        (storages.index(storage), int(p.storage_offset()) if storages.count(storage) > 1 else 0)
        for p, storage in zip(parameters, storages, strict=True)
    ]


def _write_around(trial: Trial, flat: Tensor | None) -> None:
    """Write through everything in turn, and look at the memory after each and at everything in the end."""
    with torch.no_grad():
        for number, parameter in enumerate(trial.model.parameters()):
            parameter.view(-1).add_(number / 8) if parameter.is_contiguous() else parameter.mul_(0.5)
            trial.log(flat)
        _log_all(trial)
        if flat is not None:
            flat[5:77].mul_(0.5)
            flat.data[-3:] = 7
        _log_all(trial)


def _loop_with_parts(trial: Trial, act: Callable[[nn.Sequential], Tensor], keep: bool) -> Tensor | None:
    assert isinstance(trial.model, nn.Sequential)
    flat: Tensor | None = None
    for turn in range(3):
        loss = trial.model(torch.randn(3, WIDTH)).square().mean()
        loss.backward()
        trial.log(loss)
        del loss
        if turn == 0:
            made = act(trial.model)
            flat = made if keep else None
            del made
        _write_around(trial, flat)
        trial.optimizer.step()
        trial.optimizer.zero_grad()
        trial.log(flat)
    return flat


@every_layout
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("keeps", ["all the time", "in the run", "not at all"])
def test_parts_of_one_memory_are_that_in_the_run_and_after_it(
    layout: str, name: str, keeps: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain, ours = Trial(*_build()), Trial(*_build())
    ours.model.load_state_dict(plain.model.state_dict())
    torch.manual_seed(1)
    expected = _loop_with_parts(plain, PARTS[name], keep=keeps != "not at all")
    torch.manual_seed(1)
    with offload(
        ours.model, ours.optimizer, config_of(layout, tmp_path, with_device(layout, "640KB"))
    ) as run:
        found = _loop_with_parts(ours, PARTS[name], keep=keeps != "not at all")
        if keeps == "in the run":
            expected = found = None
            ours.model(torch.ones(2, WIDTH))
        run.store.check()
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)
    assert _sharing(ours.model) == _sharing(plain.model)
    _write_around(plain, expected)
    _write_around(ours, found)
    assert_equal_lists(plain.logged, ours.logged)


def test_a_part_that_is_left_alone_gets_memory_of_its_own_size(tmp_path: Path) -> None:
    model, _ = _build()
    assert isinstance(model, nn.Sequential)
    _weight(model, 1).data = torch.ones(100, WIDTH, WIDTH)[3]
    with offload(model, None, config_of("disk", tmp_path)):
        _parts_with_gaps(model)
        model(torch.ones(2, WIDTH))
        _weight(model).data = torch.zeros(WIDTH, WIDTH)
        model(torch.ones(2, WIDTH))
    assert _weight(model, 1).untyped_storage().nbytes() < 2 * WIDTH * WIDTH * 4
    assert _weight(model, 4).untyped_storage().nbytes() < 2 * WIDTH * WIDTH * 4


def test_parts_go_back_to_memory_that_something_else_has_kept(tmp_path: Path) -> None:
    """An ignored parameter lies beside two that are offloaded, and so does what no parameter is."""
    model, _ = _build()
    assert isinstance(model, nn.Sequential)
    flat = _parts_with_gaps(model)
    model.get_parameter("5.bias").data = flat[WIDTH * WIDTH + 3 :][:WIDTH]
    rest = flat[:3].detach()
    flat[:] = 2
    begin_bytes = flat.data_ptr()
    del flat
    with offload(model, None, config_of("disk", tmp_path), ignored=["5"]), torch.no_grad():
        _weight(model, 4).zero_()
        model.get_parameter("5.bias").fill_(3)
    assert _weight(model, 0).data_ptr() == begin_bytes + 12
    assert _weight(model, 0).eq(2).all()
    whole = torch.empty(0).set_(rest.untyped_storage())
    expected = torch.full((2 * WIDTH * WIDTH + 2 * WIDTH,), 2.0)
    expected[WIDTH * WIDTH + 3 :][:WIDTH] = 3
    expected[-WIDTH * WIDTH :] = 0
    assert torch.equal(whole, expected)


@every_layout
@pytest.mark.parametrize("name", PARTS)
def test_what_was_parts_of_one_memory_before_the_run_is_that_after_it(
    layout: str, name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain, ours = Trial(*_build()), Trial(*_build())
    ours.model.load_state_dict(plain.model.state_dict())
    for trial in (plain, ours):
        assert isinstance(trial.model, nn.Sequential)
        PARTS[name](trial.model)
        trial.optimizers = [torch.optim.SGD(trial.model.parameters(), lr=0.05)]
    torch.manual_seed(1)
    _loop_with_parts(plain, _nothing, keep=False)
    torch.manual_seed(1)
    with offload(ours.model, ours.optimizer, config_of(layout, tmp_path, with_device(layout, "640KB"))):
        _loop_with_parts(ours, _nothing, keep=False)
    assert_equal_lists(plain.logged, ours.logged)
    assert _sharing(ours.model) == _sharing(plain.model)
    _write_around(plain, None)
    _write_around(ours, None)
    assert_equal_lists(plain.logged, ours.logged)


@every_layout
def test_parts_that_go_to_another_device_in_the_end_share_memory_there(layout: str, tmp_path: Path) -> None:
    """A model that was in host memory is computed with elsewhere, if there is an accelerator."""
    with torch.device("cpu"):
        model, _ = _build()
        assert isinstance(model, nn.Sequential)
    with offload(model, None, config_of(layout, tmp_path, with_device(layout, "640KB"))):
        flat = _overlapping_parts(model)
        model.get_parameter("1.bias").data = flat
        model.get_parameter("2.bias").data = torch.ones(WIDTH)
    begin_bytes = model.get_parameter("1.bias").data_ptr()
    assert [p.device.type for p in model.parameters()] == ["cpu"] * len(list(model.parameters()))
    for name, offset in {"0.weight": 0, "0.bias": 5, "2.weight": WIDTH * WIDTH}.items():
        parameter = model.get_parameter(name)
        assert parameter.data_ptr() == begin_bytes + 4 * offset
        assert torch.equal(parameter.view(-1), flat.cpu()[offset:][: parameter.numel()])


@every_layout
@pytest.mark.parametrize("elements", [0, 1, 3, 8])
def test_what_comes_home_keeps_the_remainder_of_its_address(
    elements: int, layout: str, tmp_path: Path
) -> None:
    """Kernels look at it: with another one the last bits of what they compute may be others."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    with offload(model, None, config_of(layout, tmp_path)):
        _weight(model).data = _numbers(WIDTH * WIDTH + elements)[elements:].view(WIDTH, WIDTH)
        model(torch.ones(1, WIDTH))
        model(torch.ones(1, WIDTH))
        assert _weight(model).data_ptr() % 64 == elements * 4


@every_layout
@pytest.mark.parametrize("when", ["before", "in the run"])
def test_whoever_began_within_a_larger_memory_is_named_once(
    when: str, layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizers = _build()
    assert isinstance(model, nn.Sequential)
    if when == "before":
        _vector(model)

    def told() -> list[str]:
        return [record.message for record in caplog.records if "storage_offset()" in record.message]

    with offload(model, list(optimizers), config_of(layout, tmp_path)):
        assert len(told()) == (when == "before")
        for _ in range(3):
            _vector(model)
            model(torch.ones(1, WIDTH))
    count = len(list(model.parameters()))
    assert sum(int(text.split()[0]) for text in told()) == count - 1  # the first begins where its memory does
    assert "0.weight" not in " ".join(told())
