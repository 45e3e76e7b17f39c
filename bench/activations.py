"""What swapping and recomputing activations saves in device memory, and what it costs a step."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from bench.batches import resnet50_batch
from bench.branches import swap_leaks
from bench.command import Question, Settings, UnmeasurableError, main
from bench.links import A100, GB, LLAMA_7B, least_step
from bench.llamas import MIB, Manner, Size, marks, peak
from bench.paced import NONE, Link, computing_beside_copies, equal_losses, in_paced_turns, in_turns
from bench.record import Better, Figure

GPU_SHARE = A100.share(LLAMA_7B)
FORWARD = 1 / 3  # of a step's operations

LOOKS = (1, 10, 20, 40)  # prefetches whose peaks are told, nothing else bounding them

PLAIN = Manner()
FULL = Manner(is_checkpointed=True)


def all_marked(size: Size, link: int | None = None, kept: float = 1 / 3) -> Manner:
    """Swap all attention and feed-forward outputs, no more than a share ``kept`` of them on the device.

    The prefetch is a whole layer (about 60 nodes), so that the link is never idle; the quota bounds what that
    would keep on the device.
    """
    return Manner(swap=marks(60), link=link, quota=int(size.marked_bytes * kept))


def mix(size: Size, link: int | None = None) -> Manner:
    """Swap most and recompute what is cheap to make again for its bytes; no product of matrices is.

    All but the last layer are swapped: backward begins with that one.  The feed-forward's outputs are wanted
    together, when its backward begins, so their way begins during the whole layer before.
    """
    layers = list(range(size.layers - 1))
    feed_forward = {"op_name": "feed_forward", "layers": layers, "backward_prefetch": 60}
    swap = {
        "swap": True,
        "layer_swap": {"layers": layers, "backward_prefetch": 20},
        "op_swap": [feed_forward],
    }
    return Manner(swap=swap, recompute=CHEAP, link=link, quota=size.marked_bytes // 8)


CHEAP: Mapping[str, object] = {
    "select_recompute": {
        "ffn_norm": True,
        r"attention\.clone": True,
        r"feed_forward\.silu": True,
        r"feed_forward\.mul": True,
    }
}


# ---------------------------------------------------------------------- peaks


def swap_peak(settings: Settings) -> Figure:
    """Train with all attention and feed-forward outputs swapped, and without, under an outside meter."""
    size = Size.scaled(settings.scale)
    plain = peak(size, PLAIN)
    manners = {"all marked": all_marked(size)}
    if settings.scale >= 1:
        manners |= {f"no quota, backward_prefetch {each}": Manner(swap=marks(each)) for each in LOOKS}
        manners |= {
            f"whole layers, backward_prefetch {each}": Manner(swap=whole_layers(each)) for each in (1, 10)
        }
        manners |= {"every layer recomputed": FULL, "the mix of swap-and-recompute": mix(size)}
    details = {
        "without": f"{plain.nbytes / MIB:.1f} MiB: parameters, Adam's moments, gradients, activations",
        "parameters and moments": f"{size.config.parameters * 12 / MIB:.1f} MiB of it",
        "marked outputs": f"{size.marked_bytes / MIB:.1f} MiB of it",
        "quota": f"{size.marked_bytes / 3 / MIB:.1f} MiB for those that are on the device",
    }
    reached = {}
    for name, manner in manners.items():
        ours = peak(size, manner)
        details["losses"] = equal_losses(ours.losses, plain.losses)
        reached[name] = ours.nbytes / plain.nbytes
        details[name] = f"{ours.nbytes / MIB:.1f} MiB, {reached[name]:.3f} of that"
    what = (
        f"peak of device bytes of {size}, all attention and feed-forward outputs swapped, over that without"
    )
    return Figure("swap-peak", what, reached["all marked"], "x the peak", 0.6, 0.45, Better.LOWER, details)


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
        "losses": equal_losses(ours.losses, plain.losses),
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


def whole_layers(prefetch: int) -> Mapping[str, object]:
    """Return the ``swap_config`` that marks every layer as a whole."""
    return {"swap": True, "layer_swap": {"layers": True, "backward_prefetch": prefetch}}


# ---------------------------------------------------------------------- step time


def swap_step(settings: Settings) -> Figure:
    """Train with a link that is as slow beside computing as a GPU's, in turns with nothing swapped."""
    size = Size.scaled(settings.scale)
    carried = max(1, int(size.layers * FORWARD / GPU_SHARE))

    def manners_on(link: int) -> Mapping[str, Manner]:
        return {
            NONE: PLAIN,
            "as on the GPU": all_marked(size, link),
            "as on the GPU, no quota, prefetch 40": Manner(swap=marks(40), link=link),
            f"as on the GPU, layers 0 to {carried - 1}": Manner(swap=marks(60, range(carried)), link=link),
            "25 GB/s": all_marked(size, 25 * GB),
        }

    with computing_beside_copies() as threads:
        link, rounds = in_paced_turns(size, GPU_SHARE, manners_on, settings)
        plain, ours = peak(size, PLAIN), peak(size, all_marked(size, link.bytes_a_s))
    details = {
        "the GPU": (
            f"a layer of Llama 7B in bf16 (dim 4096, sequences of 4096) on an {A100}: "
            f"{LLAMA_7B.operations / 1e9:.2f} GFLOP and {LLAMA_7B.swapped_bytes / 1e3:.0f} kB swapped "
            f"a token; at 25 GB/s they take {GPU_SHARE:.2f} of a step one way"
        ),
        **_computing(size, link, threads),
        "forward": f"{rounds.forward_share:.2f} of a step",
        "least where forward waits for all copies": f"{least_step(link.share, rounds.forward_share):.2f} x",
        "peak on that link": f"{ours.nbytes / MIB:.1f} MiB, {ours.nbytes / plain.nbytes:.3f} of that without",
        **rounds.details(),
    }
    what = (
        f"step of {size}, all attention and feed-forward outputs swapped, emulated device whose link is as "
        "slow beside computing as 25 GB/s are on a GPU, over that without"
    )
    reached = rounds.times("as on the GPU").median
    return Figure("swap-step", what, reached, "x its time", 1.15, 1.05, Better.LOWER, details)


