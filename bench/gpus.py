"""Figures of a real GPU: its link, activations that are swapped, steps, and shards.

``python -m bench.gpus --write`` measures them where PyTorch finds a CUDA device, and says so where it finds
none.  Algorithms are deterministic in all turns, and losses are equal, bit for bit, but for those of
`gpu-shards`.

1. `gpu-link`: tensors go from host memory to the device and back through the store, in turns with plain
   copies between a pinned tensor and the device, as many bytes at a time.
2. `gpu-swap-...`: the Llama of `bench.llamas`, ten gigabytes of activations, every mark of `swap-step`;
   beside it PyTorch's ``save_on_cpu`` and torchtune's offloading of activations, as TRL has taken it over.
3. `gpu-step`: the model of `step-in-memory` with a tenth of its state on the device.  A GPU computes it in a
   few milliseconds, so the floor is what has to cross the link, at the bandwidth measured in between.
4. `gpu-shards`: the same model sharded by FSDP2 (NCCL, one process), against ``CPUOffloadPolicy``, whose
   optimizer steps on the host: there losses differ by what an Adam there rounds otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Mapping

import torch

import tierstore as ts
from bench.activations import all_marked, saving_activations
from bench.command import Question, Settings, UnmeasurableError, main
from bench.llamas import MIB, Manner, Size, allocated_peak, marks
from bench.measure import Spread, ratios, stopwatch, take_turns
from bench.paced import NONE, equal_losses, in_turns
from bench.record import Better, Figure
from bench.shards import FSDP, OURS, ShardedTrainee
from bench.store import check_equal, host_tier, noise
from bench.training import SETTLING_TURNS, STATE_TENSORS, STEPS_A_TURN, Floor
from bench.workload import Trainee, Workload

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
LINK_TENSORS, LINK_MIB = 16, 64
SWAPPED, OFFLOADING, SAVED = "swapped", "torchtune's, by TRL", "save_on_cpu, no parameters"


def _needs_a_gpu(question: Question) -> Question:
    @functools.wraps(question)
    def asked(settings: Settings) -> Figure:
        if not torch.cuda.is_available():
            raise UnmeasurableError("PyTorch finds no CUDA device here")
        torch.use_deterministic_algorithms(mode=True)  # else plain PyTorch's own losses differ
        gc.collect()
        torch.accelerator.empty_cache()
        return question(settings)

    return asked


# ---------------------------------------------------------------------- the link


class Link:
    """Plain copies between pinned memory and the device, and the same bytes through a store."""

    def __init__(self, tensor_bytes: int, count: int) -> None:
        self.nbytes = tensor_bytes * count
        self._pinned = [noise(tensor_bytes, seed).pin_memory() for seed in range(2)]
        self._there = [torch.empty(tensor_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        device = ts.TierConfig("device", "device", self.nbytes, options={"device": DEVICE.type})
        self._store = ts.Store(ts.StoreConfig([device, host_tier(self.nbytes + MIB)]))
        self._bytes = noise(tensor_bytes)
        self._keys = [f"k{number}" for number in range(count)]
        for number, key in enumerate(self._keys):
            self._store.put(key, self._bytes.roll(number), tier="host")

    def raw(self) -> dict[str, float]:
        """Return the seconds of as many bytes, one way and the other, as plain copies."""
        return {"raw down": self._copies(self._there, self._pinned), "raw up": self._copies(*self._ways)}

    def through_the_store(self) -> dict[str, float]:
        """Return the seconds of all tensors' way up, and of their way down once they were written to."""
        up_s = stopwatch(lambda: self._settled(self._store.fetch(*self._keys, tier="device").result))
        for key in self._keys:
            self._store.lease(key, tier="device", write=True).release()
        torch.accelerator.synchronize()
        down_s = stopwatch(lambda: self._settled(self._store.evict(*self._keys, to="host").result))
        return {"up": up_s, "down": down_s}

    @property
    def _ways(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self._pinned, self._there

    def _copies(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> float:
        def all_of_them() -> None:
            for number in range(len(self._keys)):
                targets[number % 2].copy_(sources[number % 2], non_blocking=True)
            torch.accelerator.synchronize()

        torch.accelerator.synchronize()
        return stopwatch(all_of_them)

    @staticmethod
    def _settled(move: Callable[[], object]) -> None:
        move()
        torch.accelerator.synchronize()

    def close(self) -> None:
        """Compare every byte, and end the store."""
        with self._store:
            for number, key in enumerate(self._keys):
                check_equal(self._store.get(key).cpu(), self._bytes.roll(number), key)


@_needs_a_gpu
def link(settings: Settings) -> Figure:
    """Send tensors up and down through the store, in turns with plain copies."""
    tensor_bytes = settings.scaled(LINK_MIB, least=1) * MIB
    with contextlib.closing(Link(tensor_bytes, LINK_TENSORS)) as both:
        runs = [both.raw, both.through_the_store]
        seconds = take_turns(runs, repeats=settings.repeats, warmups=max(2, settings.warmups))
    speeds = {way: ratios(seconds[f"raw {way}"], seconds[way]) for way in ("up", "down")}
    details = {
        **{f"{name} GB/s": _rate(both.nbytes, taken) for name, taken in seconds.items()},
        **{f"speed {way} over that of plain copies": str(each) for way, each in speeds.items()},
    }
    what = (
        f"the slower of {LINK_TENSORS} tensors of {tensor_bytes // MIB} MiB on their way to a GPU and back "
        "through the store, against copies between one pinned tensor and the device"
    )
    reached = min(each.median for each in speeds.values())
    return Figure("gpu-link", what, reached, "x its speed", 0.95, 1.0, Better.HIGHER, details)


def _rate(nbytes: int, seconds: list[float]) -> str:
    return str(Spread.of([nbytes / each / 1e9 for each in seconds]))


# ---------------------------------------------------------------------- activations


def _manners(size: Size) -> dict[str, Manner]:
    on_it = Manner(device=DEVICE.type)
    every = all_marked(size)
    return {
        NONE: on_it,
        SWAPPED: Manner(swap=every.swap, quota=every.quota, device=DEVICE.type),
        f"{SWAPPED}, no quota, prefetch 40": Manner(swap=marks(40), device=DEVICE.type),
        SAVED: Manner(device=DEVICE.type, around=saving_activations),
        OFFLOADING: Manner(device=DEVICE.type, around=_offloading),
    }


def _offloading(model: torch.nn.Module) -> contextlib.AbstractContextManager[object]:
    from trl.models.activation_offloading import OffloadActivations

    hooks: contextlib.AbstractContextManager[object] = OffloadActivations()
    vars(hooks)["param_storages"] = {each.untyped_storage().data_ptr() for each in model.parameters()}
    return hooks


@_needs_a_gpu
def swap_peak(settings: Settings) -> Figure:
    """Take the allocator's peaks, all attention and feed-forward outputs swapped, and none."""
    size = Size.of_a_gpu(settings.scale)
    peaks = {name: allocated_peak(size, manner) for name, manner in _manners(size).items()}
    shares = {name: each / peaks[NONE] for name, each in peaks.items()}
    details = {
        name: f"{each / MIB:.1f} MiB, {shares[name]:.3f} of that without" for name, each in peaks.items()
    }
    details["marked outputs"] = f"{size.marked_bytes / MIB:.1f} MiB"
    what = (
        f"allocator's peak of {size}, all attention and feed-forward outputs swapped, over that without, on "
        "a GPU"
    )
    return Figure("gpu-swap-peak", what, shares[SWAPPED], "x the peak", 0.6, 0.45, Better.LOWER, details)


@_needs_a_gpu
def swap_step(settings: Settings) -> Figure:
    """Train with all attention and feed-forward outputs swapped, in turns with none and with others' ways."""
    size = Size.of_a_gpu(settings.scale)
    rounds = in_turns(size, _manners(size), settings)
    times = rounds.times(SWAPPED)
    details = {
        **{f"{SWAPPED}, times {each}": str(rounds.times(SWAPPED, each)) for each in (SAVED, OFFLOADING)},
        "marked outputs": f"{size.marked_bytes / MIB:.1f} MiB",
        **rounds.details(),
    }
    what = (
        f"step of {size}, all attention and feed-forward outputs swapped, over that without, on a GPU in "
        "float32"
    )
    return Figure("gpu-swap-step", what, times.median, "x its time", 1.15, 1.05, Better.LOWER, details)


# ---------------------------------------------------------------------- parameters


def _tenth(workload: Workload) -> ts.OffloadConfig:
    """Return a device for a tenth of the state, beside what is there already."""
    state_bytes = STATE_TENSORS * workload.parameter_bytes
    return ts.OffloadConfig(
        device=DEVICE.type,
        max_device_memory=state_bytes // 10 + torch.accelerator.memory_allocated(),
        offload_cpu_size=2 * state_bytes,
        offload_disk_size=0,
    )


@_needs_a_gpu
def step(settings: Settings) -> Figure:
    """Train through a device that holds a tenth of the state, in turns with one that holds all of it."""
    workload = Workload.scaled(settings.scale)
    floor = Floor.of(workload.parameter_bytes, STATE_TENSORS * workload.parameter_bytes // 10)
    with Trainee(workload, device=DEVICE) as plain:
        plain.seconds_a_step(STEPS_A_TURN)
        with Trainee(workload, _tenth(workload), device=DEVICE) as ours:
            plain_step = functools.partial(plain.seconds_a_step, STEPS_A_TURN)
            our_step = functools.partial(ours.seconds_a_step, STEPS_A_TURN)
            our_step()
            with contextlib.closing(Link(LINK_MIB * MIB, 4)) as both:
                runs: list[Callable[[], Mapping[str, float]]] = [
                    lambda: {"plain": plain_step()},
                    lambda: {"offloaded": our_step()},
                    both.raw,
                ]
                seconds = take_turns(
                    runs, repeats=settings.repeats, warmups=max(SETTLING_TURNS, settings.warmups)
                )
            said = equal_losses(ours.losses.cpu(), plain.losses.cpu())
            stats = ours.store.stats()
    ways = (("up", floor.read_bytes), ("down", floor.write_bytes))
    of_ways = [[nbytes * s / both.nbytes for s in seconds[f"raw {way}"]] for way, nbytes in ways]
    floors = list(map(max, *of_ways, seconds["plain"]))
    times = ratios(seconds["offloaded"], floors)
    steps = len(ours.losses)
    details = {
        "plain s": str(Spread.of(seconds["plain"])),
        "offloaded s": str(Spread.of(seconds["offloaded"])),
        "floor": f"{floor.read_bytes / MIB:.0f} MiB up, {floor.write_bytes / MIB:.0f} MiB down a step",
        "floor s": str(Spread.of(floors)),
        **{f"raw {way} GB/s": _rate(both.nbytes, seconds[f"raw {way}"]) for way, _ in ways},
        **{
            f"{source} to {target}": f"{each.nbytes / steps / MIB:.0f} MiB a step"
            for (source, target), each in stats.traffic.items()
        },
        "stalled": f"{stats.stall_seconds / steps:.4f} s a step",
        "times plain": str(ratios(seconds["offloaded"], seconds["plain"])),
        "losses": said,
    }
    what = (
        f"step of {workload}, a GPU's quota of a tenth of the state, the rest in host memory, against the "
        "longer of its bytes at the link's bandwidth and plain PyTorch"
    )
    return Figure("gpu-step", what, times.median, "x the floor", 1.5, 1.1, Better.LOWER, details)


@_needs_a_gpu
def shards(settings: Settings) -> Figure:
    """Train shards through a device that holds a tenth of their state, in turns with FSDP2's own way."""
    from torch import distributed
    from torch.distributed.fsdp import CPUOffloadPolicy

    workload = Workload.scaled(settings.scale)
    torch.accelerator.set_device_index(0)
    store = vars(distributed)["HashStore"]()
    distributed.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        theirs = ShardedTrainee(workload, policy=CPUOffloadPolicy(), device=DEVICE)
        theirs.seconds_a_step()
        ours = ShardedTrainee(workload, _tenth(workload), device=DEVICE)
        runs = [lambda: theirs.turn(FSDP), lambda: ours.turn(OURS)]
        seconds = take_turns(runs, repeats=settings.repeats, warmups=max(SETTLING_TURNS, settings.warmups))
        moved, steps = ours.moved_bytes(), len(ours.losses)
        ours.close()
    finally:
        distributed.destroy_process_group()
    times = ratios(seconds[OURS], seconds[FSDP])
    differ = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses[:steps], strict=True))
    details = {
        "times CPUOffloadPolicy": str(times),
        **{f"{name} s": str(Spread.of(taken)) for name, taken in seconds.items()},
        **{name: f"{each / steps / MIB:.0f} MiB a step" for name, each in moved.items()},
        "losses": f"differ by {differ:.1e} of themselves at most: FSDP2's Adam steps on the host",
    }
    what = (
        f"step of {workload}, sharded by FSDP2 over one GPU (NCCL), a quota of a tenth of the state, the "
        "rest in host memory, against FSDP2 with CPUOffloadPolicy"
    )
    return Figure("gpu-shards", what, times.median, "x its time", 1.0, 0.8, Better.LOWER, details)


QUESTIONS: dict[str, Question] = {
    "gpu-link": link,
    "gpu-swap-peak": swap_peak,
    "gpu-swap-step": swap_step,
    "gpu-step": step,
    "gpu-shards": shards,
}

if __name__ == "__main__":
    sys.exit(main("bench.gpus", QUESTIONS))
