"""What processes do with models that ``fully_shard`` has sharded: each twice, with tiers and without."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

from tests.sampling import IS_CI, tried
from tests.training.rank_collectives import Block
from tests.training.rank_meshes import MESHES
from tests.training.twins import LATE_AND_OVERWRITTEN
from tierstore.errors import ConfigError, UsageError
from tierstore.training import InitialValues, Offload, offload

TIERS: Mapping[str, Mapping[str, object]] = {
    "host": {"device": "cpu", "offload_cpu_size": "4MB", "offload_disk_size": 0},
    "disk": {"device": "cpu", "offload_cpu_size": "96KB", "offload_disk_size": "16MB"},
    "three": {
        "device": "emulated",
        "max_device_memory": "480KB",
        "offload_cpu_size": "96KB",
        "offload_disk_size": "16MB",
        "device_options": LATE_AND_OVERWRITTEN,
    },
}
"""Of one process: with their state and gradients, the shards of two are some 350 KB each."""

Losses = list[float]
WIDTH = 64


class Deep(nn.Module):
    """Layers whose rows no number of processes divides, between a projection and another one."""

    def __init__(self, more: int = 3) -> None:
        super().__init__()
        self.into = nn.Linear(7, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, more) for _ in range(5))
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.out(x)
        return y


@dataclass(frozen=True)
class Case:
    """What is sharded how, and how it is trained.

    Attributes:
        optimizer: made of the sharded model's parameters.
        tiers: where shards live.
        apart: which modules are groups of their own: "layers", "model" alone, or "pairs" of layers.
        reshards: what ``reshard_after_forward`` is.
        precision: of the computation and of the sums.
        passes: of which all but the last are not synchronised.
        max_norm: to which gradients are clipped; ``None``: they are not.
        frozen: whether the first layer is.
        prefetches: whether each layer gathers the next one ahead.
        is_meta: whether the model is built on the meta device.
        mesh: over what it is sharded: see `MESHES`.
    """

    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = torch.optim.Adam
    tiers: str = "disk"
    apart: str = "layers"
    reshards: bool | int | None = None
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    passes: int = 1
    max_norm: float | None = None
    frozen: bool = False
    prefetches: bool = False
    is_meta: bool = False
    mesh: str = "line"


@dataclass
class Life:
    """A sharded model that is trained.

    Attributes:
        model: the whole.
        optimizer: of it.
        losses: and norms, so far.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    losses: Losses = field(default_factory=list)


def build(case: Case, processes: int) -> Life:
    """Return a sharded model with its optimizer."""
    torch.manual_seed(0)
    with torch.device("meta" if case.is_meta else "cpu"):
        model = new_model(case)
    life = as_sharded(model, case, processes)
    if case.is_meta:
        give_values(model)
    return life


def new_model(case: Case) -> nn.Module:
    """Return the model of a case as it is before it is sharded."""
    return Deep(6 if case.mesh == "tensor parallel" else 3)  # which two have to divide


def as_sharded(model: nn.Module, case: Case, processes: int) -> Life:
    """Return a model with its optimizer, after it was sharded."""
    layers: Any = model.get_submodule("layers")
    if case.frozen:
        layers[0].requires_grad_(requires_grad=False)
    how = MESHES[case.mesh](model, processes)
    how |= {"reshard_after_forward": case.reshards, "mp_policy": case.precision}
    parts: dict[str, list[Any]] = {"layers": [*layers], "pairs": [[*layers[:2]]], "model": []}
    for part in (*parts[case.apart], model):
        fully_shard(part, **how)
    if case.prefetches:
        prefetch(model)
    return Life(model, case.optimizer(model.parameters()))


def give_values(model: nn.Module) -> None:
    """Give a model on the meta device memory and values."""
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=generator) / 8
        with torch.no_grad():
            parameter.copy_(distribute_as(parameter, whole))


def prefetch(model: Any) -> None:  # noqa: ANN401 - its layers are sharded
    """Let each layer gather its neighbour ahead, in either direction."""
    for layer, following in zip(model.layers[:-1], model.layers[1:], strict=True):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])


