"""Parameters of every layout: what they hold, and how they lie in memory, is that of plain PyTorch."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.training.twins import (
    LAYOUTS,
    Optimizer,
    Trial,
    assert_equal_models,
    assert_same,
    config_of,
    every_layout,
)
from tierstore.training import offload
from tierstore.training.bundles.layout import lay_out, regions_of

CFLOAT = torch.complex64


def _memory(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


TRAINED: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: _memory(6, 8),
    "transposed": lambda: _memory(8, 6).t(),
    "permuted": lambda: _memory(4, 2, 3, 5).permute(2, 0, 3, 1),
    "channels_last": lambda: _memory(4, 3, 3, 2).to(memory_format=torch.channels_last),
    "with gaps": lambda: _memory(6, 20)[:, 3:11],
    "every other": lambda: _memory(40)[1::3],
    "transposed with gaps": lambda: _memory(20, 6)[3:11:2, :].t(),  # noqa: PLW0108 - anew each time
    "offset": lambda: _memory(50)[2:].view(6, 8),
    "a number": lambda: torch.tensor(2.5),
    "one with strides": lambda: torch.empty_strided((1, 4, 1), (77, 1, 33)).normal_(),
    "double": lambda: _memory(3, 5, dtype=torch.float64).t(),
    "complex": lambda: _memory(3, 5, dtype=CFLOAT).t(),
    "conjugate": lambda: _memory(3, 5, dtype=CFLOAT).conj(),
    "conjugate with gaps": lambda: _memory(3, 9, dtype=CFLOAT)[:, ::2].mH,
    "negative": lambda: _memory(3, 5, dtype=CFLOAT).conj().imag,
    "empty": lambda: _memory(0),
    "empty matrix": lambda: _memory(8, 0, 3),
    "empty with strides": lambda: _memory(4, 0, 2).permute(2, 0, 1),
}
FROZEN: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: _memory(1, 6).expand(8, 6),
    "expanded number": lambda: torch.tensor(1.5).expand(4, 3),
    "sliding": lambda: _memory(12).unfold(0, 4, 1),
    "integers": lambda: torch.arange(24).view(4, 6).t(),
    "empty integers": lambda: torch.arange(0),
    "booleans": lambda: (torch.arange(24) % 3 == 0)[::2],
}


class Odd(nn.Module):
    """A model of parameters of any kind, each used as it is."""

    def __init__(self, kinds: Sequence[Tensor], *, trained: bool) -> None:
        super().__init__()
        self.first = nn.Linear(48, 48)
        self.odd = nn.ParameterList(
            nn.Parameter(
                tensor, requires_grad=trained and tensor.dtype.is_floating_point | tensor.is_complex()
            )
            for tensor in kinds
        )
        self.last = nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, 48)``."""
        x = self.first(x).tanh()
        for weight in self.odd:
            values = weight if weight.dtype.is_floating_point or weight.is_complex() else weight.float()
            if values.dim() == 2 and not values.is_complex():
                values = values.T @ values  # its kernels depend on strides
            x = x + values.abs().sum().float()
        return self.last(x)  # type: ignore[no-any-return]


def _loop(trial: Trial) -> None:
    for _ in range(3):
        loss = trial.model(torch.randn(2, 48)).square().mean()
        loss.backward()
        trial.log(loss)
        for parameter in trial.model.parameters():
            remainder = parameter.detach().data_ptr() % 64  # which kernels run may depend on it
            trial.log(torch.tensor([*parameter.shape, *parameter.stride(), remainder]))
            trial.log(parameter.detach().resolve_conj().resolve_neg())
            trial.log(parameter.grad)
        for optimizer in trial.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _build(
    kinds: Sequence[Callable[[], Tensor]], *, trained: bool
) -> Callable[[], tuple[nn.Module, list[Optimizer]]]:
    def build() -> tuple[nn.Module, list[Optimizer]]:
        model = Odd([make() for make in kinds], trained=trained)
        return model, [torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)]

    return build


@every_layout
@pytest.mark.parametrize("kind", TRAINED)
def test_a_trained_parameter_of_any_layout(layout: str, kind: str, tmp_path: Path) -> None:
    assert_same(_build([TRAINED[kind]], trained=True), _loop, layout, tmp_path)


