"""What swapping and recomputing activations saves in device memory, and what it costs a step."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from bench.batches import resnet50_batch
from bench.branches import swap_leaks
from bench.command import Question, Settings, UnmeasurableError, main
from bench.links import A100, GB, LLAMA_7B, least_step
from bench.llamas import Manner, Size, Trainee, marks, peak
from bench.measure import Spread, ratios, take_turns
from bench.record import Better, Figure

MIB = 1024**2
PREFETCH = 40  # of about 60 nodes that a layer has
LOOKS = (1, 10, 20, 40)  # other prefetches, whose peaks are told

MIX_SWAP: Mapping[str, object] = {
    "swap": True,
    "layer_swap": {"layers": list(range(7)), "backward_prefetch": 20},
}
"""All but the last layer: backward begins with that one."""

MIX_RECOMPUTE: Mapping[str, object] = {
    "select_recompute": {
        "ffn_norm": True,
        r"attention\.clone": True,
        r"feed_forward\.silu": True,
        r"feed_forward\.mul": True,
    }
}
"""What is cheap to make again for its bytes: no product of matrices is among it."""

PLAIN = Manner()
FULL = Manner(is_checkpointed=True)


def _check(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """Compare losses; return what to say of them."""
    if not torch.equal(ours, theirs):
        raise AssertionError(f"the losses differ: {ours.tolist()}, {theirs.tolist()}")
    return f"{len(ours)} of {len(ours)} equal, bit for bit"


# ---------------------------------------------------------------------- peaks


def swap_peak(settings: Settings) -> Figure:
    """Train with all attention and feed-forward outputs swapped, and without, under an outside meter."""
    size = Size.scaled(settings.scale)
    plain = peak(size, PLAIN)
    details = {
        "without": f"{plain.nbytes / MIB:.1f} MiB: parameters, Adam's moments, gradients, activations",
        "parameters and moments": f"{size.config.parameters * 12 / MIB:.1f} MiB of it",
        "marked outputs": f"{size.marked_bytes / MIB:.1f} MiB of it",
    }
    reached = 0.0
    for prefetch in LOOKS if settings.scale >= 1 else (PREFETCH,):
        ours = peak(size, Manner(swap=marks(prefetch)))
        details["losses"] = _check(ours.losses, plain.losses)
        details[f"backward_prefetch {prefetch}"] = (
            f"{ours.nbytes / MIB:.1f} MiB, {ours.nbytes / plain.nbytes:.3f} of that"
        )
        if prefetch == PREFETCH:
            reached = ours.nbytes / plain.nbytes
    what = (
        f"peak of device bytes of {size}, all attention and feed-forward outputs swapped, "
        f"backward_prefetch {PREFETCH}, over that without"
    )
    return Figure("swap-peak", what, reached, "x the peak", 0.6, 0.45, Better.LOWER, details)


def swap_plan(settings: Settings) -> Figure:
    """Hold the measured peak against what the marks should save, which the shapes tell."""
    size = Size.scaled(settings.scale)
    plain, ours = peak(size, PLAIN), peak(size, Manner(swap=marks(1)))
    planned_bytes = plain.nbytes - planned_saving_bytes(size)
    details = {
        "without": f"{plain.nbytes / MIB:.2f} MiB",
        "marked outputs": f"{size.marked_bytes / MIB:.2f} MiB",
        "in use at the peak": f"{3 * size.wide_bytes / MIB:.2f} MiB of them",
        "planned": f"{planned_bytes / MIB:.2f} MiB",
        "measured": f"{ours.nbytes / MIB:.2f} MiB",
        "losses": _check(ours.losses, plain.losses),
    }
    what = f"how far the peak of {size}, swapped with backward_prefetch 1, is from what the shapes plan"
    reached = abs(ours.nbytes / planned_bytes - 1) * 100
    return Figure("swap-plan", what, reached, "% of the plan", 5, 1, Better.LOWER, details)


def planned_saving_bytes(size: Size) -> int:
    """Return what swapping with ``backward_prefetch: 1`` should take off the peak.

    The peak is where backward is at the product in the last layer's feed-forward.  Without swap, all
    marked bytes but that product, which was just given up, are there then; with swap, its two factors.
    (A vocabulary much wider than the model would have the peak at the loss.)
    """
    return size.marked_bytes - 3 * size.wide_bytes


# ---------------------------------------------------------------------- step time


def swap_step(settings: Settings) -> Figure:
    """Train with a link that is as slow beside computing as a GPU's, in turns with nothing swapped."""
    size = Size.scaled(settings.scale)
    share = A100.share(LLAMA_7B)
    step_s, forward_share = _pace(size)
    link = round(size.marked_bytes / (share * step_s))
    carried = max(1, int(size.layers * forward_share / share))
    manners = {
        "none": PLAIN,
        "as on the GPU": Manner(swap=marks(PREFETCH), link=link),
        "as on the GPU, prefetch 10": Manner(swap=marks(10), link=link),
        f"as on the GPU, layers 0 to {carried - 1}": Manner(swap=marks(PREFETCH, range(carried)), link=link),
        "25 GB/s": Manner(swap=marks(PREFETCH), link=25 * GB),
    }
    seconds, said = _in_turns(size, manners, settings)
    times = {name: ratios(taken, seconds["none"]) for name, taken in seconds.items()}
    least = least_step(share, forward_share)
    details = {
        "the GPU": (
            f"a layer of Llama 7B in bf16 (dim 4096, sequences of 4096) on an {A100}: "
            f"{LLAMA_7B.operations / 1e9:.2f} GFLOP and {LLAMA_7B.swapped_bytes / 1e3:.0f} kB swapped "
            f"a token; at 25 GB/s they take {share:.2f} of a step one way"
        ),
        "the link, as slow beside computing": (
            f"{link / 1e6:.0f} MB/s: {size.marked_bytes / 1e6:.0f} MB in {share:.2f} of {step_s:.2f} s"
        ),
        "forward": f"{forward_share:.2f} of a step",
        "least where forward waits for all copies": f"{least:.2f} x",
        "that share in these rounds": f"{size.marked_bytes / link / statistics.median(seconds['none']):.2f}",
        **{f"{name} s": str(Spread.of(taken)) for name, taken in seconds.items()},
        **{f"{name}, times none": str(each) for name, each in times.items() if name != "none"},
        **said,
    }
    what = (
        f"step of {size}, all attention and feed-forward outputs swapped, backward_prefetch {PREFETCH}, "
        "emulated device whose link is as slow beside computing as 25 GB/s are on a GPU, over that without"
    )
    reached = times["as on the GPU"].median
    return Figure("swap-step", what, reached, "x its time", 1.15, 1.05, Better.LOWER, details)


