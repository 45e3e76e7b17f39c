"""A program from a model that is nowhere."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tierstore.errors import UsageError
from tierstore.planning import Datum, Program
from tierstore.training.activations.config.layers import Names
from tierstore.training.tracing.assumed_values import AssumedValues
from tierstore.training.tracing.attention import Questions, attention_of_the_host
from tierstore.training.tracing.built import Built, Loss, MakeOptimizer, ModelInTraining, trained_of
from tierstore.training.tracing.bundles_of import Bundles, Grouping, GroupsOf, bundles_of, fingerprint_of
from tierstore.training.tracing.places import named_errors
from tierstore.training.tracing.steps import TracedStep
from tierstore.training.tracing.surroundings import put_back

RESIDENT_PEAK = "resident_peak_bytes"
"""The fact that says how many bytes plain PyTorch holds at most."""

_USUAL = Grouping()


def trace_model(
    build: Callable[[], Built],
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    batch: int = 1,
    sequence: int | None = None,
    accumulations: int = 1,
    layers: Names = None,
    grouping: GroupsOf = _USUAL,
) -> Program:
    """Return what one step of a model does, without memory for any of it.

    The model is made and trained for one step on the meta device.  Random generators, the default dtype and
    device and what else is everybody's are put back.

    Args:
        build: is called without arguments under ``torch.device("meta")`` and returns a model, or it and its
            inputs (a tensor, values by position, or by name), or these and its optimizer or optimizers.
        loss: of a model and its inputs, which it calls; ``None``: what the model returns is it or has it as
            ``loss``, else the mean of squares is taken.
        optimizer: makes one of the parameters that are trained, where ``build`` returns none.
        batch: of inputs that are made up, as ``build`` returns none.
        sequence: their length.
        accumulations: backward passes for each step of the optimizers.
        layers: the containers of the repeated layers; ``None``: found, if it is one.
        grouping: what travels together.

    Raises:
        UsageError: ``build``, the model or the optimizer raised something: it says what, and where; or a size
            depends on values.
    """
    if accumulations < 1 or batch < 1 or (sequence is not None and sequence < 1):
        raise UsageError(
            f"batch={batch}, sequence={sequence}, accumulations={accumulations}: each has to be at least 1."
        )
    assumed = AssumedValues()
    with put_back(), torch.device("meta"):
        with named_errors(f"{_name_of(build)}()"):
            built = build()
        trained = trained_of(built, optimizer, batch, sequence)
        del built
        bundles = bundles_of(trained.model, trained.optimizers, grouping, layers)
        step = TracedStep(trained, bundles, loss, assumed)
        with torch.enable_grad(), attention_of_the_host(), Questions(assumed.values_of):
            step.run(accumulations)
    return _program(trained, bundles, step, assumed, accumulations)


def _program(
    trained: ModelInTraining,
    bundles: Bundles,
    step: TracedStep,
    assumed: AssumedValues,
    accumulations: int,
) -> Program:
    model = trained.model
    data: dict[str, Datum] = {**bundles.data, **step.state, **step.log.data}
    if not trained.optimizers:
        assumed.note("no optimizer was given: nothing is stepped, and no state is kept")
    facts = {
        "torch": str(torch.__version__),
        "model": type(model).__name__,
        "parameters": str(sum(each.numel() for each in model.parameters())),
        "layers": str(len(bundles.layers)),
        "optimizers": ", ".join(type(each).__name__ for each in trained.optimizers),
        RESIDENT_PEAK: str(step.most_bytes),
    }
    return Program(
        name=type(model).__name__,
        source="model",
        data=data,
        moments=step.log.moments(),
        units=tuple(step.units),
        standing_bytes=step.standing_bytes,
        accumulations=accumulations,
        facts=facts,
        assumptions=assumed.sentences,
        fingerprint=fingerprint_of(model),
    )


def _name_of(build: Callable[..., object]) -> str:
    return getattr(build, "__qualname__", type(build).__name__)