@every_layout
def test_trained_parameters_of_all_layouts_in_one_bundle(layout: str, tmp_path: Path) -> None:
    assert_same(_build([*TRAINED.values()], trained=True), _loop, layout, tmp_path)


@every_layout
@pytest.mark.parametrize("kind", [*TRAINED, *FROZEN])
def test_a_frozen_parameter_of_any_layout(layout: str, kind: str, tmp_path: Path) -> None:
    assert_same(_build([(TRAINED | FROZEN)[kind]], trained=False), _loop, layout, tmp_path)


@every_layout
@pytest.mark.parametrize("kind", [*TRAINED, *FROZEN])
def test_a_pickled_parameter_of_any_layout(layout: str, kind: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for parameter in pickle.loads(pickle.dumps(trial.model)).parameters():
            trial.log(torch.tensor([*parameter.shape, *parameter.stride(), *map(int, _kind_of(parameter))]))
            trial.log(parameter.detach().resolve_conj().resolve_neg())

    assert_same(_build([(TRAINED | FROZEN)[kind]], trained=False), loop, layout, tmp_path)


def _kind_of(tensor: Tensor) -> tuple[bool, bool, bool]:
    return tensor.is_conj(), tensor.is_neg(), type(tensor) is nn.Parameter


@every_layout
@pytest.mark.parametrize("kind", TRAINED)
def test_a_model_of_one_parameter_of_any_layout(layout: str, kind: str, tmp_path: Path) -> None:
    """A bundle of one tensor is stored without a copy; one of no bytes has none to store."""
    plain = nn.ParameterList([TRAINED[kind]()])
    ours = nn.ParameterList([nn.Parameter(plain[0].detach().clone())])
    ours[0].data = TRAINED[kind]()
    with torch.no_grad():
        ours[0].copy_(plain[0])
    with offload(ours, None, config_of(layout, tmp_path)), torch.no_grad():
        assert ours[0].sum().equal(plain[0].sum())
        for model in (plain, ours):
            model[0].mul_(2)
        assert ours[0].is_conj() == plain[0].is_conj()
        assert ours[0].is_neg() == plain[0].is_neg()
    assert_equal_models(plain, ours)
    assert (ours[0].is_conj(), ours[0].is_neg()) == (plain[0].is_conj(), plain[0].is_neg())


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@every_layout
def test_empty_parameters_between_others_come_back(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, list[Optimizer]]:
        model = nn.Sequential(
            nn.Linear(48, 48), nn.Linear(48, 0), nn.Linear(0, 8, bias=False), nn.Linear(8, 1)
        )
        return model, [torch.optim.Adam(model.parameters(), lr=1e-2)]

    assert_same(build, _loop, layout, tmp_path)


SAVED = {name: make for name, make in (TRAINED | FROZEN).items() if name != "sliding"}


@every_layout
def test_checkpoints_of_every_kind_hold_parameters_of_every_layout(layout: str, tmp_path: Path) -> None:
    """By ``run.save`` and ``run.load``, by state dicts, and as weights of a model without bytes."""

    def values(model: nn.Module) -> list[Tensor]:
        return [p.detach().clone() for p in model.parameters()]

    def assert_is(model: nn.Module, expected: Sequence[Tensor]) -> None:
        for p, other in zip(model.parameters(), expected, strict=True):
            assert torch.equal(p, other)

    model, others = (Odd([make() for make in SAVED.values()], trained=True) for _ in range(2))
    config = config_of(layout, tmp_path)
    saved = values(model)
    with offload(model, None, config) as run:
        run.save(tmp_path / "saved")
        state = model.state_dict()
        with torch.no_grad():
            for p in model.parameters():
                if 0 not in p.stride():
                    p.copy_(torch.zeros_like(p))
        run.load(tmp_path / "saved")
        assert_is(model, saved)
    looks = [(p.stride(), p.is_conj(), p.is_neg()) for p in model.parameters()]
    assert_is(model, saved)
    with offload(others, None, config) as run:
        run.load(tmp_path / "saved")
        assert_is(others, saved)
    assert [(p.stride(), p.is_conj(), p.is_neg()) for p in others.parameters()] == looks
    assert all(torch.equal(value, kept) for value, kept in zip(state.values(), saved, strict=True))
    with torch.device("meta"):
        empty = Odd([make() for make in SAVED.values()], trained=True)
    strides = [p.stride() for p in empty.parameters()]
    with offload(empty, None, config, weights=tmp_path / "saved" / "model.safetensors"):
        assert_is(empty, saved)
    assert_is(empty, saved)
    assert [p.stride() for p in empty.parameters()] == strides


@pytest.mark.parametrize("layout", ["disk", "three"])
def test_a_durable_run_resumes_with_parameters_of_every_layout(layout: str, tmp_path: Path) -> None:
    def build() -> Odd:
        torch.manual_seed(0)
        return Odd([make() for make in (TRAINED | FROZEN).values()], trained=False)

    config = config_of(layout, tmp_path, {"durable": True})
    plain = build()
    with offload(build(), None, config) as run:
        run.checkpoint()
    for make_first in (False, True):
        again = build()
        with torch.no_grad():
            for p in again.parameters():
                if 0 not in p.stride() and p.numel() and make_first:
                    p.copy_(torch.zeros_like(p))
        with offload(again, None, config) as run:
            assert run.resumed is not None
        assert_equal_models(plain, again)
        assert [p.is_conj() for p in plain.parameters()] == [p.is_conj() for p in again.parameters()]


def _strided() -> st.SearchStrategy[Tensor]:
    """Views of contiguous memory: sliced with steps, permuted, with and without elements."""

    @st.composite
    def build(draw: st.DrawFn) -> Tensor:
        dims = draw(st.integers(0, 3))
        shape = [draw(st.integers(0, 5)) for _ in range(dims)]
        begins = [draw(st.integers(0, 3)) for _ in range(dims)]
        steps = [draw(st.integers(1, 3)) for _ in range(dims)]
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, CFLOAT]))
        whole = [begin + size * step for begin, size, step in zip(begins, shape, steps, strict=True)]
        tensor = torch.arange(math.prod(whole)).view(whole).remainder(17).to(dtype)
        for dim, (begin, size, step) in enumerate(zip(begins, shape, steps, strict=True)):
            tensor = tensor[(slice(None),) * dim + (slice(begin, begin + size * step, step),)]
        tensor = tensor.permute(draw(st.permutations(range(dims))))
        return tensor.conj() if tensor.is_complex() and draw(st.booleans()) else tensor

    return build()


