"""What only looks at a table's parameter finds what it finds of any parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tierstore.errors import UsageError
from tierstore.nn import EmbeddingTable

ROWS, WIDTH = 50, 4


def _table() -> EmbeddingTable:
    return EmbeddingTable(ROWS, WIDTH, seed=0)


def _backward(module: nn.Module, p: Any, backward: Callable[[Tensor], object]) -> Tensor:  # noqa: ANN401
    for _ in range(2):  # it is added to what is there
        backward(module(torch.tensor([1, 1])).sum())
    gradient: Tensor = p.grad.to_dense()
    return gradient


def _multi(module: nn.Module, p: Any) -> list[list[bool]]:  # noqa: ANN401
    seen: list[list[bool]] = []
    handle = torch.autograd.graph.register_multi_grad_hook(
        [p], lambda gradients: seen.append([each is not None for each in gradients])
    )
    module(torch.tensor([1])).sum().backward()
    handle.remove()
    return seen


LOOKS: dict[str, Callable[[Any, Any], object]] = {
    "new_zeros": lambda module, p: p.new_zeros(2, 3),
    "new_ones": lambda module, p: p.new_ones(2),
    "new_full": lambda module, p: p.new_full((2,), 1.5),
    "new_tensor": lambda module, p: p.new_tensor([1.0]),
    "new_empty": lambda module, p: p.new_empty(2).shape,
    "to(p)": lambda module, p: torch.ones(2).double().to(p),
    "type_as": lambda module, p: torch.ones(2).double().type_as(p),
    "type": lambda module, p: p.type(),
    "type(own)": lambda module, p: p.type(p.dtype) is p,
    "retain_grad": lambda module, p: p.retain_grad(),
    "dim_order": lambda module, p: p.dim_order(),
    "result_type": lambda module, p: torch.result_type(p, torch.ones(1).double()),
    "cpu": lambda module, p: p.cpu() is p,
    "to(cpu)": lambda module, p: p.to("cpu") is p,
    "to(dtype)": lambda module, p: p.to(dtype=torch.float32) is p,
    "float": lambda module, p: p.float() is p,
    "contiguous": lambda module, p: p.contiguous() is p,
    "edge": lambda module, p: torch.autograd.graph.get_gradient_edge(p).node.name(),
    "expand_as": lambda module, p: p.expand_as(p).grad_fn.next_functions[0][0].name(),
    "backward": lambda module, p: _backward(module, p, lambda loss: loss.backward(inputs=[p])),
    "autograd.backward": lambda module, p: _backward(
        module, p, lambda loss: torch.autograd.backward(loss, inputs=p)
    ),
    "grad": lambda module, p: torch.autograd.grad(module(torch.tensor([1, 1])).sum(), p)[0].to_dense(),
    "multi": _multi,
}


@pytest.mark.parametrize("look", LOOKS)
def test_what_only_looks_at_a_parameter_finds_what_it_finds_of_any(look: str) -> None:
    plain = nn.Embedding(ROWS, WIDTH, sparse=True)
    table = _table()
    found, expected = LOOKS[look](table, table.weight), LOOKS[look](plain, plain.weight)
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert type(found) is Tensor
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
def test_what_nobody_may_override_does_not_take_zeros_for_rows() -> None:
    weight = _table().weight
    assert torch.tensor(weight).isnan().all()
    assert torch.ones(1).new_tensor(weight).isnan().all()


def test_what_finds_a_node_has_no_elements() -> None:
    weight = _table().weight
    uses: list[Callable[[Any], object]] = [lambda view: view.sum(), lambda view: view[0], Tensor.clone]
    for use in uses:
        with pytest.raises(UsageError, match="is not one tensor in memory"):
            use(weight.view_as(weight))
    with pytest.raises(UsageError, match="zeros_like: table"):
        torch.zeros_like(weight)
    with pytest.raises(UsageError, match="double: table"):
        weight.double()
