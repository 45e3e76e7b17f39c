"""Programs of models that are nowhere: what a run does with its bundles, in its order, and how much work."""

from __future__ import annotations

import itertools
import random
import types
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests import target
from tests.training.traced_models import BUILDS, Parts, loss_of, mlp
from tierstore.planning import ByteKind, Does, Phase, Program
from tierstore.training import offload
from tierstore.training.budgets.prefetcher import Prefetcher
from tierstore.training.tracing import Grouping, trace_model
from tierstore.training.tracing.moment_log import MomentLog
from tierstore.training.tracing.storages import Sort


def keys_used_in_a_run(build: Callable[[], Parts], patch: pytest.MonkeyPatch) -> tuple[set[str], list[str]]:
    """Return the bundles of a run, and the keys that its third step asks for, in order."""
    asked: list[str] = []
    note = Prefetcher.note

    def noted(self: Prefetcher, *keys: str) -> None:
        asked.extend(keys)
        note(self, *keys)

    patch.setattr(Prefetcher, "note", noted)
    model, inputs, optimizer = build()
    with offload(
        model, optimizer, {"device": "cpu", "offload_cpu_size": "64MB", "offload_disk_size": 0}
    ) as run:
        for _ in range(3):
            asked.clear()
            loss_of(model, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        return set(run.placement.bundles), [key for key in asked if not key.startswith("grad/")]


def of_kinds(program: Program, *kinds: ByteKind) -> list[str]:
    uses = [use.key for moment in program.moments for use in moment.uses]
    return [key for key in uses if program.data[key].kind in kinds]


@pytest.mark.skipif(target.accelerator is not None, reason="the run is one in host memory")
@pytest.mark.parametrize(
    "name",
    [*(name for name in BUILDS if not name.startswith("attention")), "attention-causal"],
)
def test_bundles_and_the_order_of_their_uses_are_those_of_a_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = trace_model(BUILDS[name], loss=loss_of)
    bundles, asked = keys_used_in_a_run(BUILDS[name], monkeypatch)
    kinds = (ByteKind.PARAMETERS, ByteKind.BUFFER)
    assert {key for key, datum in program.data.items() if datum.kind in kinds} == bundles
    assert of_kinds(program, *kinds, ByteKind.STATE) == asked


def test_windows_of_parents_stay_open_over_their_children() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.second(self.first(x * self.scale)) * self.scale
            return found

    program = trace_model(
        lambda: (Scaled(), (torch.zeros(2, 8),)), loss=loss_of, grouping=Grouping(small_bytes=0)
    )
    forward = [moment for moment in program.moments if moment.phase is Phase.FORWARD]
    assert [
        (moment.name, [(u.key, u.moments) for u in moment.uses if u.does is Does.READ]) for moment in forward
    ] == [
        ("Scaled", [("param/scale", 4)]),
        ("first", [("param/first.weight", 1)]),
        ("second", [("param/second.weight", 1)]),
        ("Scaled", []),
        ("Scaled", []),  # the loss
    ]


def test_activations_are_made_read_and_ended_in_the_layers_that_save_them() -> None:
    program = trace_model(BUILDS["deep"], loss=loss_of)
    activations = {key: each for key, each in program.data.items() if each.kind is ByteKind.ACTIVATION}
    seen: dict[str, list[tuple[Phase, Does]]] = {key: [] for key in activations}
    for moment in program.moments:
        for use in moment.uses:
            if use.key in seen:
                seen[use.key].append((moment.phase, use.does))
                assert moment.layer == activations[use.key].layer or use.does is Does.END
    made, ended = (Phase.FORWARD, Does.MAKE), (Phase.BACKWARD, Does.END)
    assert all(each[0] == made and each[-1] == ended for each in seen.values())
    assert all((Phase.BACKWARD, Does.READ) in each for each in seen.values())
    forward = [moment.layer for moment in program.moments if moment.phase is Phase.FORWARD]
    assert [layer for layer, _ in itertools.groupby(forward)] == [*range(12), None]
    results = {each.layer for each in activations.values() if each.operator == "1.tanh"}
    assert results == set(range(12))
    assert {each.nbytes for each in activations.values() if each.operator == "1.tanh"} == {64 * 48 * 4}


def test_an_activation_that_dies_between_moments_ends_in_the_next() -> None:
    log = MomentLog()
    log.begin("first")
    tensor = torch.empty(4, device="meta")
    known = log.storages.add(tensor)
    assert known is not None
    log.storages.call(known, Sort.ACTIVATION, log.make_activation(known.nbytes, "made"))
    log.finish()
    del tensor
    log.begin("second")
    log.finish()
    assert [[(use.key, use.does) for use in moment.uses] for moment in log.moments()] == [
        [("activation/0", Does.MAKE)],
        [("activation/0", Does.END)],
    ]


def test_an_activation_of_one_moment_is_workspace() -> None:
    log = MomentLog()
    log.begin("only")
    tensor = torch.empty(4, device="meta")
    known = log.storages.add(tensor)
    assert known is not None
    log.storages.call(known, Sort.ACTIVATION, log.make_activation(known.nbytes, "made"))
    log.count("other", "float32", 0.0, 16)
    del tensor
    log.finish()
    (moment,) = log.moments()
    assert (moment.uses, moment.workspace_bytes, log.data) == ((), 16, {})


def test_memory_that_grows_in_place_is_counted_anew() -> None:
    storages = MomentLog().storages
    tensor = torch.empty(4, device="meta")
    storages.add(tensor)
    tensor.resize_(100)
    storages.take_in((tensor,), (tensor,))
    assert (storages.total_bytes, storages.own_bytes, storages.peak_bytes) == (400, 400, 400)
    del tensor
    assert (storages.total_bytes, storages.own_bytes, storages.peak_bytes) == (0, 0, 400)


def test_work_is_what_pytorch_counts() -> None:
    program = trace_model(BUILDS["convolutions"], loss=loss_of)
    counter = FlopCounterMode(display=False)
    model, inputs, _ = BUILDS["convolutions"]()
    with counter:
        loss_of(model, inputs).backward()
    work = [each for moment in program.moments for each in moment.work]
    assert sum(each.flops for each in work) == counter.get_total_flops() > 0
    assert {each.sort for each in work} == {"matmul", "convolution", "other"}
    assert all(each.moved_bytes > 0 and each.operators > 0 for each in work)


def test_attention_counts_its_products() -> None:
    program = trace_model(BUILDS["attention-causal"], loss=loss_of)
    work = {
        moment.phase: each.flops
        for moment in program.moments
        for each in moment.work
        if each.sort == "attention"
    }
    product = 2 * 2 * 4 * 96 * 96 * 16
    assert work == {Phase.FORWARD: 2 * product, Phase.BACKWARD: 5 * product}


def test_units_are_what_optimizers_step() -> None:
    program = trace_model(BUILDS["adapted"], loss=loss_of)
    assert [unit.bundle for unit in program.units] == [
        "param/embedding.weight",
        "param/down.0.weight",
        "param/up.0.weight",
    ]
    assert all(unit.optimizer == "AdamW" and unit.may_step_ahead for unit in program.units)
    down = program.units[1]
    assert down.gradients == tuple(f"grad/down.{number}.weight" for number in range(4))
    assert down.state is not None
    assert program.data[down.state].nbytes == 2 * program.data[down.bundle].nbytes
    ended = [use.key for use in program.moments[-1].uses if use.does is Does.END]
    assert sorted(ended) == sorted(gradient for unit in program.units for gradient in unit.gradients)
    names = [name for name, each in BUILDS["adapted"]()[0].named_parameters() if each.requires_grad]
    assert ended == [f"grad/{name}" for name in names], "zero_grad goes in the order of the parameters"


def test_each_gradient_has_a_moment_and_what_is_live_beside_it() -> None:
    """A layer's node makes all its gradients before the first is accumulated, and each counts once."""
    width, rows = 64, 8

    def build() -> Parts:
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        return model, (torch.empty(rows, width),), torch.optim.AdamW(model.parameters())

    program = trace_model(build, loss=loss_of)
    made = {
        use.key: moment
        for moment in program.moments
        for use in moment.uses
        if use.does is Does.MAKE and program.data[use.key].kind is ByteKind.GRADIENT
    }
    assert len({id(moment) for moment in made.values()}) == len(made) == 4
    assert list(made)[:2] == ["grad/1.bias", "grad/1.weight"]
    weight_bytes, row_bytes = 4 * width * width, 4 * rows * width
    beside = [made[key].live_bytes for key in ("grad/1.bias", "grad/1.weight")]
    assert beside[0] - beside[1] == weight_bytes, "made with the bias's, and accumulated after it"
    assert row_bytes <= beside[1] <= 2 * row_bytes, "what the layer before gets, and no gradient twice"


@pytest.mark.parametrize("kind", ["AdamW", "RAdam", "SGD", "Muon", "Adafactor"])
def test_turns_of_the_same_forms_are_stepped_once_and_told_as_if_each_were(kind: str) -> None:
    stepped: list[object] = []

    def watched() -> Parts:
        model, inputs, optimizer = matrices()
        optimizer.register_step_post_hook(lambda *_: stepped.append(None))
        return model, inputs, optimizer

    def matrices() -> Parts:
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)), nn.Linear(8, 4, bias=False))
        return model, (torch.randn(2, 8),), getattr(torch.optim, kind)(model.parameters(), lr=0.1)

    apart = Grouping(small_bytes=0)
    program = trace_model(matrices, loss=loss_of, grouping=apart)
    assert program == trace_model(watched, loss=loss_of, grouping=apart)
    assert len(stepped) == 1 + len(program.units) == 5  # somebody looks: so each is


