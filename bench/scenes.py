"""Work that two versions of tierstore do by turns, each in an environment of its own.

For `bench.versions`, which starts ``python bench/scenes.py`` for each version and says whose turn it is.  The
models are those of this checkout; tierstore is the one of the Python that runs this.  Uses what both know.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import tierstore as ts
import tierstore.training  # from this Python's environment: `bench` brings the directory of another one

sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from bench import workload
from bench.activations import PLAIN, all_marked, mix
from bench.command import Settings
from bench.links import GB
from bench.llamas import Manner, Size
from bench.llamas import Trainee as LlamaTrainee
from bench.measure import percentile
from bench.paced import computing_beside_copies
from bench.store import KIB, MIB, Shuttle, host_tier, noise
from bench.training import emulated, in_memory, on_disk
from bench.workload import Workload

Turn = Callable[[], Mapping[str, float]]
"""Does the work once; returns what it took by name, in seconds, and what came out as ``loss``."""

Scene = Callable[[Settings], contextlib.AbstractContextManager[Turn]]

FAST_LINK = 25 * GB  # nothing to wait for on it: what is left is Python
BUNDLES, PARAMETERS_IN_A_BUNDLE, PARAMETER_NUMEL = 1_000, 10, 256
OPERATORS = 400
LAYERS, KEPT_NUMEL = 200, 4 * KIB
BATCH, DIM = 4, 16


# ---------------------------------------------------------------------- steps


def _steps(config: Callable[[Workload, Path], ts.OffloadConfig]) -> Scene:
    @contextlib.contextmanager
    def scene(settings: Settings) -> Iterator[Turn]:
        size = Workload.scaled(settings.scale)
        with workload.Trainee(size, config(size, settings.scratch)) as trainee:

            def turn() -> Mapping[str, float]:
                return {"step": trainee.seconds_a_step(1), "loss": float(trainee.losses[-1])}

            yield turn

    return scene


def _llama_steps(manner: Callable[[Size], Manner]) -> Scene:
    @contextlib.contextmanager
    def scene(settings: Settings) -> Iterator[Turn]:
        size = Size.scaled(settings.scale)
        with computing_beside_copies(), LlamaTrainee(size, manner(size)) as trainee:

            def turn() -> Mapping[str, float]:
                return {"step": trainee.seconds()[1], "loss": float(trainee.losses[-1])}

            yield turn

    return scene


# ---------------------------------------------------------------------- the store


@contextlib.contextmanager
def ready_lease(settings: Settings) -> Iterator[Turn]:
    """Lease and release one ready replica."""
    with ts.Store(ts.StoreConfig([host_tier(64 * MIB)])) as store:
        store.put("k", noise(MIB))

        def once() -> float:
            begun = time.perf_counter()
            store.lease("k", tier="host").release()
            return time.perf_counter() - begun

        count = settings.scaled(2_000, least=20)
        yield lambda: {"lease": percentile([once() for _ in range(count)], 50)}


@contextlib.contextmanager
def small_tensors(settings: Settings) -> Iterator[Turn]:
    """Send tensors of 32 KiB to disk and back, and as many bytes in large ones."""
    count = settings.scaled(10_000, least=500)
    large_count = max(1, count * 32 * KIB // (16 * MIB))
    with (
        Shuttle(settings.scratch / "small", 32 * KIB, count) as small,
        Shuttle(settings.scratch / "large", 16 * MIB, large_count) as large,
    ):

        def turn() -> Mapping[str, float]:
            small_s, large_s = sum(small.round_trip().values()), sum(large.round_trip().values())
            return {"round trip of 32 KiB": small_s / count, "of 16 MiB": large_s / large_count}

        yield turn


# ---------------------------------------------------------------------- many parameters


@contextlib.contextmanager
def many_parameters(settings: Settings) -> Iterator[Turn]:
    """Step an optimizer over many small parameters, most of whose state is on disk."""
    bundles = settings.scaled(BUNDLES, least=10)
    with contextlib.ExitStack() as stack:
        many, few = (
            stack.enter_context(_Parameters(settings.scratch / f"{count}", count))
            for count in (bundles, max(1, bundles // 10))
        )

        def turn() -> Mapping[str, float]:
            return {
                "optimizer's step, a parameter of many": many.optimizer_seconds(),
                "optimizer's step, a parameter of few": few.optimizer_seconds(),
            }

        yield turn


class _Parameters(contextlib.ExitStack):
    """Modules of ten parameters each, offloaded with a third of them in host memory."""

    def __init__(self, path: Path, bundles: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._count = bundles * PARAMETERS_IN_A_BUNDLE
        modules = [
            nn.ParameterList(
                nn.Parameter(torch.randn(PARAMETER_NUMEL)) for _ in range(PARAMETERS_IN_A_BUNDLE)
            )
            for _ in range(bundles)
        ]
        self._model = nn.ModuleList(modules)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        config = ts.OffloadConfig(
            device="cpu",
            offload_cpu_size=max(128 * KIB, self._count * PARAMETER_NUMEL * 4 // 3),
            offload_path=str(path),
            offload_disk_size=GB,
        )
        self.enter_context(ts.training.offload(self._model, self._optimizer, config))

    def optimizer_seconds(self) -> float:
        """Train one step; return the optimizer's seconds for a parameter."""
        loss = torch.stack([each.sum() for each in self._model.parameters()]).sum()
        loss.backward()
        begun = time.perf_counter()
        self._optimizer.step()
        seconds = time.perf_counter() - begun
        self._optimizer.zero_grad()
        return seconds / self._count