def swap_and_recompute(settings: Settings) -> Figure:
    """Swap most and recompute what is cheap, in turns with recomputing all, at no higher a peak."""
    size = Size.scaled(settings.scale)

    def manners_on(link: int) -> Mapping[str, Manner]:
        return {
            NONE: PLAIN,
            "full recompute": FULL,
            "as on the GPU": mix(size, link),
            "25 GB/s": mix(size, 25 * GB),
        }

    with computing_beside_copies() as threads:
        link, rounds = in_paced_turns(size, GPU_SHARE, manners_on, settings)
        ours, theirs = peak(size, mix(size, link.bytes_a_s)), peak(size, FULL)
    details = {
        "peak on that link": f"{ours.nbytes / MIB:.1f} MiB; full recompute: {theirs.nbytes / MIB:.1f} MiB",
        "peak over that of full recompute": f"{ours.nbytes / theirs.nbytes:.3f}",
        **_computing(size, link, threads),
        "swapped": f"all that backward uses of the first {size.layers - 1} layers, but what is recomputed",
        "recomputed": "the feed-forward's norm, SiLU and product; the copy of attention's output",
        **rounds.details("full recompute"),
        "losses under the meter": equal_losses(ours.losses, theirs.losses),
    }
    if ours.nbytes > 1.01 * theirs.nbytes and settings.scale >= 1:
        raise AssertionError(f"the peaks are not equal: {ours.nbytes} B, full recompute {theirs.nbytes} B")
    what = (
        f"step of {size}, selective recompute and swap with a link as in swap-step, over that with PyTorch's "
        "checkpoint around every layer, which has the higher peak"
    )
    reached = rounds.times("as on the GPU", "full recompute").median
    return Figure("swap-and-recompute", what, reached, "x its time", 0.9, 0.8, Better.LOWER, details)


def _computing(size: Size, link: Link, threads: int) -> dict[str, str]:
    """Say what computes, and how slow the link is beside it."""
    return {
        "computing": f"{threads} torch threads; one core is left to what copies",
        "the link, as slow beside computing as on the GPU": (
            f"{link.bytes_a_s / 1e6:.0f} MB/s: {size.marked_bytes / 1e6:.0f} MB take {link.share:.2f} of a "
            f"step in these rounds; wished {GPU_SHARE:.2f}"
        ),
    }


# ---------------------------------------------------------------------- PyTorch's own


def swap_save_on_cpu(settings: Settings) -> Figure:
    """Train on a GPU, in turns with PyTorch's own hooks that save every tensor in pinned memory.

    Raises:
        UnmeasurableError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise UnmeasurableError("PyTorch finds no CUDA device here; an emulated one has no pinned memory")
    size = Size.of_a_gpu(settings.scale)
    manners = {
        NONE: Manner(device="cuda"),
        "save_on_cpu": Manner(device="cuda", around=lambda _: save_on_cpu(pin_memory=True)),
        "save_on_cpu, no parameters": Manner(device="cuda", around=saving_activations),
        "swap": Manner(device="cuda", swap=whole_layers(40)),
    }
    torch.use_deterministic_algorithms(mode=True)  # else plain PyTorch's own losses differ
    rounds = in_turns(size, manners, settings)
    times = rounds.times("swap", "save_on_cpu, no parameters")
    details = {
        "swap, times save_on_cpu": str(rounds.times("swap", "save_on_cpu")),
        "swap, times save_on_cpu without parameters": str(times),
        **rounds.details(),
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
