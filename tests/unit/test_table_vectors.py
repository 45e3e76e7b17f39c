"""Tables against what the original system's lookups computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tierstore.nn import EmbeddingTable
from tierstore.optim import FTRL, LazyAdam

DOCUMENT: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "embedding_lookup.json").read_text()
)
TABLE = torch.tensor(DOCUMENT["table"])
LOOKUPS = [each for each in DOCUMENT["lookups"] if "output" in each]
GRADIENTS = DOCUMENT["gradients"]


def table_of(values: torch.Tensor, **options: Any) -> EmbeddingTable:  # noqa: ANN401
    return EmbeddingTable(*values.shape, init=lambda ids: values[ids], **options)


def _name(case: dict[str, Any]) -> str:
    parts = [case["name"], case.get("indices_type", ""), str(case["max_norm"]), case.get("target", "")]
    return "-".join(filter(None, parts))


def test_there_are_vectors_to_test_against() -> None:
    usable = [each for each in LOOKUPS if each.get("clipped_by_row_norm", True)]
    assert len(usable) > 25
    assert sum(each.get("matches_gradient_of_row_norm_clipping", True) for each in GRADIENTS) >= 5


@pytest.mark.parametrize("case", LOOKUPS, ids=_name)
def test_a_lookup_is_the_original_s(case: dict[str, Any]) -> None:
    if not case.get("clipped_by_row_norm", True):
        pytest.skip("the original takes the norm of another row there")
    table = table_of(
        TABLE, max_norm=case["max_norm"], out_of_range="zeros", target=case["target"],
        sparse=case.get("sparse", True),
    )  # fmt: skip
    ids = torch.tensor(case["indices"], dtype=getattr(torch, case["indices_type"]))
    torch.testing.assert_close(table(ids), torch.tensor(case["output"]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", GRADIENTS, ids=_name)
def test_a_gradient_is_the_original_s_for_rows_that_there_are(case: dict[str, Any]) -> None:
    if not case.get("matches_gradient_of_row_norm_clipping", True):
        pytest.skip("the original clips by the norm of another row there")
    table = table_of(TABLE, max_norm=case["max_norm"], out_of_range="zeros")
    (table(torch.tensor(case["indices"])) * torch.tensor(case["cotangent"])).sum().backward()
    expected = torch.zeros_like(TABLE)
    for row, value in zip(case["gradient_indices"], case["gradient_values"], strict=True):
        if 0 <= row < len(TABLE):
            expected[row] += torch.tensor(value)
    assert table.weight.grad is not None
    torch.testing.assert_close(table.weight.grad.to_dense(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", DOCUMENT["train"], ids=lambda case: str(case["optimizer"]))
def test_training_is_the_original_s(case: dict[str, Any]) -> None:
    """Batches have an id above the table, which gives zeros and no gradient."""
    names = {"learning_rate": "lr", "initial_accum": "initial_accumulator_value"}
    options = {names.get(name, name): value for name, value in case["args"].items()}
    table = table_of(TABLE, out_of_range="zeros")
    optimizer: Any = {"LazyAdam": LazyAdam, "FTRL": FTRL}[case["optimizer"]](
        table.parameters(), **options, target="CPU"
    )
    steps = zip(case["batches"], case["cotangents"], case["losses"], case["table_after"], strict=True)
    for batch, cotangent, loss_then, table_after in steps:
        optimizer.zero_grad()
        loss = (table(torch.tensor(batch)) * torch.tensor(cotangent)).sum()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(loss.item(), loss_then, rtol=1e-5, atol=1e-5)
        expected = torch.tensor(table_after)
        torch.testing.assert_close(table.rows(torch.arange(len(TABLE))), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", DOCUMENT["arguments"], ids=lambda case: str(case["args"]))
def test_arguments_are_refused_as_by_the_original(case: dict[str, Any]) -> None:
    names = {"vocab_size": "num_embeddings", "embedding_size": "embedding_dim"}
    given = {names.get(name, name): value for name, value in case["args"].items()}
    if not set(given) <= {"num_embeddings", "embedding_dim", "target", "sparse", "max_norm"}:
        pytest.skip("ours has no such argument")
    accepted = case["accepted"] or given in ({"target": "cpu"}, {"max_norm": 1})  # ours takes these, too
    arguments: dict[str, Any] = {"num_embeddings": 12, "embedding_dim": 4, "target": "CPU"} | given
    if accepted:
        EmbeddingTable(**arguments)
        return
    kind: type[Exception] = {"ValueError": ValueError, "TypeError": TypeError}[case["raises"]]
    if given == {"target": None}:
        kind = TypeError
    with pytest.raises(kind, match=next(iter(given))):
        EmbeddingTable(**arguments)