# ---------------------------------------------------------------------- activations


class _Cheap(nn.Module):
    """Operators on a few bytes, which autograd saves nothing of that is worth swapping."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply `OPERATORS` of them."""
        for _ in range(OPERATORS // 2):
            x = x.mul(1.0001).tanh()
        return x


class _Layers(nn.Module):
    """One after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply them."""
        for layer in self.layers:
            x = layer(x)
        return x


@contextlib.contextmanager
def _emulated_store() -> Iterator[ts.Store]:
    tiers = [
        ts.TierConfig("device", "device", GB, options={"device": "emulated"}),
        host_tier(GB),
    ]
    with ts.Store(ts.StoreConfig(tiers)) as store:
        yield store


@contextlib.contextmanager
def watched_operators(settings: Settings) -> Iterator[Turn]:
    """Run forward over small operators in a marked layer, and in one that nothing watches."""
    del settings
    model, plain = _Layers(_Cheap()), _Layers(_Cheap())
    x = torch.randn(BATCH, DIM, requires_grad=True)
    marked = {"swap": True, "layer_swap": {"layers": True, "backward_prefetch": 1}}
    with _emulated_store() as store, ts.training.swap(model, marked, layers="layers", store=store):

        def seconds(forward: nn.Module) -> float:
            begun = time.perf_counter()
            y = forward(x)
            taken = time.perf_counter() - begun
            y.sum().backward()
            return taken / OPERATORS

        def turn() -> Mapping[str, float]:
            pairs = [(seconds(model), seconds(plain)) for _ in range(20)]
            return {"watching an operator": statistics.median(ours - theirs for ours, theirs in pairs)}

        yield turn


@contextlib.contextmanager
def swapped_tensors(settings: Settings) -> Iterator[Turn]:
    """Train a step in which every layer's one saved tensor is swapped, and one in which none is."""
    del settings
    # Each saves one tensor of 16 KiB.
    model, plain = (_Layers(*(nn.Tanh() for _ in range(LAYERS))) for _ in range(2))
    x = torch.randn(KEPT_NUMEL, requires_grad=True)
    marked = {"swap": True, "layer_swap": {"layers": True, "backward_prefetch": 1}}
    with _emulated_store() as store, ts.training.swap(model, marked, layers="layers", store=store) as swapped:

        def seconds(forward: nn.Module) -> float:
            begun = time.perf_counter()
            forward(x).sum().backward()
            return (time.perf_counter() - begun) / LAYERS

        def turn() -> Mapping[str, float]:
            pairs = [(seconds(model), seconds(plain)) for _ in range(5)]
            if not swapped.stats().activations.released_bytes:
                raise AssertionError("nothing was swapped")
            return {"a swapped tensor": statistics.median(ours - theirs for ours, theirs in pairs)}

        yield turn


SCENES: dict[str, Scene] = {
    "in memory": _steps(lambda size, _: in_memory(size)),
    "emulated device": _steps(lambda size, _: emulated(size)),
    "on disk": _steps(lambda size, path: on_disk(size, path / "files")),
    "Llama, nothing swapped": _llama_steps(lambda _: PLAIN),
    "Llama, swapped": _llama_steps(lambda size: all_marked(size, FAST_LINK)),
    "Llama, swapped and recomputed": _llama_steps(lambda size: mix(size, FAST_LINK)),
    "lease": ready_lease,
    "small tensors": small_tensors,
    "many parameters": many_parameters,
    "operators": watched_operators,
    "saved tensors": swapped_tensors,
}


def main() -> None:
    """Take a turn for each line that is read, and print what came of it; end with the input."""
    name, scratch, scale = sys.argv[1:]
    with (
        tempfile.TemporaryDirectory(dir=scratch) as directory,
        SCENES[name](Settings(Path(directory), scale=float(scale))) as turn,
    ):
        print(json.dumps({"tierstore": str(Path(ts.__file__).parent)}), flush=True)
        for _ in sys.stdin:
            print(json.dumps(turn()), flush=True)


if __name__ == "__main__":
    main()
