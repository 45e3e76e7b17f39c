"""What a model that is nowhere would hold is what it holds: predicted peaks against measured ones."""

from __future__ import annotations

import contextlib
import resource

import pytest
import torch
from torch import nn

from tests import target
from tests.training.traced_models import BUILDS, Parts, loss_of, measured_peak_bytes
from tierstore.planning import ByteKind, Does, Phase, Program
from tierstore.training import recompute
from tierstore.training.tracing import RESIDENT_PEAK, trace_model

pytestmark = pytest.mark.skipif(target.accelerator is not None, reason="the meter is of host memory")


def held_bytes(program: Program) -> int:
    """Return the most that is there if nothing is ever moved, from data and moments alone."""
    made = {use.key for moment in program.moments for use in moment.uses if use.does is Does.MAKE}
    there = {key: datum.nbytes for key, datum in program.data.items() if key not in made}
    most = 0
    for moment in program.moments:
        begun = program.standing_bytes + moment.live_bytes + sum(there.values())
        most = max(most, begun + moment.workspace_bytes)
        for use in moment.uses:
            if use.does is Does.MAKE:
                there[use.key] = program.data[use.key].nbytes
            elif use.does is Does.END:
                del there[use.key]
    return most


@pytest.mark.parametrize("name", BUILDS)
def test_the_peak_of_plain_pytorch_is_predicted_to_the_byte(name: str) -> None:
    program = trace_model(BUILDS[name], loss=loss_of)
    peak_bytes, numbers = measured_peak_bytes(BUILDS[name])
    assert int(program.facts[RESIDENT_PEAK]) == peak_bytes - numbers
    assert program.assumptions == ()


@pytest.mark.parametrize("name", BUILDS)
def test_data_and_moments_say_the_same_as_the_peak(name: str) -> None:
    program = trace_model(BUILDS[name], loss=loss_of)
    peak_bytes = int(program.facts[RESIDENT_PEAK])
    padding_bytes = 64 * len(program.data)  # bundles begin each tensor at a multiple of it
    assert peak_bytes - 0.01 * peak_bytes <= held_bytes(program) <= peak_bytes + padding_bytes


def test_layers_that_a_run_recomputes_are_recomputed() -> None:
    with contextlib.ExitStack() as recomputing:

        def build() -> Parts:
            model, inputs, optimizer = BUILDS["encoder"]()
            recomputing.enter_context(recompute(model, {"recompute": True}, layers="layers"))
            return model, inputs, optimizer

        program = trace_model(build, loss=loss_of)
        peak_bytes, numbers = measured_peak_bytes(build)
    assert int(program.facts[RESIDENT_PEAK]) == peak_bytes - numbers
    kept = trace_model(BUILDS["encoder"], loss=loss_of)
    assert int(program.facts[RESIDENT_PEAK]) < 0.6 * int(kept.facts[RESIDENT_PEAK])


def test_a_large_model_takes_no_memory() -> None:
    def build() -> tuple[nn.Module, tuple[torch.Tensor]]:
        return nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(16))), (torch.zeros(4096, 16384),)

    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    program = trace_model(build, loss=loss_of, optimizer=torch.optim.AdamW)
    added_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    parameters_bytes = 16 * (16384 + 1) * 16384 * 4
    assert int(program.facts[RESIDENT_PEAK]) > 4 * parameters_bytes
    assert added_kib * 1024 < parameters_bytes / 100


def recurrent() -> Parts:
    model = torch.nn.GRU(32, 64, 2, batch_first=True)
    return model, (torch.randn(8, 20, 32),), torch.optim.RMSprop(model.parameters())


def halves() -> Parts:
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.SiLU(), torch.nn.LayerNorm(512), torch.nn.Dropout(0.2)
    ).to(torch.bfloat16)
    return model, (torch.randn(64, 64, dtype=torch.bfloat16),), torch.optim.RAdam(model.parameters())


def test_where_kernels_of_the_host_differ_the_peak_is_near() -> None:
    def first_of(model: torch.nn.Module, inputs: object) -> torch.Tensor:
        assert isinstance(inputs, tuple)
        output = model(*inputs)
        loss: torch.Tensor = (output[0] if isinstance(output, tuple) else output).square().mean()
        return loss

    for build in (recurrent, halves):
        program = trace_model(build, loss=first_of)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.training.traced_models.loss_of", first_of)
            peak_bytes, _ = measured_peak_bytes(build)
        assert int(program.facts[RESIDENT_PEAK]) == pytest.approx(peak_bytes, rel=0.03)


def test_gradients_that_are_added_up_are_made_once() -> None:
    once = trace_model(BUILDS["deep"], loss=loss_of)
    thrice = trace_model(BUILDS["deep"], loss=loss_of, accumulations=3)
    gradients = {key for key, datum in thrice.data.items() if datum.kind is ByteKind.GRADIENT}
    uses = [use for moment in thrice.moments for use in moment.uses if use.key in gradients]
    assert [sum(use.does is does for use in uses) for does in (Does.MAKE, Does.WRITE)] == [24, 48]
    assert thrice.accumulations == 3
    forward = [sum(moment.phase is Phase.FORWARD for moment in each.moments) for each in (once, thrice)]
    assert forward[1] == 3 * forward[0]
