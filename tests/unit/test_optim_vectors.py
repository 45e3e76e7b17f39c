"""LazyAdam and FTRL against what the original system itself computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tierstore.nn import EmbeddingTable
from tierstore.optim import FTRL, LazyAdam
from tierstore.optim.row_optimizer import RowOptimizer

VECTORS = Path(__file__).parents[1] / "vectors"
STATE = {"m": "exp_avg", "v": "exp_avg_sq", "accum": "accumulator", "linear": "linear"}
NAMES = {"learning_rate": "lr", "use_nesterov": "nesterov", "initial_accum": "initial_accumulator_value"}
NOT_OURS = ("use_locking", "use_lazy", "beta1", "beta2")


def _read(name: str) -> list[Any]:
    document = json.loads((VECTORS / f"{name}.json").read_text())
    return [pytest.param(document, each, id=each["name"]) for each in document["configs"]]


CONFIGS = _read("lazy_adam") + _read("ftrl")


def _optimizer(parameter: nn.Parameter, config: dict[str, Any]) -> RowOptimizer:
    arguments = config["args"]
    options = {NAMES.get(key, key): value for key, value in arguments.items() if key not in NOT_OURS}
    if isinstance(options.get("lr"), list):
        options["lr"] = options["lr"][0]
    if config["optimizer"] == "FTRL":
        return FTRL([parameter], **options)
    betas = arguments.get("beta1", 0.9), arguments.get("beta2", 0.999)
    return LazyAdam([parameter], betas=betas, **options)


def _parameter(kind: str, initial: Any) -> nn.Parameter:  # noqa: ANN401
    values = torch.tensor(initial)
    if kind == "plain":
        return nn.Parameter(values)
    return EmbeddingTable(*values.shape, init=lambda ids: values[ids]).weight


@pytest.mark.parametrize("kind", ["plain", "table"])
@pytest.mark.parametrize(("document", "config"), CONFIGS)
def test_every_step_is_the_original_s(document: dict[str, Any], config: dict[str, Any], kind: str) -> None:
    if not config["follows_formula"]:
        pytest.skip("the original deviates from its own formula there")
    parameter = _parameter(kind, document["initial"])
    optimizer = _optimizer(parameter, config)
    arguments = config["args"]
    is_lazy = arguments.get("use_lazy", config["optimizer"] != "Adam")
    scale = config["gradient_scale"]
    rates = arguments.get("learning_rate")
    for number, (step, after) in enumerate(zip(document["steps"], config["after"], strict=True)):
        if isinstance(rates, list):
            optimizer.param_groups[0]["lr"] = rates[number]
        gradient = torch.sparse_coo_tensor(
            torch.tensor([step["indices"]]),
            torch.tensor(step["values"]) * scale,
            parameter.shape,
            check_invariants=True,
        )
        parameter.grad = gradient if is_lazy and config["gradient"] == "sparse" else gradient.to_dense()
        optimizer.step()
        found = {"param": parameter.detach()} | {
            name: optimizer.state[parameter][STATE[name]] for name in after if name != "param"
        }
        for name, expected in after.items():
            # In float32, and by as much more as the original is off its own formula in float64.
            slip = config["max_difference_to_formula"][name] if name == "param" else 0.0
            torch.testing.assert_close(
                found[name][document["rows"]], torch.tensor(expected), rtol=1e-6, atol=1e-6 + slip
            )
    _check_rows_in_no_batch(document, config, parameter)


def _check_rows_in_no_batch(document: dict[str, Any], config: dict[str, Any], parameter: Tensor) -> None:
    rows = document["rows_in_no_batch"]
    left = parameter.detach()[rows]
    if config["rows_in_no_batch_unchanged"]:
        assert torch.equal(left, torch.tensor(document["initial"])[rows])
    else:
        expected = torch.tensor(config["param_of_rows_in_no_batch_after_last_step"])
        torch.testing.assert_close(left, expected, rtol=1e-6, atol=1e-6)
