"""What a forward has together: what `offload` lets open runs, and what is too little is refused before."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.nn.utils import parametrize

from tests.training.twins import (
    LAYOUTS,
    Optimizer,
    Trial,
    assert_equal_lists,
    assert_equal_models,
)
from tierstore.errors import CapacityError
from tierstore.training import Offload, offload
from tierstore.training.modules.forward_needs import called_by_programs
from tierstore.units import KIB, align_up

_PAGE_BYTES = 4 * KIB
WIDTH = 64
Made = tuple[nn.Module, Sequence[Optimizer]]

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.trace"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

# ---------------------------------------------------------------------- modules that need several bundles


class Around(nn.Module):
    """Has parameters of its own, before and after the module inside it."""

    def __init__(self, rows: int, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.table = nn.Parameter(torch.randn(rows, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, WIDTH)``."""
        x = x + 0.1 * self.table.sum(0)
        return cast("Tensor", self.inner(x)) * torch.tanh(self.table[0])


class Mixed(nn.Module):
    """Its own parameters are of two optimizers and of none, frozen and trained: bundles of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(4))
        self.c.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, WIDTH)``."""
        return torch.tanh(x @ self.a + x @ self.b) + torch.tanh(x @ self.c + x @ self.d)


class Attention(nn.Module):
    """Of keys and values of other widths: three weights in one bundle, and the projection's in another."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True, kdim=keys, vdim=keys)
        self.keys = keys

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, WIDTH)``."""
        others = F.pad(x, (0, self.keys - WIDTH))
        out, _ = self.attention(x[:, None], others[:, None], others[:, None])
        return cast("Tensor", out[:, 0])


class Doubling(nn.Module):
    """A parametrization that has a weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, weight: Tensor) -> Tensor:
        """Return another weight."""
        return weight + 0.1 * self.scale


class Encoder(nn.Module):
    """PyTorch's encoder, which in evaluation looks at all of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 96, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, WIDTH)``."""
        rows = torch.stack([x, x + 1, x - 1], dim=1)
        mask = torch.tensor([[False, False, True]]).expand(len(x), 3)
        return cast("Tensor", self.encoder(rows, src_key_padding_mask=mask)[:, 0])


def linear(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))


def shared_in_two() -> nn.Module:
    inner = linear(96)
    return nn.Sequential(Around(8, inner), Around(128, inner))


def tied() -> nn.Module:
    first, last = nn.Linear(WIDTH, WIDTH), Around(24, nn.Linear(WIDTH, WIDTH))
    cast("nn.Linear", last.inner).weight = first.weight
    return nn.Sequential(first, last)


def with_a_buffer() -> nn.Module:
    model = Around(32, linear(128))
    model.register_buffer("held", torch.randn(40, WIDTH))
    return model


def parametrised() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Doubling())
    return nn.Sequential(layer, nn.Tanh())


def in_a_list() -> nn.Module:
    class Listed(Around):
        def forward(self, x: Tensor) -> Tensor:
            x = x + 0.1 * self.table.sum(0)
            for each in cast("nn.ModuleList", self.inner):
                x = torch.tanh(each(x))
            return x

    return Listed(16, nn.ModuleList([linear(72), Around(9, linear(80)), linear()]))


def traced() -> nn.Module:
    return nn.Sequential(torch.jit.trace(linear(80), torch.randn(2, WIDTH), check_trace=False), nn.Tanh())


KINDS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.Sequential(Attention(96), nn.Linear(WIDTH, WIDTH)),
    "several of one module": lambda: nn.Sequential(Mixed(), nn.Linear(WIDTH, WIDTH)),
    "around one": lambda: Around(100, linear()),
    "around three": lambda: Around(3, Around(50, Around(130, linear(90)))),
    "of large and small": lambda: Around(300, nn.Sequential(Around(1, nn.Linear(WIDTH, WIDTH)), linear(320))),
    "shared in two": shared_in_two,
    "tied": tied,
    "with a buffer": with_a_buffer,
    "parametrised": parametrised,
    "in a list": in_a_list,
    "traced": traced,
    "encoder": Encoder,
}