def swap_and_recompute(settings: Settings) -> Figure:
    """Swap most and recompute what is cheap, in turns with recomputing all, at no higher a peak."""
    size = Size.scaled(settings.scale)
    mix = Manner(swap=MIX_SWAP, recompute=MIX_RECOMPUTE)
    ours, theirs = peak(size, mix), peak(size, FULL)
    step_s, _ = _pace(size)
    link = round(size.marked_bytes / (A100.share(LLAMA_7B) * step_s))
    manners = {
        "none": PLAIN,
        "full recompute": FULL,
        "as on the GPU": Manner(swap=MIX_SWAP, recompute=MIX_RECOMPUTE, link=link),
        "25 GB/s": Manner(swap=MIX_SWAP, recompute=MIX_RECOMPUTE, link=25 * GB),
    }
    seconds, said = _in_turns(size, manners, settings)
    times = {name: ratios(taken, seconds["full recompute"]) for name, taken in seconds.items()}
    details = {
        "peak": f"{ours.nbytes / MIB:.1f} MiB; full recompute: {theirs.nbytes / MIB:.1f} MiB",
        "peak over that of full recompute": f"{ours.nbytes / theirs.nbytes:.3f}",
        "the link, as slow beside computing as 25 GB/s on the GPU of swap-step": f"{link / 1e6:.0f} MB/s",
        "swapped": "all that backward uses of the first 7 layers, but what is recomputed",
        "recomputed": "the feed-forward's norm, SiLU and product; the copy of attention's output",
        **{f"{name} s": str(Spread.of(taken)) for name, taken in seconds.items()},
        **{f"{name}, times full recompute": str(each) for name, each in times.items()},
        "losses with full recompute": _check(ours.losses, theirs.losses),
        **said,
    }
    if ours.nbytes > 1.01 * theirs.nbytes and settings.scale >= 1:
        raise AssertionError(f"the peaks are not equal: {ours.nbytes} B, full recompute {theirs.nbytes} B")
    what = (
        f"step of {size}, selective recompute and swap with a link as in swap-step, over that with PyTorch's "
        "checkpoint around every layer, which has the higher peak"
    )
    reached = times["as on the GPU"].median
    return Figure("swap-and-recompute", what, reached, "x its time", 0.9, 0.8, Better.LOWER, details)


