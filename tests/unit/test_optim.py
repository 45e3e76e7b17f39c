"""LazyAdam and FTRL as optimizers of PyTorch's: what they take, keep, save, and refuse."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tierstore.optim import FTRL, LazyAdam, SparseAdam
from tierstore.optim.row_optimizer import RowOptimizer

KINDS: list[Callable[..., RowOptimizer]] = [LazyAdam, FTRL]
every_kind = pytest.mark.parametrize("kind", KINDS)


def _embedding(rows: int = 12, columns: int = 4) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(rows, columns, sparse=True)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: list[int]) -> None:
    optimizer.zero_grad()
    model(torch.tensor(ids, dtype=torch.int64)).square().sum().backward()
    optimizer.step()


@every_kind
def test_only_rows_of_the_batch_change(kind: Callable[..., RowOptimizer]) -> None:
    model = _embedding()
    before = model.weight.detach().clone()
    optimizer = kind(model.parameters(), lr=0.1)
    _step(model, optimizer, [3, 7, 3])
    changed = (model.weight != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [3, 7]
    kept = [value for name, value in optimizer.state[model.weight].items() if name != "step"]
    start = [
        torch.full_like(each, 0.1) if n == 0 and kind is FTRL else torch.zeros_like(each)
        for n, each in enumerate(kept)
    ]
    for value, was in zip(kept, start, strict=True):
        assert (value != was).any(dim=1).nonzero().flatten().tolist() == [3, 7]


def test_lazy_adam_in_which_every_row_is_touched_is_sparse_adam() -> None:
    """Both have ``eps`` uncorrected; only the order of operations differs."""
    model, other = _embedding(), _embedding()
    ours = LazyAdam(model.parameters(), lr=0.1)
    theirs = torch.optim.SparseAdam(other.parameters(), lr=0.1)
    for _ in range(5):
        _step(model, ours, [*range(12), 3, 3])
        _step(other, theirs, [*range(12), 3, 3])
    torch.testing.assert_close(model.weight, other.weight)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sparse_adam_is_pytorch_s_to_the_bit(dtype: torch.dtype, maximize: bool) -> None:
    model, other = _embedding().to(dtype), _embedding().to(dtype)
    ours = SparseAdam(model.parameters(), lr=0.1, eps=1e-3, maximize=maximize)
    theirs = torch.optim.SparseAdam(other.parameters(), lr=0.1, eps=1e-3, maximize=maximize)
    for ids in ([3, 7, 3], [], [7] * 40, [*range(12), 3, 3]):
        _step(model, ours, ids)
        _step(other, theirs, ids)
        assert torch.equal(model.weight, other.weight)
    found, expected = ours.state_dict()["state"][0], theirs.state_dict()["state"][0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(expected[name])) for name in found)


@every_kind
def test_a_sparse_gradient_of_all_rows_is_a_dense_one(kind: Callable[..., RowOptimizer]) -> None:
    model, other = _embedding(), nn.Embedding.from_pretrained(_embedding().weight.detach(), freeze=False)
    ours, theirs = kind(model.parameters(), lr=0.1), kind(other.parameters(), lr=0.1)
    for _ in range(3):
        _step(model, ours, list(range(12)))
        _step(other, theirs, list(range(12)))
    assert torch.equal(model.weight, other.weight)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coalesced": lambda dense: dense.to_sparse(1),
    "elements": lambda dense: dense.to_sparse(2),
    "strided columns": lambda dense: dense.t().contiguous().t(),
}


@every_kind
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_layout_change_the_rows_that_have_some(
    kind: Callable[..., RowOptimizer], layout: str
) -> None:
    dense = torch.zeros(5, 3)
    dense[1], dense[4, 2] = torch.tensor([1.0, -2.0, 3.0]), 0.5
    tables = [nn.Parameter(torch.ones(5, 3)) for _ in range(2)]
    optimizer = kind(tables, lr=0.1, weight_decay=0.1)
    tables[0].grad = LAYOUTS[layout](dense)
    tables[1].grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 4]]), dense[[1, 4]], (5, 3), check_invariants=True
    )
    if layout == "strided columns":
        tables[1].grad = dense
    optimizer.step()
    assert torch.equal(*tables)


@every_kind
def test_a_parameter_without_dimensions(kind: Callable[..., RowOptimizer]) -> None:
    scalars = [nn.Parameter(torch.tensor(2.0)) for _ in range(2)]
    optimizer = kind(scalars, lr=0.1)
    scalars[0].grad, scalars[1].grad = torch.tensor(3.0), torch.tensor(3.0).to_sparse()
    optimizer.step()
    assert torch.equal(*scalars)
    assert scalars[0] != 2


@every_kind
@pytest.mark.parametrize("ids", [[], [2], [2] * 1000])
def test_a_batch_of_no_rows_and_of_one_row_often(kind: Callable[..., RowOptimizer], ids: list[int]) -> None:
    model = _embedding()
    before = model.weight.detach().clone()
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    model(torch.tensor(ids, dtype=torch.int64)).sum().backward()
    optimizer.step()
    assert (model.weight != before).any(dim=1).nonzero().flatten().tolist() == sorted(set(ids))
    assert model.weight.isfinite().all()


@every_kind
def test_weights_that_lie_otherwise_than_row_by_row(kind: Callable[..., RowOptimizer]) -> None:
    plain = nn.Parameter(_embedding().weight.detach().clone())
    turned = nn.Parameter(plain.detach().t().contiguous().t())
    optimizer = kind([plain, turned], lr=0.1)
    for each in (plain, turned):
        nn.functional.embedding(torch.tensor([0, 5, 5]), each, sparse=True).square().sum().backward()
    optimizer.step()
    assert torch.equal(plain, turned)
    assert not turned.is_contiguous()


@every_kind
def test_state_is_saved_and_loaded_and_copied(kind: Callable[..., RowOptimizer]) -> None:
    model = _embedding()
    optimizer = kind(model.parameters(), lr=0.1)
    _step(model, optimizer, [1, 2])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    other = _embedding()
    other.load_state_dict(saved["model"])
    loaded = kind(other.parameters(), lr=1.0)
    loaded.load_state_dict(saved["optimizer"])
    both = copy.deepcopy((model, optimizer))
    for each, stepper in ((model, optimizer), (other, loaded), both):
        _step(each, stepper, [2, 3])
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.weight, both[0].weight)


@every_kind
def test_a_closure_is_evaluated_once_and_its_loss_returned(kind: Callable[..., RowOptimizer]) -> None:
    model = _embedding()
    optimizer = kind(model.parameters(), lr=0.1)
    calls: list[int] = []

    def closure() -> float:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.tensor([1])).sum()
        loss.backward()
        return float(loss.item())

    assert optimizer.step(closure) == pytest.approx(_embedding().weight[1].sum().item())
    assert calls == [1]


@every_kind
def test_a_rate_may_be_a_tensor_and_be_scheduled(kind: Callable[..., RowOptimizer]) -> None:
    model, other = _embedding(), _embedding()
    ours, theirs = kind(model.parameters(), lr=torch.tensor(0.5)), kind(other.parameters(), lr=0.5)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (ours, theirs)]
    for _ in range(3):
        _step(model, ours, [1, 2])
        _step(other, theirs, [1, 2])
        for each in schedules:
            each.step()
    assert torch.equal(model.weight, other.weight)


# ---------------------------------------------------------------------- what is refused

WRONG: list[tuple[Callable[..., RowOptimizer], dict[str, Any], str]] = [
    (LazyAdam, {"lr": -1.0}, "lr is -1.0; it has to be at least 0"),
    (LazyAdam, {"lr": float("nan")}, "lr is nan"),
    (LazyAdam, {"betas": (1.0, 0.9)}, r"betas\[0\] is 1.0; it has to be at least 0 and below 1"),
    (LazyAdam, {"betas": (0.9, -0.1)}, r"betas\[1\] is -0.1"),
    (LazyAdam, {"eps": 0.0}, "eps is 0.0; it has to be more than 0"),
    (LazyAdam, {"weight_decay": -0.1}, "weight_decay is -0.1"),
    (FTRL, {"lr": 0.0}, "lr is 0.0; it has to be more than 0"),
    (FTRL, {"lr_power": 0.5}, "lr_power is 0.5; it has to be at most 0"),
    (FTRL, {"l1": -1.0}, "l1 is -1.0"),
    (FTRL, {"l2": -1.0}, "l2 is -1.0"),
    (FTRL, {"initial_accumulator_value": -0.1}, "initial_accumulator_value is -0.1"),
    (FTRL, {"weight_decay": -0.1}, "weight_decay is -0.1"),
]


@pytest.mark.parametrize(("kind", "options", "message"), WRONG)
def test_options_out_of_range_are_refused_by_name(
    kind: Callable[..., RowOptimizer], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(_embedding().parameters(), **options)
    optimizer = kind(_embedding().parameters())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": list(_embedding().parameters()), **options})
    assert len(optimizer.param_groups) == 1, "a group that is refused is not there"


@every_kind
@pytest.mark.parametrize(
    "parameter",
    [torch.ones(2, dtype=torch.complex64), torch.ones(2, 2).to_sparse()],
    ids=["complex", "sparse"],
)
def test_parameters_that_are_complex_or_sparse_are_refused(
    kind: Callable[..., RowOptimizer], parameter: Tensor
) -> None:
    with pytest.raises(ValueError, match="takes dense real parameters"):
        kind([nn.Parameter(parameter)])