def test_without_an_optimizer_nothing_is_stepped_and_that_is_said() -> None:
    program = trace_model(lambda: mlp()[:2], loss=loss_of)
    assert program.units == ()
    assert any("no optimizer" in each for each in program.assumptions)
    given = trace_model(lambda: mlp()[:2], loss=loss_of, optimizer=torch.optim.AdamW)
    assert given.units == trace_model(mlp, loss=loss_of).units


def test_fingerprints_tell_models_apart_and_not_their_batches() -> None:
    def of(width: int, rows: int) -> str:
        return trace_model(
            lambda: (nn.Linear(width, 3), (torch.zeros(rows, width),)), loss=loss_of
        ).fingerprint

    assert of(4, 2) == of(4, 7) != of(5, 2)


def test_two_traces_of_a_model_are_one() -> None:
    for name in ("encoder", "checkpointed"):
        assert trace_model(BUILDS[name], loss=loss_of) == trace_model(BUILDS[name], loss=loss_of)


def test_inputs_are_made_up_for_a_model_without() -> None:
    program = trace_model(lambda: nn.Sequential(nn.Linear(16, 4)), batch=3, sequence=5)
    assert program.standing_bytes == 3 * 5 * 16 * 4
    words = trace_model(lambda: nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4)), batch=3, sequence=5)
    assert words.standing_bytes == 3 * 5 * 8