def distribute_as(like: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return what every process has the whole of, sharded as another tensor."""
    assert isinstance(like, DTensor)
    return distribute_tensor(whole, like.device_mesh, like.placements)


def train(life: Life, case: Case, steps: int, rank: int, begin: int = 0) -> None:
    """Make some steps, with other inputs in each process and step."""
    for step in range(begin, begin + steps):
        data_rank = rank // 2 if case.mesh == "tensor parallel" else rank
        generator = torch.Generator().manual_seed(100 * step + data_rank)
        for number in range(case.passes):
            life.model.set_requires_gradient_sync(number == case.passes - 1)
            loss = life.model(torch.randn(4, 7, generator=generator)).float().square().mean()
            loss.backward()
            life.losses.append(float(loss.detach()))
        if case.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(life.model.parameters(), case.max_norm)
            assert isinstance(norm, DTensor)
            life.losses.append(float(norm.full_tensor()))
        life.optimizer.step()
        life.optimizer.zero_grad()


def local_bytes(life: Life) -> list[tuple[str, bytes]]:
    """Return every shard, of parameters and of state, as bytes."""
    found = [(name, raw(each)) for name, each in life.model.named_parameters()]
    for number, parameter in enumerate(life.model.parameters()):
        for entry, value in life.optimizer.state.get(parameter, {}).items():
            found.append((f"{number} {entry}", raw(value)))
    return found


def raw(value: torch.Tensor) -> bytes:
    """Return a tensor's bytes, or those of its local one."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def differences(one: Life, other: Life) -> list[str]:
    """Return what differs between two lives: losses, parameters and state."""
    found = [] if one.losses == other.losses else [f"losses {one.losses} and {other.losses}"]
    mine, theirs = local_bytes(one), local_bytes(other)
    found += [name for (name, a), (_, b) in zip(mine, theirs, strict=True) if a != b]
    return found + ([] if [n for n, _ in mine] == [n for n, _ in theirs] else ["other names"])


@contextmanager
def offloaded(life: Life, case: Case, folder: Path, **more: Any) -> Iterator[Offload]:  # noqa: ANN401
    """Offload a life, inside the context; quotas are those of a machine."""
    processes = distributed.get_world_size()
    config: dict[str, object] = dict(TIERS[case.tiers])
    for name in ("offload_cpu_size", "offload_disk_size"):
        size = str(config[name])
        config[name] = 0 if size == "0" else f"{int(size[:-2]) * processes}{size[-2:]}"
    config |= {"offload_path": str(folder / "run"), **more.pop("config", {})}
    sections = more.pop("sections", None)
    document = config if sections is None else {"offload_config": config, **sections}
    with offload(life.model, life.optimizer, document, **more) as run:
        yield run


STEPS = 4


def compared(case: Case, rank: int, processes: int, folder: Path) -> Mapping[str, object]:
    """Train a case without tiers and with them; return what differs, and what the tiers did."""
    plain, life = build(case, processes), build(case, processes)
    train(plain, case, STEPS, rank)
    whole_bytes = sum(len(each) for _, each in local_bytes(plain))
    with offloaded(life, case, folder) as run:
        train(life, case, STEPS, rank)
        stats = run.stats().store
        assert stats is not None
        away = [p for p in life.model.parameters() if type(p) is DTensor]
    found = differences(plain, life)
    plain.losses.clear()
    life.losses.clear()
    train(plain, case, 1, rank, STEPS)
    train(life, case, 1, rank, STEPS)  # ordinary again
    fastest = next(iter(stats.tiers))
    return {
        "differs": found + differences(plain, life),
        "here": len(away),
        "peak": stats.tiers[fastest].peak_charged_bytes,
        "whole": whole_bytes,
        "tiers": case.tiers,
        "to disk": sum(t.nbytes for (_, to), t in stats.traffic.items() if to == "disk"),
        "from disk": sum(t.nbytes for (source, _), t in stats.traffic.items() if source == "disk"),
    }


def _bf16() -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


CASES: Mapping[str, Case] = {
    "plain": Case(),
    "host": Case(tiers="host"),
    "three tiers": Case(tiers="three"),
    "one group": Case(apart="model", tiers="three"),
    "groups of several modules": Case(apart="pairs"),
    "resharded after forward": Case(reshards=True, tiers="three"),
    "kept after forward": Case(reshards=False, tiers="three"),
    "accumulated": Case(passes=3, tiers="three"),
    "clipped": Case(max_norm=0.05, tiers="three"),
    "clipped and accumulated": Case(max_norm=0.05, passes=2),
    "mixed precision": Case(precision=_bf16(), tiers="three"),
    "mixed precision, accumulated": Case(precision=_bf16(), passes=2),
    "half everywhere": Case(precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "frozen": Case(frozen=True, tiers="three"),
    "prefetched by FSDP": Case(prefetches=True, tiers="three"),
    "meta": Case(is_meta=True),
    "momentum": Case(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    "no momentum": Case(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), tiers="three"),
    "amsgrad": Case(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True)),
    "foreach": Case(optimizer=lambda p: torch.optim.AdamW(p, foreach=True), tiers="three"),
    "fused": Case(optimizer=lambda p: torch.optim.AdamW(p, fused=True)),
    "rmsprop": Case(optimizer=lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True)),
}