def _looks(tensor: Tensor) -> tuple[object, ...]:
    remainder = tensor.detach().data_ptr() % 64
    return tensor.shape, tensor.stride(), tensor.is_conj(), tensor.dtype, remainder


@settings(max_examples=60, deadline=None)
@given(tensors=st.lists(_strided(), min_size=1, max_size=4), layout=st.sampled_from(sorted(LAYOUTS)))
def test_any_views_keep_bits_and_strides(
    tensors: list[Tensor], layout: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain = nn.ParameterList(nn.Parameter(tensor.clone()) for tensor in tensors)
    ours = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)
    tensors.clear()  # whose memory the parameters share
    expected = [_looks(p) for p in ours]
    with offload(ours, None, config_of(layout, tmp_path_factory.mktemp("any"))), torch.no_grad():
        assert [_looks(p) for p in ours] == expected
        for p, q in zip(plain, ours, strict=True):
            assert torch.equal(p, q)
            p.add_(1)
            q.add_(1)
    assert [_looks(p) for p in ours] == expected
    assert all(torch.equal(p, q) for p, q in zip(plain, ours, strict=True))


@given(tensors=st.lists(_strided(), min_size=1, max_size=5))
def test_places_hold_what_lies_in_memory_and_no_two_regions_meet(tensors: list[Tensor]) -> None:
    places, nbytes = lay_out([(str(number), tensor) for number, tensor in enumerate(tensors)])
    regions = sorted(regions_of(places))
    assert all(place.is_of(tensor) for place, tensor in zip(places, tensors, strict=True))
    assert all(a.end_bytes <= b.begin_bytes for a, b in itertools.pairwise(regions))
    assert all(region.end_bytes <= nbytes for region in regions)
    assert all(region.begin_bytes % 64 == 0 for region in regions)
    assert all(
        place.begin_bytes % 64 == tensor.data_ptr() % 64
        for place, tensor in zip(places, tensors, strict=True)
    )
    if len(tensors) == 1:
        assert nbytes == places[0].end_bytes