def test_what_is_everybody_s_is_put_back() -> None:
    def everybody_s() -> tuple[object, ...]:
        state = np.random.get_state()
        return (
            torch.get_rng_state().tolist(),
            random.getstate(),
            str(state),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            nn.functional.scaled_dot_product_attention,
        )

    def changed() -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("cpu")
        torch.set_grad_enabled(False)

    class Changing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = super().forward(x)
            changed()
            torch.set_grad_enabled(True)
            return result

    def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        parts = Changing(2, 2), (torch.zeros(1, 2),)
        changed()
        return parts

    def leaving() -> nn.Module:
        changed()
        raise SystemExit(3)

    before = everybody_s()
    trace_model(build)
    assert everybody_s() == before
    with pytest.raises(SystemExit):
        trace_model(leaving)
    assert everybody_s() == before
    assert torch.zeros(1).device.type == "cpu"
    assert isinstance(nn.functional.scaled_dot_product_attention, types.BuiltinFunctionType)


def test_moments_follow_one_another_in_their_phases() -> None:
    program = trace_model(BUILDS["mlp"], loss=loss_of)
    phases = [phase for phase, _ in itertools.groupby(moment.phase for moment in program.moments)]
    assert phases == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.BETWEEN]
    assert sum(moment.nodes for moment in program.moments) > 0