OF_TWO = tried(CASES, always=1, of=16)
CASES_OF_FOUR: Mapping[str, Case] = {
    **{name: CASES[name] for name in ("three tiers", "clipped and accumulated", "mixed precision")},
    "resharded to two": Case(reshards=2, tiers="three"),
    "columns": Case(mesh="columns", tiers="three", passes=2),
    "replicas": Case(mesh="replicas", max_norm=0.05, passes=2),
    "replicas, resharded": Case(mesh="replicas", reshards=True, precision=_bf16(), tiers="three"),
    "tensor parallel": Case(mesh="tensor parallel", tiers="three"),
    "tensor parallel, clipped": Case(mesh="tensor parallel", max_norm=0.05, passes=2),
    "tensor parallel, mixed": Case(mesh="tensor parallel", precision=_bf16(), tiers="three"),
    "tensor parallel, fused": Case(
        mesh="tensor parallel", optimizer=lambda p: torch.optim.AdamW(p, fused=True)
    ),
    "tensor parallel, foreach": Case(
        mesh="tensor parallel", optimizer=lambda p: torch.optim.AdamW(p, foreach=True), frozen=True
    ),
}
OF_FOUR = tried(CASES_OF_FOUR, always=1, of=12)
OF_EIGHT = ("three tiers", "clipped and accumulated", "mixed precision", "resharded to two")


def shards(rank: int, processes: int, folder: Path) -> object:
    """Every case; of four processes, of which one has no row of the last layer, those that know of it."""
    names = {2: OF_TWO, 4: OF_FOUR}.get(processes, OF_EIGHT)
    cases = {**CASES, **CASES_OF_FOUR}
    found = {}
    for name in names:
        (place := folder / name.replace(" ", "-")).mkdir(exist_ok=True)
        found[name] = compared(cases[name], rank, processes, place)
    return found


# ---------------------------------------------------------------------- what users do with them


def shards_seen(rank: int, processes: int, folder: Path, mesh: str = "line") -> Mapping[str, object]:
    """What is read and written of a model in the midst of training, offloaded and not."""
    case = replace(CASES["clipped"], tiers="disk", mesh=mesh)
    lives = build(case, processes), build(case, processes)
    found: list[object] = []
    with offloaded(lives[1], case, folder) as run:
        for life in lives:
            train(life, case, 1, rank)
            loss = life.model(torch.ones(2, 7)).sum()
            loss.backward()
            found.append(_seen(life))
        found.append(len([each for each in lives[1].model.parameters() if type(each) is DTensor]))
        run.suspend(to="disk")
        run.resume()
        for life in lives:
            life.optimizer.step()
            life.optimizer.zero_grad(set_to_none=False)
            train(life, case, 1, rank, 1)
    return {"seen": found[0] == found[1], "here": found[2], "differs": differences(*lives)}


def _seen(life: Life) -> list[object]:
    """Return what a program may look at, and change what it may change."""
    parameters = dict(life.model.named_parameters())
    weight, bias = parameters["layers.1.wide.weight"], parameters["out.bias"]
    with torch.no_grad():
        weight.mul_(1.5)
        bias.to_local().add_(0.25)
    assert isinstance(weight.grad, DTensor)
    weight.grad.mul_(2)
    copied = copy.deepcopy(life.model.state_dict()["into.weight"])
    pickled = pickle.loads(pickle.dumps(life.model.state_dict()["into.bias"]))
    state = life.model.state_dict()
    state["into.weight"].to_local().mul_(0.5)
    state["layers.0.back.bias"].zero_()
    life.optimizer.load_state_dict(life.optimizer.state_dict())
    life.model.load_state_dict({**state, "out.weight": state["out.weight"] * 2})
    return [
        weight.full_tensor().tolist(),
        weight.grad.full_tensor().tolist(),
        float((weight * 2).sum().full_tensor().detach()),
        [
            list(state),
            [tuple(each.shape) for each in state.values()],
            weight.is_contiguous(),
            str(weight.dtype),
        ],
        copied.full_tensor().tolist(),
        pickled.full_tensor().tolist(),
        [each.full_tensor().tolist() for each in state.values()],
        [isinstance(each, DTensor) and not each.requires_grad for each in state.values()],
        [
            raw(value).hex()
            for entries in life.optimizer.state_dict()["state"].values()
            for value in entries.values()
        ],
    ]


