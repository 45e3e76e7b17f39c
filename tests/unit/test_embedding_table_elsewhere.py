"""A table where PyTorch looks at modules in its own way: compiled, transformed, made under another device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tierstore.errors import UsageError
from tierstore.nn import EmbeddingTable
from tierstore.optim import SGD, Adagrad, SparseAdam


def test_a_compiled_model_breaks_its_graph_at_a_lookup() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(EmbeddingTable(20, 4), nn.Linear(4, 2))
    ids = torch.tensor([1, 5, 1])
    expected = model(ids)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(ids), expected)


def test_a_transform_is_refused_by_the_name_of_the_table() -> None:
    table = EmbeddingTable(20, 4)
    with pytest.raises(UsageError, match=r"table 'EmbeddingTable': a transform of torch\.func"):
        torch.func.vmap(table)(torch.tensor([[1, 2], [3, 4]]))


@pytest.mark.parametrize("kind", [SparseAdam, Adagrad, SGD], ids=lambda kind: kind.__name__)
def test_where_tensors_are_made_on_another_device_a_table_is_in_host_memory(
    kind: type[SparseAdam | Adagrad | SGD], tmp_path: Path
) -> None:
    def train(table: EmbeddingTable, path: Path) -> Tensor:
        optimizer = kind(table.parameters(), lr=0.1)
        table.set_rows(ids, values)
        table(ids).sum().backward()
        optimizer.step()
        table.export(path)
        table.load(path)
        return table.rows(torch.arange(20, device="cpu"))

    ids, values = torch.tensor([3, 1, 3]), torch.randn(3, 4)
    expected = train(EmbeddingTable(20, 4, seed=0), tmp_path / "one")
    with torch.device("meta"):
        found = train(EmbeddingTable(20, 4, seed=0), tmp_path / "other")
    assert torch.equal(found, expected)