def adam_and_sgd(model: nn.Module) -> Sequence[Optimizer]:
    """Return two optimizers, each of every other trained parameter."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return [torch.optim.SGD(trained[::2], lr=0.01), torch.optim.AdamW(trained[1::2], lr=0.01)]


TRAINERS: dict[str, Callable[[nn.Module], Sequence[Optimizer]]] = {
    "nobody": lambda _: [],
    "one": lambda model: [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)],
    "two": adam_and_sgd,
}


# ---------------------------------------------------------------------- the grid


def loop(trial: Trial) -> None:
    """Evaluate and train, in turns."""
    torch.manual_seed(2)
    for _ in range(3):
        trial.model.eval()
        with torch.no_grad():
            trial.log(trial.model(torch.randn(4, WIDTH)))
        trial.model.train()
        if not trial.optimizers:
            continue
        for _ in range(2):
            loss = trial.model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            trial.log(loss)
        for optimizer in trial.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def build(make: Callable[[], nn.Module], trainer: str) -> Made:
    torch.manual_seed(0)
    model = make()
    if trainer == "nobody":
        model.requires_grad_(requires_grad=False)
    return model, TRAINERS[trainer](model)


HOST = {"device": "cpu", "offload_disk_size": "64MB", "buffer_min_size": 0}
DEVICE = {**LAYOUTS["three"], "offload_cpu_size": "8MB", "buffer_min_size": 0}
LIMITS = {"host": (HOST, "offload_cpu_size"), "device": (DEVICE, "max_device_memory")}


def opened(made: Made, tier: str, nbytes: int, path: Path) -> Offload:
    config, limit = LIMITS[tier]
    more = {limit: nbytes, "offload_path": str(path / str(nbytes))}
    return offload(made[0], list(made[1]), {**config, **more})


def refusal_of(made: Made, tier: str, nbytes: int, path: Path) -> CapacityError | None:
    """Open a run and close it, or return why it could not be."""
    try:
        opened(made, tier, nbytes, path).close()
    except CapacityError as error:
        return error
    return None


def least_bytes(make: Callable[[], Made], tier: str, path: Path) -> int:
    """Return what is the least that opens: what is refused says how much it needs.

    What travels together depends on how much there is, and with it what is needed.
    """
    made, nbytes = make(), 512
    while (refusal := refusal_of(made, tier, nbytes, path)) is not None:
        assert re.search(r"cannot be (trained|run) (in host memory|on the device)", str(refusal))
        assert refusal.needed_bytes is not None
        assert refusal.needed_bytes > nbytes
        nbytes = refusal.needed_bytes
    while refusal_of(made, tier, nbytes - 512, path) is None:
        nbytes -= 512
    return nbytes


def assert_runs(make: Callable[[], Made], tier: str, nbytes: int, path: Path) -> None:
    """Run the loop plain, and in so many bytes; compare."""
    plain = Trial(*make())
    loop(plain)
    made = make()
    with opened(made, tier, nbytes, path) as run:
        ours = Trial(*made, run)
        loop(ours)
        run.store.check()
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)


every_kind = pytest.mark.parametrize("kind", KINDS)
every_trainer = pytest.mark.parametrize("trainer", TRAINERS)


@every_kind
@every_trainer
def test_the_least_that_opens_in_host_memory_runs(kind: str, trainer: str, tmp_path: Path) -> None:
    def make() -> Made:
        return build(KINDS[kind], trainer)

    assert_runs(make, "host", least_bytes(make, "host", tmp_path), tmp_path)


_BESIDE_BYTES = 192 * KIB
"""More than what these loops have on a device beside the store: fresh gradients, most of it."""


@every_kind
def test_the_least_that_opens_on_a_device_runs_beside_its_activations(kind: str, tmp_path: Path) -> None:
    def make() -> Made:
        return build(KINDS[kind], "two")

    assert_runs(make, "device", least_bytes(make, "device", tmp_path) + _BESIDE_BYTES, tmp_path)


def nested(seed: int) -> nn.Module:
    """Return modules inside modules, of any sizes."""
    chance = random.Random(seed)

    def made(depth: int) -> nn.Module:
        kinds: list[Callable[[], nn.Module]] = [
            lambda: linear(chance.choice((1, 9, 40, 64, 200, 257, 300))),
            lambda: Around(chance.choice((1, 2, 7, 30, 64, 250, 256, 300)), made(depth + 1)),
            lambda: nn.Sequential(*(made(depth + 1) for _ in range(chance.randint(1, 3)))),
            lambda: Attention(chance.choice((64, 65, 96, 200))),
        ]
        return chance.choice(kinds if depth < 4 else kinds[:1])()

    return Around(chance.choice((1, 17, 100, 256)), made(0))


@pytest.mark.parametrize("seed", range(8))
def test_the_least_that_opens_runs_whatever_is_inside_whatever(seed: int, tmp_path: Path) -> None:
    def make() -> Made:
        return build(lambda: nested(seed), random.Random(seed).choice([*TRAINERS]))

    for tier, beside_bytes in (("host", 0), ("device", _BESIDE_BYTES)):
        nbytes = least_bytes(make, tier, tmp_path / tier)
        assert_runs(make, tier, nbytes + beside_bytes, tmp_path / tier)


# ---------------------------------------------------------------------- and no more is asked for


def test_no_more_is_asked_for_than_there_is_together(tmp_path: Path) -> None:
    """Of large bundles not a byte, of small ones the pages that they may lie in."""
    model = Around(300, nn.Sequential(Around(1, nn.Linear(WIDTH, WIDTH)), linear(320)))
    outer, inner = 300 * WIDTH * 4, 320 * (WIDTH + 1) * 4
    small_bytes = WIDTH * 4
    wanted = {"device": outer + inner, "host": align_up(outer, _PAGE_BYTES) + align_up(inner, _PAGE_BYTES)}
    for tier, nbytes in wanted.items():
        with pytest.raises(CapacityError) as refusal:
            opened((model, []), tier, 2 * KIB, tmp_path)
        assert refusal.value.needed_bytes is not None
        assert nbytes <= refusal.value.needed_bytes <= nbytes + align_up(small_bytes, 1024)


def test_a_module_s_own_bundles_are_asked_for_by_the_byte(tmp_path: Path) -> None:
    model = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    own_bytes = sum(each.nbytes for each in model.parameters())
    text = r"'MultiheadAttention' cannot be run in host memory: its forward needs the bundles of "
    text += (
        r"'in_proj_weight', 'out_proj.weight', which take 65.5 KiB together, and offload_cpu_size is 52.0 KiB"
    )
    with pytest.raises(CapacityError, match=text) as refusal:
        opened((model, []), "host", 52 * KIB, tmp_path)
    assert refusal.value.needed_bytes == own_bytes + 512  # rounded up to 512 each
    with opened((model, []), "host", own_bytes + 512, tmp_path), torch.no_grad():
        x = torch.randn(2, 5, WIDTH)
        model(x, x, x)


def test_what_is_pinned_is_there_once(tmp_path: Path) -> None:
    model = Around(64, nn.Sequential(Around(40, nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)))
    needed = []
    for pinned in ([], ["table"], ["table", "inner.0.table"]):
        with pytest.raises(CapacityError) as refusal:
            offload(model, None, {**DEVICE, "max_device_memory": 2 * KIB}, pinned=pinned)
        needed.append(refusal.value.needed_bytes)
    assert needed[0] == needed[1] == needed[2]


def test_a_list_of_modules_keeps_nothing_while_they_run(tmp_path: Path) -> None:
    """Nobody calls it, so that what it has is not there beside what is in it."""
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
    model.register_parameter("table", nn.Parameter(torch.randn(100, WIDTH)))
    with opened((model, []), "host", 100 * WIDTH * 4, tmp_path), torch.no_grad():
        model[0](torch.randn(2, WIDTH))


# ---------------------------------------------------------------------- what programs call


def _own(model: nn.Module, *but: nn.Module) -> dict[nn.Module, tuple[list[nn.Parameter], list[nn.Parameter]]]:
    """Return the parameters that each module has itself, but for some."""
    found = {each: [] if each in but else list(each.parameters(recurse=False)) for each in model.modules()}
    return {each: (own, []) for each, own in found.items()}


def test_a_part_that_needs_nothing_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert called_by_programs(model, _own(model, model[0])) == {model, model[1], *model[1].children()}


def test_the_whole_model_and_its_parts_may_be_called() -> None:
    inner = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    model = nn.Sequential(nn.ModuleList([inner]), nn.Tanh(), nn.Sequential(nn.Sequential(nn.Linear(2, 2))))
    called = called_by_programs(model, _own(model))
    assert called == {model, inner["a"], inner["b"], model[2]}
    wrapped = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapper = nn.Sequential(wrapped)
    assert called_by_programs(wrapper, _own(wrapper)) == {wrapper, wrapped, *wrapped}