# ---------------------------------------------------------------------- what is refused, and what ends


def said_by(act: Callable[[], object]) -> str:
    """Return what is said where something is refused."""
    try:
        act()
    except (UsageError, ConfigError) as error:
        return str(error)
    return "not refused"


def shards_refused(rank: int, processes: int, folder: Path) -> object:
    """What is refused, by what it is; all processes say it before they meet, and change nothing."""
    found: dict[str, str] = {}
    usual = {**TIERS["host"], "offload_path": str(folder / "run")}

    def attempt(name: str, model: nn.Module, optimizer: Any = None, **more: Any) -> None:  # noqa: ANN401
        config = {**usual, **more.pop("config", {})}
        before = [id(each) for each in model.parameters()]
        found[name] = said_by(lambda: offload(model, optimizer, config, **more).close())
        if [id(each) for each in model.parameters()] != before:
            found[name] += " and another model is left"

    whole = init_device_mesh("cpu", (processes,))
    attempt("policy", sharded(Deep(), mesh=whole, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    with torch.device("meta"):
        without = Deep()
    attempt("meta", sharded(without, mesh=whole))
    mixed = Deep()
    distribute_module(mixed.out, whole, _by_rows)
    for layer in mixed.layers:
        sharded(layer, mesh=whole)
    attempt("beside others", mixed)
    model = sharded(Deep(), mesh=whole)
    for name, kind in {"Muon": torch.optim.Muon, "Adafactor": torch.optim.Adafactor}.items():
        two = [p for p in model.parameters() if p.dim() == 2]
        attempt(name, model, kind(two))
    adam = torch.optim.Adam(model.parameters())
    attempt("in backward", model, adam, config={"optimizer_in_backward": True})
    attempt("released", model, adam, on_close="release")
    with torch.device("meta"):
        found["initial values"] = said_by(lambda: InitialValues(sharded(Deep(), mesh=whole)))
    attempt("placed", model, adam, placement={"out": "cpu"})
    kept = {"durable": True, "offload_disk_size": "16MB", "offload_path": str(folder / "kept")}
    with offload(model, adam, {**usual, **kept}) as run:
        run.checkpoint()
    orders = {"other parts": [3, 2, 1, 0], "other parts of some": [0, 1, 3, 2]}
    for name, order in orders.items():
        others = sharded(Deep(), mesh=DeviceMesh("cpu", order))
        attempt(name, others, torch.optim.Adam(others.parameters()), config=kept)
    with offload(model, adam, usual) as run:
        found["averages"] = said_by(run.average_gradients)
        own = {name: id(each) for name, each in model.named_parameters()}
        bias = {"out.bias": distribute_tensor(torch.ones(5), whole, [Shard(0)])}
        found["assigned"] = said_by(lambda: model.load_state_dict(bias, strict=False, assign=True))
        assert own == {name: id(each) for name, each in model.named_parameters()}
        with pytest.raises(RuntimeError, match="swap"):
            model.to(torch.float64)
        found["let go"] = said_by(lambda: run.close(restore=False))
    return found


def sharded(module: Any, **how: Any) -> Any:  # noqa: ANN401 - it is a module still
    """Return a module with its parameters sharded."""
    return fully_shard(module, **how)


def _by_rows(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    del name
    for each, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(each, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))


TRIED_MESHES = ["tensor parallel"] if IS_CI else [name for name in MESHES if name != "line"]


def shards_of_meshes(rank: int, processes: int, folder: Path) -> object:
    """What is done with models that are sharded over one dimension, done with the others."""
    found = {}
    for mesh in TRIED_MESHES:
        for act in (shards_saved,) if IS_CI else (shards_seen, shards_saved, shards_resumed):
            (place := folder / mesh / act.__name__).mkdir(exist_ok=True, parents=True)
            found[f"{mesh}: {act.__name__}"] = act(rank, processes, place, mesh)
    return found


class FaultAt:
    """A hook that raises.

    Args:
        module: whose forward it ends.
        call: which of them, from 1.
    """

    def __init__(self, module: nn.Module, call: int) -> None:
        self._left = call
        self.handle = module.register_forward_hook(self)

    def __call__(self, *_: object) -> None:
        self._left -= 1
        if not self._left:
            raise ZeroDivisionError


def shards_ended(rank: int, processes: int, folder: Path) -> object:
    """Runs that end in the midst of a pass, and begin again, then with a layer that stays with FSDP."""
    case = CASES["clipped and accumulated"]
    lives = build(case, processes), build(case, processes)
    for life in lives:
        train(life, case, 1, rank)
    fault = FaultAt(lives[1].model.layers[3], 1 + case.passes)
    with pytest.raises(ZeroDivisionError), offloaded(lives[1], case, folder):
        train(lives[1], case, 2, rank, 1)
    fault.handle.remove()
    lives[1].model.reset_iter_state()
    train(lives[0], case, 1, rank, 1)
    found = differences(*lives)
    with offloaded(lives[1], replace(case, tiers="host"), folder, ignored=[r"layers\.1"]):
        for life in lives:
            train(life, case, 2, rank, 2)
    return {"differs": found + differences(*lives)}


# ---------------------------------------------------------------------- checkpoints


def shards_resumed(rank: int, processes: int, folder: Path, mesh: str = "line") -> Mapping[str, object]:
    """A durable run that is left after its last checkpoint, and one that goes on from there."""
    case = replace(CASES["clipped and accumulated"], mesh=mesh)
    plain, first, second = (build(case, processes) for _ in range(3))
    train(plain, case, 4, rank)
    durable = {"config": {"durable": True}}
    with offloaded(first, case, folder, **durable) as run:
        train(first, case, 1, rank)
        run.checkpoint({"step": 1})
        train(first, case, 1, rank, 1)
        run.checkpoint({"step": 2})
        train(first, case, 1, rank, 2)  # is lost
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.zero_()
    with offloaded(second, case, folder, **durable) as run:
        assert run.resumed is not None
        step = run.resumed.extra["step"]
        second.losses = first.losses[: len(first.losses) * 2 // 3]
        train(second, case, 2, rank, 2)
    return {"step": step, "differs": differences(plain, second)}


def shards_saved(rank: int, processes: int, folder: Path, mesh: str = "line") -> Mapping[str, object]:
    """``torch.distributed.checkpoint`` of an offloaded model: saved, and loaded with and without tiers."""
    case = replace(CASES["clipped"], tiers="disk", mesh=mesh)
    lives = [build(case, processes) for _ in range(4)]
    train(lives[0], case, 2, rank)
    with offloaded(lives[1], case, folder) as run:
        train(lives[1], case, 2, rank)
        refused = said_by(lambda: run.save(folder / "one"))
        writer = FileSystemWriter(folder / "saved", single_file_per_rank=False)  # else it keeps all
        save(_state(lives[1]), storage_writer=writer)
        here = len([each for each in lives[1].model.parameters() if type(each) is DTensor])
    for life in lives[2:]:
        train(life, case, 1, rank)
    with offloaded(lives[2], case, folder):
        _load(lives[2], folder / "saved")
        lives[2].losses = list(lives[1].losses)
        train(lives[2], case, 1, rank, 2)
    _load(lives[3], folder / "saved")
    lives[3].losses = list(lives[1].losses)
    saved = differences(lives[0], lives[1]) + differences(lives[0], lives[3])
    whole = {name: each.full_tensor().tolist() for name, each in lives[0].model.state_dict().items()}
    train(lives[0], case, 1, rank, 2)
    found = {"here": here, "saved": saved, "refused": refused, "differs": differences(lives[0], lives[2])}
    return {**found, "whole": whole}


def _load(life: Life, path: Path) -> None:
    state = _state(life)
    load(state, checkpoint_id=path)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(life.model, life.optimizer, **parts)


def _state(life: Life) -> dict[str, Any]:
    model, optimizer = get_state_dict(life.model, life.optimizer)
    return {"model": model, "optimizer": optimizer}
