"""accelerate beside an offloaded model: prepared before or after, its optimizer given or the one it wraps."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations import tiny
from tests.training.twins import same
from tierstore.training import offload

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")

_PREPARED = ("before", "inside")
_GIVEN = ("wrapper", "wrapped", "both")


def _trained(config: Any, prepared: str, given: str, precision: str) -> list[Tensor]:
    """Train with accelerate's loop; return losses, parameters and state."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model: Any = tiny.model_of("llama")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader: Any = torch.utils.data.DataLoader(tiny.rows(12, 1), batch_size=2)  # type: ignore[arg-type]
    found = []
    with contextlib.ExitStack() as run:
        if prepared != "inside":
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        inner = getattr(optimizer, "optimizer", optimizer)
        if config is not None:
            optimizers = {"wrapper": optimizer, "wrapped": inner, "both": [optimizer, inner]}[given]
            run.enter_context(offload(model, optimizers, config))
        if prepared == "inside":
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        scheduler = accelerator.prepare(scheduler)
        for row in loader:
            with accelerator.accumulate(model):
                loss = model(**row).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found.append(loss.detach())
    entries = inner.state_dict()["state"].values()
    state = [each for entry in entries for each in entry.values()]
    return [each.detach().clone() for each in (*found, *model.parameters(), *state)]


@pytest.mark.parametrize(
    ("prepared", "given", "precision"), [*itertools.product(_PREPARED, _GIVEN, ["no", "bf16"])]
)
def test_a_loop_of_accelerates_gives_the_same_bits(
    prepared: str, given: str, precision: str, tmp_path: Path
) -> None:
    plain = _trained(None, prepared, given, precision)
    ours = _trained(tiny.config_of("three", tmp_path), prepared, given, precision)
    assert len(plain) == len(ours)
    assert [number for number, pair in enumerate(zip(plain, ours, strict=True)) if not same(*pair)] == []