def _pace(size: Size) -> tuple[float, float]:
    """Return the seconds of a step without swap, and forward's share."""
    with Trainee(size, PLAIN) as plain:
        plain.step()
        forward_s, step_s = zip(*(plain.seconds() for _ in range(3)), strict=True)
    step = statistics.median(step_s)
    return step, statistics.median(forward_s) / step


def _in_turns(
    size: Size, manners: Mapping[str, Manner], settings: Settings
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Train a step in every manner a round; return their seconds, and what else there is to say."""
    trainees = {name: Trainee(size, manner) for name, manner in manners.items()}
    try:
        runs = [
            lambda name=name, trainee=trainee: {name: trainee.seconds()[1]}
            for name, trainee in trainees.items()
        ]
        taken = take_turns(runs, repeats=settings.repeats, warmups=max(1, settings.warmups))
        seconds = {name: taken[name] for name in manners}
        said = {f"{name}, moved": _moved(trainee) for name, trainee in trainees.items() if trainee.swap}
        plain, *others = trainees.values()
        for other in others:
            said["losses"] = _check(other.losses, plain.losses)
    finally:
        for trainee in trainees.values():
            trainee.close()
    return seconds, said


def _moved(trainee: Trainee) -> str:
    assert trainee.swap is not None
    did, steps = trainee.swap.stats().activations, len(trainee.losses)
    left, stayed = did.released_bytes / steps / MIB, did.handed_over_bytes / steps / MIB
    return (
        f"{left:.0f} MiB a step left the device, {stayed:.0f} MiB were wanted before; "
        f"{did.stalls / steps:.0f} waits"
    )


# ---------------------------------------------------------------------- PyTorch's own


def swap_save_on_cpu(settings: Settings) -> Figure:
    """Train on a GPU, in turns with PyTorch's own hooks that save every tensor in pinned memory.

    Raises:
        UnmeasurableError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise UnmeasurableError("PyTorch finds no CUDA device here; an emulated one has no pinned memory")
    size = Size.of_a_gpu(settings.scale)
    every_layer = {"swap": True, "layer_swap": {"layers": True, "backward_prefetch": PREFETCH}}
    manners = {
        "none": Manner(device="cuda"),
        "save_on_cpu": Manner(device="cuda", around=lambda _: save_on_cpu(pin_memory=True)),
        "save_on_cpu, no parameters": Manner(device="cuda", around=saving_activations),
        "swap": Manner(device="cuda", swap=every_layer),
    }
    seconds, said = _in_turns(size, manners, settings)
    times = ratios(seconds["swap"], seconds["save_on_cpu, no parameters"])
    details = {
        **{f"{name} s": str(Spread.of(taken)) for name, taken in seconds.items()},
        "swap, times save_on_cpu": str(ratios(seconds["swap"], seconds["save_on_cpu"])),
        "swap, times save_on_cpu without parameters": str(times),
        "swap, times none": str(ratios(seconds["swap"], seconds["none"])),
        **said,
    }
    what = (
        f"step of {size} on a GPU, every layer swapped, over that with save_on_cpu(pin_memory=True), "
        "which is spared the parameters"
    )
    return Figure("swap-save-on-cpu", what, times.median, "x its time", 0.6, 0.4, Better.LOWER, details)


def saving_activations(model: nn.Module, *, pin_memory: bool = True) -> saved_tensors_hooks:
    """Return PyTorch's ``save_on_cpu``, spared the parameters, which swap never moves."""
    hooks = save_on_cpu(pin_memory=pin_memory)
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def pack(tensor: torch.Tensor) -> object:
        is_own = tensor.untyped_storage().data_ptr() in own
        return tensor if is_own else hooks.pack_hook(tensor)

    def unpack(packed: object) -> torch.Tensor:
        tensor: torch.Tensor = packed if isinstance(packed, torch.Tensor) else hooks.unpack_hook(packed)
        return tensor

    return saved_tensors_hooks(pack, unpack)


QUESTIONS: dict[str, Question] = {
    "swap-peak": swap_peak,
    "swap-plan": swap_plan,
    "swap-step": swap_step,
    "swap-and-recompute": swap_and_recompute,
    "swap-leaks": swap_leaks,
    "swap-save-on-cpu": swap_save_on_cpu,
    "resnet50-batch": resnet50_batch,
}

if __name__ == "__main__":
    sys.exit(main("bench.activations", QUESTIONS))
