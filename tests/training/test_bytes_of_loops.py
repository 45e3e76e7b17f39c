"""How many bytes loops of all kinds move under any quota: what has to move, and room for a few bundles.

What has to move in a step, each way, is what exceeds the quota when all of it has to exist: parameters,
gradients and optimizer state, between backward and step.  Frozen parameters are read twice, in forward and in
backward, and never written.  Beside what stays there is room for two and a half bundles, which move as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.pairs import covering
from tests.training.twins import Optimizer, config_of, is_on_accelerator, same
from tierstore.training import offload
from tierstore.units import KIB, MIB

pytestmark = pytest.mark.skipif(is_on_accelerator, reason="its allocator's bytes are the program's, too")

DIM, LAYERS = 128, 16
LAYER_BYTES = 4 * DIM * DIM
WARM_UP, STEPS = 6, 2
BESIDE = 2.5
"""How many bundles find room beside those that stay; see `tierstore.planning.residents`."""

TIMES_LEAST = 1.15
PROGRAM_BYTES = 64 * KIB
"""What activations take on a device, beside its quota for the rest."""

Step = Callable[[int], Sequence[Tensor]]
Build = Callable[[], "Loop"]


@dataclass
class Loop:
    """What is run again and again.

    Attributes:
        model: with the parameters that are counted.
        optimizers: that step in it; none: nothing is trained.
        step: does it once, the so manieth time; returns what has to be equal.
        states: how many tensors an optimizer keeps of each trained parameter.
        usual_bytes: of the parameters of most bundles.
        more_passes: how often parameters are read in a step beside forward and backward.
        unlike_bytes: that one use of the model takes more of a device than another; room is for the most.
    """

    model: nn.Module
    optimizers: list[Optimizer]
    step: Step
    states: int = 2
    usual_bytes: int = LAYER_BYTES
    more_passes: float = 0
    unlike_bytes: int = 0

    @property
    def trained_bytes(self) -> int:
        """Of parameters, gradients and state together."""
        nbytes = sum(each.nbytes for each in self.model.parameters() if each.requires_grad)
        return nbytes * (2 + self.states) if self.optimizers else 0

    @property
    def frozen_bytes(self) -> int:
        """Of parameters that nobody changes."""
        is_all = not self.optimizers
        return sum(each.nbytes for each in self.model.parameters() if is_all or not each.requires_grad)

    @property
    def room_bytes(self) -> int:
        """Of what comes and goes beside what stays."""
        copies = 2 + self.states if self.optimizers else 1
        return int(BESIDE * self.usual_bytes * copies)


def _batch(number: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(number))


def _layers(count: int = LAYERS) -> nn.Sequential:
    return nn.Sequential(*itertools.chain.from_iterable((_linear(), nn.Tanh()) for _ in range(count)))


def _linear() -> nn.Linear:
    return nn.Linear(DIM, DIM, bias=False)


def _adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam([each for each in model.parameters() if each.requires_grad], 1e-3)


def _loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs).square().mean()
    loss.backward()
    return loss


# ---------------------------------------------------------------------- loops


def _usual() -> Loop:
    return _trained(_layers(), _adam)


def _without_state() -> Loop:
    return _trained(_layers(), lambda model: torch.optim.SGD(model.parameters(), 0.01), states=0)


def _trained(
    model: nn.Module,
    make: Callable[[nn.Module], Optimizer] = _adam,
    states: int = 2,
    inputs: Callable[[int], Tensor] = _batch,
    more_passes: float = 0,
) -> Loop:
    optimizer = make(model)

    def step(number: int) -> Sequence[Tensor]:
        loss = _loss_of(model, inputs(number))
        optimizer.step()
        optimizer.zero_grad()
        return [loss]

    return Loop(model, [optimizer], step, states, more_passes=more_passes)


def _accumulated() -> Loop:
    model = _layers()
    optimizer = _adam(model)

    def step(number: int) -> Sequence[Tensor]:
        losses = [_loss_of(model, _batch(4 * number + each)) for each in range(4)]
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return Loop(model, [optimizer], step)


def _clipped() -> Loop:
    model = _layers()
    optimizer = _adam(model)

    def step(number: int) -> Sequence[Tensor]:
        loss = _loss_of(model, _batch(number))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.001)
        optimizer.step()
        optimizer.zero_grad()
        return [loss, norm]

    return Loop(model, [optimizer], step)


def _unscaled() -> Loop:
    model = _layers()
    optimizer = _adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(number: int) -> Sequence[Tensor]:
        loss = model(_batch(number)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.001)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return [loss]

    return Loop(model, [optimizer], step)


def _zeroed_in_place() -> Loop:
    model = _layers()
    optimizer = _adam(model)

    def step(number: int) -> Sequence[Tensor]:
        loss = _loss_of(model, _batch(number))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return [loss]

    return Loop(model, [optimizer], step)


def _with_a_closure() -> Loop:
    model = _layers()
    optimizer = _adam(model)

    def step(number: int) -> Sequence[Tensor]:
        losses: list[Tensor] = []

        def closure() -> float:
            optimizer.zero_grad()
            losses.append(_loss_of(model, _batch(number)))
            return losses[-1].item()

        optimizer.step(closure)
        return losses

    return Loop(model, [optimizer], step)


def _evaluated_between() -> Loop:
    loop = _trained(_layers(), more_passes=1)
    train = loop.step

    def step(number: int) -> Sequence[Tensor]:
        losses = train(number)
        if number % 2:
            with torch.no_grad():
                losses = [*losses, *(loop.model(_batch(1000 + each)) for each in range(2))]
        return losses

    loop.step = step
    return loop


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_linear() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for one, other in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = checkpoint(_two, one, other, x, use_reentrant=False)
        return x


def _two(one: nn.Module, other: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = other(one(x).tanh()).tanh()
    return found


class _Adapted(nn.Module):
    """A frozen layer with a small one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = _linear().requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(DIM, 4, bias=False), nn.Linear(4, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.up(self.down(x))
        return found.tanh()


class _WithTable(nn.Module):
    """An embedding, or a head, as large as all the rest."""

    def __init__(self, rows: int, *, is_head: bool) -> None:
        super().__init__()
        self.table = nn.Linear(DIM, rows, bias=False) if is_head else nn.Embedding(rows, DIM)
        self.layers = _layers()
        self.is_head = is_head

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.table(self.layers(x)) if self.is_head else self.layers(self.table(x))
        return found


def _tokens(number: int) -> Tensor:
    return torch.randint(0, LAYERS * DIM, (4,), generator=torch.Generator().manual_seed(number))


class _Both(nn.Module):
    """A generator and a discriminator; nobody calls the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.judged = _layers(LAYERS // 2), _layers(LAYERS // 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.judged(self.made(x))
        return found


def _adversaries() -> Loop:
    model = _Both()
    makes, judges = _adam(model.made), _adam(model.judged)

    def step(number: int) -> Sequence[Tensor]:
        with torch.no_grad():
            made = model.made(_batch(number))
        judgement = model.judged(_batch(number + 500)).mean() - model.judged(made).mean()
        judgement.backward()
        judges.step()
        judges.zero_grad()
        loss = model.judged(model.made(_batch(number))).mean()
        loss.backward()
        makes.step()
        makes.zero_grad()
        judges.zero_grad()
        return [judgement, loss]

    return Loop(model, [makes, judges], step, unlike_bytes=LAYER_BYTES)  # the judges' second pass


def _inferred() -> Loop:
    model = _layers()

    def step(number: int) -> Sequence[Tensor]:
        with torch.no_grad():
            return [model(_batch(number, 4 + number % 3))]

    return Loop(model, [], step)


def _decoded() -> Loop:
    """An encoder that runs once, and a decoder that runs often; nobody calls the whole."""
    model = _Both()

    def step(number: int) -> Sequence[Tensor]:
        with torch.no_grad():
            made = model.made(_batch(number))
            return [model.judged(made + _batch(each)) for each in range(3)]

    return Loop(model, [], step)


def _inferred_layer_by_layer() -> Loop:
    model = _layers()

    def step(number: int) -> Sequence[Tensor]:
        x = _batch(number)
        with torch.no_grad():
            for layer in model:
                x = layer(x)
        return [x]

    return Loop(model, [], step)


def _layer_by_layer() -> Loop:
    model = _layers()
    optimizer = _adam(model)

    def step(number: int) -> Sequence[Tensor]:
        x = _batch(number)
        for layer in model:
            x = layer(x)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss]

    return Loop(model, [optimizer], step)


EQUAL: dict[str, Build] = {
    "usual": _usual,
    "without state": _without_state,
    "accumulated": _accumulated,
    "clipped": _clipped,
    "unscaled": _unscaled,
    "zeroed in place": _zeroed_in_place,
    "with a closure": _with_a_closure,
    "evaluated between": _evaluated_between,
    "checkpointed": lambda: _trained(_Checkpointed()),
    "adapters": lambda: _trained(nn.Sequential(*(_Adapted() for _ in range(LAYERS)))),
    "two models": _adversaries,
    "layer by layer": _layer_by_layer,
    "inference": _inferred,
    "inference, layer by layer": _inferred_layer_by_layer,
    "encoder and decoder": _decoded,
}
UNEQUAL: dict[str, Build] = {
    "a large embedding": lambda: _trained(_WithTable(LAYERS * DIM, is_head=False), inputs=_tokens),
    "a large head": lambda: _trained(_WithTable(LAYERS * DIM, is_head=True)),
}
LOOPS = EQUAL | UNEQUAL
SHARES = (0.7, 0.85, 1.1)


def _is_there(row: tuple[object, ...]) -> bool:
    """An optimizer's temporary values of one large parameter take a third of such a device."""
    return row[0] in EQUAL or row[2] == "disk"


@pytest.mark.parametrize(
    ("kind", "share", "layout"), covering(LOOPS, SHARES, ("disk", "device"), is_there=_is_there)
)
def test_a_loop_moves_what_has_to_and_a_few_bundles(
    kind: str, share: float, layout: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = LOOPS[kind]()
    expected = [plain.step(number) for number in range(WARM_UP + STEPS)]
    torch.manual_seed(0)
    ours = LOOPS[kind]()
    need_bytes = ours.trained_bytes + ours.frozen_bytes
    excess_bytes = max(0, need_bytes - int(share * need_bytes))
    read_bytes, written_bytes = _moved(ours, layout, int(share * need_bytes), tmp_path, expected)
    room_bytes = ours.room_bytes + (ours.unlike_bytes if layout == "device" else 0) if excess_bytes else 0
    passes = 1 + ours.more_passes + bool(ours.frozen_bytes and ours.optimizers)
    assert read_bytes <= passes * (TIMES_LEAST * excess_bytes + room_bytes)
    can_change_bytes = max(0, ours.trained_bytes + room_bytes - int(share * need_bytes))
    most_written = TIMES_LEAST * excess_bytes + room_bytes if ours.optimizers else 0
    assert written_bytes <= (most_written if not ours.frozen_bytes else min(most_written, can_change_bytes))


def _moved(
    loop: Loop, layout: str, quota_bytes: int, path: Path, expected: Sequence[Sequence[Tensor]]
) -> tuple[float, float]:
    """Run a loop; return the bytes that went up and down in a step when it has settled."""
    lower, upper = ("disk", "host") if layout == "disk" else ("host", "device")
    more: dict[str, object] = {"offload_cpu_size": quota_bytes, "offload_disk_size": 64 * MIB}
    if layout == "device":
        more = {"max_device_memory": quota_bytes + PROGRAM_BYTES, "offload_cpu_size": 64 * MIB}
    config = config_of(layout, path, {**more, "device_options": {}})
    moved: list[tuple[int, int]] = []
    with offload(loop.model, loop.optimizers or None, config) as run:
        for number, each in enumerate(expected):
            found = loop.step(number)
            assert all(itertools.starmap(same, zip(found, each, strict=True)))
            traffic = run.store.stats().traffic
            ways = [(lower, upper), (upper, lower)]
            up, down = (traffic[way].nbytes if way in traffic else 0 for way in ways)
            moved.append((up, down))
        run.store.check()
    before, after = moved[-1 - STEPS], moved[-1]
    return (after[0] - before[0]) / STEPS, (after[1] - before[1]) / STEPS
